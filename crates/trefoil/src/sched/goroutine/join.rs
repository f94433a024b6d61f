//! The meeting of a goroutine's end and the one handle that has a right to its result.
//!
//! One word, [`JoinCell`], with at most two parties: the goroutine ([`JoinCell::store_result`] and
//! [`JoinCell::complete`], once each) and the handle ([`JoinCell::wait`] or [`JoinCell::detach`]).
//!
//! A goroutine ends in the order of a thread: its closure returns, its thread-local destructors run, `join` returns. A
//! result that nobody will join is dropped by the goroutine before its thread-local destructors, or by the thread that
//! drops the handle; never by the goroutine afterwards, where a `Drop` that uses a thread-local would panic.
//!
//! | word | meaning | owner of the result | owner of the G |
//! |---|---|---|---|
//! | `ALIVE` | not ended; the handle exists | goroutine | goroutine |
//! | `STORED` | the closure has returned; the handle exists | handle | goroutine |
//! | a waiter | not ended; the holder of the handle sleeps | handle | goroutine |
//! | `DETACHED` | not ended; the handle is gone | goroutine | goroutine |
//! | `EMPTIED` | not ended; the handle is gone and has dropped the result | nobody | goroutine |
//! | `DONE` | ended | handle, if it exists | handle, if it exists, else the goroutine |
//!
//! Invariants:
//! 1. Only the owner by this table touches the result or the G's memory.
//! 2. A result without a destructor is not announced by `store_result`, which saves an exchange per goroutine: if the
//!    handle goes away, nothing is left to drop.

use crate::shim::{AtomicUsize, Ordering};

const ALIVE: usize = 0;
const STORED: usize = 1;
const DONE: usize = 2;
const EMPTIED: usize = 3;
const DETACHED: usize = 4;
/// Waiters are pointers (with a tag in bits 0 and 1) well above these.
const FIRST_WAITER: usize = 8;

/// The word.
pub(crate) struct JoinCell(AtomicUsize);

/// What the ending goroutine finds.
#[must_use]
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Completed {
    /// The handle exists, and owns result and G.
    Kept,
    /// The handle's holder sleeps: wake it. It owns result and G.
    Wake(usize),
    /// The handle is gone: the goroutine frees the G.
    Unwanted,
}

/// What becomes of a goroutine whose handle goes away.
#[must_use]
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Detached {
    /// The goroutine drops its result.
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

    /// Makes the cell ready for the next goroutine in this G. Only while no other thread knows the G.
    pub(crate) fn reset(&self) {
        self.0.store(ALIVE, Ordering::Relaxed);
    }

    /// The goroutine's closure has returned. Returns false if the handle is gone: then the goroutine drops the result.
    #[must_use]
    pub(crate) fn store_result(&self) -> bool {
        // Release: publishes the result to `detach`. Acquire: what the holder did before it went away.
        match self.0.compare_exchange(ALIVE, STORED, Ordering::Release, Ordering::Acquire) {
            Ok(_) => true,
            Err(word) => word != DETACHED,
        }
    }

    /// The goroutine's end. Release: publishes the result. Acquire: what the holder did before.
    pub(crate) fn complete(&self) -> Completed {
        match self.0.swap(DONE, Ordering::AcqRel) {
            ALIVE | STORED => Completed::Kept,
            DETACHED | EMPTIED => Completed::Unwanted,
            waiter => {
                debug_assert!(waiter >= FIRST_WAITER, "goroutine completed twice");
                Completed::Wake(waiter)
            }
        }
    }

    /// The holder goes to sleep as `waiter`. Returns false if the goroutine has ended: do not sleep.
    #[must_use]
    pub(crate) fn wait(&self, waiter: usize) -> bool {
        debug_assert!(waiter >= FIRST_WAITER);
        // Release: the waiter's state before it is found by complete(). Acquire: the result.
        let wait = |from| {
            self.0.compare_exchange(from, waiter, Ordering::AcqRel, Ordering::Acquire).is_ok()
        };
        // The word never goes back from STORED to ALIVE.
        wait(ALIVE) || wait(STORED)
    }

    /// The handle goes away.
    pub(crate) fn detach(&self) -> Detached {
        // Release: pairs with `store_result` and `complete`. Acquire: the result.
        match self.0.compare_exchange(ALIVE, DETACHED, Ordering::Release, Ordering::Acquire) {
            Ok(_) => Detached::Running,
            Err(STORED) => Detached::Stored,
            Err(_) => Detached::Done,
        }
    }

    /// After [`Detached::Stored`]: the result is dropped. Returns false if the goroutine has ended meanwhile: then the
    /// caller frees the G.
    #[must_use]
    pub(crate) fn emptied(&self) -> bool {
        // Release: our last access to the G comes before its reuse. Acquire: the goroutine's last one before ours.
        self.0.compare_exchange(STORED, EMPTIED, Ordering::Release, Ordering::Acquire).is_ok()
    }

    /// Returns whether the goroutine has ended. Acquire: then its result is visible.
    pub(crate) fn is_done(&self) -> bool {
        self.0.load(Ordering::Acquire) == DONE
    }
}
