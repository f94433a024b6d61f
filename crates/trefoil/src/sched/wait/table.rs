//! Queues by address: the sleepers of a lock that is one word.
//!
//! A mutex is two words of four bytes. A goroutine that must wait for it enters a queue (a
//! [`List`]) that is found here by its *key*: the mutex's address, for some waits with a tag. The
//! queue's links are in the [`Node`]s of the sleepers, so nothing is allocated.
//!
//! There are two tables, because their waits end differently:
//!
//! | table | waits of | may end spuriously |
//! |---|---|---|
//! | [`SYNC`] | `sync`: the waker hands the sleeper what it waits for | no |
//! | [`FOREIGN`] | futexes, locks of C code: a sleeper retries | yes, except at a barrier |
//!
//! ```text
//!   bucket ─▶ first of queue A ─chain─▶ first of queue B ─▶ …
//!                  │ next                    │ next
//!               second of A               second of B
//! ```
//!
//! Finding a queue walks the chain of a bucket: one step per *address* with sleepers, however many
//! sleepers there are.
//!
//! Invariants:
//! 1. A node whose `queue` is not empty is the first of that queue, and the queue's only node that
//!    is in a chain.
//! 2. The lock of a bucket guards everything in the bucket and in the nodes that it leads to.
//!
//! Rejected: a queue in each mutex (16 bytes and more in addition; a hundred thousand small
//! mutexes are common, a hundred thousand that are waited for at the same moment are not). Go's
//! treap in each bucket: with [`BUCKETS`] buckets a chain is a hundred steps long only when 400,000
//! different locks are waited for at once. One table for both kinds of waits: a futex word may be
//! at an address where a lock of `sync` was, and only sleepers of the second table may be woken
//! bucket by bucket (`deferred.rs`). Semaphores, condition variables and other types that are large
//! anyway do not use the tables: each has its own list.

#[cfg(feature = "std")]
use crate::sched::wait::list::Batch;
use crate::sched::wait::list::{List, Node};
use crate::sys::lock::RawLock;
use std::cell::Cell;
use std::ptr::null;

/// Buckets per table: a quarter of a mebibyte of zero pages, of which only the used ones are
/// touched. Go has 251 roots.
pub(crate) const BUCKETS: usize = 4096;

#[repr(align(64))]
struct Bucket {
    lock: RawLock,
    /// The first node of the chain.
    first: Cell<*const Node>,
}

// SAFETY: `first` is guarded by `lock` (invariant 2).
unsafe impl Sync for Bucket {}

/// See the head of the file.
pub(crate) struct WaitTable {
    buckets: [Bucket; BUCKETS],
}

/// The waits of this crate's locks.
static SYNC: WaitTable = WaitTable::new();

/// The waits of std, other crates and C code.
#[cfg(feature = "std")]
pub(crate) static FOREIGN: WaitTable = WaitTable::new();

/// Runs `f` with the queue of `key` in [`SYNC`]: see [`WaitTable::with_queue`].
pub(crate) fn with_queue<R>(key: usize, f: impl FnOnce(&mut List) -> R) -> R {
    SYNC.with_queue(key, f)
}

/// Returns the index of the bucket of `key`.
pub(crate) fn bucket_of(key: usize) -> usize {
    // Fibonacci hashing: the high bits of the product depend on all bits of the key.
    let hash = (key as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (hash >> (64 - BUCKETS.trailing_zeros())) as usize
}

/// The queue of one key, taken out of its bucket. The bucket is locked until it is back.
struct LockedQueue<'a> {
    bucket: &'a Bucket,
    /// The pointer to the queue's first node, and the chain of queues after that node.
    link: &'a Cell<*const Node>,
    rest: *const Node,
    queue: List,
}

impl LockedQueue<'_> {
    /// Puts the queue of `key` back, and unlocks the bucket.
    fn unlock(self, key: usize) {
        let LockedQueue { bucket, link, rest, queue } = self;
        // SAFETY: linked nodes are alive (`list.rs`, invariant 1), and this thread has the lock. If
        // the former first node was taken, nothing here touches it again.
        match unsafe { queue.first().as_ref() } {
            None => link.set(rest),
            Some(first) => {
                first.key.set(key);
                first.chain.set(rest);
                first.queue.set(queue);
                link.set(first);
            }
        }
        bucket.lock.unlock();
    }
}

impl WaitTable {
    const fn new() -> WaitTable {
        WaitTable {
            buckets: [const { Bucket { lock: RawLock::new(), first: Cell::new(null()) } }; BUCKETS],
        }
    }

    /// Runs `f` with the queue of `key`, under the bucket's lock. The caller is inside the runtime,
    /// on a plain thread, or on a goroutine outside the runtime that holds no lock of the runtime.
    /// `f` obeys invariant 2 of `list.rs`, and does not panic.
    pub(crate) fn with_queue<R>(&self, key: usize, f: impl FnOnce(&mut List) -> R) -> R {
        let mut locked = self.lock_queue(key);
        let r = f(&mut locked.queue);
        locked.unlock(key);
        r
    }

    /// Locks the bucket of `key`, and takes the queue out of it.
    fn lock_queue(&self, key: usize) -> LockedQueue<'_> {
        let bucket = &self.buckets[bucket_of(key)];
        bucket.lock.lock();
        let mut link = &bucket.first;
        let (queue, rest) = loop {
            // SAFETY: linked nodes are alive (`list.rs`, invariant 1), and this thread has the
            // lock.
            match unsafe { link.get().as_ref() } {
                None => break (List::new(), null()),
                Some(node) if node.key.get() == key => {
                    break (node.queue.replace(List::new()), node.chain.get());
                }
                Some(node) => link = &node.chain,
            }
        };
        LockedQueue { bucket, link, rest, queue }
    }

    /// Takes every live sleeper of the bucket `index` for whose key `wanted` returns true.
    #[cfg(feature = "std")]
    pub(crate) fn take_bucket(&self, index: usize, wanted: fn(usize) -> bool) -> Batch {
        let bucket = &self.buckets[index];
        let mut batch = Batch::new();
        bucket.lock.lock();
        let mut link = &bucket.first;
        // SAFETY: linked nodes are alive (`list.rs`, invariant 1), and this thread has the lock.
        while let Some(node) = unsafe { link.get().as_ref() } {
            if wanted(node.key.get()) {
                link.set(node.chain.get());
                let mut queue = node.queue.replace(List::new());
                while let Some(taken) = queue.take_first() {
                    batch.push(taken);
                }
            } else {
                link = &node.chain;
            }
        }
        bucket.lock.unlock();
        batch
    }
}
