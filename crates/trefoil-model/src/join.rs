//! Checks of the join cell (`sched/goroutine/join.rs`).
//!
//! The result is a loom cell, so loom reports a data race if a result is read before its write is
//! visible, or if both parties take it for theirs.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex};
use loom::thread;

use crate::explore::{Bound, explore, must_fail, sweep};
use crate::join_rs::{Completed, Detached, JoinCell, TASK_SLEEPER};
use crate::shim::{Half, Mutation, Op};

/// Any waiter; the cell does not dereference it.
const WAITER: usize = 0x1000;
/// Any two waiters that are tasks.
const TASKS: [usize; 2] = [0x1000 | TASK_SLEEPER, 0x2000 | TASK_SLEEPER];

struct Model {
    cell: JoinCell,
    /// The result: its owner writes to it.
    result: UnsafeCell<u32>,
    /// The rest of the G's memory, likewise.
    g: UnsafeCell<u32>,
    /// What the handle's owner did before it waited or dropped the handle. The goroutine's end may
    /// rely on it.
    before: UnsafeCell<u32>,
    /// Whether the sleeping owner of the handle was woken.
    is_woken: Mutex<bool>,
    woken: Condvar,
}

// SAFETY: loom checks that accesses to the cell are ordered; that is the point.
unsafe impl Sync for Model {}
// SAFETY: as above.
unsafe impl Send for Model {}

impl Model {
    fn new() -> Arc<Model> {
        Arc::new(Model {
            cell: JoinCell::new(),
            result: UnsafeCell::new(0),
            g: UnsafeCell::new(0),
            before: UnsafeCell::new(0),
            is_woken: Mutex::new(false),
            woken: Condvar::new(),
        })
    }

    /// Runs the goroutine: result, destructors, end. Returns whether it owned the result, and
    /// whether it owned the G at the end.
    fn run(&self) -> (bool, bool) {
        // SAFETY: loom reports any concurrent access.
        self.result.with_mut(|r| unsafe { *r = 42 });
        let dropped = !self.cell.store_result();
        if dropped {
            self.check_owner_is_visible();
            self.take_result();
        }
        self.use_g();
        let freed = match self.cell.complete() {
            Completed::Kept => false,
            Completed::Wake(waiter) => {
                assert!(waiter == WAITER || TASKS.contains(&waiter));
                self.check_owner_is_visible();
                *self.is_woken.lock().unwrap() = true;
                self.woken.notify_one();
                false
            }
            Completed::Unwanted => {
                self.check_owner_is_visible();
                self.use_g();
                true
            }
        };
        (dropped, freed)
    }

    /// Uses the G's memory, as the goroutine does until its end and the owner of the G after it.
    fn use_g(&self) {
        // SAFETY: loom reports any concurrent access.
        self.g.with_mut(|g| unsafe { *g += 1 });
    }

    /// Drops the handle. Returns the same as `run`, for the handle's owner.
    fn drop_handle(&self) -> (bool, bool) {
        self.do_before();
        self.detach(0)
    }

    /// Drops the handle whose last waiter was `registered`.
    fn detach(&self, registered: usize) -> (bool, bool) {
        match self.cell.detach(registered) {
            Detached::Running => (false, false),
            Detached::Stored => {
                self.take_result();
                let freed = !self.cell.emptied(registered);
                if freed {
                    self.use_g();
                }
                (true, freed)
            }
            Detached::Done => {
                self.take_result();
                self.use_g();
                (true, true)
            }
        }
    }

    /// What the handle's owner does before it waits or drops the handle.
    fn do_before(&self) {
        // SAFETY: loom reports any concurrent access.
        self.before.with_mut(|b| unsafe { *b = 1 });
    }

    fn check_owner_is_visible(&self) {
        // SAFETY: loom reports any concurrent write.
        assert_eq!(self.before.with(|b| unsafe { *b }), 1);
    }

    /// Takes the result, as its owner.
    fn take_result(&self) {
        // SAFETY: loom reports any concurrent access.
        let result = self.result.with_mut(|r| unsafe { std::mem::take(&mut *r) });
        assert_eq!(result, 42, "no result, or taken twice");
    }

