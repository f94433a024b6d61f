//! Queues by address: where a lock of one word keeps its sleepers.
//!
//! A mutex is four bytes. When a goroutine must wait for it, a queue is found here under the mutex's
//! address; the queue lives in the nodes of the sleepers themselves, so nothing is ever allocated.
//!
//! There are two tables, because their waits end differently:
//!
//! | table | waits of | may end for no reason |
//! |---|---|---|
//! | [`with_queue`] | `sync`: a waker hands over what the sleeper waits for | no |
//! | [`FOREIGN`] | futexes, and the locks of C code (`interpose/`): a sleeper retries | yes, except at a barrier |
//!
//! ```text
//!   bucket ─▶ first of queue A ─chain─▶ first of queue B ─▶ …
//!                  │ next                    │ next
//!               second of A               second of B
//! ```
//!
//! Finding a queue walks the chain of a bucket, one step for each *address* with sleepers in it,
//! however many sleepers there are.
//!
//! Invariants:
//! 1. A node whose `queue` is not empty is the first of that queue, and the only one that is in a
//!    chain.
//! 2. Everything in a bucket, and in the nodes that it leads to, is guarded by its lock.
//!
//! Rejected: a queue in each mutex (16 bytes and more instead of 4; a hundred thousand small
//! mutexes are common, a hundred thousand that are waited for at the same moment are not). Go's
//! treap in each bucket: with [`BUCKETS`] of them a chain is a hundred steps long when 400,000
//! different locks are waited for at once. What has its own room anyway (semaphores, condition
//! variables…) does not come here but keeps its own list. One table for both kinds of waits: a futex
//! word may lie where a lock of `sync` was, and only the second table can be woken by the bucket
//! (`deferred.rs`).

#[cfg(feature = "std")]
use crate::sched::wait::list::Batch;
use crate::sched::wait::list::{List, Node};
use crate::sys::lock::RawLock;
use std::cell::Cell;
use std::ptr::null;

/// A quarter of a mebibyte of zero pages, of which those are touched that are used. Go has 251
/// roots.
pub(crate) const BUCKETS: usize = 4096;

#[repr(align(64))]
struct Bucket {
    lock: RawLock,
    first: Cell<*const Node>,
}

// SAFETY: `first` is guarded by `lock` (invariant 2).
unsafe impl Sync for Bucket {}

/// See the head of the file.
pub(crate) struct Table {
    buckets: [Bucket; BUCKETS],
}

static SYNC: Table = Table::new();

/// The waits of code that is not ours.
#[cfg(feature = "std")]
pub(crate) static FOREIGN: Table = Table::new();

/// Runs `f` with the queue of `key` in the table of `sync`: see [`Table::with_queue`].
pub(crate) fn with_queue<R>(key: usize, f: impl FnOnce(&mut List) -> R) -> R {
    SYNC.with_queue(key, f)
}

/// The number of the bucket in which `key` is.
pub(crate) fn bucket_of(key: usize) -> usize {
    // Fibonacci hashing: the high bits of the product depend on all bits of the key.
    let hash = (key as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (hash >> (64 - BUCKETS.trailing_zeros())) as usize
}

impl Table {
    const fn new() -> Table {
        Table {
            buckets: [const { Bucket { lock: RawLock::new(), first: Cell::new(null()) } }; BUCKETS],
        }
    }

    /// Runs `f` with the queue of `key`, under its lock. Inside the runtime, on a plain thread, or where no lock of
    /// the runtime is held; `f` keeps to invariant 2 of `queue.rs`, and does not panic.
    pub(crate) fn with_queue<R>(&self, key: usize, f: impl FnOnce(&mut List) -> R) -> R {
        let bucket = &self.buckets[bucket_of(key)];
        bucket.lock.lock();
        let mut link = &bucket.first;
        let (mut queue, rest) = loop {
            // SAFETY: linked nodes are alive (`queue.rs`, invariant 1), and we have the lock.
            match unsafe { link.get().as_ref() } {
                None => break (List::new(), null()),
                Some(node) if node.key.get() == key => {
                    break (node.queue.replace(List::new()), node.chain.get());
                }
                Some(node) => link = &node.chain,
            }
        };
        let r = f(&mut queue);
        // SAFETY: as above. The former first may be taken: it is not touched any more.
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
        r
    }

    /// Takes every live sleeper of the bucket `number` whose key is `wanted`.
    #[cfg(feature = "std")]
    pub(crate) fn take_bucket(&self, number: usize, wanted: fn(usize) -> bool) -> Batch {
        let bucket = &self.buckets[number];
        let mut batch = Batch::new();
        bucket.lock.lock();
        let mut link = &bucket.first;
        // SAFETY: linked nodes are alive (`queue.rs`, invariant 1), and we have the lock.
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
