//! pthread keys, and C11's `tss_t`, which are the same: glibc runs their destructors at a *thread's* end. For a goroutine's end we must know
//! them; `mem::tls` keeps the table and runs them.

use super::Next;
use crate::mem::tls::{KeyDtor, key_created, key_deleted};
use std::ffi::{c_int, c_void};
use std::mem::transmute;

type Delete = unsafe extern "C" fn(u32) -> c_int;

unsafe extern "C" {
    /// libc's own function by its other name. Not looked up with dlsym like the rest: libdl of glibc
    /// before 2.34 makes a key inside its first dlsym, and would wait for itself.
    fn __pthread_key_create(key: *mut u32, dtor: Option<KeyDtor>) -> c_int;
}

static DELETE: Next = Next::new(c"pthread_key_delete");

/// POSIX's function: also writes the destructor down.
///
/// # Safety
/// As POSIX says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pthread_key_create(key: *mut u32, dtor: Option<KeyDtor>) -> c_int {
    // SAFETY: libc's function of that name and type, with the caller's arguments; the key is written
    // when it answers 0.
    unsafe {
        let rc = __pthread_key_create(key, dtor);
        if rc == 0 {
            key_created(*key, dtor);
        }
        rc
    }
}

/// POSIX's function. Forgets first: once libc has freed the number, another thread may get it anew.
///
/// # Safety
/// As POSIX says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pthread_key_delete(key: u32) -> c_int {
    key_deleted(key);
    // SAFETY: libc's function of that name and type, with the caller's argument.
    unsafe { transmute::<*mut c_void, Delete>(DELETE.get())(key) }
}

/// C11's `thrd_success`, `thrd_nomem` and `thrd_error`.
const THRD_SUCCESS: c_int = 0;
const THRD_NOMEM: c_int = 3;
const THRD_ERROR: c_int = 2;

/// C11's function. Not libc's own, which makes the key where we do not see it.
///
/// # Safety
/// As the standard says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tss_create(key: *mut u32, dtor: Option<KeyDtor>) -> c_int {
    // SAFETY: the caller's arguments; a `tss_t` is a key.
    match unsafe { pthread_key_create(key, dtor) } {
        0 => THRD_SUCCESS,
        libc::ENOMEM => THRD_NOMEM,
        _ => THRD_ERROR,
    }
}

/// C11's function.
///
/// # Safety
/// As the standard says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tss_delete(key: u32) {
    // SAFETY: the caller's argument.
    unsafe { pthread_key_delete(key) };
}
