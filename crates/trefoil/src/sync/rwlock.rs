//! `RwLock`: Go's `RWMutex`, with std's face.
//!
//! Writers first get a mutex among themselves (with its barging, its queue, and its starvation
//! mode), then close the door to readers and wait for those inside.
//!
//! | bit of `word` | meaning |
//! |---|---|
//! | `WRITER` | the door is closed: a writer is in, or waits for the readers inside to leave |
//! | `QUEUED` | readers wait at the door; only together with `WRITER` |
//! | the rest | readers inside |
//!
//! Invariants:
//! 1. `WRITER` is set and cleared by the holder of `writers`. So one writer at a time waits for
//!    readers.
//! 2. While `WRITER` is set the number of readers inside only falls; at zero the writer is in.
//! 3. `QUEUED` changes under the lock of the readers' queue (key: the word's address); while it is
//!    set, so does `WRITER`. It is cleared together with `WRITER`, and that lets in everybody in
//!    that queue. The writer's queue has the key behind it.
//! 4. So readers who come while a writer waits are behind it, and before the next one: neither side
//!    starves the other.
//!
//! Rejected: one queue for both sides, in order of arrival: readers would enter in many small
//! groups.

use super::mutex::RawMutex;
use super::spin::Spin;
use crate::sched::queue::{Batch, Node, Slept, inside};
use crate::sched::reason::WaitReason;
use crate::sched::table;
use crate::sys::clock::{self, NEVER, Nanos};
use lock_api::GuardSend;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const WRITER: u32 = 1 << 31;
const QUEUED: u32 = 1 << 30;
const READERS: u32 = QUEUED - 1;

/// A lock for many readers or one writer that parks goroutines.
///
/// The names are those of [`std::sync::RwLock`], but `read` and `write` return the guards
/// themselves: **there is no poisoning**. Goroutines and plain threads may share one; it works in a
/// `static`; it takes eight bytes beside the data.
///
/// As in Go, a writer that waits keeps new readers out, and when it unlocks, all readers that wait
/// get in before the next writer. So do not lock for reading twice in one goroutine: a writer may
/// come in between.
///
/// ```
/// use trefoil::sync::RwLock;
/// static CONFIG: RwLock<Vec<&str>> = RwLock::new(Vec::new());
/// trefoil::run(|| {
///     CONFIG.write().push("fast");
///     let (one, two) = (CONFIG.read(), CONFIG.read());
///     assert_eq!(*one, *two);
///     assert!(CONFIG.try_write().is_none());
/// });
/// ```
pub type RwLock<T> = lock_api::RwLock<RawRwLock, T>;

/// The right to read the data of a [`RwLock`].
///
/// ```
/// let lock = trefoil::sync::RwLock::new(5);
/// let guard: trefoil::sync::RwLockReadGuard<'_, i32> = lock.read();
/// assert_eq!(*guard, 5);
/// ```
pub type RwLockReadGuard<'a, T> = lock_api::RwLockReadGuard<'a, RawRwLock, T>;

/// The right to change the data of a [`RwLock`].
///
/// ```
/// use trefoil::sync::{RwLock, RwLockWriteGuard};
/// let lock = RwLock::new(5);
/// let mut guard = lock.write();
/// *guard = 6;
/// let guard = RwLockWriteGuard::downgrade(guard);
/// assert_eq!((*guard, *lock.read()), (6, 6));
/// ```
pub type RwLockWriteGuard<'a, T> = lock_api::RwLockWriteGuard<'a, RawRwLock, T>;

/// The right to read a part of the data of a [`RwLock`].
///
/// ```
/// use trefoil::sync::{RwLock, RwLockReadGuard};
/// let lock = RwLock::new((1, 2));
/// assert_eq!(*RwLockReadGuard::map(lock.read(), |pair| &pair.1), 2);
/// ```
pub type MappedRwLockReadGuard<'a, T> = lock_api::MappedRwLockReadGuard<'a, RawRwLock, T>;

/// The right to change a part of the data of a [`RwLock`].
///
/// ```
/// use trefoil::sync::{RwLock, RwLockWriteGuard};
/// let lock = RwLock::new((1, 2));
/// *RwLockWriteGuard::map(lock.write(), |pair| &mut pair.1) = 3;
/// assert_eq!(*lock.read(), (1, 3));
/// ```
pub type MappedRwLockWriteGuard<'a, T> = lock_api::MappedRwLockWriteGuard<'a, RawRwLock, T>;

