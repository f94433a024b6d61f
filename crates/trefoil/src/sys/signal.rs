//! The signal mask of the running thread.

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

/// The mask, as the kernel keeps it: bit n − 1 is signal n.
pub(crate) fn current_mask() -> u64 {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: reads the mask into a set of our own, whose first word is the kernel's set.
    unsafe {
        libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), set.as_mut_ptr());
        set.as_ptr().cast::<u64>().read()
    }
}
