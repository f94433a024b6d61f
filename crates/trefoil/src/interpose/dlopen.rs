//! dlopen: a new library may have initial-exec TLS, which lies in every thread's static block. glibc
//! writes its image into the blocks of the threads it knows; `mem::tls` does so for goroutines.
//!
//! Before the runtime starts a call is a *jump* to the real function: glibc looks at the return address
//! for the caller's namespace and RUNPATH. Afterwards it sees our address, so a library that dlopens by
//! bare name through its own RUNPATH must have done so before, or be named by path. (glibc offers no
//! way to pass the caller; sanitizers live with the same.)
//!
//! Known limit: constructors inside dlopen, on a goroutine, read zeros in initial-exec variables that
//! have an initial value; it is there when dlopen returns.

use super::Next;
use crate::mem::tls::{Loader, READY, modules_changed};
use std::arch::naked_asm;
use std::ffi::{c_char, c_int, c_long, c_void};
use std::mem::transmute;

type Open = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;
type OpenIn = unsafe extern "C" fn(c_long, *const c_char, c_int) -> *mut c_void;
type Close = unsafe extern "C" fn(*mut c_void) -> c_int;

static OPEN: Next = Next::new(c"dlopen");
static OPEN_IN: Next = Next::new(c"dlmopen");
static CLOSE: Next = Next::new(c"dlclose");

extern "C" fn real_open() -> *mut c_void {
    OPEN.get()
}

extern "C" fn real_open_in() -> *mut c_void {
    OPEN_IN.get()
}

/// The body of a door that jumps on until the runtime is ready. Three arguments are kept over the
/// look-up; three pushes also align the stack for it.
macro_rules! jump_or_watch {
    ($real:ident, $watched:ident) => {
        naked_asm!(
            "cmp byte ptr [rip + {ready}], 0",
            "jne {watched}",
            "push rdi",
            "push rsi",
            "push rdx",
            "call {real}",
            "pop rdx",
            "pop rsi",
            "pop rdi",
            "jmp rax",
            ready = sym READY,
            watched = sym $watched,
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
    jump_or_watch!(real_open, watched_open)
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
    jump_or_watch!(real_open_in, watched_open_in)
}

/// libc's function.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dlclose(handle: *mut c_void) -> c_int {
    // SAFETY: libc's function of that name and type, with the caller's argument.
    let rc = unsafe { transmute::<*mut c_void, Close>(CLOSE.get())(handle) };
    if rc == 0 {
        changed(None);
    }
    rc
}

unsafe extern "C" fn watched_open(file: *const c_char, mode: c_int) -> *mut c_void {
    // SAFETY: libc's function of that name and type, with the caller's arguments.
    let handle = unsafe { transmute::<*mut c_void, Open>(OPEN.get())(file, mode) };
    if !handle.is_null() {
        changed(Some(loader()));
    }
    handle
}

unsafe extern "C" fn watched_open_in(
    space: c_long,
    file: *const c_char,
    mode: c_int,
) -> *mut c_void {
    // SAFETY: libc's function of that name and type, with the caller's arguments.
    let handle = unsafe { transmute::<*mut c_void, OpenIn>(OPEN_IN.get())(space, file, mode) };
    if !handle.is_null() {
        changed(Some(loader()));
    }
    handle
}

/// The real functions, for who must not come back here.
pub(crate) fn loader() -> Loader {
    // SAFETY: libc's functions of these names and types.
    unsafe {
        Loader {
            open: transmute::<*mut c_void, Open>(OPEN.get()),
            close: transmute::<*mut c_void, Close>(CLOSE.get()),
        }
    }
}

fn changed(loader: Option<Loader>) {
    modules_changed(loader, |visit| crate::mem::for_each_block(visit));
}
