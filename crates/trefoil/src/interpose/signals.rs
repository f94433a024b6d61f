//! `sigaction`, `signal` and `sigaltstack`: handlers of the program beside those of the runtime.
//!
//! - The preemption signal stays the runtime's. The action that the program installs for it is
//!   stored here, and called for every such signal that is not a request of the runtime.
//! - Every handler gets `SA_ONSTACK`. Goroutine stacks are small; and the preemption signal could
//!   interrupt a handler that ran on one (`SA_NODEFER`), and the handler would return on another
//!   thread.
//! - An alternate stack that a goroutine installs is recorded for that goroutine, and not used: it
//!   would be the thread's, and stay installed when the goroutine moves or ends and its owner
//!   unmaps it. Handlers run on the thread's own alternate stack, which is large enough for the
//!   known libraries.

use super::symbol::NextSymbol;
use crate::mem::on_own_stack;
use crate::sched::{current_g, monitor::preempt};
use crate::sys::objects;
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::mem::{MaybeUninit, transmute};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicI32, Ordering};

type Sigaction = unsafe extern "C" fn(c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int;
type Handler = unsafe extern "C" fn(c_int);
type InfoHandler = unsafe extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);

static SIGACTION: NextSymbol = NextSymbol::new(c"sigaction");

/// The preemption signal; 0 until it is installed.
static PREEMPTION_SIGNAL: AtomicI32 = AtomicI32::new(0);
/// The program's action for the preemption signal. Only the handler and its flags are used, and our
/// handler may read them at any time. A torn read calls an old handler with new flags, as
/// `sigaction` itself may on another thread.
static mut USER_ACTION: MaybeUninit<libc::sigaction> = MaybeUninit::zeroed();

unsafe fn real_sigaction(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    // SAFETY: libc's function of that name and type, with the caller's arguments.
    unsafe { SIGACTION.function::<Sigaction>()(signal, new, old) }
}

interpose! {
    /// libc's function.
    fn sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int;
    always => {
        if signal != 0 && signal == PREEMPTION_SIGNAL.load(Ordering::Acquire) {
            let user_action = (&raw mut USER_ACTION).cast::<libc::sigaction>();
            let before = user_action.read_volatile();
            if !new.is_null() {
                user_action.write_volatile(new.read());
            }
            if !old.is_null() {
                old.write(before);
            }
            return 0;
        }
        if new.is_null() || (*new).sa_sigaction <= libc::SIG_IGN {
            return real_sigaction(signal, new, old);
        }
        let mut action = new.read();
        action.sa_flags |= libc::SA_ONSTACK;
        real_sigaction(signal, &raw const action, old)
    }
}

interpose! {
    /// libc's function, with the meaning that BSD and glibc give it.
    fn signal(signal: c_int, handler: libc::sighandler_t) -> usize;
    always => {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = libc::SA_RESTART;
        libc::sigemptyset(&raw mut action.sa_mask);
        let mut before: libc::sigaction = std::mem::zeroed();
        match sigaction(signal, &raw const action, &raw mut before) {
            0 => before.sa_sigaction,
            _ => libc::SIG_ERR,
        }
    }
}

thread_local! {
    /// The alternate stack that the goroutine has installed. It is in the goroutine's own
    /// thread-local storage, so the next goroutine begins with None.
    static ALTERNATE_STACK: Cell<Option<libc::stack_t>> = const { Cell::new(None) };
}

interpose! {
    /// libc's function.
    fn sigaltstack(new: *const libc::stack_t, old: *mut libc::stack_t) -> c_int;
    with real => {
        if current_g().is_none() {
            return real(new, old);
        }
        let of_thread = || {
            let mut stack = libc::stack_t { ss_sp: null_mut(), ss_flags: 0, ss_size: 0 };
            real(null(), &raw mut stack);
            stack
        };
        // In a handler, which runs on the thread's alternate stack, the kernel rejects a change.
        // Any other stack is one that a library with fibers has made, and its code is the
        // goroutine's.
        if !on_own_stack() && of_thread().ss_flags & libc::SS_ONSTACK != 0 {
            return real(new, old);
        }
        // The two pointers may be the same.
        let before = ALTERNATE_STACK.get().unwrap_or_else(of_thread);
        if !new.is_null() {
            match check_alternate_stack(new.read()) {
                Ok(stack) => ALTERNATE_STACK.set(Some(stack)),
                Err(error) => {
                    *libc::__errno_location() = error;
                    return -1;
                }
            }
        }
        if !old.is_null() {
            old.write(before);
        }
        0
    }
}

