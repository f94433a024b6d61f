//! `AsyncFd`: any pollable descriptor in async code.
//!
//! The descriptor counts as ready while the poller has reported more edges than were cleared. A
//! guard remembers the number of edges when it was made, and clears so many: an edge that comes
//! between an attempt and `clear_ready` is not lost.
//!
//! An epoll instance has at most one registration per descriptor, and other code may have one: a
//! second `AsyncFd` of the same descriptor, a socket of this crate, or an interposed `poll`. So
//! each `AsyncFd` registers a duplicate of its own, which refers to the same open file.
//!
//! Rejected: one [`Pollable`] per descriptor number for all of them. The number may be closed and
//! given to another file while an `AsyncFd` exists; and an interposed `poll` registers the number
//! for the directions that it waits for, and no longer than it waits.

use crate::runtime::{current_sched, task_waiter};
use crate::sched::netpoll::pollable::{Direction, Pollable};
use crate::sched::netpoll::task_waiters::{TaskNode, TaskPlace};
use crate::sched::task;
use crate::sched::task::waker::{TaskWaiter, word_of_waker};
use crate::sched::wait::reason::WaitReason;
use crate::sync::Mutex;
use crate::sys::clock::NEVER;
use std::fmt;
use std::future::Future;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};

/// A descriptor whose readiness can be awaited: an eventfd, a timerfd, an inotify descriptor, a
/// terminal, a device, or a socket of another crate. The names are those of tokio's `AsyncFd`.
///
/// The descriptor must be non-blocking. Each wait is followed by attempts of the caller; an attempt
/// that would block must clear the readiness, otherwise the next wait returns at once.
/// [`AsyncFdReadyGuard::try_io`] does that.
///
/// Any number of `AsyncFd`s may have the same descriptor, for example one in each of two tasks
/// (`AsyncFd<BorrowedFd>`), and other code may call `poll` with it. Each of them gets all events.
///
/// # Drop
/// Dropping it drops the inner object, which usually closes the descriptor. An `AsyncFd` has a
/// duplicate of the descriptor, so the file stays open as long as the `AsyncFd` exists, also if
/// other code closes the descriptor before.
///
/// # Examples
/// ```
/// use std::io::{self, Read, Write};
/// use std::os::unix::net::UnixStream;
/// use trefoil::net::AsyncFd;
///
/// async fn read(socket: &AsyncFd<UnixStream>, buf: &mut [u8]) -> io::Result<usize> {
///     loop {
///         let mut guard = socket.readable().await?;
///         match guard.try_io(|inner| inner.get_ref().read(buf)) {
///             Ok(result) => return result,
///             Err(_would_block) => continue,
///         }
///     }
/// }
///
/// trefoil::run(|| {
///     let (one, mut other) = UnixStream::pair().unwrap();
///     one.set_nonblocking(true).unwrap();
///     let one = AsyncFd::new(one).unwrap();
///     let reader = trefoil::task::spawn(async move {
///         let mut buf = [0; 8];
///         let n = read(&one, &mut buf).await.unwrap();
///         buf[..n].to_vec()
///     });
///     other.write_all(b"hello").unwrap();
///     assert_eq!(reader.join().unwrap(), b"hello");
/// });
/// ```
pub struct AsyncFd<T: AsRawFd> {
    inner: ManuallyDrop<T>,
    raw: RawFd,
    /// What the poller watches. None if it is closed already.
    duplicate: Option<OwnedFd>,
    pollable: &'static Pollable,
    /// The number of edges up to which the readiness was cleared, by direction.
    cleared: [AtomicU32; 2],
    /// For wakers of other executors in the poll methods, by direction.
    waiters: [Mutex<TaskWaiter>; 2],
}

impl<T: AsRawFd> AsyncFd<T> {
    /// Registers the descriptor of `inner` with the poller of the caller's runtime, or of the
    /// default runtime on a plain thread.
    ///
    /// # Errors
    /// [`Unsupported`](io::ErrorKind::Unsupported) for a regular file, which is always ready; the
    /// OS errors `EBADF` if it is not open, `EMFILE` if the process has no descriptor left for the
    /// duplicate, and `ENOMEM` or `ENOSPC` if `epoll` cannot register it.
    pub fn new(inner: T) -> io::Result<AsyncFd<T>> {
        let raw = inner.as_raw_fd();
        let duplicate = duplicate(raw)?;
        let pollable = Pollable::new();
        // If the descriptor is ready now, the registration causes an edge.
        let cleared = [Direction::Read, Direction::Write]
            .map(|direction| AtomicU32::new(pollable.edges(direction)));
        if let Err(e) =
            current_sched().and_then(|sched| pollable.watch(sched, duplicate.as_raw_fd()))
        {
            pollable.free();
            return Err(e);
        }
        let waiters = [(); 2].map(|()| Mutex::new(task_waiter()));
        let (inner, duplicate) = (ManuallyDrop::new(inner), Some(duplicate));
        Ok(AsyncFd { inner, raw, duplicate, pollable, cleared, waiters })
    }

