//! Checks of the mutex's word (`sync/mutex_word.rs`).
//!
//! The queue, its lock and the waits are loom's; the steps between them restate `sync/mutex.rs`.
//! What the mutex guards is a loom cell: loom reports two holders at once, or a holder that does
//! not see the work of the last one, as a data race. A forgotten waiter is a deadlock.

use std::collections::VecDeque;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::Mutex;
use loom::thread;

use crate::explore::{Bound, explore, must_fail, sweep};
use crate::mutex_word_rs::{Contender, MutexMode, MutexWord, NextWaiter, QueueState, Unlocked};
use crate::queued_waiter::QueuedWaiter;
use crate::shim::{AtomicU32, Half, Mutation, Op, Part, is_broken};

/// What a waker tells the waiter that it wakes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Word {
    /// The mutex is handed over: the waiter has it.
    Yours,
    /// The waiter competes for the mutex, and owns `WOKEN`.
    Try,
    /// The waiter competes for the mutex. Another goroutine owns `WOKEN`.
    TryUnannounced,
}

/// Whether the caller has a deadline.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Deadline {
    Never,
    /// It passes as soon as the caller is in the queue.
    Passed,
}

/// Whether the caller spins, and says so, before it waits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Spins {
    Yes,
    No,
}

/// When a waiter starves. In `trefoil` it starves after a time.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Starvation {
    Never,
    /// As soon as it was woken and did not get the mutex.
    AtOnce,
}

struct Model {
    word: MutexWord,
    queue: Mutex<VecDeque<Arc<QueuedWaiter<Word>>>>,
    data: UnsafeCell<u32>,
    starvation: Starvation,
}

// SAFETY: loom checks that accesses to the cell are ordered; that is the point.
unsafe impl Sync for Model {}
// SAFETY: as above.
unsafe impl Send for Model {}

impl Model {
    fn new(starvation: Starvation) -> Arc<Model> {
        Arc::new(Model {
            word: MutexWord(AtomicU32::new(0)),
            queue: Mutex::new(VecDeque::new()),
            data: UnsafeCell::new(0),
            starvation,
        })
    }

    /// Locks the mutex. Returns false if the deadline passed.
    fn lock(&self, deadline: Deadline, spins: Spins) -> bool {
        if self.word.lock_fast() || self.word.try_lock(Contender::default()) {
            return true;
        }
        let (mut woken, mut starving, mut again) = (false, false, false);
        loop {
            if spins == Spins::Yes && !woken {
                woken = self.word.announce();
            }
            if self.word.try_lock(Contender { owns_woken: woken, starving }) {
                return true;
            }
            let waiter = QueuedWaiter::new();
            {
                let mut queue = self.queue.lock().unwrap();
                if !self.word.join_queue(Contender { owns_woken: woken, starving }) {
                    continue;
                }
                if again {
                    queue.push_front(waiter.clone());
                } else {
                    queue.push_back(waiter.clone());
                }
            }
            if deadline == Deadline::Passed && waiter.claim() {
                self.withdraw(&waiter);
                return false;
            }
            // If the deadline has passed, a waker has claimed the wait: its wake-up will come.
            again = true;
            match waiter.sleep() {
                Word::Yours => return true,
                word => {
                    woken = word == Word::Try;
                    starving = self.starvation == Starvation::AtOnce;
                }
            }
        }
    }

    fn withdraw(&self, waiter: &Arc<QueuedWaiter<Word>>) {
        let mut queue = self.queue.lock().unwrap();
        let before = queue.len();
        queue.retain(|other| !Arc::ptr_eq(other, waiter));
        if queue.len() < before && queue.is_empty() {
            self.report_empty_queue();
        }
    }

    /// Reports that the queue is empty now.
    fn report_empty_queue(&self) {
        if !is_broken(Part::EmptyQueue) {
            self.word.queue_emptied();
        }
    }

    /// Takes the first waiter that can be claimed; drops those whose deadline has passed.
    fn take_first(
        &self,
        queue: &mut VecDeque<Arc<QueuedWaiter<Word>>>,
    ) -> Option<Arc<QueuedWaiter<Word>>> {
        let first = std::iter::from_fn(|| queue.pop_front()).find(|waiter| waiter.claim());
        if first.is_none() {
            self.report_empty_queue();
        }
        first
    }

