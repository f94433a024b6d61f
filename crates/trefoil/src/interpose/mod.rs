//! Doors of libc that we stand in: a symbol defined here is found before libc's own.
//!
//! Rules for every door:
//! 1. On a plain thread, before the runtime starts and before `main`, a call goes straight to the real
//!    function and leaves errno as that left it.
//! 2. The real function is the next definition after ours (`Next`), looked up once.
//! 3. "On a goroutine" is decided by the goroutine's own TLS variable, never by the GS base alone: a
//!    std::thread that a goroutine started inherits that.
//!
//! The linker takes an object of an rlib only if somebody asks for one of its symbols. rustc asks for
//! every `no_mangle` function when it links a program, so the doors are always there; `linked` says so
//! to other linkers too.

mod attr;
pub(crate) mod dlopen;
mod keys;
pub(crate) mod setxid;
pub(crate) mod signals;

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// The real function behind a door.
pub(crate) struct Next {
    name: &'static CStr,
    at: AtomicPtr<c_void>,
}

impl Next {
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self { name, at: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Its address. Two threads may look it up at the same time: both find the same.
    #[inline]
    pub(crate) fn get(&self) -> *mut c_void {
        // Relaxed: the address is all there is, nothing is read through it but code.
        let at = self.at.load(Ordering::Relaxed);
        if at.is_null() { self.get_slow() } else { at }
    }

    #[cold]
    fn get_slow(&self) -> *mut c_void {
        // SAFETY: a C string and a pseudo handle.
        let at = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        if at.is_null() {
            eprintln!("fatal error: trefoil: libc has no {}", self.name.to_string_lossy());
            std::process::abort();
        }
        self.at.store(at, Ordering::Relaxed);
        at
    }
}

/// Names every door, so that none is left out of the program. Called once at the runtime's start.
pub(crate) fn linked() {
    std::hint::black_box([
        keys::pthread_key_create as *const (),
        keys::pthread_key_delete as *const (),
        attr::pthread_getattr_np as *const (),
        dlopen::dlopen as *const (),
        dlopen::dlmopen as *const (),
        dlopen::dlclose as *const (),
    ]);
}
