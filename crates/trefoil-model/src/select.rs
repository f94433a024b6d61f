//! Checks of a select (`chan/select/passes.rs`): the claims by which exactly one arm wins.

use crate::chan::select::futures::Event;
use crate::chan::select::{Case, Chose, Wait, run, run_ready};
use crate::chan::{Receiver, Sender, bounded};
use crate::explore::{Bound, explore, must_fail};
use crate::sched::Order::{AsWritten, LastFirst};
use crate::sched::wait::{time_passes, waits_of};
use crate::sched::{Order, go, i_am};
use crate::shim::{Mutation, Part};
use crate::sys::clock::NEVER;
use loom::thread::JoinHandle;
use std::sync::Arc;

/// Two channels, a and b.
struct Two {
    a: (Sender<u32>, Receiver<u32>),
    b: (Sender<u32>, Receiver<u32>),
}

/// Returns two channels with `cap` slots each.
fn two(cap: usize) -> Arc<Two> {
    i_am(0, AsWritten);
    // Always in the same order of addresses: a select may go by it, and a model must do the same
    // thing each time.
    let mut channels = [bounded(cap), bounded(cap)];
    channels.sort_by_key(|(tx, _)| std::ptr::from_ref(tx.core()) as usize);
    let [a, b] = channels;
    Arc::new(Two { a, b })
}

impl Two {
    fn assert_no_waiters(&self) {
        self.a.1.assert_no_waiters();
        self.b.1.assert_no_waiters();
    }

    /// Starts goroutine `number`: select {receive a, receive b}.
    fn receives(self: &Arc<Two>, number: usize, order: Order) -> JoinHandle<Chose> {
        let two = self.clone();
        go(number, order, move || run([Case::Recv(&two.a.1), Case::Recv(&two.b.1)], Wait::ForEver))
    }

    /// Starts goroutine `number`: select {send a, send b}.
    fn sends(self: &Arc<Two>, number: usize, order: Order, values: [u32; 2]) -> JoinHandle<Chose> {
        let two = self.clone();
        go(number, order, move || {
            let [a, b] = values;
            run([Case::Send(&two.a.0, a), Case::Send(&two.b.0, b)], Wait::ForEver)
        })
    }
}

/// Returns what a select {send a, send b} has sent.
fn sent(chose: Chose, values: [u32; 2]) -> u32 {
    match chose {
        Chose::Sent(i) => values[i],
        other => panic!("{other:?} from a select of sends"),
    }
}

/// A select meets two senders: one wins, and the value of the other is not lost.
pub fn against_two_senders() {
    for order in [AsWritten, LastFirst] {
        explore(Bound::Preemptions(4), move || {
            let two = two(0);
            let selecting = two.receives(1, order);
            let other = go(2, AsWritten, {
                let two = two.clone();
                move || two.a.0.send(1, NEVER).unwrap()
            });
            // One of the two sends waits for a plain receive.
            let mine = two.b.0.try_send(2).is_ok();
            match (selecting, mine) {
                (selecting, true) => {
                    assert_eq!(selecting.join().unwrap(), Chose::Received(1, 2));
                    assert_eq!(two.a.1.recv(NEVER), Ok(1));
                }
                (selecting, false) => {
                    assert_eq!(selecting.join().unwrap(), Chose::Received(0, 1));
                }
            }
            other.join().unwrap();
            two.assert_no_waiters();
        });
    }
}

/// Two selects meet that register in the same order or in opposite orders. They match at one
/// channel. Each retries at most twice: once after a mutual abort, once because of a late check.
pub fn against_select() {
    for order in [AsWritten, LastFirst] {
        explore(Bound::Preemptions(6), move || {
            let two = two(0);
            let receiving = two.receives(1, order);
            let sending = run([Case::Send(&two.a.0, 1), Case::Send(&two.b.0, 2)], Wait::ForEver);
            let got = receiving.join().unwrap();
            assert_eq!(got.value(), Some(sent(sending, [1, 2])));
            assert!(waits_of(0) <= 3 && waits_of(1) <= 3, "{} {}", waits_of(0), waits_of(1));
            two.assert_no_waiters();
        });
    }
}

/// Three selects: two send, one receives twice. The sender that loses the first time is served the
/// second time.
pub fn against_two_selects() {
    explore(Bound::Preemptions(2), || {
        let two = two(0);
        let first = two.sends(1, AsWritten, [1, 2]);
        let second = two.sends(2, LastFirst, [3, 4]);
        let got = [0, 1].map(|_| {
            run([Case::Recv(&two.b.1), Case::Recv(&two.a.1)], Wait::ForEver).value().unwrap()
        });
        let mut all = [sent(first.join().unwrap(), [1, 2]), sent(second.join().unwrap(), [3, 4])];
        if all[0] != got[0] {
            all.swap(0, 1);
        }
        assert_eq!(all, got, "what was sent is what was received");
        two.assert_no_waiters();
    });
}

