//! `recv`, `send`, `accept` and related calls.

use super::retry::{RetryDecision, is_ready, retry_until_ready, wait_ready};
use super::simulated;
use super::write_all::{CallMode, Part, Window, total_of, write_whole};
use super::{EAGAIN, is_nonblocking, socket_option, timeout_deadline};
use crate::interpose::fds;
use crate::sched::netpoll::pollable::Direction;
use crate::sys::raw::syscall;
use libc::{msghdr, size_t, sockaddr, socklen_t, ssize_t};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

/// With one of these flags a call does not block, or one attempt is not enough for it. Such a call
/// is passed to the kernel unchanged.
const UNCHANGED_FLAGS: c_int = libc::MSG_DONTWAIT | libc::MSG_WAITALL | libc::MSG_ERRQUEUE;

/// The same for a call that sends: each part of a `MSG_ZEROCOPY` would have its own notification.
const SEND_UNCHANGED_FLAGS: c_int = UNCHANGED_FLAGS | libc::MSG_ZEROCOPY;

/// Set when the program first sets a low-water mark (`SO_RCVLOWAT`). Accepted sockets inherit it.
static USES_LOW_WATER: AtomicBool = AtomicBool::new(false);

/// Notes that the program sets a low-water mark.
pub(super) fn note_low_water() {
    USES_LOW_WATER.store(true, Ordering::Relaxed);
}

/// How a read is made.
pub(super) enum ReadCall {
    /// Without blocking, and again when the descriptor is ready.
    Usual,
    /// Unchanged: the data that it waits for has arrived, or the kernel must do the waiting.
    Unchanged,
    /// Once, without blocking: its timeout has passed.
    Once,
    /// Not at all: the wait has failed, and the call returns this result.
    Return(isize),
}

/// Returns how a read of `len` bytes from a socket is made. If the socket has a low-water mark,
/// waits until that many bytes have arrived: a call that does not block would return fewer.
#[inline]
pub(super) fn wait_low_water(fd: c_int, len: impl FnOnce() -> usize) -> ReadCall {
    if USES_LOW_WATER.load(Ordering::Relaxed) {
        wait_low_water_slow(fd, len())
    } else {
        ReadCall::Usual
    }
}

#[cold]
fn wait_low_water_slow(fd: c_int, len: usize) -> ReadCall {
    let mark = socket_option(fd, libc::SO_RCVLOWAT).map_or(0, |mark| mark as usize);
    if mark <= 1
        || len <= 1
        || socket_option(fd, libc::SO_TYPE) != Some(libc::SOCK_STREAM)
        || is_nonblocking(fd) != Ok(false)
    {
        return ReadCall::Usual;
    }
    let deadline = timeout_deadline(fd, Direction::Read);
    loop {
        let mut available: c_int = 0;
        let args = [fd as usize, libc::FIONREAD as usize, &raw mut available as usize];
        // SAFETY: the kernel writes an int.
        let rc = unsafe { syscall(libc::SYS_ioctl, args) };
        // Ready with less: the end of the stream, an error, or a Unix socket, which is ready with a
        // single byte.
        if rc != 0 || available as usize >= mark.min(len) || is_ready(fd, libc::POLLIN) {
            return ReadCall::Unchanged;
        }
        match wait_ready(fd, Direction::Read, deadline, None) {
            RetryDecision::Retry => {}
            RetryDecision::Return(EAGAIN) => return ReadCall::Once,
            RetryDecision::Return(result) => return ReadCall::Return(result),
            RetryDecision::Block => return ReadCall::Unchanged,
        }
    }
}

