//! SIGQUIT (Ctrl-\\): prints every goroutine and ends the process with code 2, as Go does.
//!
//! The handler only leaves a note and wakes an aide, which does the rest. A handler that the user
//! has installed before the first runtime is left alone.

use super::{deadlock, dump};
use crate::sched::aide::Aide;
use crate::sys::stderr::write_all_stderr;
use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

static ASKED: AtomicBool = AtomicBool::new(false);
/// The aide of the newest runtime; its memory is never freed.
static AIDE: AtomicPtr<Aide> = AtomicPtr::new(null_mut());

/// Puts the handler in, once, and tells it whom to wake.
pub(crate) fn install(aide: &'static Aide) {
    static ONCE: Once = Once::new();
    AIDE.store(std::ptr::from_ref(aide).cast_mut(), Ordering::Release);
    // SAFETY: a handler that only stores a flag and makes a futex call.
    ONCE.call_once(|| unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGQUIT, std::ptr::null(), &raw mut action);
        if action.sa_sigaction == libc::SIG_DFL {
            action.sa_sigaction = on_quit as *const () as usize;
            action.sa_flags = libc::SA_ONSTACK | libc::SA_RESTART;
            libc::sigaction(libc::SIGQUIT, &raw const action, null_mut());
        }
    });
}

extern "C" fn on_quit(_: c_int) {
    ASKED.store(true, Ordering::Release);
    // SAFETY: null, or an Aide that is never freed.
    if let Some(aide) = unsafe { AIDE.load(Ordering::Acquire).as_ref() } {
        aide.call(0);
    }
}

/// Hook of the aide.
pub(crate) fn asked() {
    if ASKED.load(Ordering::Acquire) {
        let mut text = String::from("SIGQUIT: quit\n\n");
        for sched in deadlock::runtimes() {
            text.push_str(&dump::dump(&sched));
        }
        die(&text);
    }
}

/// Last words, and Go's exit code.
pub(super) fn die(text: &str) -> ! {
    write_all_stderr(text.as_bytes());
    // SAFETY: ends the process at once: no destructors, which could wait for what is deadlocked.
    unsafe { libc::_exit(2) }
}
