//! Checks of a channel (`chan/core.rs`, `queue.rs`, `buffer.rs`, `handle.rs`): sends, receives,
//! closes and deadlines meet in every order.
//!
//! The cells of nodes, lists and buffers are loom's: loom reports a data race if one is used
//! outside of the lock, or read before the wake-up that publishes it. A lost wake-up is a deadlock.

use crate::chan::{Failed, Receiver, Sender, TaskRecv, bounded, unbounded};
use crate::explore::{Bound, explore, must_fail};
use crate::sched::Order::AsWritten;
use crate::sched::wait::time_passes;
use crate::sched::{go, i_am};
use crate::shim::{Half, Mutation, Op, Part};
use crate::sys::clock::NEVER;
use std::sync::Arc;

type Ends = Arc<(Sender<u32>, Receiver<u32>)>;

/// Any deadline: [`time_passes`] makes it pass.
const SOON: u64 = 1;

/// Returns both ends of a channel with `cap` slots. The caller is goroutine 0.
fn channel(cap: usize) -> Ends {
    i_am(0, AsWritten);
    Arc::new(bounded(cap))
}

/// Starts goroutine `number`, which sends `value`. It returns false if the channel was closed.
fn sends(number: usize, ends: &Ends, value: u32) -> loom::thread::JoinHandle<bool> {
    let ends = ends.clone();
    go(number, AsWritten, move || match ends.0.send(value, NEVER) {
        Ok(()) => true,
        Err((back, Failed::Closed)) => {
            assert_eq!(back, value, "another value came back");
            false
        }
        Err(_) => panic!("there is no deadline"),
    })
}

/// A send meets a receive: directly, through the buffer, or after one has waited.
pub fn send_against_recv() {
    for cap in [0, 1] {
        explore(Bound::All, move || {
            let ends = channel(cap);
            let sender = sends(1, &ends, 7);
            assert_eq!(ends.1.recv(NEVER), Ok(7));
            assert!(sender.join().unwrap());
            ends.1.assert_no_waiters();
        });
    }
}

/// Two senders and one receiver, with and without a buffer.
pub fn two_senders() {
    // All interleavings take minutes.
    for cap in [0, 1] {
        explore(Bound::Preemptions(4), move || {
            let ends = channel(cap);
            let senders = [1, 2].map(|n| sends(n, &ends, n as u32));
            let got = [ends.1.recv(NEVER), ends.1.recv(NEVER)];
            assert!(got == [Ok(1), Ok(2)] || got == [Ok(2), Ok(1)], "{got:?}");
            assert!(senders.map(|s| s.join().unwrap()) == [true; 2]);
            ends.1.assert_no_waiters();
        });
    }
}

/// The values of one sender arrive in their order, whichever side waits.
pub fn values_of_one_sender_stay_in_order() {
    explore(Bound::All, || {
        let ends = channel(1);
        let sender = go(1, AsWritten, {
            let ends = ends.clone();
            move || (1..=3).for_each(|n| ends.0.send(n, NEVER).unwrap())
        });
        for n in 1..=3 {
            assert_eq!(ends.1.recv(NEVER), Ok(n));
        }
        sender.join().unwrap();
    });
}

/// A close comes between a send and a receive: the value is received or comes back, never both,
/// never neither; and all waiters are woken.
pub fn close_against_send_and_recv() {
    for cap in [0, 1] {
        explore(Bound::All, move || {
            let ends = channel(cap);
            let sender = sends(1, &ends, 7);
            let closer = go(2, AsWritten, {
                let ends = ends.clone();
                move || ends.0.close()
            });
            let mut got = ends.1.recv(NEVER);
            let sent = sender.join().unwrap();
            closer.join().unwrap();
            if got.is_err() {
                // A closed channel stays closed.
                got = ends.1.recv(NEVER);
                assert_eq!(got, Err(Failed::Closed));
            }
            assert_eq!(got.is_ok(), sent, "sent and lost, or refused and received");
            ends.1.assert_no_waiters();
        });
    }
}

