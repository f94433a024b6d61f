//! `Sleep` and `Timeout`: waiting for a time in async code.
//!
//! A [`Sleep`] has a timer slot from its first poll that returns `Pending` to its drop. The slot
//! wakes the task that polled last. The slots are reused, so a sleep does not allocate.

use super::pool;
use super::slot::TimerSlot;
use crate::runtime::task_waiter;
use crate::sched::task;
use crate::sched::task::waker::TaskWaiter;
use crate::sched::wait::reason::WaitReason;
use crate::sys::clock::{self, Nanos};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

/// Later than any program runs, and still an `Instant`: about 30 years.
const FAR_FUTURE: Duration = Duration::from_secs(86_400 * 365 * 30);

/// Returns the time after `d` from now. A duration that is too long for an [`Instant`] ends in 30
/// years.
fn after(d: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(d).unwrap_or(now + FAR_FUTURE)
}

/// Returns a future that is ready after at least `d`.
///
/// It is [`sleep`](super::sleep) for async code: the task waits, and no stack is kept for it. The
/// time counts from this call, not from the first poll. The future works in any executor; the
/// timers are those of the caller's runtime, or of the default runtime on a plain thread.
///
/// # Cancel
/// Dropping the future ends the sleep. Nothing is left behind.
///
/// # Examples
/// ```
/// use std::time::{Duration, Instant};
/// use trefoil::time::sleep_async;
///
/// trefoil::run(|| {
///     let start = Instant::now();
///     trefoil::task::spawn(sleep_async(Duration::from_millis(5))).join().unwrap();
///     assert!(start.elapsed() >= Duration::from_millis(5));
/// });
/// ```
pub fn sleep_async(d: Duration) -> Sleep {
    sleep_until_async(after(d))
}

/// Returns a future that is ready at `deadline`, or at once if that has passed.
///
/// # Cancel
/// Dropping the future ends the sleep. Nothing is left behind.
///
/// # Examples
/// ```
/// use std::time::{Duration, Instant};
/// use trefoil::time::sleep_until_async;
///
/// trefoil::run(|| {
///     trefoil::block_on(async {
///         let mut next = Instant::now();
///         for _ in 0..3 {
///             next += Duration::from_millis(1);
///             sleep_until_async(next).await;
///             assert!(Instant::now() >= next);
///         }
///     });
/// });
/// ```
pub fn sleep_until_async(deadline: Instant) -> Sleep {
    Sleep { deadline, when: clock::at(deadline), slot: None, waiter: task_waiter() }
}

/// A future that is ready at its deadline. [`sleep_async`] and [`sleep_until_async`] create it.
///
/// After it was ready it stays ready, until [`reset`](Self::reset) gives it a later deadline. A
/// loop that sleeps often may reset one `Sleep` instead of creating another.
///
/// # Drop
/// Dropping it ends the sleep.
///
/// # Examples
/// ```
/// use std::pin::Pin;
/// use std::time::{Duration, Instant};
/// use trefoil::time::sleep_async;
///
/// trefoil::run(|| {
///     trefoil::block_on(async {
///         let mut sleep = sleep_async(Duration::from_millis(1));
///         (&mut sleep).await;
///         assert!(sleep.is_elapsed());
///
///         let next = Instant::now() + Duration::from_millis(1);
///         Pin::new(&mut sleep).reset(next);
///         assert_eq!(sleep.deadline(), next);
///         sleep.await;
///         assert!(Instant::now() >= next);
///     });
/// });
/// ```
#[must_use = "a future does nothing unless it is awaited"]
pub struct Sleep {
    deadline: Instant,
    /// `deadline` on the runtime's clock, or a moment later.
    when: Nanos,
    /// Set for `when` and for the word of `waiter`. None before the first poll that has to wait.
    slot: Option<&'static TimerSlot>,
    waiter: TaskWaiter,
}

impl Sleep {
    /// As [`sleep_until_async`], on the runtime's clock.
    pub(crate) fn at(when: Nanos) -> Sleep {
        let left = Duration::from_nanos(when.saturating_sub(clock::now()));
        Sleep { deadline: after(left), when, slot: None, waiter: task_waiter() }
    }

    /// Returns when the sleep ends, on the runtime's clock.
    pub(crate) fn when(&self) -> Nanos {
        self.when
    }

    /// Returns when the sleep ends.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Returns whether the deadline has passed.
    pub fn is_elapsed(&self) -> bool {
        clock::now() >= self.when
    }

