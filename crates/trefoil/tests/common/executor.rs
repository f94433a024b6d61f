//! What the tests of async code share: an executor that is not trefoil's, single polls, and futures
//! that are given up.

#![allow(dead_code)]

use crate::common::watchdog;
use rand::Rng;
use rand::rngs::SmallRng;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use trefoil::Runtime;

/// Runs `f` in runtimes with 1, 2 and 8 Ps, with a watchdog.
pub(crate) fn at_each_procs(f: impl Fn() + Send + Sync + Copy + 'static) {
    let _watchdog = watchdog();
    for n in [1, 2, 8] {
        Runtime::builder().procs(n).build().unwrap().run(f);
    }
}

/// An executor on a plain thread, which knows nothing of trefoil.
pub(crate) struct Parking(Thread);

impl Wake for Parking {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

impl Parking {
    pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
        let waker = Waker::from(Arc::new(Parking(std::thread::current())));
        let mut context = Context::from_waker(&waker);
        let mut future = pin!(future);
        loop {
            match future.as_mut().poll(&mut context) {
                Poll::Ready(output) => return output,
                Poll::Pending => std::thread::park(),
            }
        }
    }
}

/// Polls a future once, with a waker that does nothing.
pub(crate) fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Polls a new future once: it must be pending.
pub(crate) fn pending<F: Future>(future: F) -> Pin<Box<F>> {
    let mut future = Box::pin(future);
    assert!(poll_once(future.as_mut()).is_pending());
    future
}

/// A future that gives up after some polls.
pub(crate) struct GiveUp<F>(pub(crate) F, pub(crate) u32);

impl<F: Future + Unpin> Future for GiveUp<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match Pin::new(&mut self.0).poll(context) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if self.1 == 0 => Poll::Ready(None),
            Poll::Pending => {
                self.1 -= 1;
                context.waker().wake_by_ref();
                Poll::Pending
            }
        }
    }
}

/// Awaits a future, or gives it up after a few polls: `rng` decides.
pub(crate) async fn await_or_give_up<F: Future>(
    rng: &mut SmallRng,
    future: F,
) -> Option<F::Output> {
    let future = Box::pin(future);
    if rng.random_bool(0.5) {
        GiveUp(future, rng.random_range(0..3)).await
    } else {
        Some(future.await)
    }
}
