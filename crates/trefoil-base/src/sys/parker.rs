//! Blocks one thread until another thread wakes it: one futex word, as in std.
//!
//! | word | meaning |
//! |---|---|
//! | `EMPTY` | running, no token |
//! | `PARKED` | in the kernel, or on the way into it |
//! | `NOTIFIED` | a token is available; the next `park` returns at once |
//!
//! Invariants:
//! 1. A token stays until a `park` consumes it, so the order of `park` and `unpark` does not
//!    matter.
//! 2. Tokens do not add up: one `park` may consume the tokens of two wakers. It then sees what both
//!    did before.
//! 3. After the sleeper has read `NOTIFIED` the parker may be gone. The waker's last access to it
//!    is the exchange; the system call that follows uses the address only as a key.

use crate::shim::{AtomicU32, Ordering};
use crate::sys::futex::{futex_wait, futex_wake};
use std::time::Duration;

const EMPTY: u32 = 0;
const NOTIFIED: u32 = 1;
const PARKED: u32 = 2;

/// See the head of the file.
pub struct Parker(AtomicU32);

impl Parker {
    #[inline]
    pub fn new() -> Self {
        Parker(AtomicU32::new(EMPTY))
    }

    /// Sleeps until a token is available, and consumes it.
    pub fn park(&self) {
        // Acquire, each time: what the waker did before `unpark` is visible after `park`.
        if self.0.swap(PARKED, Ordering::Acquire) == NOTIFIED {
            // Not a plain store: a second token may have come since, and this consumes it too.
            self.0.swap(EMPTY, Ordering::Acquire);
            return;
        }
        loop {
            // Returns when the word changed or a signal came: the loop checks which.
            futex_wait(&self.0, PARKED, None);
            if self
                .0
                .compare_exchange(NOTIFIED, EMPTY, Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
            {
                return;
            }
        }
    }

    /// Sleeps as `park` does, at most for `limit`. Returns whether it consumed a token.
    pub fn park_timeout(&self, limit: Duration) -> bool {
        if self.0.swap(PARKED, Ordering::Acquire) == NOTIFIED {
            self.0.swap(EMPTY, Ordering::Acquire);
            return true;
        }
        futex_wait(&self.0, PARKED, Some(limit));
        // A token may come at the last moment: it is consumed here, not lost.
        self.0.swap(EMPTY, Ordering::Acquire) == NOTIFIED
    }

    /// Consumes a token without sleeping. Returns whether there was one.
    #[inline]
    pub fn take_token(&self) -> bool {
        self.0.swap(EMPTY, Ordering::Acquire) == NOTIFIED
    }

    /// Returns whether the thread sleeps, or is about to, and no token has come.
    #[inline]
    pub fn is_asleep(&self) -> bool {
        self.0.load(Ordering::Relaxed) == PARKED
    }

    /// Makes a token available, and wakes the thread if it sleeps.
    #[inline]
    pub fn unpark(&self) {
        // Release: pairs with the sleeper's Acquire.
        if self.0.swap(NOTIFIED, Ordering::Release) == PARKED {
            futex_wake(&self.0, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_that_came_before_park_is_not_lost() {
        let parker = Parker::new();
        parker.unpark();
        assert!(parker.park_timeout(Duration::from_secs(60)));
        parker.unpark();
        parker.park();
        assert!(!parker.park_timeout(Duration::from_millis(1)));
    }
}
