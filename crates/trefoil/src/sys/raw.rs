//! System calls without libc: no errno, no cancellation, nobody in between.

use std::arch::asm;

/// The call's result as the kernel gives it: negative is an error number.
///
/// # Safety
/// That of the call.
#[inline(always)]
pub(crate) unsafe fn syscall<const N: usize>(number: libc::c_long, args: [usize; N]) -> isize {
    const { assert!(N <= 6, "a system call has six arguments at most") };
    let mut all = [0; 6];
    all[..N].copy_from_slice(&args);
    let args = all;
    let result: isize;
    // SAFETY: the caller's.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") args[0], in("rsi") args[1], in("rdx") args[2],
            in("r10") args[3], in("r8") args[4], in("r9") args[5],
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// As libc gives it: −1 and errno for an error.
#[cfg(feature = "std")]
pub(crate) fn to_libc(result: isize) -> isize {
    if (-4095..0).contains(&result) {
        // SAFETY: errno of the running thread or goroutine.
        unsafe { *libc::__errno_location() = -result as i32 };
        return -1;
    }
    result
}
