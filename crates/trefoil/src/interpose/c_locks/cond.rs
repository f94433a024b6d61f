//! `pthread_cond_*`: condition variables, replaced as a whole.
//!
//! The real `pthread_cond_wait` unlocks the mutex inside libc, past [`pthread_mutex_unlock`](super::mutex): a goroutine
//! that waits for that mutex would never be woken. So a wait on a private condition variable is ours, on goroutines and
//! on plain threads: a node in the waiter's frame, in the queue of the variable's address. Waiters are served in their
//! order, goroutines and threads alike.
//!
//! Of glibc's object only two bits are read: process-shared (then everything is the real functions'), and the clock of
//! `pthread_cond_timedwait`. It stays as `pthread_cond_init` left it, so the real `pthread_cond_destroy` finds no waiter
//! and returns at once.
//!
//! Invariants:
//! 1. A waiter is in the queue before it unlocks the mutex. So a signal that is sent under the mutex, or after a change
//!    made under it, finds the waiter, and sees that `sleeping` is not 0.
//! 2. A waiter does not touch the variable after it is in the queue: who wakes the last waiter may destroy it.
//! 3. The mutex is locked again by the caller itself, after its node is out of every queue.
//!
//! Limits: a plain thread that is cancelled (`pthread_cancel`) during a wait reacts when the wait ends; glibc's ends it.
//! `pthread_cond_wait` still is a cancellation point, before and after.
//!
//! Rejected: the real function for threads (see above). Moving waiters of a broadcast to the mutex's queue: threads sleep
//! on words of their own, and glibc's mutex has no place for them.

use super::{COND, Waiters, deadline, first, layout, mutex, real, sleep};
use crate::interpose::{FORKED, on_goroutine};
use crate::sched::queue::{List, Node, WaitResult};
use crate::sched::reason::WaitReason;
use crate::sys::frame_waiter::ClockTime;
use libc::{pthread_cond_t, pthread_mutex_t, timespec};
use std::ffi::c_int;
use std::sync::atomic::Ordering;

static WAITERS: Waiters = Waiters::new(COND);

unsafe extern "C-unwind" {
    /// May unwind the thread's stack: so these functions are `C-unwind`, and nothing is to be dropped where it is called.
    fn pthread_testcancel();
}

/// A cancellation point, on a plain thread.
fn test_cancel() {
    if !on_goroutine() {
        // SAFETY: the callers have nothing to drop.
        unsafe { pthread_testcancel() };
    }
}

/// POSIX's function.
///
/// # Safety
/// As its manual page says; so for all functions of this file.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pthread_cond_wait(
    cond: *mut pthread_cond_t,
    mutex: *mut pthread_mutex_t,
) -> c_int {
    // SAFETY: the caller's objects; the same below.
    unsafe {
        if own_clock(cond).is_none() {
            leave_to_libc(mutex);
            return real::pthread_cond_wait(cond, mutex);
        }
        wait(cond, mutex, None)
    }
}

/// POSIX's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pthread_cond_timedwait(
    cond: *mut pthread_cond_t,
    mutex: *mut pthread_mutex_t,
    at: *const timespec,
) -> c_int {
    // SAFETY: as above.
    unsafe {
        let Some(clock) = own_clock(cond) else {
            leave_to_libc(mutex);
            return real::pthread_cond_timedwait(cond, mutex, at);
        };
        match deadline(clock, at) {
            Ok(limit) => wait(cond, mutex, Some(limit)),
            Err(rc) => rc,
        }
    }
}

/// glibc's function, in POSIX since 2024.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pthread_cond_clockwait(
    cond: *mut pthread_cond_t,
    mutex: *mut pthread_mutex_t,
    clock: libc::clockid_t,
    at: *const timespec,
) -> c_int {
    // SAFETY: as above.
    unsafe {
        if own_clock(cond).is_none() {
            leave_to_libc(mutex);
            return real::pthread_cond_clockwait(cond, mutex, clock, at);
        }
        match deadline(clock, at) {
            Ok(limit) => wait(cond, mutex, Some(limit)),
            Err(rc) => rc,
        }
    }
}

/// POSIX's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pthread_cond_signal(cond: *mut pthread_cond_t) -> c_int {
    // SAFETY: as above.
    unsafe { signal(cond) }
}

/// POSIX's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pthread_cond_broadcast(cond: *mut pthread_cond_t) -> c_int {
    // SAFETY: as above.
    unsafe { broadcast(cond) }
}

/// Wakes one waiter.
///
/// # Safety
/// A condition variable; so below.
pub(super) unsafe fn signal(cond: *mut pthread_cond_t) -> c_int {
    // SAFETY: the caller's.
    unsafe {
        if own_clock(cond).is_none() {
            return real::pthread_cond_signal(cond);
        }
    }
    if WAITERS.is_any_sleeping() {
        WAITERS.wake(cond as usize, first);
    }
    0
}

/// Wakes all waiters.
///
/// # Safety
/// As above.
pub(super) unsafe fn broadcast(cond: *mut pthread_cond_t) -> c_int {
    // SAFETY: the caller's.
    unsafe {
        if own_clock(cond).is_none() {
            return real::pthread_cond_broadcast(cond);
        }
    }
    if WAITERS.is_any_sleeping() {
        WAITERS.wake(cond as usize, List::take_all);
    }
    0
}

/// Before a real wait, which unlocks the mutex inside libc.
unsafe fn leave_to_libc(mutex: *mut pthread_mutex_t) {
    if !FORKED.load(Ordering::Relaxed) {
        // SAFETY: the caller's.
        unsafe { mutex::leave_to_libc(mutex) };
    }
}

/// The clock of `pthread_cond_timedwait`; None if the variable is the real functions'.
unsafe fn own_clock(cond: *mut pthread_cond_t) -> Option<libc::clockid_t> {
    if FORKED.load(Ordering::Relaxed) {
        return None;
    }
    // SAFETY: the caller's.
    unsafe { layout::cond_clock(cond) }
}

/// Waits with `mutex` locked.
///
/// # Safety
/// As above, and nothing is to be dropped in the callers' frames: see [`pthread_testcancel`].
pub(super) unsafe fn wait(
    cond: *mut pthread_cond_t,
    mutex: *mut pthread_mutex_t,
    limit: Option<ClockTime>,
) -> c_int {
    test_cancel();
    // SAFETY: the caller's.
    let rc = unsafe { wait_in_queue(cond as usize, mutex, limit) };
    test_cancel();
    rc
}

unsafe fn wait_in_queue(
    address: usize,
    mutex: *mut pthread_mutex_t,
    limit: Option<ClockTime>,
) -> c_int {
    let node = Node::of_process(0);
    let counted = WAITERS.count();
    let mut unlocked = 0;
    let withdraw = || WAITERS.with_queue(address, |queue| queue.withdraw(&node));
    let slept = sleep(
        &node,
        WaitReason::PthreadCond,
        1,
        limit,
        |here| {
            WAITERS.with_queue(address, |queue| queue.push_back(&node));
            // SAFETY: the caller's mutex.
            unlocked = unsafe { mutex::unlock_in(mutex, here) };
            // The caller did not own it: no wait. If it was taken meanwhile, the wake-up is on its way, and awaited.
            unlocked == 0 || !withdraw()
        },
        withdraw,
    );
    drop(counted);
    if unlocked != 0 {
        return unlocked;
    }
    // SAFETY: the caller's mutex.
    match unsafe { mutex::lock(mutex) } {
        0 if slept == WaitResult::TimedOut => libc::ETIMEDOUT,
        rc => rc,
    }
}
