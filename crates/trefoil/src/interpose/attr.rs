//! `pthread_getattr_np`: where is my stack? The real one asks the kernel about the thread id (and a
//! goroutine's is made up). Conservative collectors, stack-depth guards and profilers call it.

use super::Next;
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
