//! Futures on goroutines: [`block_on`] and [`go_async`].
//!
//! A goroutine polls one future and parks while the future is pending. The waker makes the
//! goroutine runnable again. There is no reactor: a future that needs one (tokio's sockets and
//! timers) brings its own, and finds it in the goroutine's thread-locals as it would on a thread.
//!
//! # The waker's state
//! One word: `EMPTY`, `NOTIFIED`, or the parked goroutine or thread.
//!
//! | from | to | actor |
//! |---|---|---|
//! | any | `NOTIFIED` | a waker; it wakes the waiter that it found |
//! | `NOTIFIED` | `EMPTY` | the goroutine, before it polls |
//! | `EMPTY` | a waiter | the goroutine, when it parks |

use crate::goroutine::{go, yield_now};
use crate::join_handle::JoinHandle;
use crate::sched::Rt;
use crate::sched::wait;
use crate::sched::wait::reason::WaitReason;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// Not notified, and no waiter. A waiter is an address, so it differs from both constants.
const EMPTY: usize = 0;
const NOTIFIED: usize = usize::MAX;

struct FutureWaker(AtomicUsize);

impl Wake for FutureWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Release: the next poll sees what the waker did. Acquire: pairs with the store of the
        // waiter.
        let waiter = self.0.swap(NOTIFIED, Ordering::AcqRel);
        if waiter != EMPTY && waiter != NOTIFIED {
            let here = Rt::enter();
            wait::wake_here(here, waiter);
            wait::leave(here);
        }
    }
}

/// Runs a future to its end and returns its value.
///
/// The goroutine (or the plain thread) that calls it polls the future, and parks while the future
/// is pending. Use it to call async code from straight-line code; it may be called inside of
/// another `block_on`.
///
/// There is no reactor in it: a future that needs one brings its own. tokio's sockets and timers,
/// for example, need a tokio runtime that the goroutine has entered. The goroutine owns its
/// thread-locals, so it stays entered on whichever thread it runs:
/// ```ignore
/// let tokio = tokio::runtime::Runtime::new()?;
/// let _inside = tokio.enter();
/// trefoil::block_on(tokio::time::sleep(Duration::from_millis(5)));
/// ```
///
/// # Panics
/// Panics if the future panics.
///
/// # Examples
/// ```
/// use std::future::poll_fn;
/// use std::task::Poll;
///
/// let n = trefoil::run(|| trefoil::block_on(async { 6 * 7 }));
/// assert_eq!(n, 42);
///
/// // A future that another goroutine wakes.
/// trefoil::run(|| {
///     let mut polls = 0;
///     trefoil::block_on(poll_fn(|context| {
///         polls += 1;
///         if polls == 2 {
///             return Poll::Ready(());
///         }
///         let waker = context.waker().clone();
///         trefoil::go(move || waker.wake());
///         Poll::Pending
///     }));
///     assert_eq!(polls, 2);
/// });
/// ```
pub fn block_on<F: Future>(future: F) -> F::Output {
    let state = Arc::new(FutureWaker(AtomicUsize::new(EMPTY)));
    let waker = Waker::from(state.clone());
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return value;
        }
        let mut notified = false;
        wait::block(WaitReason::Future, |waiter| {
            // Release: pairs with the waker's swap. Acquire: a waker that was faster is seen.
            let order = (Ordering::AcqRel, Ordering::Acquire);
            notified = state.0.compare_exchange(EMPTY, waiter, order.0, order.1).is_err();
            !notified
        });
        if notified {
            // A future that wakes itself while it is polled asks to let other tasks run first.
            yield_now();
        }
        state.0.swap(EMPTY, Ordering::AcqRel);
    }
}

/// Starts a goroutine that runs a future to its end: [`go`] with [`block_on`].
///
/// Use it in place of tokio's `spawn`. The handle is the one of [`go`]: it is not a
/// future, and `join` parks the goroutine that calls it.
///
/// # Drop
/// Dropping the handle detaches the goroutine, which continues to run.
///
/// # Panics
/// Panics if there is no memory for another goroutine. [`JoinHandle::join`] returns a panic of the
/// future as an error.
///
/// # Examples
/// ```
/// trefoil::run(|| {
///     let handle = trefoil::go_async(async { "done" });
///     assert_eq!(handle.join().unwrap(), "done");
/// });
/// ```
#[track_caller]
pub fn go_async<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    go(move || block_on(future))
}