    /// Returns the inner object.
    pub fn get_ref(&self) -> &T {
        &self.inner
    }

    /// Returns the inner object.
    pub fn get_mut(&mut self) -> &mut T {
        &mut self.inner
    }

    /// Returns the inner object. Its descriptor is not registered any more.
    pub fn into_inner(self) -> T {
        let mut this = ManuallyDrop::new(self);
        this.unregister();
        // SAFETY: `this` is not used or dropped any more; its other field that needs a drop is
        // dropped here.
        unsafe {
            std::ptr::drop_in_place(&raw mut this.waiters);
            ManuallyDrop::take(&mut this.inner)
        }
    }

    /// Returns the number of the duplicate.
    fn watched(&self) -> RawFd {
        self.duplicate.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }

    fn unregister(&mut self) {
        self.pollable.unregister(self.watched());
        self.pollable.free();
        self.duplicate = None;
    }

    /// Waits until the descriptor is readable: data, end-of-file, or an error.
    ///
    /// # Errors
    /// The OS errors `ENOMEM` or `ENOSPC` if another runtime than that of [`new`](Self::new) has to
    /// register the descriptor, and `epoll` cannot.
    ///
    /// # Cancel
    /// Dropping the future loses nothing: the readiness stays until it is cleared.
    pub async fn readable(&self) -> io::Result<AsyncFdReadyGuard<'_, T>> {
        Readiness::new(self, Direction::Read).await
    }

    /// Waits until the descriptor is writable, or has an error.
    ///
    /// # Errors
    /// As [`readable`](Self::readable).
    ///
    /// # Cancel
    /// Dropping the future loses nothing: the readiness stays until it is cleared.
    pub async fn writable(&self) -> io::Result<AsyncFdReadyGuard<'_, T>> {
        Readiness::new(self, Direction::Write).await
    }

    /// As [`readable`](Self::readable), for code that implements a future by hand. Only the task
    /// that called it last is woken.
    pub fn poll_read_ready<'a>(
        &'a self,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<AsyncFdReadyGuard<'a, T>>> {
        self.poll_slot(Direction::Read, context)
    }

    /// As [`writable`](Self::writable), for code that implements a future by hand. Only the task
    /// that called it last is woken.
    pub fn poll_write_ready<'a>(
        &'a self,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<AsyncFdReadyGuard<'a, T>>> {
        self.poll_slot(Direction::Write, context)
    }

    fn poll_slot(
        &self,
        direction: Direction,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<AsyncFdReadyGuard<'_, T>>> {
        let waker = context.waker();
        match word_of_waker(waker) {
            Some(word) => self.poll_ready(direction, || (TaskPlace::Slot, word)),
            None => {
                // Locked until the word is in the slot: another task that comes in between makes
                // the word invalid.
                let mut waiter = self.waiters[direction as usize].lock();
                self.poll_ready(direction, || (TaskPlace::Slot, waiter.set(waker)))
            }
        }
    }

    fn poll_ready<'n>(
        &self,
        direction: Direction,
        mut place: impl FnMut() -> (TaskPlace<'n>, usize),
    ) -> Poll<io::Result<AsyncFdReadyGuard<'_, T>>> {
        loop {
            let seen = self.pollable.edges(direction);
            if seen != self.cleared[direction as usize].load(Ordering::Acquire) {
                return Poll::Ready(Ok(AsyncFdReadyGuard { of: self, direction, seen }));
            }
            let (sched, place, unchanged) = (current_sched()?, place(), (seen, NEVER));
            if self.pollable.register_task(sched, self.watched(), direction, place, unchanged)? {
                task::note_reason(WaitReason::IoWait);
                return Poll::Pending;
            }
        }
    }
}

/// Duplicates a descriptor, which may not be open.
fn duplicate(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: makes a descriptor, or fails.
    let duplicate = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    if duplicate < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: no other code has it.
    Ok(unsafe { OwnedFd::from_raw_fd(duplicate) })
}

impl<T: AsRawFd> Drop for AsyncFd<T> {
    fn drop(&mut self) {
        self.unregister();
        // SAFETY: dropped once, and not used any more.
        unsafe { ManuallyDrop::drop(&mut self.inner) };
    }
}

impl<T: AsRawFd> AsRawFd for AsyncFd<T> {
    fn as_raw_fd(&self) -> RawFd {
        self.raw
    }
}

impl<T: AsRawFd + fmt::Debug> fmt::Debug for AsyncFd<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncFd").field("inner", self.get_ref()).finish_non_exhaustive()
    }
}

/// The future of [`AsyncFd::readable`] and [`AsyncFd::writable`].
struct Readiness<'a, T: AsRawFd> {
    of: &'a AsyncFd<T>,
    direction: Direction,
    waiter: TaskWaiter,
    node: TaskNode,
    was_registered: bool,
}

