//! The join word: a goroutine's end meets the one handle that owns its result.
//!
//! One word, [`JoinCell`], with at most two parties: the goroutine ([`JoinCell::store_result`] and
//! [`JoinCell::complete`], once each) and the handle ([`JoinCell::wait`] or [`JoinCell::detach`]).
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
//! | a waiter | not ended; the handle's owner sleeps in `join` | handle | goroutine |
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
        // Release: publishes the result to `detach`. Acquire: the goroutine sees what the handle's
        // owner did before it dropped the handle.
        match self.0.compare_exchange(ALIVE, STORED, Ordering::Release, Ordering::Acquire) {
            Ok(_) => true,
            Err(word) => word != DETACHED,
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
                Completed::Wake(waiter)
            }
        }
    }

    /// Registers `waiter`, the handle's owner, which is about to sleep. Returns false if the
    /// goroutine has ended: then the caller must not sleep.
    #[must_use]
    pub(crate) fn wait(&self, waiter: usize) -> bool {
        debug_assert!(waiter >= FIRST_WAITER);
        // Release: `complete` finds the waiter in the state it has now. Acquire: the result.
        let wait = |from| {
            self.0.compare_exchange(from, waiter, Ordering::AcqRel, Ordering::Acquire).is_ok()
        };
        // The word never goes back from STORED to ALIVE.
        wait(ALIVE) || wait(STORED)
    }

    /// Gives up the handle.
    pub(crate) fn detach(&self) -> Detached {
        // Release: pairs with `store_result` and `complete`. Acquire: the result.
        match self.0.compare_exchange(ALIVE, DETACHED, Ordering::Release, Ordering::Acquire) {
            Ok(_) => Detached::Running,
            Err(STORED) => Detached::Stored,
            Err(_) => Detached::Done,
        }
    }

    /// Announces, after [`Detached::Stored`], that the caller has dropped the result. Returns false
    /// if the goroutine has ended meanwhile: then the caller frees the G.
    #[must_use]
    pub(crate) fn emptied(&self) -> bool {
        // Release: the caller's last access to the G comes before its reuse by the goroutine's
        // side. Acquire: the goroutine's last access comes before the caller's reuse.
        self.0.compare_exchange(STORED, EMPTIED, Ordering::Release, Ordering::Acquire).is_ok()
    }

    /// Returns whether the goroutine has ended.
    pub(crate) fn is_done(&self) -> bool {
        // Acquire: the result is visible if this is true.
        self.0.load(Ordering::Acquire) == DONE
    }
}
