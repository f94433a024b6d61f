//! Calls that are known to block, and for which no event can be waited for instead: another thread
//! gets the P before the call.

use super::park::may_park;
use crate::sched::calls;
use std::ffi::{c_char, c_int};

/// Calls `real` without a P if the caller is a goroutine that may park, and as it is otherwise.
fn blocking<T>(real: impl FnOnce() -> T) -> T {
    if may_park() { calls::blocking(real) } else { real() }
}

interpose! {
    /// libc's function.
    fn getaddrinfo(node: *const c_char, service: *const c_char, hints: *const libc::addrinfo,
        found: *mut *mut libc::addrinfo) -> c_int;
    with real => blocking(|| real(node, service, hints, found))
}

interpose! {
    /// libc's function.
    fn waitpid(pid: libc::pid_t, status: *mut c_int, options: c_int) -> libc::pid_t;
    with real => {
        let real = || real(pid, status, options);
        if options & libc::WNOHANG != 0 { real() } else { blocking(real) }
    }
}

interpose! {
    /// libc's function.
    fn waitid(kind: libc::idtype_t, id: libc::id_t, info: *mut libc::siginfo_t,
        options: c_int) -> c_int;
    with real => {
        let real = || real(kind, id, info, options);
        if options & libc::WNOHANG != 0 { real() } else { blocking(real) }
    }
}

interpose! {
    /// libc's function.
    fn flock(fd: c_int, operation: c_int) -> c_int;
    with real => {
        let real = || real(fd, operation);
        let never_blocks = operation & libc::LOCK_NB != 0 || operation == libc::LOCK_UN;
        if never_blocks { real() } else { blocking(real) }
    }
}

interpose! {
    /// libc's function.
    fn fsync(fd: c_int) -> c_int;
    with real => blocking(|| real(fd))
}

interpose! {
    /// libc's function.
    fn fdatasync(fd: c_int) -> c_int;
    with real => blocking(|| real(fd))
}
