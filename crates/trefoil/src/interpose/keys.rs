//! pthread keys: glibc runs their destructors at a *thread's* end. For a goroutine's end we must know
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
