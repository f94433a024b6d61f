//! `Fd`: a descriptor that goroutines wait for. Every type of `net` is made of it.
//!
//! The descriptor is non-blocking. A call that the kernel cannot complete at once waits in the
//! [`Pollable`] of the descriptor and then tries again. Any number of goroutines and plain threads
//! may use an `Fd` at the same time.
//!
//! # Closing
//! `close` takes `&self`. It fails waiting and later calls, and the last call that leaves then
//! *releases* the connection:
//! - If safe code cannot hold the descriptor (`as_fd` was never called), an unconnected socket
//!   takes its number (`dup3`). To the kernel that is a `close` of the old file: the peer sees
//!   end-of-file, ports and abstract names become free, duplicates stay open. One such socket
//!   serves the whole process; the first `Fd` opens it, so `close` needs no free descriptor.
//! - Otherwise the file must stay where it is, because a [`BorrowedFd`] of it may exist. `shutdown`
//!   then ends both directions, for duplicates too. It has no effect on pipes. The same happens if
//!   the process could not open the unconnected socket, or may not use the number any more
//!   (`RLIMIT_NOFILE`).
//!
//! The number itself belongs to the `Fd` until it is dropped.
//!
//! | `state` | meaning |
//! |---|---|
//! | bits 0–60 | calls in progress |
//! | [`BORROWED`] | `as_fd` was called |
//! | [`RELEASING`] | the file behind the number is being replaced |
//! | [`CLOSED`] | no new calls |
//!
//! Invariants:
//! 1. The number refers to an open file from `new` to `drop` or `into_owned`.
//! 2. It refers to the same file while a call is in progress, and from the first `as_fd` on.
//!
//! Rejected: closing the descriptor in `close`, because a `BorrowedFd` would outlive it; `shutdown`
//! in every case, because it also ends duplicates in this process and in children, has no effect on
//! pipes, and keeps the addresses of UDP and Unix sockets in use.

use super::async_io::LazySlotExtras;
use crate::context::ContextError;
use crate::runtime;
use crate::sched::calls;
use crate::sched::netpoll::pollable::{Direction, IoWait, Pollable};
#[cfg(feature = "std")]
use crate::sched::simulation;
use crate::sys::clock::{self, NEVER, Nanos};
use crate::sys::syscalls::{self, Errno};
use socket2::{Domain, SockRef, Socket, Type};
use std::io::{self, IoSlice};
use std::mem::ManuallyDrop;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

const CLOSED: u64 = 1 << 63;
const RELEASING: u64 = 1 << 62;
const BORROWED: u64 = 1 << 61;

/// How often `as_fd` checks whether a concurrent `close` has replaced the file.
const RELEASE_POLL: Duration = Duration::from_micros(100);

/// See the head of the file.
pub(crate) struct Fd {
    pub(super) raw: RawFd,
    state: AtomicU64,
    /// How long each call may wait, by direction, in nanoseconds. 0 means without a limit.
    timeouts: [AtomicU64; 2],
    /// Number of guards whose context was cancelled (`cancel.rs`).
    canceled_contexts: AtomicU32,
    /// Number of guards whose context's deadline has passed.
    late_contexts: AtomicU32,
    /// It is a TCP socket whose descriptor no code outside this crate has had, unless [`BORROWED`]
    /// says otherwise: a short read has emptied it.
    short_read_drains: AtomicBool,
    /// Calls of goroutines and threads that would wait return `WouldBlock`.
    refuses_to_wait: AtomicBool,
    /// Shared with the `Fd`s of the same open file description. Empty if `try_clone` was never
    /// called.
    clones: OnceLock<Arc<()>>,
    pub(super) pollable: &'static Pollable,
    /// For the poll traits of async code.
    pub(super) extras: LazySlotExtras,
}

/// The socket that takes the place of closed ones. Empty if the process could not open it yet.
static UNCONNECTED: OnceLock<Socket> = OnceLock::new();

/// Opens [`UNCONNECTED`], in the first address family that the process may use.
#[cold]
fn open_unconnected_slow() {
    let families = [Domain::UNIX, Domain::IPV4, Domain::IPV6];
    let mut sockets = families.iter().map(|&family| Socket::new(family, Type::STREAM, None));
    if let Some(Ok(socket)) = sockets.find(Result::is_ok)
        && socket.set_nonblocking(true).is_ok()
    {
        // Another thread may have been faster; then this socket is closed.
        let _ = UNCONNECTED.set(socket);
    }
}

