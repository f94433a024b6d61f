//! Sleeping, ticking and waking: how late.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bench_common::clock::{
    BurstSleep, CpuShare, Hogs, Tickers, Ticks, burst_report, short_time, sleep_time,
};
use bench_common::{Args, Report, cpu_time, size};
use trefoil::chan::bounded;
use trefoil::go;
use trefoil::time::{Ticker, sleep, sleep_until};

pub fn sleep_1000(args: &Args) -> Report {
    sleepers(args.number("n", size::SLEEPERS), size::SLEEPS_EACH, sleep_time)
}

pub fn sleep_100k(args: &Args) -> Report {
    let time = |i, k| size::SLEEP_BASE + sleep_time(i, k);
    sleepers(args.number("n", size::SLEEPERS_MANY), 1, time)
}

pub fn sleep_burst(args: &Args) -> Report {
    let sleeper = |i| {
        let mut burst = BurstSleep::spawned(i);
        go(move || {
            sleep(burst.begin());
            burst.woke()
        })
    };
    let n = args.number("n", size::SLEEPERS_MANY);
    let handles: Vec<_> = (0..n).map(sleeper).collect();
    let late: Vec<_> = handles.into_iter().map(|handle| handle.join().unwrap()).collect();
    burst_report(&late)
}

pub fn sleep_short(args: &Args) -> Report {
    sleepers(args.number("n", size::SLEEPERS), size::SHORT_SLEEPS_EACH, short_time)
}

fn sleepers(n: usize, each: usize, time: fn(usize, usize) -> Duration) -> Report {
    let cpu = cpu_time();
    let sleeper = |i| {
        go(move || {
            let mut late = Vec::with_capacity(each);
            for k in 0..each {
                let duration = time(i, k);
                let start = Instant::now();
                sleep(duration);
                late.push(start.elapsed() - duration);
            }
            late
        })
    };
    let handles: Vec<_> = (0..n).map(sleeper).collect();
    let late = handles.into_iter().flat_map(|handle| handle.join().unwrap()).collect();
    Report::new().with("cpu_s", (cpu_time() - cpu).as_secs_f64()).with_lateness(late)
}

pub fn tickers(args: &Args) -> Report {
    let tickers = Tickers::new(args);
    let ticking = |i| {
        go(move || {
            sleep_until(tickers.phase(i));
            let mut log = tickers.log();
            let ticker = Ticker::new(size::TICKER_PERIOD);
            while log.next().is_some() {
                ticker.chan().recv().unwrap();
                log.woke();
            }
            log.late()
        })
    };
    let handles: Vec<_> = (0..args.number("n", size::TICKERS)).map(ticking).collect();
    let (begin, end) = tickers.counted();
    sleep_until(begin);
    let share = CpuShare::new();
    sleep_until(end);
    let report = share.report();
    report.with_lateness(handles.into_iter().flat_map(|handle| handle.join().unwrap()).collect())
}

/// Wakes every millisecond until told to stop; how late each time.
pub fn ticking(stop: impl Fn() -> bool) -> Vec<Duration> {
    let mut ticks = Ticks::new();
    while !stop() {
        sleep_until(ticks.next());
        ticks.woke();
    }
    ticks.late()
}

pub fn ticker_hogs(args: &Args) -> Report {
    let hogs: Arc<Hogs> = Arc::default();
    let handles: [_; size::HOGS] = std::array::from_fn(|hog| {
        let hogs = hogs.clone();
        go(move || hogs.compute(hog))
    });
    let start = Instant::now();
    let budget = args.time(size::HOGS_TIME);
    let late = ticking(|| start.elapsed() >= budget);
    hogs.stop();
    let report = hogs.report(start.elapsed());
    for handle in handles {
        handle.join().unwrap();
    }
    report.with_lateness(late)
}

/// A plain thread that was asleep in the kernel sends, while nothing else runs.
pub fn wake_idle(args: &Args) -> Report {
    let wakes = args.time(size::WAKES_TIME).div_duration_f64(size::IDLE) as usize;
    let (send, receive) = bounded(1);
    let thread = std::thread::spawn(move || {
        for _ in 0..wakes {
            std::thread::sleep(size::IDLE);
            send.send(Instant::now()).unwrap();
        }
    });
    let late = receive.into_iter().map(|sent: Instant| sent.elapsed()).collect();
    thread.join().unwrap();
    Report::new().with_lateness(late)
}
