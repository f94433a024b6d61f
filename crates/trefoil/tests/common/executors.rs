//! Runs a future in every place in which a future of this crate may be polled.

// Every test file compiles its own copy and uses its own part of it.
#![allow(dead_code)]

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

/// A waker that the crate does not know: it unparks a thread.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Polls the future on this thread or goroutine, as another executor would.
pub(crate) fn foreign_block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return value;
        }
        std::thread::park();
    }
}

/// Runs `make`'s future as a task, by `block_on` on a goroutine, and in another executor on a
/// goroutine. `make` gets the name of the place, for messages.
fn on_goroutines<F, T>(make: &dyn Fn(&'static str) -> F) -> [T; 3]
where
    F: Future<Output = T> + Send + 'static,
    T: Send + 'static,
{
    let task = trefoil::task::spawn(make("task")).join().unwrap();
    let goroutine = trefoil::block_on(make("goroutine"));
    let foreign = foreign_block_on(make("other executor on a goroutine"));
    [task, goroutine, foreign]
}

/// Runs `make`'s future in all places of goroutines, in a simulation.
pub(crate) fn simulated<F, T>(make: impl Fn(&'static str) -> F + Send + 'static) -> [T; 3]
where
    F: Future<Output = T> + Send + 'static,
    T: Send + 'static,
{
    trefoil::sim::run(move || on_goroutines(&make))
}

/// Runs `make`'s future as a task, by `block_on` on a goroutine and on a plain thread, and in
/// another executor. `make` gets the name of the place, for messages.
pub(crate) fn everywhere<F, T>(make: impl Fn(&'static str) -> F + Send + Sync + 'static) -> Vec<T>
where
    F: Future<Output = T> + Send + 'static,
    T: Send + 'static,
{
    let make = Arc::new(make);
    let on_goroutines = {
        let make = make.clone();
        trefoil::run(move || on_goroutines(&*make))
    };
    let on_threads = std::thread::spawn(move || {
        let thread = trefoil::block_on(make("thread"));
        let foreign = foreign_block_on(make("other executor on a thread"));
        [thread, foreign]
    });
    on_goroutines.into_iter().chain(on_threads.join().unwrap()).collect()
}