/// Returns the alternate stack as the kernel would store it.
///
/// # Errors
/// Returns the error number that the kernel would: `ENOMEM` if the stack is too small, `EINVAL` for
/// unknown flags.
fn check_alternate_stack(stack: libc::stack_t) -> Result<libc::stack_t, c_int> {
    /// Linux: the stack is disarmed while a handler runs on it.
    const SS_AUTODISARM: c_int = 1 << 31;
    match stack.ss_flags & !SS_AUTODISARM {
        libc::SS_DISABLE => {
            Ok(libc::stack_t { ss_sp: null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 })
        }
        0 | libc::SS_ONSTACK if stack.ss_size < libc::MINSIGSTKSZ => Err(libc::ENOMEM),
        0 | libc::SS_ONSTACK => {
            Ok(libc::stack_t { ss_flags: stack.ss_flags & SS_AUTODISARM, ..stack })
        }
        _ => Err(libc::EINVAL),
    }
}

/// Installs the runtime's handler for the preemption signal, which defaults to `SIGURG`. Returns
/// false if this machine cannot preempt.
pub(crate) fn install_preemption(signal: Option<c_int>) -> bool {
    let signal = signal.unwrap_or(libc::SIGURG);
    unsafe extern "C" {
        // Only its address is used: it lies in the loader.
        #[allow(clashing_extern_declarations)]
        fn __tls_get_addr(index: *const c_void) -> *mut c_void;
    }
    // A function that may be interposed would be found in the program itself.
    let libc = libc::gnu_get_libc_version as *const () as usize;
    let libraries = [libc, __tls_get_addr as *const () as usize];
    if !preempt::init(signal, libraries.map(library_of)) {
        return false;
    }
    // SAFETY: once, before the first goroutine; a handler of the right type for SA_SIGINFO.
    unsafe {
        real_sigaction(signal, null(), (&raw mut USER_ACTION).cast());
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_signal as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        libc::sigfillset(&raw mut action.sa_mask);
        // Release pairs with the Acquire in `sigaction`, which then reads `USER_ACTION`.
        PREEMPTION_SIGNAL.store(signal, Ordering::Release);
        real_sigaction(signal, &raw const action, null_mut()) == 0
    }
}

/// Handles the preemption signal. Async-signal-safe: uses no thread-locals except the goroutine's
/// own, no errno, no locks.
unsafe extern "C" fn on_signal(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel's pointers; on the alternate stack (SA_ONSTACK).
    unsafe {
        if !preempt::is_own_signal(&*info) {
            call_user_handler(signal, info, context);
        }
        preempt::on_signal(&mut *context.cast::<libc::ucontext_t>());
    }
}

/// Calls the handler that the program has installed for the preemption signal, if any.
unsafe fn call_user_handler(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: written whole words at a time; see `USER_ACTION`.
    let action = unsafe { (&raw const USER_ACTION).cast::<libc::sigaction>().read_volatile() };
    match action.sa_sigaction {
        // The default action of SIGURG is to do nothing. A program that selects another signal for
        // preemption loses that signal's default action.
        libc::SIG_DFL | libc::SIG_IGN => {}
        // SAFETY: SA_SIGINFO tells which of the two types the handler has.
        handler => unsafe {
            if action.sa_flags & libc::SA_SIGINFO != 0 {
                transmute::<usize, InfoHandler>(handler)(signal, info, context);
            } else {
                transmute::<usize, Handler>(handler)(signal);
            }
        },
    }
}

/// Returns the segment of the loaded object that contains `address`; an empty range if there is
/// none, or if it is the program's own.
fn library_of(address: usize) -> std::ops::Range<usize> {
    let mut found = 0..0;
    objects::for_each(|info, headers| {
        for header in headers.iter().filter(|h| h.p_type == libc::PT_LOAD) {
            let start = (info.dlpi_addr + header.p_vaddr) as usize;
            let text = start..start + header.p_memsz as usize;
            if text.contains(&address) {
                found = text;
            }
        }
    });
    // In a static executable libc is part of the program: preemption would never be allowed.
    if found.contains(&(library_of as *const () as usize)) { 0..0 } else { found }
}
