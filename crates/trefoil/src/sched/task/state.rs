//! The state word of a task: wake-ups, polls and aborts meet.
//!
//! | bits | meaning |
//! |---|---|
//! | 63..8 | generation: the number of tasks that have begun in this block |
//! | 3 `CANCELLED` | the task is to end: the next carrier drops the future instead of polling it |
//! | 2 `ALIVE` | a future is stored; without it, every other bit but the generation is 0 |
//! | 1 `RUNNING` | a carrier polls the future |
//! | 0 `SCHEDULED` | the task is in a queue, or will be put there when the poll has returned |
//!
//! ```text
//!   free ─begin─▶ SCHEDULED ─begin_poll─▶ RUNNING ─end_poll─▶ idle ─wake─▶ SCHEDULED
//!                    ▲                       │ wake: RUNNING | SCHEDULED ─end_poll─┐
//!                    └───────────────────────┼─────────────────────────────────────┘
//!                                            └─finish─▶ free; `begin` begins the next generation
//! ```
//!
//! Invariants:
//! 1. The caller of `begin`, of a `wake` or `cancel` that returns `Enqueue`, of an `end_poll` that
//!    returns true, or of `end_poll_scheduled` puts the task into a queue. Nothing else does. So a
//!    task is in a queue at most once.
//! 2. A wake-up is always a read-modify-write, also if the task is scheduled already. Otherwise the
//!    next poll would not be ordered after what the waker did before.
//! 3. `begin` is called by the owner of a free block, `begin_poll`, `end_poll` and `finish` by the
//!    carrier. `wake` and `cancel` may be called by any thread at any time, also for a task that
//!    has ended: the generation differs.

use crate::shim::{AtomicU64, Ordering};

const SCHEDULED: u64 = 1;
const RUNNING: u64 = 2;
const ALIVE: u64 = 4;
const CANCELLED: u64 = 8;
const GENERATION_SHIFT: u32 = 8;

/// The lower bits of a generation, which fit into a waker. A waker that is so many generations old
/// wakes a stranger; a future must expect that anyway.
pub(crate) const WAKER_GENERATION_BITS: u32 = 16;
const WAKER_GENERATION_MASK: u64 = (1 << WAKER_GENERATION_BITS) - 1;

/// The bits of the word, for debuggers (`observe/layout.rs`).
pub(crate) const LAYOUT: &[(&str, usize)] = &[
    ("task_state.scheduled", SCHEDULED as usize),
    ("task_state.running", RUNNING as usize),
    ("task_state.alive", ALIVE as usize),
];

/// The state word. See the head of the file.
pub(crate) struct TaskState(AtomicU64);

/// The number of the task in its block. A block never has two tasks of one generation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Generation(u64);

impl Generation {
    /// Returns the bits that a waker carries.
    #[inline(always)]
    pub(crate) fn waker_bits(self) -> u64 {
        self.0 & WAKER_GENERATION_MASK
    }
}

/// The state in which a task begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Begin {
    /// The caller puts it into a queue.
    Scheduled,
    /// It waits for its first wake-up.
    Idle,
    /// It is being polled: by `block_on`, which needs no carrier.
    Running,
}

/// What the caller of [`TaskState::wake`] or [`TaskState::cancel`] has to do.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Woken {
    /// The task was idle: put it into a queue.
    Enqueue,
    /// Nothing.
    Noted,
}

/// What a carrier does with a task: the result of [`TaskState::begin_poll`].
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Turn {
    Poll,
    /// Drop the future, then [`TaskState::finish`].
    Cancel,
}

/// The state as another thread reads it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TaskSnapshot {
    Free,
    Idle,
    Scheduled,
    Running,
}

impl TaskState {
    pub(crate) fn new() -> TaskState {
        TaskState(AtomicU64::new(0))
    }

    /// Begins a task in a free block. Returns its generation.
    pub(crate) fn begin(&self, begin: Begin) -> Generation {
        let word = self.0.load(Ordering::Relaxed);
        debug_assert_eq!(word & (ALIVE | RUNNING), 0);
        let bits = match begin {
            Begin::Scheduled => ALIVE | SCHEDULED,
            Begin::Idle => ALIVE,
            Begin::Running => ALIVE | RUNNING,
        };
        let generation = (word >> GENERATION_SHIFT) + 1;
        // Release: a waker that finds this generation sees the task's fields.
        self.0.store(generation << GENERATION_SHIFT | bits, Ordering::Release);
        Generation(generation)
    }

