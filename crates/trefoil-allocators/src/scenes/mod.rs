//! The scenes that each test target runs, each in a process of its own.

mod lateness;
mod memory;
mod runtimes;
mod time;
mod torture;

use crate::Target;
use std::time::Duration;

/// What one process of a test target does.
#[derive(Clone, Copy, Debug)]
pub struct Scene {
    /// The name in reports and filters.
    pub name: &'static str,
    /// The time slice of goroutines in microseconds, if not the default.
    pub(crate) slice_micros: Option<u32>,
    /// How long the process may take before it counts as hung.
    pub(crate) limit: Duration,
    pub(crate) run: fn(&Target),
}

/// Every scene, in the order in which they run.
///
/// The torture with few goroutines has very short time slices, so that preemption hits every
/// instruction of the allocator; with many goroutines it has the default slices.
pub(crate) const SCENES: &[Scene] = &[
    torture("torture-p1-g32", Some(50), |_| torture::run(1, 32, time_each())),
    torture("torture-p2-g32", Some(50), |_| torture::run(2, 32, time_each())),
    torture("torture-p8-g32", Some(50), |_| torture::run(8, 32, time_each())),
    torture("torture-p1-g2000", None, |_| torture::run(1, 2000, time_each())),
    torture("torture-p2-g2000", None, |_| torture::run(2, 2000, time_each())),
    torture("torture-p8-g2000", None, |_| torture::run(8, 2000, time_each())),
    scene("runtimes-end-p1", 60, |_| runtimes::end_in_the_middle(1)),
    scene("runtimes-end-p2", 60, |_| runtimes::end_in_the_middle(2)),
    scene("runtimes-end-p8", 60, |_| runtimes::end_in_the_middle(8)),
    scene("memory", 90, |target| memory::per_goroutine(&target.limits)),
    scene("time", 60, |target| time::per_allocation(&target.limits)),
];

const fn scene(name: &'static str, limit_secs: u64, run: fn(&Target)) -> Scene {
    Scene { name, slice_micros: None, limit: Duration::from_secs(limit_secs), run }
}

const fn torture(name: &'static str, slice_micros: Option<u32>, run: fn(&Target)) -> Scene {
    Scene { name, slice_micros, limit: Duration::from_secs(60), run }
}

/// Returns how long each torture lasts.
pub(crate) fn time_each() -> Duration {
    const TORTURES: u32 = 6;
    let seconds = match std::env::var("TREFOIL_ALLOC_SECS") {
        Ok(text) => text.parse().expect("TREFOIL_ALLOC_SECS is a number"),
        Err(_) => 9,
    };
    Duration::from_secs(seconds) / TORTURES
}

/// Prints a line of the report.
macro_rules! report {
    ($($text:tt)*) => { println!("    {}", format_args!($($text)*)) };
}
use report;
