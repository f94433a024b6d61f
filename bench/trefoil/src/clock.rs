//! Sleeping, ticking and waking: how late.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bench_common::{Args, Report, chunk, cpu_time, size, sleep_time};
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

/// Wakes every millisecond until told to stop; how late each time. What was missed is left out,
/// as a ticker does.
pub fn ticking(stop: impl Fn() -> bool) -> Vec<Duration> {
    let mut late = Vec::new();
    let mut next = Instant::now() + size::TICK;
    while !stop() {
        sleep_until(next);
        late.push(next.elapsed());
        next += size::TICK;
        let now = Instant::now();
        if next < now {
            next = now + size::TICK;
        }
    }
    late
}

/// A counter with a cache line of its own.
#[derive(Default)]
#[repr(align(64))]
struct Padded(AtomicU64);

pub fn ticker_hogs(args: &Args) -> Report {
    static STOP: AtomicBool = AtomicBool::new(false);
    let work: Arc<[Padded; size::HOGS]> = Arc::default();
    let hogs: [_; size::HOGS] = std::array::from_fn(|hog| {
        let work = work.clone();
        go(move || {
            let mut x = hog as u64;
            while !STOP.load(Ordering::Relaxed) {
                x = chunk(x);
                work[hog].0.fetch_add(1, Ordering::Relaxed);
            }
            x
        })
    });
    let start = Instant::now();
    let budget = args.time(size::HOGS_TIME);
    let late = ticking(|| start.elapsed() >= budget);
    STOP.store(true, Ordering::Relaxed);
    let took = start.elapsed();
    let work = work.each_ref().map(|work| work.0.load(Ordering::Relaxed) as f64);
    for hog in hogs {
        std::hint::black_box(hog.join().unwrap());
    }
    let all: f64 = work.iter().sum();
    let least = work.into_iter().fold(f64::INFINITY, f64::min);
    Report::new()
        .with("least_percent", least / all * 100.0)
        .with("chunks_per_ms", all / took.as_secs_f64() / 1e3)
        .with_lateness(late)
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