    /// Returns the generation. By the owner of the block, or a party that keeps the task alive.
    #[inline(always)]
    pub(crate) fn generation(&self) -> Generation {
        Generation(self.0.load(Ordering::Relaxed) >> GENERATION_SHIFT)
    }

    /// Wakes the task, if its generation has these [`Generation::waker_bits`].
    #[inline]
    pub(crate) fn wake(&self, waker_bits: u64) -> Woken {
        let is_meant = |word: u64| (word >> GENERATION_SHIFT) & WAKER_GENERATION_MASK == waker_bits;
        self.set(is_meant, SCHEDULED)
    }

    /// Asks the task of this generation to end.
    pub(crate) fn cancel(&self, generation: Generation) -> Woken {
        self.set(|word| word >> GENERATION_SHIFT == generation.0, SCHEDULED | CANCELLED)
    }

    #[inline]
    fn set(&self, is_meant: impl Fn(u64) -> bool, bits: u64) -> Woken {
        let mut word = self.0.load(Ordering::Relaxed);
        loop {
            if word & ALIVE == 0 || !is_meant(word) {
                return Woken::Noted;
            }
            // Release: the next poll sees what the waker did (invariant 2). Acquire: a waker that
            // enqueues the task sees what its last carrier did.
            let order = (Ordering::AcqRel, Ordering::Relaxed);
            match self.0.compare_exchange_weak(word, word | bits, order.0, order.1) {
                Ok(_) if word & (SCHEDULED | RUNNING) == 0 => return Woken::Enqueue,
                Ok(_) => return Woken::Noted,
                Err(now) => word = now,
            }
        }
    }

    /// `SCHEDULED` → `RUNNING`.
    #[inline]
    pub(crate) fn begin_poll(&self) -> Turn {
        // Acquire: pairs with the Release of each wake-up, and of the last poll's end. Other
        // threads only set bits, and none of these two, so the exclusive or is exact.
        let word = self.0.fetch_xor(SCHEDULED | RUNNING, Ordering::Acquire);
        debug_assert_eq!(word & (SCHEDULED | RUNNING | ALIVE), SCHEDULED | ALIVE);
        if word & CANCELLED == 0 { Turn::Poll } else { Turn::Cancel }
    }

    /// `RUNNING` → idle, or `SCHEDULED` if a wake-up came during the poll. Returns true in that
    /// case: then the caller puts the task into a queue.
    #[inline]
    #[must_use]
    pub(crate) fn end_poll(&self) -> bool {
        // Release: the next poll sees the future as this one left it. Acquire: if a wake-up came,
        // the caller continues as its waker.
        self.0.fetch_and(!RUNNING, Ordering::AcqRel) & SCHEDULED != 0
    }

    /// `RUNNING` → `SCHEDULED`, for a task that yields. The caller puts it into a queue.
    #[inline]
    pub(crate) fn end_poll_scheduled(&self) {
        let mut word = self.0.load(Ordering::Relaxed);
        loop {
            let next = (word | SCHEDULED) & !RUNNING;
            // As in `end_poll`.
            let order = (Ordering::AcqRel, Ordering::Relaxed);
            match self.0.compare_exchange_weak(word, next, order.0, order.1) {
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
    }

    /// Ends the task: wake-ups and aborts have no effect any more.
    #[inline]
    pub(crate) fn finish(&self) {
        // Relaxed: the join cell or a free list passes the block on.
        self.0.fetch_and(!((1 << GENERATION_SHIFT) - 1), Ordering::Relaxed);
    }

    /// Returns whether the task of this generation has ended.
    pub(crate) fn has_ended(&self, generation: Generation) -> bool {
        let word = self.0.load(Ordering::Relaxed);
        word & ALIVE == 0 || word >> GENERATION_SHIFT != generation.0
    }

    /// Returns the state and the generation, for dumps. Both may have changed when the caller uses
    /// them.
    pub(crate) fn snapshot(&self) -> (TaskSnapshot, Generation) {
        // Acquire: pairs with `begin`, so the task's fields are not older than the generation.
        let word = self.0.load(Ordering::Acquire);
        let state = match word & (ALIVE | RUNNING | SCHEDULED) {
            bits if bits & ALIVE == 0 => TaskSnapshot::Free,
            bits if bits & RUNNING != 0 => TaskSnapshot::Running,
            bits if bits & SCHEDULED != 0 => TaskSnapshot::Scheduled,
            _ => TaskSnapshot::Idle,
        };
        (state, Generation(word >> GENERATION_SHIFT))
    }
}
