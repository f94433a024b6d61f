//! A descriptor that goroutines wait for: what every type of `net` is made of.
//!
//! The descriptor is non-blocking; a call that the kernel cannot serve at once waits in its [`Pollable`] and is
//! tried again. Any number of goroutines and plain threads may use it at the same time.
//!
//! # Closing
//! `close` takes `&self`: it ends calls that wait, on other goroutines. The descriptor itself is given back to
//! the kernel only when the last call has left: otherwise its number could be somebody else's file in the
//! middle of a `read`.
//!
//! | `state` | meaning |
//! |---|---|
//! | bits 0–62 | calls under way |
//! | bit 63 | closed: no new calls; the last one out closes the descriptor |

use crate::context::ContextError;
use crate::runtime;
use crate::sched::netpoll::pollable::{Direction, IoWait, Pollable};
use crate::sys::clock::{self, NEVER, Nanos};
use socket2::SockRef;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const CLOSED: u64 = 1 << 63;

/// See the head of the file.
pub(crate) struct Fd {
    raw: RawFd,
    state: AtomicU64,
    /// What each call may wait, in nanoseconds; 0: for ever.
    timeouts: [AtomicU64; 2],
    /// Guards of contexts that are done: of those cancelled, and of those too late (`cancel.rs`).
    cancelled: [AtomicU32; 2],
    pollable: &'static Pollable,
}

/// The descriptor was closed while the call waited, or before it began.
fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "use of a closed network connection")
}

fn timed_out() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the deadline has passed")
}

/// A call under way.
pub(crate) struct Call<'a>(&'a Fd);

impl Call<'_> {
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open while a call is under way.
        unsafe { BorrowedFd::borrow_raw(self.0.raw) }
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        // AcqRel: who closes it has seen all calls end.
        if self.0.state.fetch_sub(1, Ordering::AcqRel) == CLOSED | 1 {
            self.0.give_back();
        }
    }
}

impl Fd {
    /// Takes over a descriptor that is non-blocking already.
    pub(crate) fn new(fd: OwnedFd) -> Fd {
        Fd {
            raw: fd.into_raw_fd(),
            state: AtomicU64::new(0),
            timeouts: [const { AtomicU64::new(0) }; 2],
            cancelled: [const { AtomicU32::new(0) }; 2],
            pollable: Pollable::new(),
        }
    }

