//! Every value is dropped exactly once.

use crate::common::{let_others_wait, watchdog};
use crate::{at_all_procs, start_on_thread_if};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use trefoil::chan::{bounded, unbounded};
use trefoil::time::sleep;
use trefoil::{go, yield_now};

/// Counts the values that exist.
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(alive: &Arc<AtomicUsize>) -> Counted {
        alive.fetch_add(1, Ordering::SeqCst);
        Counted(alive.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        assert_ne!(self.0.fetch_sub(1, Ordering::SeqCst), 0, "dropped twice");
    }
}

#[test]
fn every_value_sent_is_dropped_exactly_once() {
    let _dog = watchdog();
    at_all_procs(|| {
        let alive = Arc::new(AtomicUsize::new(0));
        let new = || Counted::new(&alive);
        let channels = || {
            [0, 1, 3, 100]
                .into_iter()
                .map(bounded::<Counted>)
                .chain(std::iter::once_with(unbounded::<Counted>))
        };
        for (tx, rx) in channels() {
            // Received, refused, timed out.
            let receiver = go({
                let rx = rx.clone();
                move || rx.iter().take(150).count()
            });
            (0..150).for_each(|_| tx.send(new()).unwrap());
            assert_eq!(receiver.join().unwrap(), 150);
            assert_eq!(alive.load(Ordering::SeqCst), 0);
            if let Some(cap) = tx.capacity() {
                (0..cap).for_each(|_| tx.try_send(new()).unwrap());
                assert!(tx.try_send(new()).is_err());
                assert!(tx.send_timeout(new(), Duration::from_micros(50)).is_err());
                assert_eq!(alive.load(Ordering::SeqCst), cap);
            }
            // Values left in the channel are dropped with the last receiver, though a sender
            // exists.
            let waiting = go({
                let (tx, value) = (tx.clone(), new());
                move || tx.send(value)
            });
            let_others_wait();
            drop(rx);
            // An unbounded channel accepted the value, unless the receiver was dropped before.
            let sent = waiting.join().unwrap();
            assert!(sent.is_err() || tx.capacity().is_none());
            drop(sent);
            assert_eq!(alive.load(Ordering::SeqCst), 0);
            assert!(tx.send(new()).is_err());
            assert_eq!(alive.load(Ordering::SeqCst), 0);
        }
        // Values left in the channel when the receiver is dropped last.
        for (tx, rx) in channels() {
            let n = tx.capacity().unwrap_or(1000);
            (0..n).for_each(|_| tx.send(new()).unwrap());
            drop(tx);
            assert_eq!(alive.load(Ordering::SeqCst), n);
            if n > 0 {
                drop(rx.recv());
            }
            drop(rx);
            assert_eq!(alive.load(Ordering::SeqCst), 0);
        }
    });
}

#[test]
fn dropping_handles_in_any_order_drops_every_value() {
    let _dog = watchdog();
    at_all_procs(|| {
        let alive = Arc::new(AtomicUsize::new(0));
        for round in 0..2000 {
            let (tx, rx) = bounded(round % 3);
            let alive = alive.clone();
            let a = start_on_thread_if(round % 100 == 0, move || {
                let tx2 = tx.clone();
                drop(tx);
                while tx2.send(Counted::new(&alive)).is_ok() {}
            });
            let b = go(move || {
                let rx2 = rx.clone();
                drop(rx);
                rx2.iter().take(round % 7).count()
            });
            b.join().unwrap();
            a.join();
        }
        assert_eq!(alive.load(Ordering::SeqCst), 0);
    });
}

#[test]
fn values_whose_drop_panics_or_parks_are_all_dropped() {
    struct Rude {
        _counted: Counted,
        panics: bool,
    }
    impl Drop for Rude {
        fn drop(&mut self) {
            sleep(Duration::from_micros(50));
            yield_now();
            if self.panics {
                panic!("on purpose");
            }
        }
    }
    let _dog = watchdog();
    std::panic::set_hook(Box::new(|info| {
        if info.payload().downcast_ref::<&str>().is_none_or(|s| *s != "on purpose") {
            eprintln!("{info}");
        }
    }));
    at_all_procs(|| {
        let alive = Arc::new(AtomicUsize::new(0));
        for (tx, rx) in [bounded(100), unbounded()] {
            for i in 0..100 {
                tx.send(Rude { _counted: Counted::new(&alive), panics: i == 3 }).unwrap();
            }
            // The panic reaches the caller, and the other values are dropped nevertheless.
            assert!(catch_unwind(AssertUnwindSafe(|| drop(rx))).is_err());
            assert_eq!(alive.load(Ordering::SeqCst), 0);
            assert!(tx.is_closed());
            drop(tx.send(Rude { _counted: Counted::new(&alive), panics: false }));
        }
        assert_eq!(alive.load(Ordering::SeqCst), 0);
    });
}

#[test]
fn dropping_a_channel_drops_the_channels_inside() {
    let _dog = watchdog();
    at_all_procs(|| {
        let alive = Arc::new(AtomicUsize::new(0));
        let (tx, rx) = bounded(4);
        for _ in 0..4 {
            let (inner, received) = unbounded();
            (0..10).for_each(|_| inner.send(Counted::new(&alive)).unwrap());
            tx.send((inner, received)).unwrap();
        }
        assert_eq!(alive.load(Ordering::SeqCst), 40);
        drop(rx);
        assert_eq!(alive.load(Ordering::SeqCst), 0);
    });
}
