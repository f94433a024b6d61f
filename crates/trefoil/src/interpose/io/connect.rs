//! `connect`, and the end of connections that are in progress.

use super::retry::{RetryDecision, is_ready, wait_ready};
use super::simulated;
use super::{EAGAIN, EALREADY, EBADF, EINPROGRESS, EISCONN, socket_option, timeout_deadline};
use crate::sched::calls;
use crate::sched::netpoll::pollable::Direction;
use crate::sys::raw::{poll_ms, syscall, to_libc};
use libc::{pollfd, sockaddr, socklen_t};
use std::ffi::c_int;

interpose! {
    /// libc's function.
    fn connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int;
    on_goroutine => {
        if let Some(network) = simulated::network()
            && let Some(result) = simulated::connect(&network, fd, addr, len)
        {
            return to_libc(result) as c_int;
        }
        let real = || syscall(libc::SYS_connect, [fd as usize, addr as usize, len as usize]);
        let flags = syscall(libc::SYS_fcntl, [fd as usize, libc::F_GETFL as usize]);
        if flags < 0 || flags & libc::O_NONBLOCK as isize != 0 {
            real()
        } else {
            connect_blocking(fd, flags, real)
        }
    }
}

/// Connects a blocking socket, whose status flags are `flags`; `real` is the system call.
///
/// `connect` has no flag for an attempt without blocking: the socket is non-blocking for the time
/// of the call.
fn connect_blocking(fd: c_int, flags: isize, real: impl Fn() -> isize) -> isize {
    let set_flags = |flags: isize| {
        // SAFETY: passes no pointers.
        unsafe { syscall(libc::SYS_fcntl, [fd as usize, libc::F_SETFL as usize, flags as usize]) }
    };
    set_flags(flags | libc::O_NONBLOCK as isize);
    let started = real();
    set_flags(flags);
    match started {
        // This call, or an earlier one, has begun the connection.
        EINPROGRESS | EALREADY => match wait_connected(fd) {
            // With the second call the kernel records that the connection is established, or begins
            // another one.
            0 => match real() {
                EISCONN => 0,
                result => result,
            },
            EINPROGRESS => started,
            error => error,
        },
        // The listener of a Unix socket has no room: no connection is in progress, and no event
        // tells when there is room.
        EAGAIN => calls::blocking(real),
        result => result,
    }
}

/// Waits until a connection in progress is established or has failed. Returns 0, or the error that
/// ended the wait: `EINPROGRESS` if that is the timeout.
pub(super) fn wait_connected(fd: c_int) -> isize {
    let deadline = timeout_deadline(fd, Direction::Write);
    while !is_ready(fd, libc::POLLOUT) {
        match wait_ready(fd, Direction::Write, deadline, None) {
            RetryDecision::Retry => {}
            RetryDecision::Return(EAGAIN) => return EINPROGRESS,
            RetryDecision::Return(result) => return result,
            RetryDecision::Block => {
                let mut one = pollfd { fd, events: libc::POLLOUT, revents: 0 };
                // SAFETY: one entry of our own.
                unsafe { poll_ms(&raw mut one, 1, usize::MAX) };
            }
        }
    }
    0
}

/// As [`wait_connected`]; if the connection has failed, returns its error.
pub(super) fn finish_connect(fd: c_int) -> isize {
    match wait_connected(fd) {
        // If there is no answer, the descriptor was closed meanwhile.
        0 => socket_option(fd, libc::SO_ERROR).map_or(EBADF, |error| -(error as isize)),
        error => error,
    }
}
