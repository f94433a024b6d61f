//! The word of a `Once`: its state.
//!
//! | word | meaning |
//! |---|---|
//! | `NEW` | no initializer has begun |
//! | `RUNNING` | an initializer runs, and no caller waits |
//! | `RUNNING` + `WAITED_FOR` | the same, and there may be callers in the queue |
//! | `DONE` | done, forever |
//!
//! Invariants:
//! 1. Only the caller that got [`Begin::Run`] calls [`OnceWord::finish`], once.
//! 2. [`OnceWord::queue_waiter`] is called under the lock of the queue of waiters. If it returns
//!    true, the caller enters the queue before it releases the lock. So [`OnceWord::finish`], whose
//!    caller takes the lock afterwards, misses no waiter.

use crate::shim::{AtomicU32, Ordering};

const NEW: u32 = 0;
const DONE: u32 = 1;
const RUNNING: u32 = 2;
const WAITED_FOR: u32 = 4;

/// See the head of the file. Made of `AtomicU32::new(0)`.
pub(crate) struct OnceWord(pub(crate) AtomicU32);

/// What a caller must do.
#[must_use]
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Begin {
    /// Nothing.
    Done,
    /// Run the initializer, then [`OnceWord::finish`].
    Run,
    /// Wait for the initializer of another caller: [`OnceWord::queue_waiter`].
    Wait,
}

/// How an initializer ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum InitResult {
    Done,
    /// It gave up: the next caller runs its own.
    Retry,
}

impl OnceWord {
    #[inline(always)]
    pub(crate) fn is_done(&self) -> bool {
        // Acquire: what the initializer did (its Release is in `finish`).
        self.0.load(Ordering::Acquire) == DONE
    }

    pub(crate) fn begin(&self) -> Begin {
        // Acquire: what the initializer did, or an earlier one that gave up.
        match self.0.compare_exchange(NEW, RUNNING, Ordering::Acquire, Ordering::Acquire) {
            Ok(_) => Begin::Run,
            Err(DONE) => Begin::Done,
            Err(_) => Begin::Wait,
        }
    }

    /// Announces a waiter (invariant 2). Returns false if no initializer runs: then the caller
    /// begins again.
    #[must_use]
    pub(crate) fn queue_waiter(&self) -> bool {
        let mut now = self.0.load(Ordering::Relaxed);
        while now & RUNNING != 0 {
            // Relaxed: the lock of the queue orders the rest.
            let order = Ordering::Relaxed;
            match self.0.compare_exchange_weak(now, now | WAITED_FOR, order, order) {
                Ok(_) => return true,
                Err(changed) => now = changed,
            }
        }
        false
    }

    /// Ends the run of the initializer. If it returns true, the caller wakes all that are in the
    /// queue.
    #[must_use]
    pub(crate) fn finish(&self, result: InitResult) -> bool {
        let next = if result == InitResult::Retry { NEW } else { DONE };
        // Release: what the initializer did.
        self.0.swap(next, Ordering::Release) & WAITED_FOR != 0
    }
}