    /// Begins a call.
    ///
    /// # Errors
    /// If it is closed.
    pub(crate) fn call(&self) -> io::Result<Call<'_>> {
        // Not counted if it is closed: the last one out closes the descriptor, once.
        let open = |state| (state & CLOSED == 0).then_some(state + 1);
        // Acquire: pairs with `close`.
        match self.state.fetch_update(Ordering::Acquire, Ordering::Relaxed, open) {
            Ok(_) => Ok(Call(self)),
            Err(_) => Err(closed()),
        }
    }

    /// The socket, for a call that does not wait.
    pub(crate) fn with<T>(&self, f: impl FnOnce(SockRef<'_>) -> io::Result<T>) -> io::Result<T> {
        let call = self.call()?;
        let fd = call.fd();
        f(SockRef::from(&fd))
    }

    /// Another descriptor of the same open file.
    pub(crate) fn try_clone(&self) -> io::Result<Fd> {
        let call = self.call()?;
        Ok(Fd::new(call.fd().try_clone_to_owned()?))
    }

    /// Runs `attempt` until it does not say that it would block.
    #[inline]
    pub(crate) fn io<T>(
        &self,
        side: Direction,
        mut attempt: impl FnMut(BorrowedFd<'_>) -> rustix::io::Result<T>,
    ) -> io::Result<T> {
        let call = self.call()?;
        let mut limit = None;
        loop {
            if self.pollable.is_past_deadline(side) {
                return Err(timed_out());
            }
            let seen = self.pollable.edges(side);
            self.check_contexts()?;
            match attempt(call.fd()) {
                Err(rustix::io::Errno::AGAIN) => {
                    let limit = *limit.get_or_insert_with(|| self.limit(side));
                    self.wait_for(&call, side, limit, seen)?;
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
                Ok(value) => return Ok(value),
            }
        }
    }

    /// A context of this socket is done (or is forgotten again): who waits looks again.
    pub(crate) fn set_cancelled(&self, why: ContextError, is: bool) {
        let count = &self.cancelled[usize::from(why == ContextError::DeadlineExceeded)];
        if is {
            count.fetch_add(1, Ordering::Relaxed);
            self.pollable.wake_all_to_retry();
        } else {
            count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn check_contexts(&self) -> io::Result<()> {
        let is = |count: &AtomicU32| count.load(Ordering::Relaxed) != 0;
        let [cancelled, late] = &self.cancelled;
        if is(cancelled) {
            return Err(io::Error::other(ContextError::Canceled));
        }
        if is(late) {
            let late = ContextError::DeadlineExceeded;
            return Err(io::Error::new(io::ErrorKind::TimedOut, late));
        }
        Ok(())
    }

    /// Until when a call that begins to wait now may wait, by the timeout for each call.
    pub(crate) fn limit(&self, side: Direction) -> Nanos {
        match self.timeouts[side as usize].load(Ordering::Relaxed) {
            0 => NEVER,
            timeout => clock::now().saturating_add(timeout),
        }
    }

    /// For a call that waits without the poller: whether it may go on.
    pub(crate) fn check(&self, side: Direction, limit: Nanos) -> io::Result<()> {
        if self.state.load(Ordering::Acquire) & CLOSED != 0 {
            return Err(closed());
        }
        if self.pollable.is_past_deadline(side) || (limit != NEVER && limit <= clock::now()) {
            return Err(timed_out());
        }
        self.check_contexts()
    }

    /// How often `side` was reported to be ready: for [`Fd::wait_for`] after an attempt.
    pub(crate) fn edges(&self, side: Direction) -> u32 {
        self.pollable.edges(side)
    }

    /// Waits until `side` may be ready, or until `limit`, unless there were edges since `seen`.
    pub(crate) fn wait_for(
        &self,
        _: &Call<'_>,
        side: Direction,
        limit: Nanos,
        seen: u32,
    ) -> io::Result<()> {
        let sched = runtime::current_sched()?;
        match self.pollable.wait(sched, self.raw, side, limit, seen)? {
            IoWait::Ready => Ok(()),
            IoWait::TimedOut => Err(timed_out()),
            IoWait::Closed => Err(closed()),
        }
    }

    /// Ends all calls, and then the descriptor. Closing twice is an error.
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

    /// The last user gives it to the kernel.
    fn give_back(&self) {
        // The kernel forgets closed files by itself, but not while a clone keeps the file open.
        self.pollable.unregister(self.raw);
        self.pollable.free();
        // SAFETY: ours, and nobody uses it any more.
        drop(unsafe { OwnedFd::from_raw_fd(self.raw) });
    }

    pub(crate) fn set_deadline(
        &self,
        side: Direction,
        deadline: Option<Instant>,
    ) -> io::Result<()> {
        let _call = self.call()?;
        let deadline = deadline.map_or(NEVER, |t| clock::at(t).min(NEVER - 1));
        self.pollable.set_deadline(side, deadline);
        Ok(())
    }

    /// What each call may wait, from when it begins to. A zero is std's error.
    pub(crate) fn set_timeout(&self, side: Direction, timeout: Option<Duration>) -> io::Result<()> {
        let _call = self.call()?;
        let nanos = match timeout {
            None => 0,
            Some(Duration::ZERO) => {
                let text = "cannot set a 0 duration timeout";
                return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
            }
            Some(timeout) => u64::try_from(timeout.as_nanos()).unwrap_or(NEVER),
        };
        self.timeouts[side as usize].store(nanos, Ordering::Relaxed);
        Ok(())
    }

    pub(crate) fn timeout(&self, side: Direction) -> Option<Duration> {
        match self.timeouts[side as usize].load(Ordering::Relaxed) {
            0 => None,
            nanos => Some(Duration::from_nanos(nanos)),
        }
    }

    /// Gives the descriptor out of our hands, still non-blocking.
    pub(crate) fn into_owned(self) -> io::Result<OwnedFd> {
        let this = ManuallyDrop::new(self);
        if this.state.load(Ordering::Acquire) & CLOSED != 0 {
            return Err(closed());
        }
        this.pollable.unregister(this.raw);
        this.pollable.free();
        // SAFETY: ours alone (`self`), and handed over.
        Ok(unsafe { OwnedFd::from_raw_fd(this.raw) })
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        if *self.state.get_mut() & CLOSED == 0 {
            self.give_back();
        }
    }
}

impl AsRawFd for Fd {
    fn as_raw_fd(&self) -> RawFd {
        self.raw
    }
}