impl<'a, T: AsRawFd> Readiness<'a, T> {
    fn new(of: &'a AsyncFd<T>, direction: Direction) -> Readiness<'a, T> {
        let (waiter, node) = (task_waiter(), TaskNode::new());
        Readiness { of, direction, waiter, node, was_registered: false }
    }
}

impl<'a, T: AsRawFd> Future for Readiness<'a, T> {
    type Output = io::Result<AsyncFdReadyGuard<'a, T>>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // SAFETY: only the node needs to stay where it is, and it is not moved.
        let this = unsafe { self.get_unchecked_mut() };
        let (waiter, was_registered) = (&mut this.waiter, &mut this.was_registered);
        this.of.poll_ready(this.direction, || {
            *was_registered = true;
            (TaskPlace::Node(&this.node), waiter.set(context.waker()))
        })
    }
}

impl<T: AsRawFd> Drop for Readiness<'_, T> {
    fn drop(&mut self) {
        if self.was_registered {
            self.of.pollable.withdraw_task(self.direction, &self.node);
        }
    }
}

/// The descriptor of an [`AsyncFd`] is ready, as far as the poller knows. An attempt that would
/// block nevertheless must clear the readiness: [`try_io`](Self::try_io), or
/// [`clear_ready`](Self::clear_ready).
///
/// # Examples
/// ```
/// use std::io::Write;
/// use std::os::unix::net::UnixStream;
/// use trefoil::net::AsyncFd;
///
/// trefoil::run(|| {
///     let (one, _other) = UnixStream::pair().unwrap();
///     one.set_nonblocking(true).unwrap();
///     let one = AsyncFd::new(one).unwrap();
///     trefoil::block_on(async {
///         let mut guard = one.writable().await.unwrap();
///         let written = guard.try_io(|inner| inner.get_ref().write(b"hello"));
///         assert_eq!(written.unwrap().unwrap(), 5);
///     });
/// });
/// ```
#[must_use = "the descriptor stays ready until the readiness is cleared"]
pub struct AsyncFdReadyGuard<'a, T: AsRawFd> {
    of: &'a AsyncFd<T>,
    direction: Direction,
    /// The number of edges when it was made.
    seen: u32,
}

impl<'a, T: AsRawFd> AsyncFdReadyGuard<'a, T> {
    /// Makes the next wait wait for an event that came after this guard was made. Call it only
    /// after an attempt that would block.
    pub fn clear_ready(&mut self) {
        let cleared = &self.of.cleared[self.direction as usize];
        // The count wraps. Another guard may have cleared more.
        let later =
            |cleared: u32| (self.seen.wrapping_sub(cleared) as i32 > 0).then_some(self.seen);
        let _ = cleared.fetch_update(Ordering::AcqRel, Ordering::Acquire, later);
    }

    /// Leaves the descriptor ready. It is what happens without any call; the name says so.
    pub fn retain_ready(&mut self) {}

    /// Makes an attempt. If it fails with [`WouldBlock`](io::ErrorKind::WouldBlock), clears the
    /// readiness.
    ///
    /// # Errors
    /// [`TryIoError`] if the attempt would block. Other errors are in the inner result.
    pub fn try_io<R>(
        &mut self,
        attempt: impl FnOnce(&'a AsyncFd<T>) -> io::Result<R>,
    ) -> Result<io::Result<R>, TryIoError> {
        match attempt(self.of) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                self.clear_ready();
                Err(TryIoError(()))
            }
            result => Ok(result),
        }
    }

    /// Returns the `AsyncFd`.
    pub fn get_ref(&self) -> &'a AsyncFd<T> {
        self.of
    }

    /// Returns the object inside of the `AsyncFd`.
    pub fn get_inner(&self) -> &'a T {
        self.of.get_ref()
    }
}

impl<T: AsRawFd> fmt::Debug for AsyncFdReadyGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncFdReadyGuard").field("fd", &self.of.raw).finish_non_exhaustive()
    }
}

/// The error of [`AsyncFdReadyGuard::try_io`]: the attempt would have blocked.
///
/// # Examples
/// ```
/// use std::io::{Error, ErrorKind};
/// use std::os::unix::net::UnixStream;
/// use trefoil::net::AsyncFd;
///
/// trefoil::run(|| {
///     let (one, _other) = UnixStream::pair().unwrap();
///     let one = AsyncFd::new(one).unwrap();
///     trefoil::block_on(async {
///         let mut guard = one.writable().await.unwrap();
///         let blocks = guard.try_io(|_| -> std::io::Result<()> {
///             Err(Error::from(ErrorKind::WouldBlock))
///         });
///         assert_eq!(blocks.unwrap_err().to_string(), "the operation would block");
///     });
/// });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TryIoError(());

impl fmt::Display for TryIoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the operation would block")
    }
}

impl std::error::Error for TryIoError {}
