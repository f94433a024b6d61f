//! Ticks, and hogs beside them.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::{Report, chunk, size};

/// The `k`-th sleep of the `i`-th sleeper: 1 to 100 ms.
pub fn sleep_time(i: usize, k: usize) -> Duration {
    Duration::from_micros(1_000 + ((i * 7_919 + k * 104_729) % 99_000) as u64)
}

/// One tick per millisecond, and how late each was. Missed ticks are left out, as by a ticker.
pub struct Ticks {
    next: Instant,
    late: Vec<Duration>,
}

impl Ticks {
    #[expect(clippy::new_without_default, reason = "it starts a clock")]
    pub fn new() -> Ticks {
        Ticks { next: Instant::now() + size::TICK, late: Vec::new() }
    }

    /// Returns when to wake.
    pub fn next(&self) -> Instant {
        self.next
    }

    /// Records a wake-up.
    pub fn woke(&mut self) {
        self.late.push(self.next.elapsed());
        self.next += size::TICK;
        let now = Instant::now();
        if self.next < now {
            self.next = now + size::TICK;
        }
    }

    pub fn late(self) -> Vec<Duration> {
        self.late
    }
}

/// A counter with a cache line of its own.
#[derive(Default)]
#[repr(align(64))]
struct Padded(AtomicU64);

/// Goroutines that only compute, and the work that each has done.
#[derive(Default)]
pub struct Hogs {
    stop: AtomicBool,
    work: [Padded; size::HOGS],
}

impl Hogs {
    /// Computes until all hogs are told to stop.
    pub fn compute(&self, hog: usize) {
        let mut x = hog as u64;
        while !self.stop.load(Ordering::Relaxed) {
            x = chunk(x);
            self.work[hog].0.fetch_add(1, Ordering::Relaxed);
        }
        black_box(x);
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// For runtimes that cannot preempt a hog: a goroutine that would stop it may never run, so a
    /// thread does.
    pub fn stop_after(self: &Arc<Hogs>, time: Duration) {
        let hogs = self.clone();
        std::thread::spawn(move || {
            std::thread::sleep(time);
            hogs.stop();
        });
    }

    /// The report of `ticker_hogs`: what the hogs got done in this time.
    pub fn report(&self, took: Duration) -> Report {
        let work = self.work.each_ref().map(|work| work.0.load(Ordering::Relaxed) as f64);
        let all: f64 = work.iter().sum();
        let least = work.into_iter().fold(f64::INFINITY, f64::min);
        Report::new()
            .with("least_percent", least / all * 100.0)
            .with("chunks_per_ms", all / took.as_secs_f64() / 1e3)
    }
}
