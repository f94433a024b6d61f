//! Calls that are known to block, and for which no event can be waited for instead: another thread
//! gets the P before the call.

use super::park::{may_park, on_goroutine};
use crate::sched::calls;
use crate::sched::simulation::point;
use crate::simnet;
use crate::sys::clock;
use std::ffi::{CStr, CString, c_char, c_int};
use std::net::{IpAddr, Ipv4Addr};

/// Calls `real` without a P if the caller is a goroutine that may park, and as it is otherwise.
fn blocking<T>(real: impl FnOnce() -> T) -> T {
    if may_park() { calls::blocking(real) } else { real() }
}

/// In a simulation: returns the address of the host with the name `node`, as text. None in it means
/// that `node` is null or an address already.
///
/// # Errors
/// `EAI_NONAME` if the simulation has no such host.
///
/// # Safety
/// `node` is null or a C string.
unsafe fn simulated_host(node: *const c_char) -> Option<Result<Option<CString>, c_int>> {
    let network = if on_goroutine() { simnet::here()? } else { return None };
    if node.is_null() {
        return Some(Ok(None));
    }
    // SAFETY: the caller's contract.
    let name = unsafe { CStr::from_ptr(node) }.to_string_lossy();
    if name.parse::<IpAddr>().is_ok() {
        return Some(Ok(None));
    }
    let address = match &*name {
        "localhost" => Some(Ipv4Addr::LOCALHOST),
        name => network.address_of(name),
    };
    let text = address.and_then(|address| CString::new(address.to_string()).ok());
    Some(text.map(Some).ok_or(libc::EAI_NONAME))
}

/// In a simulation: notes that a file on a simulated disk is durable, and returns true.
fn simulated_sync(fd: c_int) -> bool {
    if !clock::has_simulations() || !on_goroutine() {
        return false;
    }
    point();
    simnet::here().is_some_and(|network| network.sync(fd))
}

interpose! {
    /// libc's function.
    fn getaddrinfo(node: *const c_char, service: *const c_char, hints: *const libc::addrinfo,
        found: *mut *mut libc::addrinfo) -> c_int;
    with real => match simulated_host(node) {
        // A number needs no lookup.
        Some(Ok(Some(address))) => real(address.as_ptr(), service, hints, found),
        Some(Ok(None)) => real(node, service, hints, found),
        Some(Err(error)) => error,
        None => blocking(|| real(node, service, hints, found)),
    }
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
    with real => if simulated_sync(fd) { 0 } else { blocking(|| real(fd)) }
}

interpose! {
    /// libc's function.
    fn fdatasync(fd: c_int) -> c_int;
    with real => if simulated_sync(fd) { 0 } else { blocking(|| real(fd)) }
}
