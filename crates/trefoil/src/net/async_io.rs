//! Calls of async code on an [`Fd`]: instead of waiting, they leave the task's word with the
//! [`Pollable`](crate::sched::netpoll::pollable::Pollable) and return `Pending`.
//!
//! | form | for | the task waits in |
//! |---|---|---|
//! | [`IoFuture`] | `read_async` and the like, any number of tasks at once | a node in the future |
//! | [`Fd::poll_io`] | the poll traits (`AsyncRead`, …), one task per direction | the descriptor's slot |
//!
//! The attempts, the deadlines, the timeouts and the errors are those of [`Fd::io`]. A call is in
//! progress ([`Fd::call`]) only during a poll, so a future that is never polled again does not keep
//! a closed connection.
//!
//! # The timeout of a poll trait's call
//! A call of a poll trait is a sequence of polls, from the first that is `Pending` to the next that
//! is ready. Its task may give the call up without notice, and the timeout of that call must not
//! fail the next one. The call was given up if another task polls, because only the task that
//! polled last is woken. It was also given up if its task was woken at the end of the timeout, and
//! does not poll within [`RETURN_NANOS`]. But if a task gives up a call and polls again before the
//! timeout has ended, nothing tells these polls from those of one call: then the timeout continues.

use super::fd::Fd;
use crate::runtime::{current_sched, task_waiter};
use crate::sched::netpoll::pollable::Direction;
use crate::sched::netpoll::task_waiters::{TaskNode, TaskPlace};
use crate::sched::task;
use crate::sched::task::waker::{TaskWaiter, word_of_waker};
use crate::sched::wait::reason::WaitReason;
use crate::sync::Mutex;
use crate::sys::clock::{NEVER, Nanos, now};
use crate::sys::syscalls::{self, Errno};
use crate::time::Sleep;
use std::future::Future;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::pin::Pin;
use std::sync::OnceLock;
use std::task::{Context, Poll, Waker};

/// How late after the end of its timeout a task polls at most, if it still waits. A task that comes
/// later because the machine is overloaded waits for the timeout once more.
const RETURN_NANOS: Nanos = 100_000_000;

/// What a pending call keeps from poll to poll.
struct Pending {
    waiter: TaskWaiter,
    /// When the timeout of the call ends. None before it has to wait.
    limit: Option<Nanos>,
    /// Wakes the task at the deadline or at the end of the timeout, if there is one.
    sleep: Option<Sleep>,
}

impl Pending {
    fn new() -> Pending {
        Pending { waiter: task_waiter(), limit: None, sleep: None }
    }

    /// Begins a new call if the task of the last one has given it up (head of the file). `waker` is
    /// the waker of the task that polls now.
    fn forget_abandoned_call(&mut self, waker: &Waker) {
        let Some(limit) = self.limit else { return };
        let late = now().saturating_sub(limit);
        // An executor may make another waker for each poll. Then the call must still end.
        let is_other_task =
            !self.waiter.is_for(waker) && (late == 0 || word_of_waker(waker).is_some());
        if is_other_task || late > RETURN_NANOS {
            self.limit = None;
        }
    }

    /// Returns the sleeper word of the task, and arranges its wake-up at `deadline` or at the end
    /// of the timeout. Returns None if that has passed.
    fn prepare(
        &mut self,
        fd: &Fd,
        direction: Direction,
        deadline: Nanos,
        context: &mut Context<'_>,
    ) -> Option<usize> {
        let limit = *self.limit.get_or_insert_with(|| fd.limit(direction));
        let end = deadline.min(limit);
        if end == NEVER {
            self.sleep = None;
        } else {
            let is_set = self.sleep.as_ref().is_some_and(|sleep| sleep.when() == end);
            if !is_set {
                self.sleep = Some(Sleep::at(end));
            }
            if let Some(sleep) = &mut self.sleep
                && Pin::new(sleep).poll(context).is_ready()
            {
                return None;
            }
        }
        Some(self.waiter.set(context.waker()))
    }
}

/// What the slots of a descriptor need beyond the word: wakers of other executors, deadlines and
/// timeouts. By direction.
pub(super) struct SlotExtras([Mutex<Pending>; 2]);

/// See [`SlotExtras`]: made when it is first needed.
pub(super) type LazySlotExtras = OnceLock<Box<SlotExtras>>;