/// A receiver's deadline passes while a sender sends.
pub fn deadline_against_send() {
    explore(Bound::Preemptions(3), || {
        let ends = channel(0);
        let sender = go(1, AsWritten, {
            let ends = ends.clone();
            move || ends.0.try_send(7).is_ok()
        });
        let clock = go(2, AsWritten, time_passes);
        // Ends the wait if neither the sender nor the deadline does.
        let closer = go(3, AsWritten, {
            let ends = ends.clone();
            move || ends.0.close()
        });
        let got = ends.1.recv(SOON);
        let sent = sender.join().unwrap();
        clock.join().unwrap();
        closer.join().unwrap();
        assert_eq!(got == Ok(7), sent, "sent and lost, or received without a sender");
        ends.1.assert_no_waiters();
    });
}

/// The deadline of a wait that has ended does not end the next wait.
pub fn stale_deadline_ends_no_later_wait() {
    explore(Bound::All, || {
        let ends = channel(0);
        let sender = go(1, AsWritten, {
            let ends = ends.clone();
            move || [7, 8].map(|n| ends.0.send(n, NEVER))
        });
        let first = ends.1.recv(SOON);
        assert_eq!(first, Ok(7), "no deadline has passed yet");
        // The first wait has ended; from now on its deadline may pass at any time.
        let late = go(2, AsWritten, time_passes);
        // A select, so that this wait can be claimed as well.
        let second = crate::chan::select::run(
            [crate::chan::select::Case::Recv(&ends.1)],
            crate::chan::select::Wait::ForEver,
        );
        assert_eq!(second.value(), Some(8));
        late.join().unwrap();
        assert!(sender.join().unwrap().iter().all(Result::is_ok));
        ends.1.assert_no_waiters();
    });
}

/// `try_recv` returns "closed" only when the buffer is empty.
pub fn try_recv_against_close() {
    explore(Bound::All, || {
        let ends = channel(1);
        let sender = go(1, AsWritten, {
            let ends = ends.clone();
            move || {
                ends.0.send(7, NEVER).unwrap();
                ends.0.close();
            }
        });
        match ends.1.try_recv() {
            Ok(value) => assert_eq!(value, 7),
            Err(Failed::NotNow) => assert_eq!(ends.1.recv(NEVER), Ok(7)),
            Err(_) => panic!("closed, though the value was not received"),
        }
        sender.join().unwrap();
        assert_eq!(ends.1.recv(NEVER), Err(Failed::Closed));
    });
}

/// The last handles of both sides are dropped at once, with a value in the channel. The value is
/// dropped once, and the channel is freed once, by a thread that sees what the other did.
pub fn last_handles_are_dropped_at_once() {
    for tx_rx in [bounded::<Arc<()>> as fn(usize) -> _, |_| unbounded::<Arc<()>>()] {
        explore(Bound::All, move || {
            i_am(0, AsWritten);
            let alive = Arc::new(());
            let (tx, rx) = tx_rx(1);
            let sender = go(1, AsWritten, {
                let value = alive.clone();
                move || {
                    let _ = tx.send(value, NEVER);
                }
            });
            drop(rx);
            sender.join().unwrap();
            assert_eq!(Arc::strong_count(&alive), 1, "a value is left, or was dropped twice");
        });
    }
}

/// A task receives: it may be polled before its wake-up, and its memory may be used again at once.
pub fn task_receive_against_send() {
    for cap in [0, 1] {
        explore(Bound::All, move || {
            let ends = channel(cap);
            let sender = sends(1, &ends, 7);
            let got = match TaskRecv::begin(&ends.1, 0) {
                Ok(result) => result,
                Err(waits) => waits.wait(),
            };
            assert_eq!(got, Ok(7));
            assert!(sender.join().unwrap());
            ends.1.assert_no_waiters();
        });
    }
}

