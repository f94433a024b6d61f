//! `RwLock`: Go's `RWMutex`, with the names of std.
//!
//! A writer first locks a mutex among the writers (with its barging, its queue, and its starvation
//! mode), then keeps new readers out and waits for the active ones. The rules of the word are in
//! `rwlock_word.rs`.
//!
//! Invariants:
//! 1. Only the holder of `writers` keeps readers out and admits them again. So one writer at a time
//!    waits for readers.
//! 2. The keys of the readers' queue and of the writer's queue are the lock's address with a tag
//!    (`sched/wait/holder.rs`). The queue of `writers` has the address itself.
//! 3. Readers that come while a writer waits are served after it, and before the next writer:
//!    neither side starves the other.
//! 4. An upgradable reader holds `writers` and nothing else. That keeps writers and other
//!    upgradable readers out (invariant 1), and readers do not notice it. To upgrade, it does what
//!    a writer does after it has locked `writers`.
//!
//! Rejected: one queue for both sides, in order of arrival: readers would be admitted in many small
//! groups.

use super::mutex::{LockOp, RawMutex};
use super::rwlock_word::{ReadUnlock, RwLockWord};
use super::spin::Spin;
use crate::runtime::task_waiter;
use crate::sched::simulation;
use crate::sched::wait::holder::{self, FOR_READERS, READERS_TAG, WRITER_TAG};
use crate::sched::wait::inside;
use crate::sched::wait::list::{Batch, Node, WaitResult};
use crate::sched::wait::reason::WaitReason;
use crate::sched::wait::table;
use crate::sched::wait::task_node::TaskNode;
use crate::sys::clock::{self, NEVER, Nanos};
use lock_api::GuardSend;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::AtomicU32;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

/// A lock for many readers or one writer that parks goroutines.
///
/// Use it instead of a [`Mutex`](crate::sync::Mutex) if reads are frequent and take long enough to
/// overlap. The method names are those of [`std::sync::RwLock`], but `read` and `write` return the
/// guards themselves: **there is no poisoning**. Goroutines and plain threads may share a lock, it
/// works in a `static`, and it takes twelve bytes in addition to the data.
///
/// As in Go, a writer that waits keeps new readers out, and when a writer unlocks, all waiting
/// readers enter before the next writer. So a goroutine must not lock for reading twice: if a
/// writer begins to wait in between, both wait forever.
///
/// A goroutine that reads first and may write then locks with `upgradable_read`, whose guard
/// ([`RwLockUpgradableReadGuard`]) becomes a write guard without unlocking in between. There is one
/// such guard at a time, beside any number of readers.
///
/// A goroutine that holds the lock for long may let waiters in with `RwLockReadGuard::bump` and
/// `RwLockWriteGuard::bump`.
///
/// Async code locks it with the methods of [`RwLockExt`].
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

/// Gives access to the data of a [`RwLock`] that is locked for reading, with the right to become a
/// writer.
///
/// `RwLock::upgradable_read` and `try_upgradable_read` return it, as in parking_lot. It keeps
/// writers and other upgradable readers out, but no readers. `RwLockUpgradableReadGuard::upgrade`
/// waits for the active readers and returns a write guard; `try_upgrade`, `try_upgrade_for` and
/// `try_upgrade_until` return the guard itself if readers are active. `downgrade` turns it into a
/// read guard, and `RwLockWriteGuard::downgrade_to_upgradable` makes one from a write guard.
///
/// A goroutine that holds a read guard of the same lock must not upgrade: it would wait for itself.
///
/// # Drop
/// Dropping the guard lets the next writer or upgradable reader in.
///
/// # Examples
/// ```
/// use trefoil::sync::{RwLock, RwLockUpgradableReadGuard};
/// static CACHE: RwLock<Vec<&str>> = RwLock::new(Vec::new());
///
/// fn add(word: &'static str) {
///     let words = CACHE.upgradable_read();
///     if !words.contains(&word) {
///         // No other goroutine has added it in between.
///         RwLockUpgradableReadGuard::upgrade(words).push(word);
///     }
/// }
///
/// trefoil::run(|| {
///     trefoil::scope(|s| {
///         for _ in 0..10 {
///             s.go(|| add("once"));
///         }
///     });
///     assert_eq!(*CACHE.read(), ["once"]);
/// });
/// ```
pub type RwLockUpgradableReadGuard<'a, T> = lock_api::RwLockUpgradableReadGuard<'a, RawRwLock, T>;

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
#[repr(C)]
pub struct RawRwLock {
    /// First: its holder is found at the address of the lock (`sched/wait/holder.rs`).
    writers: RawMutex,
    word: RwLockWord,
}

