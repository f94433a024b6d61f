//! Checks of a once's word (`sync/once_word.rs`).
//!
//! The waits are loom's; the steps around the word restate `sync/once.rs`. What the initialiser
//! does is a loom cell: loom reports a caller that does not see it as a data race.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex};
use loom::thread;

use crate::explore::{Bound, explore, must_fail};
use crate::once_word_rs::{Begin, InitResult, OnceWord};
use crate::shim::{AtomicU32, Half, Mutation, Op};

/// The number of callers.
const CALLERS: usize = 3;

struct Model {
    word: OnceWord,
    /// What the initialiser did.
    effect: UnsafeCell<u32>,
    /// The callers that wait.
    queue: Mutex<Vec<usize>>,
    /// Whether each caller was woken, and where it sleeps.
    waiters: [(Mutex<bool>, Condvar); CALLERS],
}

// SAFETY: loom checks that accesses to the cells are ordered; that is the point.
unsafe impl Sync for Model {}
// SAFETY: as above.
unsafe impl Send for Model {}

impl Model {
    fn new() -> Arc<Model> {
        Arc::new(Model {
            word: OnceWord(AtomicU32::new(0)),
            effect: UnsafeCell::new(0),
            queue: Mutex::new(Vec::new()),
            waiters: std::array::from_fn(|_| (Mutex::new(false), Condvar::new())),
        })
    }

    /// Ends the run of an initialiser.
    fn finish(&self, result: InitResult) {
        if self.word.finish(result) {
            let all = std::mem::take(&mut *self.queue.lock().unwrap());
            for i in all {
                *self.waiters[i].0.lock().unwrap() = true;
                self.waiters[i].1.notify_one();
            }
        }
    }

    /// Puts caller `me` into the queue. Returns false if no initialiser runs.
    fn enqueue(&self, me: usize) -> bool {
        let mut queue = self.queue.lock().unwrap();
        let waits = self.word.queue_waiter();
        if waits {
            queue.push(me);
        }
        waits
    }

    /// Runs caller `me`. Returns true if it ran the initialiser to its end. If `fails`, its attempt
    /// gives up.
    fn call(&self, me: usize, fails: bool) -> bool {
        loop {
            match self.word.begin() {
                Begin::Done => break,
                Begin::Run => {
                    if !fails {
                        // SAFETY: loom reports any concurrent access.
                        self.effect.with_mut(|e| unsafe { *e += 1 });
                    }
                    let result = if fails { InitResult::Retry } else { InitResult::Done };
                    self.finish(result);
                    return !fails;
                }
                Begin::Wait => {
                    if self.enqueue(me) {
                        let mut woken = self.waiters[me].0.lock().unwrap();
                        while !*woken {
                            woken = self.waiters[me].1.wait(woken).unwrap();
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

/// Runs `callers` callers at once. Those for which `fails` returns true give up if they run.
fn run(bound: Bound, callers: usize, fails: fn(usize) -> bool) {
    explore(bound, move || {
        let model = Model::new();
        let others: Vec<_> = (1..callers)
            .map(|me| {
                let model = model.clone();
                thread::spawn(move || model.call(me, fails(me)))
            })
            .collect();
        let mut ran = usize::from(model.call(0, fails(0)));
        ran += others.into_iter().map(|t| usize::from(t.join().unwrap())).sum::<usize>();
        assert_eq!(ran, 1, "runs exactly once");
    });
}

/// One caller runs the initialiser; the other waits, or comes later.
pub fn two_callers() {
    run(Bound::All, 2, |_| false);
}

/// Two callers wait.
pub fn three_callers() {
    run(Bound::Preemptions(3), 3, |_| false);
}

/// The first attempt gives up: one of the waiters runs the initialiser.
pub fn failed_initialiser_is_run_by_a_waiter() {
    run(Bound::Preemptions(3), 3, |me| me == 1);
}

/// Mutation check: without Release in `finish` no other caller sees the effect.
pub fn detects_unpublished_effect() {
    must_fail(Mutation::Everywhere("once_word.rs", Op::Change, Half::Release), two_callers);
}

/// Mutation check: without Acquire in `is_done` a caller does not see the effect.
pub fn detects_unacquired_done() {
    must_fail(Mutation::Everywhere("once_word.rs", Op::Load, Half::Acquire), two_callers);
}