    fn take_next(&self) -> Option<(Arc<QueuedWaiter<Word>>, Word)> {
        let mut queue = self.queue.lock().unwrap();
        match self.word.next() {
            NextWaiter::None => None,
            NextWaiter::Wake => {
                let first = self.take_first(&mut queue)?;
                let announced = self.word.woke(state_of(&queue));
                Some((first, if announced { Word::Try } else { Word::TryUnannounced }))
            }
            NextWaiter::HandOver => {
                let Some(first) = self.take_first(&mut queue) else {
                    let _ = self.word.unlock();
                    return None;
                };
                let rest = state_of(&queue);
                let starving =
                    rest == QueueState::NotEmpty && self.starvation == Starvation::AtOnce;
                let mode = if starving { MutexMode::Starvation } else { MutexMode::Normal };
                self.word.handed_over(rest, mode);
                let word = if is_broken(Part::HandOver) { Word::Try } else { Word::Yours };
                Some((first, word))
            }
        }
    }

    fn unlock(&self) {
        if self.word.unlock() == Unlocked::Done {
            return;
        }
        if let Some((waiter, word)) = self.take_next() {
            waiter.wake(word);
        }
    }

    /// Unlocks, and hands the mutex to the first waiter.
    fn unlock_fair(&self) {
        if !self.word.has_queue() {
            return self.unlock();
        }
        let first = {
            let mut queue = self.queue.lock().unwrap();
            let first = self.take_first(&mut queue);
            if first.is_some() {
                let rest = state_of(&queue);
                let starving =
                    rest == QueueState::NotEmpty && self.starvation == Starvation::AtOnce;
                let mode = if starving { MutexMode::Starvation } else { MutexMode::Normal };
                self.word.handed_over(rest, mode);
            }
            first
        };
        match first {
            Some(waiter) => {
                let word = if is_broken(Part::HandOver) { Word::Try } else { Word::Yours };
                waiter.wake(word);
            }
            None => self.unlock(),
        }
    }

    /// The critical section. loom reports two threads in it, and one that does not see the other's
    /// work.
    fn work(&self) {
        // SAFETY: loom reports any concurrent access.
        self.data.with_mut(|n| unsafe { *n += 1 });
    }

    fn round(&self) {
        assert!(self.lock(Deadline::Never, Spins::No));
        self.work();
        self.unlock();
    }

    /// Asserts at the end that the mutex is free, the queue empty and all work visible.
    fn check(&self, n: u32) {
        assert!(self.queue.lock().unwrap().is_empty());
        assert!(self.word.try_lock(Contender::default()), "still locked, or starving");
        // SAFETY: as above.
        self.data.with(|data| assert_eq!(unsafe { *data }, n));
        assert_eq!(self.word.unlock(), Unlocked::Done);
        assert!(self.word.lock_fast());
    }
}

fn state_of<T>(queue: &VecDeque<T>) -> QueueState {
    if queue.is_empty() { QueueState::Empty } else { QueueState::NotEmpty }
}

/// Lets `threads` goroutines lock and unlock `rounds` times each.
fn run(bound: Bound, starvation: Starvation, threads: u32, rounds: u32) {
    explore(bound, move || {
        let model = Model::new(starvation);
        let others: Vec<_> = (1..threads)
            .map(|_| {
                let model = model.clone();
                thread::spawn(move || (0..rounds).for_each(|_| model.round()))
            })
            .collect();
        (0..rounds).for_each(|_| model.round());
        others.into_iter().for_each(|t| t.join().unwrap());
        model.check(threads * rounds);
    });
}

/// Two goroutines lock once: one exchange each, or a wait and a wake-up.
pub fn two_lock_and_unlock() {
    run(Bound::All, Starvation::Never, 2, 1);
}

/// A woken goroutine competes with a newcomer.
pub fn two_lock_twice() {
    run(Bound::Preemptions(3), Starvation::Never, 2, 2);
}

/// Two goroutines wait in the queue.
pub fn three_lock() {
    run(Bound::Preemptions(3), Starvation::Never, 3, 1);
}

/// A starving goroutine gets the mutex handed over.
pub fn starving_two_lock_twice() {
    run(Bound::Preemptions(3), Starvation::AtOnce, 2, 2);
}

/// The same with another waiter in the queue and a newcomer at the moment of the hand-over.
pub fn starving_three() {
    run(Bound::Preemptions(3), Starvation::AtOnce, 3, 1);
}