const _: () = assert!(std::mem::offset_of!(RawRwLock, writers) == 0);

/// What a writer becomes when it unlocks or gives up. The value is the number of readers that it
/// adds.
#[derive(Clone, Copy)]
enum WriterBecomes {
    Nothing = 0,
    Reader = 1,
}

impl RawRwLock {
    fn readers_key(&self) -> usize {
        holder::tagged_key(self, READERS_TAG)
    }

    fn writer_key(&self) -> usize {
        holder::tagged_key(self, WRITER_TAG)
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self) as usize
    }

    /// Locks for reading, and waits for that. Returns false if the deadline has passed.
    #[cold]
    fn read_slow(&self, deadline: Nanos) -> bool {
        let node = Node::new(0);
        loop {
            let enqueue = |_| self.enqueue_reader(&node);
            let withdraw = |_| {
                table::with_queue(self.readers_key(), |queue| queue.remove(&node));
            };
            holder::note_held_object(self.address(), deadline);
            match node.sleep(WaitReason::RwLockRead, deadline, enqueue, withdraw) {
                WaitResult::Woken(_) => return true, // counted by the writer
                // The reader may run long after its time-out, and the writer may be gone by now.
                WaitResult::TimedOut => return self.word.try_read(),
                WaitResult::NotQueued => {
                    if self.word.try_read() {
                        return true;
                    }
                }
            }
        }
    }

    /// Puts a reader into the queue, if a writer keeps readers out.
    fn enqueue_reader(&self, node: &Node) -> bool {
        table::with_queue(self.readers_key(), |queue| {
            let waits = self.word.queue_reader();
            if waits {
                queue.push_back(node);
            }
            waits
        })
    }

    /// Puts the writer that keeps readers out into its queue, if readers are active.
    fn enqueue_writer(&self, node: &Node) -> bool {
        table::with_queue(self.writer_key(), |queue| {
            let waits = self.word.has_readers();
            if waits {
                queue.push_back(node);
            }
            waits
        })
    }

    #[inline]
    fn read_until(&self, deadline: Nanos) -> bool {
        self.word.try_read() || self.read_slow(deadline)
    }

    #[inline]
    fn unlock_read(&self) {
        if self.word.read_unlock() == ReadUnlock::WakeWriter {
            self.last_reader_slow();
        }
    }

    /// Wakes the writer, if it sleeps already. Called by the last active reader.
    #[cold]
    fn last_reader_slow(&self) {
        inside(|rt| {
            let writer = table::with_queue(self.writer_key(), |queue| {
                // The writer for which this reader was the last may be gone, and the next writer
                // may wait for other readers.
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
        let free = self.word.try_write();
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
        let locked = self.upgrade_until(deadline);
        if !locked {
            self.writers.unlock_held();
        }
        locked
    }

    /// Locks for writing. The caller holds `writers`, and keeps it if this returns false because
    /// the deadline has passed.
    #[inline]
    fn upgrade_until(&self, deadline: Nanos) -> bool {
        self.word.exclude_readers() || self.wait_for_readers_slow(deadline)
    }

    /// Waits until the active readers have unlocked. Returns false if the deadline has passed: then
    /// readers are admitted again.
    #[cold]
    fn wait_for_readers_slow(&self, deadline: Nanos) -> bool {
        // New readers are kept out already, so spinning disturbs only the readers that unlock.
        // (Readers that spin while they are kept out make the lock twice as slow: they all take its
        // cache line.)
        let mut spin = Spin::new();
        while spin.possible() {
            spin.pause();
            if !self.word.has_readers() {
                return true;
            }
        }
        let node = Node::new(0);
        let enqueue = |_| self.enqueue_writer(&node);
        let withdraw = |_| {
            table::with_queue(self.writer_key(), |queue| queue.remove(&node));
        };
        holder::note_object(self.address() | FOR_READERS, deadline);
        match node.sleep(WaitReason::RwLockWrite, deadline, enqueue, withdraw) {
            WaitResult::NotQueued => true,
            WaitResult::Woken(_) => {
                assert!(!self.word.has_readers(), "a writer woken among readers: a bug in trefoil");
                true
            }
            // The writer may run long after its time-out, and the readers may be gone by now.
            WaitResult::TimedOut if !self.word.has_readers() => true,
            WaitResult::TimedOut => {
                self.admit_readers_slow(WriterBecomes::Nothing);
                false
            }
        }
    }

    /// Withdraws a writer that keeps readers out.
    fn give_up_write(&self) {
        self.admit_readers_slow(WriterBecomes::Nothing);
        self.writers.unlock_held();
    }

    /// Unlocks for a writer. Then the next writer may lock.
    fn unlock_write(&self, becomes: WriterBecomes) {
        self.admit_readers(becomes);
        self.writers.unlock_held();
    }

    /// Ends the write of a writer, which still holds `writers`.
    fn admit_readers(&self, becomes: WriterBecomes) {
        if !self.word.try_write_unlock(becomes as u32) {
            self.writers.note_unlock();
            self.admit_readers_slow(becomes);
        }
    }

    /// Lets readers lock again, and admits all readers that wait.
    #[cold]
    fn admit_readers_slow(&self, writer: WriterBecomes) {
        inside(|rt| {
            let readers: Batch = table::with_queue(self.readers_key(), |queue| {
                let readers = queue.take_all();
                self.word.write_unlock(writer as u32 + readers.len() as u32);
                readers
            });
            readers.wake_all(rt, 0);
        });
    }
}

/// Locks a [`RwLock`] in async code.
///
/// # Examples
/// ```
/// use trefoil::sync::{RwLock, RwLockExt as _};
/// static WORDS: RwLock<Vec<&str>> = RwLock::new(Vec::new());
/// trefoil::run(|| {
///     trefoil::task::spawn(async { WORDS.write_async().await.push("first") }).join().unwrap();
///     let len = trefoil::task::spawn(async { WORDS.read_async().await.len() });
///     assert_eq!(len.join().unwrap(), 1);
/// });
/// ```
pub trait RwLockExt<T: ?Sized> {
    /// Locks for reading, and waits while a writer holds the lock or waits for it: `read` for async
    /// code.
    ///
    /// The guard is the same as that of `read`. It is `Send` if the data are `Sync`, so it may be
    /// held across an `await`.
    ///
    /// # Cancel
    /// The future may be dropped at any time. If the lock was given to it already, it unlocks.
    fn read_async(&self) -> ReadFuture<'_, T>;

    /// Locks for writing, and waits while others hold the lock: `write` for async code.
    ///
    /// # Cancel
    /// The future may be dropped at any time. If the lock was given to it already, it unlocks. If
    /// it kept readers out, they are admitted again.
    fn write_async(&self) -> WriteFuture<'_, T>;
}

impl<T: ?Sized> RwLockExt<T> for RwLock<T> {
    fn read_async(&self) -> ReadFuture<'_, T> {
        ReadFuture { lock: self, node: TaskNode::new(0, task_waiter()) }
    }

    fn write_async(&self) -> WriteFuture<'_, T> {
        WriteFuture { lock: self, phase: WritePhase::Mutex, mutex: LockOp::new() }
    }
}

/// A lock for reading that a task awaits, returned by [`RwLockExt::read_async`].
///
/// # Examples
/// ```
/// use trefoil::sync::{RwLock, RwLockExt as _};
/// let lock = RwLock::new(5);
/// assert_eq!(trefoil::block_on(async { *lock.read_async().await }), 5);
/// ```
#[must_use = "a future does nothing unless it is awaited"]
pub struct ReadFuture<'a, T: ?Sized> {
    lock: &'a RwLock<T>,
    node: TaskNode,
}

