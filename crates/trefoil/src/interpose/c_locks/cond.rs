//! `pthread_cond_*`: condition variables, replaced as a whole.
//!
//! The real `pthread_cond_wait` unlocks the mutex inside libc, without calling
//! [`pthread_mutex_unlock`](super::mutex): a goroutine that waits for that mutex would never be
//! woken. So a wait on a private condition variable is ours, on goroutines and on plain threads: a
//! node in the waiter's frame, in the queue of the variable's address. Waiters are woken in their
//! order, goroutines and threads alike.
//!
//! Of glibc's object only two bits are read: process-shared (then every call is left to the real
//! functions), and the clock of `pthread_cond_timedwait`. It stays as `pthread_cond_init` left it,
//! so the real `pthread_cond_destroy` finds no waiter and returns at once.
//!
//! Invariants:
//! 1. A waiter is in the queue before it unlocks the mutex. So a signal that is sent under the
//!    mutex, or after a change made under it, finds the waiter, and sees that `sleeping` is not 0.
//! 2. A waiter does not touch the variable after it is in the queue: the thread that wakes the last
//!    waiter may destroy it.
//! 3. The caller itself locks the mutex again, after its node is out of every queue.
//!
//! Limits: a plain thread that is cancelled (`pthread_cancel`) during a wait reacts when the wait
//! ends; glibc's wait would end early. `pthread_cond_wait` still is a cancellation point, before
//! and after.
//!
//! Rejected: the real function for threads (see above). Moving waiters of a broadcast to the
//! mutex's queue: threads sleep on words of their own, and glibc's mutex has no place for them.

use super::{COND, Waiters, deadline, first, layout, mutex, real, sleep};
use crate::interpose::park::on_goroutine;
use crate::sched::wait::list::{List, Node, WaitResult};
use crate::sched::wait::reason::WaitReason;
use crate::sys::fork::is_forked;
use crate::sys::frame_waiter::ClockTime;
use libc::{clockid_t, pthread_cond_t, pthread_mutex_t, timespec};
use std::ffi::c_int;

pub(super) static WAITERS: Waiters = Waiters::new(COND);

unsafe extern "C-unwind" {
    /// May unwind the thread's stack. So its callers are `C-unwind`, and have nothing to drop where
    /// they call it.
    fn pthread_testcancel();
}

/// On a plain thread: a cancellation point.
fn test_cancel() {
    if !on_goroutine() {
        // SAFETY: the callers have nothing to drop.
        unsafe { pthread_testcancel() };
    }
}

interpose! {
    /// POSIX's function.
    extern "C-unwind" fn pthread_cond_wait(cond: *mut pthread_cond_t,
        mutex: *mut pthread_mutex_t) -> c_int;
    always => {
        if private_clock(cond).is_none() {
            leave_to_libc(mutex);
            return real::pthread_cond_wait(cond, mutex);
        }
        wait(cond, mutex, None)
    }
}

interpose! {
    /// POSIX's function.
    extern "C-unwind" fn pthread_cond_timedwait(cond: *mut pthread_cond_t,
        mutex: *mut pthread_mutex_t, at: *const timespec) -> c_int;
    always => {
        let Some(clock) = private_clock(cond) else {
            leave_to_libc(mutex);
            return real::pthread_cond_timedwait(cond, mutex, at);
        };
        wait_until(cond, mutex, clock, at)
    }
}

interpose! {
    /// glibc's function, in POSIX since 2024.
    extern "C-unwind" fn pthread_cond_clockwait(cond: *mut pthread_cond_t,
        mutex: *mut pthread_mutex_t, clock: clockid_t, at: *const timespec) -> c_int;
    always => {
        if private_clock(cond).is_none() {
            leave_to_libc(mutex);
            return real::pthread_cond_clockwait(cond, mutex, clock, at);
        }
        wait_until(cond, mutex, clock, at)
    }
}

interpose! {
    /// POSIX's function.
    fn pthread_cond_signal(cond: *mut pthread_cond_t) -> c_int;
    always => signal(cond)
}

interpose! {
    /// POSIX's function.
    fn pthread_cond_broadcast(cond: *mut pthread_cond_t) -> c_int;
    always => broadcast(cond)
}

/// Wakes one waiter.
///
/// # Safety
/// `cond` points to a condition variable. The same holds for the functions below.
pub(super) unsafe fn signal(cond: *mut pthread_cond_t) -> c_int {
    // SAFETY: the caller's contract.
    unsafe {
        if private_clock(cond).is_none() {
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
    // SAFETY: the caller's contract.
    unsafe {
        if private_clock(cond).is_none() {
            return real::pthread_cond_broadcast(cond);
        }
    }
    if WAITERS.is_any_sleeping() {
        WAITERS.wake(cond as usize, List::take_all);
    }
    0
}

/// Tells `mutex.rs` that libc will unlock the mutex. Called before each wait by a real function,
/// which unlocks the mutex inside libc.
unsafe fn leave_to_libc(mutex: *mut pthread_mutex_t) {
    if !is_forked() {
        // SAFETY: the caller's contract.
        unsafe { mutex::leave_to_libc(mutex) };
    }
}

/// Returns the clock of `pthread_cond_timedwait`; None if the variable is left to the real
/// functions.
unsafe fn private_clock(cond: *mut pthread_cond_t) -> Option<clockid_t> {
    if is_forked() {
        return None;
    }
    // SAFETY: the caller's contract.
    unsafe { layout::cond_clock(cond) }
}

/// Waits as [`wait`] does, at most until `at` on `clock`.
///
/// # Safety
/// As for [`wait`].
unsafe fn wait_until(
    cond: *mut pthread_cond_t,
    mutex: *mut pthread_mutex_t,
    clock: clockid_t,
    at: *const timespec,
) -> c_int {
    // SAFETY: the caller's contract.
    match unsafe { deadline(clock, at) } {
        // SAFETY: the caller's contract.
        Ok(limit) => unsafe { wait(cond, mutex, Some(limit)) },
        Err(rc) => rc,
    }
}

/// Unlocks `mutex`, waits until it is woken or until `limit`, and locks `mutex` again.
///
/// # Safety
/// As above, and the callers' frames have nothing to drop: see [`pthread_testcancel`].
unsafe fn wait(
    cond: *mut pthread_cond_t,
    mutex: *mut pthread_mutex_t,
    limit: Option<ClockTime>,
) -> c_int {
    test_cancel();
    // SAFETY: the caller's contract.
    let rc = unsafe { wait_in_queue(cond as usize, mutex, limit) };
    test_cancel();
    rc
}

/// Waits as [`wait`] does, without the cancellation points. `address` is the variable's.
///
/// # Safety
/// `mutex` points to a mutex.
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
            // If the caller did not own the mutex, there is no wait. If the node was taken
            // meanwhile, its wake-up is on its way, and must be awaited.
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
