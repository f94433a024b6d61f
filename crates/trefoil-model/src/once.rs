//! Checks of a once's word (`sync/once_word.rs`).
//!
//! The waits are loom's; the steps around the word restate `sync/once.rs`. What the initialiser
//! does is a loom cell: loom reports a caller that does not see it as a data race.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex};
use loom::thread;

use crate::explore::{Bound, explore, must_fail};
use crate::once_word_rs::{Begin, InitResult, OnPoison, OnceWord, WaitFor, WordState};
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

    /// Puts caller `me` into the queue, and sleeps there until it is woken. Returns at once if
    /// there is nothing to wait for.
    fn sleep(&self, me: usize, wait_for: WaitFor) {
        {
            let mut queue = self.queue.lock().unwrap();
            if !self.word.queue_waiter(wait_for) {
                return;
            }
            queue.push(me);
        }
        let mut woken = self.waiters[me].0.lock().unwrap();
        while !*woken {
            woken = self.waiters[me].1.wait(woken).unwrap();
        }
        *woken = false;
    }

    /// Waits, as caller `me`, until an initialiser has returned. Returns false if one has panicked
    /// and the caller refuses that.
    fn wait(&self, me: usize, on_poison: OnPoison) -> bool {
        while !self.word.is_done() {
            if on_poison == OnPoison::Refuse && self.word.state() == WordState::Poisoned {
                return false;
            }
            self.sleep(me, WaitFor::Completion(on_poison));
        }
        // SAFETY: loom checks that the initialiser's write is visible.
        self.effect.with(|e| assert_eq!(unsafe { *e }, 1));
        true
    }

    /// Runs caller `me`. Returns how its own initialiser ended; None if it ran none. The
    /// initialiser ends with `result`. Callers ignore initialisers that have panicked.
    fn call(&self, me: usize, result: InitResult) -> Option<InitResult> {
        loop {
            match self.word.begin(OnPoison::Ignore) {
                Begin::Done => break,
                Begin::Poisoned => unreachable!("it ignores that"),
                Begin::Run { .. } => {
                    if result == InitResult::Done {
                        // SAFETY: loom reports any concurrent access.
                        self.effect.with_mut(|e| unsafe { *e += 1 });
                    }
                    self.finish(result);
                    return Some(result);
                }
                Begin::Wait => self.sleep(me, WaitFor::EndOfRun),
            }
        }
        assert!(self.word.is_done());
        // SAFETY: loom checks that the initialiser's write is visible.
        self.effect.with(|e| assert_eq!(unsafe { *e }, 1));
        None
    }
}

/// Runs `callers` callers at once. Their initialisers, if they run, end as `result` says.
fn run(bound: Bound, callers: usize, result: fn(usize) -> InitResult) {
    explore(bound, move || {
        let model = Model::new();
        let others: Vec<_> = (1..callers)
            .map(|me| {
                let model = model.clone();
                thread::spawn(move || model.call(me, result(me)))
            })
            .collect();
        let mut all = vec![model.call(0, result(0))];
        all.extend(others.into_iter().map(|t| t.join().unwrap()));
        let ran = all.iter().filter(|ended| **ended == Some(InitResult::Done)).count();
        assert_eq!(ran, 1, "runs exactly once");
    });
}

/// One caller runs the initialiser; the other waits, or comes later.
pub fn two_callers() {
    run(Bound::All, 2, |_| InitResult::Done);
}

/// Two callers wait.
pub fn three_callers() {
    run(Bound::Preemptions(3), 3, |_| InitResult::Done);
}

/// The first attempt gives up: one of the waiters runs the initialiser.
pub fn failed_initialiser_is_run_by_a_waiter() {
    run(Bound::Preemptions(3), 3, |me| if me == 1 { InitResult::Retry } else { InitResult::Done });
}

/// The first attempt panics: one of the waiters, which ignore that, runs the initialiser.
pub fn poisoned_once_is_run_by_a_waiter() {
    run(Bound::Preemptions(3), 3, |me| if me == 1 { InitResult::Poison } else { InitResult::Done });
}

/// One initialiser panics and another one returns. A caller that only waits, from before the first
/// begins or later, sees the second; one that refuses poison may return before.
fn waits(on_poison: OnPoison) {
    explore(Bound::Preemptions(3), move || {
        let model = Model::new();
        let waiter = thread::spawn({
            let model = model.clone();
            move || model.wait(2, on_poison)
        });
        let fails = thread::spawn({
            let model = model.clone();
            move || model.call(1, InitResult::Poison)
        });
        let ran = model.call(0, InitResult::Done);
        let failed = fails.join().unwrap();
        assert_eq!(ran, Some(InitResult::Done));
        let saw_the_end = waiter.join().unwrap();
        assert!(saw_the_end || (on_poison == OnPoison::Refuse && failed.is_some()));
    });
}

/// The wait ends with the initialiser that returns.
pub fn wait_ignores_a_panic() {
    waits(OnPoison::Ignore);
}

/// The wait ends with the initialiser that returns, or with the one that panics.
pub fn wait_ends_with_a_panic() {
    waits(OnPoison::Refuse);
}

/// Mutation check: without Release in `finish` no other caller sees the effect.
pub fn detects_unpublished_effect() {
    must_fail(Mutation::Everywhere("once_word.rs", Op::Change, Half::Release), two_callers);
}

/// Mutation check: without Acquire in `is_done` a caller does not see the effect.
pub fn detects_unacquired_done() {
    must_fail(Mutation::Everywhere("once_word.rs", Op::Load, Half::Acquire), two_callers);
}
