//! The words of a TLS block, which is memory without a Rust type, and symbols of glibc.

use std::ffi::{CStr, c_void};

/// Returns the running code's thread pointer as a number: offsets in a block are added to it.
#[inline(always)]
pub(super) fn thread_pointer() -> usize {
    crate::arch::thread_pointer() as usize
}

/// Returns the address `offset` bytes from the thread pointer `tp`.
#[inline(always)]
pub(super) fn at(tp: usize, offset: isize) -> usize {
    tp.wrapping_add_signed(offset)
}

/// Returns the address of a symbol, if it exists. (Most of the symbols that are needed here are
/// GLIBC_PRIVATE, so they cannot be linked to.)
pub(super) fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a C string and a pseudo handle.
    let at = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!at.is_null()).then_some(at)
}

/// Reads a value at an address.
///
/// # Safety
/// `at` is mapped, and no other thread writes it at the same time.
#[inline(always)]
pub(super) unsafe fn load<T: Copy>(at: usize) -> T {
    // SAFETY: the caller's contract.
    unsafe { (at as *const T).read_unaligned() }
}

/// Writes a value to an address.
///
/// # Safety
/// `at` is mapped and writable, and no other thread reads or writes it at the same time.
#[inline(always)]
pub(super) unsafe fn store<T: Copy>(at: usize, value: T) {
    // SAFETY: the caller's contract.
    unsafe { (at as *mut T).write_unaligned(value) }
}
