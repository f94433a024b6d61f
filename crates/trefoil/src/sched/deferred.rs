//! Wake-ups that the waker cannot deliver itself.
//!
//! `sem_post` is async-signal-safe, so a handler may call it that interrupted its own thread in the runtime, with a
//! lock of the runtime in hand. Waiting for a lock there is waiting for ever. Such a waker only notes the bucket of the
//! table ([`FOREIGN`]) in which the sleepers are, and calls a helper thread, which wakes all of them. They retry, and
//! those that came in vain sleep again: waits in that table may end for no reason. `close` is async-signal-safe, too: the
//! descriptor whose waiters it must wake is noted in the same way (`Pollable::interrupt_later`).
//!
//! ```text
//!   the waker                              a helper thread
//!   sets the bucket's bit                  leaves: member.serving = false
//!   calls a member that is serving         takes all bits that are set, wakes those buckets
//! ```
//!
//! Invariants:
//! 1. A bit that is set is taken by a helper thread that was serving after it was set. A member that leaves clears
//!    `serving` and delivers once more; both sides are sequentially consistent, so the waker saw `serving` before it
//!    was cleared, and the last delivery sees the bit, or the waker calls another member.
//! 2. Nothing here is locked, allocated or freed on the waker's side.
//! 3. Members are never freed (`aide.rs`), and the list only grows; one that a later runtime uses again is in it already.
//!
//! Rejected: a list of addresses (it can be full in a storm of signals; a bit per bucket cannot); sysmon (it holds the
//! scheduler's lock for its probes, and has enough to do); one more thread.

use super::aide::Aide;
use super::pollable::Pollable;
use super::table::{BUCKETS, FOREIGN, bucket_of};
use crate::sys::lock;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

/// Goroutines that wait for what a signal handler may do (`sem_wait`).
pub(crate) static SIGNAL_WAITS: AtomicUsize = AtomicUsize::new(0);

/// One bit for each bucket.
static BITS: [AtomicU64; BUCKETS / 64] = [const { AtomicU64::new(0) }; BUCKETS / 64];
/// Whether any bit may be set: a helper thread that has other work reads only this.
static ANY: AtomicBool = AtomicBool::new(false);
/// The members, newest first.
static MEMBERS: AtomicPtr<Aide> = AtomicPtr::new(null_mut());

/// A helper thread's part.
pub(super) struct Member {
    serving: AtomicBool,
    /// It is in the list.
    listed: AtomicBool,
    next: AtomicPtr<Aide>,
}

impl Member {
    pub(super) const fn new() -> Member {
        Member {
            serving: AtomicBool::new(false),
            listed: AtomicBool::new(false),
            next: AtomicPtr::new(null_mut()),
        }
    }
}

/// A helper thread begins.
pub(super) fn join(aide: &'static Aide) {
    aide.deferred.serving.store(true, Ordering::SeqCst);
    // Relaxed: only the thread that has the aide comes here.
    if aide.deferred.listed.swap(true, Ordering::Relaxed) {
        return;
    }
    let this = std::ptr::from_ref(aide).cast_mut();
    let mut first = MEMBERS.load(Ordering::Relaxed);
    loop {
        aide.deferred.next.store(first, Ordering::Relaxed);
        // Release: who finds the member sees its `next`.
        match MEMBERS.compare_exchange(first, this, Ordering::SeqCst, Ordering::Relaxed) {
            Ok(_) => return,
            Err(newer) => first = newer,
        }
    }
}

/// A helper thread ends (invariant 1).
pub(super) fn leave(aide: &Aide) {
    aide.deferred.serving.store(false, Ordering::SeqCst);
    deliver();
}

/// Leaves the wake-up of all who sleep in the bucket of `key` to a helper thread. Safe in a signal handler.
pub(crate) fn wake_later(key: usize) {
    let bucket = bucket_of(key);
    // SeqCst, both: invariant 1. The bit is set before `ANY`, which tells of it.
    BITS[bucket / 64].fetch_or(1 << (bucket % 64), Ordering::SeqCst);
    call_helper();
}

/// Calls a helper thread for what was noted. Safe in a signal handler.
pub(super) fn call_helper() {
    ANY.store(true, Ordering::SeqCst);
    let mut next = MEMBERS.load(Ordering::SeqCst);
    // SAFETY: members are never freed (invariant 3).
    while let Some(aide) = unsafe { next.as_ref() } {
        if aide.deferred.serving.load(Ordering::SeqCst) {
            aide.call(0);
            return;
        }
        next = aide.deferred.next.load(Ordering::Relaxed);
    }
    // No runtime is left, so no goroutine can be resumed.
}

/// On a helper thread: wakes all whose bucket was noted.
pub(super) fn deliver() {
    debug_assert!(!lock::holds_runtime_lock());
    if !ANY.swap(false, Ordering::SeqCst) {
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

/// The bits of a key of [`FOREIGN`] that say what is waited for; the others are the address.
pub(crate) const KEY_TAG: usize = 7;
/// Who waits at a barrier does not retry: it is never woken for no reason.
pub(crate) const KEY_BARRIER: usize = 5;

/// The key of what is at `address`. Addresses of user space have 56 bits at most.
pub(crate) const fn key_of(address: usize, tag: usize) -> usize {
    address << 3 | tag
}
