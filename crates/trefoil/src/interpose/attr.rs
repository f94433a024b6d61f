//! Questions of a thread about itself that glibc answers by its thread id: a goroutine's is made up.
//!
//! - `pthread_getattr_np`: where is my stack? Conservative collectors, stack-depth guards and profilers call it.
//! - Affinity, scheduling and CPU clock: the answers are those of the M, which is the calling thread to the kernel.
//!   They are changed only for a goroutine that is locked to its M: any other would change them for goroutines that
//!   have not asked for it, and run elsewhere itself a moment later.

use super::Next;
use crate::sched::current_g;
use crate::sys::raw::syscall;
use libc::{clockid_t, cpu_set_t, pthread_t, sched_param};
use std::ffi::{c_int, c_void};

static GETATTR: Next = Next::new(c"pthread_getattr_np");

/// glibc's function; for a goroutine that asks about itself, the answer is ours.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pthread_getattr_np(
    thread: libc::pthread_t,
    attr: *mut libc::pthread_attr_t,
) -> c_int {
    type GetAttr = unsafe extern "C" fn(libc::pthread_t, *mut libc::pthread_attr_t) -> c_int;
    // SAFETY: no arguments, no conditions.
    if thread == unsafe { libc::pthread_self() }
        && let Some((low, high)) = crate::sched::current_stack_bounds()
    {
        // SAFETY: `attr` is the caller's to be initialised; it must destroy it, as with the real one.
        return unsafe {
            match libc::pthread_attr_init(attr) {
                0 => libc::pthread_attr_setstack(attr, low as *mut c_void, high - low),
                error => error,
            }
        };
    }
    // SAFETY: glibc's function of that name and type, with the caller's arguments.
    unsafe { std::mem::transmute::<*mut c_void, GetAttr>(GETATTR.get())(thread, attr) }
}

/// Whether a goroutine asks about itself.
fn is_own(thread: pthread_t) -> bool {
    // SAFETY: no arguments, no conditions.
    current_g().is_some() && thread == unsafe { libc::pthread_self() }
}

/// Whether what is changed for the M is changed for this goroutine alone.
fn is_locked() -> bool {
    current_g().is_some_and(|g| g.locked.get().is_some())
}

/// A function of glibc about a thread: for a goroutine that asks about itself it is `$own`, an error number.
macro_rules! of_thread {
    ($(#[$doc:meta])* $static:ident = $symbol:literal,
     $name:ident($thread:ident: pthread_t $(, $arg:ident: $type:ty)*), $own:expr) => {
        static $static: Next = Next::new($symbol);

        $(#[$doc])*
        ///
        /// # Safety
        /// As its manual page says.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($thread: pthread_t $(, $arg: $type)*) -> c_int {
            type Real = unsafe extern "C" fn(pthread_t $(, $type)*) -> c_int;
            // SAFETY: the caller's arguments; the real one is glibc's function of that name and type.
            unsafe {
                if is_own($thread) {
                    return $own;
                }
                std::mem::transmute::<*mut c_void, Real>($static.get())($thread $(, $arg)*)
            }
        }
    };
}

of_thread! {
    /// glibc's function.
    GETAFFINITY = c"pthread_getaffinity_np",
    pthread_getaffinity_np(thread: pthread_t, size: usize, set: *mut cpu_set_t),
    match syscall(libc::SYS_sched_getaffinity, [0, size.min(i32::MAX as usize), set as usize]) {
        written @ 0.. => {
            let written = written as usize;
            set.cast::<u8>().add(written).write_bytes(0, size - written);
            0
        }
        error => -error as c_int,
    }
}

of_thread! {
    /// glibc's function; `EPERM` on a goroutine that is not locked to its thread.
    SETAFFINITY = c"pthread_setaffinity_np",
    pthread_setaffinity_np(thread: pthread_t, size: usize, set: *const cpu_set_t),
    if is_locked() {
        -syscall(libc::SYS_sched_setaffinity, [0, size, set as usize]) as c_int
    } else {
        libc::EPERM
    }
}

of_thread! {
    /// POSIX's function.
    GETSCHEDPARAM = c"pthread_getschedparam",
    pthread_getschedparam(thread: pthread_t, policy: *mut c_int, param: *mut sched_param),
    match syscall(libc::SYS_sched_getscheduler, [0]) {
        found @ 0.. => {
            *policy = found as c_int;
            -syscall(libc::SYS_sched_getparam, [0, param as usize]) as c_int
        }
        error => -error as c_int,
    }
}

of_thread! {
    /// POSIX's function; `EPERM` on a goroutine that is not locked to its thread.
    SETSCHEDPARAM = c"pthread_setschedparam",
    pthread_setschedparam(thread: pthread_t, policy: c_int, param: *const sched_param),
    if is_locked() {
        -syscall(libc::SYS_sched_setscheduler, [0, policy as usize, param as usize]) as c_int
    } else {
        libc::EPERM
    }
}

of_thread! {
    /// POSIX's function; `EPERM` on a goroutine that is not locked to its thread.
    SETSCHEDPRIO = c"pthread_setschedprio",
    pthread_setschedprio(thread: pthread_t, priority: c_int),
    if is_locked() {
        let param = sched_param { sched_priority: priority };
        -syscall(libc::SYS_sched_setparam, [0, &raw const param as usize]) as c_int
    } else {
        libc::EPERM
    }
}

of_thread! {
    /// POSIX's function: the clock of whichever M the goroutine is on when it reads that clock.
    GETCPUCLOCKID = c"pthread_getcpuclockid",
    pthread_getcpuclockid(thread: pthread_t, clock: *mut clockid_t),
    {
        *clock = libc::CLOCK_THREAD_CPUTIME_ID;
        0
    }
}
