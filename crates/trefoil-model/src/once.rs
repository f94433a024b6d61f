//! Checks of a once's word (`sync/once_word.rs`).

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex};
use loom::thread;

use crate::explore::{Bound, explore, must_fail};
use crate::once_word_rs::{Begin, InitResult, OnceWord};
use crate::shim::{AtomicUsize, Half, Mutation, Op};

/// Sleepers; place `(i + 1) * 4` is bed `i`.
const BEDS: usize = 3;

struct World {
    word: OnceWord,
    effect: UnsafeCell<u32>,
    before: [UnsafeCell<usize>; BEDS],
    beds: [(Mutex<bool>, Condvar); BEDS],
}

// SAFETY: loom checks that accesses to the cells are ordered; that is the point.
unsafe impl Sync for World {}
// SAFETY: as above.
unsafe impl Send for World {}

impl World {
    fn new() -> Arc<World> {
        Arc::new(World {
            word: OnceWord(AtomicUsize::new(0)),
            effect: UnsafeCell::new(0),
            before: std::array::from_fn(|_| UnsafeCell::new(0)),
            beds: std::array::from_fn(|_| (Mutex::new(false), Condvar::new())),
        })
    }

    fn wake(&self, mut place: usize) {
        while place != 0 {
            let i = place / 4 - 1;
            // SAFETY: loom checks that the sleeper's write is visible.
            let before = self.before[i].with(|b| unsafe { *b });
            *self.beds[i].0.lock().unwrap() = true;
            self.beds[i].1.notify_one();
            place = before;
        }
    }

    /// Caller `me`; true: it ran the initialiser. `fails`: its attempt gives up.
    fn call(&self, me: usize, fails: bool) -> bool {
        loop {
            match self.word.begin() {
                Begin::Done => break,
                Begin::Run => {
                    if !fails {
                        // SAFETY: loom checks that nobody else accesses it now.
                        self.effect.with_mut(|e| unsafe { *e += 1 });
                    }
                    let result = if fails { InitResult::Retry } else { InitResult::Done };
                    self.wake(self.word.finish(result));
                    if fails {
                        return false;
                    }
                    return true;
                }
                Begin::Wait => {
                    // SAFETY: the place is ours until it is published.
                    let chain = |b| self.before[me].with_mut(|before| unsafe { *before = b });
                    if self.word.wait((me + 1) * 4, chain) {
                        let mut woken = self.beds[me].0.lock().unwrap();
                        while !*woken {
                            woken = self.beds[me].1.wait(woken).unwrap();
                        }
                        *woken = false;
                    }
                }
            }
        }
        assert!(self.word.is_done());
        // SAFETY: loom checks that the initialiser's write is visible.
        self.effect.with(|e| assert_eq!(unsafe { *e }, 1));
        false
    }
}

fn run(bound: Bound, callers: usize, fails: fn(usize) -> bool) {
    explore(bound, move || {
        let world = World::new();
        let others: Vec<_> = (1..callers)
            .map(|me| {
                let world = world.clone();
                thread::spawn(move || world.call(me, fails(me)))
            })
            .collect();
        let mut ran = usize::from(world.call(0, fails(0)));
        ran += others.into_iter().map(|t| usize::from(t.join().unwrap())).sum::<usize>();
        assert_eq!(ran, 1, "runs exactly once");
    });
}

/// One runs it, the other waits, or comes too late.
pub fn two_callers() {
    run(Bound::All, 2, |_| false);
}

/// A chain of two sleepers.
pub fn three_callers() {
    run(Bound::Preemptions(3), 3, |_| false);
}

/// The first to run gives up: one of those who wait runs it.
pub fn gives_up_and_the_other_runs() {
    run(Bound::Preemptions(3), 3, |me| me == 1);
}

/// Teeth: without Release in `finish` nobody sees the effect.
pub fn teeth_unpublished_effect() {
    must_fail(Mutation::Everywhere("once_word.rs", Op::Change, Half::Release), two_callers);
}

/// Teeth: without Acquire in `is_done`, likewise.
pub fn teeth_unacquired_done() {
    must_fail(Mutation::Everywhere("once_word.rs", Op::Load, Half::Acquire), two_callers);
}
