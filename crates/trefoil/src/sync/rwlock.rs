//! `RwLock`: Go's `RWMutex`, with std's face.
//!
//! Writers first get a mutex among themselves (with its barging, its queue, and its starvation
//! mode), then close the door to readers and wait for those inside. The word (`rwlock_word.rs`) has the rules.
//!
//! Invariants:
//! 1. The door is closed and opened by the holder of `writers`. So one writer at a time waits for
//!    readers.
//! 2. The readers' queue has the word's address as its key, the writer's the one behind it.
//! 3. Readers who come while a writer waits are behind it, and before the next one: neither side
//!    starves the other.
//!
//! Rejected: one queue for both sides, in order of arrival: readers would enter in many small
//! groups.

use super::mutex::RawMutex;
use super::rwlock_word::{Left, RwLockWord};
use super::spin::Spin;
use crate::sched::queue::{Batch, Node, WaitResult, inside};
use crate::sched::reason::WaitReason;
use crate::sched::table;
use crate::sys::clock::{self, NEVER, Nanos};
use lock_api::GuardSend;
use std::fmt;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

/// A lock for many readers or one writer that parks goroutines.
///
/// Use it instead of a [`Mutex`](crate::sync::Mutex) if reads are frequent and take long enough to
/// overlap. The method names are those of [`std::sync::RwLock`], but `read` and `write` return the
/// guards themselves: **there is no poisoning**. Goroutines and plain threads may share a lock, it
/// works in a `static`, and it takes eight bytes in addition to the data.
///
/// As in Go, a writer that waits keeps new readers out, and when a writer unlocks, all waiting
/// readers enter before the next writer. So a goroutine must not lock for reading twice: if a
/// writer begins to wait in between, both wait forever.
///
/// # Cancel
/// `read` and `write` cannot be ended early. `try_read_for`, `try_read_until`, `try_write_for` and
/// `try_write_until` return `None` when the time is up.
///
/// # Examples
/// ```
/// use trefoil::sync::RwLock;
/// static CONFIG: RwLock<Vec<&str>> = RwLock::new(Vec::new());
/// trefoil::run(|| {
///     CONFIG.write().push("fast");
///     let reader = CONFIG.read();
///     let other = trefoil::go(|| CONFIG.read().len()); // readers share the lock
///     assert_eq!(other.join().unwrap(), reader.len());
///     assert!(CONFIG.try_write().is_none());
/// });
/// ```
pub type RwLock<T> = lock_api::RwLock<RawRwLock, T>;

/// Gives access to the data of a [`RwLock`] that is locked for reading.
///
/// # Drop
/// Dropping the guard ends the read. The last reader lets in the writer that waits.
///
/// # Examples
/// ```
/// let lock = trefoil::sync::RwLock::new(5);
/// let guard: trefoil::sync::RwLockReadGuard<'_, i32> = lock.read();
/// assert_eq!(*guard, 5);
/// ```
pub type RwLockReadGuard<'a, T> = lock_api::RwLockReadGuard<'a, RawRwLock, T>;

/// Gives access to the data of a [`RwLock`] that is locked for writing.
///
/// `RwLockWriteGuard::downgrade` turns it into a read guard without unlocking in between.
///
/// # Drop
/// Dropping the guard unlocks the lock and lets in all readers that wait.
///
/// # Examples
/// ```
/// use trefoil::sync::{RwLock, RwLockWriteGuard};
/// let lock = RwLock::new(5);
/// let mut guard = lock.write();
/// *guard = 6;
/// let guard = RwLockWriteGuard::downgrade(guard);
/// assert_eq!((*guard, *lock.read()), (6, 6));
/// ```
pub type RwLockWriteGuard<'a, T> = lock_api::RwLockWriteGuard<'a, RawRwLock, T>;

/// Gives access to a part of the data of a [`RwLock`] that is locked for reading, made by
/// `RwLockReadGuard::map`.
///
/// # Drop
/// Dropping the guard ends the read.
///
/// # Examples
/// ```
/// use trefoil::sync::{RwLock, RwLockReadGuard};
/// let lock = RwLock::new((1, 2));
/// assert_eq!(*RwLockReadGuard::map(lock.read(), |pair| &pair.1), 2);
/// ```
pub type MappedRwLockReadGuard<'a, T> = lock_api::MappedRwLockReadGuard<'a, RawRwLock, T>;

