//! The word of a mutex: Go's rules as transitions.
//!
//! | bit | meaning |
//! |---|---|
//! | `LOCKED` | the mutex is held |
//! | `WOKEN` | a contender is awake (woken from the queue, or spinning): no need to wake another |
//! | `STARVING` | starvation mode: the mutex is handed over in the order of the queue |
//! | `QUEUED` | the queue is not empty |
//!
//! **Normal mode**: a newcomer may take a free mutex, even before a waiter that was woken for it
//! (*barging*: it saves a switch each time, and the newcomer's cache is warm). A waiter that was
//! woken and lost goes back to the front of the queue. **Starvation mode**: a waiter that has
//! waited for a millisecond and loses again sets `STARVING`. From then on the holder hands the
//! mutex to the front of the queue, until the queue is empty or its first waiter has waited for
//! less than a millisecond. A *fair unlock* hands the mutex to the front of the queue in either
//! mode: the holder takes the waiter while `LOCKED` is still set, so no newcomer comes between.
//!
//! Invariants:
//! 1. `QUEUED` and `STARVING` change only under the queue's lock. There, `QUEUED` is exact.
//! 2. At most one contender owns `WOKEN`: the waiter woken by [`MutexWord::next`], or the spinner
//!    that set it. It clears the bit when it takes the mutex or joins the queue.
//! 3. `STARVING` without `LOCKED` is a mutex that is being handed over: an unlocker is about to
//!    call [`MutexWord::next`]. In that instant a newcomer's first attempt may still succeed
//!    (checking the bit would cost every lock of every mutex 5 ns of 15). Then the unlocker finds
//!    `LOCKED` and leaves the handover to the newcomer's unlock. Each newcomer has one such attempt
//!    before it queues, so the first waiter still gets the mutex.
//! 4. If the mutex is free, the queue is not empty and `WOKEN` is clear, an unlocker is about to
//!    call `next`. So no waiter in the queue is forgotten.

use crate::shim::{AtomicU32, Ordering};

const LOCKED: u32 = 1;
const WOKEN: u32 = 2;
const STARVING: u32 = 4;
const QUEUED: u32 = 8;

/// See the head of the file. Made of `AtomicU32::new(0)`: a mutex can be in a static.
pub(crate) struct MutexWord(pub(crate) AtomicU32);

/// A caller that wants the mutex.
#[derive(Clone, Copy, Default)]
pub(crate) struct Contender {
    /// It owns `WOKEN` (invariant 2).
    pub(crate) owns_woken: bool,
    /// It has waited for so long that it demands starvation mode.
    pub(crate) starving: bool,
}

/// What an unlocker must do.
#[must_use]
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unlocked {
    Done,
    /// Call [`MutexWord::next`] under the queue's lock.
    CallNext,
}

/// Which waiter an unlocker must take from the queue.
#[must_use]
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NextWaiter {
    /// None: the mutex is held, or a contender is awake.
    None,
    /// The first one, which then tries to take the mutex. Then [`MutexWord::woke`].
    Wake,
    /// The first one, which gets the mutex. Then [`MutexWord::handed_over`].
    HandOver,
}

/// The queue after its first waiter was taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum QueueState {
    Empty,
    NotEmpty,
}

/// Go's two modes of a mutex.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MutexMode {
    Normal,
    Starvation,
}

impl MutexWord {
    /// Makes the one attempt of a newcomer: a single locked instruction (`bts`), whether others
    /// wait or not. It ignores `STARVING`: see invariant 3.
    #[inline(always)]
    pub(crate) fn lock_fast(&self) -> bool {
        // Acquire: what the last holder did (its Release is in `unlock`).
        self.0.fetch_or(LOCKED, Ordering::Acquire) & LOCKED == 0
    }