/// A read-write lock without data, for [`lock_api`]'s types: see [`RwLock`].
///
/// ```
/// use lock_api::RawRwLock as _;
/// assert!(!trefoil::sync::RawRwLock::INIT.is_locked());
/// ```
pub struct RawRwLock {
    word: AtomicU32,
    writers: RawMutex,
}

impl RawRwLock {
    fn readers_key(&self) -> usize {
        self.word.as_ptr() as usize
    }

    fn writer_key(&self) -> usize {
        self.readers_key() + 1
    }

    #[inline]
    fn try_read(&self) -> bool {
        let mut now = self.word.load(Ordering::Relaxed);
        while now & WRITER == 0 {
            assert!(now & READERS != READERS, "RwLock: too many readers");
            // Acquire: what the last writer did (Release in `open`).
            match self.word.compare_exchange_weak(
                now,
                now + 1,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(changed) => now = changed,
            }
        }
        false
    }

    #[cold]
    fn read_slow(&self, deadline: Nanos) -> bool {
        let node = Node::new(0);
        loop {
            let enqueue = |_| {
                table::with_queue(self.readers_key(), |queue| {
                    let waits = self.wait_at_door();
                    if waits {
                        queue.push_back(&node);
                    }
                    waits
                })
            };
            let withdraw = |_| {
                table::with_queue(self.readers_key(), |queue| queue.remove(&node));
            };
            match node.sleep(WaitReason::RwLockRead, deadline, enqueue, withdraw) {
                Slept::Woken(_) => return true, // counted by who opened
                Slept::TimedOut => return false,
                Slept::No => {
                    if self.try_read() {
                        return true;
                    }
                }
            }
        }
    }

