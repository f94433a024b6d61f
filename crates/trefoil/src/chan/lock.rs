//! A channel's lock: like `sys::lock::RawLock`, with a cheaper unlock.
//!
//! Critical sections take tens of nanoseconds, and a locked instruction 6 to 8 of them. RawLock
//! needs one to lock and one to unlock: the exchange that unlocks also reads whether a thread
//! sleeps. Here unlocking is a plain store, followed by a read of the number of sleepers. CPU time
//! on a busy machine: 27 ns instead of 43 for a send and a receive on one core, 215 instead of 255
//! for a ping-pong.
//!
//! | word | meaning |
//! |---|---|
//! | `held` | 1 while a thread holds the lock |
//! | `sleepers` | number of threads that sleep in the kernel, or are about to |
//!
//! # The lost wake-up
//! On x86 a store and a later load of another word may be reordered:
//!
//! ```text
//!   holder                                 newcomer
//!   held = 0   (still in its store buffer)
//!   sleepers? 0 → no thread to wake        sleepers + 1
//!                                          held? still 1 → sleeps
//! ```
//! A store leaves the buffer within some hundred cycles. The newcomer's way into the kernel, which
//! reads `held` once more, takes longer. So the lost wake-up is very rare. Because it is possible,
//! a sleep ends after [`MAX_SLEEP`], and the newcomer tries again. The cost is a delay, not a hang.
//!
//! Rejected: a barrier in `unlock` (costs as much as the exchange); `membarrier` by the newcomer
//! (exact, but sandboxes forbid it).
//!
//! The rules are those of `sys/lock.rs`: the lock is held only inside the runtime, and no goroutine
//! parks and no user code runs under it.

use crate::sys::futex::{futex_wait, futex_wake};
use std::sync::atomic::{AtomicU32, Ordering, compiler_fence};
use std::time::Duration;

/// The orderings of the store and the load in `unlock`. On aarch64 a release store and a SeqCst
/// load are not reordered and cost the same as weaker ones, so there no wake-up is lost.
const FREE: Ordering =
    if cfg!(target_arch = "x86_64") { Ordering::Release } else { Ordering::SeqCst };
const ARE_ANY: Ordering =
    if cfg!(target_arch = "x86_64") { Ordering::Relaxed } else { Ordering::SeqCst };

/// Probes of a held lock before the thread sleeps, with 127 pauses in all: 3 to 6 µs. (A probe
/// after each pause took 225 ns per item with four senders and four receivers on two Ps; this takes
/// 40 to 90.)
const PROBES: u32 = 7;
/// The longest sleep, and so the largest delay of a newcomer.
const MAX_SLEEP: Duration = Duration::from_micros(200);

/// See the head of the file.
pub(super) struct ChanLock {
    held: AtomicU32,
    sleepers: AtomicU32,
}

impl ChanLock {
    pub(super) const fn new() -> ChanLock {
        ChanLock { held: AtomicU32::new(0), sleepers: AtomicU32::new(0) }
    }

    /// Takes the lock, and sleeps in the kernel if necessary.
    #[inline(always)]
    pub(super) fn lock(&self) {
        if !self.try_lock() {
            self.lock_slow();
        }
    }

    #[inline(always)]
    fn try_lock(&self) -> bool {
        // Acquire pairs with the Release in `unlock`: the caller sees what the last holder wrote.
        self.held.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Releases the lock. Only the holder may call this, and it keeps the channel alive.
    #[inline(always)]
    pub(super) fn unlock(&self) {
        // Release pairs with the Acquire of the next holder.
        self.held.store(0, FREE);
        // Keeps the compiler from reordering; on x86 the processor may.
        compiler_fence(Ordering::SeqCst);
        if self.sleepers.load(ARE_ANY) != 0 {
            self.wake_slow();
        }
    }

    #[cold]
    fn lock_slow(&self) {
        loop {
            for probe in 0..PROBES {
                // Back off longer each time: the holder handles several items meanwhile, with the
                // channel in its cache.
                for _ in 0..1 << probe {
                    std::hint::spin_loop();
                }
                // Read before trying: a failed exchange would take the cache line from the holder.
                if self.held.load(Ordering::Relaxed) == 0 && self.try_lock() {
                    return;
                }
            }
            // SeqCst: the count comes before the kernel's read of `held`. `unlock` has no barrier
            // that pairs with it: see the head of the file.
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            // The kernel reads `held` again, and then this loop does.
            futex_wait(&self.held, 1, Some(MAX_SLEEP));
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
        }
    }

    #[cold]
    fn wake_slow(&self) {
        futex_wake(&self.held, 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn excludes_other_threads_and_wakes_all_of_them() {
        const ROUNDS: u64 = 50_000;
        struct Counter(ChanLock, Cell<u64>);
        // SAFETY: the cell is touched only under the lock.
        unsafe impl Sync for Counter {}
        let counter = Counter(ChanLock::new(), Cell::new(0));
        std::thread::scope(|s| {
            for t in 0..4 {
                let counter = &counter;
                s.spawn(move || {
                    for i in 0..ROUNDS {
                        counter.0.lock();
                        let seen = counter.1.get();
                        if (i + t) % 4096 == 0 {
                            std::thread::yield_now(); // let the others reach the futex
                        }
                        counter.1.set(seen + 1);
                        counter.0.unlock();
                    }
                });
            }
        });
        assert_eq!(counter.1.get(), 4 * ROUNDS);
    }
}
