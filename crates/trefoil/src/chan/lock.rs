//! A channel's lock: as `sys::lock::RawLock`, with a cheaper way out.
//!
//! Sections are tens of nanoseconds, and a locked instruction is 6–8 of them. RawLock needs one to
//! get in and one to get out: the exchange that gives it back also learns whether somebody sleeps.
//! Here the way out is a plain store, and a look at the count of sleepers *after* it. CPU time
//! on a busy machine: send and receive on one core 27 ns instead of 43, a ping-pong 215 instead of
//! 255.
//!
//! | word | meaning |
//! |---|---|
//! | `held` | 1: somebody is in |
//! | `sleepers` | who sleeps in the kernel, or is about to |
//!
//! # The lost wake-up
//! A store and a later load of another word may change places on x86:
//!
//! ```text
//!   holder                                 newcomer
//!   held = 0   (still in its store buffer)
//!   sleepers? 0 → nobody to wake           sleepers + 1
//!                                          held? still 1 → sleeps
//! ```
//! A store leaves the buffer within some hundred cycles; the newcomer's way into the kernel, which
//! looks at `held` once more, is longer. So this nearly never happens; and because it might, a
//! sleep ends after [`NAP`], and the newcomer looks again. The price is a delay, not a hang.
//!
//! Rejected: a barrier on the way out (costs what the exchange does); `membarrier` by the newcomer
//! (exact, but sandboxes forbid it).
//!
//! The rules are those of `sys/lock.rs`: held only inside the runtime; no parking, no user code
//! under it.

use crate::sys::futex::{futex_wait, futex_wake};
use std::sync::atomic::{AtomicU32, Ordering, compiler_fence};
use std::time::Duration;

/// Looks at a held lock before the thread sleeps: 127 pauses in all, 3 to 6 µs. (A look after each pause took 225 ns
/// an item with four senders and four receivers on two Ps; this takes 40 to 90.)
const LOOKS: u32 = 7;
/// The longest sleep: how late a newcomer is in the worst case.
const NAP: Duration = Duration::from_micros(200);

/// See the head of the file.
pub(super) struct ChanLock {
    held: AtomicU32,
    sleepers: AtomicU32,
}

impl ChanLock {
    pub(super) const fn new() -> ChanLock {
        ChanLock { held: AtomicU32::new(0), sleepers: AtomicU32::new(0) }
    }

    /// Takes the lock; sleeps in the kernel if it must.
    #[inline(always)]
    pub(super) fn lock(&self) {
        if !self.try_lock() {
            self.lock_slow();
        }
    }

    #[inline(always)]
    fn try_lock(&self) -> bool {
        // Acquire pairs with the Release in `unlock`: we see what the last holder wrote.
        self.held.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Gives the lock back. Only the holder may call this, and it keeps the channel alive.
    #[inline(always)]
    pub(super) fn unlock(&self) {
        // Release pairs with the Acquire of the next holder.
        self.held.store(0, Ordering::Release);
        // The compiler at least keeps the order.
        compiler_fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) != 0 {
            self.wake_slow();
        }
    }

    #[cold]
    fn lock_slow(&self) {
        loop {
            for look in 0..LOOKS {
                // Ever longer out of the way: whoever has the lock does several items meanwhile, with the
                // channel in its cache.
                for _ in 0..1 << look {
                    std::hint::spin_loop();
                }
                // Look before trying: a failed exchange would pull the line away from the holder.
                if self.held.load(Ordering::Relaxed) == 0 && self.try_lock() {
                    return;
                }
            }
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            // The kernel looks at `held` again, and then so do we.
            futex_wait(&self.held, 1, Some(NAP));
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
    fn excludes_and_goes_on() {
        const ROUNDS: u64 = 50_000;
        struct Counter(ChanLock, Cell<u64>);
        // SAFETY: the cell is touched under the lock only.
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
