//! C11's `mtx_*` and `cnd_*`: in glibc they are the pthread objects under other names, with other
//! results.

use super::{cond, mutex};
use libc::{pthread_cond_t, pthread_mutex_t, timespec};
use std::ffi::c_int;

const SUCCESS: c_int = 0;
const BUSY: c_int = 1;
const ERROR: c_int = 2;
const NO_MEMORY: c_int = 3;
const TIMED_OUT: c_int = 4;

/// Returns C11's result for an error number.
fn result(rc: c_int) -> c_int {
    match rc {
        0 => SUCCESS,
        libc::EBUSY => BUSY,
        libc::ENOMEM => NO_MEMORY,
        libc::ETIMEDOUT => TIMED_OUT,
        _ => ERROR,
    }
}

interpose! {
    /// C11's function.
    fn mtx_lock(mutex: *mut pthread_mutex_t) -> c_int;
    always => result(mutex::lock(mutex))
}

interpose! {
    /// C11's function.
    fn mtx_trylock(mutex: *mut pthread_mutex_t) -> c_int;
    always => result(mutex::pthread_mutex_trylock(mutex))
}

interpose! {
    /// C11's function. Its time is that of `timespec_get`.
    fn mtx_timedlock(mutex: *mut pthread_mutex_t, at: *const timespec) -> c_int;
    always => result(mutex::pthread_mutex_timedlock(mutex, at))
}

interpose! {
    /// C11's function.
    fn mtx_unlock(mutex: *mut pthread_mutex_t) -> c_int;
    always => result(mutex::unlock(mutex))
}

interpose! {
    /// C11's function.
    extern "C-unwind" fn cnd_wait(cond: *mut pthread_cond_t,
        mutex: *mut pthread_mutex_t) -> c_int;
    always => result(cond::pthread_cond_wait(cond, mutex))
}

interpose! {
    /// C11's function. Its time is that of `timespec_get`.
    extern "C-unwind" fn cnd_timedwait(cond: *mut pthread_cond_t, mutex: *mut pthread_mutex_t,
        at: *const timespec) -> c_int;
    always => result(cond::pthread_cond_timedwait(cond, mutex, at))
}

interpose! {
    /// C11's function.
    fn cnd_signal(cond: *mut pthread_cond_t) -> c_int;
    always => result(cond::signal(cond))
}

interpose! {
    /// C11's function.
    fn cnd_broadcast(cond: *mut pthread_cond_t) -> c_int;
    always => result(cond::broadcast(cond))
}
