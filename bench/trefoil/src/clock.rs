//! Sleeping, ticking and waking: how late.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bench_common::clock::{Hogs, Ticks, sleep_time};
use bench_common::{Args, Report, cpu_time, size};
use trefoil::chan::bounded;
use trefoil::go;
use trefoil::time::{sleep, sleep_until};

pub fn sleep_1000(args: &Args) -> Report {
    sleepers(args.number("n", size::SLEEPERS), size::SLEEPS_EACH, Duration::ZERO)
}

pub fn sleep_100k(args: &Args) -> Report {
    sleepers(args.number("n", size::SLEEPERS_MANY), 1, size::SLEEP_BASE)
}

fn sleepers(n: usize, each: usize, base: Duration) -> Report {
    let cpu = cpu_time();
    let sleeper = |i| {
        go(move || {
            let mut late = Vec::with_capacity(each);
            for k in 0..each {
                let duration = base + sleep_time(i, k);
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
