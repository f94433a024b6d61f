//! The cells and atomics of a channel's protocol files: `core.rs`, `queue.rs`, `buffer.rs`,
//! `handle.rs`, `select/passes.rs`, and `time/slot.rs`.
//!
//! As with `shim.rs`, `crates/trefoil-model` compiles the same files against its own version of
//! this one, where every access goes through loom. So it also finds a cell that is touched without
//! its lock.

pub(crate) use std::cell::Cell;
pub(crate) use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering,
};

use crate::arch::prefetch;

/// A cache line, in bytes.
const LINE: usize = 64;

/// What a partner of the next operation will touch, as far as the channel knows: a hint for the
/// cache, without any meaning for the protocol.
pub(crate) struct CacheHint(AtomicUsize);

impl CacheHint {
    pub(crate) fn new() -> Self {
        CacheHint(AtomicUsize::new(0))
    }

    /// Stores the sleeper word of the first waiter.
    #[inline]
    pub(crate) fn set(&self, sleeper: usize) {
        self.0.store(sleeper, Ordering::Relaxed);
    }

    /// Loads the sleeper, and the frame around its sudog, in the background. The G, the sudog and
    /// the frame that the switch will restore are one after the other in a chain of pointers; so
    /// the three cache misses of a goroutine that has waited for long happen at the same time.
    #[inline]
    pub(crate) fn prefetch(&self, sudog: *const u8) {
        prefetch(std::ptr::without_provenance(self.0.load(Ordering::Relaxed)));
        // The saved registers are two lines below the sudog, its callers' frames above it.
        let first = sudog.wrapping_sub(2 * LINE);
        for line in 0..6 {
            prefetch(first.wrapping_add(line * LINE));
        }
    }
}
