//! C11's `mtx_*` and `cnd_*`: glibc's are its pthread objects under other names, with other results.

use super::{cond, mutex};
use libc::{pthread_cond_t, pthread_mutex_t, timespec};
use std::ffi::c_int;

const SUCCESS: c_int = 0;
const BUSY: c_int = 1;
const ERROR: c_int = 2;
const NO_MEMORY: c_int = 3;
const TIMED_OUT: c_int = 4;

/// The result for an error number.
fn result(rc: c_int) -> c_int {
    match rc {
        0 => SUCCESS,
        libc::EBUSY => BUSY,
        libc::ENOMEM => NO_MEMORY,
        libc::ETIMEDOUT => TIMED_OUT,
        _ => ERROR,
    }
}

/// C11's function.
///
/// # Safety
/// As the C standard says; so for all functions of this file.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mtx_lock(mutex: *mut pthread_mutex_t) -> c_int {
    // SAFETY: the caller's objects; the same below.
    result(unsafe { mutex::lock(mutex) })
}

/// C11's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mtx_trylock(mutex: *mut pthread_mutex_t) -> c_int {
    // SAFETY: as above.
    result(unsafe { mutex::pthread_mutex_trylock(mutex) })
}

/// C11's function. Its time is that of `timespec_get`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mtx_timedlock(
    mutex: *mut pthread_mutex_t,
    at: *const timespec,
) -> c_int {
    // SAFETY: as above.
    result(unsafe { mutex::pthread_mutex_timedlock(mutex, at) })
}

/// C11's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mtx_unlock(mutex: *mut pthread_mutex_t) -> c_int {
    // SAFETY: as above.
    result(unsafe { mutex::unlock(mutex) })
}

/// C11's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cnd_wait(
    cond: *mut pthread_cond_t,
    mutex: *mut pthread_mutex_t,
) -> c_int {
    // SAFETY: as above.
    result(unsafe { cond::pthread_cond_wait(cond, mutex) })
}

/// C11's function. Its time is that of `timespec_get`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cnd_timedwait(
    cond: *mut pthread_cond_t,
    mutex: *mut pthread_mutex_t,
    at: *const timespec,
) -> c_int {
    // SAFETY: as above.
    result(unsafe { cond::pthread_cond_timedwait(cond, mutex, at) })
}

/// C11's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cnd_signal(cond: *mut pthread_cond_t) -> c_int {
    // SAFETY: as above.
    result(unsafe { cond::signal(cond) })
}

/// C11's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cnd_broadcast(cond: *mut pthread_cond_t) -> c_int {
    // SAFETY: as above.
    result(unsafe { cond::broadcast(cond) })
}
