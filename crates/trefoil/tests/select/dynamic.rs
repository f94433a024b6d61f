//! `Select`: arms that are known at run time.

use crate::at_all_procs;
use crate::common::watchdog;
use std::sync::Arc;
use std::time::{Duration, Instant};
use trefoil::chan::{RecvError, Select, TrySelectError, bounded};
use trefoil::go;

#[test]
fn dynamic_select_serves_a_thousand_channels() {
    let _dog = watchdog();
    at_all_procs(|| {
        const CHANNELS: usize = 1000;
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..CHANNELS).map(bounded).unzip();
        for (i, tx) in senders.into_iter().enumerate() {
            go(move || tx.send(i).unwrap());
        }
        let mut select = Select::new();
        for rx in &receivers {
            select.recv(rx);
        }
        let mut seen = vec![false; CHANNELS];
        let mut closed = 0;
        while closed < CHANNELS {
            let op = select.select();
            let i = op.index();
            match op.recv(&receivers[i]) {
                Ok(v) => {
                    assert!(v == i && !seen[i]);
                    seen[i] = true;
                }
                Err(RecvError) => {
                    closed += 1;
                    select.remove(i);
                }
            }
        }
        assert!(seen.iter().all(|&s| s));
        assert_eq!(select.try_select().map(|op| op.index()).unwrap_err(), TrySelectError);
        assert!(select.select_timeout(Duration::from_millis(1)).is_err());
        assert!(select.select_deadline(Instant::now()).is_err());
    });
}

#[test]
fn dynamic_select_drops_every_value_exactly_once() {
    let _dog = watchdog();
    at_all_procs(|| {
        let alive = Arc::new(());
        let (tx, rx) = bounded(1);
        let (closed, gone) = bounded(1);
        drop(gone);
        {
            let mut select = Select::new();
            select.send(&tx, alive.clone());
            select.send(&tx, alive.clone());
            select.recv(&rx);
            assert_eq!(Arc::strong_count(&alive), 3);
            let _ = select.try_select().unwrap(); // a send
            let op = select.select(); // the receive: the second send has no room
            assert_eq!(op.index(), 2);
            drop(op); // and with it the received value
            assert_eq!(Arc::strong_count(&alive), 2);
            let op = select.select(); // the second send
            op.send(&tx).unwrap();
            let last = select.send(&closed, alive.clone());
            let mut back = 0;
            for _ in 0..2 {
                let op = select.select();
                if op.index() == last {
                    back += Arc::strong_count(&op.send(&closed).unwrap_err().0);
                } else {
                    assert!(op.recv(&rx).is_ok());
                }
            }
            assert!(back > 0);
        }
        assert_eq!(Arc::strong_count(&alive), 1);
    });
}

#[test]
#[should_panic(expected = "not a receive from this channel")]
fn completing_a_dynamic_select_with_another_channel_panics() {
    let ((tx, rx), (_t2, r2)) = (bounded(1), bounded::<i32>(1));
    tx.send(1).unwrap();
    let mut select = Select::new();
    select.recv(&rx);
    let _ = select.select().recv(&r2);
}

/// A send is gone when it was chosen, so the next value is added: the indices grow, the memory does
/// not. More operations than one select may have pass through it.
#[test]
fn a_reused_select_does_not_grow() {
    let _dog = watchdog();
    trefoil::run(|| {
        let (tx, rx) = bounded(1);
        let (gone, never) = bounded::<usize>(1);
        drop(gone);
        let mut select = Select::new();
        let recv = select.recv(&rx);
        for n in 1..=70_000 {
            let send = select.send(&tx, n);
            assert_eq!(send, 2 * n - 1, "an index is not used again");
            let op = select.select();
            assert_eq!(op.index(), send);
            op.send(&tx).unwrap();
            assert_eq!(select.select().recv(&rx), Ok(n));
            let removed = select.recv(&never);
            select.remove(removed);
            select.remove(send);
            assert_eq!(removed, 2 * n);
        }
        tx.send(1).unwrap();
        assert_eq!(select.ready(), recv);
    });
}

#[test]
#[should_panic(expected = "no operation has the index 1")]
fn removing_an_operation_that_never_existed_panics() {
    let (_tx, rx) = bounded::<i32>(1);
    let mut select = Select::new();
    select.recv(&rx);
    select.remove(1);
}

#[test]
fn a_forgotten_operation_does_not_disturb_the_next_one() {
    let _dog = watchdog();
    let alive = Arc::new(());
    let (tx, rx) = bounded(2);
    tx.send(alive.clone()).unwrap();
    tx.send(alive.clone()).unwrap();
    let mut select = Select::new();
    select.recv(&rx);
    std::mem::forget(select.select());
    assert!(select.select().recv(&rx).is_ok());
    assert_eq!(Arc::strong_count(&alive), 1, "the forgotten value was dropped, too");
}

#[test]
fn a_select_moves_to_another_thread_with_its_operations() {
    fn is_send_and_sync<T: Send + Sync>(_: &T) {}
    let _dog = watchdog();
    let ((t1, r1), (t2, r2)) = (bounded(1), bounded(1));
    let mut select = Select::new();
    select.recv(&r1);
    let send = select.send(&t2, "sent");
    is_send_and_sync(&select);
    std::thread::scope(|s| {
        let other = s.spawn(|| {
            let op = select.select();
            assert_eq!(op.index(), send);
            op.send(&t2).unwrap();
            select
        });
        let mut select = other.join().unwrap();
        assert_eq!(r2.recv(), Ok("sent"));
        t1.send("received").unwrap();
        assert_eq!(select.select().recv(&r1), Ok("received"));
    });
}
