//! A futex word in the frame of the thread that sleeps on it: for waits that must not allocate.
//!
//! | word | meaning |
//! |---|---|
//! | `AWAKE` | the owner has not gone to sleep yet |
//! | `ASLEEP` | the owner is in the kernel, or on its way into it |
//! | `WOKEN` | the wait is over; the owner may leave the frame at any time |
//!
//! Invariants:
//! 1. A waiter is woken once. The waker's exchange to `WOKEN` is its last access to the word; the
//!    system call that may follow uses the address only as a key.
//! 2. The owner leaves the frame only after it has read `WOKEN`, or when it knows that no waker has
//!    its address.
//!
//! Rejected: `Parker`, whose token outlives a wait and whose timeouts are relative. A deadline on
//! `CLOCK_REALTIME` must move when that clock is set.

use super::futex::{futex_wait_until, futex_wake};
use super::syscalls::Errno;
use std::sync::atomic::{AtomicU32, Ordering};

const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;
const WOKEN: u32 = 2;

/// An absolute point in time on one of two clocks.
#[derive(Clone, Copy)]
pub struct ClockTime {
    pub clock: WaitClock,
    pub seconds: i64,
    pub nanos: u32,
}

/// The clock of a [`ClockTime`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WaitClock {
    Realtime,
    Monotonic,
}

/// See the head of the file.
#[repr(align(4))]
pub struct FrameWaiter(AtomicU32);

impl FrameWaiter {
    #[inline]
    pub fn new() -> FrameWaiter {
        FrameWaiter(AtomicU32::new(AWAKE))
    }

    /// Sleeps until `wake` is called, or until `limit`. Returns whether it was woken.
    pub fn wait(&self, limit: Option<ClockTime>) -> bool {
        // Acquire, here and below: what the waker wrote before `wake` is visible to the owner.
        if self
            .0
            .compare_exchange(AWAKE, ASLEEP, Ordering::Relaxed, Ordering::Acquire)
            .is_err_and(|word| word == WOKEN)
        {
            return true;
        }
        loop {
            let clock = match limit {
                Some(ClockTime { clock: WaitClock::Realtime, .. }) => libc::CLOCK_REALTIME,
                _ => libc::CLOCK_MONOTONIC,
            };
            let limit = limit.map(|limit| libc::timespec {
                tv_sec: limit.seconds.max(0),
                tv_nsec: if limit.seconds < 0 { 0 } else { limit.nanos.into() },
            });
            let slept = futex_wait_until(&self.0, ASLEEP, clock, limit.as_ref());
            if self.0.load(Ordering::Acquire) == WOKEN {
                return true;
            }
            // Another error, or none: a signal, or a wake-up for an earlier owner of this address.
            if slept == Err(Errno::TIMEDOUT) {
                return false;
            }
        }
    }

    /// Ends the wait (invariant 1).
    #[inline]
    pub fn wake(&self) {
        let word = &raw const self.0;
        // Release: pairs with the owner's Acquire.
        if self.0.swap(WOKEN, Ordering::Release) == ASLEEP {
            // The kernel does not read the word for a wake-up, so the frame may be gone.
            futex_wake(word, 1);
        }
    }
}
