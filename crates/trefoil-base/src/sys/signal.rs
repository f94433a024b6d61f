//! The signal mask of the running thread. Bit n − 1 of a mask is signal n, as in the kernel.

use super::raw::syscall;
use std::ffi::c_int;

/// Returns the bit of a signal in a mask.
pub const fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

/// Unblocks one signal.
pub fn unblock(signal: i32) {
    change_mask(libc::SIG_UNBLOCK, bit(signal));
}

/// Replaces the mask.
pub fn set_mask(mask: u64) {
    change_mask(libc::SIG_SETMASK, mask);
}

/// Returns the mask.
pub fn current_mask() -> u64 {
    change_mask(libc::SIG_BLOCK, 0)
}

/// Changes the mask by `SIG_BLOCK`, `SIG_UNBLOCK` or `SIG_SETMASK`, and returns the old one. A raw
/// call: unlike libc's function it can block glibc's own signals too.
pub fn change_mask(how: c_int, mask: u64) -> u64 {
    let mut old = 0u64;
    let (new, before) = ((&raw const mask) as usize, (&raw mut old) as usize);
    // SAFETY: the kernel reads one mask and writes one, both of its size.
    unsafe { syscall(libc::SYS_rt_sigprocmask, [how as usize, new, before, size_of::<u64>()]) };
    old
}
