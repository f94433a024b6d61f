//! SIGQUIT (Ctrl-\\): prints every goroutine and ends the process with code 2, as Go does.
//!
//! The handler only leaves a note and wakes the aides; one of them does the rest. Without a runtime the
//! handler does what the signal would do without us: it ends the process. So it does in a child of `fork`,
//! which has inherited the handler but none of those threads. A handler that the user has installed before
//! the first runtime is left alone.

use super::{deadlock, dump};
use crate::sched::monitor::helper;
use crate::sys::raw::syscall;
use crate::sys::stderr::write_all_stderr;
use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

static ASKED: AtomicBool = AtomicBool::new(false);
/// The process that has the aides. Written before the handler that reads it is installed.
static PROCESS: AtomicI32 = AtomicI32::new(0);

/// Puts the handler in, once.
pub(crate) fn install() {
    static ONCE: Once = Once::new();
    // SAFETY: a handler that only stores a flag and makes system calls.
    ONCE.call_once(|| unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGQUIT, std::ptr::null(), &raw mut action);
        if action.sa_sigaction == libc::SIG_DFL {
            PROCESS.store(libc::getpid(), Ordering::Relaxed);
            action.sa_sigaction = on_quit as *const () as usize;
            action.sa_flags = libc::SA_ONSTACK | libc::SA_RESTART;
            libc::sigaction(libc::SIGQUIT, &raw const action, null_mut());
        }
    });
}

extern "C" fn on_quit(signal: c_int) {
    // First of all: a child of `vfork` shares the memory with the process that has the aides.
    // SAFETY: no arguments, touches no memory.
    if unsafe { libc::getpid() } != PROCESS.load(Ordering::Relaxed) {
        return raise_default(signal);
    }
    ASKED.store(true, Ordering::SeqCst);
    if !helper::wake_all() {
        // The last runtime is gone.
        raise_default(signal);
    }
}

/// In its handler: ends the process as the signal does by default, as soon as the handler returns.
pub(super) fn raise_default(signal: c_int) {
    set_default(signal);
    // SAFETY: the signal to this very thread, where it is blocked until the handler has returned.
    unsafe {
        let (pid, tid) = (libc::getpid() as usize, libc::gettid() as usize);
        syscall(libc::SYS_tgkill, [pid, tid, signal as usize]);
    }
}

/// Puts the default action in.
pub(super) fn set_default(signal: c_int) {
    // SAFETY: an action of our own.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = libc::SIG_DFL;
        libc::sigaction(signal, &raw const action, null_mut());
    }
}

/// Hook of the helper thread.
pub(crate) fn asked() {
    if ASKED.load(Ordering::SeqCst) {
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