/// Two selects that send and receive on the same channel never receive their own value.
pub fn select_never_matches_itself() {
    for cap in [0, 1] {
        explore(Bound::All, move || {
            let two = two(cap);
            let both = |value, two: &Two| {
                run([Case::Send(&two.a.0, value), Case::Recv(&two.a.1)], Wait::ForEver)
            };
            let other = go(1, LastFirst, {
                let two = two.clone();
                move || both(1, &two)
            });
            let mine = both(0, &two);
            let theirs = other.join().unwrap();
            if cap == 0 {
                let outcomes = [mine, theirs];
                assert!(
                    outcomes == [Chose::Sent(0), Chose::Received(1, 0)]
                        || outcomes == [Chose::Received(1, 1), Chose::Sent(0)],
                    "{outcomes:?}"
                );
            }
            two.assert_no_waiters();
        });
    }
}

/// A select meets a close of one channel and a sender of the other.
pub fn against_close() {
    // All interleavings take minutes.
    explore(Bound::Preemptions(4), || {
        let two = two(0);
        let closer = go(1, AsWritten, {
            let two = two.clone();
            move || two.a.0.close()
        });
        let sender = go(2, AsWritten, {
            let two = two.clone();
            move || two.b.0.try_send(7).is_ok()
        });
        let chose = run([Case::Recv(&two.a.1), Case::Recv(&two.b.1)], Wait::ForEver);
        closer.join().unwrap();
        match sender.join().unwrap() {
            true => assert_eq!(chose, Chose::Received(1, 7)),
            false => assert_eq!(chose, Chose::Closed(0)),
        }
        two.assert_no_waiters();
    });
}

/// A select's deadline passes while a sender sends; the channel is closed in any case.
pub fn against_deadline() {
    explore(Bound::Preemptions(3), || {
        let two = two(0);
        let clock = go(1, AsWritten, time_passes);
        let sender = go(2, AsWritten, {
            let two = two.clone();
            move || {
                let sent = two.b.0.try_send(7).is_ok();
                two.a.0.close();
                sent
            }
        });
        let chose = run([Case::Recv(&two.a.1), Case::Recv(&two.b.1)], Wait::ForATime);
        clock.join().unwrap();
        let sent = sender.join().unwrap();
        assert_eq!(chose == Chose::Received(1, 7), sent, "{chose:?}");
        two.assert_no_waiters();
    });
}

/// Runs a select {future, receive a} while other goroutines wake the future and send.
fn future_and_receive(order: Order, wake: fn(&Event)) {
    explore(Bound::Preemptions(3), move || {
        let (two, event) = (two(0), Arc::new(Event::new()));
        let waker = go(1, AsWritten, {
            let event = event.clone();
            move || wake(&event)
        });
        let selecting = go(2, order, {
            let (two, event) = (two.clone(), event.clone());
            move || run([Case::Future(&event), Case::Recv(&two.a.1)], Wait::ForEver)
        });
        let sent = two.a.0.try_send(1).is_ok();
        if !sent && !event.is_complete() {
            // Only a send ends the select.
            two.a.0.close();
        }
        waker.join().unwrap();
        match selecting.join().unwrap() {
            Chose::Received(1, 1) => assert!(sent),
            Chose::Closed(1) => assert!(!sent),
            Chose::Output(0) => assert!(!sent && event.is_complete()),
            other => panic!("{other:?}"),
        }
        two.assert_no_waiters();
    });
}

/// A future of a select is completed while the channel of another arm becomes ready.
///
/// Race: the wake-up comes before the poll, during it, while the channel is enlisted, or when the
/// channel has claimed the wait.
pub fn future_against_send() {
    for order in [AsWritten, LastFirst] {
        future_and_receive(order, Event::complete);
    }
}

/// A future of a select is woken for nothing, twice, while the channel of another arm becomes
/// ready.
pub fn spurious_wakeups_against_send() {
    future_and_receive(AsWritten, |event| {
        event.wake();
        event.wake();
    });
}

/// A future is completed, and nothing else ends the select.
pub fn future_alone() {
    explore(Bound::All, || {
        let (two, event) = (two(0), Arc::new(Event::new()));
        let waker = go(1, AsWritten, {
            let event = event.clone();
            move || event.complete()
        });
        let chose = run([Case::Future(&event), Case::Recv(&two.a.1)], Wait::ForEver);
        assert_eq!(chose, Chose::Output(0));
        waker.join().unwrap();
        two.assert_no_waiters();
    });
}

/// Mutation check: a select that parks although a future was woken during its poll.
pub fn detects_lost_wakeup_during_poll() {
    must_fail(Mutation::Broken(Part::WakeupDuringPoll), future_alone);
}

/// Mutation check: a waker that lost the claim reads a block that is used again.
pub fn detects_waker_not_waited_for() {
    must_fail(Mutation::Broken(Part::RefusedWaker), spurious_wakeups_against_send);
}

