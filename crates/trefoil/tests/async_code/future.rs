//! Futures on goroutines.

use crate::common::watchdog;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};
use trefoil::{Runtime, block_on, go, go_async};

/// Runs `f` with 1, 2 and 8 Ps.
fn at_each_procs(f: impl Fn() + Send + Sync + Copy + 'static) {
    for n in [1, 2, 8] {
        Runtime::builder().procs(n).build().unwrap().run(f);
    }
}

/// A value that another goroutine or thread provides.
#[derive(Clone)]
struct Promise<T>(Arc<Mutex<(Option<T>, Option<Waker>)>>);

impl<T> Promise<T> {
    fn new() -> Self {
        Promise(Arc::new(Mutex::new((None, None))))
    }

    fn fulfil(&self, value: T) {
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
fn goroutines_and_threads_wake_futures() {
    let _w = watchdog();
    at_each_procs(|| {
        for round in 0..200 {
            let promises: Vec<_> = (0..8).map(|_| Promise::new()).collect();
            let waiters: Vec<_> = promises.iter().map(|p| go_async(p.clone())).collect();
            let kept = promises.clone();
            if round % 20 == 0 {
                std::thread::spawn(move || kept.iter().enumerate().for_each(|(i, p)| p.fulfil(i)));
            } else {
                go(move || kept.iter().enumerate().for_each(|(i, p)| p.fulfil(i)));
            }
            for (i, waiter) in waiters.into_iter().enumerate() {
                assert_eq!(waiter.join().unwrap(), i);
            }
        }
    });
}

#[test]
fn block_on_works_on_a_plain_thread() {
    let _w = watchdog();
    let promise = Promise::new();
    let kept = promise.clone();
    go(move || {
        trefoil::time::sleep(Duration::from_millis(20));
        kept.fulfil("kept");
    });
    assert_eq!(block_on(promise), "kept");
}

/// A future that wakes itself is polled again, and other goroutines run in between.
#[test]
fn a_future_that_wakes_itself_lets_others_run() {
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

/// Wakers are called several times, and after the end.
#[test]
fn late_and_repeated_wake_ups_do_no_harm() {
    let _w = watchdog();
    at_each_procs(|| {
        let kept: Arc<Mutex<Option<Waker>>> = Arc::default();
        let shared = kept.clone();
        let mut first = true;
        let start = Instant::now();
        block_on(poll_fn(move |cx| {
            let waker = cx.waker().clone();
            *shared.lock().unwrap() = Some(waker.clone());
            if std::mem::take(&mut first) {
                go(move || {
                    trefoil::time::sleep(Duration::from_millis(5));
                    waker.wake_by_ref();
                    waker.wake_by_ref();
                    waker.wake();
                });
                return Poll::Pending;
            }
            // If it is woken too early, it is polled again.
            if start.elapsed() < Duration::from_millis(5) { Poll::Pending } else { Poll::Ready(()) }
        }));
        // A wake-up after the end has no effect.
        let late = kept.lock().unwrap().take().unwrap();
        late.wake_by_ref();
        go(move || late.wake()).join().unwrap();
    });
}

#[test]
fn join_returns_the_panic_of_a_future() {
    let _w = watchdog();
    at_each_procs(|| {
        let handle = go_async(async { panic!("inside the future") });
        let panic = handle.join().unwrap_err();
        assert_eq!(panic.downcast_ref(), Some(&"inside the future"));
    });
}

#[test]
fn a_dump_shows_the_wait_for_a_future() {
    let _w = watchdog();
    Runtime::builder().procs(1).build().unwrap().run(|| {
        let promise = Promise::new();
        let waiter = go_async(promise.clone());
        while !trefoil::debug::dump().contains("[future") {
            trefoil::yield_now();
        }
        promise.fulfil(());
        waiter.join().unwrap();
    });
}
