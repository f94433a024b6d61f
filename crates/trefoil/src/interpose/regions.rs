//! Calls that are known to block, and cannot be waited for otherwise: the P goes to another thread at once.

use super::{Next, may_park};
use crate::blocking;
use std::ffi::{c_char, c_int, c_void};
use std::mem::transmute;

macro_rules! region {
    ($(#[$doc:meta])* $static:ident = $symbol:literal,
     $name:ident($($arg:ident: $type:ty),*) -> $ret:ty, unless $cheap:expr) => {
        static $static: Next = Next::new($symbol);

        $(#[$doc])*
        ///
        /// # Safety
        /// As its manual page says.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> $ret {
            type Real = unsafe extern "C" fn($($type),*) -> $ret;
            // SAFETY: libc's function of that name and type, with the caller's arguments.
            let real = || unsafe { transmute::<*mut c_void, Real>($static.get())($($arg),*) };
            if $cheap || !may_park() { real() } else { blocking(real) }
        }
    };
}

region! {
    /// libc's function.
    GETADDRINFO = c"getaddrinfo",
    getaddrinfo(node: *const c_char, service: *const c_char, hints: *const libc::addrinfo,
        found: *mut *mut libc::addrinfo) -> c_int, unless false
}
region! {
    /// libc's function.
    WAITPID = c"waitpid",
    waitpid(pid: libc::pid_t, status: *mut c_int, options: c_int) -> libc::pid_t,
    unless options & libc::WNOHANG != 0
}
region! {
    /// libc's function.
    WAITID = c"waitid",
    waitid(kind: libc::idtype_t, id: libc::id_t, info: *mut libc::siginfo_t, options: c_int) -> c_int,
    unless options & libc::WNOHANG != 0
}
region! {
    /// libc's function.
    FLOCK = c"flock", flock(fd: c_int, operation: c_int) -> c_int,
    unless operation & libc::LOCK_NB != 0 || operation == libc::LOCK_UN
}
region! {
    /// libc's function.
    FSYNC = c"fsync", fsync(fd: c_int) -> c_int, unless false
}
region! {
    /// libc's function.
    FDATASYNC = c"fdatasync", fdatasync(fd: c_int) -> c_int, unless false
}
