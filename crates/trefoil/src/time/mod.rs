//! Time: sleeping, timers, tickers, timeouts. Names as in Go's `time`, types as in std's.

use crate::sched::reason::WaitReason;
use crate::sched::wait;
use crate::sys::clock::{self, Nanos};
use std::time::{Duration, Instant};

/// Parks the goroutine (on a plain thread, the thread) for at least `d`. Zero returns at once;
/// [`Duration::MAX`] never returns.
///
/// ```
/// use std::time::{Duration, Instant};
/// trefoil::run(|| {
///     let start = Instant::now();
///     trefoil::time::sleep(Duration::from_millis(5));
///     assert!(start.elapsed() >= Duration::from_millis(5));
/// });
/// ```
pub fn sleep(d: Duration) {
    if !d.is_zero() {
        sleep_until_nanos(clock::after(d));
    }
}

/// Parks the goroutine (on a plain thread, the thread) until `deadline`. A past one returns at once.
pub fn sleep_until(deadline: Instant) {
    if deadline > Instant::now() {
        sleep_until_nanos(clock::at(deadline));
    }
}

fn sleep_until_nanos(when: Nanos) {
    // Nobody else knows this wait: only its deadline ends it.
    wait::wait(WaitReason::Sleep, when, |_| true);
}