    /// Takes the mutex if it is free and not in starvation mode. On success a contender that owns
    /// `WOKEN` gives it up.
    #[inline]
    pub(crate) fn try_lock(&self, by: Contender) -> bool {
        let mut now = self.0.load(Ordering::Relaxed);
        while now & (LOCKED | STARVING) == 0 {
            let taken = if by.owns_woken { now & !WOKEN } else { now } | LOCKED;
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

    /// Returns whether waiters are in the queue. Exact only under the queue's lock.
    #[inline]
    pub(crate) fn has_queue(&self) -> bool {
        self.0.load(Ordering::Relaxed) & QUEUED != 0
    }

    /// Returns whether spinning makes sense: the mutex is held, and can be taken afterwards.
    #[inline]
    pub(crate) fn worth_spinning(&self) -> bool {
        self.0.load(Ordering::Relaxed) & (LOCKED | STARVING) == LOCKED
    }

    /// Sets `WOKEN` for a spinner, so that an unlocker wakes no waiter. Does so only if waiters are
    /// queued and no contender owns the bit. Returns whether the spinner owns `WOKEN` now.
    #[inline]
    pub(crate) fn announce(&self) -> bool {
        let now = self.0.load(Ordering::Relaxed);
        // Relaxed: a hint to the unlocker, which reads nothing because of it.
        now & (LOCKED | STARVING | WOKEN | QUEUED) == LOCKED | QUEUED
            && self
                .0
                .compare_exchange(now, now | WOKEN, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }

    /// Unlocks the mutex for its holder.
    #[inline(always)]
    pub(crate) fn unlock(&self) -> Unlocked {
        // Release: the next holder sees what this one did.
        let before = self.0.fetch_sub(LOCKED, Ordering::Release);
        if before == LOCKED { Unlocked::Done } else { Self::after_unlock(before) }
    }

    /// Returns what the unlocker must do; `before` is the word before the unlock.
    #[inline]
    fn after_unlock(before: u32) -> Unlocked {
        debug_assert!(before & LOCKED != 0, "unlock of a mutex that is not locked");
        // A contender that is awake takes the mutex by itself (invariant 2), except in starvation
        // mode.
        if before & QUEUED == 0 || before & (WOKEN | STARVING) == WOKEN {
            return Unlocked::Done;
        }
        Unlocked::CallNext
    }

    /// Prepares the word for a contender that is about to join the queue. Returns false if the
    /// mutex is free: then the contender tries again. On success a contender that owns `WOKEN`
    /// gives it up. Called under the queue's lock.
    #[must_use]
    pub(crate) fn join_queue(&self, by: Contender) -> bool {
        let mut now = self.0.load(Ordering::Relaxed);
        while now & (LOCKED | STARVING) != 0 {
            let mut queued = now | QUEUED;
            if by.owns_woken {
                queued &= !WOKEN;
            }
            if by.starving {
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

    /// Ends the attempt of a contender that owns `WOKEN` and does not want the mutex any more. If
    /// the mutex is free, takes it and returns true: the contender unlocks it, and that wakes the
    /// next waiter. Otherwise the holder's unlock does.
    #[must_use]
    pub(crate) fn give_up_woken(&self) -> bool {
        let mut now = self.0.load(Ordering::Relaxed);
        loop {
            let free = now & (LOCKED | STARVING) == 0;
            let next = if free { now & !WOKEN | LOCKED } else { now & !WOKEN };
            // Acquire: as in `lock_fast`.
            match self.0.compare_exchange_weak(now, next, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return free,
                Err(changed) => now = changed,
            }
        }
    }

    /// Returns which waiter an unlocker must take. With `HandOver` the unlocker holds the mutex
    /// again, on behalf of that waiter. Called under the queue's lock.
    pub(crate) fn next(&self) -> NextWaiter {
        let mut now = self.0.load(Ordering::Relaxed);
        loop {
            if now & LOCKED != 0 || now & QUEUED == 0 {
                return NextWaiter::None;
            }
            if now & STARVING == 0 {
                return if now & WOKEN != 0 { NextWaiter::None } else { NextWaiter::Wake };
            }
            // Acquire: a newcomer may have held it since the unlock; its work must reach the
            // waiter.
            match self.0.compare_exchange_weak(
                now,
                now | LOCKED,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return NextWaiter::HandOver,
                Err(changed) => now = changed,
            }
        }
    }

    /// Notes that the first waiter was taken from the queue, to try to take the mutex. Returns
    /// whether it owns `WOKEN`; false means that a spinner was faster. Called under the queue's
    /// lock.
    pub(crate) fn woke(&self, rest: QueueState) -> bool {
        let mut now = self.0.load(Ordering::Relaxed);
        loop {
            let next = if rest == QueueState::NotEmpty { now } else { now & !QUEUED } | WOKEN;
            match self.0.compare_exchange_weak(now, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return now & WOKEN == 0,
                Err(changed) => now = changed,
            }
        }
    }

    /// Notes that the first waiter was taken from the queue and has the mutex. `mode` is the mode
    /// from now on. Called under the queue's lock.
    pub(crate) fn handed_over(&self, rest: QueueState, mode: MutexMode) {
        debug_assert!(rest == QueueState::NotEmpty || mode == MutexMode::Normal);
        let queued = if rest == QueueState::NotEmpty { 0 } else { QUEUED };
        let starving = if mode == MutexMode::Starvation { 0 } else { STARVING };
        self.clear(queued | starving);
    }

    /// Notes that the queue has become empty without a waiter being taken. Called under the queue's
    /// lock.
    pub(crate) fn queue_emptied(&self) {
        self.clear(QUEUED | STARVING);
    }

    fn clear(&self, bits: u32) {
        let mut now = self.0.load(Ordering::Relaxed);
        // Relaxed: nothing is published by it. An exchange, because a store would end the release
        // sequence of the last `unlock`, and drop a spinner's WOKEN.
        while let Err(changed) =
            self.0.compare_exchange_weak(now, now & !bits, Ordering::Relaxed, Ordering::Relaxed)
        {
            now = changed;
        }
    }
}
