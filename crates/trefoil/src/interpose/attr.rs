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
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

interpose! {
    /// glibc's function; a goroutine that asks about itself gets the bounds of its stack.
    fn pthread_getattr_np(thread: pthread_t, attr: *mut pthread_attr_t) -> c_int;
    with real => {
        if thread == libc::pthread_self()
            && let Some((low, high)) = crate::sched::current_stack_bounds()
        {
            return describe_stack(attr, low, high);
        }
        real(thread, attr)
    }
}

/// A stack size that glibc accepts on every CPU, and that no other field of an attribute object
/// has.
const ACCEPTED_BYTES: usize = (1 << 20) + 0x12c0;

/// Initialises `attr` with the bounds of a stack. As with `pthread_getattr_np`, the caller must
/// destroy it. Returns an error number.
///
/// glibc refuses to describe a stack below its `PTHREAD_STACK_MIN`: 16 KiB on x86_64, but 128 KiB
/// on aarch64, where a goroutine may have less. Then `attr` gets a size that glibc accepts, and the
/// only word with that value is replaced.
///
/// # Safety
/// `attr` is writable.
unsafe fn describe_stack(attr: *mut pthread_attr_t, low: usize, high: usize) -> c_int {
    const WORDS: usize = size_of::<pthread_attr_t>() / size_of::<usize>();
    let size = high - low;
    // SAFETY: the caller's contract. glibc stores the bounds, and accesses nothing there.
    unsafe {
        let error = libc::pthread_attr_init(attr);
        if error != 0 {
            return error;
        }
        let error = libc::pthread_attr_setstack(attr, low as *mut c_void, size);
        if error != libc::EINVAL {
            return error;
        }
        let larger = high.wrapping_sub(ACCEPTED_BYTES) as *mut c_void;
        if libc::pthread_attr_setstack(attr, larger, ACCEPTED_BYTES) == 0 {
            let words = &mut *attr.cast::<[usize; WORDS]>();
            let mut same = words.iter_mut().filter(|word| **word == ACCEPTED_BYTES);
            if let (Some(word), None) = (same.next(), same.next()) {
                *word = size;
            }
            let (mut got_low, mut got_size) = (null_mut(), 0);
            libc::pthread_attr_getstack(attr, &raw mut got_low, &raw mut got_size);
            if (got_low.addr(), got_size) == (low, size) {
                return 0;
            }
        }
        libc::pthread_attr_destroy(attr);
        libc::EINVAL
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
