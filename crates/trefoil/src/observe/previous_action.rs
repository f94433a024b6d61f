//! The signal actions that handlers of the runtime have replaced.
//!
//! A handler of the runtime passes on what is not meant for it. A previous handler, std's or the
//! program's, is called as its own `sigaction` has asked: with its mask, with the signal blocked or
//! not (`SA_NODEFER`), once only (`SA_RESETHAND`). It may return, or leave by `siglongjmp`. Only
//! `SA_ONSTACK` is always set (`interpose/signals.rs`).

use crate::sys::raw::syscall;
use crate::sys::signal::{bit, current_mask, set_mask};
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
        self.handler.store(action.sa_sigaction, Ordering::Relaxed);
        self.flags.store(action.sa_flags, Ordering::Relaxed);
        // SAFETY: the first word of the set holds the kernel's 64 signals.
        let mask = unsafe { (&raw const action.sa_mask).cast::<u64>().read() };
        self.mask.store(mask, Ordering::Relaxed);
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
            libc::SIG_DFL | libc::SIG_IGN if source == SignalSource::Fault => set_default(signal),
            libc::SIG_DFL => raise_default(signal),
            libc::SIG_IGN => {}
            // SAFETY: the arguments are those of a handler.
            handler => unsafe { self.call(handler, signal, info, context) },
        }
    }

    /// Returns the handler to call now, or SIG_DFL or SIG_IGN.
    fn take(&self) -> usize {
        if self.flags.load(Ordering::Relaxed) & libc::SA_RESETHAND != 0 {
            self.handler.swap(libc::SIG_DFL, Ordering::Relaxed)
        } else {
            self.handler.load(Ordering::Relaxed)
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
        type InfoHandler = unsafe extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
        type Handler = unsafe extern "C" fn(c_int);
        // SAFETY: the flag SA_SIGINFO tells which of the two types the handler has.
        unsafe {
            if flags & libc::SA_SIGINFO != 0 {
                std::mem::transmute::<usize, InfoHandler>(handler)(signal, info, context);
            } else {
                std::mem::transmute::<usize, Handler>(handler)(signal);
            }
        }
        // The program may have installed a handler after ours, which has called ours and goes on.
        set_mask(own_mask);
    }
}

/// Gives `signal` its default effect. To be called in its handler. If the effect is the end of the
/// process, that comes when the handler returns.
fn raise_default(signal: c_int) {
    let send = |signal: c_int| {
        // SAFETY: sends a signal to this thread. `signal` itself is blocked there until the handler
        // has returned.
        unsafe {
            let (pid, tid) = (libc::getpid() as usize, libc::gettid() as usize);
            syscall(libc::SYS_tgkill, [pid, tid, signal as usize]);
        }
    };
    match signal {
        libc::SIGCHLD | libc::SIGCONT | libc::SIGURG | libc::SIGWINCH => {}
        // Unlike the default action, that leaves our handler installed for later.
        libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU => send(libc::SIGSTOP),
        _ => {
            set_default(signal);
            send(signal);
        }
    }
}

/// Installs the default action.
fn set_default(signal: c_int) {
    // SAFETY: an action made here.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = libc::SIG_DFL;
        libc::sigaction(signal, &raw const action, null_mut());
    }
}
