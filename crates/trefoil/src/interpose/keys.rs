//! pthread keys, and C11's `tss_t`, which are the same. glibc runs their destructors at a
//! *thread's* end. `mem::tls` keeps a table of the destructors, so that a goroutine's end can run
//! them.

use crate::mem::tls::{KeyDtor, key_created, key_deleted};
use std::ffi::c_int;

unsafe extern "C" {
    /// libc's own function by its other name. Not looked up by `dlsym`: libdl of glibc before
    /// 2.34 makes a key inside the first call of `dlsym`, and would wait for itself.
    fn __pthread_key_create(key: *mut u32, dtor: Option<KeyDtor>) -> c_int;
}

interpose! {
    /// POSIX's function. Adds the destructor to the table.
    fn pthread_key_create(key: *mut u32, dtor: Option<KeyDtor>) -> c_int;
    always => {
        let rc = __pthread_key_create(key, dtor);
        if rc == 0 {
            key_created(*key, dtor);
        }
        rc
    }
}

interpose! {
    /// POSIX's function. Removes the destructor first: once libc has freed the key, another thread
    /// may be given the same one.
    fn pthread_key_delete(key: u32) -> c_int;
    with real => {
        key_deleted(key);
        real(key)
    }
}

/// C11's `thrd_success`, `thrd_nomem` and `thrd_error`.
const THRD_SUCCESS: c_int = 0;
const THRD_NOMEM: c_int = 3;
const THRD_ERROR: c_int = 2;

interpose! {
    /// C11's function. libc's own would create the key without calling [`pthread_key_create`].
    fn tss_create(key: *mut u32, dtor: Option<KeyDtor>) -> c_int;
    always => match pthread_key_create(key, dtor) {
        0 => THRD_SUCCESS,
        libc::ENOMEM => THRD_NOMEM,
        _ => THRD_ERROR,
    }
}

interpose! {
    /// C11's function.
    fn tss_delete(key: u32) -> ();
    always => {
        pthread_key_delete(key);
    }
}
