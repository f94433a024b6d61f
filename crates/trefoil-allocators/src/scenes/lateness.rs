//! How late a sleeper wakes up: a goroutine during the torture, and an OS thread for comparison,
//! which shows the delay of the machine.

use crate::block::Block;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

const SLEEP: Duration = Duration::from_millis(1);
/// Further samples are not recorded, because recording must not allocate.
const MAX_SAMPLES: usize = 1 << 16;

/// The lateness of each wake-up, sorted.
pub(crate) struct Lateness(Vec<Duration>);

impl Lateness {
    /// Sleeps for a millisecond again and again until `stop` is set. Works on a goroutine and on a
    /// plain thread.
    pub(crate) fn of_sleeper(stop: &AtomicBool) -> Lateness {
        Lateness::measure(stop, || ())
    }

    /// Like [`Lateness::of_sleeper`], but the sleeper allocates blocks of a few sizes after each
    /// sleep, which counts as lateness.
    pub(crate) fn of_allocating_sleeper(stop: &AtomicBool) -> Lateness {
        Lateness::measure(stop, || {
            let sizes = [16, 64, 512, 4096];
            drop(sizes.map(|size| Block::new(size, 8)));
        })
    }

    fn measure(stop: &AtomicBool, after_sleep: impl Fn()) -> Lateness {
        let mut late = Vec::with_capacity(MAX_SAMPLES);
        while !stop.load(Relaxed) {
            let due = Instant::now() + SLEEP;
            std::thread::sleep(SLEEP);
            after_sleep();
            if late.len() < MAX_SAMPLES {
                late.push(due.elapsed());
            }
        }
        late.sort_unstable();
        Lateness(late)
    }

    pub(crate) fn max(&self) -> Duration {
        self.percentile(100)
    }

    pub(crate) fn percentile(&self, percent: usize) -> Duration {
        let last = self.0.len().saturating_sub(1);
        self.0.get(last * percent / 100).copied().unwrap_or_default()
    }
}

impl fmt::Display for Lateness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (p50, p99) = (self.percentile(50), self.percentile(99));
        write!(f, "p50 {p50:.1?}, p99 {p99:.1?}, max {:.1?}", self.max())
    }
}

/// Returns how many times slower than on a quiet machine this process has run so far: 2 if its
/// threads waited for a CPU for as long as they ran. Waits because `procs` exceeds the number of
/// CPUs do not count.
pub(crate) fn slowdown(procs: usize) -> f64 {
    let (mut ran, mut waited) = (0.0, 0.0);
    let tasks = std::fs::read_dir("/proc/self/task").expect("the threads of this process");
    for task in tasks.filter_map(Result::ok) {
        let text = std::fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
        let mut nanos = text.split_whitespace().filter_map(|word| word.parse::<f64>().ok());
        ran += nanos.next().unwrap_or(0.0);
        waited += nanos.next().unwrap_or(0.0);
    }
    let own = (procs as f64 / trefoil::num_cpus() as f64).max(1.0);
    if ran > 0.0 { ((ran + waited) / ran / own).max(1.0) } else { 1.0 }
}
