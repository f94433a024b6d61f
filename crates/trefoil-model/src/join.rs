//! Checks of the join cell (`sched/join.rs`).
//!
//! The result is a loom cell, so a result read without its write being visible is reported as a
//! data race; and so is a result that both parties believe to own.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex};
use loom::thread;

use crate::explore::{Bound, explore, must_fail, sweep};
use crate::join_rs::{Completed, Detached, JoinCell};
use crate::shim::{Half, Mutation, Op};

/// Any waiter; the cell does not look inside.
const WAITER: usize = 0x1000;

struct World {
    cell: JoinCell,
    /// The result: its owner writes to it.
    result: UnsafeCell<u32>,
    /// The rest of the G's memory, likewise.
    g: UnsafeCell<u32>,
    /// What the holder did before it waited or went away; the goroutine's end may rely on it.
    before: UnsafeCell<u32>,
    /// Where the holder sleeps: true when woken.
    bed: Mutex<bool>,
    woken: Condvar,
}

// SAFETY: loom checks that accesses to the cell are ordered; that is the point.
unsafe impl Sync for World {}
// SAFETY: as above.
unsafe impl Send for World {}

impl World {
    fn new() -> Arc<World> {
        Arc::new(World {
            cell: JoinCell::new(),
            result: UnsafeCell::new(0),
            g: UnsafeCell::new(0),
            before: UnsafeCell::new(0),
            bed: Mutex::new(false),
            woken: Condvar::new(),
        })
    }

    /// The goroutine: result, destructors, end, and what follows from it. Returns whether it owned the result, and
    /// whether it owned the G in the end.
    fn run(&self) -> (bool, bool) {
        // SAFETY: loom checks that nobody else accesses it now.
        self.result.with_mut(|r| unsafe { *r = 42 });
        let dropped = !self.cell.store_result();
        if dropped {
            self.see_holder();
            self.take_result();
        }
        self.use_g();
        let freed = match self.cell.complete() {
            Completed::Kept => false,
            Completed::Wake(waiter) => {
                assert_eq!(waiter, WAITER);
                self.see_holder();
                *self.bed.lock().unwrap() = true;
                self.woken.notify_one();
                false
            }
            Completed::Unwanted => {
                self.see_holder();
                self.use_g();
                true
            }
        };
        (dropped, freed)
    }

    /// The goroutine until its end, and then the owner of the G.
    fn use_g(&self) {
        // SAFETY: loom checks that nobody else accesses it now.
        self.g.with_mut(|g| unsafe { *g += 1 });
    }

    /// The handle is dropped. Returns as `run` does.
    fn drop_handle(&self) -> (bool, bool) {
        self.do_before();
        match self.cell.detach() {
            Detached::Running => (false, false),
            Detached::Stored => {
                self.take_result();
                let freed = !self.cell.emptied();
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

    /// The holder does something, and then waits or goes away.
    fn do_before(&self) {
        // SAFETY: loom checks that nobody else accesses it now.
        self.before.with_mut(|b| unsafe { *b = 1 });
    }

    fn see_holder(&self) {
        // SAFETY: loom checks that nobody writes it now.
        assert_eq!(self.before.with(|b| unsafe { *b }), 1);
    }

    /// The owner takes the result.
    fn take_result(&self) {
        // SAFETY: loom checks that nobody else accesses it now.
        let result = self.result.with_mut(|r| unsafe { std::mem::take(&mut *r) });
        assert_eq!(result, 42, "no result, or taken twice");
    }

    /// The holder joins.
    fn join(&self) {
        self.do_before();
        if self.cell.wait(WAITER) {
            let mut woken = self.bed.lock().unwrap();
            while !*woken {
                woken = self.woken.wait(woken).unwrap();
            }
        }
        self.take_result();
        self.use_g();
        assert!(self.cell.is_done());
    }
}

/// The goroutine ends while the holder goes to sleep.
///
/// Race: `complete` finds no waiter just before `wait` stores it. A lost wake-up is a deadlock.
pub fn complete_against_wait() {
    explore(Bound::All, || {
        let world = World::new();
        let goroutine = thread::spawn({
            let world = world.clone();
            move || world.run()
        });
        world.join();
        assert_eq!(goroutine.join().unwrap(), (false, false), "the holder owns result and G");
    });
}

/// The goroutine ends while the handle is dropped.
///
/// Race: both, or neither, believe that the other will free the result.
pub fn complete_against_detach() {
    explore(Bound::All, || {
        let world = World::new();
        let goroutine = thread::spawn({
            let world = world.clone();
            move || world.run()
        });
        let ours = world.drop_handle();
        let its = goroutine.join().unwrap();
        assert!(ours.0 != its.0 && ours.1 != its.1, "exactly one owner: {ours:?} {its:?}");
    });
}

/// The holder polls, and takes the result when told that it is there.
///
/// Race: `is_done` says yes before the result is visible.
pub fn complete_against_is_done() {
    explore(Bound::All, || {
        let world = World::new();
        let goroutine = thread::spawn({
            let world = world.clone();
            move || world.run()
        });
        if world.cell.is_done() {
            world.take_result();
            world.use_g();
        } else {
            world.join();
        }
        assert_eq!(goroutine.join().unwrap(), (false, false));
    });
}

/// Teeth: without Release in `complete` the holder reads a result that is not there.
pub fn teeth_unpublished_result() {
    must_fail(Mutation::Everywhere("join.rs", Op::Change, Half::Release), complete_against_detach);
}

/// Teeth: without Acquire in a failed `wait`, likewise.
pub fn teeth_unacquired_result() {
    must_fail(Mutation::Everywhere("join.rs", Op::Load, Half::Acquire), complete_against_detach);
}

/// Which orderings of `join.rs` do the checks need? Prints a table.
pub fn sweep_orderings() {
    for check in [complete_against_wait, complete_against_detach, complete_against_is_done] {
        sweep(check);
    }
}
