//! `pthread_mutex_*`: a goroutine that finds the mutex locked parks.
//!
//! A goroutine locks by the real `pthread_mutex_trylock`. Its thread-local storage holds a `struct
//! pthread` with an id of its own, so glibc records the goroutine as the owner, and recursive and
//! error-checking mutexes work per goroutine. If the mutex is locked, the goroutine waits as
//! `mod.rs` says. Plain threads call the real functions. The real unlock wakes a thread that sleeps
//! in the kernel, ours the first goroutine. Both then compete for the mutex.
//!
//! Invariants:
//! 1. Every unlock of the process calls [`pthread_mutex_unlock`], except those inside libc:
//!    `pthread_cond_wait` is therefore ours (`cond.rs`), and the rest of libc unlocks only its own
//!    mutexes. The exception is a private mutex with a process-shared condition variable: such a
//!    mutex is noted ([`leave_to_libc`]) before libc can unlock it, and from then on goroutines
//!    block in the real function.
//! 2. `__kind` and `__owner` are read only before the mutex is locked or while the caller must own
//!    it.
//!
//! Rejected: transferring the mutex to the goroutine that is woken. glibc's word has no state for
//! that, and threads would have to know it.

use super::{Waiters, counted, deadline, first, layout, real, uncount_if_unlocked};
use crate::interpose::park::{may_park_for_c_lock, on_goroutine};
use crate::sched::Rt;
use crate::sched::wait::list::List;
use crate::sched::wait::reason::WaitReason;
use crate::sys::frame_waiter::ClockTime;
use libc::{clockid_t, pthread_mutex_t, timespec};
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};

pub(super) static WAITERS: Waiters = Waiters::new(super::MUTEX);

/// The mutexes that libc itself unlocks (invariant 1), and how many there are. If there are more of
/// them than entries, every mutex counts as one of them. Entries are never removed: a new mutex at
/// such an address works, but goroutines that wait for it block their threads.
static LEFT_TO_LIBC: [AtomicUsize; 64] = [const { AtomicUsize::new(0) }; 64];
static LEFT_TO_LIBC_COUNT: AtomicUsize = AtomicUsize::new(0);

/// An attempt returns this if libc unlocks the mutex. It is no error number.
const USE_LIBC: c_int = -1;

interpose! {
    /// POSIX's function.
    fn pthread_mutex_lock(mutex: *mut pthread_mutex_t) -> c_int;
    always => lock(mutex)
}

interpose! {
    /// POSIX's function.
    fn pthread_mutex_trylock(mutex: *mut pthread_mutex_t) -> c_int;
    always => counted(|| real::pthread_mutex_trylock(mutex))
}

interpose! {
    /// POSIX's function.
    fn pthread_mutex_timedlock(mutex: *mut pthread_mutex_t, at: *const timespec) -> c_int;
    always => counted(|| {
        if !on_goroutine() {
            return real::pthread_mutex_timedlock(mutex, at);
        }
        let limit = || deadline(libc::CLOCK_REALTIME, at).map(Some);
        try_then_wait(mutex, limit, || real::pthread_mutex_timedlock(mutex, at))
    })
}

interpose! {
    /// glibc's function, in POSIX since 2024.
    fn pthread_mutex_clocklock(mutex: *mut pthread_mutex_t, clock: clockid_t,
        at: *const timespec) -> c_int;
    always => {
        let known = matches!(clock, libc::CLOCK_REALTIME | libc::CLOCK_MONOTONIC);
        counted(|| {
            if !on_goroutine() || !known {
                return real::pthread_mutex_clocklock(mutex, clock, at);
            }
            let limit = || deadline(clock, at).map(Some);
            try_then_wait(mutex, limit, || real::pthread_mutex_clocklock(mutex, clock, at))
        })
    }
}

interpose! {
    /// POSIX's function.
    fn pthread_mutex_unlock(mutex: *mut pthread_mutex_t) -> c_int;
    always => unlock(mutex)
}

/// Locks the mutex, without a time limit.
///
/// # Safety
/// `mutex` points to a mutex. The same holds for the functions below.
#[inline]
pub(super) unsafe fn lock(mutex: *mut pthread_mutex_t) -> c_int {
    // SAFETY: the caller's contract.
    unsafe {
        counted(|| {
            if !on_goroutine() {
                return real::pthread_mutex_lock(mutex);
            }
            try_then_wait(mutex, || Ok(None), || real::pthread_mutex_lock(mutex))
        })
    }
}

