//! A thread's bed: one futex word.
//!
//! | word | meaning |
//! |---|---|
//! | `EMPTY` | awake, nothing noted |
//! | `ASLEEP` | in, or on the way into, the kernel |
//! | `NOTED` | woken; the next `park` returns at once |
//!
//! A note is kept until a `park` consumes it, so the order of `park` and `unpark` does not matter.
//! Notes do not add up: one `park` may consume two. What both wakers did is visible then.
//! After the sleeper has seen `NOTED` the parker may be gone: the waker's last access to it is the
//! exchange; the system call that follows uses the address only as a key.

use crate::shim::{AtomicU32, Ordering};
use crate::sys::futex::{futex_wait, futex_wake};
use std::time::Duration;

const EMPTY: u32 = 0;
const NOTED: u32 = 1;
const ASLEEP: u32 = 2;

/// See the head of the file.
pub(crate) struct Parker(AtomicU32);

impl Parker {
    pub(crate) fn new() -> Self {
        Parker(AtomicU32::new(EMPTY))
    }

    /// Sleeps until a note comes, and consumes it.
    pub(crate) fn park(&self) {
        // Acquire, each time: what the waker did before `unpark` is seen after `park`.
        if self.0.swap(ASLEEP, Ordering::Acquire) == NOTED {
            // Not a plain store: a second note may have come since, and this consumes it too.
            self.0.swap(EMPTY, Ordering::Acquire);
            return;
        }
        loop {
            // It changed, or a signal came: the loop looks again.
            futex_wait(&self.0, ASLEEP, None);
            if self.0.compare_exchange(NOTED, EMPTY, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return;
            }
        }
    }

    /// As `park`, at most for `limit`. True: a note came.
    pub(crate) fn park_timeout(&self, limit: Duration) -> bool {
        if self.0.swap(ASLEEP, Ordering::Acquire) == NOTED {
            self.0.swap(EMPTY, Ordering::Acquire);
            return true;
        }
        futex_wait(&self.0, ASLEEP, Some(limit));
        // A note may come at the last moment: it is consumed here, not lost.
        self.0.swap(EMPTY, Ordering::Acquire) == NOTED
    }

    /// Consumes a note without sleeping. True: there was one.
    pub(crate) fn take_note(&self) -> bool {
        self.0.swap(EMPTY, Ordering::Acquire) == NOTED
    }

    /// Returns whether its thread sleeps, or is about to, and no note has come.
    pub(crate) fn is_asleep(&self) -> bool {
        self.0.load(Ordering::Relaxed) == ASLEEP
    }

    /// Leaves a note, and wakes the sleeper if there is one.
    pub(crate) fn unpark(&self) {
        // Release: pairs with the sleeper's Acquire.
        if self.0.swap(NOTED, Ordering::Release) == ASLEEP {
            futex_wake(&self.0, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_that_came_first_is_not_lost() {
        let parker = Parker::new();
        parker.unpark();
        assert!(parker.park_timeout(Duration::from_secs(60)));
        parker.unpark();
        parker.park();
        assert!(!parker.park_timeout(Duration::from_millis(1)));
    }
}
