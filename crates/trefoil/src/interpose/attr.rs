//! Functions by which a thread asks about itself, and which glibc answers by the thread's id: a
//! goroutine's id is made up.
//!
//! - `pthread_getattr_np` tells where the stack is. Conservative collectors, stack-depth guards and
//!   profilers call it.
//! - Affinity, scheduling and CPU clock: the answers are those of the M, which is the calling
//!   thread to the kernel. They are changed only for a goroutine that is locked to its M. Any other
//!   goroutine would change them for goroutines that have not asked for it, and would soon run on
//!   another M itself.

use crate::sched::current_g;
use crate::sys::raw::syscall;
use libc::{clockid_t, cpu_set_t, pthread_attr_t, pthread_t, sched_param};
use std::ffi::c_int;

interpose! {
    /// glibc's function; a goroutine that asks about itself gets the bounds of its stack.
    fn pthread_getattr_np(thread: pthread_t, attr: *mut pthread_attr_t) -> c_int;
    with real => {
        if thread == libc::pthread_self()
            && let Some((low, high)) = crate::sched::current_stack_bounds()
        {
            return crate::sys::thread::describe_stack(attr, low, high);
        }
        real(thread, attr)
    }
}

/// Returns whether the caller is a goroutine and `thread` is that goroutine.
fn is_self(thread: pthread_t) -> bool {
    // SAFETY: no arguments, no conditions.
    current_g().is_some() && thread == unsafe { libc::pthread_self() }
}

/// Calls `set`, which returns a system call's result, if the goroutine is locked to its M. Returns
/// `EPERM` otherwise.
fn if_locked(set: impl FnOnce() -> isize) -> c_int {
    if current_g().is_some_and(|g| g.locked.get().is_some()) {
        -set() as c_int
    } else {
        libc::EPERM
    }
}

interpose! {
    /// glibc's function.
    fn pthread_getaffinity_np(thread: pthread_t, size: usize, set: *mut cpu_set_t) -> c_int;
    with real => {
        if !is_self(thread) {
            return real(thread, size, set);
        }
        let args = [0, size.min(i32::MAX as usize), set as usize];
        match syscall(libc::SYS_sched_getaffinity, args) {
            written @ 0.. => {
                let written = written as usize;
                set.cast::<u8>().add(written).write_bytes(0, size - written);
                0
            }
            error => -error as c_int,
        }
    }
}

interpose! {
    /// glibc's function; `EPERM` on a goroutine that is not locked to its thread.
    fn pthread_setaffinity_np(thread: pthread_t, size: usize, set: *const cpu_set_t) -> c_int;
    with real => {
        if !is_self(thread) {
            return real(thread, size, set);
        }
        if_locked(|| syscall(libc::SYS_sched_setaffinity, [0, size, set as usize]))
    }
}

interpose! {
    /// POSIX's function.
    fn pthread_getschedparam(thread: pthread_t, policy: *mut c_int,
        param: *mut sched_param) -> c_int;
    with real => {
        if !is_self(thread) {
            return real(thread, policy, param);
        }
        match syscall(libc::SYS_sched_getscheduler, [0]) {
            found @ 0.. => {
                *policy = found as c_int;
                -syscall(libc::SYS_sched_getparam, [0, param as usize]) as c_int
            }
            error => -error as c_int,
        }
    }
}

interpose! {
    /// POSIX's function; `EPERM` on a goroutine that is not locked to its thread.
    fn pthread_setschedparam(thread: pthread_t, policy: c_int,
        param: *const sched_param) -> c_int;
    with real => {
        if !is_self(thread) {
            return real(thread, policy, param);
        }
        let args = [0, policy as usize, param as usize];
        if_locked(|| syscall(libc::SYS_sched_setscheduler, args))
    }
}

interpose! {
    /// POSIX's function; `EPERM` on a goroutine that is not locked to its thread.
    fn pthread_setschedprio(thread: pthread_t, priority: c_int) -> c_int;
    with real => {
        if !is_self(thread) {
            return real(thread, priority);
        }
        let param = sched_param { sched_priority: priority };
        if_locked(|| syscall(libc::SYS_sched_setparam, [0, &raw const param as usize]))
    }
}

interpose! {
    /// POSIX's function. The clock is that of the M on which the goroutine runs when it reads it.
    fn pthread_getcpuclockid(thread: pthread_t, clock: *mut clockid_t) -> c_int;
    with real => {
        if !is_self(thread) {
            return real(thread, clock);
        }
        *clock = libc::CLOCK_THREAD_CPUTIME_ID;
        0
    }
}
