//! pthread keys: glibc runs their destructors at a *thread's* end. For a goroutine's end we must know
//! them; `mem::tls` keeps the table and runs them.

use super::Next;
use crate::mem::tls::{KeyDtor, key_created, key_deleted};
use std::ffi::{c_int, c_void};
use std::mem::transmute;

type Create = unsafe extern "C" fn(*mut u32, Option<KeyDtor>) -> c_int;
type Delete = unsafe extern "C" fn(u32) -> c_int;

static CREATE: Next = Next::new(c"pthread_key_create");
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
        let rc = transmute::<*mut c_void, Create>(CREATE.get())(key, dtor);
        if rc == 0 {
            key_created(*key, dtor);
        }
        rc
    }
}

/// The same by the name that libstdc++ and old C code use.
///
/// # Safety
/// As POSIX says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn __pthread_key_create(
    key: *mut u32,
    dtor: Option<KeyDtor>,
) -> c_int {
    // SAFETY: the caller's.
    unsafe { pthread_key_create(key, dtor) }
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