/// Receives up to `len` bytes by `call`, which gets the flags.
#[inline]
fn receive(
    fd: c_int,
    flags: c_int,
    len: impl FnOnce() -> usize,
    call: impl Fn(c_int) -> isize,
) -> isize {
    if flags & UNCHANGED_FLAGS != 0 {
        return call(flags);
    }
    let attempt = || call(flags | libc::MSG_DONTWAIT);
    match wait_low_water(fd, len) {
        ReadCall::Usual => retry_until_ready(fd, Direction::Read, attempt, || call(flags)),
        ReadCall::Unchanged => call(flags),
        ReadCall::Once => attempt(),
        ReadCall::Return(result) => result,
    }
}

interpose! {
    /// libc's function.
    fn recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t;
    on_goroutine => receive_from(fd, buf as usize, len, flags, 0, 0)
}

interpose! {
    /// libc's function.
    fn recvfrom(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int,
        addr: *mut sockaddr, addr_len: *mut socklen_t) -> ssize_t;
    on_goroutine => receive_from(fd, buf as usize, len, flags, addr as usize, addr_len as usize)
}

/// `recvfrom`.
pub(super) unsafe fn receive_from(
    fd: c_int,
    buf: usize,
    len: usize,
    flags: c_int,
    addr: usize,
    addr_len: usize,
) -> isize {
    if let Some(network) = simulated::network_of(fd)
        && addr != 0
        && addr_len != 0
    {
        // SAFETY: the caller's contract.
        return unsafe {
            let (to, to_len) = (addr as *mut sockaddr, addr_len as *mut socklen_t);
            simulated::receive_from(&network, fd, to, to_len, |addr, addr_len| {
                receive_by_kernel(fd, buf, len, flags, addr, addr_len)
            })
        };
    }
    // SAFETY: the caller's contract.
    unsafe { receive_by_kernel(fd, buf, len, flags, addr, addr_len) }
}

/// `recvfrom` of a socket of the kernel.
unsafe fn receive_by_kernel(
    fd: c_int,
    buf: usize,
    len: usize,
    flags: c_int,
    addr: usize,
    addr_len: usize,
) -> isize {
    receive(
        fd,
        flags,
        || len,
        |flags| {
            let args = [fd as usize, buf, len, flags as usize, addr, addr_len];
            // SAFETY: the caller's contract.
            unsafe { syscall(libc::SYS_recvfrom, args) }
        },
    )
}

interpose! {
    /// libc's function.
    fn recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t;
    on_goroutine => {
        let by_kernel = |msg: *mut msghdr| {
            let len = || total_of((*msg).msg_iov, (*msg).msg_iovlen);
            receive(fd, flags, len, |flags| {
                syscall(libc::SYS_recvmsg, [fd as usize, msg as usize, flags as usize])
            })
        };
        match simulated::network_of(fd) {
            Some(network) if !msg.is_null() && !(*msg).msg_name.is_null() => {
                simulated::receive_message(&network, fd, msg, by_kernel)
            }
            _ => by_kernel(msg),
        }
    }
}

interpose! {
    /// libc's function.
    fn send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t;
    on_goroutine => send_to(fd, buf, len, flags, 0, 0)
}

interpose! {
    /// libc's function.
    fn sendto(fd: c_int, buf: *const c_void, len: size_t, flags: c_int,
        addr: *const sockaddr, addr_len: socklen_t) -> ssize_t;
    on_goroutine => send_to(fd, buf, len, flags, addr as usize, addr_len as usize)
}

/// `sendto`.
pub(super) unsafe fn send_to(
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
    addr: usize,
    addr_len: usize,
) -> isize {
    let (mut addr, mut addr_len) = (addr, addr_len);
    let target;
    if let Some(network) = simulated::network() {
        // SAFETY: the caller's contract.
        match unsafe { network.target(fd, addr as *const sockaddr, addr_len as socklen_t) } {
            Some(Ok(found)) => {
                target = found;
                (addr, addr_len) = (&raw const target.0 as usize, target.1);
            }
            Some(Err(error)) => return error,
            None => {}
        }
    }
    let attempt = |part: Part, mode: CallMode| {
        let (at, left) = (buf as usize + part.start(), len - part.start());
        let (addr, addr_len) = if part == Part::Whole { (addr, addr_len) } else { (0, 0) };
        let flags = mode.flags(part.flags(flags)) as usize;
        // SAFETY: the caller's buffer, beginning at `at`.
        unsafe { syscall(libc::SYS_sendto, [fd as usize, at, left, flags, addr, addr_len]) }
    };
    if flags & SEND_UNCHANGED_FLAGS != 0 {
        return attempt(Part::Whole, CallMode::Blocking);
    }
    write_whole(fd, || len, attempt)
}