impl<'a, T: ?Sized> Future for ReadFuture<'a, T> {
    type Output = RwLockReadGuard<'a, T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        const REASON: WaitReason = WaitReason::RwLockRead;
        // SAFETY: nothing is moved out of the pinned node. The reference to the raw lock does not
        // leave this function.
        let (this, raw) = unsafe {
            let this = self.get_unchecked_mut();
            let raw = this.lock.raw();
            (this, raw)
        };
        if this.node.waits() {
            let with_lock = |f: &mut dyn FnMut()| table::with_queue(raw.readers_key(), |_| f());
            if this.node.poll(context, REASON, with_lock).is_pending() {
                return Poll::Pending;
            }
            // Counted by the writer.
        } else {
            while !raw.word.try_read() {
                // SAFETY: the node is pinned, and `drop` cancels the wait; the lock is borrowed.
                if unsafe { this.node.begin(context, REASON, |node, _| raw.enqueue_reader(node)) } {
                    return Poll::Pending;
                }
            }
        }
        // SAFETY: locked for reading above.
        Poll::Ready(unsafe { this.lock.make_read_guard_unchecked() })
    }
}

impl<T: ?Sized> Drop for ReadFuture<'_, T> {
    fn drop(&mut self) {
        if !self.node.waits() {
            return;
        }
        // SAFETY: the reference does not leave this function.
        let raw = unsafe { self.lock.raw() };
        let withdraw =
            |node: &Node, _| table::with_queue(raw.readers_key(), |queue| queue.withdraw(node));
        if self.node.cancel(withdraw).is_some() {
            raw.unlock_read();
        }
    }
}