/// Two watchers of one channel are both woken, although neither of them receives.
fn watchers_against(cap: usize, change: impl Fn(&Two) + Send + Sync + 'static) {
    let change = Arc::new(change);
    explore(Bound::Preemptions(3), move || {
        let two = two(cap);
        let watches = |number| {
            let two = two.clone();
            go(number, AsWritten, move || {
                run_ready([Case::Recv(&two.b.1), Case::Recv(&two.a.1)], Wait::ForEver)
            })
        };
        let watchers = [watches(1), watches(2)];
        change(&two);
        for watcher in watchers {
            assert_eq!(watcher.join().unwrap(), Some(1));
        }
    });
}

/// A value comes into the buffer of a channel with two watchers.
pub fn watchers_against_send() {
    watchers_against(1, |two| two.a.0.try_send(1).unwrap());
}

/// A channel with two watchers is closed.
pub fn watchers_against_close() {
    watchers_against(0, |two| two.a.0.close());
}

/// A sender begins to wait at a channel with a watcher, which then receives.
pub fn watcher_against_waiting_sender() {
    explore(Bound::All, || {
        let two = two(0);
        let watcher = go(1, AsWritten, {
            let two = two.clone();
            move || {
                let ready = run_ready([Case::Recv(&two.b.1), Case::Recv(&two.a.1)], Wait::ForEver);
                assert_eq!(ready, Some(1));
                two.a.1.try_recv()
            }
        });
        two.a.0.send(7, NEVER).unwrap();
        assert_eq!(watcher.join().unwrap(), Ok(7));
        two.assert_no_waiters();
    });
}

/// A watcher of a send meets a receive that makes room, and one whose receiver begins to wait.
pub fn watcher_of_send_against_receive() {
    for cap in [0, 1] {
        explore(Bound::All, move || {
            let two = two(cap);
            if cap == 1 {
                two.a.0.try_send(1).unwrap();
            }
            let watcher = go(1, AsWritten, {
                let two = two.clone();
                move || {
                    let ready = run_ready([Case::Send(&two.a.0, 2)], Wait::ForEver);
                    assert_eq!(ready, Some(0));
                    two.a.0.try_send(2)
                }
            });
            assert_eq!(two.a.1.recv(NEVER), Ok(if cap == 1 { 1 } else { 2 }));
            assert_eq!(watcher.join().unwrap(), Ok(()));
            two.assert_no_waiters();
        });
    }
}

/// The deadline of a watcher passes while a value comes: another watcher must not miss it.
pub fn watcher_that_times_out_takes_no_wakeup_along() {
    explore(Bound::Preemptions(3), || {
        let two = two(1);
        let late = go(1, AsWritten, {
            let two = two.clone();
            move || run_ready([Case::Recv(&two.a.1)], Wait::ForATime)
        });
        let other = go(2, AsWritten, {
            let two = two.clone();
            move || run_ready([Case::Recv(&two.a.1)], Wait::ForEver)
        });
        two.a.0.try_send(1).unwrap();
        time_passes();
        assert_eq!(other.join().unwrap(), Some(0));
        let _ = late.join().unwrap();
    });
}

/// How the arms of a select with `default` are checked.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ArmsChecked {
    /// By one select.
    AtOnce,
    /// Broken: by one select after the other.
    OneByOne,
}

/// Checks a select with `default` while one channel or the other is ready at every moment.
fn default_beside_a_change(arms: ArmsChecked) {
    explore(Bound::All, move || {
        let two = two(1);
        two.a.0.send(1, NEVER).unwrap();
        // b is filled before a is emptied.
        let other = go(1, AsWritten, {
            let two = two.clone();
            move || {
                two.b.0.send(2, NEVER).unwrap();
                two.a.1.try_recv().is_ok()
            }
        });
        let chose = match arms {
            ArmsChecked::AtOnce => run([Case::Recv(&two.b.1), Case::Recv(&two.a.1)], Wait::No),
            ArmsChecked::OneByOne => match run([Case::Recv(&two.b.1)], Wait::No) {
                Chose::Nothing => run([Case::Recv(&two.a.1)], Wait::No),
                chose => chose,
            },
        };
        assert_ne!(chose, Chose::Nothing, "one of them was ready all the time");
        other.join().unwrap();
    });
}

/// `default` is taken only if there was a moment at which no arm was ready.
pub fn default_holds_at_one_moment() {
    default_beside_a_change(ArmsChecked::AtOnce);
}

/// Mutation check: arms that are checked one after the other.
pub fn detects_default_arm_by_arm() {
    must_fail(Mutation::None, || default_beside_a_change(ArmsChecked::OneByOne));
}

/// Mutation check: two partners claim the same select.
pub fn detects_double_claim() {
    must_fail(Mutation::Broken(Part::Claim), against_two_selects);
}

/// Mutation check: a select that takes a ready arm without claiming its own wait.
pub fn detects_own_wait_not_claimed() {
    must_fail(Mutation::Broken(Part::OwnClaim), against_select);
}