/// Gives access to a part of the data of a [`RwLock`] that is locked for writing, made by
/// `RwLockWriteGuard::map`.
///
/// # Drop
/// Dropping the guard unlocks the lock.
///
/// # Examples
/// ```
/// use trefoil::sync::{RwLock, RwLockWriteGuard};
/// let lock = RwLock::new((1, 2));
/// *RwLockWriteGuard::map(lock.write(), |pair| &mut pair.1) = 3;
/// assert_eq!(*lock.read(), (1, 3));
/// ```
pub type MappedRwLockWriteGuard<'a, T> = lock_api::MappedRwLockWriteGuard<'a, RawRwLock, T>;

/// A read-write lock without data, for the types of [`lock_api`]. Most programs use [`RwLock`].
///
/// # Examples
/// ```
/// use lock_api::RawRwLock as _;
/// assert!(!trefoil::sync::RawRwLock::INIT.is_locked());
/// ```
pub struct RawRwLock {
    word: RwLockWord,
    writers: RawMutex,
}

impl RawRwLock {
    fn readers_key(&self) -> usize {
        std::ptr::from_ref(&self.word) as usize
    }

    fn writer_key(&self) -> usize {
        self.readers_key() + 1
    }

    #[cold]
    fn read_slow(&self, deadline: Nanos) -> bool {
        let node = Node::new(0);
        loop {
            let enqueue = |_| {
                table::with_queue(self.readers_key(), |queue| {
                    let waits = self.word.wait_at_door();
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
                WaitResult::Woken(_) => return true, // counted by who opened
                // It may run long after its time-out, and the writer be gone by now.
                WaitResult::TimedOut => return self.word.enter(),
                WaitResult::NotQueued => {
                    if self.word.enter() {
                        return true;
                    }
                }
            }
        }
    }

    #[inline]
    fn read_until(&self, deadline: Nanos) -> bool {
        self.word.enter() || self.read_slow(deadline)
    }

    #[inline]
    fn read_end(&self) {
        if self.word.leave() == Left::WakeWriter {
            self.last_reader_slow();
        }
    }

    /// The last reader inside wakes the writer, if it sleeps already.
    #[cold]
    fn last_reader_slow(&self) {
        inside(|rt| {
            let writer = table::with_queue(self.writer_key(), |queue| {
                // We may be late: that writer is gone, and the next one waits for other readers.
                if self.word.has_readers() { None } else { queue.take_first() }
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
        let free = self.word.try_close();
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
        self.word.close() || self.wait_for_readers_slow(deadline)
    }

    #[cold]
    fn wait_for_readers_slow(&self, deadline: Nanos) -> bool {
        // The door is closed already, so a look disturbs nobody but those who leave. (Readers who look at a closed door
        // make the lock twice as slow: they all take its line.)
        let mut spin = Spin::new();
        while spin.possible() {
            spin.pause();
            if !self.word.has_readers() {
                return true;
            }
        }
        let node = Node::new(0);
        let enqueue = |_| {
            table::with_queue(self.writer_key(), |queue| {
                let wait = self.word.has_readers();
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
            WaitResult::NotQueued => true,
            WaitResult::Woken(_) => {
                assert!(!self.word.has_readers(), "a writer woken among readers: a bug in trefoil");
                true
            }
            // It may run long after its time-out, and the readers be gone by now.
            WaitResult::TimedOut if !self.word.has_readers() => true,
            WaitResult::TimedOut => {
                self.open_slow(0);
                self.writers.unlock_held();
                false
            }
        }
    }

    /// The writer leaves; `stay` of it (one or none) stays as a reader. Then the next writer may
    /// come.
    fn write_end(&self, stay: u32) {
        if !self.word.try_open(stay) {
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
                self.word.open(stay + readers.len() as u32);
                readers
            });
            readers.wake_all(rt, 0);
        });
    }
}

// SAFETY: a writer is in only when the door is closed and no reader inside, one at a time (invariant 1); readers
// enter only while it is open, or when it is opened on their behalf (`rwlock_word.rs`).
unsafe impl lock_api::RawRwLock for RawRwLock {
    #[allow(clippy::declare_interior_mutable_const)]
    const INIT: RawRwLock =
        RawRwLock { word: RwLockWord(AtomicU32::new(0)), writers: RawMutex::NEW };

    type SharedGuard = GuardSend;
    type ExclusiveGuard = GuardSend;

    #[inline]
    fn lock_shared(&self) -> GuardSend {
        self.read_until(NEVER);
        GuardSend::new()
    }

    #[inline]
    fn try_lock_shared(&self) -> Option<GuardSend> {
        self.word.enter().then(GuardSend::new)
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
        self.word.look() != (0, false)
    }

    fn is_locked_exclusive(&self) -> bool {
        self.word.look() == (0, true)
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
        let (readers, writer) = self.word.look();
        f.debug_struct("RawRwLock").field("readers", &readers).field("writer", &writer).finish()
    }
}
