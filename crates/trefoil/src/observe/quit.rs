//! SIGQUIT (Ctrl-\\): prints every goroutine and ends the process with code 2, as Go does.
//!
//! The handler only sets a flag and wakes the helper threads; one of them prints. Without a
//! runtime, and in a child of `fork` (which inherits the handler but no helper thread), the signal
//! has its previous effect: it ends the process, or is ignored. A handler that the program has
//! installed before its first runtime stays in place. `SIG_IGN` is replaced, as in Go: shells start
//! the background jobs of a script with SIGQUIT ignored, and `kill -QUIT` must work on a program
//! that hangs.

use super::previous_action::{PreviousAction, SignalSource};
use super::{deadlock, dump, trace};
use crate::sched::monitor::helper;
use crate::sys::stderr::write_all_stderr;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// SIGQUIT has arrived: a helper thread is to print.
static ASKED: AtomicBool = AtomicBool::new(false);
/// The process that has the helper threads. Written before the handler that reads it is installed.
static PROCESS: AtomicI32 = AtomicI32::new(0);
/// The default action, or `SIG_IGN`. Written like `PROCESS`.
static PREVIOUS: PreviousAction = PreviousAction::new();

/// Installs the handler, once.
pub(crate) fn install() {
    static ONCE: Once = Once::new();
    // SAFETY: the handler only stores a flag and makes system calls.
    ONCE.call_once(|| unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGQUIT, std::ptr::null(), &raw mut action);
        if matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN) {
            PREVIOUS.set(&action);
            PROCESS.store(libc::getpid(), Ordering::Relaxed);
            action.sa_sigaction = on_quit as *const () as usize;
            action.sa_flags = libc::SA_ONSTACK | libc::SA_RESTART | libc::SA_SIGINFO;
            libc::sigaction(libc::SIGQUIT, &raw const action, null_mut());
        }
    });
}

extern "C" fn on_quit(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the arguments are those of this handler.
    let pass_on = || unsafe { PREVIOUS.pass_on(signal, info, context, SignalSource::Sent) };
    // Before `ASKED` is set: a child of `vfork` shares memory with the process that has the helper
    // threads.
    // SAFETY: no arguments, touches no memory.
    if unsafe { libc::getpid() } != PROCESS.load(Ordering::Relaxed) {
        return pass_on();
    }
    // SeqCst: see `helper::wake_all`.
    ASKED.store(true, Ordering::SeqCst);
    if !helper::wake_all() {
        // The last runtime has ended, so no helper thread is left to print, and none of a later
        // runtime is to.
        ASKED.store(false, Ordering::SeqCst);
        pass_on();
    }
}

/// Prints every goroutine and ends the process if SIGQUIT has arrived, and tells the watches of the
/// flight recorder which other signals have. Helper threads call it.
pub(crate) fn serve_signals() {
    if ASKED.load(Ordering::SeqCst) {
        let mut text = String::from("SIGQUIT: quit\n\n");
        for sched in deadlock::runtimes() {
            text.push_str(&dump::dump(&sched));
        }
        die(&text);
    }
    trace::watches::tell_signals();
}

/// Prints `text`, writes what was recorded, and ends the process with Go's exit code.
pub(super) fn die(text: &str) -> ! {
    write_all_stderr(text.as_bytes());
    deadlock::runtimes().iter().for_each(|sched| trace::write_automatically(sched, None));
    // SAFETY: ends the process without destructors, which could wait for deadlocked goroutines.
    unsafe { libc::_exit(2) }
}
