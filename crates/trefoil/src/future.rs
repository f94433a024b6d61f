//! Futures on goroutines: [`block_on`] and [`go_async`].
//!
//! A goroutine drives one future and parks while it is pending; its waker makes it runnable again. There is no
//! reactor in here: a future that needs one (tokio's sockets and timers) brings its own, and finds it in
//! the goroutine's thread-locals as it would on a thread.
//!
//! # The alarm
//! One word: `QUIET`, `RUNG`, or the sleeper that waits for it.
//!
//! | from | to | who |
//! |---|---|---|
//! | any | `RUNG` | a waker; it wakes the sleeper that it found |
//! | `RUNG` | `QUIET` | the goroutine, before it polls |
//! | `QUIET` | a sleeper | the goroutine, when it parks; not if it was rung meanwhile |

use crate::goroutine::{go, yield_now};
use crate::join_handle::JoinHandle;
use crate::sched::Rt;
use crate::sched::reason::WaitReason;
use crate::sched::wait;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// No sleeper has these values: they are addresses.
const QUIET: usize = 0;
const RUNG: usize = usize::MAX;

struct Alarm(AtomicUsize);

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // AcqRel: what the waker did is seen by the next poll, and the sleeper is really asleep or about to.
        let sleeper = self.0.swap(RUNG, Ordering::AcqRel);
        if sleeper != QUIET && sleeper != RUNG {
            let here = Rt::enter();
            wait::wake_here(here, sleeper);
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
/// for example, need a tokio runtime beside, which the goroutine enters. The goroutine owns its
/// thread-locals, so it stays entered wherever the goroutine runs:
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
    let alarm = Arc::new(Alarm(AtomicUsize::new(QUIET)));
    let waker = Waker::from(alarm.clone());
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return value;
        }
        let mut rung = false;
        wait::block(WaitReason::Future, |sleeper| {
            // Release: the waker finds us. Acquire: if it was faster, we see what it did.
            let order = (Ordering::AcqRel, Ordering::Acquire);
            rung = alarm.0.compare_exchange(QUIET, sleeper, order.0, order.1).is_err();
            !rung
        });
        if rung {
            // Woken while it was polled: that is how a future asks for others to go first.
            yield_now();
        }
        alarm.0.swap(QUIET, Ordering::AcqRel);
    }
}

/// Starts a goroutine that runs a future to its end: [`go`](crate::go) with [`block_on`].
///
/// Use it where tokio's `spawn` would be used. The handle is that of [`go`](crate::go): it is not a
/// future, and `join` parks the goroutine that calls it.
///
/// # Drop
/// Dropping the handle detaches the goroutine, which runs on.
///
/// # Panics
/// Panics if no memory is left for another goroutine. A panic of the future comes out of
/// [`JoinHandle::join`] as an error.
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