impl Fd {
    /// Makes attempts until one is ready, or the task is registered by `register`: it gets the
    /// number of edges before the attempt and the deadline, and returns whether the task may wait.
    #[inline]
    fn poll_with<T>(
        &self,
        direction: Direction,
        attempt: &mut impl FnMut(BorrowedFd<'_>) -> syscalls::Result<T>,
        mut register: impl FnMut(u32, Nanos) -> io::Result<bool>,
    ) -> Poll<io::Result<T>> {
        let call = self.call()?;
        loop {
            let deadline = self.pollable.deadline(direction);
            if self.pollable.is_past_deadline(direction) {
                return Poll::Ready(Err(super::fd::timed_out()));
            }
            let seen = self.pollable.edges(direction);
            self.check_contexts()?;
            match attempt(call.fd()) {
                Err(Errno::AGAIN) => {
                    if register(seen, deadline)? {
                        task::note_reason(WaitReason::IoWait);
                        return Poll::Pending;
                    }
                    // The file is released only when this call has ended, so no attempt would fail.
                    if self.is_closed() {
                        return Poll::Ready(Err(super::fd::closed()));
                    }
                }
                Err(Errno::INTR) => {}
                Err(e) => return Poll::Ready(Err(e.into())),
                Ok(value) => return Poll::Ready(Ok(value)),
            }
        }
    }

    fn register_task(
        &self,
        direction: Direction,
        place: (TaskPlace<'_>, usize),
        unchanged: (u32, Nanos),
    ) -> io::Result<bool> {
        self.pollable.register_task(current_sched()?, self.raw, direction, place, unchanged)
    }

    /// [`Fd::io`] for the poll traits. If the result is `Pending`, the task of `context` is woken
    /// when it should poll again, unless another task polls for the same direction meanwhile.
    #[cfg_attr(
        not(any(feature = "tokio-io", feature = "futures-io", feature = "hyper")),
        allow(dead_code)
    )]
    #[inline]
    pub(super) fn poll_io<T>(
        &self,
        direction: Direction,
        context: &mut Context<'_>,
        mut attempt: impl FnMut(BorrowedFd<'_>) -> syscalls::Result<T>,
    ) -> Poll<io::Result<T>> {
        let own_word = word_of_waker(context.waker());
        let polled = self.poll_with(direction, &mut attempt, |seen, deadline| {
            let register =
                |word| self.register_task(direction, (TaskPlace::Slot, word), (seen, deadline));
            match own_word {
                Some(word) if deadline == NEVER && self.timeout(direction).is_none() => {
                    register(word)
                }
                _ => {
                    // Locked until the word is in the slot: another task that comes in between
                    // makes the word invalid.
                    let mut pending = self.slot_extras(direction).lock();
                    pending.forget_abandoned_call(context.waker());
                    match pending.prepare(self, direction, deadline, context) {
                        Some(word) => register(word),
                        None => Err(super::fd::timed_out()),
                    }
                }
            }
        });
        if polled.is_ready() {
            self.end_polled_call(direction);
        }
        polled
    }

    /// Makes the next call of a poll trait begin with a timeout of its own.
    pub(super) fn end_polled_call(&self, direction: Direction) {
        if let Some(extras) = self.extras.get() {
            extras.0[direction as usize].lock().limit = None;
        }
    }

    #[cold]
    fn slot_extras(&self, direction: Direction) -> &Mutex<Pending> {
        let new = || Box::new(SlotExtras([(); 2].map(|()| Mutex::new(Pending::new()))));
        &self.extras.get_or_init(new).0[direction as usize]
    }

    /// [`Fd::io`] as a future.
    pub(super) fn io_async<'a, T, F>(&'a self, direction: Direction, attempt: F) -> IoFuture<'a, F>
    where
        F: FnMut(BorrowedFd<'_>) -> syscalls::Result<T>,
    {
        IoFuture {
            fd: self,
            direction,
            attempt,
            pending: Pending::new(),
            node: TaskNode::new(),
            was_registered: false,
        }
    }
}

/// A call on an [`Fd`]. If it is dropped before it is ready, the call was not made.
#[must_use = "a future does nothing unless it is awaited"]
pub(super) struct IoFuture<'a, F> {
    fd: &'a Fd,
    direction: Direction,
    attempt: F,
    pending: Pending,
    /// In a list of the Pollable, if `was_registered`, until an edge takes it out.
    node: TaskNode,
    was_registered: bool,
}

impl<T, F> Future for IoFuture<'_, F>
where
    F: FnMut(BorrowedFd<'_>) -> syscalls::Result<T>,
{
    type Output = io::Result<T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        // SAFETY: only the node needs to stay where it is, and it is not moved.
        let this = unsafe { self.get_unchecked_mut() };
        let (fd, direction, node) = (this.fd, this.direction, &this.node);
        let (pending, was_registered) = (&mut this.pending, &mut this.was_registered);
        fd.poll_with(direction, &mut this.attempt, |seen, deadline| {
            let Some(word) = pending.prepare(fd, direction, deadline, context) else {
                return Err(super::fd::timed_out());
            };
            // Before the registration, which may panic if the default runtime cannot start.
            *was_registered = true;
            fd.register_task(direction, (TaskPlace::Node(node), word), (seen, deadline))
        })
    }
}

impl<F> Drop for IoFuture<'_, F> {
    fn drop(&mut self) {
        if self.was_registered {
            self.fd.pollable.withdraw_task(self.direction, &self.node);
        }
    }
}

/// Returns whether `direction` of the descriptor is ready: data, end-of-file or an error. As an
/// attempt, `EAGAIN` means that it is not.
pub(super) fn attempt_ready(fd: BorrowedFd<'_>, direction: Direction) -> syscalls::Result<()> {
    let events = match direction {
        Direction::Read => libc::POLLIN | libc::POLLRDHUP,
        Direction::Write => libc::POLLOUT,
    };
    match syscalls::poll_now(&mut [libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 }])? {
        0 => Err(Errno::AGAIN),
        _ => Ok(()),
    }
}
