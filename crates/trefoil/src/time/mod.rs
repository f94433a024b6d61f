//! Time: sleeping, timers, tickers, timeouts. Names as in Go's `time`, types as in std's.

mod pool;
mod slot;
mod timer;

pub use timer::{Ticker, Timer, after, after_func};

use crate::chan::{RecvTimeoutError, bounded};
use crate::sched::reason::WaitReason;
use crate::sched::wait;
use crate::sys::clock::{self, LATEST, Nanos};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
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

/// Parks the goroutine, or blocks the plain thread, until `when`; a sleep without an end (`poll` without descriptors, say)
/// until [`LATEST`]: a signal may be what the program waits for.
pub(crate) fn sleep_until_nanos(when: Nanos) {
    // Nobody else knows this wait: only its deadline ends it.
    wait::wait(WaitReason::Sleep, when.min(LATEST), |_| true);
}

/// Runs `f` in a goroutine of its own and waits for it, but not longer than `d`.
///
/// # Errors
/// [`TimedOut`], if `f` takes longer. It is not stopped: its goroutine goes on, and its value is dropped.
///
/// # Panics
/// With `f`'s panic, if it panics in time.
///
/// ```
/// use std::time::Duration;
/// use trefoil::time::{sleep, timeout};
///
/// trefoil::run(|| {
///     assert_eq!(timeout(Duration::from_secs(60), || 6 * 7), Ok(42));
///     assert!(timeout(Duration::from_millis(1), || sleep(Duration::from_secs(60))).is_err());
/// });
/// ```
#[track_caller]
pub fn timeout<F, T>(d: Duration, f: F) -> Result<T, TimedOut>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    let (sender, receiver) = bounded(1);
    crate::go(move || {
        let _ = sender.send(catch_unwind(AssertUnwindSafe(f)));
    });
    match receiver.recv_timeout(d) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(payload)) => resume_unwind(payload),
        Err(RecvTimeoutError::Timeout | RecvTimeoutError::Closed) => Err(TimedOut(())),
    }
}

/// [`timeout`] did not wait any longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedOut(());

impl fmt::Display for TimedOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("timed out")
    }
}

impl std::error::Error for TimedOut {}
