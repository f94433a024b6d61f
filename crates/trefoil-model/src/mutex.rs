//! Checks of the mutex's word (`sync/mutex_word.rs`).
//!
//! The queue, its lock and the beds are loom's; the transitions between them are those of
//! `sync/mutex.rs`. What the mutex guards is a loom cell: two holders at once, or a holder that does not
//! see the work of the one before, are reported as a data race. A sleeper that is forgotten is a deadlock.

use std::collections::VecDeque;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::Mutex;
use loom::thread;

use crate::explore::{Bound, explore, must_fail, sweep};
use crate::mutex_word_rs::{Contender, MutexMode, MutexWord, NextWaiter, QueueState, Unlocked};
use crate::nap::Nap;
use crate::shim::{AtomicU32, Half, Mutation, Op, Part, is_broken};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Word {
    Yours,
    Try,
    TryUnannounced,
}

struct World {
    word: MutexWord,
    queue: Mutex<VecDeque<Arc<Nap<Word>>>>,
    data: UnsafeCell<u32>,
    /// Who loses once starves.
    hungry: bool,
}

// SAFETY: loom checks that accesses to the cell are ordered; that is the point.
unsafe impl Sync for World {}
// SAFETY: as above.
unsafe impl Send for World {}

impl World {
    fn new(hungry: bool) -> Arc<World> {
        Arc::new(World {
            word: MutexWord(AtomicU32::new(0)),
            queue: Mutex::new(VecDeque::new()),
            data: UnsafeCell::new(0),
            hungry,
        })
    }

    /// `patient`: waits for as long as it takes. Else it gives up as soon as it is in the queue.
    fn lock(&self, patient: bool, announce: bool) -> bool {
        if self.word.lock_fast() || self.word.try_lock(Contender::default()) {
            return true;
        }
        let (mut woken, mut starving, mut again) = (false, false, false);
        loop {
            if announce && !woken {
                woken = self.word.announce();
            }
            if self.word.try_lock(Contender { owns_woken: woken, starving }) {
                return true;
            }
            let bed = Nap::new();
            {
                let mut queue = self.queue.lock().unwrap();
                if !self.word.join_queue(Contender { owns_woken: woken, starving }) {
                    continue;
                }
                if again {
                    queue.push_front(bed.clone());
                } else {
                    queue.push_back(bed.clone());
                }
            }
            if !patient && bed.claim() {
                self.withdraw(&bed);
                return false;
            }
            // Taken, if it was impatient: the wake-up is on its way.
            again = true;
            match bed.sleep() {
                Word::Yours => return true,
                word => {
                    woken = word == Word::Try;
                    starving = self.hungry;
                }
            }
        }
    }

    fn withdraw(&self, bed: &Arc<Nap<Word>>) {
        let mut queue = self.queue.lock().unwrap();
        let before = queue.len();
        queue.retain(|b| !Arc::ptr_eq(b, bed));
        if queue.len() < before && queue.is_empty() {
            self.deserted();
        }
    }

    fn deserted(&self) {
        if !is_broken(Part::Desertion) {
            self.word.queue_emptied();
        }
    }

    /// Those whose deadline has passed are dropped on the way.
    fn take_first(&self, queue: &mut VecDeque<Arc<Nap<Word>>>) -> Option<Arc<Nap<Word>>> {
        let first = std::iter::from_fn(|| queue.pop_front()).find(|bed| bed.claim());
        if first.is_none() {
            self.deserted();
        }
        first
    }

    fn take_next(&self) -> Option<(Arc<Nap<Word>>, Word)> {
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
                let starving = rest == QueueState::NotEmpty && self.hungry;
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
        if let Some((bed, word)) = self.take_next() {
            bed.wake(word);
        }
    }

    /// The section: loom sees if two are in it, or one does not see the other's work.
    fn work(&self) {
        // SAFETY: loom checks that nobody else accesses it now.
        self.data.with_mut(|n| unsafe { *n += 1 });
    }