    /// Gives the sleep another deadline, earlier or later. A task that awaits it is woken then, and
    /// not at the old deadline.
    ///
    /// The pinned reference is for code that was written for other runtimes: this type is
    /// [`Unpin`].
    pub fn reset(self: Pin<&mut Self>, deadline: Instant) {
        let this = self.get_mut();
        (this.deadline, this.when) = (deadline, clock::at(deadline));
        if let Some(slot) = this.slot {
            slot.set_wake(this.waiter.word(), this.when);
        }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.is_elapsed() {
            return Poll::Ready(());
        }
        let this = self.get_mut();
        let before = this.waiter.word();
        let word = this.waiter.set(context.waker());
        if this.slot.is_none() || word != before {
            this.slot.get_or_insert_with(pool::take).set_wake(word, this.when);
        }
        task::note_reason(WaitReason::Sleep);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            slot.retire();
        }
    }
}

impl fmt::Debug for Sleep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sleep").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

/// Awaits `future` for at most `d`.
///
/// It is [`timeout`](super::timeout) for async code. Unlike there, what took too long is not left
/// running: the future is dropped with the [`Timeout`]. The future is polled before the time is
/// compared, so a future that is ready at once always succeeds.
///
/// # Errors
/// The result is [`Elapsed`] if the future is not ready in time.
///
/// # Cancel
/// Dropping the `Timeout` drops the future.
///
/// # Examples
/// ```
/// use std::future::pending;
/// use std::time::Duration;
/// use trefoil::time::timeout_async;
///
/// trefoil::run(|| {
///     trefoil::block_on(async {
///         assert_eq!(timeout_async(Duration::from_secs(60), async { 6 * 7 }).await, Ok(42));
///         assert!(timeout_async(Duration::from_millis(1), pending::<()>()).await.is_err());
///     });
/// });
/// ```
pub fn timeout_async<F: IntoFuture>(d: Duration, future: F) -> Timeout<F::IntoFuture> {
    timeout_at_async(after(d), future)
}

/// Awaits `future` until `deadline`, as [`timeout_async`] does.
///
/// # Errors
/// The result is [`Elapsed`] if the future is not ready at the deadline.
///
/// # Cancel
/// Dropping the `Timeout` drops the future.
///
/// # Examples
/// ```
/// use std::future::pending;
/// use std::time::{Duration, Instant};
/// use trefoil::time::timeout_at_async;
///
/// trefoil::run(|| {
///     let deadline = Instant::now() + Duration::from_millis(1);
///     let late = trefoil::block_on(timeout_at_async(deadline, pending::<()>()));
///     assert_eq!(late.unwrap_err().to_string(), "the deadline has elapsed");
/// });
/// ```
pub fn timeout_at_async<F: IntoFuture>(deadline: Instant, future: F) -> Timeout<F::IntoFuture> {
    Timeout { future: future.into_future(), sleep: sleep_until_async(deadline) }
}

/// A future with a time limit. [`timeout_async`] and [`timeout_at_async`] create it.
///
/// # Examples
/// ```
/// use std::future::ready;
/// use std::time::Duration;
/// use trefoil::time::{Timeout, timeout_async};
///
/// let limited: Timeout<_> = timeout_async(Duration::from_secs(1), ready(42));
/// assert_eq!(trefoil::block_on(limited), Ok(42));
/// ```
#[must_use = "a future does nothing unless it is awaited"]
#[derive(Debug)]
pub struct Timeout<F> {
    /// Pinned when the `Timeout` is.
    future: F,
    sleep: Sleep,
}

impl<F> Timeout<F> {
    /// Returns the future.
    pub fn get_ref(&self) -> &F {
        &self.future
    }

    /// Returns the future.
    pub fn get_mut(&mut self) -> &mut F {
        &mut self.future
    }

    /// Returns the future without its limit.
    pub fn into_inner(self) -> F {
        self.future
    }
}

impl<F: Future> Future for Timeout<F> {
    type Output = Result<F::Output, Elapsed>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // SAFETY: `future` is moved only by `into_inner`, which needs an unpinned `Timeout`, and
        // `Timeout` has no `Drop` and is `Unpin` only if `F` is. `sleep` is `Unpin`.
        let (future, sleep) = unsafe {
            let this = self.get_unchecked_mut();
            (Pin::new_unchecked(&mut this.future), &mut this.sleep)
        };
        if let Poll::Ready(value) = future.poll(context) {
            return Poll::Ready(Ok(value));
        }
        Pin::new(sleep).poll(context).map(|()| Err(Elapsed(())))
    }
}

/// The error of [`timeout_async`]: the future was not ready in time.
///
/// # Examples
/// ```
/// use std::future::pending;
/// use std::time::Duration;
/// use trefoil::time::{Elapsed, timeout_async};
///
/// trefoil::run(|| {
///     let late: Result<(), Elapsed> = trefoil::block_on(timeout_async(Duration::ZERO, pending()));
///     let error = std::io::Error::from(late.unwrap_err());
///     assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
/// });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elapsed(());

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the deadline has elapsed")
    }
}

impl std::error::Error for Elapsed {}

impl From<Elapsed> for std::io::Error {
    fn from(elapsed: Elapsed) -> std::io::Error {
        std::io::Error::new(std::io::ErrorKind::TimedOut, elapsed)
    }
}
