//! `sem_*`: a goroutine that finds a semaphore at zero parks.
//!
//! As in `mutex.rs`: the real `sem_trywait`, the queue of the address for goroutines, the real
//! functions for plain threads. The real `sem_post` wakes a thread, ours a goroutine; the faster
//! one takes the permit.
//!
//! Invariants:
//! 1. `sem_post` may be called in a signal handler. It neither enters the runtime there nor waits
//!    for a lock that this thread holds (`waking.rs`), and does not change errno.
//! 2. A goroutine that waits here does not count as deadlocked: a handler may post
//!    (`SIGNAL_WAITS`).
//!
//! On a goroutine a signal does not end a wait (`EINTR`).

use super::{SEMAPHORE, Waiters, deadline, first, layout, real};
use crate::interpose::park::{may_park_for_c_lock, on_goroutine};
use crate::sched::wait::deferred::SIGNAL_WAITS;
use crate::sched::wait::reason::WaitReason;
use crate::sys::frame_waiter::ClockTime;
use libc::{clockid_t, sem_t, timespec};
use std::ffi::c_int;
use std::sync::atomic::Ordering;

pub(super) static WAITERS: Waiters = Waiters::new(SEMAPHORE);

interpose! {
    /// POSIX's function.
    extern "C-unwind" fn sem_wait(sem: *mut sem_t) -> c_int;
    always => try_then_wait(sem, None, || real::sem_wait(sem))
}

interpose! {
    /// POSIX's function.
    extern "C-unwind" fn sem_timedwait(sem: *mut sem_t, at: *const timespec) -> c_int;
    always => wait_until(sem, libc::CLOCK_REALTIME, at, || real::sem_timedwait(sem, at))
}

interpose! {
    /// glibc's function, in POSIX since 2024.
    extern "C-unwind" fn sem_clockwait(sem: *mut sem_t, clock: clockid_t,
        at: *const timespec) -> c_int;
    always => wait_until(sem, clock, at, || real::sem_clockwait(sem, clock, at))
}

interpose! {
    /// POSIX's function. Safe in a signal handler (invariant 1).
    fn sem_post(sem: *mut sem_t) -> c_int;
    always => WAITERS.release(sem as usize, || real::sem_post(sem), first)
}

/// Waits until `at`. An invalid deadline is rejected even if a permit is available, as in glibc.
unsafe fn wait_until(
    sem: *mut sem_t,
    clock: clockid_t,
    at: *const timespec,
    fallback: impl FnOnce() -> c_int,
) -> c_int {
    // SAFETY: the caller's contract.
    unsafe {
        match deadline(clock, at) {
            Ok(limit) => try_then_wait(sem, Some(limit), fallback),
            Err(_) => fallback(),
        }
    }
}

/// Calls the real `sem_trywait`. Returns 0, or the error number; `EBUSY` if the semaphore is at
/// zero.
unsafe fn try_once(sem: *mut sem_t) -> c_int {
    // SAFETY: the caller's semaphore; errno of the running goroutine.
    unsafe {
        match real::sem_trywait(sem) {
            0 => 0,
            _ => match *libc::__errno_location() {
                libc::EAGAIN => libc::EBUSY,
                e => e,
            },
        }
    }
}

/// On a goroutine: tries to take a permit, then waits. `fallback` is the real function.
unsafe fn try_then_wait(
    sem: *mut sem_t,
    limit: Option<ClockTime>,
    fallback: impl FnOnce() -> c_int,
) -> c_int {
    if !on_goroutine() {
        return fallback();
    }
    // SAFETY: the caller's contract.
    let mut rc = unsafe { try_once(sem) };
    if rc == libc::EBUSY {
        // SAFETY: the caller's contract.
        if unsafe { layout::is_semaphore_private(sem) } != Some(true) || !may_park_for_c_lock() {
            return fallback();
        }
        SIGNAL_WAITS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract.
        let attempt = |_: &_, _| unsafe { try_once(sem) };
        rc = WAITERS.acquire(sem as usize, WaitReason::PosixSemaphore, 0, limit, &attempt);
        SIGNAL_WAITS.fetch_sub(1, Ordering::Relaxed);
    }
    if rc == 0 {
        return 0;
    }
    // SAFETY: errno of the running goroutine.
    unsafe { *libc::__errno_location() = rc };
    -1
}
