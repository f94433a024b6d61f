//! The join word: the end of a goroutine or task meets the one handle that owns its result.
//!
//! One word, [`JoinCell`], with at most two parties: the goroutine ([`JoinCell::store_result`] and
//! [`JoinCell::complete`], once each) and the handle ([`JoinCell::wait`] and [`JoinCell::detach`]).
//! A task ends without `store_result`: it has no thread-locals. In the table, "G" then means the
//! task's block.
//!
//! The handle's owner waits in `join`, as a goroutine or thread, or it awaits the handle, as a
//! task. A task may wait again with another waker, or drop the handle while it is registered. So
//! the handle remembers the *registered* word, 0 at first, and passes it to each call.
//!
//! A goroutine ends in the order of a thread: its closure returns, its thread-local destructors
//! run, `join` returns. A result that no handle will join is dropped by the goroutine before its
//! thread-local destructors, or by the thread that drops the handle. The goroutine never drops it
//! afterwards, because then a `Drop` that uses a thread-local would panic.
//!
//! | word | meaning | owner of the result | owner of the G |
//! |---|---|---|---|
//! | `ALIVE` | not ended; the handle exists | goroutine | goroutine |
//! | `STORED` | the closure has returned; the handle exists | handle | goroutine |
//! | a goroutine or thread | not ended; the handle's owner sleeps in `join` | handle | goroutine |
//! | a task | not ended; the task awaits the handle | goroutine | goroutine |
//! | a task, with `RESULT_STORED` | as above, and the closure has returned | handle | goroutine |
//! | `DETACHED` | not ended; the handle is gone | goroutine | goroutine |
//! | `EMPTIED` | not ended; the handle is gone and has dropped the result | none | goroutine |
//! | `DONE` | ended | handle, if it exists | handle, if it exists, else the goroutine |
//!
//! Invariants:
//! 1. Only the owner by this table touches the result or the G's memory.
//! 2. A result without a destructor is not announced by `store_result`, which saves one exchange
//!    per goroutine: if the handle goes away, nothing is left to drop.

use crate::shim::{AtomicUsize, Ordering};

const ALIVE: usize = 0;
const STORED: usize = 1;
const DONE: usize = 2;
const EMPTIED: usize = 3;
const DETACHED: usize = 4;
/// Waiters are pointers (with a tag in bits 0 and 1), so they are larger than the states above.
const FIRST_WAITER: usize = 8;
/// Bits 0 and 1 of a waiter that is a task: see `task/waker.rs`.
pub(crate) const TASK_SLEEPER: usize = 3;
/// Set in a waiter that is a task when the closure has returned.
const RESULT_STORED: usize = 4;

/// The join word. See the head of the file.
pub(crate) struct JoinCell(AtomicUsize);

/// What the ending goroutine has to do: the result of [`JoinCell::complete`].
#[must_use]
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Completed {
    /// Nothing: the handle exists, and owns the result and the G.
    Kept,
    /// The handle's owner sleeps as this waiter: wake it. It owns the result and the G.
    Wake(usize),
    /// The handle is gone: the goroutine frees the G.
    Unwanted,
}

/// What the thread that drops a handle has to do: the result of [`JoinCell::detach`].
#[must_use]
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Detached {
    /// Nothing: the goroutine drops its result.
    Running,
    /// The caller drops the result, then calls [`JoinCell::emptied`].
    Stored,
    /// The caller drops the result and frees the G.
    Done,
}

impl JoinCell {
    pub(crate) fn new() -> Self {
        JoinCell(AtomicUsize::new(ALIVE))
    }

    /// Prepares the cell for the next goroutine in this G. Only while no other thread can reach
    /// the G.
    pub(crate) fn reset(&self) {
        self.0.store(ALIVE, Ordering::Relaxed);
    }

    /// Announces that the goroutine's closure has returned. Returns false if the handle is gone:
    /// then the goroutine drops the result.
    #[must_use]
    pub(crate) fn store_result(&self) -> bool {
        let mut from = ALIVE;
        loop {
            let to = match from {
                ALIVE => STORED,
                DETACHED => return false,
                // The owner of the handle sleeps until the goroutine has ended.
                waiter if !is_task(waiter) => return true,
                task => task | RESULT_STORED,
            };
            // Release: publishes the result to `detach`. Acquire: the goroutine sees what the
            // handle's owner did before it dropped the handle.
            match self.0.compare_exchange(from, to, Ordering::Release, Ordering::Acquire) {
                Ok(_) => return true,
                // The handle was dropped, or its owner waits, maybe as another task than before.
                Err(now) => from = now,
            }
        }
    }

    /// Marks the goroutine as ended.
    pub(crate) fn complete(&self) -> Completed {
        // Release: publishes the result. Acquire: the goroutine sees what the handle's owner did
        // before it slept or dropped the handle.
        match self.0.swap(DONE, Ordering::AcqRel) {
            ALIVE | STORED => Completed::Kept,
            DETACHED | EMPTIED => Completed::Unwanted,
            waiter => {
                debug_assert!(waiter >= FIRST_WAITER, "goroutine completed twice");
                Completed::Wake(if is_task(waiter) { waiter & !RESULT_STORED } else { waiter })
            }
        }
    }

    /// Registers `waiter`, the handle's owner, in place of `registered`. A goroutine or thread is
    /// about to sleep; a task is about to return `Pending`. Returns false if the goroutine has
    /// ended: then the caller must not wait.
    #[must_use]
    pub(crate) fn wait(&self, registered: usize, waiter: usize) -> bool {
        debug_assert!(waiter >= FIRST_WAITER);
        let stored = if is_task(waiter) { waiter | RESULT_STORED } else { waiter };
        // Release: `complete` finds the waiter in the state it has now. Acquire: the result.
        let wait = |from, to| {
            self.0.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
        };
        // A stored result stays stored.
        wait(before_result(registered), waiter) || wait(after_result(registered), stored)
    }

    /// Gives up the handle, whose last [`JoinCell::wait`] was with `registered`.
    pub(crate) fn detach(&self, registered: usize) -> Detached {
        let from = before_result(registered);
        // Release: pairs with `store_result` and `complete`. Acquire: the result.
        match self.0.compare_exchange(from, DETACHED, Ordering::Release, Ordering::Acquire) {
            Ok(_) => Detached::Running,
            Err(now) if now == after_result(registered) => Detached::Stored,
            Err(_) => Detached::Done,
        }
    }

    /// Announces, after [`Detached::Stored`], that the caller has dropped the result. Returns false
    /// if the goroutine has ended meanwhile: then the caller frees the G.
    #[must_use]
    pub(crate) fn emptied(&self, registered: usize) -> bool {
        let from = after_result(registered);
        // Release: the caller's last access to the G comes before its reuse by the goroutine's
        // side. Acquire: the goroutine's last access comes before the caller's reuse.
        self.0.compare_exchange(from, EMPTIED, Ordering::Release, Ordering::Acquire).is_ok()
    }

    /// Returns whether the goroutine has ended.
    pub(crate) fn is_done(&self) -> bool {
        // Acquire: the result is visible if this is true.
        self.0.load(Ordering::Acquire) == DONE
    }
}

fn is_task(waiter: usize) -> bool {
    waiter & TASK_SLEEPER == TASK_SLEEPER && waiter >= FIRST_WAITER
}

/// Returns the word of a handle with this registered waiter (or 0), before the result is stored.
fn before_result(registered: usize) -> usize {
    if registered == 0 { ALIVE } else { registered }
}

/// The same after the result was stored.
fn after_result(registered: usize) -> usize {
    if registered == 0 { STORED } else { registered | RESULT_STORED }
}
