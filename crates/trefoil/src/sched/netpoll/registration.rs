//! Where a descriptor is registered: with the poller of which runtime, and in which shard.
//!
//! # The accepted end follows the connecting end
//! The kernel handles a packet on the CPU that receives it; on the loopback device, that is the
//! CPU of the sender. If the goroutine that waits for the packet runs on another CPU, the sockets
//! and the epoll instance change their CPU with every message. So the goroutine that waits for an
//! accepted connection asks the kernel now and then which CPU that is (`SO_INCOMING_CPU`), and
//! moves the registration to the shard of the P that runs there ([`Pollable::move_to`]). The
//! connecting end does not do this: if both ends did, they would change places. An echo with 64
//! connections, both ends in one process, on two Ps: 204,000 requests per second without it,
//! 294,000 with it.
//!
//! # Any other descriptor follows its reader
//! A goroutine that opens all connections registers them in the shard of its own P. The goroutines
//! that use them are then woken on that P, stolen by others, and woken there again, and the
//! accepted ends follow them to that P. So if a reader has waited on another P
//! [`WAITS_BEFORE_MOVE`] times in a row, the registration moves to the shard of the P on which it
//! waits now. An echo with 64 connections that one goroutine has opened: 204,000 requests per
//! second without it, 245,000 with it.

use crate::sched::Sched;
use crate::sched::netpoll::pollable::{Direction, Pollable};
use crate::sched::netpoll::poller::{Poller, Shard};
use crate::sched::simulation::Undecided;
use crate::sched::wait::inside;
use crate::sys::raw::syscall;
use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

/// How often a reader of an accepted connection waits before it asks again for the CPU that handles
/// the packets. The question takes a tenth of the time of a message.
const WAITS_BETWEEN_FOLLOWS: u32 = 32;

/// How many times in a row a reader waits on another P than that of the shard before the
/// registration moves. More than one, because a goroutine that is stolen once often comes back; 2
/// to 8 are equally good.
const WAITS_BEFORE_MOVE: u32 = 4;

fn not_pollable() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "this kind of file cannot be waited for")
}

/// Returns the CPU on which the kernel last handled a packet for a socket.
fn incoming_cpu(fd: RawFd) -> Option<i32> {
    let mut cpu: libc::c_int = -1;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    let args = [
        fd as usize,
        libc::SOL_SOCKET as usize,
        libc::SO_INCOMING_CPU as usize,
        &raw mut cpu as usize,
        &raw mut len as usize,
    ];
    // SAFETY: the kernel writes an int of our own.
    let rc = unsafe { syscall(libc::SYS_getsockopt, args) };
    (rc == 0).then_some(cpu)
}