    /// Under the lock of the readers' queue. False: the door is open.
    fn wait_at_door(&self) -> bool {
        let mut now = self.word.load(Ordering::Relaxed);
        while now & WRITER != 0 {
            // An exchange: a writer that sees nobody queued opens the door without the lock.
            match self.word.compare_exchange_weak(
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

    #[inline]
    fn read_until(&self, deadline: Nanos) -> bool {
        self.try_read() || self.read_slow(deadline)
    }

    #[inline]
    fn read_end(&self) {
        // Release: the writer sees that our reads are done.
        let before = self.word.fetch_sub(1, Ordering::Release);
        debug_assert!(before & READERS != 0, "read unlock of a lock that is not read-locked");
        if before & WRITER != 0 && before & READERS == 1 {
            self.last_reader_slow();
        }
    }

    /// The last reader inside wakes the writer, if it sleeps already.
    #[cold]
    fn last_reader_slow(&self) {
        inside(|rt| {
            let writer = table::with_queue(self.writer_key(), |queue| {
                // We may be late: that writer is gone, and the next one waits for other readers.
                let empty = self.word.load(Ordering::Relaxed) & READERS == 0;
                if empty { queue.take_first() } else { None }
            });
            if let Some(writer) = writer {
                writer.wake(rt, 0);
            }
        });
    }

    fn try_write(&self) -> bool {
        if !self.writers.try_lock_now() {
            return false;
        }
        // Acquire: what readers and writers before us did.
        let free =
            self.word.compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed).is_ok();
        if !free {
            self.writers.unlock_held();
        }
        free
    }

    #[inline]
    fn write_until(&self, deadline: Nanos) -> bool {
        if !self.writers.lock_until(deadline, WaitReason::RwLockWrite) {
            return false;
        }
        // Acquire: as in `try_write`.
        let before = self.word.fetch_or(WRITER, Ordering::Acquire);
        before == 0 || self.wait_for_readers_slow(deadline)
    }

    #[cold]
    fn wait_for_readers_slow(&self, deadline: Nanos) -> bool {
        // Acquire: pairs with `read_end`, of every reader that has left.
        let busy = || self.word.load(Ordering::Acquire) & READERS != 0;
        // The door is closed already, so a look disturbs nobody but those who leave. (Readers who look at a closed door
        // make the lock twice as slow: they all take its line.)
        let mut spin = Spin::new();
        while spin.possible() {
            spin.pause();
            if !busy() {
                return true;
            }
        }
        let node = Node::new(0);
        let enqueue = |_| {
            table::with_queue(self.writer_key(), |queue| {
                let wait = busy();
                if wait {
                    queue.push_back(&node);
                }
                wait
            })
        };
        let withdraw = |_| {
            table::with_queue(self.writer_key(), |queue| queue.remove(&node));
        };
        match node.sleep(WaitReason::RwLockWrite, deadline, enqueue, withdraw) {
            Slept::No => true,
            Slept::Woken(_) => {
                assert!(!busy(), "a writer woken among readers: a bug in trefoil");
                true
            }
            Slept::TimedOut => {
                self.open_slow(0);
                self.writers.unlock_held();
                false
            }
        }
    }

    /// The writer leaves; `stay` of it (one or none) stays as a reader. Then the next writer may
    /// come.
    fn write_end(&self, stay: u32) {
        // Release: the next ones see what we did.
        if self.word.compare_exchange(WRITER, stay, Ordering::Release, Ordering::Relaxed).is_err() {
            self.open_slow(stay);
        }
        self.writers.unlock_held();
    }

    /// Opens the door, and lets in all who wait at it; `stay` more readers are inside from now on.
    #[cold]
    fn open_slow(&self, stay: u32) {
        inside(|rt| {
            let readers: Batch = table::with_queue(self.readers_key(), |queue| {
                let readers = queue.take_all();
                let more = stay + readers.len() as u32;
                let mut now = self.word.load(Ordering::Relaxed);
                loop {
                    // Readers may still be leaving, if the writer gave up.
                    let next = (now & READERS) + more;
                    // Release: as in `write_end`.
                    match self.word.compare_exchange_weak(
                        now,
                        next,
                        Ordering::Release,
                        Ordering::Relaxed,
                    ) {
                        Ok(_) => break readers,
                        Err(changed) => now = changed,
                    }
                }
            });
            readers.wake_all(rt, 0);
        });
    }
}

// SAFETY: a writer is in only with `WRITER` set and no reader inside (invariant 2), one at a time
// (invariant 1); readers enter only while `WRITER` is clear, or when it is cleared on their behalf.
unsafe impl lock_api::RawRwLock for RawRwLock {
    #[allow(clippy::declare_interior_mutable_const)]
    const INIT: RawRwLock = RawRwLock { word: AtomicU32::new(0), writers: RawMutex::NEW };

    type SharedGuard = GuardSend;
    type ExclusiveGuard = GuardSend;

    #[inline]
    fn lock_shared(&self) -> GuardSend {
        self.read_until(NEVER);
        GuardSend::new()
    }

    #[inline]
    fn try_lock_shared(&self) -> Option<GuardSend> {
        self.try_read().then(GuardSend::new)
    }

    #[inline]
    unsafe fn unlock_shared(&self, _: GuardSend) {
        self.read_end();
    }

    #[inline]
    fn lock_exclusive(&self) -> GuardSend {
        self.write_until(NEVER);
        GuardSend::new()
    }

    #[inline]
    fn try_lock_exclusive(&self) -> Option<GuardSend> {
        self.try_write().then(GuardSend::new)
    }

    #[inline]
    unsafe fn unlock_exclusive(&self, _: GuardSend) {
        self.write_end(0);
    }

    fn is_locked(&self) -> bool {
        self.word.load(Ordering::Relaxed) != 0
    }

    fn is_locked_exclusive(&self) -> bool {
        self.word.load(Ordering::Relaxed) & (WRITER | READERS) == WRITER
    }
}

// SAFETY: the writer becomes one reader in the exchange that opens the door.
unsafe impl lock_api::RawRwLockDowngrade for RawRwLock {
    unsafe fn downgrade(&self, _: GuardSend) -> GuardSend {
        self.write_end(1);
        GuardSend::new()
    }
}

// SAFETY: as above; None means that nothing was locked.
unsafe impl lock_api::RawRwLockTimed for RawRwLock {
    type Duration = Duration;
    type Instant = Instant;

    fn try_lock_shared_for(&self, timeout: Duration) -> Option<GuardSend> {
        self.read_until(clock::after(timeout)).then(GuardSend::new)
    }

    fn try_lock_shared_until(&self, timeout: Instant) -> Option<GuardSend> {
        self.read_until(clock::at(timeout)).then(GuardSend::new)
    }

    fn try_lock_exclusive_for(&self, timeout: Duration) -> Option<GuardSend> {
        self.write_until(clock::after(timeout)).then(GuardSend::new)
    }

    fn try_lock_exclusive_until(&self, timeout: Instant) -> Option<GuardSend> {
        self.write_until(clock::at(timeout)).then(GuardSend::new)
    }
}

impl fmt::Debug for RawRwLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = self.word.load(Ordering::Relaxed);
        f.debug_struct("RawRwLock")
            .field("readers", &(word & READERS))
            .field("writer", &(word & WRITER != 0))
            .finish()
    }
}
