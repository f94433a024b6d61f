//! The signal mask of the running thread.

use super::raw::syscall;

/// Lets a signal through.
pub(crate) fn unblock(signal: i32) {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: a set of our own.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), std::ptr::null_mut());
    }
}

/// The bit of a signal in a mask.
pub(crate) const fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

/// Sets the mask; see [`current_mask`].
pub(crate) fn set_mask(mask: u64) {
    let (how, set) = (libc::SIG_SETMASK as usize, &raw const mask as usize);
    // SAFETY: reads a mask of the kernel's size.
    unsafe { syscall(libc::SYS_rt_sigprocmask, [how, set, 0, size_of::<u64>()]) };
}

/// The mask, as the kernel keeps it: bit n − 1 is signal n.
pub(crate) fn current_mask() -> u64 {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: reads the mask into a set of our own, whose first word is the kernel's set.
    unsafe {
        libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), set.as_mut_ptr());
        set.as_ptr().cast::<u64>().read()
    }
}
