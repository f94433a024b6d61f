//! Calls whose addresses or options a simulated network replaces (`simnet/`): `bind`, `listen`,
//! `getsockname`, `getpeername`, `getsockopt`; and the simulated forms of calls in other files.
//!
//! Outside a simulation each call costs one load more than libc's function.

use super::connect::wait_connected;
use super::is_nonblocking;
use super::retry::{is_ready, retry_until_ready};
use crate::interpose::fds;
use crate::interpose::park::on_goroutine;
use crate::sched::netpoll::pollable::Direction;
use crate::sched::simulation::point;
use crate::simnet::sockets::{Side, make_marked, source, write_address};
use crate::simnet::{self, Network};
use crate::sys::clock;
use crate::sys::raw::{syscall, to_libc};
use libc::{c_int, msghdr, sockaddr, sockaddr_un, socklen_t};
use std::ffi::c_void;
use std::os::fd::RawFd;
use std::sync::Arc;

const EAGAIN: isize = -(libc::EAGAIN as isize);
const EINPROGRESS: isize = -(libc::EINPROGRESS as isize);

/// Returns the network in which the caller is simulated. Such a call is one at which the caller may
/// be preempted.
#[inline(always)]
pub(super) fn network() -> Option<Arc<Network>> {
    if clock::has_simulations() { network_slow() } else { None }
}

#[cold]
fn network_slow() -> Option<Arc<Network>> {
    if !on_goroutine() {
        return None;
    }
    point();
    simnet::here()
}

/// As [`network`], if `fd` is a simulated socket.
#[inline(always)]
pub(super) fn network_of(fd: RawFd) -> Option<Arc<Network>> {
    network().filter(|network| network.has_socket(fd))
}

interpose! {
    /// libc's function.
    fn bind(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int;
    with real => match network().and_then(|network| network.bind(fd, addr, len)) {
        Some(result) => to_libc(result) as c_int,
        None => real(fd, addr, len),
    }
}

interpose! {
    /// libc's function.
    fn listen(fd: c_int, backlog: c_int) -> c_int;
    with real => {
        if let Some(network) = network() {
            network.before_listen(fd);
        }
        real(fd, backlog)
    }
}

interpose! {
    /// libc's function.
    fn getsockname(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int;
    with real => {
        match network().and_then(|network| network.address(fd, Side::Local, addr, len)) {
            Some(result) => to_libc(result) as c_int,
            None => real(fd, addr, len),
        }
    }
}

interpose! {
    /// libc's function.
    fn getpeername(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int;
    with real => {
        match network().and_then(|network| network.address(fd, Side::Peer, addr, len)) {
            Some(result) => to_libc(result) as c_int,
            None => real(fd, addr, len),
        }
    }
}

interpose! {
    /// libc's function.
    fn getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void,
        len: *mut socklen_t) -> c_int;
    with real => {
        let found = network()
            .and_then(|network| network.option(fd, (level, name), value.cast(), len));
        match found {
            Some(result) => to_libc(result) as c_int,
            None => real(fd, level, name, value, len),
        }
    }
}

/// `connect` of a simulated socket.
///
/// # Safety
/// `addr` has `len` readable bytes.
#[cold]
pub(super) unsafe fn connect(
    network: &Network,
    fd: c_int,
    addr: *const sockaddr,
    len: socklen_t,
) -> Option<isize> {
    // SAFETY: the caller's contract.
    let begun = unsafe { network.connect(fd, addr, len)? };
    if begun != EINPROGRESS || is_nonblocking(fd) != Ok(false) {
        return Some(begun);
    }
    Some(match wait_connected(fd) {
        0 => network.connect_result(fd),
        error => error,
    })
}

/// `accept4` of a simulated listener.
///
/// # Safety
/// `addr` is null, or has `*len` writable bytes.
#[cold]
pub(super) unsafe fn accept(
    network: &Network,
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> isize {
    // SAFETY: null pointers ask for no address.
    let call = || unsafe { syscall(libc::SYS_accept4, [fd as usize, 0, 0, flags as usize]) };
    let note = |accepted: isize| {
        fds::after_accept(accepted as c_int);
        accepted
    };
    // No other thread takes the connection: the call does not block.
    let attempt = || if is_ready(fd, libc::POLLIN) { note(make_marked(call)) } else { EAGAIN };
    let real = || note(call());
    let accepted = retry_until_ready(fd, Direction::Read, attempt, real);
    if accepted >= 0
        && let Some(peer) = network.accepted(accepted as RawFd)
        && !addr.is_null()
        && !len.is_null()
    {
        let family = network.family(accepted as RawFd).unwrap_or(libc::AF_INET);
        // SAFETY: the caller's contract.
        unsafe { write_address(peer, family, addr, &mut *len) };
    }
    accepted
}

/// Receives by `call`, which gets the place for the sender's address, and translates that.
///
/// # Safety
/// `addr` has `*len` writable bytes.
#[cold]
pub(super) unsafe fn receive_from(
    network: &Network,
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
    call: impl FnOnce(usize, usize) -> isize,
) -> isize {
    // SAFETY: zeros are an address without a name.
    let mut raw: sockaddr_un = unsafe { std::mem::zeroed() };
    let mut raw_len = size_of_val(&raw) as socklen_t;
    let received = call(&raw mut raw as usize, &raw mut raw_len as usize);
    if received >= 0 {
        let family = network.family(fd).unwrap_or(libc::AF_INET);
        // SAFETY: the caller's contract.
        unsafe {
            match source(&raw, raw_len as usize) {
                Some(from) => write_address(from, family, addr, &mut *len),
                None => *len = 0,
            }
        }
    }
    received
}

/// `recvmsg` by `call`, which gets a message with another place for the sender's address.
///
/// # Safety
/// `msg` is a message of the caller's.
#[cold]
pub(super) unsafe fn receive_message(
    network: &Network,
    fd: c_int,
    msg: *mut msghdr,
    call: impl FnOnce(*mut msghdr) -> isize,
) -> isize {
    // SAFETY: the caller's message.
    unsafe {
        let (addr, mut len) = ((*msg).msg_name.cast::<sockaddr>(), (*msg).msg_namelen);
        let received = receive_from(network, fd, addr, &raw mut len, |raw, raw_len| {
            (*msg).msg_name = raw as *mut c_void;
            (*msg).msg_namelen = *(raw_len as *const socklen_t);
            let received = call(msg);
            *(raw_len as *mut socklen_t) = (*msg).msg_namelen;
            received
        });
        ((*msg).msg_name, (*msg).msg_namelen) = (addr.cast(), len);
        received
    }
}
