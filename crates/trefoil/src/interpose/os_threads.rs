//! Functions that start or release an OS thread.
//!
//! libc does both under the lock of its stacks, and calls `free` while it holds that. The helper
//! thread needs the same lock to start an M. If a goroutine stopped in `free` and others waited for
//! the lock with their Ms, no M would be left to resume it. So the functions run on the M's own
//! context, where a goroutine neither stops nor parks.
//!
//! `pthread_create`, `pthread_join` and `pthread_detach` are in `threads.rs`: there the thread may
//! be a goroutine.
//!
//! Known limit: what libc starts by itself (`timer_create` with `SIGEV_THREAD`, `mq_notify`, `aio_*`,
//! `getaddrinfo_a`) is not among them.

use crate::sched::own_context::on_thread;
use libc::{clockid_t, pthread_t, timespec};
use std::ffi::{c_int, c_void};

type C11Start = extern "C" fn(*mut c_void) -> c_int;

interpose! {
    /// C11's function.
    fn thrd_create(thread: *mut pthread_t, start: C11Start, argument: *mut c_void) -> c_int;
    with real => on_thread(|| real(thread, start, argument))
}

interpose! {
    /// C11's function.
    fn thrd_join(thread: pthread_t, value: *mut c_int) -> c_int;
    with real => on_thread(|| real(thread, value))
}

interpose! {
    /// C11's function.
    fn thrd_detach(thread: pthread_t) -> c_int;
    with real => on_thread(|| real(thread))
}

interpose! {
    /// glibc's function.
    fn pthread_tryjoin_np(thread: pthread_t, value: *mut *mut c_void) -> c_int;
    with real => on_thread(|| real(thread, value))
}

interpose! {
    /// glibc's function.
    fn pthread_timedjoin_np(
        thread: pthread_t,
        value: *mut *mut c_void,
        until: *const timespec
    ) -> c_int;
    with real => on_thread(|| real(thread, value, until))
}

interpose! {
    /// glibc's function.
    fn pthread_clockjoin_np(
        thread: pthread_t,
        value: *mut *mut c_void,
        clock: clockid_t,
        until: *const timespec
    ) -> c_int;
    with real => on_thread(|| real(thread, value, clock, until))
}
