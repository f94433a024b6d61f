//! `setuid` and related functions: per thread in Linux, and made per process by glibc, which sends
//! signal 33 to every thread.
//!
//! glibc's handler marks the thread as done in its `struct pthread`, which it finds by FS. On an M
//! that runs a goroutine it would mark the goroutine's `struct pthread` instead, and the caller of
//! `setuid` would wait for ever. So our handler wraps glibc's and calls it with FS set to the
//! thread's own block.
//!
//! glibc installs its handler at start-up (2.31) or at the first `pthread_create` (2.34 and later),
//! so glibc's handler is there when `mem::tls::init` has made its probe thread. glibc's `sigaction`
//! rejects this signal; the raw system call does not.

use crate::arch;
use crate::sys::raw;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The second real-time signal, which glibc reserves for itself.
const SIGSETXID: usize = 33;

/// The kernel's struct sigaction (libc's differs).
#[repr(C)]
#[derive(Default, Clone, Copy)]
struct Action {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: u64,
}

type Handler = unsafe extern "C" fn(c_int, *mut c_void, *mut c_void);

/// glibc's handler.
static REAL: AtomicUsize = AtomicUsize::new(0);

/// Wraps glibc's handler, after `mem::tls::init`. Further calls do nothing. Returns false if glibc
/// has no handler: then glibc does not make `setuid` per process.
pub(crate) fn install() -> bool {
    let mut old = Action::default();
    // SAFETY: only reads the present action.
    let rc = unsafe { rt_sigaction(std::ptr::null(), &mut old) };
    let ours = wrapper as *const () as usize;
    if rc != 0 || old.handler <= libc::SIG_IGN {
        return false;
    }
    if old.handler != ours {
        // Release pairs with the Acquire in `wrapper`, which may run at once on another thread.
        REAL.store(old.handler, Ordering::Release);
        // Flags (SA_ONSTACK: goroutine stacks are small) and restorer stay glibc's. All signals are
        // blocked meanwhile: no handler may run while FS is not the running goroutine's.
        let new = Action { handler: ours, mask: !0, ..old };
        // SAFETY: a handler of the right type for SA_SIGINFO.
        return unsafe { rt_sigaction(&new, std::ptr::null_mut()) } == 0;
    }
    true
}

/// Reads and changes the action of [`SIGSETXID`].
///
/// # Safety
/// `new` is null or an action that may be installed; `old` is null or writable.
unsafe fn rt_sigaction(new: *const Action, old: *mut Action) -> isize {
    let size = size_of::<u64>();
    // SAFETY: the caller's contract.
    unsafe { raw::syscall(libc::SYS_rt_sigaction, [SIGSETXID, new as usize, old as usize, size]) }
}

/// Calls glibc's handler on the thread's own block. Async-signal-safe: at most two system calls, no
/// TLS, no errno.
unsafe extern "C" fn wrapper(signal: c_int, info: *mut c_void, context: *mut c_void) {
    // SAFETY: set before the handler was installed; glibc's handler has this type.
    let real = unsafe { std::mem::transmute::<usize, Handler>(REAL.load(Ordering::Acquire)) };
    let now = arch::thread_pointer() as usize;
    let own = crate::sched::thread_fs_base().unwrap_or(now);
    // SAFETY: the thread's own block is complete, and only this thread uses it. FS is the
    // goroutine's again before other code runs here, because every signal is blocked.
    unsafe {
        if own != now {
            arch::set_thread_pointer(own as *mut u8);
        }
        real(signal, info, context);
        if own != now {
            arch::set_thread_pointer(now as *mut u8);
        }
    }
}
