//! `Select::ready`: an operation that is ready is left to the caller.

use crate::common::{assert_passed, let_others_wait, watchdog, yield_until};
use crate::{at_all_procs, simulated_and_at_all_procs, start_on_thread_if};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use trefoil::chan::{
    ReadyTimeoutError, Receiver, Select, Sender, TryReadyError, bounded, nil, unbounded,
};
use trefoil::{go, yield_now};

const LONG: Duration = Duration::from_secs(60);

fn ready_to_recv(rx: &Receiver<i32>) -> Result<usize, TryReadyError> {
    let (_silent, other) = bounded::<i32>(0);
    let mut select = Select::new();
    select.recv(&other);
    select.recv(rx);
    select.try_ready()
}

fn ready_to_send(tx: &Sender<i32>) -> Result<usize, TryReadyError> {
    let mut select = Select::new();
    select.send(tx, 0);
    select.try_ready()
}

#[test]
fn ready_means_room_a_value_a_partner_or_a_closed_channel() {
    let _dog = watchdog();
    at_all_procs(|| {
        for cap in [1, 3] {
            let (tx, rx) = bounded(cap);
            assert_eq!((ready_to_recv(&rx), ready_to_send(&tx)), (Err(TryReadyError), Ok(0)));
            (0..cap).for_each(|_| tx.send(1).unwrap());
            assert_eq!((ready_to_recv(&rx), ready_to_send(&tx)), (Ok(1), Err(TryReadyError)));
            assert_eq!(rx.len(), cap, "no value was moved");
        }
        let (tx, rx) = bounded(0);
        assert_eq!(
            (ready_to_recv(&rx), ready_to_send(&tx)),
            (Err(TryReadyError), Err(TryReadyError))
        );
        let receiver = go({
            let rx = rx.clone();
            move || rx.recv()
        });
        yield_until("a receiver", || ready_to_send(&tx) == Ok(0));
        tx.send(5).unwrap();
        assert_eq!(receiver.join().unwrap(), Ok(5));
        let sender = go({
            let tx = tx.clone();
            move || tx.send(6)
        });
        yield_until("a sender", || ready_to_recv(&rx) == Ok(1));
        assert_eq!(rx.try_recv(), Ok(6));
        sender.join().unwrap().unwrap();
        tx.close();
        assert_eq!((ready_to_recv(&rx), ready_to_send(&tx)), (Ok(1), Ok(0)));
        let (tx, rx) = nil();
        assert_eq!(
            (ready_to_recv(&rx), ready_to_send(&tx)),
            (Err(TryReadyError), Err(TryReadyError))
        );
        assert_eq!(ready_to_send(&unbounded().0), Ok(0));
    });
}

#[test]
fn ready_waits_until_its_deadline_and_not_longer_than_needed() {
    let _dog = watchdog();
    simulated_and_at_all_procs(|| {
        let (tx, rx) = bounded::<i32>(1);
        let mut select = Select::new();
        select.recv(&rx);
        let start = Instant::now();
        assert_eq!(select.ready_timeout(Duration::from_millis(5)), Err(ReadyTimeoutError));
        assert_eq!(select.ready_deadline(Instant::now()), Err(ReadyTimeoutError));
        assert_passed(start, Duration::from_millis(5));
        assert_eq!(tx.waiters(), (0, 0), "a watcher was left behind");
        tx.send(1).unwrap();
        assert_eq!(select.ready_deadline(Instant::now()), Ok(0));
        assert_eq!(select.ready_timeout(LONG), Ok(0));
        assert_passed(start, Duration::from_millis(5));
    });
}

/// Two watchers of both ends do not serve each other: neither of them sends or receives.
#[test]
fn watchers_of_both_ends_are_no_partners() {
    let _dog = watchdog();
    simulated_and_at_all_procs(|| {
        let start = Instant::now();
        // `_open` keeps the channel open when the other goroutine has ended.
        let (tx, rx) = bounded::<i32>(0);
        let _open = tx.clone();
        let other = go(move || {
            let mut select = Select::new();
            select.send(&tx, 1);
            select.ready_timeout(Duration::from_millis(10))
        });
        let mut select = Select::new();
        select.recv(&rx);
        assert_eq!(select.ready_timeout(Duration::from_millis(2)), Err(ReadyTimeoutError));
        assert!(rx.try_recv().unwrap_err().is_empty(), "a watcher has no value to give");
        assert_passed(start, Duration::from_millis(2));
        assert_eq!(other.join().unwrap(), Err(ReadyTimeoutError));
        assert_passed(start, Duration::from_millis(10));
    });
}

