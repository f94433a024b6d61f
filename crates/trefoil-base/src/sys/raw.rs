//! System calls without libc: no errno, no cancellation point, no interposed function on the way.
//!
//! `syscalls/` has a typed function for each call that the crate makes for itself. Interposed
//! functions, which pass on what their caller has passed, use [`syscall`].

pub use crate::arch::syscall;

/// Makes the system call `ppoll` with a timeout in milliseconds; `usize::MAX` waits without a
/// limit. (Not every CPU has `poll`.) Returns the kernel's result.
///
/// # Safety
/// `list` has `count` entries.
pub unsafe fn poll_ms(list: *mut libc::pollfd, count: usize, ms: usize) -> isize {
    let time = libc::timespec {
        tv_sec: (ms / 1000) as libc::time_t,
        tv_nsec: (ms % 1000 * 1_000_000) as libc::c_long,
    };
    let time = if ms == usize::MAX { std::ptr::null() } else { &raw const time };
    // SAFETY: the caller's list; the kernel may write the time that is left to the local.
    unsafe { syscall(libc::SYS_ppoll, [list as usize, count, time as usize, 0, 8]) }
}

/// Converts a kernel result to libc's convention: −1 and errno for an error.
pub fn to_libc(result: isize) -> isize {
    if (-4095..0).contains(&result) {
        // SAFETY: errno of the running thread or goroutine.
        unsafe { *libc::__errno_location() = -result as i32 };
        return -1;
    }
    result
}
