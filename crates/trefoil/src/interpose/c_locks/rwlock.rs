//! `pthread_rwlock_*`: a goroutine that must wait for the lock parks.
//!
//! As in `mutex.rs`: the real `try` functions, the queue of the address for goroutines, the real
//! functions for plain threads. An unlock wakes the writer at the front of the queue, or all
//! readers there. A writer that is woken while other readers still hold the lock fails, and keeps
//! its place.
//!
//! # Kinds
//! glibc's default prefers readers, and lets writers starve. With `PREFER_WRITER_NONRECURSIVE_NP`
//! readers defer to a waiting writer. glibc knows only of threads that wait, not of goroutines. So
//! with this kind a reader, goroutine or thread, that finds a goroutine waiting to write enters the
//! queue behind it.
//!
//! Invariants:
//! 1. A reader defers only at its first attempt. A reader that was woken must not: its waker relies
//!    on it to take the lock.
//! 2. A writer in the queue waits for an unlock that is still to come, or for the end of a thread's
//!    wait. A thread whose wait times out has made other waiters fail, and wakes them. A goroutine
//!    that stops waiting to write also wakes the others: readers have deferred to it.

use super::{
    PREFERRED, RWLOCK, WRITER, Waiters, counted, deadline, layout, real, uncount_if_unlocked,
};
use crate::interpose::park::{may_park_for_c_lock, on_goroutine};
use crate::sched::wait::list::{Batch, List};
use crate::sched::wait::reason::WaitReason;
use crate::sys::fork::is_forked;
use crate::sys::frame_waiter::ClockTime;
use libc::{clockid_t, pthread_rwlock_t, timespec};
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};

pub(super) static WAITERS: Waiters = Waiters::new(RWLOCK);
/// How many goroutines wait to write, for any lock.
static WAITING_WRITERS: AtomicUsize = AtomicUsize::new(0);

interpose! {
    /// POSIX's function.
    fn pthread_rwlock_rdlock(lock: *mut pthread_rwlock_t) -> c_int;
    always => counted(|| read(lock, None, || real::pthread_rwlock_rdlock(lock)))
}

interpose! {
    /// POSIX's function.
    fn pthread_rwlock_tryrdlock(lock: *mut pthread_rwlock_t) -> c_int;
    always => counted(|| real::pthread_rwlock_tryrdlock(lock))
}

interpose! {
    /// POSIX's function.
    fn pthread_rwlock_timedrdlock(lock: *mut pthread_rwlock_t, at: *const timespec) -> c_int;
    always => {
        let real = || real::pthread_rwlock_timedrdlock(lock, at);
        counted(|| match deadline(libc::CLOCK_REALTIME, at) {
            Ok(limit) => read(lock, Some(limit), real),
            // Rejected even if the lock is free, as in glibc.
            Err(_) => real(),
        })
    }
}

interpose! {
    /// glibc's function, in POSIX since 2024.
    fn pthread_rwlock_clockrdlock(lock: *mut pthread_rwlock_t, clock: clockid_t,
        at: *const timespec) -> c_int;
    always => {
        let real = || real::pthread_rwlock_clockrdlock(lock, clock, at);
        counted(|| match deadline(clock, at) {
            Ok(limit) => read(lock, Some(limit), real),
            Err(_) => real(),
        })
    }
}

interpose! {
    /// POSIX's function.
    fn pthread_rwlock_wrlock(lock: *mut pthread_rwlock_t) -> c_int;
    always => counted(|| write(lock, None, || real::pthread_rwlock_wrlock(lock)))
}

interpose! {
    /// POSIX's function.
    fn pthread_rwlock_trywrlock(lock: *mut pthread_rwlock_t) -> c_int;
    always => counted(|| real::pthread_rwlock_trywrlock(lock))
}

interpose! {
    /// POSIX's function.
    fn pthread_rwlock_timedwrlock(lock: *mut pthread_rwlock_t, at: *const timespec) -> c_int;
    always => {
        let real = || real::pthread_rwlock_timedwrlock(lock, at);
        counted(|| match deadline(libc::CLOCK_REALTIME, at) {
            Ok(limit) => write(lock, Some(limit), real),
            // Rejected even if the lock is free, as in glibc.
            Err(_) => real(),
        })
    }
}

interpose! {
    /// glibc's function, in POSIX since 2024.
    fn pthread_rwlock_clockwrlock(lock: *mut pthread_rwlock_t, clock: clockid_t,
        at: *const timespec) -> c_int;
    always => {
        let real = || real::pthread_rwlock_clockwrlock(lock, clock, at);
        counted(|| match deadline(clock, at) {
            Ok(limit) => write(lock, Some(limit), real),
            Err(_) => real(),
        })
    }
}

interpose! {
    /// POSIX's function.
    fn pthread_rwlock_unlock(lock: *mut pthread_rwlock_t) -> c_int;
    always => {
        let unlock = || real::pthread_rwlock_unlock(lock);
        uncount_if_unlocked(WAITERS.release(lock as usize, unlock, take_front))
    }
}