/// The future of a task that receives is dropped while a sender sends: the value is in the channel,
/// or was not sent.
pub fn dropped_receive_against_try_send() {
    for cap in [0, 1] {
        explore(Bound::All, move || {
            let ends = channel(cap);
            let sender = go(1, AsWritten, {
                let ends = ends.clone();
                move || ends.0.try_send(7).is_ok()
            });
            let got = match TaskRecv::begin(&ends.1, 0) {
                Ok(result) => result.ok(),
                Err(waits) => {
                    waits.cancel();
                    None
                }
            };
            let sent = sender.join().unwrap();
            let got = got.or_else(|| ends.1.try_recv().ok());
            assert_eq!(got, sent.then_some(7), "sent and lost, or received without a sender");
            assert_eq!(ends.1.try_recv(), Err(Failed::NotNow));
            ends.1.assert_no_waiters();
        });
    }
}

/// The future of a task that receives is dropped while a sender sends and another receiver waits:
/// that receiver gets the value.
pub fn dropped_receive_passes_its_value_on() {
    explore(Bound::Preemptions(3), || {
        let ends = channel(0);
        let sender = sends(1, &ends, 7);
        let receiver = go(2, AsWritten, {
            let ends = ends.clone();
            move || ends.1.recv(NEVER)
        });
        let got = match TaskRecv::begin(&ends.1, 0) {
            Ok(result) => {
                // The task was faster: another value ends the receiver's wait.
                ends.0.send(8, NEVER).unwrap();
                result
            }
            Err(waits) => {
                waits.cancel();
                Ok(8)
            }
        };
        let other = receiver.join().unwrap();
        assert!((got, other) == (Ok(7), Ok(8)) || (got, other) == (Ok(8), Ok(7)));
        assert!(sender.join().unwrap());
        ends.1.assert_no_waiters();
    });
}

/// A close ends the wait of a task, or finds its future dropped.
pub fn close_against_waiting_task() {
    for drops in [false, true] {
        explore(Bound::All, move || {
            let ends = channel(0);
            let closer = go(1, AsWritten, {
                let ends = ends.clone();
                move || ends.0.close()
            });
            match TaskRecv::begin(&ends.1, 0) {
                Ok(result) => assert_eq!(result, Err(Failed::Closed)),
                Err(waits) if drops => waits.cancel(),
                Err(waits) => assert_eq!(waits.wait(), Err(Failed::Closed)),
            }
            closer.join().unwrap();
            ends.1.assert_no_waiters();
        });
    }
}

/// Mutation check: a taker's last access to the sudog of a task is not published.
pub fn detects_unpublished_state() {
    must_fail(
        Mutation::Everywhere("queue.rs", Op::Store, Half::Release),
        task_receive_against_send,
    );
}

/// Mutation check: a task does not acquire the state that it reads.
pub fn detects_unacquired_state() {
    must_fail(Mutation::Everywhere("queue.rs", Op::Load, Half::Acquire), task_receive_against_send);
}

/// Mutation check: a lock that excludes no thread.
pub fn detects_missing_lock() {
    must_fail(Mutation::Broken(Part::ChannelLock), send_against_recv);
}

/// Mutation check: the deadline claims a wait that a sender has claimed.
pub fn detects_double_claim() {
    must_fail(Mutation::Broken(Part::Claim), deadline_against_send);
}

/// Mutation check: waits without numbers.
pub fn detects_stale_deadline() {
    must_fail(Mutation::Broken(Part::WaitNumber), stale_deadline_ends_no_later_wait);
}

/// Mutation check: without Acquire in the drop of a last handle, the thread that frees the channel
/// does not see what the other one did.
pub fn detects_unordered_free() {
    must_fail(
        Mutation::Everywhere("handle.rs", Op::Change, Half::Acquire),
        last_handles_are_dropped_at_once,
    );
}
