//! `read`, `write`, `readv`, `writev`.

use super::retry::{poll_then_call, retry_until_ready};
use super::sockets::{ReadCall, receive_from, send_to, wait_low_water};
use super::write_all::{CallMode, Part, Window, total_of, write_whole};
use super::{ENOTSOCK, EOPNOTSUPP, is_regular, is_socket};
use crate::sched::netpoll::pollable::Direction;
use crate::sched::simulation::point;
use crate::sys::clock;
use crate::sys::outputs;
use crate::sys::raw::syscall;
use libc::{iovec, msghdr, size_t, ssize_t};
use std::ffi::{c_int, c_long, c_void};

const RWF_NOWAIT: usize = 8;
const ENOSYS: isize = -(libc::ENOSYS as isize);

/// Reads or writes vectors without blocking, by `preadv2` or `pwritev2`. The offset −1 is the
/// file's position.
unsafe fn vectored(number: c_long, fd: c_int, vectors: usize, count: usize) -> isize {
    let args = [fd as usize, vectors, count, usize::MAX, usize::MAX, RWF_NOWAIT];
    // SAFETY: the caller's contract.
    match unsafe { syscall(number, args) } {
        // An emulator or a sandbox does not have the call: as for a file that does not support it.
        ENOSYS => EOPNOTSUPP,
        result => result,
    }
}

interpose! {
    /// libc's function.
    fn read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t;
    on_goroutine => {
        point_at(fd);
        let real = || syscall(libc::SYS_read, [fd as usize, buf as usize, len]);
        // The cached kind may be that of another file, hence `ENOTSOCK`. A read of no bytes returns
        // at once; a `recv` does not.
        let is_socket = len != 0 && is_socket(fd);
        let received =
            if is_socket { receive_from(fd, buf as usize, len, 0, 0, 0) } else { ENOTSOCK };
        if received != ENOTSOCK {
            received
        } else if len == 0 || is_regular(fd) {
            real()
        } else {
            let one = iovec { iov_base: buf, iov_len: len };
            let at = &raw const one as usize;
            let attempt = || vectored(libc::SYS_preadv2, fd, at, 1);
            retry_until_ready(fd, Direction::Read, attempt, || poll_then_call(fd, Direction::Read, real))
        }
    }
}

interpose! {
    /// libc's function.
    fn write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t;
    on_goroutine => {
        outputs::note_writer(fd);
        point_at(fd);
        // The vectored form would send no empty datagram.
        let is_empty_datagram = len == 0 && is_socket(fd);
        let sent = if is_empty_datagram { send_to(fd, buf, 0, 0, 0, 0) } else { ENOTSOCK };
        if sent != ENOTSOCK {
            sent
        } else if len == 0 || is_regular(fd) {
            syscall(libc::SYS_write, [fd as usize, buf as usize, len])
        } else {
            let one = iovec { iov_base: buf.cast_mut(), iov_len: len };
            let real = |at: *const iovec, _| {
                let (base, len) = ((*at).iov_base, (*at).iov_len);
                syscall(libc::SYS_write, [fd as usize, base as usize, len])
            };
            write_vectors(fd, &raw const one, 1, real)
        }
    }
}

/// Writes to a file that is not a regular one. `real` is the blocking call; it gets some of the
/// vectors.
unsafe fn write_vectors(
    fd: c_int,
    vectors: *const iovec,
    count: usize,
    real: impl Fn(*const iovec, usize) -> isize,
) -> isize {
    let call = |part: Part, mode: CallMode, vectors: *const iovec, count: usize| match (part, mode)
    {
        (Part::After(_), _) if is_socket(fd) => {
            // SAFETY: zeros are a message without an address and control data; the caller's
            // vectors.
            unsafe {
                let mut rest: msghdr = std::mem::zeroed();
                rest.msg_iov = vectors.cast_mut();
                rest.msg_iovlen = count;
                let flags = mode.flags(libc::MSG_NOSIGNAL) as usize;
                syscall(libc::SYS_sendmsg, [fd as usize, &raw const rest as usize, flags])
            }
        }
        // SAFETY: the caller's vectors.
        (_, CallMode::NonBlocking) => unsafe {
            vectored(libc::SYS_pwritev2, fd, vectors as usize, count)
        },
        (_, CallMode::Blocking) => poll_then_call(fd, Direction::Write, || real(vectors, count)),
    };
    let attempt = |part: Part, mode: CallMode| match part {
        Part::Whole => call(part, mode, vectors, count),
        Part::After(start) => {
            // SAFETY: the kernel has read the caller's vectors.
            let window = unsafe { Window::new(vectors, count, start) };
            call(part, mode, window.vectors.as_ptr(), window.count)
        }
    };
    // SAFETY: as above.
    write_whole(fd, || unsafe { total_of(vectors, count) }, attempt)
}

/// In a simulation: the caller may be preempted at this call, unless it prints.
#[inline(always)]
fn point_at(fd: c_int) {
    if clock::has_simulations() && fd > libc::STDERR_FILENO {
        point();
    }
}

/// Returns whether there are vectors, and no more than the kernel accepts.
fn is_vector_count(count: c_int) -> bool {
    (1..=libc::UIO_MAXIOV).contains(&count)
}

interpose! {
    /// libc's function.
    fn readv(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t;
    on_goroutine => {
        let (at, len) = (vectors as usize, count as usize);
        point_at(fd);
        let real = || syscall(libc::SYS_readv, [fd as usize, at, len]);
        let attempt = || vectored(libc::SYS_preadv2, fd, at, len);
        let total = || if is_vector_count(count) { total_of(vectors, len) } else { 0 };
        if is_regular(fd) {
            real()
        } else {
            match if is_socket(fd) { wait_low_water(fd, total) } else { ReadCall::Usual } {
                ReadCall::Usual => retry_until_ready(fd, Direction::Read, attempt, || {
                    poll_then_call(fd, Direction::Read, real)
                }),
                ReadCall::Unchanged => real(),
                ReadCall::Once => attempt(),
                ReadCall::Return(result) => result,
            }
        }
    }
}

interpose! {
    /// libc's function.
    fn writev(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t;
    on_goroutine => {
        point_at(fd);
        let real = |at: *const iovec, count: usize| {
            syscall(libc::SYS_writev, [fd as usize, at as usize, count])
        };
        if is_regular(fd) || !is_vector_count(count) {
            real(vectors, count as usize)
        } else {
            write_vectors(fd, vectors, count as usize, real)
        }
    }
}
