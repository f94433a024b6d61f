//! Attempts without blocking, and the waits between them.

use super::{EAGAIN, EBADF, EOPNOTSUPP, is_nonblocking, timeout_deadline};
use crate::interpose::fds::{self, FdEntry};
use crate::interpose::park::begin_wait;
use crate::sched::calls::{current_sched, sleep_until};
use crate::sched::netpoll::pollable::{BACK_OFF_MAX_NANOS, BACK_OFF_MIN_NANOS, Direction, IoWait};
use crate::sys::clock::{NEVER, Nanos, now};
use crate::sys::raw::poll_ms;
use libc::pollfd;
use std::ffi::c_int;

/// What a call does after a wait.
#[must_use]
pub(in crate::interpose) enum RetryDecision {
    /// Tries again.
    Retry,
    /// Returns this result.
    Return(isize),
    /// Makes the real, blocking call: the thread blocks.
    Block,
}

/// The attempts of one call, and its waits. The timeout counts from the first wait.
pub(super) struct Attempts {
    fd: c_int,
    direction: Direction,
    deadline: Option<Nanos>,
    entry: Option<&'static FdEntry>,
    /// [`FdEntry::closes`] before the last attempt.
    closes: u32,
    /// How many attempts would have blocked since the last progress.
    failures: u32,
    /// Pauses in a row ([`Attempts::pause`]).
    pauses: u32,
}

/// After more failures in a row than this the kernel is asked whether the descriptor is ready in
/// spite of them. Two may be chance: another goroutine was faster.
const CHANCE_FAILURES: u32 = 2;

impl Attempts {
    #[inline]
    pub(super) fn new(fd: c_int, direction: Direction) -> Attempts {
        let entry = fds::entry(fd);
        Attempts { fd, direction, deadline: None, entry, closes: 0, failures: 0, pauses: 0 }
    }

    /// Notes that the call has made progress.
    pub(super) fn note_progress(&mut self) {
        (self.failures, self.pauses) = (0, 0);
    }

    /// Repeats `attempt` until it does not return `EAGAIN`, and waits in between; `real` is the
    /// blocking call.
    #[inline]
    pub(super) fn run(
        &mut self,
        mut attempt: impl FnMut() -> isize,
        real: impl FnOnce() -> isize,
    ) -> isize {
        loop {
            self.closes = self.entry.map_or(0, FdEntry::closes);
            match attempt() {
                // `wait_ready` is called from here, so that a parked goroutine has one frame less.
                EAGAIN => match self.before_wait().map_or_else(
                    |decision| decision,
                    |deadline| wait_ready(self.fd, self.direction, deadline, Some(self.closes)),
                ) {
                    RetryDecision::Retry => {}
                    RetryDecision::Return(result) => return result,
                    RetryDecision::Block => return real(),
                },
                EOPNOTSUPP => return real(),
                result => return result,
            }
        }
    }

    /// After an attempt that would have blocked: returns until when the call may wait, or what it
    /// does instead.
    #[cold]
    fn before_wait(&mut self) -> Result<Nanos, RetryDecision> {
        let deadline = self.deadline().map_err(RetryDecision::Return)?;
        self.failures += 1;
        if self.failures > CHANCE_FAILURES && is_ready(self.fd, self.direction.events()) {
            return Err(self.pause(deadline));
        }
        self.pauses = 0;
        Ok(deadline)
    }

    /// Returns when the call times out.
    ///
    /// # Errors
    /// Returns the result of the call if it must not wait: `EAGAIN` on a non-blocking descriptor,
    /// `EBADF` if there is no such descriptor.
    fn deadline(&mut self) -> Result<Nanos, isize> {
        if let Some(deadline) = self.deadline {
            return Ok(deadline);
        }
        let (fd, direction) = (self.fd, self.direction);
        let ask = || match is_nonblocking(fd)? {
            false => Ok(timeout_deadline(fd, direction)),
            true => Err(EAGAIN),
        };
        let mut answer = Ok(NEVER);
        match self.entry {
            None => answer = ask(),
            Some(entry) => {
                _ = entry.is_known_blocking(|| {
                    answer = ask();
                    // The cached answer is for both directions.
                    let other = if direction == Direction::Read {
                        Direction::Write
                    } else {
                        Direction::Read
                    };
                    answer == Ok(NEVER) && timeout_deadline(fd, other) == NEVER
                })
            }
        }
        self.deadline = answer.ok();
        answer
    }

