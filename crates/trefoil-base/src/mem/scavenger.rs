//! Retires pooled stacks that were not needed for a while: after a burst, not during it.
//!
//! Every [`PERIOD_NANOS`] the scavenger reads the lowest number of stacks that the pool of
//! default-size stacks had in the period. That many were not needed; they are retired, except
//! [`POOL_MAX`]. It works in steps with pauses, on half of a CPU at most, on a thread without a P.
//!
//! | `SURPLUS` | meaning |
//! |---|---|
//! | `NO_SURPLUS` | the pool has at most [`POOL_MAX`] stacks, as far as known |
//! | `UNATTENDED` | the pool has more, and no scavenger knows |
//! | `ATTENDED` | a scavenger works on it |
//!
//! Invariant: while a scavenger is attending (`next != NEVER`) it is registered with the arena as a
//! cache, because the stacks that it takes from the pool to retire are covered by no credit.

use super::arena;
use super::size_class::SizeClass;
use super::stack::{self, StackConfig};
use super::{BATCH, POOL_MAX, pool_of};
use crate::sys::clock::{NEVER, Nanos};
use std::sync::atomic::{AtomicU8, Ordering};

const PERIOD_NANOS: Nanos = 500_000_000;
/// Stacks retired per step, and the pause after it, which is about as long as the step.
const STEP: usize = 512;
const PAUSE_NANOS: Nanos = 1_000_000;

/// A hint; nothing is published with it.
static SURPLUS: AtomicU8 = AtomicU8::new(NO_SURPLUS);
const NO_SURPLUS: u8 = 0;
const UNATTENDED: u8 = 1;
const ATTENDED: u8 = 2;

/// Returns whether a [`Scavenger`] should run.
#[inline]
pub fn has_surplus() -> bool {
    SURPLUS.load(Ordering::Relaxed) == UNATTENDED
}

/// Records that the pool has more stacks than it keeps for good.
#[inline]
pub(super) fn note_surplus() {
    let relaxed = Ordering::Relaxed;
    if SURPLUS.load(relaxed) == NO_SURPLUS {
        // Not a store: a scavenger may attend to it by now.
        let _ = SURPLUS.compare_exchange(NO_SURPLUS, UNATTENDED, relaxed, relaxed);
    }
}

/// See the head of the file.
pub struct Scavenger {
    /// When to continue; `NEVER` if there is nothing to do.
    next: Nanos,
    /// Stacks that were not needed and are not retired yet.
    to_retire: usize,
}

impl Scavenger {
    pub const fn new() -> Scavenger {
        Scavenger { next: NEVER, to_retire: 0 }
    }

    /// Does what is due by the clock, and returns when to call it again.
    pub fn run_due(&mut self, clock: impl Fn() -> Nanos) -> Nanos {
        let Ok(config) = StackConfig::get() else { return NEVER };
        let class = config.default();
        if has_surplus() {
            SURPLUS.store(ATTENDED, Ordering::Relaxed);
            if self.next == NEVER && !self.start(class, &clock) {
                return NEVER;
            }
        }
        if clock() < self.next {
            return self.next;
        }
        self.retire_step(class);
        self.next = if self.to_retire > 0 {
            clock() + PAUSE_NANOS
        } else if is_surplus_gone(class) {
            arena::unregister_cache(class);
            NEVER
        } else {
            clock() + PERIOD_NANOS
        };
        self.next
    }

    /// Begins the first period. Returns false if the arena cannot register the scavenger.
    fn start(&mut self, class: SizeClass, clock: &impl Fn() -> Nanos) -> bool {
        if arena::register_cache(class).is_err() {
            // The next stack that overflows the pool is another chance.
            SURPLUS.store(NO_SURPLUS, Ordering::Relaxed);
            return false;
        }
        pool_of(class).unneeded();
        self.next = clock() + PERIOD_NANOS;
        true
    }

    /// Retires up to [`STEP`] stacks. At the end of a period it first decides how many are to go.
    fn retire_step(&mut self, class: SizeClass) {
        let pool = pool_of(class);
        if self.to_retire == 0 {
            self.to_retire = pool.unneeded();
        }
        // Some may have been needed since.
        self.to_retire = self.to_retire.min(pool.len().saturating_sub(POOL_MAX));
        let retired = retire_pooled(class, self.to_retire.min(STEP));
        self.to_retire -= retired.min(self.to_retire);
    }

    /// Retires the whole surplus at once: the runtime of this scavenger ends. (A scavenger of
    /// another runtime may continue.)
    pub fn finish(mut self) {
        let Ok(config) = StackConfig::get() else { return };
        let class = config.default();
        let attended = std::mem::replace(&mut self.next, NEVER) != NEVER;
        if attended || arena::register_cache(class).is_ok() {
            retire_pooled(class, pool_of(class).len().saturating_sub(POOL_MAX));
            arena::unregister_cache(class);
        }
        if attended {
            SURPLUS.store(UNATTENDED, Ordering::Relaxed);
        }
    }
}

/// Returns whether the pool has no surplus any more, and updates [`SURPLUS`].
fn is_surplus_gone(class: SizeClass) -> bool {
    // SeqCst: the store comes before the check, so a surplus is found here or by `note_surplus`. A
    // thread that reads `ATTENDED` before the store and puts its batch after the check is missed;
    // the next batch that overflows the pool is noted.
    SURPLUS.store(NO_SURPLUS, Ordering::SeqCst);
    let gone = pool_of(class).has_room(0, POOL_MAX);
    if !gone {
        SURPLUS.store(ATTENDED, Ordering::Relaxed);
    }
    gone
}

/// Retires about `most` default-size stacks of the pool. Returns how many.
fn retire_pooled(class: SizeClass, most: usize) -> usize {
    let mut retired = 0;
    while retired < most
        && let Ok(batch) = pool_of(class).take_or_else(BATCH, || ())
    {
        retired += batch.len();
        stack::retire(class, batch);
    }
    retired
}
