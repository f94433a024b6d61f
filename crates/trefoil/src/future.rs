//! Futures on goroutines: [`block_on`] and [`go_async`].
//!
//! A goroutine polls one future and parks while the future is pending. The waker makes the
//! goroutine runnable again. There is no reactor: a future that needs one (tokio's sockets and
//! timers) brings its own, and finds it in the goroutine's thread-locals as it would on a thread.

use crate::goroutine::{go, yield_now};
use crate::join_handle::JoinHandle;
use crate::sched::task::blocker::{Blocker, Slept};
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll};

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
    let blocker = match Blocker::new() {
        Ok(blocker) => blocker,
        Err(e) => panic!("block_on: no memory for a waker: {e}"),
    };
    let waker = blocker.waker();
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return value;
        }
        if blocker.sleep() == Slept::WasNotified {
            // A future that wakes itself while it is polled asks to let other tasks run first.
            yield_now();
        }
    }
}

/// Starts a goroutine that runs a future to its end: [`go`] with [`block_on`].
///
/// The future has a goroutine, its stack and its thread-locals for itself. A
/// [task](crate::task::spawn) takes less memory.
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
