//! Sleeping, ticking and waking: how late. And calls that block.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bench_common::clock::{
    BurstSleep, CpuShare, Hogs, Tickers, Ticks, burst_report, short_time, sleep_time,
};
use bench_common::{Args, Meter, Report, cpu_time, size};
use tokio::sync::mpsc;
use tokio::task::{spawn, spawn_blocking};
use tokio::time::{interval_at, sleep, sleep_until};

pub async fn sleep_1000(args: &Args) -> Report {
    sleepers(args.number("n", size::SLEEPERS), size::SLEEPS_EACH, sleep_time).await
}

pub async fn sleep_100k(args: &Args) -> Report {
    let time = |i, k| size::SLEEP_BASE + sleep_time(i, k);
    sleepers(args.number("n", size::SLEEPERS_MANY), 1, time).await
}

pub async fn sleep_burst(args: &Args) -> Report {
    let sleeper = |i| {
        let mut burst = BurstSleep::spawned(i);
        spawn(async move {
            sleep(burst.begin()).await;
            burst.woke()
        })
    };
    let n = args.number("n", size::SLEEPERS_MANY);
    let handles: Vec<_> = (0..n).map(sleeper).collect();
    let mut late = Vec::with_capacity(n);
    for handle in handles {
        late.push(handle.await.unwrap());
    }
    burst_report(&late)
}

pub async fn sleep_short(args: &Args) -> Report {
    sleepers(args.number("n", size::SLEEPERS), size::SHORT_SLEEPS_EACH, short_time).await
}

async fn sleepers(n: usize, each: usize, time: fn(usize, usize) -> Duration) -> Report {
    let cpu = cpu_time();
    let sleeper = |i| {
        spawn(async move {
            let mut late = Vec::with_capacity(each);
            for k in 0..each {
                let duration = time(i, k);
                let start = Instant::now();
                sleep(duration).await;
                late.push(start.elapsed() - duration);
            }
            late
        })
    };
    let handles: Vec<_> = (0..n).map(sleeper).collect();
    let mut late = Vec::with_capacity(n * each);
    for handle in handles {
        late.extend(handle.await.unwrap());
    }
    Report::new().with("cpu_s", (cpu_time() - cpu).as_secs_f64()).with_lateness(late)
}

pub async fn tickers(args: &Args) -> Report {
    let tickers = Tickers::new(args);
    let ticking = |i| {
        spawn(async move {
            sleep_until(tickers.phase(i).into()).await;
            let mut log = tickers.log();
            let first = Instant::now() + size::TICKER_PERIOD;
            let mut interval = interval_at(first.into(), size::TICKER_PERIOD);
            while log.next().is_some() {
                interval.tick().await;
                log.woke();
            }
            log.late()
        })
    };
    let handles: Vec<_> = (0..args.number("n", size::TICKERS)).map(ticking).collect();
    let (begin, end) = tickers.counted();
    sleep_until(begin.into()).await;
    let share = CpuShare::new();
    sleep_until(end.into()).await;
    let report = share.report();
    let mut late = Vec::new();
    for handle in handles {
        late.extend(handle.await.unwrap());
    }
    report.with_lateness(late)
}

/// The ticker is a task as the hogs are: it waits until two of them have ended.
pub async fn ticker_hogs(args: &Args) -> Report {
    let hogs: Arc<Hogs> = Arc::default();
    let start = Instant::now();
    let budget = args.time(size::HOGS_TIME);
    hogs.stop_after(budget);
    let handles: [_; size::HOGS] = std::array::from_fn(|hog| {
        let hogs = hogs.clone();
        spawn(async move { hogs.compute(hog) })
    });
    let mut ticks = Ticks::new();
    while start.elapsed() < budget {
        sleep_until(ticks.next().into()).await;
        ticks.woke();
    }
    let took = start.elapsed();
    for handle in handles {
        handle.await.unwrap();
    }
    hogs.report(took).with_lateness(ticks.late())
}

/// A plain thread that was asleep in the kernel sends, while nothing else runs.
pub async fn wake_idle(args: &Args) -> Report {
    let wakes = args.time(size::WAKES_TIME).div_duration_f64(size::IDLE) as usize;
    let (send, mut receive) = mpsc::channel::<Instant>(1);
    let thread = std::thread::spawn(move || {
        for _ in 0..wakes {
            std::thread::sleep(size::IDLE);
            send.blocking_send(Instant::now()).unwrap();
        }
    });
    let mut late = Vec::with_capacity(wakes);
    while let Some(sent) = receive.recv().await {
        late.push(sent.elapsed());
    }
    thread.join().unwrap();
    Report::new().with_lateness(late)
}

/// What blocks goes to tokio's pool of threads for that.
pub async fn block_std(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::BLOCKERS * size::BLOCKS_EACH);
    while meter.another_round() {
        let handles: [_; size::BLOCKERS] = std::array::from_fn(|_| {
            spawn(async {
                for _ in 0..size::BLOCKS_EACH {
                    spawn_blocking(|| std::thread::sleep(size::BLOCK)).await.unwrap();
                }
            })
        });
        for handle in handles {
            handle.await.unwrap();
        }
    }
    meter.report()
}
