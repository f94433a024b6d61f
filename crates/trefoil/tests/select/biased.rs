//! `select_biased!`: the first arm that is ready is taken.

use crate::at_all_procs;
use crate::common::watchdog;
use std::future::{pending, ready};
use std::time::Duration;
use trefoil::chan::{Select, bounded, nil, unbounded};
use trefoil::{go, select_biased};

#[test]
fn the_first_ready_arm_is_always_taken() {
    let _dog = watchdog();
    at_all_procs(|| {
        let (silent, none) = bounded::<i32>(0);
        let ((t1, r1), (t2, r2)) = (unbounded(), unbounded());
        (0..200).for_each(|n| {
            t1.send(n).unwrap();
            t2.send(n).unwrap();
        });
        for n in 0..100 {
            let got = select_biased! {
                recv(none) -> _ => (0, Ok(0)),
                recv(r1) -> v => (1, v),
                recv(r2) -> v => (2, v),
                send(t1, 7) -> _ => (3, Ok(0)),
            };
            assert_eq!(got, (1, Ok(n)));
            let got = select_biased! {
                recv(none) -> _ => (0, Ok(0)),
                after(Duration::ZERO) => (4, Ok(0)),
                recv(r2) -> v => (2, v),
                recv(r1) -> v => (1, v),
                default => (3, Ok(0)),
            };
            assert_eq!(got, (2, Ok(n)), "`after` and `default` are for when no arm is ready");
        }
        let got = select_biased! {
            recv(none) -> _ => 0,
            future(pending::<()>()) -> () => 1,
            future(ready(())) -> () => 2,
            recv(r1) -> _ => 3,
        };
        assert_eq!(got, 2);
        let got = select_biased! {
            recv(none) -> _ => 0,
            send(silent, 1) -> _ => 1,
            default => 2,
        };
        assert_eq!(got, 2);
    });
}

#[test]
fn a_biased_dynamic_select_takes_the_operation_that_was_added_first() {
    let _dog = watchdog();
    at_all_procs(|| {
        let channels: Vec<_> = (0..20).map(|_| unbounded()).collect();
        let mut select = Select::new_biased();
        for (tx, rx) in channels.iter().rev() {
            (0..3).for_each(|n| tx.send(n).unwrap());
            select.recv(rx);
        }
        for (i, (_, rx)) in channels.iter().rev().enumerate() {
            for n in 0..3 {
                assert_eq!((select.ready(), select.try_ready()), (i, Ok(i)));
                let op = if n == 0 { select.select() } else { select.try_select().unwrap() };
                assert_eq!((op.index(), op.recv(rx)), (i, Ok(n)));
            }
        }
        assert!(select.try_select().is_err() && select.try_ready().is_err());
    });
}

#[test]
fn a_biased_select_waits_for_whichever_arm_comes() {
    let _dog = watchdog();
    at_all_procs(|| {
        for which in [0, 1, 2].repeat(100) {
            let channels = [0, 1, 2].map(|_| bounded::<usize>(0));
            let [(_, a), (_, b), (_, c)] = &channels;
            let tx = channels[which].0.clone();
            let sender = go(move || tx.send(which));
            let got = select_biased! {
                recv(a) -> v => v,
                recv(b) -> v => v,
                recv(c) -> v => v,
            };
            assert_eq!(got, Ok(which));
            sender.join().unwrap().unwrap();
        }
    });
}

#[test]
fn arms_of_a_nil_channel_are_never_taken() {
    let _dog = watchdog();
    at_all_procs(|| {
        let (tx, rx) = nil();
        let (_silent, other) = bounded::<i32>(0);
        let got = select_biased! {
            send(tx, 1) -> _ => 1,
            recv(rx) -> _ => 2,
            recv(other) -> _ => 3,
            after(Duration::from_millis(1)) => 4,
        };
        assert_eq!(got, 4);
        let got = trefoil::select! { send(tx, 1) -> _ => 1, default => 2 };
        assert_eq!(got, 2);
    });
}