impl<T: ?Sized> fmt::Debug for ReadFuture<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReadFuture { .. }")
    }
}

/// A lock for writing that a task awaits, returned by [`RwLockExt::write_async`].
///
/// # Examples
/// ```
/// use trefoil::sync::{RwLock, RwLockExt as _};
/// let lock = RwLock::new(5);
/// trefoil::block_on(async { *lock.write_async().await += 1 });
/// assert_eq!(lock.into_inner(), 6);
/// ```
#[must_use = "a future does nothing unless it is awaited"]
pub struct WriteFuture<'a, T: ?Sized> {
    lock: &'a RwLock<T>,
    phase: WritePhase,
    /// Its node also waits for the active readers.
    mutex: LockOp,
}

/// What a [`WriteFuture`] waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WritePhase {
    /// The mutex among the writers.
    Mutex,
    /// The active readers. New ones are kept out.
    Readers,
    /// Nothing: it has ended.
    Ended,
}

impl<'a, T: ?Sized> Future for WriteFuture<'a, T> {
    type Output = RwLockWriteGuard<'a, T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        const REASON: WaitReason = WaitReason::RwLockWrite;
        // SAFETY: as in `ReadFuture`.
        let (this, raw) = unsafe {
            let this = self.get_unchecked_mut();
            let raw = this.lock.raw();
            (this, raw)
        };
        assert!(this.phase != WritePhase::Ended, "WriteFuture was polled after it had ended");
        if this.phase == WritePhase::Mutex {
            // SAFETY: the operation is pinned, and `drop` cancels the wait; the lock is borrowed.
            if unsafe { this.mutex.poll(&raw.writers, context, REASON) }.is_pending() {
                return Poll::Pending;
            }
            this.phase = WritePhase::Readers;
            if !raw.word.exclude_readers() {
                // SAFETY: as above.
                let waits = unsafe {
                    let node = &mut this.mutex.node;
                    node.begin(context, REASON, |node, _| raw.enqueue_writer(node))
                };
                if waits {
                    return Poll::Pending;
                }
            }
        } else {
            let with_lock = |f: &mut dyn FnMut()| table::with_queue(raw.writer_key(), |_| f());
            if this.mutex.node.poll(context, REASON, with_lock).is_pending() {
                return Poll::Pending;
            }
        }
        this.phase = WritePhase::Ended;
        assert!(!raw.word.has_readers(), "a writer woken among readers: a bug in trefoil");
        // SAFETY: locked for writing above.
        Poll::Ready(unsafe { this.lock.make_write_guard_unchecked() })
    }
}

