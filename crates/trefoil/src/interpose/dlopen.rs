//! `dlopen`: a new library may have initial-exec TLS, which lies in every thread's static block.
//! glibc writes the library's TLS image into the blocks of the threads it knows; `mem::tls` does
//! the same for goroutines. By default goroutines have no room for such libraries, and glibc
//! refuses them (`mem::tls`); then one line on stderr says what to do.
//!
//! Before the runtime starts a call is a *jump* to the real function: glibc takes the caller's
//! namespace and RUNPATH from the return address. Afterwards that is our address, so a library that
//! opens another by bare name through its own RUNPATH must have done so before, or must use a path.
//! (glibc offers no way to pass the caller. Sanitizers have the same limit.)
//!
//! During the call the goroutine counts as the holder of a C lock: the loader holds locks that
//! `pthread_create` needs as well, so that the helper thread could not start an M if the goroutine
//! were stopped here without a spare M (`sched/monitor/preempt.rs`). The program counter does not
//! show this: the loader also runs our `malloc` and `free`, IFUNC resolvers and constructors.
//! libc's own calls into the loader (name services, `iconv`) bypass these functions and are not
//! counted.
//!
//! Known limit: constructors that run inside `dlopen`, on a goroutine, read zeros in initial-exec
//! variables that have an initial value; the value is there when `dlopen` returns.

use super::symbol::NextSymbol;
use crate::arch;
use crate::mem::tls::{Loader, READY, modules_changed, refuses_static_tls};
use crate::sys::lock;
use crate::sys::stderr::write_stderr;
use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

type Dlopen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;
type Dlmopen = unsafe extern "C" fn(c_long, *const c_char, c_int) -> *mut c_void;
type Dlclose = unsafe extern "C" fn(*mut c_void) -> c_int;

static DLOPEN: NextSymbol = NextSymbol::new(c"dlopen");
static DLMOPEN: NextSymbol = NextSymbol::new(c"dlmopen");
static DLCLOSE: NextSymbol = NextSymbol::new(c"dlclose");

extern "C" fn real_dlopen() -> *mut c_void {
    DLOPEN.address()
}

extern "C" fn real_dlmopen() -> *mut c_void {
    DLMOPEN.address()
}

/// libc's function.
///
/// # Safety
/// As its manual page says.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dlopen(file: *const c_char, mode: c_int) -> *mut c_void {
    arch::jump_before_start!(READY, real_dlopen, dlopen_after_start)
}

/// libc's function.
///
/// # Safety
/// As its manual page says.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dlmopen(
    space: c_long,
    file: *const c_char,
    mode: c_int,
) -> *mut c_void {
    arch::jump_before_start!(READY, real_dlmopen, dlmopen_after_start)
}

interpose! {
    /// libc's function.
    fn dlclose(handle: *mut c_void) -> c_int;
    always => {
        let rc = in_loader(|| DLCLOSE.function::<Dlclose>()(handle));
        if rc == 0 {
            update_blocks(None);
        }
        rc
    }
}

unsafe extern "C" fn dlopen_after_start(file: *const c_char, mode: c_int) -> *mut c_void {
    // SAFETY: libc's function of that name and type, with the caller's arguments.
    let handle = open_or_explain(file, || unsafe { DLOPEN.function::<Dlopen>()(file, mode) });
    if !handle.is_null() {
        update_blocks(Some(loader()));
    }
    handle
}

unsafe extern "C" fn dlmopen_after_start(
    space: c_long,
    file: *const c_char,
    mode: c_int,
) -> *mut c_void {
    let open = || {
        // SAFETY: libc's function of that name and type, with the caller's arguments.
        unsafe { DLMOPEN.function::<Dlmopen>()(space, file, mode) }
    };
    let handle = open_or_explain(file, open);
    if !handle.is_null() {
        update_blocks(Some(loader()));
    }
    handle
}

/// Calls `open`. If it fails because goroutines have no room for the library's TLS, says so on
/// stderr, once per process.
fn open_or_explain(file: *const c_char, open: impl Fn() -> *mut c_void) -> *mut c_void {
    static EXPLAINED: AtomicBool = AtomicBool::new(false);
    let handle = in_loader(&open);
    if !handle.is_null() || !refuses_static_tls() || EXPLAINED.load(Ordering::Relaxed) {
        return handle;
    }
    if is_refused_static_tls() && !EXPLAINED.swap(true, Ordering::Relaxed) {
        // SAFETY: the loader has read this string.
        let file = unsafe { CStr::from_ptr(file) }.to_string_lossy();
        // Not `eprintln!`, which panics if stderr is closed.
        write_stderr(format_args!(
            "trefoil: dlopen of {file}: goroutines have no room for initial-exec TLS; set \
             TREFOIL_DLOPEN_RESERVE=1, or call dlopen_reserve(true) on the runtime's builder\n"
        ));
    }
    // Reading the error has cleared it, and the caller wants to read it too.
    in_loader(open)
}

/// Calls `f`, a function of the loader, which takes the loader's locks.
fn in_loader<T>(f: impl FnOnce() -> T) -> T {
    lock::count_c_lock();
    let result = f();
    lock::uncount_c_lock();
    result
}

/// Returns whether the loader's last error on this thread is that static TLS is exhausted. Clears
/// the error.
fn is_refused_static_tls() -> bool {
    // SAFETY: null, or a string that is valid until the next call of the loader on this thread.
    let text = unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            return false;
        }
        CStr::from_ptr(text).to_bytes()
    };
    // "FILE: cannot allocate memory in static TLS block", or a translation of it.
    let reason = text.rsplit(|&byte| byte == b':').next().unwrap_or(text);
    reason.windows(3).any(|word| word == b"TLS")
}

/// Returns the real functions, for callers that must not call the interposed ones.
pub(crate) fn loader() -> Loader {
    // SAFETY: libc's functions of these names and types.
    unsafe { Loader { open: DLOPEN.function::<Dlopen>(), close: DLCLOSE.function::<Dlclose>() } }
}

/// Updates the TLS blocks of all goroutines after a change of the loaded libraries. It calls the
/// loader again.
fn update_blocks(loader: Option<Loader>) {
    in_loader(|| modules_changed(loader, |visit| crate::mem::for_each_block(visit)));
}
