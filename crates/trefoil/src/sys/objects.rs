//! What is loaded: the program and its libraries, with their program headers.
//!
//! The loader holds a lock meanwhile that others need: who loads or unloads a library, and through them who
//! starts a thread. So a goroutine is not stopped in here: nobody might be there to resume it.

use super::lock::Pin;
use std::ffi::{c_int, c_void};

type Each<'a> = &'a mut dyn FnMut(&libc::dl_phdr_info, &[libc::Elf64_Phdr]);

/// Calls `f` for each loaded object, under the loader's lock: they stay mapped until it returns.
pub(crate) fn for_each(mut f: impl FnMut(&libc::dl_phdr_info, &[libc::Elf64_Phdr])) {
    unsafe extern "C" fn each(info: *mut libc::dl_phdr_info, size: usize, f: *mut c_void) -> c_int {
        // An old libc's record is shorter.
        if size >= size_of::<libc::dl_phdr_info>() {
            // SAFETY: the loader's record and its table of headers, valid during the call; `f` is what is passed below.
            unsafe {
                let (info, f) = (&*info, &mut *f.cast::<Each<'_>>());
                f(info, std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()));
            }
        }
        0
    }
    let mut f: Each<'_> = &mut f;
    let _pin = Pin::new();
    // SAFETY: `each` uses `f`, by its type, only during the call.
    unsafe { libc::dl_iterate_phdr(Some(each), (&raw mut f).cast()) };
}
