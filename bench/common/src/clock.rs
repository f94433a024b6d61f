//! Ticks, and hogs beside them.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::{Args, Report, chunk, cpu_time, random, size};

/// The `k`-th sleep of the `i`-th sleeper: 1 to 100 ms.
pub fn sleep_time(i: usize, k: usize) -> Duration {
    Duration::from_micros(1_000 + ((i * 7_919 + k * 104_729) % 99_000) as u64)
}

/// One goroutine of `sleep_burst`: made where it is spawned, then moved into it.
pub struct BurstSleep {
    duration: Duration,
    spawned: Instant,
    started: Instant,
}

/// How late it woke: measured from where it began to sleep, and from where it was spawned.
pub struct BurstLateness {
    from_sleep: Duration,
    from_spawn: Duration,
}

impl BurstSleep {
    /// The `i`-th one is spawned now, and will sleep for up to half a second.
    pub fn spawned(i: usize) -> BurstSleep {
        let spawned = Instant::now();
        BurstSleep { duration: part_of(size::BURST_SLEEP, i), spawned, started: spawned }
    }

    /// It begins to sleep; returns for how long.
    pub fn begin(&mut self) -> Duration {
        self.started = Instant::now();
        self.duration
    }

    pub fn woke(self) -> BurstLateness {
        let since = |start: Instant| start.elapsed() - self.duration;
        BurstLateness { from_sleep: since(self.started), from_spawn: since(self.spawned) }
    }
}

/// The report of `sleep_burst`.
pub fn burst_report(all: &[BurstLateness]) -> Report {
    let from_spawn = Report::new().with_lateness(all.iter().map(|one| one.from_spawn).collect());
    Report::new()
        .with_lateness(all.iter().map(|one| one.from_sleep).collect())
        .with("spawn_p50_ms", from_spawn.get("p50_us") / 1e3)
        .with("spawn_p99_ms", from_spawn.get("p99_us") / 1e3)
}

/// The `k`-th sleep of the `i`-th sleeper of `sleep_short`.
pub fn short_time(i: usize, k: usize) -> Duration {
    part_of(size::SHORT_SLEEP, i * size::SHORT_SLEEPS_EACH + k)
}

/// A random part of `whole`, in whole microseconds.
fn part_of(whole: Duration, i: usize) -> Duration {
    Duration::from_micros(random(i as u64) % whole.as_micros() as u64)
}

/// `tickers_1000`: when its ticks count.
#[derive(Clone, Copy)]
pub struct Tickers {
    start: Instant,
    begin: Instant,
    end: Instant,
}

impl Tickers {
    pub fn new(args: &Args) -> Tickers {
        let start = Instant::now();
        let begin = start + size::TICKERS_WARM_UP;
        Tickers { start, begin, end: begin + args.time(size::TICKERS_TIME) }
    }

    /// When the `i`-th goroutine makes its ticker: they are spread over a period.
    pub fn phase(&self, i: usize) -> Instant {
        self.start + size::TICKER_PERIOD + part_of(size::TICKER_PERIOD, i)
    }

    /// Returns the log of a ticker that is made now.
    pub fn log(&self) -> TickerLog {
        let next = Instant::now() + size::TICKER_PERIOD;
        TickerLog { tickers: *self, next, late: Vec::new() }
    }

    /// Since when, and until when, ticks and CPU time count.
    pub fn counted(&self) -> (Instant, Instant) {
        (self.begin, self.end)
    }
}

/// How late each tick of one ticker was.
pub struct TickerLog {
    tickers: Tickers,
    next: Instant,
    late: Vec<Duration>,
}

impl TickerLog {
    /// When the next tick is due; None after the last one.
    pub fn next(&self) -> Option<Instant> {
        (self.next < self.tickers.end).then_some(self.next)
    }

    /// Records a tick. Missed ticks are left out.
    pub fn woke(&mut self) {
        let late = self.next.elapsed();
        if self.next >= self.tickers.begin {
            self.late.push(late);
        }
        let periods = late.div_duration_f64(size::TICKER_PERIOD) as u32;
        self.next += size::TICKER_PERIOD * (periods + 1);
    }

    pub fn late(self) -> Vec<Duration> {
        self.late
    }
}

/// CPU time per minute of wall clock, from its making on.
pub struct CpuShare {
    wall: Instant,
    cpu: Duration,
}

impl CpuShare {
    #[expect(clippy::new_without_default, reason = "it starts a clock")]
    pub fn new() -> CpuShare {
        CpuShare { wall: Instant::now(), cpu: cpu_time() }
    }

    pub fn report(self) -> Report {
        let (wall, cpu) = (self.wall.elapsed(), cpu_time() - self.cpu);
        Report::new().with("cpu_s_per_min", cpu.as_secs_f64() / wall.as_secs_f64() * 60.0)
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_that_were_missed_are_left_out() {
        let now = Instant::now();
        let due = now - size::TICKER_PERIOD * 5 / 2;
        let tickers = Tickers { start: due, begin: due, end: now + Duration::from_secs(60) };
        let mut log = TickerLog { tickers, next: due, late: Vec::new() };
        log.woke();
        let late = log.late[0];
        assert!(late >= size::TICKER_PERIOD * 5 / 2);
        let next = log.next().unwrap() - due;
        assert!(next > late && next <= late + size::TICKER_PERIOD);
        assert_eq!(next.as_nanos() % size::TICKER_PERIOD.as_nanos(), 0);
    }

    #[test]
    fn ticks_before_the_measured_time_do_not_count() {
        let now = Instant::now();
        let begin = now + Duration::from_secs(60);
        let tickers = Tickers { start: now, begin, end: begin };
        let mut log = TickerLog { tickers, next: now, late: Vec::new() };
        log.woke();
        assert!(log.late().is_empty());
    }
}