/// Unlocks the mutex, and wakes a goroutine that waits for it.
///
/// # Safety
/// As above.
#[inline]
pub(super) unsafe fn unlock(mutex: *mut pthread_mutex_t) -> c_int {
    // SAFETY: the caller's contract.
    let unlock = || unsafe { real::pthread_mutex_unlock(mutex) };
    uncount_if_unlocked(WAITERS.release(mutex as usize, unlock, first))
}

/// Unlocks as [`unlock`] does. If `here` is given, the caller is inside the runtime.
///
/// # Safety
/// As above.
pub(super) unsafe fn unlock_in(mutex: *mut pthread_mutex_t, here: Option<Rt>) -> c_int {
    if here.is_none() {
        // SAFETY: the caller's contract.
        return unsafe { unlock(mutex) };
    }
    // SAFETY: the caller's contract.
    let rc = uncount_if_unlocked(unsafe { real::pthread_mutex_unlock(mutex) });
    if rc == 0 && WAITERS.is_any_sleeping() {
        WAITERS.wake_in(mutex as usize, here, first);
    }
    rc
}

/// Notes that libc will unlock the mutex: goroutines that wait for it, now or later, do so in the
/// real function.
///
/// # Safety
/// As above.
#[cold]
pub(super) unsafe fn leave_to_libc(mutex: *mut pthread_mutex_t) {
    let address = mutex as usize;
    // SAFETY: the caller's contract.
    let is_special = unsafe { layout::mutex_kind(mutex) }.is_none_or(|kind| kind.is_special);
    if is_special || is_left_to_libc(address) {
        return;
    }
    // The entry is stored before the waiters are woken. They check it under the queue's lock, which
    // orders the two, each time before they sleep. So SeqCst is not needed here.
    let n = LEFT_TO_LIBC_COUNT.fetch_add(1, Ordering::SeqCst);
    if let Some(entry) = LEFT_TO_LIBC.get(n) {
        entry.store(address, Ordering::SeqCst);
    }
    WAITERS.wake(address, List::take_all);
}

/// Returns whether libc unlocks the mutex at `address`.
fn is_left_to_libc(address: usize) -> bool {
    let n = LEFT_TO_LIBC_COUNT.load(Ordering::Relaxed);
    n != 0
        && (n > LEFT_TO_LIBC.len()
            || LEFT_TO_LIBC[..n].iter().any(|entry| entry.load(Ordering::Relaxed) == address))
}

/// On a goroutine: tries to lock, then waits. `fallback` is the real function.
#[inline]
unsafe fn try_then_wait(
    mutex: *mut pthread_mutex_t,
    limit: impl FnOnce() -> Result<Option<ClockTime>, c_int>,
    fallback: impl FnOnce() -> c_int,
) -> c_int {
    // SAFETY: the caller's contract.
    match unsafe { real::pthread_mutex_trylock(mutex) } {
        // SAFETY: the caller's contract.
        libc::EBUSY => unsafe { wait(mutex, limit, fallback) },
        rc => rc,
    }
}

/// Waits after a failed attempt; the arguments are those of [`try_then_wait`].
#[cold]
unsafe fn wait(
    mutex: *mut pthread_mutex_t,
    limit: impl FnOnce() -> Result<Option<ClockTime>, c_int>,
    fallback: impl FnOnce() -> c_int,
) -> c_int {
    // SAFETY: the caller's contract.
    let Some(kind) = (unsafe { layout::mutex_kind(mutex) }) else { return fallback() };
    if kind.is_special || !may_park_for_c_lock() {
        return fallback();
    }
    if kind.is_error_checking && kind.owner == layout::own_tid() {
        return libc::EDEADLK;
    }
    let limit = match limit() {
        Ok(limit) => limit,
        Err(rc) => return rc,
    };
    let rc = WAITERS.acquire(mutex as usize, WaitReason::PthreadMutex, 0, limit, &|_, _| {
        if is_left_to_libc(mutex as usize) {
            return USE_LIBC;
        }
        // SAFETY: the caller's contract.
        unsafe { real::pthread_mutex_trylock(mutex) }
    });
    if rc == USE_LIBC { fallback() } else { rc }
}
