//! The word of a `Once`: its state, and the chain of its waiters.
//!
//! | word | meaning |
//! |---|---|
//! | `NEW` | no initializer has begun |
//! | `RUNNING` | an initializer runs, and no caller waits |
//! | `RUNNING` + a node | the same; the node is the last waiter, and links to the one before |
//! | `DONE` | done, forever |
//!
//! Nodes are addresses (a multiple of 4, not 0) that this file does not read; the caller of
//! [`OnceWord::wait`] links them.
//!
//! Invariant 1: only the caller that got [`Begin::Run`] calls [`OnceWord::finish`], once.

use crate::shim::{AtomicUsize, Ordering};

const NEW: usize = 0;
const DONE: usize = 1;
const RUNNING: usize = 2;
/// Bits that are clear in every node's address.
const STATE_MASK: usize = 3;

/// See the head of the file. Made of `AtomicUsize::new(0)`.
pub(crate) struct OnceWord(pub(crate) AtomicUsize);

/// What a caller must do.
#[must_use]
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Begin {
    /// Nothing.
    Done,
    /// Run the initializer, then [`OnceWord::finish`].
    Run,
    /// Wait for the initializer of another caller: [`OnceWord::wait`].
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

    /// Adds `node` to the waiters. Before others can see the node, `link` gets the waiter before it
    /// (0 if there is none). Returns false if no initializer runs: then the caller begins again.
    #[must_use]
    pub(crate) fn wait(&self, node: usize, link: impl Fn(usize)) -> bool {
        debug_assert!(node > STATE_MASK && node & STATE_MASK == 0);
        let mut now = self.0.load(Ordering::Relaxed);
        while now & RUNNING != 0 {
            link(now & !STATE_MASK);
            // Release: `finish` finds the node complete.
            match self.0.compare_exchange_weak(
                now,
                node | RUNNING,
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(changed) => now = changed,
            }
        }
        false
    }

    /// Ends the run of the initializer. Returns the last waiter, or 0. The caller wakes the whole
    /// chain.
    #[must_use]
    pub(crate) fn finish(&self, result: InitResult) -> usize {
        let next = if result == InitResult::Retry { NEW } else { DONE };
        // Release: what the initializer did. Acquire: the waiters' nodes.
        self.0.swap(next, Ordering::AcqRel) & !STATE_MASK
    }
}