/// Takes the writer at the front of the queue, or all readers there. With a writer that is not
/// preferred all other waiters are taken: a reader may be faster than the writer, and then the
/// other readers must not sleep.
fn take_front(queue: &mut List) -> Batch {
    let mut batch = Batch::new();
    let Some(taken) = queue.take_first() else { return batch };
    let weight = taken.node().weight;
    let is_writer = weight & WRITER != 0;
    batch.push(taken);
    if is_writer && weight & PREFERRED == 0 {
        while let Some(taken) = queue.take_first() {
            batch.push(taken);
        }
        return batch;
    }
    while !is_writer && let Some(taken) = queue.take_first_if(|node| node.weight & WRITER == 0) {
        batch.push(taken);
    }
    batch
}

/// Returns whether a goroutine in the queue waits to write.
fn has_writer(queue: &List) -> bool {
    queue.live().any(|node| node.weight & WRITER != 0)
}

/// Calls the real function. If its wait times out, wakes all waiters: some may have failed because
/// of it (invariant 2).
fn real_wait(lock: *mut pthread_rwlock_t, fallback: impl FnOnce() -> c_int) -> c_int {
    let rc = fallback();
    if rc == libc::ETIMEDOUT && WAITERS.is_any_sleeping() {
        WAITERS.wake(lock as usize, List::take_all);
    }
    rc
}

/// Locks for reading; `fallback` is the real function.
#[inline]
unsafe fn read(
    lock: *mut pthread_rwlock_t,
    limit: Option<ClockTime>,
    fallback: impl FnOnce() -> c_int,
) -> c_int {
    if WAITING_WRITERS.load(Ordering::Relaxed) == 0 {
        if !on_goroutine() {
            return real_wait(lock, fallback);
        }
        // SAFETY: the caller's contract.
        match unsafe { real::pthread_rwlock_tryrdlock(lock) } {
            libc::EBUSY => {}
            rc => return rc,
        }
    }
    // SAFETY: the caller's contract.
    unsafe { read_slow(lock, limit, fallback) }
}

#[cold]
unsafe fn read_slow(
    lock: *mut pthread_rwlock_t,
    limit: Option<ClockTime>,
    fallback: impl FnOnce() -> c_int,
) -> c_int {
    // SAFETY: the caller's contract.
    let Some(kind) = (unsafe { layout::rwlock_kind(lock) }) else {
        return real_wait(lock, fallback);
    };
    if kind.is_shared || is_forked() {
        return real_wait(lock, fallback);
    }
    let defers =
        kind.prefers_writers && WAITERS.with_queue(lock as usize, |queue| has_writer(queue));
    if !defers {
        if !on_goroutine() {
            return real_wait(lock, fallback);
        }
        // SAFETY: the caller's contract.
        match unsafe { real::pthread_rwlock_tryrdlock(lock) } {
            libc::EBUSY if !may_park_for_c_lock() => return real_wait(lock, fallback),
            libc::EBUSY => {}
            rc => return rc,
        }
    }
    if kind.writer == layout::own_tid() {
        return libc::EDEADLK;
    }
    let reason = WaitReason::PthreadRwLockRead;
    let attempt = |queue: &List, failures| {
        if failures == 0 && kind.prefers_writers && has_writer(queue) {
            return libc::EBUSY;
        }
        // SAFETY: the caller's contract.
        unsafe { real::pthread_rwlock_tryrdlock(lock) }
    };
    WAITERS.acquire(lock as usize, reason, 0, limit, &attempt)
}

/// Locks for writing; `fallback` is the real function.
#[inline]
unsafe fn write(
    lock: *mut pthread_rwlock_t,
    limit: Option<ClockTime>,
    fallback: impl FnOnce() -> c_int,
) -> c_int {
    if !on_goroutine() {
        return real_wait(lock, fallback);
    }
    // SAFETY: the caller's contract.
    match unsafe { real::pthread_rwlock_trywrlock(lock) } {
        // SAFETY: the caller's contract.
        libc::EBUSY => unsafe { write_slow(lock, limit, fallback) },
        rc => rc,
    }
}

#[cold]
unsafe fn write_slow(
    lock: *mut pthread_rwlock_t,
    limit: Option<ClockTime>,
    fallback: impl FnOnce() -> c_int,
) -> c_int {
    // SAFETY: the caller's contract.
    let Some(kind) = (unsafe { layout::rwlock_kind(lock) }) else {
        return real_wait(lock, fallback);
    };
    if kind.is_shared || !may_park_for_c_lock() {
        return real_wait(lock, fallback);
    }
    if kind.writer == layout::own_tid() {
        return libc::EDEADLK;
    }
    let reason = WaitReason::PthreadRwLockWrite;
    WAITING_WRITERS.fetch_add(1, Ordering::Relaxed);
    let weight = if kind.prefers_writers { WRITER | PREFERRED } else { WRITER };
    let rc = WAITERS.acquire(lock as usize, reason, weight, limit, &|_, _| {
        // SAFETY: the caller's contract.
        unsafe { real::pthread_rwlock_trywrlock(lock) }
    });
    WAITING_WRITERS.fetch_sub(1, Ordering::Relaxed);
    if rc == libc::ETIMEDOUT {
        WAITERS.wake(lock as usize, List::take_all);
    }
    rc
}
