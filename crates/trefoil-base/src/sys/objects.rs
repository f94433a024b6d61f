//! The loaded objects: the program and its libraries, with their program headers.
//!
//! During the walk the loader holds a lock that a thread needs to load or unload a library, or to
//! start a thread. So the calling goroutine is not preempted in here: a thread that has to be
//! started to resume it would wait for that lock.

use super::lock::PreemptGuard;
use std::ffi::{c_int, c_void};

/// How many objects the loader has added and removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Version {
    added: u64,
    removed: u64,
}

impl Version {
    /// The version before the program was loaded.
    pub const NONE: Version = Version { added: 0, removed: 0 };

    /// Returns the version at which [`for_each`] visits this object.
    pub fn of(info: &libc::dl_phdr_info) -> Version {
        Version { added: info.dlpi_adds, removed: info.dlpi_subs }
    }

    /// Returns the version of the objects that are loaded now.
    pub fn now() -> Version {
        let mut version = Version::NONE;
        for_each(|info, _| version = Version::of(info));
        version
    }
}

type Visitor<'a> = &'a mut dyn FnMut(&libc::dl_phdr_info, &[libc::Elf64_Phdr]);

/// Calls `f` for each loaded object, under the loader's lock: the objects stay mapped until `f`
/// returns.
pub fn for_each(mut f: impl FnMut(&libc::dl_phdr_info, &[libc::Elf64_Phdr])) {
    unsafe extern "C" fn each(info: *mut libc::dl_phdr_info, size: usize, f: *mut c_void) -> c_int {
        // The record of an old libc is shorter.
        if size >= size_of::<libc::dl_phdr_info>() {
            // SAFETY: the loader's record and its table of headers are valid during the call; `f`
            // is what is passed below.
            unsafe {
                let (info, f) = (&*info, &mut *f.cast::<Visitor<'_>>());
                f(info, std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()));
            }
        }
        0
    }
    let mut f: Visitor<'_> = &mut f;
    let _guard = PreemptGuard::new();
    // SAFETY: `each` uses `f`, by its type, only during the call.
    unsafe { libc::dl_iterate_phdr(Some(each), (&raw mut f).cast()) };
}
