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