/// Returns the error of a call on a closed descriptor.
pub(super) fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "use of a closed network connection")
}

pub(super) fn timed_out() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the deadline has passed")
}

/// A call in progress.
pub(crate) struct ActiveCall<'a>(&'a Fd);

impl ActiveCall<'_> {
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the same open file while a call is in progress (invariant 2).
        unsafe { BorrowedFd::borrow_raw(self.0.raw) }
    }
}

impl AsFd for ActiveCall<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd()
    }
}

impl Drop for ActiveCall<'_> {
    fn drop(&mut self) {
        // AcqRel: the call that releases the file comes after the end of all other calls.
        let before = self.0.state.fetch_sub(1, Ordering::AcqRel);
        if before & !BORROWED == CLOSED | 1 {
            self.0.release();
        }
    }
}

impl Fd {
    /// Takes over a descriptor, which must be non-blocking already.
    pub(crate) fn new(fd: OwnedFd) -> Fd {
        if UNCONNECTED.get().is_none() {
            open_unconnected_slow();
        }
        Fd {
            raw: fd.into_raw_fd(),
            state: AtomicU64::new(0),
            timeouts: [const { AtomicU64::new(0) }; 2],
            canceled_contexts: AtomicU32::new(0),
            late_contexts: AtomicU32::new(0),
            short_read_drains: AtomicBool::new(false),
            refuses_to_wait: AtomicBool::new(false),
            clones: OnceLock::new(),
            pollable: Pollable::new(),
            extras: LazySlotExtras::new(),
        }
    }

    /// As [`Fd::new`], for a TCP socket that was just made, and that has had no options from
    /// outside this crate. With `SO_RCVLOWAT` or `TCP_ULP`, a short read would not mean that it is
    /// empty.
    pub(crate) fn new_tcp(fd: OwnedFd) -> Fd {
        let fd = Fd::new(fd);
        fd.short_read_drains.store(true, Ordering::Relaxed);
        fd
    }

    /// As [`Fd::new`], for a connection that `listener` has accepted. It has the listener's
    /// options.
    pub(crate) fn new_accepted(fd: OwnedFd, listener: &Fd) -> Fd {
        let fd = if listener.short_reads_drain() { Fd::new_tcp(fd) } else { Fd::new(fd) };
        fd.pollable.set_accepted(true);
        fd
    }

