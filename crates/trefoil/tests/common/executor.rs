//! What the tests of async code share: an executor that is not trefoil's, and single polls.

#![allow(dead_code)]

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use trefoil::Runtime;

/// Runs `f` in runtimes with 1, 2 and 8 Ps.
pub(crate) fn at_each_procs(f: impl Fn() + Send + Sync + Copy + 'static) {
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
