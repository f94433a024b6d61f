//! `dlopen`: a new library may have initial-exec TLS, which lies in every thread's static block.
//! glibc writes the library's TLS image into the blocks of the threads it knows; `mem::tls` does
//! the same for goroutines.
//!
//! Before the runtime starts a call is a *jump* to the real function: glibc takes the caller's
//! namespace and RUNPATH from the return address. Afterwards that is our address, so a library that
//! opens another by bare name through its own RUNPATH must have done so before, or must use a path.
//! (glibc offers no way to pass the caller. Sanitizers have the same limit.)
//!
//! Known limit: constructors that run inside `dlopen`, on a goroutine, read zeros in initial-exec
//! variables that have an initial value; the value is there when `dlopen` returns.

use super::symbol::NextSymbol;
use crate::mem::tls::{Loader, READY, modules_changed};
use std::arch::naked_asm;
use std::ffi::{c_char, c_int, c_long, c_void};

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

/// The body of a function that jumps to `$real()` until the runtime is ready, and to `$after_start`
/// from then on. The three arguments are saved while the address is looked up; three pushes also
/// align the stack for that call.
macro_rules! jump_before_start {
    ($real:ident, $after_start:ident) => {
        naked_asm!(
            "cmp byte ptr [rip + {ready}], 0",
            "jne {after_start}",
            "push rdi",
            "push rsi",
            "push rdx",
            "call {real}",
            "pop rdx",
            "pop rsi",
            "pop rdi",
            "jmp rax",
            ready = sym READY,
            after_start = sym $after_start,
            real = sym $real,
        )
    };
}

/// libc's function.
///
/// # Safety
/// As its manual page says.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dlopen(file: *const c_char, mode: c_int) -> *mut c_void {
    jump_before_start!(real_dlopen, dlopen_after_start)
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
    jump_before_start!(real_dlmopen, dlmopen_after_start)
}

interpose! {
    /// libc's function.
    fn dlclose(handle: *mut c_void) -> c_int;
    always => {
        let rc = DLCLOSE.function::<Dlclose>()(handle);
        if rc == 0 {
            update_blocks(None);
        }
        rc
    }
}

unsafe extern "C" fn dlopen_after_start(file: *const c_char, mode: c_int) -> *mut c_void {
    // SAFETY: libc's function of that name and type, with the caller's arguments.
    let handle = unsafe { DLOPEN.function::<Dlopen>()(file, mode) };
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
    // SAFETY: libc's function of that name and type, with the caller's arguments.
    let handle = unsafe { DLMOPEN.function::<Dlmopen>()(space, file, mode) };
    if !handle.is_null() {
        update_blocks(Some(loader()));
    }
    handle
}

/// Returns the real functions, for callers that must not call the interposed ones.
pub(crate) fn loader() -> Loader {
    // SAFETY: libc's functions of these names and types.
    unsafe { Loader { open: DLOPEN.function::<Dlopen>(), close: DLCLOSE.function::<Dlclose>() } }
}

/// Updates the TLS blocks of all goroutines after a change of the loaded libraries.
fn update_blocks(loader: Option<Loader>) {
    modules_changed(loader, |visit| crate::mem::for_each_block(visit));
}