    fn round(&self) {
        assert!(self.lock(true, false));
        self.work();
        self.unlock();
    }

    /// Afterwards: free, nobody queued, everybody's work seen.
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

fn run(bound: Bound, hungry: bool, threads: u32, rounds: u32) {
    explore(bound, move || {
        let world = World::new(hungry);
        let others: Vec<_> = (1..threads)
            .map(|_| {
                let world = world.clone();
                thread::spawn(move || (0..rounds).for_each(|_| world.round()))
            })
            .collect();
        (0..rounds).for_each(|_| world.round());
        others.into_iter().for_each(|t| t.join().unwrap());
        world.check(threads * rounds);
    });
}

/// One exchange each, or a sleep and a wake-up.
pub fn two_lock_and_unlock() {
    run(Bound::All, false, 2, 1);
}

/// The one that was woken meets a newcomer.
pub fn two_lock_twice() {
    run(Bound::Preemptions(3), false, 2, 2);
}

/// A queue of two.
pub fn three_lock() {
    run(Bound::Preemptions(3), false, 3, 1);
}

/// Who loses once gets it from hand to hand.
pub fn starving_two_lock_twice() {
    run(Bound::Preemptions(3), true, 2, 2);
}

/// The same, with others in the queue, and newcomers in the instant of the handover.
pub fn starving_three() {
    run(Bound::Preemptions(3), true, 3, 1);
}

fn with_impatient(hungry: bool) {
    explore(Bound::Preemptions(3), move || {
        let world = World::new(hungry);
        let impatient = thread::spawn({
            let world = world.clone();
            move || {
                let got = world.lock(false, false);
                if got {
                    world.work();
                    world.unlock();
                }
                u32::from(got)
            }
        });
        let other = thread::spawn({
            let world = world.clone();
            move || world.round()
        });
        world.round();
        other.join().unwrap();
        let got = impatient.join().unwrap();
        world.check(2 + got);
    });
}

/// Leaves the queue while somebody looks for it there.
pub fn withdrawn_against_unlock() {
    with_impatient(false);
}

/// The same while it is handed over.
pub fn withdrawn_against_handover() {
    with_impatient(true);
}

/// A spinner owns `WOKEN` without having been in the queue.
pub fn spinner_announces() {
    for hungry in [false, true] {
        explore(Bound::Preemptions(2), move || {
            let world = World::new(hungry);
            let spinner = thread::spawn({
                let world = world.clone();
                move || {
                    assert!(world.lock(true, true));
                    world.work();
                    world.unlock();
                }
            });
            let other = thread::spawn({
                let world = world.clone();
                move || world.round()
            });
            world.round();
            spinner.join().unwrap();
            other.join().unwrap();
            world.check(3);
        });
    }
}

/// Teeth: without Release in `unlock` the next holder does not see the work.
pub fn teeth_unreleased_unlock() {
    must_fail(
        Mutation::Everywhere("mutex_word.rs", Op::Change, Half::Release),
        two_lock_and_unlock,
    );
}

/// Teeth: without Acquire in `lock`, likewise.
pub fn teeth_unacquired_lock() {
    must_fail(
        Mutation::Everywhere("mutex_word.rs", Op::Change, Half::Acquire),
        two_lock_and_unlock,
    );
}

/// Teeth: who is handed the mutex is not told.
pub fn teeth_not_handed_over() {
    must_fail(Mutation::Broken(Part::HandOver), starving_two_lock_twice);
}

/// Teeth: the last one leaves the queue and does not say so, while the mutex goes from hand to hand.
pub fn teeth_desertion_unsaid() {
    must_fail(Mutation::Broken(Part::Desertion), withdrawn_against_handover);
}

/// Which orderings of `mutex_word.rs` do the checks need? Prints a table.
pub fn sweep_orderings() {
    for check in [two_lock_and_unlock, starving_two_lock_twice] {
        sweep(check);
    }
}