interpose! {
    /// libc's function.
    fn sendmsg(fd: c_int, msg: *const msghdr, flags: c_int) -> ssize_t;
    on_goroutine => send_message(fd, msg, flags)
}

/// `sendmsg`.
unsafe fn send_message(fd: c_int, msg: *const msghdr, flags: c_int) -> isize {
    let mut msg = msg;
    let (target, mut with_target);
    if let Some(network) = simulated::network().filter(|_| !msg.is_null()) {
        // SAFETY: the caller's message.
        match unsafe { network.target(fd, (*msg).msg_name.cast(), (*msg).msg_namelen) } {
            Some(Ok(found)) => {
                target = found;
                // SAFETY: as above.
                with_target = unsafe { *msg };
                with_target.msg_name = (&raw const target.0).cast_mut().cast();
                with_target.msg_namelen = target.1 as socklen_t;
                msg = &raw const with_target;
            }
            Some(Err(error)) => return error,
            None => {}
        }
    }
    let attempt = |part: Part, mode: CallMode| {
        let send = |msg: *const msghdr| {
            let flags = mode.flags(part.flags(flags)) as usize;
            // SAFETY: the caller's message, or a part of it.
            unsafe { syscall(libc::SYS_sendmsg, [fd as usize, msg as usize, flags]) }
        };
        match part {
            Part::Whole => send(msg),
            // SAFETY: the kernel has read the caller's vectors. Zeros are a message without an
            // address and control data.
            Part::After(start) => unsafe {
                let mut window = Window::new((*msg).msg_iov, (*msg).msg_iovlen, start);
                let mut rest: msghdr = std::mem::zeroed();
                rest.msg_iov = window.vectors.as_mut_ptr();
                rest.msg_iovlen = window.count;
                send(&raw const rest)
            },
        }
    };
    if flags & SEND_UNCHANGED_FLAGS != 0 {
        return attempt(Part::Whole, CallMode::Blocking);
    }
    // SAFETY: as above.
    write_whole(fd, || unsafe { total_of((*msg).msg_iov, (*msg).msg_iovlen) }, attempt)
}

interpose! {
    /// libc's function.
    fn accept(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int;
    on_goroutine => accept_when_ready(fd, addr, len, 0)
}

interpose! {
    /// libc's function.
    fn accept4(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int;
    on_goroutine => accept_when_ready(fd, addr, len, flags)
}

/// `accept4`.
unsafe fn accept_when_ready(
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> isize {
    if let Some(network) = simulated::network_of(fd) {
        // SAFETY: the caller's contract.
        return unsafe { simulated::accept(&network, fd, addr, len, flags) };
    }
    let real = || {
        let args = [fd as usize, addr as usize, len as usize, flags as usize];
        // SAFETY: the caller's contract.
        let fd = unsafe { syscall(libc::SYS_accept4, args) };
        fds::after_accept(fd as c_int);
        fd
    };
    // `accept4` has no flag for an attempt without blocking. If another thread accepts the
    // connection first, this thread blocks. A socket that does not listen is never ready, and the
    // call on it fails at once.
    let attempt = || {
        let would_block =
            !is_ready(fd, libc::POLLIN) && socket_option(fd, libc::SO_ACCEPTCONN) == Some(1);
        if would_block { EAGAIN } else { real() }
    };
    retry_until_ready(fd, Direction::Read, attempt, real)
}