    /// Pauses before the next attempt, each time longer: the kernel has reported several times both
    /// that the descriptor is ready and that the call would block.
    ///
    /// - A datagram socket has room, and the queue of the socket that it sends to is full. No event
    ///   tells when that changes, and each failed attempt causes a meaningless one.
    /// - A socket has a message in its error queue, and the caller reads something else. An event
    ///   ends that pause.
    #[cold]
    fn pause(&mut self, deadline: Nanos) -> RetryDecision {
        let (Some(_wait), Some(entry), Some(sched)) = (begin_wait(), self.entry, current_sched())
        else {
            return RetryDecision::Block;
        };
        let start = now();
        if start >= deadline {
            return RetryDecision::Return(EAGAIN);
        }
        let pause = (BACK_OFF_MIN_NANOS << self.pauses.min(u64::BITS / 2)).min(BACK_OFF_MAX_NANOS);
        self.pauses += 1;
        let end = start.saturating_add(pause).min(deadline);
        match self.direction {
            Direction::Write => sleep_until(end),
            Direction::Read => {
                let pollable = entry.pollable();
                let seen = pollable.edges(Direction::Read);
                // The call is tried again, however the wait ends.
                _ = pollable.wait(sched, self.fd, Direction::Read, end, seen);
            }
        }
        if entry.closes() == self.closes {
            RetryDecision::Retry
        } else {
            RetryDecision::Return(EBADF)
        }
    }
}

/// Waits in the poller until the descriptor is ready, or until `deadline`. Does not wait if the
/// descriptor was closed since its entry had `closes`.
pub(in crate::interpose) fn wait_ready(
    fd: c_int,
    direction: Direction,
    deadline: Nanos,
    closes: Option<u32>,
) -> RetryDecision {
    let (Some(_wait), Some(entry), Some(sched)) = (begin_wait(), fds::entry(fd), current_sched())
    else {
        return RetryDecision::Block;
    };
    let pollable = entry.pollable();
    // The edges are read before the closes: a close that comes later is an edge.
    let seen = pollable.edges(direction);
    if closes.is_some_and(|closes| closes != entry.closes()) {
        return RetryDecision::Retry;
    }
    match pollable.wait_armed(sched, fd, direction, deadline, seen) {
        Ok(IoWait::Ready) => RetryDecision::Retry,
        Ok(IoWait::TimedOut) => RetryDecision::Return(EAGAIN),
        Ok(IoWait::Closed) => RetryDecision::Return(EBADF),
        Err(e) => after_failed_wait(fd, &e),
    }
}

/// Returns what a call does after it could not wait for `fd` in the poller.
pub(in crate::interpose) fn after_failed_wait(fd: c_int, e: &std::io::Error) -> RetryDecision {
    // A simulation refuses it, except for the program's outputs. The caller gets the error number
    // only, so the text is printed.
    let is_refused = e.kind() == std::io::ErrorKind::Unsupported;
    if is_refused && !matches!(fd, libc::STDOUT_FILENO | libc::STDERR_FILENO) {
        crate::sys::stderr::write_stderr(format_args!("trefoil: {e}\n"));
        return RetryDecision::Return(EOPNOTSUPP);
    }
    RetryDecision::Block
}

/// Repeats `attempt` until it does not return `EAGAIN`, and waits in between until the descriptor
/// is ready; `real` is the blocking call.
#[inline]
pub(super) fn retry_until_ready(
    fd: c_int,
    direction: Direction,
    attempt: impl FnMut() -> isize,
    real: impl FnOnce() -> isize,
) -> isize {
    Attempts::new(fd, direction).run(attempt, real)
}

/// Makes the blocking call `real` once the descriptor is ready: for files without `RWF_NOWAIT`
/// (terminals, some devices). If another reader is faster, the thread blocks.
pub(super) fn poll_then_call(fd: c_int, direction: Direction, real: impl Fn() -> isize) -> isize {
    if is_nonblocking(fd) != Ok(false) {
        return real();
    }
    while !is_ready(fd, direction.events()) {
        match wait_ready(fd, direction, NEVER, None) {
            RetryDecision::Retry => {}
            RetryDecision::Return(result) => return result,
            RetryDecision::Block => break,
        }
    }
    real()
}

/// Returns whether one of `events` is pending now.
pub(super) fn is_ready(fd: c_int, events: i16) -> bool {
    let mut one = pollfd { fd, events, revents: 0 };
    // SAFETY: one entry of our own.
    unsafe { poll_now(&raw mut one, 1) != 0 }
}

/// Makes the system call `poll` without waiting. The kernel ends even that with `EINTR` if a signal
/// is pending, which may be the runtime's own; then it is repeated.
///
/// # Safety
/// `list` has `count` entries.
pub(in crate::interpose) unsafe fn poll_now(list: *mut pollfd, count: usize) -> isize {
    loop {
        // SAFETY: the caller's contract.
        let found = unsafe { poll_ms(list, count, 0) };
        if found != -(libc::EINTR as isize) {
            return found;
        }
    }
}
