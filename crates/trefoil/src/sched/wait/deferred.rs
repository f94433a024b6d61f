//! Deferred wake-ups: wake-ups that a signal handler leaves to a helper thread.
//!
//! `sem_post` is async-signal-safe, so a signal handler may call it after it interrupted its own
//! thread in the runtime, while the thread held a lock of the runtime. If the handler waited for
//! that lock, it would wait for ever. Therefore it only sets a bit for the bucket of the wait table
//! ([`FOREIGN`]) that contains the sleepers, and wakes a helper thread. The helper thread wakes all
//! sleepers of the bucket. They retry, and a sleeper whose condition does not hold sleeps again:
//! waits in that table may end spuriously. `close` is async-signal-safe, too. It defers the
//! interruption of a descriptor's waiters in the same way (`Pollable::interrupt_later`).
//!
//! ```text
//!   the waker                              a helper thread that ends
//!   sets the bucket's bit                  helper.deferred.serving = false
//!   wakes a helper that is serving         takes all bits that are set, wakes those buckets
//! ```
//!
//! Invariants:
//! 1. A bit that is set is taken by a helper thread that was serving after the bit was set. A
//!    helper that ends clears `serving` and delivers once more. Both sides are sequentially
//!    consistent. So either the waker read `serving` before it was cleared, and then the last
//!    delivery sees the bit; or the waker wakes another helper.
//! 2. The waker's side takes no lock, and neither allocates nor frees.
//! 3. Helpers are never freed (`helper.rs`), and the list only grows. A helper that a later runtime
//!    reuses is already in the list.
//!
//! Rejected: a list of addresses (it can be full in a storm of signals; a bit per bucket cannot);
//! sysmon (it holds the scheduler's lock for its probes, and has enough work); one more thread.

use crate::sched::monitor::helper::Helper;
use crate::sched::netpoll::pollable::Pollable;
use crate::sched::wait::table::{BUCKETS, FOREIGN, bucket_of};
use crate::sys::lock;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

/// The number of goroutines in waits that a signal handler may end (`sem_wait`).
pub(crate) static SIGNAL_WAITS: AtomicUsize = AtomicUsize::new(0);

/// One bit per bucket.
static BITS: [AtomicU64; BUCKETS / 64] = [const { AtomicU64::new(0) }; BUCKETS / 64];
/// True if any bit may be set, or a Pollable is deferred. A helper thread that was woken for other
/// work reads only this.
static PENDING: AtomicBool = AtomicBool::new(false);
/// The helpers that have ever served, newest first.
static HELPERS: AtomicPtr<Helper> = AtomicPtr::new(null_mut());

/// The fields of a [`Helper`] that this file uses.
pub(crate) struct DeferredService {
    /// Its thread runs and delivers.
    serving: AtomicBool,
    /// It is in [`HELPERS`].
    listed: AtomicBool,
    /// The next entry in [`HELPERS`].
    next: AtomicPtr<Helper>,
}

impl DeferredService {
    pub(crate) const fn new() -> DeferredService {
        DeferredService {
            serving: AtomicBool::new(false),
            listed: AtomicBool::new(false),
            next: AtomicPtr::new(null_mut()),
        }
    }
}

/// Registers a helper thread that begins to serve.
pub(crate) fn start_serving(helper: &'static Helper) {
    helper.deferred.serving.store(true, Ordering::SeqCst);
    // Relaxed: only the helper's own thread writes it.
    if helper.deferred.listed.swap(true, Ordering::Relaxed) {
        return;
    }
    let this = std::ptr::from_ref(helper).cast_mut();
    let mut first = HELPERS.load(Ordering::Relaxed);
    loop {
        helper.deferred.next.store(first, Ordering::Relaxed);
        // SeqCst: invariant 1. As a Release it also shows `next` to a waker that finds the helper.
        match HELPERS.compare_exchange(first, this, Ordering::SeqCst, Ordering::Relaxed) {
            Ok(_) => return,
            Err(newer) => first = newer,
        }
    }
}

/// Ends the service of a helper thread, and delivers for the last time (invariant 1).
pub(crate) fn stop_serving(helper: &Helper) {
    helper.deferred.serving.store(false, Ordering::SeqCst);
    deliver();
}

/// Makes a helper thread wake all sleepers in the bucket of `key`. Async-signal-safe.
pub(crate) fn wake_later(key: usize) {
    let bucket = bucket_of(key);
    // SeqCst: invariant 1. The bit is set before `PENDING`, which announces it.
    BITS[bucket / 64].fetch_or(1 << (bucket % 64), Ordering::SeqCst);
    wake_helper();
}

/// Wakes a helper thread, which delivers what was deferred. Async-signal-safe.
pub(crate) fn wake_helper() {
    PENDING.store(true, Ordering::SeqCst);
    let mut next = HELPERS.load(Ordering::SeqCst);
    // SAFETY: helpers are never freed (invariant 3).
    while let Some(helper) = unsafe { next.as_ref() } {
        if helper.deferred.serving.load(Ordering::SeqCst) {
            helper.wake();
            return;
        }
        next = helper.deferred.next.load(Ordering::Relaxed);
    }
    // No runtime is left, so no goroutine can be resumed.
}

/// Wakes the sleepers of all buckets whose bit is set, and ends the waits for descriptors that were
/// deferred. Runs on a helper thread.
pub(crate) fn deliver() {
    debug_assert!(!lock::holds_runtime_lock());
    if !PENDING.swap(false, Ordering::SeqCst) {
        return;
    }
    for (i, bits) in BITS.iter().enumerate() {
        let mut left = bits.swap(0, Ordering::SeqCst);
        while left != 0 {
            let bucket = 64 * i + left.trailing_zeros() as usize;
            left &= left - 1;
            FOREIGN.take_bucket(bucket, |key| key & KEY_TAG != KEY_BARRIER).wake_all(None, 0);
        }
    }
    Pollable::deliver_interrupts();
}

/// The bits of a key of [`FOREIGN`] that tell the kind of wait. The others are the address.
pub(crate) const KEY_TAG: usize = 7;
/// The kind of a wait at a barrier. Such a sleeper does not retry, so it is never woken spuriously.
pub(crate) const KEY_BARRIER: usize = 5;

/// Returns the key for `address` and a kind of wait. Addresses of user space have at most 56 bits.
pub(crate) const fn key_of(address: usize, tag: usize) -> usize {
    address << 3 | tag
}