impl<T: ?Sized> Drop for WriteFuture<'_, T> {
    fn drop(&mut self) {
        // SAFETY: the reference does not leave this function.
        let raw = unsafe { self.lock.raw() };
        match self.phase {
            WritePhase::Mutex => self.mutex.cancel(&raw.writers),
            WritePhase::Ended => {}
            // A waker of another executor has panicked before the task could wait for the readers.
            WritePhase::Readers if !self.mutex.node.waits() => raw.give_up_write(),
            WritePhase::Readers => {
                let withdraw = |node: &Node, _| {
                    table::with_queue(raw.writer_key(), |queue| queue.withdraw(node))
                };
                match self.mutex.node.cancel(withdraw) {
                    None => raw.give_up_write(),
                    Some(_) => raw.unlock_write(WriterBecomes::Nothing),
                }
            }
        }
    }
}

impl<T: ?Sized> fmt::Debug for WriteFuture<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WriteFuture { .. }")
    }
}

// SAFETY: a writer holds the lock only while it keeps readers out and none is active, and there is
// one writer at a time (invariant 1). Readers become active only while no writer keeps them out, or
// when it admits them (`rwlock_word.rs`).
unsafe impl lock_api::RawRwLock for RawRwLock {
    #[allow(clippy::declare_interior_mutable_const)]
    const INIT: RawRwLock =
        RawRwLock { word: RwLockWord(AtomicU32::new(0)), writers: RawMutex::NEW };

    type GuardMarker = GuardSend;

    #[inline]
    fn lock_shared(&self) {
        self.read_until(NEVER);
        simulation::point();
    }

    #[inline]
    fn try_lock_shared(&self) -> bool {
        self.word.try_read()
    }

    #[inline]
    unsafe fn unlock_shared(&self) {
        self.unlock_read();
        simulation::point();
    }

    #[inline]
    fn lock_exclusive(&self) {
        self.write_until(NEVER);
        simulation::point();
    }

    #[inline]
    fn try_lock_exclusive(&self) -> bool {
        self.try_write()
    }

    #[inline]
    unsafe fn unlock_exclusive(&self) {
        self.unlock_write(WriterBecomes::Nothing);
        simulation::point();
    }

    fn is_locked(&self) -> bool {
        self.word.snapshot() != (0, false) || lock_api::RawMutex::is_locked(&self.writers)
    }

    fn is_locked_exclusive(&self) -> bool {
        self.word.snapshot() == (0, true)
    }
}

// SAFETY: the writer becomes one reader in the exchange that admits readers again.
unsafe impl lock_api::RawRwLockDowngrade for RawRwLock {
    unsafe fn downgrade(&self) {
        self.unlock_write(WriterBecomes::Reader);
    }
}

// SAFETY: as above. Between unlocking and locking again, the guard gives no access.
unsafe impl lock_api::RawRwLockFair for RawRwLock {
    /// A reader never passes a writer that waits, so this is no different from other unlocks.
    #[inline]
    unsafe fn unlock_shared_fair(&self) {
        self.unlock_read();
    }

    unsafe fn unlock_exclusive_fair(&self) {
        self.admit_readers(WriterBecomes::Nothing);
        self.writers.unlock_held_fair();
    }

