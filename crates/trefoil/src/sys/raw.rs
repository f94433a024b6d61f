//! System calls without libc: no errno, no cancellation point, no interposed function on the way.

pub(crate) use crate::arch::syscall;

/// Converts a kernel result to libc's convention: −1 and errno for an error.
#[cfg(feature = "std")]
pub(crate) fn to_libc(result: isize) -> isize {
    if (-4095..0).contains(&result) {
        // SAFETY: errno of the running thread or goroutine.
        unsafe { *libc::__errno_location() = -result as i32 };
        return -1;
    }
    result
}
