//! The word of a mutex: Go's rules as transitions.
//!
//! | bit | meaning |
//! |---|---|
//! | `LOCKED` | somebody holds it |
//! | `WOKEN` | somebody awake is after it (woken from the queue, or spinning): no need to wake another |
//! | `STARVING` | it goes from hand to hand, in the order of the queue |
//! | `QUEUED` | the queue is not empty |
//!
//! **Normal mode**: who comes may take a free mutex, also before those who were woken for it
//! (*barging*: it saves a switch each time, and the newcomer's cache is warm). One who was woken
//! and lost goes back to the front of the queue. **Starvation mode**: one who has waited for a
//! millisecond and loses again sets `STARVING`. From then on the holder hands the mutex to the
//! front of the queue, until that is empty or its first has waited for less than a millisecond.
//!
//! Invariants:
//! 1. `QUEUED` and `STARVING` change only under the queue's lock; there, `QUEUED` tells the truth.
//! 2. At most one party owns `WOKEN`: the one woken by [`MutexWord::next`], or the spinner that set
//!    it. It takes the bit away when it takes the mutex or joins the queue.
//! 3. `STARVING` without `LOCKED` is a mutex on its way from hand to hand: an unlocker is about to
//!    call [`MutexWord::next`]. In that instant a newcomer's first attempt may still succeed (to
//!    look for the bit costs every lock of every mutex 5 ns of 15). Then the unlocker finds
//!    `LOCKED` and leaves it to the newcomer's unlock. Each newcomer has one such attempt before it
//!    queues, so the first in line gets it all the same.
//! 4. A mutex that is free, with a queue and nobody `WOKEN`, has an unlocker about to call `next`.
//!    So nobody in the queue is forgotten.

use crate::shim::{AtomicU32, Ordering};

const LOCKED: u32 = 1;
const WOKEN: u32 = 2;
const STARVING: u32 = 4;
const QUEUED: u32 = 8;

/// See the head of the file. Made of `AtomicU32::new(0)`: a mutex can be in a static.
pub(crate) struct MutexWord(pub(crate) AtomicU32);

/// What an unlocker must do.
#[must_use]
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unlocked {
    Done,
    /// Look at the queue, under its lock: [`MutexWord::next`].
    CallNext,
}

/// Whom an unlocker must take from the queue.
#[must_use]
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Nobody: the mutex has a holder, or somebody awake is after it.
    Nobody,
    /// The first, to try its luck. Then [`MutexWord::woke`].
    Wake,
    /// The first, who gets the mutex. Then [`MutexWord::handed_over`].
    HandOver,
}

impl MutexWord {
    /// A newcomer's one attempt: a single locked instruction (`bts`), whoever waits. It does not
    /// see `STARVING`: see invariant 3.
    #[inline(always)]
    pub(crate) fn lock_fast(&self) -> bool {
        // Acquire: what the last holder did (its Release is in `unlock`).
        self.0.fetch_or(LOCKED, Ordering::Acquire) & LOCKED == 0
    }

    /// Takes it if it is free to take. `woken`: the caller owns `WOKEN` and gives it back with
    /// success.
    #[inline]
    pub(crate) fn try_lock(&self, woken: bool) -> bool {
        let mut now = self.0.load(Ordering::Relaxed);
        while now & (LOCKED | STARVING) == 0 {
            let taken = if woken { now & !WOKEN } else { now } | LOCKED;
            // Acquire: as in `lock_fast`.
            match self.0.compare_exchange_weak(now, taken, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(changed) => now = changed,
            }
        }
        false
    }

    #[inline]
    pub(crate) fn is_locked(&self) -> bool {
        self.0.load(Ordering::Relaxed) & LOCKED != 0
    }

    /// Whether it makes sense to wait a moment: held, and free to take afterwards.
    #[inline]
    pub(crate) fn worth_spinning(&self) -> bool {
        self.0.load(Ordering::Relaxed) & (LOCKED | STARVING) == LOCKED
    }