/// One value wakes all watchers, as long as it is there.
#[test]
fn every_watcher_of_a_ready_operation_returns() {
    let _dog = watchdog();
    at_all_procs(|| {
        for round in 0..50 {
            let (tx, rx) = bounded::<i32>(round % 2);
            let watchers: Vec<_> = (0..8)
                .map(|i| {
                    let rx = rx.clone();
                    start_on_thread_if(i == 7, move || {
                        let mut select = Select::new();
                        select.recv(&rx);
                        assert_eq!(select.ready(), 0);
                    })
                })
                .collect();
            if round % 3 == 0 {
                let_others_wait();
            }
            match round % 4 {
                // A sender waits, or a value is in the buffer.
                0 | 1 => {
                    let sender = go(move || tx.send(1));
                    watchers.iter().for_each(|w| w.recv().unwrap());
                    assert_eq!(rx.recv(), Ok(1));
                    sender.join().unwrap().unwrap();
                }
                _ => {
                    tx.close();
                    watchers.iter().for_each(|w| w.recv().unwrap());
                }
            }
        }
    });
}

/// Goroutines that wait with `ready` and then try share the work of one channel with goroutines
/// that receive. The channel is closed while they do.
#[test]
fn values_are_received_once_by_watchers_and_receivers_until_the_channel_is_closed() {
    let _dog = watchdog();
    at_all_procs(|| {
        for cap in [0, 1, 4] {
            let n = if cfg!(debug_assertions) { 2_000 } else { 20_000 };
            let (tx, rx) = bounded(cap);
            let (_silent, other) = bounded::<u64>(0);
            let (sum, count) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
            let workers: Vec<_> = (0..4)
                .map(|i| {
                    let (rx, other) = (rx.clone(), other.clone());
                    let (sum, count) = (sum.clone(), count.clone());
                    go(move || {
                        let note = |v: usize| {
                            sum.fetch_add(v, Ordering::Relaxed);
                            count.fetch_add(1, Ordering::Relaxed);
                        };
                        if i == 0 {
                            rx.iter().for_each(note);
                            return;
                        }
                        let mut select = if i == 1 { Select::new_biased() } else { Select::new() };
                        select.recv(&other);
                        select.recv(&rx);
                        loop {
                            assert_eq!(select.ready(), 1);
                            match rx.try_recv() {
                                Ok(v) => note(v),
                                Err(e) if e.is_closed() => return,
                                Err(_) => {}
                            }
                        }
                    })
                })
                .collect();
            // Half of the values are sent after a `ready`.
            let senders: Vec<_> = (0..2)
                .map(|i| {
                    let tx = tx.clone();
                    go(move || {
                        for v in 0..n {
                            if i == 0 {
                                tx.send(v).unwrap();
                                continue;
                            }
                            let mut select = Select::new();
                            select.send(&tx, 0);
                            while select.ready() != 0 || tx.try_send(v).is_err() {}
                        }
                    })
                })
                .collect();
            senders.into_iter().for_each(|h| h.join().unwrap());
            tx.close();
            workers.into_iter().for_each(|h| h.join().unwrap());
            assert_eq!(count.load(Ordering::Relaxed), 2 * n);
            assert_eq!(sum.load(Ordering::Relaxed), n * (n - 1));
            assert_eq!(rx.waiters(), (0, 0), "a watcher was left behind");
        }
    });
}

/// The channel is closed at about the moment at which the watcher enlists.
#[test]
fn ready_beside_closing_returns() {
    let _dog = watchdog();
    at_all_procs(|| {
        for round in 0..2_000 {
            let ((t1, r1), (_t2, r2)) = (bounded::<i32>(0), bounded::<i32>(1));
            let closer = go(move || {
                (0..round % 3).for_each(|_| yield_now());
                if round % 2 == 0 { t1.close() } else { drop(t1) }
            });
            let mut select = Select::new();
            select.recv(&r2);
            let closed = select.recv(&r1);
            assert_eq!(select.ready(), closed);
            closer.join().unwrap();
        }
    });
}

/// A plain select meets watchers of the same channels: it neither takes them as partners nor spins.
#[test]
fn a_select_passes_watchers_over() {
    let _dog = watchdog();
    at_all_procs(|| {
        let (tx, rx) = bounded::<i32>(0);
        let watcher = go({
            let rx = rx.clone();
            move || {
                let mut select = Select::new();
                select.recv(&rx);
                select.ready()
            }
        });
        yield_until("the watcher", || tx.waiters().1 == 1);
        let (_silent, other) = bounded::<i32>(0);
        let late = trefoil::select! {
            send(tx, 1) -> _ => false,
            recv(other) -> _ => false,
            default => true,
        };
        assert!(late && tx.try_send(1).unwrap_err().is_full());
        // A select that waits to send makes the receive ready.
        let sender = go(move || {
            trefoil::select! {
                send(tx, 2) -> r => r.is_ok(),
                recv(other) -> _ => false,
            }
        });
        assert_eq!(watcher.join().unwrap(), 0);
        assert_eq!(rx.recv(), Ok(2));
        assert!(sender.join().unwrap());
    });
}
