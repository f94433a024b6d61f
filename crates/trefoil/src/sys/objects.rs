//! What is loaded: the program and its libraries, with their program headers.
//!
//! The loader holds a lock meanwhile that others need: who loads or unloads a library, and through them who
//! starts a thread. So a goroutine is not stopped in here: nobody might be there to resume it.

use super::lock::Pin;
use std::ffi::{c_int, c_void};

/// Calls `f` for each loaded object, under the loader's lock: they stay mapped until it returns.
pub(crate) fn for_each(mut f: impl FnMut(&libc::dl_phdr_info, &[libc::Elf64_Phdr])) {
    unsafe extern "C" fn each<F>(
        info: *mut libc::dl_phdr_info,
        size: usize,
        f: *mut c_void,
    ) -> c_int
    where
        F: FnMut(&libc::dl_phdr_info, &[libc::Elf64_Phdr]),
    {
        // An old libc's record is shorter.
        if size >= size_of::<libc::dl_phdr_info>() {
            // SAFETY: the loader's record and its table of headers, valid during the call; `f` is the closure below.
            unsafe {
                let headers =
                    std::slice::from_raw_parts((*info).dlpi_phdr, (*info).dlpi_phnum.into());
                (*f.cast::<F>())(&*info, headers);
            }
        }
        0
    }
    fn callback<F: FnMut(&libc::dl_phdr_info, &[libc::Elf64_Phdr])>(
        _: &F,
    ) -> unsafe extern "C" fn(*mut libc::dl_phdr_info, usize, *mut c_void) -> c_int {
        each::<F>
    }
    let each = callback(&f);
    let _pin = Pin::new();
    // SAFETY: `each` matches the closure's type, and uses it only during the call.
    unsafe { libc::dl_iterate_phdr(Some(each), (&raw mut f).cast()) };
}