/// Three goroutines lock; one of them has a deadline, which passes.
fn with_deadline(starvation: Starvation) {
    explore(Bound::Preemptions(3), move || {
        let model = Model::new(starvation);
        let limited = thread::spawn({
            let model = model.clone();
            move || {
                let got = model.lock(Deadline::Passed, Spins::No);
                if got {
                    model.work();
                    model.unlock();
                }
                u32::from(got)
            }
        });
        let other = thread::spawn({
            let model = model.clone();
            move || model.round()
        });
        model.round();
        other.join().unwrap();
        let got = limited.join().unwrap();
        model.check(2 + got);
    });
}

/// A waiter leaves the queue at its deadline while an unlock searches the queue.
pub fn withdrawn_against_unlock() {
    with_deadline(Starvation::Never);
}

/// The same while the mutex is handed over.
pub fn withdrawn_against_handover() {
    with_deadline(Starvation::AtOnce);
}

/// A goroutine unlocks fairly, locks again and unlocks, while two others lock. If `deadline` is
/// `Passed`, one of them gives up when it is in the queue.
fn bump(starvation: Starvation, deadline: Deadline) {
    explore(Bound::Preemptions(2), move || {
        let model = Model::new(starvation);
        let first = thread::spawn({
            let model = model.clone();
            move || {
                let got = model.lock(deadline, Spins::No);
                if got {
                    model.work();
                    model.unlock();
                }
                u32::from(got)
            }
        });
        let second = thread::spawn({
            let model = model.clone();
            move || model.round()
        });
        assert!(model.lock(Deadline::Never, Spins::No));
        model.work();
        model.unlock_fair();
        model.round();
        second.join().unwrap();
        let got = first.join().unwrap();
        assert!(got == 1 || deadline == Deadline::Passed);
        model.check(3 + got);
    });
}

/// A fair unlock hands the mutex over while others lock and wait, in normal mode.
pub fn fair_unlock_against_two() {
    bump(Starvation::Never, Deadline::Never);
}

/// The same in starvation mode.
pub fn starving_fair_unlock_against_two() {
    bump(Starvation::AtOnce, Deadline::Never);
}

/// A waiter leaves the queue at its deadline while a fair unlock takes it.
pub fn withdrawn_against_fair_unlock() {
    bump(Starvation::Never, Deadline::Passed);
}

/// Mutation check: the goroutine to which a fair unlock hands the mutex is not told.
pub fn detects_fair_handover_not_reported() {
    must_fail(Mutation::Broken(Part::HandOver), fair_unlock_against_two);
}

/// A spinning goroutine owns `WOKEN` without having been in the queue.
pub fn spinner_announces() {
    for starvation in [Starvation::Never, Starvation::AtOnce] {
        explore(Bound::Preemptions(2), move || {
            let model = Model::new(starvation);
            let spinner = thread::spawn({
                let model = model.clone();
                move || {
                    assert!(model.lock(Deadline::Never, Spins::Yes));
                    model.work();
                    model.unlock();
                }
            });
            let other = thread::spawn({
                let model = model.clone();
                move || model.round()
            });
            model.round();
            spinner.join().unwrap();
            other.join().unwrap();
            model.check(3);
        });
    }
}

/// Mutation check: without Release in `unlock` the next holder does not see the work.
pub fn detects_unreleased_unlock() {
    must_fail(
        Mutation::Everywhere("mutex_word.rs", Op::Change, Half::Release),
        two_lock_and_unlock,
    );
}

/// Mutation check: without Acquire in `lock` the next holder does not see the work.
pub fn detects_unacquired_lock() {
    must_fail(
        Mutation::Everywhere("mutex_word.rs", Op::Change, Half::Acquire),
        two_lock_and_unlock,
    );
}

/// Mutation check: the goroutine that is handed the mutex is not told.
pub fn detects_handover_not_reported() {
    must_fail(Mutation::Broken(Part::HandOver), starving_two_lock_twice);
}

/// Mutation check: the last waiter leaves without reporting the empty queue, in starvation mode.
pub fn detects_empty_queue_not_reported() {
    must_fail(Mutation::Broken(Part::EmptyQueue), withdrawn_against_handover);
}

/// Which orderings of `mutex_word.rs` do the checks need? Prints a table.
pub fn sweep_orderings() {
    for check in [two_lock_and_unlock, starving_two_lock_twice] {
        sweep(check);
    }
}
