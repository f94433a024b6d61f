//! The state word of a goroutine: a park meets its wake-up.
//!
//! | state | owner of the G | where the G is |
//! |---|---|---|
//! | `Dead` | a free list | – |
//! | `Runnable` | the queue that contains it | a run queue, or an M that moves it |
//! | `Running` | the goroutine itself, on an M | `m.current` |
//! | `Notified` | as `Running` | running; a wake-up came before it parked |
//! | `Waiting` | the waker that will call `ready` | a list of waiters |
//!
//! ```text
//!   Dead → Runnable ⇄ Running → Dead
//!             ↑         │ ⇅ (Notified)
//!             └─ Waiting┘
//! ```
//!
//! Invariants:
//! 1. A G is `Waiting` only when its registers are saved. They are saved by the switch, so the next
//!    context on the M sets the state ([`GoroutineState::commit_park`]). A wake-up that comes
//!    earlier leaves `Notified`.
//! 2. For each park there is at most one [`GoroutineState::notify`]. The structure that holds the
//!    waiter (a join cell, a channel's list of waiters) guarantees that.
//! 3. Except in these two methods, which may race with each other, only the owner writes the word.
//!    Therefore plain stores suffice.

use crate::shim::{AtomicU32, Ordering};

const DEAD: u32 = 0;
const RUNNABLE: u32 = 1;
const RUNNING: u32 = 2;
const NOTIFIED: u32 = 3;
const WAITING: u32 = 4;

/// The numbers of the states, for debuggers (`observe/layout.rs`).
pub(crate) const LAYOUT: &[(&str, usize)] = &[
    ("state.dead", DEAD as usize),
    ("state.runnable", RUNNABLE as usize),
    ("state.running", RUNNING as usize),
    ("state.notified", NOTIFIED as usize),
    ("state.waiting", WAITING as usize),
];

/// The state word. See the head of the file.
pub(crate) struct GoroutineState(AtomicU32);

/// The state as another thread reads it. `Notified` reads as `Running`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StateSnapshot {
    Dead,
    Runnable,
    Running,
    Waiting,
}

/// The result of [`GoroutineState::commit_park`].
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ParkOutcome {
    Parked,
    /// The wake-up came before the park: the goroutine is runnable, and the caller enqueues it.
    AlreadyNotified,
}

/// The result of [`GoroutineState::notify`].
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Notify {
    /// The goroutine was parked: the caller enqueues it.
    Enqueue,
    /// The goroutine has not parked yet, and will not.
    Noted,
    /// Invariant 2 is broken: the goroutine was in this state, in which no waker may find it.
    Twice(u32),
}

impl GoroutineState {
    pub(crate) fn new() -> Self {
        GoroutineState(AtomicU32::new(DEAD))
    }

    /// Returns the state, for traces. It may have changed when the caller uses it.
    pub(crate) fn snapshot(&self) -> StateSnapshot {
        // Acquire: pairs with `commit_park`. What a goroutine stored before it parked is visible to
        // a reader that sees it wait, and later reads are not made earlier.
        match self.0.load(Ordering::Acquire) {
            DEAD => StateSnapshot::Dead,
            RUNNABLE => StateSnapshot::Runnable,
            WAITING => StateSnapshot::Waiting,
            _ => StateSnapshot::Running,
        }
    }

    /// Dead → Runnable, or Running → Runnable for a goroutine that yields. By the owner; the queue
    /// publishes the state.
    #[inline]
    pub(crate) fn set_runnable(&self) {
        self.0.store(RUNNABLE, Ordering::Relaxed);
    }

    /// Runnable → Running, by the M that took the goroutine from a queue.
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

    /// Dead → Running, by a goroutine that has ended but must still free its name outside the
    /// runtime.
    pub(crate) fn set_running_again(&self) {
        self.0.store(RUNNING, Ordering::Relaxed);
    }

    /// Notified → Running: consumes a wake-up that came before the park. Returns true if there was
    /// one: then the goroutine must not park.
    #[inline]
    #[must_use]
    pub(crate) fn take_notification(&self) -> bool {
        // Acquire: pairs with notify's Release, like a completed park.
        if self.0.load(Ordering::Acquire) == NOTIFIED {
            self.0.store(RUNNING, Ordering::Relaxed);
            return true;
        }
        false
    }

    /// Running → Waiting, or Notified → Runnable, by the next context on the M, when the registers
    /// are saved (invariant 1).
    #[inline]
    pub(crate) fn commit_park(&self) -> ParkOutcome {
        // Release, with the Acquire in `notify`: the M that resumes the goroutine after its wake-up
        // sees the saved registers. Acquire, if the wake-up came first, with the Release in
        // `notify`: the goroutine sees what the waker did before.
        match self.0.compare_exchange(RUNNING, WAITING, Ordering::Release, Ordering::Acquire) {
            Ok(_) => ParkOutcome::Parked,
            Err(now) => {
                debug_assert_eq!(now, NOTIFIED);
                self.0.store(RUNNABLE, Ordering::Relaxed);
                ParkOutcome::AlreadyNotified
            }
        }
    }

    /// Waiting → Runnable, or Running → Notified, by the only waker (invariant 2).
    #[inline]
    pub(crate) fn notify(&self) -> Notify {
        // Acquire: pairs with `commit_park`. The queue that the goroutine enters publishes what the
        // waker did before.
        if self.0.load(Ordering::Acquire) == WAITING {
            // A waiting goroutine belongs to its waker alone, and there is only one (invariant 2).
            // So a store suffices.
            self.0.store(RUNNABLE, Ordering::Relaxed);
            return Notify::Enqueue;
        }
        // Release: the goroutine sees what the waker did before. Acquire: as above.
        match self.0.compare_exchange(RUNNING, NOTIFIED, Ordering::Release, Ordering::Acquire) {
            Ok(_) => Notify::Noted,
            // The goroutine parked between the load and the exchange.
            Err(WAITING) => {
                self.0.store(RUNNABLE, Ordering::Relaxed);
                Notify::Enqueue
            }
            Err(state) => Notify::Twice(state),
        }
    }
}
