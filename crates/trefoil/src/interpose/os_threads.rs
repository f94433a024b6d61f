//! Functions that start or release an OS thread.
//!
//! libc does both under the lock of its stacks, and calls `free` while it holds that. The helper
//! thread needs the same lock to start an M. If a goroutine stopped in `free` and others waited for
//! the lock with their Ms, no M would be left to resume it. So the functions run on the M's own
//! context, where a goroutine neither stops nor parks.
//!
//! A goroutine waits for the end of a thread before that, on its own stack and without the lock, so
//! that dumps show where it is.
//!
//! `pthread_create`, `pthread_join` and `pthread_detach` are in `threads.rs`: there the thread may
//! be a goroutine.
//!
//! C11's functions are weak symbols: some libraries bring their own, under the same names.
//!
//! Known limit: what libc starts by itself (`timer_create` with `SIGEV_THREAD`, `mq_notify`, `aio_*`,
//! `getaddrinfo_a`) is not among them.

use super::park::on_goroutine;
use super::symbol::NextSymbol;
use crate::mem::tls::cleared_at_end;
use crate::sched::own_context::on_thread;
use crate::sys::futex::futex_wait_shared;
use libc::{clockid_t, pthread_t, timespec};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};

type C11Start = extern "C" fn(*mut c_void) -> c_int;
/// C11's `thrd_error`.
const C11_ERROR: c_int = 2;

type Join = unsafe fn(pthread_t, *mut *mut c_void) -> c_int;
type TimedJoin = unsafe extern "C" fn(pthread_t, *mut *mut c_void, *const timespec) -> c_int;

/// Joins `thread`, which is an OS thread, by libc's function `real`.
///
/// # Safety
/// As the manual page of `pthread_join` says.
pub(super) unsafe fn join(thread: pthread_t, value: *mut *mut c_void, real: Join) -> c_int {
    static TIMED_JOIN: NextSymbol = NextSymbol::of_c_name("pthread_timedjoin_np\0");
    // SAFETY: the caller's arguments; libc's function of that name and type.
    unsafe {
        // libc refuses to let a thread wait for itself. On the M's own context it would not notice.
        if !on_goroutine() || thread == libc::pthread_self() {
            return real(thread, value);
        }
        // Refuses what cannot be joined, and joins a thread that has ended.
        let past = timespec { tv_sec: 0, tv_nsec: 0 };
        let rc = on_thread(|| TIMED_JOIN.function::<TimedJoin>()(thread, value, &past));
        if rc != libc::ETIMEDOUT {
            return rc;
        }
        if let Some(word) = cleared_at_end(thread) {
            wait_until_cleared(word);
        }
        on_thread(|| real(thread, value))
    }
}

/// Waits until the kernel has cleared the word, because the thread has ended.
fn wait_until_cleared(word: &AtomicU32) {
    loop {
        // Acquire: what the thread has done comes before. (libc does the same.)
        match word.load(Ordering::Acquire) {
            0 => return,
            alive => futex_wait_shared(word, alive),
        }
    }
}

/// Calls `real`, which waits for a while, and then joins `thread`.
///
/// # Safety
/// As the manual page of `real` says.
unsafe fn join_for_a_while(thread: pthread_t, real: impl FnOnce() -> c_int) -> c_int {
    // As in `join`.
    // SAFETY: no conditions.
    if thread == unsafe { libc::pthread_self() } { real() } else { on_thread(real) }
}

/// C11's function.
unsafe extern "C" fn thrd_create(
    thread: *mut pthread_t,
    start: C11Start,
    argument: *mut c_void,
) -> c_int {
    type Real = unsafe extern "C" fn(*mut pthread_t, C11Start, *mut c_void) -> c_int;
    static NEXT: NextSymbol = NextSymbol::of_c_name("thrd_create\0");
    // SAFETY: the caller's arguments; libc's function of that name and type.
    on_thread(|| unsafe { NEXT.function::<Real>()(thread, start, argument) })
}

/// C11's function, which is `pthread_join` with other results.
unsafe extern "C" fn thrd_join(thread: pthread_t, value: *mut c_int) -> c_int {
    let mut result = null_mut();
    // SAFETY: the caller's thread, and null or a place for its result.
    unsafe {
        if libc::pthread_join(thread, &raw mut result) != 0 {
            return C11_ERROR;
        }
        if !value.is_null() {
            value.write(result.addr() as c_int);
        }
    }
    0
}

/// C11's function.
unsafe extern "C" fn thrd_detach(thread: pthread_t) -> c_int {
    type Real = unsafe extern "C" fn(pthread_t) -> c_int;
    static NEXT: NextSymbol = NextSymbol::of_c_name("thrd_detach\0");
    // SAFETY: the caller's thread; libc's function of that name and type.
    on_thread(|| unsafe { NEXT.function::<Real>()(thread) })
}

weak_symbols!(thrd_create thrd_join thrd_detach);

/// Returns the address of a weak symbol, so that the linker keeps it and the others.
pub(super) fn kept_symbol() -> *const () {
    unsafe extern "C" {
        #[link_name = "thrd_create"]
        fn weak_thrd_create(
            thread: *mut pthread_t,
            start: C11Start,
            argument: *mut c_void,
        ) -> c_int;
    }
    weak_thrd_create as *const ()
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
    with real => join_for_a_while(thread, || real(thread, value, until))
}

interpose! {
    /// glibc's function.
    fn pthread_clockjoin_np(
        thread: pthread_t,
        value: *mut *mut c_void,
        clock: clockid_t,
        until: *const timespec
    ) -> c_int;
    with real => join_for_a_while(thread, || real(thread, value, clock, until))
}
