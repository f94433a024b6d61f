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

use crate::runtime;
use crate::sched::pollable::{Pollable, Side, Waited};
use crate::sys::clock::{self, NEVER, Nanos};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

const CLOSED: u64 = 1 << 63;

/// See the head of the file.
pub(crate) struct Fd {
    raw: RawFd,
    state: AtomicU64,
    /// A deadline was ever set: only then each call asks for it.
    limited: [AtomicBool; 2],
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
            limited: [const { AtomicBool::new(false) }; 2],
            pollable: Pollable::new(),
        }
    }

    /// Begins a call.
    ///
    /// # Errors
    /// If it is closed.
    pub(crate) fn call(&self) -> io::Result<Call<'_>> {
        let call = Call(self);
        // Acquire: pairs with `close`.
        if self.state.fetch_add(1, Ordering::Acquire) & CLOSED != 0 {
            drop(call);
            return Err(closed());
        }
        Ok(call)
    }

    /// Runs `attempt` until it does not say that it would block.
    #[inline]
    pub(crate) fn io<T>(
        &self,
        side: Side,
        mut attempt: impl FnMut(BorrowedFd<'_>) -> rustix::io::Result<T>,
    ) -> io::Result<T> {
        let call = self.call()?;
        loop {
            if self.limited[side as usize].load(Ordering::Relaxed) && self.pollable.is_late(side) {
                return Err(timed_out());
            }
            match attempt(call.fd()) {
                Err(rustix::io::Errno::AGAIN) => self.wait_for(&call, side, NEVER)?,
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
                Ok(value) => return Ok(value),
            }
        }
    }

    /// Waits until `side` may be ready, or until `limit`.
    pub(crate) fn wait_for(&self, _: &Call<'_>, side: Side, limit: Nanos) -> io::Result<()> {
        let sched = runtime::current_sched()?;
        match self.pollable.wait(sched, self.raw, side, limit)? {
            Waited::Ready => Ok(()),
            Waited::TimedOut => Err(timed_out()),
            Waited::Closed => Err(closed()),
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
        self.pollable.forget(self.raw);
        self.pollable.free();
        // SAFETY: ours, and nobody uses it any more.
        drop(unsafe { OwnedFd::from_raw_fd(self.raw) });
    }

    pub(crate) fn set_deadline(&self, side: Side, deadline: Option<Instant>) -> io::Result<()> {
        let _call = self.call()?;
        let deadline = deadline.map_or(NEVER, |t| clock::at(t).min(NEVER - 1));
        self.limited[side as usize].store(deadline != NEVER, Ordering::Relaxed);
        self.pollable.set_deadline(side, deadline);
        Ok(())
    }

    /// Gives the descriptor out of our hands, still non-blocking.
    pub(crate) fn into_owned(self) -> io::Result<OwnedFd> {
        let this = ManuallyDrop::new(self);
        if this.state.load(Ordering::Acquire) & CLOSED != 0 {
            return Err(closed());
        }
        this.pollable.forget(this.raw);
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
