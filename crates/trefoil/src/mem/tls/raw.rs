//! System calls without libc: no errno, no interposed symbol, no cancellation point.
//!
//! Needed where FS is not (yet, or any more) a block that libc may write errno to.

use std::arch::asm;
use std::ffi::{CStr, c_void};

/// One system call; the kernel's answer as it is (−4095..−1 is an error).
///
/// # Safety
/// As for the system call itself.
#[inline]
pub(crate) unsafe fn syscall(nr: i64, args: [usize; 4]) -> isize {
    let answer;
    // SAFETY: the caller answers for the call; rcx and r11 are what `syscall` clobbers.
    unsafe {
        asm!("syscall", inlateout("rax") nr as isize => answer, in("rdi") args[0], in("rsi") args[1],
             in("rdx") args[2], in("r10") args[3], lateout("rcx") _, lateout("r11") _,
             options(nostack));
    }
    answer
}

const ARCH_SET_FS: usize = 0x1002;

/// Sets the FS base by the kernel's door: 139 ns, but right on every machine. For rare paths only.
///
/// # Safety
/// `tp` is a complete TLS block, and what follows may run on it.
#[inline]
pub(crate) unsafe fn set_fs(tp: usize) {
    // SAFETY: the caller's.
    unsafe { syscall(libc::SYS_arch_prctl, [ARCH_SET_FS, tp, 0, 0]) };
}

/// The FS base of the code that runs now: glibc keeps it in the first word of the block.
#[inline]
pub(crate) fn thread_pointer() -> usize {
    let tp;
    // SAFETY: every thread and goroutine has a TCB whose first word points to itself.
    unsafe { asm!("mov {}, fs:[0]", out(reg) tp, options(nostack, preserves_flags, readonly)) };
    tp
}

/// A symbol that may be missing (most of what we look for is GLIBC_PRIVATE: never linked).
pub(crate) fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a C string and a pseudo handle.
    let at = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!at.is_null()).then_some(at)
}

/// Words, read and written by address: TLS blocks are memory without a Rust type.
///
/// # Safety
/// `at` is mapped and nobody writes it at the same time.
#[inline(always)]
pub(crate) unsafe fn load<T: Copy>(at: usize) -> T {
    // SAFETY: the caller's.
    unsafe { (at as *const T).read_unaligned() }
}

/// # Safety
/// `at` is mapped, writable, and nobody reads or writes it at the same time.
#[inline(always)]
pub(crate) unsafe fn store<T: Copy>(at: usize, value: T) {
    // SAFETY: the caller's.
    unsafe { (at as *mut T).write_unaligned(value) }
}
