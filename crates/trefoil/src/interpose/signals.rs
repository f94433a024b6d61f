//! `sigaction`, `signal` and `sigaltstack`: users' handlers beside ours.
//!
//! - The preemption signal stays ours; what a user installs for it is kept here and called for every such
//!   signal that is not a request of the runtime's own.
//! - Every handler gets SA_ONSTACK. Goroutine stacks are small; and a handler that ran on one could be
//!   interrupted there by the preemption signal (SA_NODEFER), and return on another thread.
//! - An alternate stack that a goroutine installs is written down for that goroutine, and not used: it would be
//!   the thread's, and stay there when the goroutine moves or ends and its owner unmaps it. Handlers run on the
//!   thread's own alternate stack, which is large enough for what libraries ask for.

use super::Next;
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

static SIGACTION: Next = Next::new(c"sigaction");
static SIGALTSTACK: Next = Next::new(c"sigaltstack");

/// The preemption signal; 0 while there is none.
static OURS: AtomicI32 = AtomicI32::new(0);
/// The user's action for it. Two words matter, and a handler may read it any time: a torn read calls an old
/// handler with new flags, as sigaction itself may on another thread.
static mut USERS: MaybeUninit<libc::sigaction> = MaybeUninit::zeroed();

unsafe fn real(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
    // SAFETY: libc's function of that name and type, with the caller's arguments.
    unsafe { transmute::<*mut c_void, Sigaction>(SIGACTION.get())(signal, new, old) }
}

/// libc's function.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sigaction(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    // SAFETY: the caller's pointers are null or valid; our copy lives during the call.
    unsafe {
        if signal != 0 && signal == OURS.load(Ordering::Acquire) {
            let users = (&raw mut USERS).cast::<libc::sigaction>();
            let before = users.read_volatile();
            if !new.is_null() {
                users.write_volatile(new.read());
            }
            if !old.is_null() {
                old.write(before);
            }
            return 0;
        }
        if new.is_null() || (*new).sa_sigaction <= libc::SIG_IGN {
            return real(signal, new, old);
        }
        let mut action = new.read();
        action.sa_flags |= libc::SA_ONSTACK;
        real(signal, &raw const action, old)
    }
}

/// libc's function, with BSD's meaning, which is glibc's.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn signal(signal: c_int, handler: libc::sighandler_t) -> usize {
    // SAFETY: an action made and read here.
    unsafe {
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
    /// What the goroutine has installed. In its own thread-local storage: the next goroutine has none.
    static ALTERNATE: Cell<Option<libc::stack_t>> = const { Cell::new(None) };
}

/// libc's function.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sigaltstack(
    new: *const libc::stack_t,
    old: *mut libc::stack_t,
) -> c_int {
    type Real = unsafe extern "C" fn(*const libc::stack_t, *mut libc::stack_t) -> c_int;
    // SAFETY: libc's function of that name and type, with pointers that are null or valid.
    let real = |new, old| unsafe { transmute::<*mut c_void, Real>(SIGALTSTACK.get())(new, old) };
    if current_g().is_none() {
        return real(new, old);
    }
    let threads = || {
        let mut stack = libc::stack_t { ss_sp: null_mut(), ss_flags: 0, ss_size: 0 };
        real(null(), &raw mut stack);
        stack
    };
    // In a handler, which runs on the thread's alternate stack, the kernel refuses a change. Any other stack
    // is one that a library with fibers has made for itself, and its code is the goroutine's.
    if !super::on_own_stack() && threads().ss_flags & libc::SS_ONSTACK != 0 {
        return real(new, old);
    }
    // SAFETY: the caller's pointers are null or valid, and may be the same.
    unsafe {
        let before = ALTERNATE.get().unwrap_or_else(threads);
        if !new.is_null() {
            match checked(new.read()) {
                Ok(stack) => ALTERNATE.set(Some(stack)),
                Err(error) => {
                    *libc::__errno_location() = error;
                    return -1;
                }
            }
        }
        if !old.is_null() {
            old.write(before);
        }
    }
    0
}

/// As the kernel would keep it, or the error that the kernel would give.
fn checked(stack: libc::stack_t) -> Result<libc::stack_t, c_int> {
    /// Linux: the stack is not in use any more once a handler runs on it.
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

/// Takes the preemption signal over (SIGURG unless another was asked for). False: this machine cannot preempt.
pub(crate) fn install_preemption(signal: Option<c_int>) -> bool {
    let signal = signal.unwrap_or(libc::SIGURG);
    unsafe extern "C" {
        // Only its address matters here: it lies in the loader.
        #[allow(clashing_extern_declarations)]
        fn __tls_get_addr(index: *const c_void) -> *mut c_void;
    }
    // Not by a name that is interposed: that would be the program itself.
    let libc = libc::gnu_get_libc_version as *const () as usize;
    let libraries = [libc, __tls_get_addr as *const () as usize];
    if !preempt::init(signal, libraries.map(library_of)) {
        return false;
    }
    // SAFETY: once, before the first goroutine; a handler of the right type for SA_SIGINFO.
    unsafe {
        real(signal, null(), (&raw mut USERS).cast());
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_signal as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        libc::sigfillset(&raw mut action.sa_mask);
        OURS.store(signal, Ordering::Release);
        real(signal, &raw const action, null_mut()) == 0
    }
}

/// Async-signal-safe: no thread-locals but the goroutine's own, no errno, no locks.
unsafe extern "C" fn on_signal(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel's pointers; on the alternate stack (SA_ONSTACK).
    unsafe {
        if !preempt::is_own_signal(&*info) {
            pass_on(signal, info, context);
        }
        preempt::on_signal(&mut *context.cast::<libc::ucontext_t>());
    }
}

/// To the user's handler.
unsafe fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: written whole words at a time; see USERS.
    let users = unsafe { (&raw const USERS).cast::<libc::sigaction>().read_volatile() };
    match users.sa_sigaction {
        // SIGURG's default is to do nothing. A user who moves us to another signal gives that one up.
        libc::SIG_DFL | libc::SIG_IGN => {}
        // SAFETY: its owner said by SA_SIGINFO which of the two it is.
        handler => unsafe {
            if users.sa_flags & libc::SA_SIGINFO != 0 {
                transmute::<usize, InfoHandler>(handler)(signal, info, context);
            } else {
                transmute::<usize, Handler>(handler)(signal);
            }
        },
    }
}

/// The executable part of the library that contains `address`; empty if there is none.
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
    // A static executable is its own libc: then nothing would be left to preempt.
    if found.contains(&(library_of as *const () as usize)) { 0..0 } else { found }
}
