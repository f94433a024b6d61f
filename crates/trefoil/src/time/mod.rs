//! Sleeping, timers, tickers and time limits: the names of Go's `time`, the types of [`std::time`].
//!
//! ```
//! use std::time::Duration;
//! use trefoil::select;
//! use trefoil::time::{Ticker, after};
//!
//! trefoil::run(|| {
//!     let ticker = Ticker::new(Duration::from_millis(1));
//!     let end = after(Duration::from_millis(5));
//!     let mut ticks = 0;
//!     loop {
//!         select! {
//!             recv(ticker.chan()) -> _ => ticks += 1,
//!             recv(end) -> _ => break,
//!         }
//!     }
//!     println!("{ticks} ticks");
//! });
//! ```
//!
//! # What is in this module
//! | item | purpose |
//! |---|---|
//! | [`sleep`], [`sleep_until`] | park the goroutine for a time |
//! | [`timeout`], [`TimedOut`] | limit how long the caller waits for a closure |
//! | [`after`], [`at`] | return a channel that receives the time once |
//! | [`tick`] | returns a channel that receives the time again and again |
//! | [`after_func`] | calls a function later, in a goroutine of its own |
//! | [`Timer`] | sends the time or calls a function; can be stopped and reset |
//! | [`Ticker`] | sends the time again and again; can be stopped and reset |
//! | [`sleep_async`], [`sleep_until_async`], [`Sleep`] | a future that is ready later; can be reset |
//! | [`timeout_async`], [`timeout_at_async`], [`Timeout`] | limit how long a future is awaited |
//! | [`interval`], [`interval_at`], [`Interval`] | ticks that a task awaits |
//!
//! Most operations that wait have a time limit of their own, for example
//! [`Receiver::recv_timeout`](crate::chan::Receiver::recv_timeout) or the `after` arm of
//! [`select!`](crate::select). A deadline for a whole request is a
//! [`Context`](crate::context::Context). All functions here also work on a plain thread; timers set
//! there run in the default runtime.

mod interval;
mod pool;
mod sleep;
mod slot;
mod timer;

pub use interval::{Interval, MissedTickBehavior, interval, interval_at};
pub use sleep::timeout_at_async;
pub use sleep::{Elapsed, Sleep, Timeout, sleep_async, sleep_until_async, timeout_async};
pub use timer::{Ticker, Timer, after, after_func, at, tick};

use crate::chan::{RecvTimeoutError, bounded};
use crate::goroutine::go;
use crate::sched::calls;
use crate::sys::clock;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

/// Parks the goroutine for at least `d`. On a plain thread it blocks the thread.
///
/// A duration of zero returns at once. [`Duration::MAX`] never returns.
///
/// # Cancel
/// The sleep cannot be ended early. For that use a [`select!`](crate::select) with an `after` arm.
///
/// # Examples
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
        calls::sleep_until(clock::after(d));
    }
}

/// Parks the goroutine until `deadline`. On a plain thread it blocks the thread.
///
/// Returns at once if the deadline has passed. Use it for steps at fixed times: the time that a
/// step takes does not delay the next one.
///
/// # Cancel
/// The sleep cannot be ended early.
///
/// # Examples
/// ```
/// use std::time::{Duration, Instant};
/// use trefoil::time::sleep_until;
/// trefoil::run(|| {
///     let mut next = Instant::now();
///     for _ in 0..3 {
///         next += Duration::from_millis(1);
///         sleep_until(next);
///         assert!(Instant::now() >= next);
///     }
/// });
/// ```
pub fn sleep_until(deadline: Instant) {
    if deadline > Instant::now() {
        calls::sleep_until(clock::at(deadline));
    }
}

/// Runs `f` in a goroutine of its own, and waits for its value at most for `d`.
///
/// # Errors
/// Returns [`TimedOut`] if `f` takes longer. `f` is not stopped: its goroutine continues, and its
/// value is dropped.
///
/// # Panics
/// Panics with the panic of `f` if it panics in time, or if no memory is left for another
/// goroutine.
///
/// # Cancel
/// To stop `f` after the time limit, give it a [`Context`](crate::context::Context).
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use trefoil::chan::bounded;
/// use trefoil::time::timeout;
///
/// trefoil::run(|| {
///     assert_eq!(timeout(Duration::from_secs(60), || 6 * 7), Ok(42));
///
///     let (_tx, rx) = bounded::<i32>(0);
///     assert!(timeout(Duration::from_millis(1), move || rx.recv()).is_err());
/// });
/// ```
#[track_caller]
pub fn timeout<F, T>(d: Duration, f: F) -> Result<T, TimedOut>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    let (sender, receiver) = bounded(1);
    go(move || {
        let _ = sender.send(catch_unwind(AssertUnwindSafe(f)));
    });
    match receiver.recv_timeout(d) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(payload)) => resume_unwind(payload),
        Err(RecvTimeoutError::Timeout | RecvTimeoutError::Closed) => Err(TimedOut(())),
    }
}

/// The error of [`timeout`]: the closure took longer than the limit.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use trefoil::time::{sleep, timeout};
/// trefoil::run(|| {
///     let slow = timeout(Duration::ZERO, || sleep(Duration::from_millis(1)));
///     assert_eq!(slow.unwrap_err().to_string(), "timed out");
/// });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedOut(());

impl fmt::Display for TimedOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("timed out")
    }
}

impl std::error::Error for TimedOut {}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn reset_of_an_after_func_timer_that_has_fired_does_not_set_it() {
        let (tx, rx) = bounded(1);
        let timer = after_func(Duration::from_millis(1), move || tx.send(()).unwrap());
        rx.recv().unwrap();
        assert!(!timer.reset(LONG), "it was not set any more");
        assert!(!timer.reset(LONG), "the first reset did not set it");
        assert!(!timer.stop(), "no call was prevented");
    }

    #[test]
    fn reset_of_an_after_func_timer_that_was_stopped_sets_it() {
        let (tx, rx) = bounded(1);
        let timer = after_func(LONG, move || tx.send(()).unwrap());
        assert!(timer.stop());
        assert!(!timer.reset(Duration::from_millis(1)));
        rx.recv().unwrap();
    }
}
