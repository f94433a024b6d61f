//! The thread pointer and the words of a TLS block, without a Rust type; system calls (`sys/raw.rs`) where FS is not
//! (yet, or any more) a block that libc may write errno to.

pub(crate) use crate::sys::raw::syscall;
use std::arch::asm;
use std::ffi::{CStr, c_void};

const ARCH_SET_FS: usize = 0x1002;

/// Sets the FS base by the kernel's door: 139 ns, but right on every machine. For rare paths only.
///
/// # Safety
/// `tp` is a complete TLS block, and what follows may run on it.
#[inline]
pub(crate) unsafe fn set_fs(tp: usize) {
    // SAFETY: the caller's.
    unsafe { syscall(libc::SYS_arch_prctl, [ARCH_SET_FS, tp]) };
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
