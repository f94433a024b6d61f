//! The word of a `Once`: its state, or its sleepers.
//!
//! | word | meaning |
//! |---|---|
//! | `NEW` | nobody has begun |
//! | `RUNNING` | somebody runs the initialiser, nobody waits |
//! | `RUNNING` + a place | the same; the place is the last to have come, and it knows the one before |
//! | `DONE` | done, for ever |
//!
//! Places are addresses (even, above `RUNNING`) that this file does not look into; the chain of
//! sleepers is made by the caller of [`OnceWord::wait`].
//!
//! Invariant 1: only the one that got [`Begin::Run`] calls [`OnceWord::finish`], once.

use crate::shim::{AtomicUsize, Ordering};

const NEW: usize = 0;
const DONE: usize = 1;
const RUNNING: usize = 2;
/// Bits that no place has.
const STATE_MASK: usize = 3;

/// See the head of the file. Made of `AtomicUsize::new(0)`.
pub(crate) struct OnceWord(pub(crate) AtomicUsize);

/// What one who wants it done must do.
#[must_use]
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Begin {
    /// Nothing.
    Done,
    /// Run the initialiser, then [`OnceWord::finish`].
    Run,
    /// Somebody runs it: [`OnceWord::wait`].
    Wait,
}

impl OnceWord {
    #[inline(always)]
    pub(crate) fn is_done(&self) -> bool {
        // Acquire: what the initialiser did (its Release is in `finish`).
        self.0.load(Ordering::Acquire) == DONE
    }

    pub(crate) fn begin(&self) -> Begin {
        // Acquire: what the initialiser did, or an earlier one that gave up.
        match self.0.compare_exchange(NEW, RUNNING, Ordering::Acquire, Ordering::Acquire) {
            Ok(_) => Begin::Run,
            Err(DONE) => Begin::Done,
            Err(_) => Begin::Wait,
        }
    }

    /// Goes to sleep at `place`; `chain` is told who slept last (0: nobody), before others can see
    /// the place. False: no need, begin again.
    #[must_use]
    pub(crate) fn wait(&self, place: usize, chain: impl Fn(usize)) -> bool {
        debug_assert!(place > STATE_MASK && place & STATE_MASK == 0);
        let mut now = self.0.load(Ordering::Relaxed);
        while now & RUNNING != 0 {
            chain(now & !STATE_MASK);
            // Release: the place is ready to be found by `finish`.
            match self.0.compare_exchange_weak(
                now,
                place | RUNNING,
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(changed) => now = changed,
            }
        }
        false
    }

    /// The initialiser has ended: for good, or (`again`) it gave up and the next one may try.
    /// Returns the last sleeper, or 0: all of the chain must be woken.
    #[must_use]
    pub(crate) fn finish(&self, again: bool) -> usize {
        // Release: what the initialiser did. Acquire: the sleepers' places.
        self.0.swap(if again { NEW } else { DONE }, Ordering::AcqRel) & !STATE_MASK
    }
}
