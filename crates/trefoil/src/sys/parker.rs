//! A thread's bed: one futex word.
//!
//! | word | meaning |
//! |---|---|
//! | `EMPTY` | awake, nothing noted |
//! | `ASLEEP` | in, or on the way into, the kernel |
//! | `NOTED` | woken; the next `park` returns at once |
//!
//! A note is kept until a `park` consumes it, so the order of `park` and `unpark` does not matter.
//! After the sleeper has seen `NOTED` the parker may be gone: the waker's last access to it is the
//! exchange; the system call that follows uses the address only as a key.

use rustix::thread::futex;
use std::sync::atomic::{AtomicU32, Ordering};
use crate::sys::clock::{NEVER, Nanos, now};
use std::time::Duration;

const EMPTY: u32 = 0;
const NOTED: u32 = 1;
const ASLEEP: u32 = 2;

/// See the head of the file.
pub(crate) struct Parker(AtomicU32);

impl Parker {
    pub(crate) const fn new() -> Self {
        Parker(AtomicU32::new(EMPTY))
    }

    /// Sleeps until a note comes, and consumes it.
    pub(crate) fn park(&self) {
        // Acquire: what the waker did before `unpark` is seen after `park`.
        if self.0.swap(ASLEEP, Ordering::Acquire) == NOTED {
            self.0.store(EMPTY, Ordering::Relaxed);
            return;
        }
        loop {
            // EAGAIN, EINTR: the loop looks again.
            let _ = futex::wait(&self.0, futex::Flags::PRIVATE, ASLEEP, None);
            if self.0.compare_exchange(NOTED, EMPTY, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return;
            }
        }
    }

    /// As `park`, at most for `limit`. True: a note came.
    pub(crate) fn park_timeout(&self, limit: Duration) -> bool {
        if self.0.swap(ASLEEP, Ordering::Acquire) == NOTED {
            self.0.store(EMPTY, Ordering::Relaxed);
            return true;
        }
        let limit = futex::Timespec {
            tv_sec: limit.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        };
        let _ = futex::wait(&self.0, futex::Flags::PRIVATE, ASLEEP, Some(&limit));
        // A note may come at the last moment: it is consumed here, not lost.
        self.0.swap(EMPTY, Ordering::Acquire) == NOTED
    }

    /// As `park`, at most until `deadline`. True: a note came.
    pub(crate) fn park_until(&self, deadline: Nanos) -> bool {
        if deadline == NEVER {
            self.park();
            return true;
        }
        let left = deadline.saturating_sub(now());
        left != 0 && self.park_timeout(Duration::from_nanos(left))
    }

    /// Leaves a note, and wakes the sleeper if there is one.
    pub(crate) fn unpark(&self) {
        if self.0.swap(NOTED, Ordering::Release) == ASLEEP {
            let _ = futex::wake(&self.0, futex::Flags::PRIVATE, 1);
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
