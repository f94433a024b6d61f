//! Futures on goroutines.

mod common;

use common::watchdog;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};
use trefoil::{Runtime, block_on, go, go_async};

fn everywhere(f: impl Fn() + Send + Sync + Copy + 'static) {
    for n in [1, 2, 8] {
        Runtime::builder().procs(n).build().unwrap().run(f);
    }
}

/// A value that comes from elsewhere.
#[derive(Clone)]
struct Promise<T>(Arc<Mutex<(Option<T>, Option<Waker>)>>);

impl<T> Promise<T> {
    fn new() -> Self {
        Promise(Arc::new(Mutex::new((None, None))))
    }

    fn keep(&self, value: T) {
        let waker = {
            let mut inner = self.0.lock().unwrap();
            inner.0 = Some(value);
            inner.1.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Future for Promise<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let mut inner = self.0.lock().unwrap();
        match inner.0.take() {
            Some(value) => Poll::Ready(value),
            None => {
                inner.1 = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

#[test]
fn goroutines_and_threads_wake_each_other() {
    let _w = watchdog();
    everywhere(|| {
        for round in 0..200 {
            let promises: Vec<_> = (0..8).map(|_| Promise::new()).collect();
            let waiters: Vec<_> = promises.iter().map(|p| go_async(p.clone())).collect();
            let kept = promises.clone();
            if round % 20 == 0 {
                std::thread::spawn(move || kept.iter().enumerate().for_each(|(i, p)| p.keep(i)));
            } else {
                go(move || kept.iter().enumerate().for_each(|(i, p)| p.keep(i)));
            }
            for (i, waiter) in waiters.into_iter().enumerate() {
                assert_eq!(waiter.join().unwrap(), i);
            }
        }
    });
}

#[test]
fn on_a_plain_thread() {
    let _w = watchdog();
    let promise = Promise::new();
    let kept = promise.clone();
    go(move || {
        trefoil::time::sleep(Duration::from_millis(20));
        kept.keep("kept");
    });
    assert_eq!(block_on(promise), "kept");
}

/// A future that wakes itself is polled again, and others have their turn in between.
#[test]
fn who_wakes_himself_lets_others_go_first() {
    let _w = watchdog();
    Runtime::builder().procs(1).build().unwrap().run(|| {
        static STEPS: AtomicUsize = AtomicUsize::new(0);
        let other = go(|| {
            for _ in 0..100 {
                STEPS.fetch_add(1, Ordering::Relaxed);
                trefoil::yield_now();
            }
        });
        let mut polls = 0;
        block_on(poll_fn(|cx| {
            polls += 1;
            cx.waker().wake_by_ref();
            if polls < 50 { Poll::Pending } else { Poll::Ready(()) }
        }));
        assert!(STEPS.load(Ordering::Relaxed) >= 40);
        other.join().unwrap();
    });
}

/// Wakers that come late, twice, or never.
#[test]
fn wakers_out_of_time() {
    let _w = watchdog();
    everywhere(|| {
        let kept: Arc<Mutex<Option<Waker>>> = Arc::default();
        let keeper = kept.clone();
        let mut first = true;
        let start = Instant::now();
        block_on(poll_fn(move |cx| {
            let waker = cx.waker().clone();
            *keeper.lock().unwrap() = Some(waker.clone());
            if std::mem::take(&mut first) {
                go(move || {
                    trefoil::time::sleep(Duration::from_millis(5));
                    waker.wake_by_ref();
                    waker.wake_by_ref();
                    waker.wake();
                });
                return Poll::Pending;
            }
            // Woken before its time, it is just asked again.
            if start.elapsed() < Duration::from_millis(5) { Poll::Pending } else { Poll::Ready(()) }
        }));
        // Everything is over, and this must not matter.
        let late = kept.lock().unwrap().take().unwrap();
        late.wake_by_ref();
        go(move || late.wake()).join().unwrap();
    });
}

#[test]
fn a_panic_in_a_future_comes_out_of_join() {
    let _w = watchdog();
    everywhere(|| {
        let handle = go_async(async { panic!("inside the future") });
        let panic = handle.join().unwrap_err();
        assert_eq!(panic.downcast_ref(), Some(&"inside the future"));
    });
}

#[test]
fn the_wait_reason_is_shown() {
    let _w = watchdog();
    Runtime::builder().procs(1).build().unwrap().run(|| {
        let promise = Promise::new();
        let waiter = go_async(promise.clone());
        while !trefoil::debug::dump().contains("[future") {
            trefoil::yield_now();
        }
        promise.keep(());
        waiter.join().unwrap();
    });
}
