//! The signal actions that handlers of the runtime have replaced.
//!
//! A handler of the runtime passes on what is not meant for it. A previous handler, std's or the
//! program's, is called as its own `sigaction` has asked: with its mask, with the signal blocked or
//! not (`SA_NODEFER`), once only (`SA_RESETHAND`). It may return, or leave by `siglongjmp`. Whether
//! system calls are restarted is up to the runtime's handler, and `SA_ONSTACK` is always set
//! (`interpose/signals.rs`).

use crate::sys::raw::syscall;
use crate::sys::signal::{bit, change_mask, current_mask, set_mask};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};

/// An action that other code has installed. It is set before the runtime's handler, which reads it,
/// is installed; a `SA_RESETHAND` handler is replaced by the default just before its only call.
pub(super) struct PreviousAction {
    handler: AtomicUsize,
    flags: AtomicI32,
    /// Bit n − 1 is signal n.
    mask: AtomicU64,
}

/// Why a signal arrived.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SignalSource {
    /// An instruction faulted. It is repeated when the handler returns.
    Fault,
    /// A process, a terminal or a timer has sent the signal.
    Sent,
}

impl PreviousAction {
    pub(super) const fn new() -> PreviousAction {
        PreviousAction {
            handler: AtomicUsize::new(libc::SIG_DFL),
            flags: AtomicI32::new(0),
            mask: AtomicU64::new(0),
        }
    }

    pub(super) fn set(&self, action: &libc::sigaction) {
        self.flags.store(action.sa_flags, Ordering::Relaxed);
        // SAFETY: the first word of the set holds the kernel's 64 signals.
        let mask = unsafe { (&raw const action.sa_mask).cast::<u64>().read() };
        self.mask.store(mask, Ordering::Relaxed);
        // Release: a late signal that finds the handler, in `take`, finds its flags and mask, too.
        self.handler.store(action.sa_sigaction, Ordering::Release);
    }

    /// Calls the handler, or does what the action would do.
    ///
    /// # Safety
    /// The arguments must be those of a handler for `signal`.
    pub(super) unsafe fn pass_on(
        &self,
        signal: c_int,
        info: *mut libc::siginfo_t,
        context: *mut c_void,
        source: SignalSource,
    ) {
        match self.take() {
            // A fault cannot be ignored. The instruction faults again under the default action,
            // which reports the address.
            libc::SIG_DFL | libc::SIG_IGN if source == SignalSource::Fault => {
                set_default(signal);
            }
            libc::SIG_DFL => raise_default(signal),
            libc::SIG_IGN => {}
            // SAFETY: the arguments are those of a handler.
            handler => unsafe { self.call(handler, signal, info, context) },
        }
    }

    /// Returns the handler to call now, or SIG_DFL or SIG_IGN.
    fn take(&self) -> usize {
        let handler = self.handler.load(Ordering::Acquire);
        let is_function = !matches!(handler, libc::SIG_DFL | libc::SIG_IGN);
        if is_function && self.flags.load(Ordering::Relaxed) & libc::SA_RESETHAND != 0 {
            self.handler.swap(libc::SIG_DFL, Ordering::Relaxed)
        } else {
            handler
        }
    }

    /// Calls `handler`, with the signals blocked that its action asks for.
    ///
    /// # Safety
    /// It is the handler of this action, and the others are its arguments.
    unsafe fn call(
        &self,
        handler: usize,
        signal: c_int,
        info: *mut libc::siginfo_t,
        context: *mut c_void,
    ) {
        let flags = self.flags.load(Ordering::Relaxed);
        let own_mask = current_mask();
        let deferred = flags & libc::SA_NODEFER == 0;
        let mask = if deferred { own_mask | bit(signal) } else { own_mask & !bit(signal) };
        // The action's mask may contain the signal even with SA_NODEFER.
        set_mask(mask | self.mask.load(Ordering::Relaxed));
        type Handler = unsafe extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
        // SAFETY: a handler of the program. One that takes only the signal ignores the rest.
        unsafe { std::mem::transmute::<usize, Handler>(handler)(signal, info, context) };
        // The program may have installed a handler after ours, which has called ours and goes on.
        set_mask(own_mask);
    }
}

/// Gives `signal` its default effect. To be called in its handler, where it is blocked. If the
/// effect is the end of the process, that comes when the handler returns.
fn raise_default(signal: c_int) {
    match signal {
        libc::SIGCHLD | libc::SIGCONT | libc::SIGURG | libc::SIGWINCH => {}
        libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU => {
            let ours = set_default(signal);
            send_to_this_thread(signal);
            // Here the process stops, unless it has no terminal to be continued from.
            let mask = change_mask(libc::SIG_UNBLOCK, bit(signal));
            set_mask(mask);
            // SAFETY: the action that was installed before.
            unsafe { libc::sigaction(signal, &raw const ours, null_mut()) };
        }
        _ => {
            set_default(signal);
            send_to_this_thread(signal);
        }
    }
}

fn send_to_this_thread(signal: c_int) {
    // SAFETY: sends a signal.
    unsafe {
        let (pid, tid) = (libc::getpid() as usize, libc::gettid() as usize);
        syscall(libc::SYS_tgkill, [pid, tid, signal as usize]);
    }
}

/// Installs the default action. Returns the one before.
fn set_default(signal: c_int) -> libc::sigaction {
    // SAFETY: an action made here; all zeros are a valid one.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = libc::SIG_DFL;
        let mut before: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, &raw const action, &raw mut before);
        before
    }
}
