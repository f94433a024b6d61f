//! Writes that must be complete: a blocking descriptor takes all bytes of a call.

use super::connect::finish_connect;
use super::retry::{Attempts, poll_now};
use super::{EINPROGRESS, is_nonblocking, is_socket};
use crate::sched::netpoll::pollable::Direction;
use libc::{iovec, pollfd};
use std::ffi::c_int;

/// Which bytes of a call an attempt writes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// All of them: the call as it was made.
    Whole,
    /// All except this many at the beginning, on a stream that is connected. They are sent without
    /// an address and control data, and raise no `SIGPIPE`: the kernel raises none for a call that
    /// has written something.
    After(usize),
}

impl Part {
    /// Returns how many bytes were written before.
    pub(super) fn start(self) -> usize {
        match self {
            Part::Whole => 0,
            Part::After(bytes) => bytes,
        }
    }

    /// Returns the flags of a socket call for this part.
    pub(super) fn flags(self, flags: c_int) -> c_int {
        match self {
            Part::Whole => flags,
            Part::After(_) => flags & !libc::MSG_FASTOPEN | libc::MSG_NOSIGNAL,
        }
    }
}

/// Whether an attempt may block the thread.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum CallMode {
    Blocking,
    NonBlocking,
}

impl CallMode {
    /// Returns the flags of a socket call in this mode.
    pub(super) fn flags(self, flags: c_int) -> c_int {
        match self {
            CallMode::Blocking => flags,
            CallMode::NonBlocking => flags | libc::MSG_DONTWAIT,
        }
    }
}

/// Writes everything, as a blocking descriptor does. `total` is called only after the kernel has
/// written something, so the caller's vectors are readable.
pub(super) fn write_whole(
    fd: c_int,
    total: impl Fn() -> usize,
    attempt: impl Fn(Part, CallMode) -> isize,
) -> isize {
    let mut part = Part::Whole;
    // One timeout for all attempts, as in the kernel.
    let mut attempts = Attempts::new(fd, Direction::Write);
    loop {
        let written = part.start();
        let try_now = || match part {
            // The attempt would return the socket's error, which belongs to the next call.
            Part::After(1..) if has_pending_error(fd) => 0,
            _ => attempt(part, CallMode::NonBlocking),
        };
        let mut has_blocked = false;
        let n = attempts.run(try_now, || {
            has_blocked = true;
            attempt(part, CallMode::Blocking)
        });
        match n {
            // The kernel's result of a blocking call is final: an eventfd takes eight bytes, or the
            // timeout has passed.
            0.. if has_blocked => return (written + n as usize) as isize,
            1.. if written + (n as usize) < total() => {
                part = Part::After(written + n as usize);
                attempts.note_progress();
            }
            0.. => return (written + n as usize) as isize,
            // The write has begun a connection (`MSG_FASTOPEN`, `TCP_FASTOPEN_CONNECT`).
            EINPROGRESS
                if part == Part::Whole && !has_blocked && is_nonblocking(fd) == Ok(false) =>
            {
                match finish_connect(fd) {
                    0 => part = Part::After(0),
                    error => return error,
                }
            }
            // The call returns what was written; the next call returns the error.
            _ if written > 0 => return written as isize,
            _ => return n,
        }
    }
}

/// Returns whether the descriptor is a socket whose connection was reset or has failed, and whose
/// error no call has returned yet. (A message in the error queue is reported without a hang-up.)
fn has_pending_error(fd: c_int) -> bool {
    const FAILED: i16 = libc::POLLERR | libc::POLLHUP;
    let mut one = pollfd { fd, events: 0, revents: 0 };
    // SAFETY: one entry of our own.
    is_socket(fd) && unsafe { poll_now(&raw mut one, 1) } == 1 && one.revents & FAILED == FAILED
}

/// How many vectors are passed to the kernel at once for the rest of a call.
const WINDOW_VECTORS: usize = 16;

/// Some of the caller's vectors, beginning at some byte.
pub(super) struct Window {
    pub(super) vectors: [iovec; WINDOW_VECTORS],
    pub(super) count: usize,
}

impl Window {
    /// Returns the vectors from the byte `start` on, at most [`WINDOW_VECTORS`].
    ///
    /// # Safety
    /// `all` points to `count` vectors, which have more than `start` bytes together.
    pub(super) unsafe fn new(all: *const iovec, count: usize, start: usize) -> Window {
        const EMPTY: iovec = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let mut window = Window { vectors: [EMPTY; WINDOW_VECTORS], count: 0 };
        let mut skip = start;
        for i in 0..count {
            // SAFETY: the caller's contract.
            let one = unsafe { all.add(i).read() };
            if skip >= one.iov_len {
                skip -= one.iov_len;
                continue;
            }
            window.vectors[window.count] = iovec {
                iov_base: one.iov_base.wrapping_byte_add(skip),
                iov_len: one.iov_len - skip,
            };
            skip = 0;
            window.count += 1;
            if window.count == WINDOW_VECTORS {
                break;
            }
        }
        window
    }
}

/// Returns the bytes of all vectors.
///
/// # Safety
/// `vectors` points to `count` vectors.
pub(super) unsafe fn total_of(vectors: *const iovec, count: usize) -> usize {
    // SAFETY: the caller's contract.
    (0..count).map(|i| unsafe { (*vectors.add(i)).iov_len }).fold(0, usize::saturating_add)
}