    unsafe fn bump_shared(&self) {
        let (_, writer_waits) = self.word.snapshot();
        if writer_waits {
            self.unlock_read();
            self.read_until(NEVER);
        }
    }

    unsafe fn bump_exclusive(&self) {
        if self.word.has_queue() || self.writers.has_queue() {
            self.admit_readers(WriterBecomes::Nothing);
            self.writers.unlock_held_fair();
            self.write_until(NEVER);
        }
    }
}

// SAFETY: an upgradable reader excludes writers and other upgradable readers (invariant 4).
unsafe impl lock_api::RawRwLockUpgrade for RawRwLock {
    #[inline]
    fn lock_upgradable(&self) {
        self.writers.lock_until(NEVER, WaitReason::RwLockWrite);
    }

    #[inline]
    fn try_lock_upgradable(&self) -> bool {
        self.writers.try_lock_now()
    }

    #[inline]
    unsafe fn unlock_upgradable(&self) {
        self.writers.unlock_held();
    }

    unsafe fn upgrade(&self) {
        self.upgrade_until(NEVER);
    }

    unsafe fn try_upgrade(&self) -> bool {
        self.word.try_write()
    }
}

// SAFETY: as above.
unsafe impl lock_api::RawRwLockUpgradeFair for RawRwLock {
    unsafe fn unlock_upgradable_fair(&self) {
        self.writers.unlock_held_fair();
    }

    unsafe fn bump_upgradable(&self) {
        if self.writers.has_queue() {
            self.writers.unlock_held_fair();
            self.writers.lock_until(NEVER, WaitReason::RwLockWrite);
        }
    }
}

// SAFETY: as above. No writer comes between, because `writers` is held until the end.
unsafe impl lock_api::RawRwLockUpgradeDowngrade for RawRwLock {
    unsafe fn downgrade_upgradable(&self) {
        // Only the holder of `writers` keeps readers out.
        assert!(self.word.try_read(), "a writer beside an upgradable reader: a bug in trefoil");
        self.writers.unlock_held();
    }

    unsafe fn downgrade_to_upgradable(&self) {
        self.admit_readers(WriterBecomes::Nothing);
    }
}

// SAFETY: as above; false means that the lock was not taken, or not upgraded.
unsafe impl lock_api::RawRwLockUpgradeTimed for RawRwLock {
    fn try_lock_upgradable_for(&self, timeout: Duration) -> bool {
        let deadline = clock::after(timeout);
        self.writers.lock_until(deadline, WaitReason::RwLockWrite)
    }

    fn try_lock_upgradable_until(&self, timeout: Instant) -> bool {
        let deadline = clock::at(timeout);
        self.writers.lock_until(deadline, WaitReason::RwLockWrite)
    }

    unsafe fn try_upgrade_for(&self, timeout: Duration) -> bool {
        self.upgrade_until(clock::after(timeout))
    }

    unsafe fn try_upgrade_until(&self, timeout: Instant) -> bool {
        self.upgrade_until(clock::at(timeout))
    }
}

// SAFETY: as above; false means that the lock was not taken.
unsafe impl lock_api::RawRwLockTimed for RawRwLock {
    type Duration = Duration;
    type Instant = Instant;

    fn try_lock_shared_for(&self, timeout: Duration) -> bool {
        self.read_until(clock::after(timeout))
    }

    fn try_lock_shared_until(&self, timeout: Instant) -> bool {
        self.read_until(clock::at(timeout))
    }

    fn try_lock_exclusive_for(&self, timeout: Duration) -> bool {
        self.write_until(clock::after(timeout))
    }

    fn try_lock_exclusive_until(&self, timeout: Instant) -> bool {
        self.write_until(clock::at(timeout))
    }
}

impl fmt::Debug for RawRwLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (readers, writer) = self.word.snapshot();
        f.debug_struct("RawRwLock").field("readers", &readers).field("writer", &writer).finish()
    }
}