    /// A spinner says that nobody else need be woken. True: it owns `WOKEN` now.
    #[inline]
    pub(crate) fn announce(&self) -> bool {
        let now = self.0.load(Ordering::Relaxed);
        // Relaxed: a hint to the unlocker, nothing is read because of it.
        now & (LOCKED | STARVING | WOKEN | QUEUED) == LOCKED | QUEUED
            && self
                .0
                .compare_exchange(now, now | WOKEN, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }

    #[inline(always)]
    pub(crate) fn unlock(&self) -> Unlocked {
        // Release: the next holder sees what we did.
        let before = self.0.fetch_sub(LOCKED, Ordering::Release);
        if before == LOCKED { Unlocked::Done } else { Self::after_unlock(before) }
    }

    #[inline]
    fn after_unlock(before: u32) -> Unlocked {
        debug_assert!(before & LOCKED != 0, "unlock of a mutex that is not locked");
        // Somebody awake will come by itself (invariant 2), unless it must not take it.
        if before & QUEUED == 0 || before & (WOKEN | STARVING) == WOKEN {
            return Unlocked::Done;
        }
        Unlocked::CallNext
    }

    /// Under the queue's lock: the caller is about to join the queue. False: the mutex is free, try
    /// again. `woken`: it owns `WOKEN`, and gives it back. `starving`: it has waited too long.
    #[must_use]
    pub(crate) fn join_queue(&self, woken: bool, starving: bool) -> bool {
        let mut now = self.0.load(Ordering::Relaxed);
        while now & (LOCKED | STARVING) != 0 {
            let mut queued = now | QUEUED;
            if woken {
                queued &= !WOKEN;
            }
            if starving {
                queued |= STARVING;
            }
            // Relaxed: the queue's lock publishes the node.
            match self.0.compare_exchange_weak(now, queued, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(changed) => now = changed,
            }
        }
        false
    }

    /// Under the queue's lock, by an unlocker: who is next? With `HandOver` the unlocker has the
    /// mutex again, on behalf of the next.
    pub(crate) fn next(&self) -> Next {
        let mut now = self.0.load(Ordering::Relaxed);
        loop {
            if now & LOCKED != 0 || now & QUEUED == 0 {
                return Next::Nobody;
            }
            if now & STARVING == 0 {
                return if now & WOKEN != 0 { Next::Nobody } else { Next::Wake };
            }
            // Acquire: a newcomer may have had it since we unlocked; its work must reach the next.
            match self.0.compare_exchange_weak(
                now,
                now | LOCKED,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Next::HandOver,
                Err(changed) => now = changed,
            }
        }
    }

    /// Under the queue's lock: its first was taken, to try its luck, and owns `WOKEN`. `rest`:
    /// there are others in the queue. False: a spinner was faster and owns it; then the taken one
    /// owns nothing.
    pub(crate) fn woke(&self, rest: bool) -> bool {
        let mut now = self.0.load(Ordering::Relaxed);
        loop {
            let next = if rest { now } else { now & !QUEUED } | WOKEN;
            match self.0.compare_exchange_weak(now, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return now & WOKEN == 0,
                Err(changed) => now = changed,
            }
        }
    }

    /// Under the queue's lock: its first was taken and has the mutex. `starving`: it goes on like
    /// this.
    pub(crate) fn handed_over(&self, rest: bool, starving: bool) {
        debug_assert!(rest || !starving);
        let gone = if rest { 0 } else { QUEUED } | if starving { 0 } else { STARVING };
        self.clear(gone);
    }

    /// Under the queue's lock: it has become empty, and nobody was taken from it.
    pub(crate) fn deserted(&self) {
        self.clear(QUEUED | STARVING);
    }

    fn clear(&self, bits: u32) {
        let mut now = self.0.load(Ordering::Relaxed);
        // Relaxed: nothing is published by it. An exchange: a store would end the release sequence
        // of the last `unlock`, and drop a spinner's WOKEN.
        while let Err(changed) =
            self.0.compare_exchange_weak(now, now & !bits, Ordering::Relaxed, Ordering::Relaxed)
        {
            now = changed;
        }
    }
}