    /// Begins a call.
    ///
    /// # Errors
    /// `NotConnected` if the descriptor is closed.
    pub(crate) fn call(&self) -> io::Result<ActiveCall<'_>> {
        // A closed descriptor counts no calls: so exactly one call is the last one.
        let open = |state| (state & CLOSED == 0).then_some(state + 1);
        // Acquire: pairs with `close`.
        match self.state.fetch_update(Ordering::Acquire, Ordering::Relaxed, open) {
            Ok(_) => Ok(ActiveCall(self)),
            Err(_) => Err(closed()),
        }
    }

    /// Calls `f` with the socket. `f` must not wait.
    pub(crate) fn with<T>(&self, f: impl FnOnce(SockRef<'_>) -> io::Result<T>) -> io::Result<T> {
        let call = self.call()?;
        f(SockRef::from(&call))
    }

    /// Borrows the descriptor for the user. From now on `close` leaves its file in place.
    pub(crate) fn borrow(&self) -> BorrowedFd<'_> {
        let mut state = self.state.load(Ordering::Acquire);
        if state & BORROWED == 0 {
            // Acquire: pairs with the end of `release`.
            state = self.state.fetch_or(BORROWED, Ordering::Acquire);
        }
        while state & RELEASING != 0 {
            // The kernel may take as long as `SO_LINGER` says.
            calls::sleep_until(clock::after(RELEASE_POLL));
            state = self.state.load(Ordering::Acquire);
        }
        // SAFETY: open until `self` is dropped (invariant 1), and the same file (invariant 2).
        unsafe { BorrowedFd::borrow_raw(self.raw) }
    }

    /// Returns the number of the descriptor for user code, which may set options with it.
    pub(crate) fn raw_for_user(&self) -> RawFd {
        self.short_read_drains.store(false, Ordering::Relaxed);
        self.raw
    }

    /// Duplicates the descriptor. Both refer to the same open file.
    pub(crate) fn try_clone(&self) -> io::Result<Fd> {
        let call = self.call()?;
        // Options that are set for the clone are set for this descriptor too.
        self.short_read_drains.store(false, Ordering::Relaxed);
        let clone = Fd::new(call.fd().try_clone_to_owned()?);
        let _ = clone.clones.set(self.clones.get_or_init(Arc::default).clone());
        Ok(clone)
    }

    /// Sets whether calls of goroutines and threads return `WouldBlock` instead of waiting.
    ///
    /// # Errors
    /// `NotConnected` if the descriptor is closed.
    pub(crate) fn set_refuses_to_wait(&self, refuses: bool) -> io::Result<()> {
        let _call = self.call()?;
        self.refuses_to_wait.store(refuses, Ordering::Relaxed);
        Ok(())
    }

    /// Returns whether calls return `WouldBlock` instead of waiting.
    pub(super) fn refuses_to_wait(&self) -> bool {
        self.refuses_to_wait.load(Ordering::Relaxed)
    }

    /// Runs `attempt` until it returns something else than "would block".
    #[inline]
    pub(crate) fn io<T>(
        &self,
        direction: Direction,
        mut attempt: impl FnMut(BorrowedFd<'_>) -> syscalls::Result<T>,
    ) -> io::Result<T> {
        let mut value = None;
        self.retry(direction, &mut |fd| {
            value = Some(attempt(fd)?);
            Ok(())
        })?;
        match value {
            Some(value) => Ok(value),
            None => unreachable!("the last attempt has set the value"),
        }
    }

    /// Does the work of [`Fd::io`]. One function for all calls: it is compiled once, and the
    /// indirect call is nothing next to the system call behind it.
    fn retry(
        &self,
        direction: Direction,
        attempt: &mut dyn FnMut(BorrowedFd<'_>) -> syscalls::Result<()>,
    ) -> io::Result<()> {
        let call = self.call()?;
        #[cfg(feature = "std")]
        simulation::point();
        let mut limit = None;
        loop {
            if self.pollable.is_past_deadline(direction) {
                return Err(timed_out());
            }
            let seen = self.pollable.edges(direction);
            self.check_contexts()?;
            match attempt(call.fd()) {
                Err(Errno::AGAIN) => {
                    if self.refuses_to_wait() {
                        return Err(io::ErrorKind::WouldBlock.into());
                    }
                    let limit = *limit.get_or_insert_with(|| self.limit(direction));
                    self.wait_for(&call, direction, limit, seen)?;
                }
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
                Ok(()) => return Ok(()),
            }
        }
    }

    /// As [`Fd::io`], for reads of a stream into `len` bytes. `attempt` returns how many were read.
    #[inline]
    pub(crate) fn read(
        &self,
        len: usize,
        mut attempt: impl FnMut(BorrowedFd<'_>) -> syscalls::Result<usize>,
    ) -> io::Result<usize> {
        self.io(Direction::Read, |fd| {
            // Without a wait no event corrects the assumption that the stream is still empty.
            if self.refuses_to_wait() {
                attempt(fd)
            } else {
                self.read_unless_drained(len, || attempt(fd))
            }
        })
    }

    /// Makes one attempt to read into `len` bytes, unless the stream is known to be empty.
    #[inline]
    pub(super) fn read_unless_drained(
        &self,
        len: usize,
        attempt: impl FnOnce() -> syscalls::Result<usize>,
    ) -> syscalls::Result<usize> {
        // The caller read the edges too. An edge since then only means that this attempt is made.
        let seen = self.pollable.edges(Direction::Read);
        // A read into no bytes does not wait.
        if len != 0 && self.pollable.is_drained(seen) && self.short_reads_drain() {
            return Err(Errno::AGAIN);
        }
        let n = attempt()?;
        if n != 0 && n < len && self.short_reads_drain() {
            self.pollable.note_drained(seen);
        }
        Ok(n)
    }

    /// Returns whether a short read has emptied the stream: it is a TCP stream whose descriptor
    /// user code cannot have used.
    #[inline]
    fn short_reads_drain(&self) -> bool {
        self.short_read_drains.load(Ordering::Relaxed)
            && self.state.load(Ordering::Relaxed) & BORROWED == 0
    }

    /// Fails calls because a context is done, until [`Fd::remove_done_context`].
    pub(crate) fn add_done_context(&self, why: ContextError) {
        self.done_contexts(why).fetch_add(1, Ordering::Relaxed);
        self.pollable.wake_all_to_retry();
    }

    pub(crate) fn remove_done_context(&self, why: ContextError) {
        self.done_contexts(why).fetch_sub(1, Ordering::Relaxed);
    }

    fn done_contexts(&self, why: ContextError) -> &AtomicU32 {
        match why {
            ContextError::DeadlineExceeded => &self.late_contexts,
            _ => &self.canceled_contexts,
        }
    }

    pub(super) fn check_contexts(&self) -> io::Result<()> {
        if self.canceled_contexts.load(Ordering::Relaxed) != 0 {
            return Err(io::Error::other(ContextError::Canceled));
        }
        if self.late_contexts.load(Ordering::Relaxed) != 0 {
            let late = ContextError::DeadlineExceeded;
            return Err(io::Error::new(io::ErrorKind::TimedOut, late));
        }
        Ok(())
    }

    /// Returns the time at which the timeout ends for a call that begins to wait now.
    pub(crate) fn limit(&self, direction: Direction) -> Nanos {
        match self.timeouts[direction as usize].load(Ordering::Relaxed) {
            0 => NEVER,
            timeout => clock::now().saturating_add(timeout),
        }
    }

    /// Returns an error if a call that waits without the poller has to end.
    pub(crate) fn check(&self, direction: Direction, limit: Nanos) -> io::Result<()> {
        if self.state.load(Ordering::Acquire) & CLOSED != 0 {
            return Err(closed());
        }
        if self.pollable.is_past_deadline(direction) || (limit != NEVER && limit <= clock::now()) {
            return Err(timed_out());
        }
        self.check_contexts()
    }

    /// Returns how often `direction` was reported ready. Read it before an attempt, for
    /// [`Fd::wait_for`] after the attempt.
    pub(crate) fn edges(&self, direction: Direction) -> u32 {
        self.pollable.edges(direction)
    }

    /// Waits until `direction` may be ready, or until `limit`. Returns at once if there were edges
    /// since `seen`.
    pub(crate) fn wait_for(
        &self,
        _: &ActiveCall<'_>,
        direction: Direction,
        limit: Nanos,
        seen: u32,
    ) -> io::Result<()> {
        let sched = runtime::current_sched()?;
        match self.pollable.wait(sched, self.raw, direction, limit, seen)? {
            IoWait::Ready => Ok(()),
            IoWait::TimedOut => Err(timed_out()),
            IoWait::Closed => Err(closed()),
        }
    }

    /// Fails all calls, and releases the connection when the last call has left.
    ///
    /// # Errors
    /// `NotConnected` if the descriptor is closed already.
    pub(crate) fn close(&self) -> io::Result<()> {
        let call = self.call()?;
        // Release: pairs with the Acquire of `call`.
        if self.state.fetch_or(CLOSED, Ordering::AcqRel) & CLOSED != 0 {
            return Err(closed());
        }
        self.pollable.close();
        drop(call);
        Ok(())
    }

    /// Ends the connection as far as the kernel and the peer see it. The last call of a closed
    /// descriptor does it, once.
    #[cold]
    fn release(&self) {
        // The kernel drops the registration with the file, but a duplicate may keep that open.
        self.pollable.unregister(self.raw);
        // If `borrow` came first, `BORROWED` is set, the exchange fails, and the file stays.
        // Acquire: pairs with the ends of all other calls (`ActiveCall::drop`).
        let begin = (CLOSED, CLOSED | RELEASING);
        let order = (Ordering::Acquire, Ordering::Relaxed);
        if self.state.compare_exchange(begin.0, begin.1, order.0, order.1).is_ok() {
            let replaced = self.replace_file();
            // Release: a `borrow` that has waited gets the new file.
            self.state.fetch_and(!RELEASING, Ordering::Release);
            if replaced.is_ok() {
                return;
            }
        }
        // SAFETY: open (invariant 1).
        let fd = unsafe { BorrowedFd::borrow_raw(self.raw) };
        // It fails for pipes, which have no shutdown, and for sockets that are not connected.
        let _ = SockRef::from(&fd).shutdown(Shutdown::Both);
    }

    /// Puts an unconnected socket in the place of the file, which the kernel then closes.
    fn replace_file(&self) -> io::Result<()> {
        let unconnected = UNCONNECTED.get().ok_or(io::ErrorKind::Unsupported)?;
        // libc's function, because it tells the interposed calls that the number has a new file.
        // SAFETY: `self` owns the number, and no other code uses it: no call is in progress, and
        // there was no `as_fd`.
        let rc = unsafe { libc::dup3(unconnected.as_raw_fd(), self.raw, libc::O_CLOEXEC) };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Sets when calls in `direction` fail. `None` means never.
    pub(crate) fn set_deadline(
        &self,
        direction: Direction,
        deadline: Option<Instant>,
    ) -> io::Result<()> {
        let _call = self.call()?;
        let deadline = deadline.map_or(NEVER, |t| clock::at(t).min(NEVER - 1));
        self.pollable.set_deadline(direction, deadline);
        Ok(())
    }

    /// Sets how long each call may wait, counted from when it begins to wait. Zero is an error, as
    /// in std.
    pub(crate) fn set_timeout(
        &self,
        direction: Direction,
        timeout: Option<Duration>,
    ) -> io::Result<()> {
        let _call = self.call()?;
        let nanos = match timeout {
            None => 0,
            Some(Duration::ZERO) => {
                let text = "cannot set a 0 duration timeout";
                return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
            }
            Some(timeout) => u64::try_from(timeout.as_nanos()).unwrap_or(NEVER),
        };
        self.timeouts[direction as usize].store(nanos, Ordering::Relaxed);
        self.end_polled_call(direction);
        Ok(())
    }

    pub(crate) fn timeout(&self, direction: Direction) -> Option<Duration> {
        match self.timeouts[direction as usize].load(Ordering::Relaxed) {
            0 => None,
            nanos => Some(Duration::from_nanos(nanos)),
        }
    }

    /// Returns whether [`Fd::close`] was called.
    pub(super) fn is_closed(&self) -> bool {
        // Acquire: pairs with `close`.
        self.state.load(Ordering::Acquire) & CLOSED != 0
    }

    /// Returns the descriptor, which the caller may make blocking.
    ///
    /// # Errors
    /// `NotConnected` if the descriptor is closed, and `ResourceBusy` if a clone is alive: it would
    /// become blocking, too. The number becomes free then.
    pub(crate) fn into_owned(mut self) -> io::Result<OwnedFd> {
        if *self.state.get_mut() & CLOSED != 0 {
            return Err(closed());
        }
        if self.clones.get().is_some_and(|clones| Arc::strong_count(clones) > 1) {
            let text = "a clone made by try_clone is alive";
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, text));
        }
        let mut this = ManuallyDrop::new(self);
        drop(std::mem::take(&mut this.extras));
        drop(std::mem::take(&mut this.clones));
        this.pollable.unregister(this.raw);
        this.pollable.free();
        // SAFETY: `self` owned it and is not dropped.
        Ok(unsafe { OwnedFd::from_raw_fd(this.raw) })
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        if *self.state.get_mut() & CLOSED == 0 {
            // As in `release`.
            self.pollable.unregister(self.raw);
        }
        self.pollable.free();
        // SAFETY: `self` owns it, and borrows of `self` have ended.
        drop(unsafe { OwnedFd::from_raw_fd(self.raw) });
    }
}

impl AsRawFd for Fd {
    fn as_raw_fd(&self) -> RawFd {
        self.raw
    }
}

/// Calls `f` with std's socket of type `S` on the descriptor, which stays open.
pub(super) fn borrow_as_std<S: FromRawFd, T>(fd: BorrowedFd<'_>, f: impl FnOnce(&S) -> T) -> T {
    // SAFETY: open while `f` runs; std's socket is never dropped, so it does not close it.
    let socket = ManuallyDrop::new(unsafe { S::from_raw_fd(fd.as_raw_fd()) });
    f(&socket)
}

/// Returns as many of the slices as the kernel takes at once; more would be an error.
pub(super) fn at_most_iov_max<'a, 'b>(bufs: &'a [IoSlice<'b>]) -> &'a [IoSlice<'b>] {
    &bufs[..bufs.len().min(libc::UIO_MAXIOV as usize)]
}
