//! The signal mask of the running thread.

/// The mask, as the kernel keeps it: bit n − 1 is signal n.
pub(crate) fn current_mask() -> u64 {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: reads the mask into a set of our own, whose first word is the kernel's set.
    unsafe {
        libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), set.as_mut_ptr());
        set.as_ptr().cast::<u64>().read()
    }
}