    /// Joins the goroutine.
    fn join(&self) {
        self.do_before();
        if self.cell.wait(0, WAITER) {
            let mut woken = self.is_woken.lock().unwrap();
            while !*woken {
                woken = self.woken.wait(woken).unwrap();
            }
        }
        self.take_result();
        self.use_g();
        assert!(self.cell.is_done());
    }
}

/// The goroutine ends while the joining thread goes to sleep.
///
/// Race: `complete` finds no waiter just before `wait` stores it. A lost wake-up is a deadlock.
pub fn complete_against_wait() {
    explore(Bound::All, || {
        let model = Model::new();
        let goroutine = thread::spawn({
            let model = model.clone();
            move || model.run()
        });
        model.join();
        assert_eq!(
            goroutine.join().unwrap(),
            (false, false),
            "the handle owns the result and the G"
        );
    });
}

/// The goroutine ends while the handle is dropped.
///
/// Race: both, or neither, believe that the other will free the result.
pub fn complete_against_detach() {
    explore(Bound::All, || {
        let model = Model::new();
        let goroutine = thread::spawn({
            let model = model.clone();
            move || model.run()
        });
        let ours = model.drop_handle();
        let its = goroutine.join().unwrap();
        assert!(ours.0 != its.0 && ours.1 != its.1, "exactly one owner: {ours:?} {its:?}");
    });
}

/// The handle's owner polls, and takes the result when `is_done` returns true.
///
/// Race: `is_done` returns true before the result is visible.
pub fn complete_against_is_done() {
    explore(Bound::All, || {
        let model = Model::new();
        let goroutine = thread::spawn({
            let model = model.clone();
            move || model.run()
        });
        if model.cell.is_done() {
            model.take_result();
            model.use_g();
        } else {
            model.join();
        }
        assert_eq!(goroutine.join().unwrap(), (false, false));
    });
}

/// A task polls the handle, polls it again with another waker, and drops it, while the goroutine
/// ends.
///
/// Race: both, or neither, believe that the other will free the result or the G, because a
/// registered waiter hides whether the result is stored.
pub fn complete_against_polls_and_drop() {
    explore(Bound::All, || {
        let model = Model::new();
        let goroutine = thread::spawn({
            let model = model.clone();
            move || model.run()
        });
        model.do_before();
        let mut registered = 0;
        let mut is_over = false;
        for task in TASKS {
            if model.cell.wait(registered, task) {
                registered = task;
            } else {
                is_over = true;
                break;
            }
        }
        let ours = if is_over {
            assert!(model.cell.is_done(), "a registration fails only at the end");
            model.take_result();
            model.use_g();
            (true, true)
        } else {
            model.detach(registered)
        };
        let its = goroutine.join().unwrap();
        assert!(ours.0 != its.0 && ours.1 != its.1, "exactly one owner: {ours:?} {its:?}");
    });
}

/// A task polls the handle, and then a goroutine joins it.
///
/// Race: the goroutine ends between the two: then it wakes the task, and the join must not sleep.
pub fn complete_against_poll_and_join() {
    explore(Bound::All, || {
        let model = Model::new();
        let goroutine = thread::spawn({
            let model = model.clone();
            move || model.run()
        });
        model.do_before();
        let registered = if model.cell.wait(0, TASKS[0]) { TASKS[0] } else { 0 };
        if !model.cell.is_done() && model.cell.wait(registered, WAITER) {
            let mut woken = model.is_woken.lock().unwrap();
            while !*woken {
                woken = model.woken.wait(woken).unwrap();
            }
        }
        model.take_result();
        model.use_g();
        assert_eq!(goroutine.join().unwrap(), (false, false));
    });
}

/// Mutation check: without Release in `store_result` and `complete`, a dropped handle's owner reads
/// no result.
pub fn detects_unpublished_result() {
    must_fail(Mutation::Everywhere("join.rs", Op::Change, Half::Release), complete_against_detach);
}

/// Mutation check: without Acquire in a failed `detach`, a dropped handle's owner reads no result.
pub fn detects_unacquired_result() {
    must_fail(Mutation::Everywhere("join.rs", Op::Load, Half::Acquire), complete_against_detach);
}

/// Which orderings of `join.rs` do the checks need? Prints a table.
pub fn sweep_orderings() {
    for check in [complete_against_wait, complete_against_detach, complete_against_is_done] {
        sweep(check);
    }
}
