//! The word of a `Once`: its state.
//!
//! | word | meaning |
//! |---|---|
//! | 0 | no initializer has begun, or the last one gave up |
//! | `POISONED` | the last initializer panicked |
//! | `RUNNING` | an initializer runs |
//! | `DONE` | done, forever |
//! | + `WAITED_FOR` | with every state except `DONE`: there may be callers in the queue |
//!
//! Invariants:
//! 1. Only the caller that got [`Begin::Run`] calls [`OnceWord::finish`], once.
//! 2. [`OnceWord::queue_waiter`] is called under the lock of the queue of waiters. If it returns
//!    true, the caller enters the queue before it releases the lock. So [`OnceWord::finish`], whose
//!    caller takes the lock afterwards, misses no waiter.

use crate::shim::{AtomicU32, Ordering};

const DONE: u32 = 1;
const RUNNING: u32 = 2;
const WAITED_FOR: u32 = 4;
const POISONED: u32 = 8;

/// See the head of the file. Made of `AtomicU32::new(0)`.
pub(crate) struct OnceWord(pub(crate) AtomicU32);

/// A state, without the waiters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WordState {
    New,
    Poisoned,
    Running,
    Done,
}

/// What a caller must do.
#[must_use]
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Begin {
    /// Nothing.
    Done,
    /// Run the initializer, then [`OnceWord::finish`].
    Run { was_poisoned: bool },
    /// Wait for the initializer of another caller: [`OnceWord::queue_waiter`].
    Wait,
    /// Panic: an earlier initializer has panicked.
    Poisoned,
}

/// What a caller does if an earlier initializer has panicked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OnPoison {
    Refuse,
    Ignore,
}

/// What a waiter waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WaitFor {
    /// The end of the initializer that runs.
    EndOfRun,
    /// An initializer that returns. [`OnPoison::Refuse`] also ends the wait if one panics.
    Completion(OnPoison),
}

/// How an initializer ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum InitResult {
    Done,
    /// It gave up: the next caller runs its own.
    Retry,
    /// It panicked: later callers refuse to run theirs, or ignore it.
    Poison,
}

impl OnceWord {
    #[inline(always)]
    pub(crate) fn is_done(&self) -> bool {
        // Acquire: what the initializer did (its Release is in `finish`).
        self.0.load(Ordering::Acquire) == DONE
    }

    /// Returns the state, which may be out of date at once, except `Done`.
    pub(crate) fn state(&self) -> WordState {
        // Acquire: what the initializer did.
        match self.0.load(Ordering::Acquire) & !WAITED_FOR {
            DONE => WordState::Done,
            RUNNING => WordState::Running,
            POISONED => WordState::Poisoned,
            _ => WordState::New,
        }
    }

    pub(crate) fn begin(&self, on_poison: OnPoison) -> Begin {
        // Acquire: what the initializer did.
        let mut now = self.0.load(Ordering::Acquire);
        loop {
            if now == DONE {
                return Begin::Done;
            }
            if now & RUNNING != 0 {
                return Begin::Wait;
            }
            let was_poisoned = now & POISONED != 0;
            if was_poisoned && on_poison == OnPoison::Refuse {
                return Begin::Poisoned;
            }
            let running = RUNNING | now & WAITED_FOR;
            // Acquire: what an earlier initializer did that gave up.
            let order = Ordering::Acquire;
            match self.0.compare_exchange_weak(now, running, order, order) {
                Ok(_) => return Begin::Run { was_poisoned },
                Err(changed) => now = changed,
            }
        }
    }

    /// Announces a waiter (invariant 2). Returns false if there is nothing to wait for. A waiter
    /// that was woken checks the state again: an initializer has ended, in whatever way.
    #[must_use]
    pub(crate) fn queue_waiter(&self, wait_for: WaitFor) -> bool {
        let mut now = self.0.load(Ordering::Relaxed);
        let waits = |now: u32| match wait_for {
            WaitFor::EndOfRun => now & RUNNING != 0,
            WaitFor::Completion(OnPoison::Refuse) => now != DONE && now & POISONED == 0,
            WaitFor::Completion(OnPoison::Ignore) => now != DONE,
        };
        while waits(now) {
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
        let next = match result {
            InitResult::Done => DONE,
            InitResult::Retry => 0,
            InitResult::Poison => POISONED,
        };
        // Release: what the initializer did.
        self.0.swap(next, Ordering::Release) & WAITED_FOR != 0
    }
}
