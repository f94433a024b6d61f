//! Calls on one descriptor: `std::net`, pipes and everything that is built on them park the
//! goroutine.
//!
//! | file | what |
//! |---|---|
//! | `retry.rs` | attempts without blocking, and the waits between them |
//! | `write_all.rs` | writes that must be complete |
//! | `read_write.rs` | `read`, `write`, `readv`, `writev` |
//! | `sockets.rs` | `recv`, `send`, `accept` and related calls |
//! | `connect.rs` | `connect`, and connections that a write begins |
//! | `descriptors.rs` | calls that close, make or change a descriptor |
//! | `simulated.rs` | addresses and options of sockets, which a simulated network replaces |
//!
//! On a goroutine a call is tried without blocking, *for this call only* (`MSG_DONTWAIT`,
//! `RWF_NOWAIT`, a poll beforehand): the descriptor's own flags are never changed, because other
//! threads may share it. If the call would block, and the descriptor is a blocking one, the
//! goroutine waits in the poller and tries again. On a descriptor that the program made
//! non-blocking the call fails with `EAGAIN`. `SO_RCVTIMEO` and `SO_SNDTIMEO` are respected, and
//! end a call with `EAGAIN` as in the kernel.
//!
//! A call on a file that cannot be waited for (a regular file), and a call for which waiting is not
//! worth it, is passed to the kernel unchanged: the thread blocks, and loses its P.
//!
//! A blocking write to a stream is complete: further attempts write what the kernel did not take at
//! once ([`write_all::write_whole`]). Only an error or the timeout ends it early, and then it
//! returns how much was written.

pub(super) mod connect;
pub(super) mod descriptors;
pub(super) mod read_write;
mod retry;
pub(super) mod simulated;
pub(super) mod sockets;
mod write_all;

pub(super) use retry::{RetryDecision, after_failed_wait, poll_now, wait_ready};

use super::fds::{self, FileKind};
use crate::sched::netpoll::pollable::Direction;
use crate::sys::clock::{self, NEVER, Nanos};
use crate::sys::raw::syscall;
use std::ffi::c_int;

const EAGAIN: isize = -(libc::EAGAIN as isize);
const EALREADY: isize = -(libc::EALREADY as isize);
const EBADF: isize = -(libc::EBADF as isize);
const EINPROGRESS: isize = -(libc::EINPROGRESS as isize);
const EISCONN: isize = -(libc::EISCONN as isize);
const ENOTSOCK: isize = -(libc::ENOTSOCK as isize);
pub(super) const EOPNOTSUPP: isize = -(libc::EOPNOTSUPP as isize);

/// Returns when a blocking call in this direction times out: `SO_RCVTIMEO`, `SO_SNDTIMEO`.
fn timeout_deadline(fd: c_int, direction: Direction) -> Nanos {
    let option = if direction == Direction::Read { libc::SO_RCVTIMEO } else { libc::SO_SNDTIMEO };
    let mut time = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let mut len = size_of::<libc::timeval>();
    // SAFETY: the kernel writes a timeval and its length.
    let rc = unsafe {
        let (level, option) = (libc::SOL_SOCKET as usize, option as usize);
        let at = [fd as usize, level, option, &raw mut time as usize, &raw mut len as usize];
        syscall(libc::SYS_getsockopt, at)
    };
    let nanos = (time.tv_sec as u64)
        .saturating_mul(1_000_000_000)
        .saturating_add(time.tv_usec as u64 * 1_000);
    if rc != 0 || nanos == 0 { NEVER } else { clock::after_nanos(nanos) }
}

/// Returns whether the descriptor is non-blocking.
///
/// # Errors
/// Returns the negative error number of `fcntl`: `EBADF` if there is no such descriptor.
fn is_nonblocking(fd: c_int) -> Result<bool, isize> {
    // SAFETY: passes no pointers.
    let flags = unsafe { syscall(libc::SYS_fcntl, [fd as usize, libc::F_GETFL as usize]) };
    if flags < 0 { Err(flags) } else { Ok(flags & libc::O_NONBLOCK as isize != 0) }
}

/// Returns the value of an option of the socket level; None if the kernel returns an error.
fn socket_option(fd: c_int, name: c_int) -> Option<c_int> {
    let (mut value, mut len) = (0 as c_int, size_of::<c_int>());
    let (level, name) = (libc::SOL_SOCKET as usize, name as usize);
    let args = [fd as usize, level, name, &raw mut value as usize, &raw mut len as usize];
    // SAFETY: the kernel writes an int and its length.
    let rc = unsafe { syscall(libc::SYS_getsockopt, args) };
    (rc == 0).then_some(value)
}

/// Returns whether the descriptor is a regular file, or has no entry in the table.
fn is_regular(fd: c_int) -> bool {
    fds::entry(fd).is_none_or(|entry| entry.kind(fd) == FileKind::Regular)
}

/// Returns whether the descriptor is a socket, as far as known (`fds.rs`).
fn is_socket(fd: c_int) -> bool {
    fds::entry(fd).is_some_and(|entry| entry.kind(fd) == FileKind::Socket)
}
