//! The word of a `RwLock`: how many readers hold it, and whether a writer keeps new readers out.
//!
//! | bit | meaning |
//! |---|---|
//! | `WRITER` | a writer holds the lock, or waits until the active readers have unlocked |
//! | `QUEUED` | readers wait for the writer; only together with `WRITER` |
//! | the rest | number of active readers |
//!
//! Invariants:
//! 1. `WRITER` is set and cleared by one writer at a time: `rwlock.rs` has a mutex for them.
//! 2. While `WRITER` is set, the number of active readers only falls. At zero the writer holds the
//!    lock.
//! 3. `QUEUED` changes under the lock of the readers' queue; while it is set, so does `WRITER`. It
//!    is cleared together with `WRITER`, and that admits all readers in that queue.

use crate::shim::{AtomicU32, Ordering};

const WRITER: u32 = 1 << 31;
const QUEUED: u32 = 1 << 30;
const READERS: u32 = QUEUED - 1;

/// See the head of the file. Made of `AtomicU32::new(0)`: a lock can be in a static.
pub(crate) struct RwLockWord(pub(crate) AtomicU32);

/// What a reader that unlocks must do.
#[must_use]
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReadUnlock {
    Done,
    /// It was the last reader: wake the writer, if it sleeps already ([`RwLockWord::has_readers`],
    /// under the lock of its queue).
    WakeWriter,
}

impl RwLockWord {
    /// Locks for reading, unless a writer keeps readers out.
    #[inline]
    #[must_use]
    pub(crate) fn try_read(&self) -> bool {
        let mut now = self.0.load(Ordering::Relaxed);
        while now & WRITER == 0 {
            assert!(now & READERS != READERS, "RwLock: too many readers");
            // Acquire: what the last writer did (Release in `write_unlock`).
            match self.0.compare_exchange_weak(now, now + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(changed) => now = changed,
            }
        }
        false
    }

    /// Prepares the word for a reader that is about to join the queue. Returns false if no writer
    /// keeps readers out. Called under the lock of the readers' queue.
    #[must_use]
    pub(crate) fn queue_reader(&self) -> bool {
        let mut now = self.0.load(Ordering::Relaxed);
        while now & WRITER != 0 {
            // An exchange: a writer that sees no queue unlocks without the lock of the queue.
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

    /// Unlocks for a reader.
    #[inline]
    pub(crate) fn read_unlock(&self) -> ReadUnlock {
        // Release: the writer sees that the reads of this reader are done.
        let before = self.0.fetch_sub(1, Ordering::Release);
        debug_assert!(before & READERS != 0, "read unlock of a lock that is not read-locked");
        if before & WRITER != 0 && before & READERS == 1 {
            ReadUnlock::WakeWriter
        } else {
            ReadUnlock::Done
        }
    }

    /// Returns whether readers are active. If a writer has set `WRITER`, false means that it holds
    /// the lock.
    pub(crate) fn has_readers(&self) -> bool {
        // Acquire: pairs with `read_unlock` of every reader.
        self.0.load(Ordering::Acquire) & READERS != 0
    }

    /// Locks for writing if the lock is free.
    #[must_use]
    pub(crate) fn try_write(&self) -> bool {
        // Acquire: what earlier readers and writers did.
        self.0.compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Keeps new readers out. Returns true if no reader is active, so that the writer holds the
    /// lock.
    #[inline]
    #[must_use]
    pub(crate) fn exclude_readers(&self) -> bool {
        // Acquire: as in `try_write`.
        self.0.fetch_or(WRITER, Ordering::Acquire) == 0
    }

    /// Unlocks for a writer if no reader waits. `readers` (1 for a downgrade, else 0) is the number
    /// of active readers from now on.
    #[inline]
    #[must_use]
    pub(crate) fn try_write_unlock(&self, readers: u32) -> bool {
        // Release: the next holder sees what this writer did.
        self.0.compare_exchange(WRITER, readers, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// Unlocks for a writer, or withdraws a writer that gives up, and adds `admitted` active
    /// readers. Called under the lock of the readers' queue, which is empty now.
    pub(crate) fn write_unlock(&self, admitted: u32) {
        let mut now = self.0.load(Ordering::Relaxed);
        loop {
            // If the writer gives up, readers may still be unlocking.
            let next = (now & READERS) + admitted;
            // Release: as in `try_write_unlock`.
            match self.0.compare_exchange_weak(now, next, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(changed) => now = changed,
            }
        }
    }

    /// Returns whether readers are in their queue. May be out of date at once.
    pub(crate) fn has_queue(&self) -> bool {
        self.0.load(Ordering::Relaxed) & QUEUED != 0
    }

    /// Returns the number of active readers, and whether `WRITER` is set. May be out of date at
    /// once.
    pub(crate) fn snapshot(&self) -> (u32, bool) {
        let word = self.0.load(Ordering::Relaxed);
        (word & READERS, word & WRITER != 0)
    }
}
