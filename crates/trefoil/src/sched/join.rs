//! The meeting of a goroutine's end and the one who wants its result.
//!
//! One word, [`JoinCell`], with at most two parties: the goroutine ([`JoinCell::complete`], once) and
//! the one handle ([`JoinCell::wait`] or [`JoinCell::detach`]).
//!
//! | word | meaning | who owns the result slot |
//! |---|---|---|
//! | `ALIVE` | running or yet to run; the handle exists | the goroutine |
//! | a waiter | the same, and the handle's holder sleeps | the goroutine |
//! | `DETACHED` | the same, and the handle is gone | the goroutine, for ever |
//! | `DONE` | ended | the handle, or the ending goroutine if it found `DETACHED` |
//!
//! Invariant 1: whoever moves the word second owns the result and the G's memory from then on. The
//! other must not touch either any more.

use crate::shim::{AtomicUsize, Ordering};

const ALIVE: usize = 0;
const DONE: usize = 2;
const DETACHED: usize = 4;
/// Waiters are pointers (with a tag in bit 0) well above these.
const FIRST_WAITER: usize = 8;

/// The word.
pub(crate) struct JoinCell(AtomicUsize);

/// What the ending goroutine finds.
#[must_use]
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Completed {
    /// The handle will come for the result.
    Kept,
    /// The handle's holder sleeps: wake it. It owns the result.
    Wake(usize),
    /// Nobody will come: drop the result, free the G.
    Unwanted,
}

impl JoinCell {
    pub(crate) fn new() -> Self {
        JoinCell(AtomicUsize::new(ALIVE))
    }

    /// Makes the cell ready for the next goroutine in this G. Only while nobody else knows of it.
    pub(crate) fn reset(&self) {
        self.0.store(ALIVE, Ordering::Relaxed);
    }

    /// The goroutine's end. Release: publishes the result. Acquire: what the holder did before.
    pub(crate) fn complete(&self) -> Completed {
        match self.0.swap(DONE, Ordering::AcqRel) {
            ALIVE => Completed::Kept,
            DETACHED => Completed::Unwanted,
            waiter => {
                debug_assert!(waiter >= FIRST_WAITER, "goroutine completed twice");
                Completed::Wake(waiter)
            }
        }
    }

    /// The holder goes to sleep as `waiter`. False: already done, do not sleep.
    #[must_use]
    pub(crate) fn wait(&self, waiter: usize) -> bool {
        debug_assert!(waiter >= FIRST_WAITER);
        // Release: the waiter's state before it is found by complete(). Acquire: the result.
        self.0.compare_exchange(ALIVE, waiter, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// The handle goes away. True: the goroutine had ended, so the caller owns result and G.
    #[must_use]
    pub(crate) fn detach(&self) -> bool {
        self.0.compare_exchange(ALIVE, DETACHED, Ordering::AcqRel, Ordering::Acquire).is_err()
    }

    /// The handle is gone, for ever. Asked by the goroutine, before `complete`.
    pub(crate) fn is_detached(&self) -> bool {
        // Acquire: what the holder did before.
        self.0.load(Ordering::Acquire) == DETACHED
    }

    /// Acquire: the result is visible to one who sees `true`.
    pub(crate) fn is_done(&self) -> bool {
        self.0.load(Ordering::Acquire) == DONE
    }
}