impl Pollable {
    /// Returns the shard of `poller` in which the descriptor is registered, if there is one.
    pub(super) fn registered_shard(&self, poller: &Poller) -> Option<&'static Shard> {
        // Acquire: pairs with the Release in `set_shard`.
        Shard::from_handle(self.shard.load(Ordering::Acquire)).filter(|shard| poller.owns(shard))
    }

    fn set_shard(&self, shard: &'static Shard) {
        // Release: a thread that reads the shard finds the descriptor registered there.
        self.shard.store(shard.handle(), Ordering::Release);
    }

    /// Returns the shard of this runtime in which the descriptor is registered. If there is none,
    /// returns the shard of the caller's P, in which it is to be registered.
    fn shard_for(&self, sched: &Sched) -> io::Result<&'static Shard> {
        match self.registered_shard(sched.poller) {
            Some(shard) => Ok(shard),
            None => sched.poller.open_shard(inside(|here| here.map_or(0, |rt| rt.p().id))),
        }
    }

    /// Registers the descriptor with the runtime's poller, unless it is registered already. A
    /// goroutine that is about to wait for `direction` calls it.
    #[inline(never)]
    pub(super) fn register(
        &'static self,
        sched: &Sched,
        fd: RawFd,
        direction: Direction,
    ) -> io::Result<&'static Shard> {
        let _undecided = Undecided::begin();
        if let Some(shard) = self.registered_shard(sched.poller) {
            return Ok(match self.shard_to_follow(sched, fd, direction) {
                Some(to) => self.move_to(fd, shard, to),
                None => shard,
            });
        }
        let shard = match self.shard_to_follow(sched, fd, direction) {
            Some(shard) => shard,
            None => self.shard_for(sched)?,
        };
        if !shard.epoll.add(fd, self.event_data())? {
            return Err(not_pollable());
        }
        self.set_shard(shard);
        Ok(shard)
    }

    /// Records whether the descriptor is an accepted connection, which follows the connecting end;
    /// any other follows its reader.
    pub(crate) fn set_accepted(&self, is_accepted: bool) {
        self.is_accepted.store(is_accepted, Ordering::Relaxed);
        self.reader_waits.store(0, Ordering::Relaxed);
    }

    /// Returns the shard to which the registration should move, if it should, before a goroutine
    /// waits for `direction`.
    #[inline]
    fn shard_to_follow(
        &self,
        sched: &Sched,
        fd: RawFd,
        direction: Direction,
    ) -> Option<&'static Shard> {
        if direction == Direction::Write {
            return None;
        }
        let waits = self.reader_waits.load(Ordering::Relaxed);
        if !self.is_accepted.load(Ordering::Relaxed) {
            return self.shard_of_reader(sched, waits);
        }
        self.reader_waits.store(waits.wrapping_add(1), Ordering::Relaxed);
        // More often at first: goroutines that were just started are often stolen.
        if !waits.is_multiple_of(WAITS_BETWEEN_FOLLOWS) && !waits.is_power_of_two() {
            return None;
        }
        self.shard_of_peer(sched, fd)
    }

    /// Returns the shard of the P on whose CPU the kernel handles the packets of the connection, if
    /// it is another shard than the present one.
    #[inline(never)]
    fn shard_of_peer(&self, sched: &Sched, fd: RawFd) -> Option<&'static Shard> {
        // A socket without packets, such as a Unix socket, has the CPU −1.
        let cpu = incoming_cpu(fd).filter(|&cpu| cpu >= 0)?;
        let to = sched.poller.shard_on_cpu(cpu)?;
        (to.handle() != self.shard.load(Ordering::Relaxed)).then_some(to)
    }

    /// Returns the shard of the reader's P, if the reader has waited on other Ps than that of the
    /// present shard [`WAITS_BEFORE_MOVE`] times in a row. `waits` is the number of such waits so
    /// far.
    #[inline]
    fn shard_of_reader(&self, sched: &Sched, waits: u32) -> Option<&'static Shard> {
        let p = inside(|here| here.map(|rt| rt.p().id))?;
        if sched.poller.shard_of(p).handle() == self.shard.load(Ordering::Relaxed) {
            if waits != 0 {
                self.reader_waits.store(0, Ordering::Relaxed);
            }
            return None;
        }
        self.reader_waits.store(waits + 1, Ordering::Relaxed);
        if waits + 1 < WAITS_BEFORE_MOVE {
            return None;
        }
        self.reader_waits.store(0, Ordering::Relaxed);
        sched.poller.open_shard(p).ok()
    }

    /// Moves the registration from `from` to `to`, unless a goroutine waits for the descriptor.
    /// Returns the shard in which it is registered then. If the descriptor is ready, `to` reports
    /// that, so no edge is lost.
    #[cold]
    fn move_to(
        &'static self,
        fd: RawFd,
        from: &'static Shard,
        to: &'static Shard,
    ) -> &'static Shard {
        inside(|_| {
            let inner = self.inner.lock();
            // Another reader may have moved it meanwhile.
            if !inner.is_unused() || self.shard.load(Ordering::Relaxed) != from.handle() {
                return from;
            }
            // First the new one: it may fail, because epoll watches are exhausted. Two
            // registrations at the same time do no harm.
            if !matches!(to.epoll.add(fd, self.event_data()), Ok(true)) {
                return from;
            }
            self.set_shard(to);
            from.epoll.remove(fd);
            to
        })
    }

    /// Removes the descriptor from the poller, because it gets another owner.
    pub(crate) fn unregister(&self, fd: RawFd) {
        // Acquire: pairs with the Release in `set_shard`.
        if let Some(shard) = Shard::from_handle(self.shard.load(Ordering::Acquire)) {
            shard.epoll.remove(fd);
        }
    }

    /// Registers the descriptor with the runtime's poller before any task waits for it. If it is
    /// ready, edges follow.
    pub(crate) fn watch(&'static self, sched: &Sched, fd: RawFd) -> io::Result<()> {
        self.register(sched, fd, Direction::Write).map(drop)
    }

    /// Registers the descriptor for `direction` and for the directions that other goroutines have
    /// armed. [`Pollable::disarm`] undoes it.
    #[cfg(feature = "std")]
    pub(super) fn arm(
        &'static self,
        sched: &Sched,
        fd: RawFd,
        direction: Direction,
    ) -> io::Result<&'static Shard> {
        let _undecided = Undecided::begin();
        let to = self.shard_to_follow(sched, fd, direction);
        let shard = self.shard_for(sched)?;
        let (shard, is_pollable) = inside(|_| {
            // Under the lock: of two goroutines that arm, the second knows of the first.
            let mut inner = self.inner.lock();
            let shard = match to {
                Some(to) if inner.is_unused() => {
                    self.unregister(fd);
                    to
                }
                _ => shard,
            };
            inner.armed[direction as usize] += 1;
            let [read, write] = inner.armed.map(|n| n > 0);
            let armed = shard.epoll.arm(fd, self.event_data(), read, write);
            match armed {
                Ok(true) => self.set_shard(shard),
                _ => inner.armed[direction as usize] -= 1,
            }
            armed.map(|is_pollable| (shard, is_pollable))
        })?;
        if is_pollable { Ok(shard) } else { Err(not_pollable()) }
    }

    /// Undoes one [`Pollable::arm`].
    #[cfg(feature = "std")]
    pub(super) fn disarm(&self, direction: Direction) {
        let _undecided = Undecided::begin();
        inside(|_| self.inner.lock().armed[direction as usize] -= 1);
    }
}
