//! The word of a `RwLock`: who is inside, and whether the door is open.
//!
//! | bit | meaning |
//! |---|---|
//! | `WRITER` | the door is closed: a writer is in, or waits for the readers inside to leave |
//! | `QUEUED` | readers wait at the door; only together with `WRITER` |
//! | the rest | readers inside |
//!
//! Invariants:
//! 1. `WRITER` is set and cleared by one writer at a time: `rwlock.rs` has a mutex for them.
//! 2. While `WRITER` is set the number of readers inside only falls; at zero the writer is in.
//! 3. `QUEUED` changes under the lock of the readers' queue; while it is set, so does `WRITER`. It is cleared together
//!    with `WRITER`, and that lets in everybody in that queue.

use crate::shim::{AtomicU32, Ordering};

const WRITER: u32 = 1 << 31;
const QUEUED: u32 = 1 << 30;
const READERS: u32 = QUEUED - 1;

/// See the head of the file. Made of `AtomicU32::new(0)`: a lock can be in a static.
pub(crate) struct RwLockWord(pub(crate) AtomicU32);

/// What a reader that leaves must do.
#[must_use]
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Left {
    Done,
    /// It was the last: wake the writer, if it sleeps already ([`RwLockWord::has_readers`], under its queue's lock).
    WakeWriter,
}

impl RwLockWord {
    /// A reader goes in, if the door is open.
    #[inline]
    #[must_use]
    pub(crate) fn enter(&self) -> bool {
        let mut now = self.0.load(Ordering::Relaxed);
        while now & WRITER == 0 {
            assert!(now & READERS != READERS, "RwLock: too many readers");
            // Acquire: what the last writer did (Release in `open`).
            match self.0.compare_exchange_weak(now, now + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(changed) => now = changed,
            }
        }
        false
    }

    /// Under the lock of the readers' queue: the caller is about to join it. False: the door is open.
    #[must_use]
    pub(crate) fn wait_at_door(&self) -> bool {
        let mut now = self.0.load(Ordering::Relaxed);
        while now & WRITER != 0 {
            // An exchange: a writer that sees nobody queued opens the door without the lock.
            match self.0.compare_exchange_weak(
                now,
                now | QUEUED,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(changed) => now = changed,
            }
        }
        false
    }

    /// A reader goes.
    #[inline]
    pub(crate) fn leave(&self) -> Left {
        // Release: the writer sees that our reads are done.
        let before = self.0.fetch_sub(1, Ordering::Release);
        debug_assert!(before & READERS != 0, "read unlock of a lock that is not read-locked");
        if before & WRITER != 0 && before & READERS == 1 { Left::WakeWriter } else { Left::Done }
    }

    /// Whether readers are inside. False, to a writer that has closed the door: it is in.
    pub(crate) fn has_readers(&self) -> bool {
        // Acquire: pairs with `leave`, of every reader that has left.
        self.0.load(Ordering::Acquire) & READERS != 0
    }

    /// The writer goes in, if nobody is there.
    #[must_use]
    pub(crate) fn try_close(&self) -> bool {
        // Acquire: what readers and writers before us did.
        self.0.compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// The writer closes the door. True: nobody was inside, so it is in.
    #[inline]
    #[must_use]
    pub(crate) fn close(&self) -> bool {
        // Acquire: as in `try_close`.
        self.0.fetch_or(WRITER, Ordering::Acquire) == 0
    }

    /// The writer leaves, if nobody waits at the door; `stay` of it (one or none) stays as a reader.
    #[inline]
    #[must_use]
    pub(crate) fn try_open(&self, stay: u32) -> bool {
        // Release: the next ones see what we did.
        self.0.compare_exchange(WRITER, stay, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// Under the lock of the readers' queue, which is empty now: the writer leaves, or gives up, and so many more readers
    /// are inside.
    pub(crate) fn open(&self, more: u32) {
        let mut now = self.0.load(Ordering::Relaxed);
        loop {
            // Readers may still be leaving, if the writer gave up.
            let next = (now & READERS) + more;
            // Release: as in `try_open`.
            match self.0.compare_exchange_weak(now, next, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(changed) => now = changed,
            }
        }
    }

    /// A look from outside: readers inside, and whether the door is closed.
    pub(crate) fn look(&self) -> (u32, bool) {
        let word = self.0.load(Ordering::Relaxed);
        (word & READERS, word & WRITER != 0)
    }
}
