//! `sem_*`: a goroutine that finds a semaphore at zero parks.
//!
//! As `mutex.rs`: the real `sem_trywait`, the queue of the address for goroutines, the real functions for plain
//! threads. The real `sem_post` wakes threads, ours one goroutine; whoever is faster gets the permit.
//!
//! Invariants:
//! 1. `sem_post` may be called in a signal handler: it neither enters the runtime there nor waits for a lock that this
//!    thread holds (`waking.rs`), and leaves errno alone.
//! 2. A goroutine that waits here is no deadlock: a handler may post (`SIGNAL_WAITS`).
//!
//! On a goroutine a signal does not end a wait (`EINTR`).

use super::{SEMAPHORE, Waiters, deadline, first, layout, may_park_here, real};
use crate::interpose::on_goroutine;
use crate::sched::wait::deferred::SIGNAL_WAITS;
use crate::sched::wait::reason::WaitReason;
use crate::sys::frame_waiter::ClockTime;
use libc::{sem_t, timespec};
use std::ffi::c_int;
use std::sync::atomic::Ordering;

static WAITERS: Waiters = Waiters::new(SEMAPHORE);

/// POSIX's function.
///
/// # Safety
/// As its manual page says; so for all functions of this file.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn sem_wait(sem: *mut sem_t) -> c_int {
    // SAFETY: the caller's semaphore; the same below.
    unsafe { try_then_wait(sem, None, || real::sem_wait(sem)) }
}

/// POSIX's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn sem_timedwait(
    sem: *mut sem_t,
    at: *const timespec,
) -> c_int {
    // SAFETY: as above.
    unsafe { timed_wait(sem, libc::CLOCK_REALTIME, at, || real::sem_timedwait(sem, at)) }
}

/// glibc's function, in POSIX since 2024.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn sem_clockwait(
    sem: *mut sem_t,
    clock: libc::clockid_t,
    at: *const timespec,
) -> c_int {
    // SAFETY: as above.
    unsafe { timed_wait(sem, clock, at, || real::sem_clockwait(sem, clock, at)) }
}

/// Waits until `at`. A deadline that is none is refused even if nobody has to wait, as in glibc.
unsafe fn timed_wait(
    sem: *mut sem_t,
    clock: libc::clockid_t,
    at: *const timespec,
    fallback: impl FnOnce() -> c_int,
) -> c_int {
    // SAFETY: the caller's.
    unsafe {
        match deadline(clock, at) {
            Ok(limit) => try_then_wait(sem, Some(limit), fallback),
            Err(_) => fallback(),
        }
    }
}

/// POSIX's function. Safe in a signal handler (invariant 1).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sem_post(sem: *mut sem_t) -> c_int {
    // SAFETY: as above.
    WAITERS.release(sem as usize, || unsafe { real::sem_post(sem) }, first)
}

/// 0, or the error number, of the real `sem_trywait`.
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

/// On a goroutine: tries, then waits. `fallback` is the real function.
unsafe fn try_then_wait(
    sem: *mut sem_t,
    limit: Option<ClockTime>,
    fallback: impl FnOnce() -> c_int,
) -> c_int {
    if !on_goroutine() {
        return fallback();
    }
    // SAFETY: the caller's.
    let mut rc = unsafe { try_once(sem) };
    if rc == libc::EBUSY {
        // SAFETY: the caller's.
        if unsafe { layout::is_semaphore_private(sem) } != Some(true) || !may_park_here() {
            return fallback();
        }
        SIGNAL_WAITS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's.
        let attempt = |_: &_, _| unsafe { try_once(sem) };
        rc = WAITERS.acquire(sem as usize, WaitReason::PosixSemaphore, 0, limit, attempt);
        SIGNAL_WAITS.fetch_sub(1, Ordering::Relaxed);
    }
    if rc == 0 {
        return 0;
    }
    // SAFETY: errno of the running goroutine.
    unsafe { *libc::__errno_location() = rc };
    -1
}
