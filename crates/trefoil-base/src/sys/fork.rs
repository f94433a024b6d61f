//! Whether this process is a child of `fork`: it has one thread, and a thread that it does not have
//! may hold any lock.

use std::sync::atomic::{AtomicBool, Ordering};

/// Set in a child of `fork`.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Returns whether this process is a child of `fork`.
#[inline(always)]
pub fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// Makes [`is_forked`] return true in children of `fork`. Called once.
pub fn watch() {
    unsafe extern "C" fn in_child() {
        FORKED.store(true, Ordering::Relaxed);
    }
    // SAFETY: a function that stores a flag.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
}
