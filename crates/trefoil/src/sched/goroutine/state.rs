//! The state of a goroutine, and the meeting of a park with its wake-up.
//!
//! | state | who owns the G | where it is |
//! |---|---|---|
//! | `Dead` | a free list | – |
//! | `Runnable` | the queue it is in | a run queue, or the hands of a scheduler |
//! | `Running` | the goroutine itself, on an M | `m.current` |
//! | `Notified` | as `Running` | running, and a wake-up came before it parked |
//! | `Waiting` | whoever will call `ready` | some waiter list |
//!
//! ```text
//!   Dead → Runnable ⇄ Running → Dead
//!             ↑         │ ⇅ (Notified)
//!             └─ Waiting┘
//! ```
//!
//! Invariants:
//! 1. A G is `Waiting` only when its registers are saved: the *successor* on its thread says so
//!    ([`State::commit_park`]). A wake-up that comes earlier leaves `Notified`.
//! 2. Between two parks there is at most one [`State::notify`]. Whoever hands out the right to wake
//!    a G (a join cell, a channel's waiter list) sees to that.
//! 3. But for those two methods, only the owner writes: hence the plain stores.

use crate::shim::{AtomicU32, Ordering};

const DEAD: u32 = 0;
const RUNNABLE: u32 = 1;
const RUNNING: u32 = 2;
const NOTIFIED: u32 = 3;
const WAITING: u32 = 4;

/// The word. See the head of the file.
pub(crate) struct State(AtomicU32);

/// What an onlooker sees.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    Dead,
    Runnable,
    Running,
    Waiting,
}

/// What [`State::commit_park`] found.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ParkOutcome {
    Parked,
    /// It was woken before it had parked: it is runnable, enqueue it.
    AlreadyNotified,
}

/// What [`State::notify`] found.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Notify {
    /// It was parked and is the caller's to enqueue.
    Enqueue,
    /// It has not parked yet, and will not.
    Noted,
    /// Invariant 2 was broken: it was in this state.
    Twice(u32),
}

impl State {
    pub(crate) fn new() -> Self {
        State(AtomicU32::new(DEAD))
    }

    /// A look from outside, for traces: it may be over by now.
    pub(crate) fn phase(&self) -> Phase {
        match self.0.load(Ordering::Relaxed) {
            DEAD => Phase::Dead,
            RUNNABLE => Phase::Runnable,
            WAITING => Phase::Waiting,
            _ => Phase::Running,
        }
    }

    /// Dead → Runnable, or Running → Runnable for one that yields. By the owner; the queue that it
    /// goes into publishes it.
    #[inline]
    pub(crate) fn set_runnable(&self) {
        self.0.store(RUNNABLE, Ordering::Relaxed);
    }

    /// Runnable → Running, by the scheduler that took it from a queue.
    #[inline]
    pub(crate) fn set_running(&self) {
        debug_assert_eq!(self.0.load(Ordering::Relaxed), RUNNABLE);
        self.0.store(RUNNING, Ordering::Relaxed);
    }

    /// Running → Dead, by the goroutine itself.
    #[inline]
    pub(crate) fn set_dead(&self) {
        self.0.store(DEAD, Ordering::Relaxed);
    }

    /// Dead → Running: it has ended, but its name must still be freed outside the runtime.
    pub(crate) fn set_running_again(&self) {
        self.0.store(RUNNING, Ordering::Relaxed);
    }

    /// Notified → Running: consumes a wake-up that came before the park. True: do not park.
    #[inline]
    #[must_use]
    pub(crate) fn take_notice(&self) -> bool {
        // Acquire: pairs with notify's Release, like a completed park.
        if self.0.load(Ordering::Acquire) == NOTIFIED {
            self.0.store(RUNNING, Ordering::Relaxed);
            return true;
        }
        false
    }

    /// Running → Waiting, by the successor, when the registers are saved (invariant 1).
    #[inline]
    pub(crate) fn commit_park(&self) -> ParkOutcome {
        // Release: the waker that resumes it sees the saved registers. Acquire, when that came
        // first: what the waker did is seen by the woken.
        match self.0.compare_exchange(RUNNING, WAITING, Ordering::Release, Ordering::Acquire) {
            Ok(_) => ParkOutcome::Parked,
            Err(now) => {
                debug_assert_eq!(now, NOTIFIED);
                self.0.store(RUNNABLE, Ordering::Relaxed);
                ParkOutcome::AlreadyNotified
            }
        }
    }

    /// Waiting → Runnable, or Running → Notified, by the one waker (invariant 2).
    #[inline]
    pub(crate) fn notify(&self) -> Notify {
        // Acquire: pairs with commit_park. What the waker did reaches the woken through the queue that it
        // goes into.
        if self.0.load(Ordering::Acquire) == WAITING {
            // Once it waits it is its waker's alone, and there is one (invariant 2): no exchange.
            self.0.store(RUNNABLE, Ordering::Relaxed);
            return Notify::Enqueue;
        }
        // Release: what the waker did is seen by the woken. Acquire: as above.
        match self.0.compare_exchange(RUNNING, NOTIFIED, Ordering::Release, Ordering::Acquire) {
            Ok(_) => Notify::Noted,
            // It parked in between.
            Err(WAITING) => {
                self.0.store(RUNNABLE, Ordering::Relaxed);
                Notify::Enqueue
            }
            Err(state) => Notify::Twice(state),
        }
    }
}
