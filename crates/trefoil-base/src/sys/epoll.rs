//! epoll instances. One instance of a group has an eventfd, which interrupts waits: a *break*, as
//! Go's netpollBreak.
//!
//! A thread waits in one instance ([`Epoll::wait`]), or for any of a group ([`wait_any`], by
//! `ppoll`). Nested instances would make the kernel process every event twice.
//!
//! Several threads may wait at once (the idle poller, an M that was the idle poller a moment ago,
//! sysmon), and the kernel wakes any of them. So a break is meant *for* one thread, and only that
//! thread consumes it: the eventfd counts the threads that have to return ([`PollSlot`]), and stays
//! readable until all of them have.

use super::clock::{NEVER, Nanos, now};
use super::raw::{syscall, to_libc};
use crate::shim::full_fence;
use std::io;
use std::os::fd::RawFd;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering};

/// Events taken by one call, as in Go.
pub const BATCH: usize = 128;

/// What a descriptor is registered for: both directions and urgent data, edge-triggered.
const INTEREST: u32 =
    (libc::EPOLLIN | libc::EPOLLPRI | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET) as u32;
/// The events that end the wait of a reader, and of a writer.
const READABLE: u32 = (libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLHUP | libc::EPOLLERR) as u32;
const WRITABLE: u32 = (libc::EPOLLOUT | libc::EPOLLHUP | libc::EPOLLERR) as u32;

/// The events after which a short read does not prove that a TCP stream is drained: its end, an
/// error, or urgent data.
const SPECIAL: u32 = (libc::EPOLLRDHUP | libc::EPOLLHUP | libc::EPOLLERR | libc::EPOLLPRI) as u32;

/// The `data` of the eventfd.
const BREAK: u64 = 0;
/// A semaphore: each read consumes one break.
const BREAK_FLAGS: i32 = libc::EFD_CLOEXEC | libc::EFD_NONBLOCK | libc::EFD_SEMAPHORE;

/// One reported event.
#[derive(Clone, Copy)]
pub struct Event {
    /// The `data` that the descriptor was registered with.
    pub data: u64,
    pub readable: bool,
    pub writable: bool,
    /// The stream has ended or failed, or has urgent data.
    pub special: bool,
}

/// An epoll instance. Its memory is never freed (`sched` leaks it), its descriptors live until
/// `close`.
pub struct Epoll {
    /// −1 while it is not open. Stored with Release after `break_fd`, and loaded with Acquire: a
    /// thread that finds it open sees `break_fd` too.
    fd: AtomicI32,
    /// The eventfd; −1 if this instance of the group has none.
    break_fd: AtomicI32,
    /// Set if the kernel has no `epoll_pwait2` (before 5.11): then timeouts are in milliseconds.
    coarse: AtomicBool,
}

/// Makes an epoll instance. Not by libc's function: a simulation would take it for the program's.
fn create() -> i32 {
    // SAFETY: makes a descriptor.
    to_libc(unsafe { syscall(libc::SYS_epoll_create1, [libc::EPOLL_CLOEXEC as usize]) }) as i32
}

/// Makes an eventfd, as [`create`] does.
fn create_eventfd() -> i32 {
    // SAFETY: makes a descriptor.
    to_libc(unsafe { syscall(libc::SYS_eventfd2, [0, BREAK_FLAGS as usize]) }) as i32
}

impl Epoll {
    /// Makes one that is not open: the runtime has not used the network yet.
    pub const fn new() -> Epoll {
        Epoll {
            fd: AtomicI32::new(-1),
            break_fd: AtomicI32::new(-1),
            coarse: AtomicBool::new(false),
        }
    }

    /// Opens it without an eventfd. Only one thread at a time calls this.
    pub fn open(&self) -> io::Result<()> {
        if !self.is_open() {
            let fd = check(create())?;
            self.fd.store(fd, Ordering::Release);
        }
        Ok(())
    }

    /// Opens it with the eventfd of its group. Only one thread at a time calls this.
    pub fn open_with_breaks(&self) -> io::Result<()> {
        if self.is_open() {
            return Ok(());
        }
        // SAFETY: calls that make descriptors, and one that registers one of them.
        unsafe {
            let fd = check(create())?;
            let break_fd = match check(create_eventfd()) {
                Ok(break_fd) => break_fd,
                Err(e) => {
                    libc::close(fd);
                    return Err(e);
                }
            };
            let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: BREAK };
            let rc = libc::epoll_ctl(fd, libc::EPOLL_CTL_ADD, break_fd, &raw mut event);
            if let Err(e) = check(rc) {
                libc::close(break_fd);
                libc::close(fd);
                return Err(e);
            }
            self.break_fd.store(break_fd, Ordering::Relaxed);
            self.fd.store(fd, Ordering::Release);
        }
        Ok(())
    }

    #[inline]
    pub fn is_open(&self) -> bool {
        self.fd.load(Ordering::Acquire) >= 0
    }

    /// Closes the descriptors. No thread waits in it any more.
    pub fn close(&self) {
        for fd in [&self.fd, &self.break_fd] {
            let fd = fd.swap(-1, Ordering::AcqRel);
            if fd >= 0 {
                // SAFETY: our descriptor, which no thread uses any more (caller).
                unsafe { syscall(libc::SYS_close, [fd as usize]) };
            }
        }
    }

    /// Registers `fd` for both directions, for as long as it is open; `data` is not 0. Returns
    /// false if `fd` cannot be polled (a regular file).
    pub fn add(&self, fd: RawFd, data: u64) -> io::Result<bool> {
        debug_assert!(data != BREAK);
        let mut event = libc::epoll_event { events: INTEREST, u64: data };
        let epoll = self.fd.load(Ordering::Acquire);
        // SAFETY: one event of our own.
        unsafe {
            if libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fd, &raw mut event) == 0 {
                return Ok(true);
            }
            let e = io::Error::last_os_error();
            match e.raw_os_error() {
                // The same open file is registered already, with other data.
                Some(libc::EEXIST) => {
                    if libc::epoll_ctl(epoll, libc::EPOLL_CTL_MOD, fd, &raw mut event) == 0 {
                        return Ok(true);
                    }
                    Err(io::Error::last_os_error())
                }
                Some(libc::EPERM) => Ok(false),
                _ => Err(e),
            }
        }
    }

    /// Registers `fd` as [`Epoll::add`] does, but only for the directions that are true. It is
    /// probably registered already; if it is ready in one of the directions, that is reported
    /// again.
    #[cfg(feature = "std")]
    pub fn arm(&self, fd: RawFd, data: u64, read: bool, write: bool) -> io::Result<bool> {
        let mut events = libc::EPOLLET;
        if read {
            events |= libc::EPOLLIN | libc::EPOLLRDHUP;
        }
        if write {
            events |= libc::EPOLLOUT;
        }
        let mut event = libc::epoll_event { events: events as u32, u64: data };
        let epoll = self.fd.load(Ordering::Acquire);
        // SAFETY: one event of our own.
        let mut tell = |op| unsafe { libc::epoll_ctl(epoll, op, fd, &raw mut event) == 0 };
        // The second MOD is for the case that another thread has added it in between.
        if [libc::EPOLL_CTL_MOD, libc::EPOLL_CTL_ADD, libc::EPOLL_CTL_MOD]
            .into_iter()
            .any(&mut tell)
        {
            return Ok(true);
        }
        // SAFETY: as above; the call is repeated for its error.
        if unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fd, &raw mut event) } == 0 {
            return Ok(true);
        }
        let e = io::Error::last_os_error();
        if e.raw_os_error() == Some(libc::EPERM) { Ok(false) } else { Err(e) }
    }

    /// Unregisters `fd`.
    pub fn remove(&self, fd: RawFd) {
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: one event of our own. `fd` may be unregistered already.
        unsafe {
            libc::epoll_ctl(
                self.fd.load(Ordering::Acquire),
                libc::EPOLL_CTL_DEL,
                fd,
                &raw mut event,
            )
        };
    }

    /// Waits until `deadline` at most (0: not at all), and calls `each` with every event. Returns
    /// the number of events, without breaks.
    pub fn wait(&self, deadline: Nanos, mut each: impl FnMut(Event)) -> usize {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; BATCH];
        let n = self.wait_raw(deadline, &mut events);
        let mut count = 0;
        for event in &events[..n] {
            let (bits, data) = (event.events, event.u64);
            if data == BREAK {
                continue; // the thread that it is meant for consumes it
            }
            count += 1;
            let (readable, writable) = (bits & READABLE != 0, bits & WRITABLE != 0);
            each(Event { data, readable, writable, special: bits & SPECIAL != 0 });
        }
        count
    }

    fn wait_raw(&self, deadline: Nanos, events: &mut [libc::epoll_event; BATCH]) -> usize {
        let fd = self.fd.load(Ordering::Acquire);
        let left = if deadline == 0 { 0 } else { deadline.saturating_sub(now()) };
        if !self.coarse.load(Ordering::Relaxed) {
            let limit = libc::timespec {
                tv_sec: (left / 1_000_000_000) as i64,
                tv_nsec: (left % 1_000_000_000) as i64,
            };
            let limit = if deadline == NEVER { 0 } else { &raw const limit as usize };
            let args = [fd as usize, events.as_mut_ptr() as usize, BATCH, limit];
            // SAFETY: room for BATCH events; the limit outlives the call; no mask.
            let n = unsafe { syscall(libc::SYS_epoll_pwait2, args) };
            if n != -(libc::ENOSYS as isize) {
                return n.max(0) as usize; // below zero: a signal; the caller polls again
            }
            self.coarse.store(true, Ordering::Relaxed);
        }
        let ms = match deadline {
            NEVER => usize::MAX,
            _ => left.div_ceil(1_000_000).min(i32::MAX as u64) as usize,
        };
        let args = [fd as usize, events.as_mut_ptr() as usize, BATCH, ms];
        // SAFETY: as above.
        unsafe { syscall(libc::SYS_epoll_pwait, args) }.max(0) as usize
    }

    fn break_fd(&self) -> usize {
        self.break_fd.load(Ordering::Relaxed) as usize
    }

    /// Makes one waiting thread return.
    fn put_break(&self) {
        let one = 1u64;
        // SAFETY: writes eight bytes of our own.
        unsafe { syscall(libc::SYS_write, [self.break_fd(), &raw const one as usize, 8]) };
    }

    /// Consumes one break. Returns false if its sender has not written it yet.
    fn take_break(&self) -> bool {
        let mut count = 0u64;
        // SAFETY: reads eight bytes into our own.
        unsafe { syscall(libc::SYS_read, [self.break_fd(), &raw mut count as usize, 8]) == 8 }
    }
}

/// Waits until one of the group has events (or a break), until `deadline` at most. Returns a bit
/// for each instance that has.
pub fn wait_any<'a>(group: impl Iterator<Item = &'a Epoll>, deadline: Nanos) -> u32 {
    const NONE: libc::pollfd = libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 };
    let mut fds = [NONE; u32::BITS as usize];
    let mut len = 0;
    for epoll in group.take(fds.len()) {
        // The kernel skips instances that are not open: their descriptor is −1.
        fds[len].fd = epoll.fd.load(Ordering::Acquire);
        len += 1;
    }
    let left = if deadline == 0 { 0 } else { deadline.saturating_sub(now()) };
    let mut limit = libc::timespec {
        tv_sec: (left / 1_000_000_000) as i64,
        tv_nsec: (left % 1_000_000_000) as i64,
    };
    let limit = if deadline == NEVER { 0 } else { &raw mut limit as usize };
    // SAFETY: `len` entries of our own; the limit, which the kernel changes, outlives the call; no
    // mask.
    unsafe { syscall(libc::SYS_ppoll, [fds.as_mut_ptr() as usize, len, limit]) };
    (0..len).filter(|&i| fds[i].revents != 0).fold(0, |bits, i| bits | 1 << i)
}

/// Returns the descriptor, or the error of the call that should have made it.
fn check(fd: RawFd) -> io::Result<RawFd> {
    if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(fd) }
}

/// Where a thread publishes that it waits in an [`Epoll`] (or in its group), so that other threads
/// can wake it there.
///
/// | `epoll` | meaning |
/// |---|---|
/// | an `Epoll` | the thread waits there, or is about to, or has just returned |
/// | null | it does not wait; or a waker has taken the pointer, and sends (or has sent) one break |
///
/// The thread whose swap makes it null decides: a waker that got the pointer sends a break, a
/// sleeper that finds null consumes one.
pub struct PollSlot {
    epoll: AtomicPtr<Epoll>,
}

impl PollSlot {
    pub const fn new() -> PollSlot {
        PollSlot { epoll: AtomicPtr::new(null_mut()) }
    }

    /// Publishes `epoll` and runs `wait`, which waits in `epoll` unless the thread was woken
    /// already (`wait` has to check that itself).
    pub fn wait_in<T>(&self, epoll: &'static Epoll, wait: impl FnOnce() -> T) -> T {
        self.epoll.store(std::ptr::from_ref(epoll).cast_mut(), Ordering::Relaxed);
        // Pairs with the barrier of the caller of `wake`: a waker sees that the thread waits here,
        // or `wait` sees the waker's token.
        full_fence();
        let value = wait();
        // AcqRel, here and in `wake`: the sleeper that finds null sees what the waker did before.
        if self.epoll.swap(null_mut(), Ordering::AcqRel).is_null() {
            // Until the break is written: the waker is between its swap and its write, or was
            // descheduled there.
            while !epoll.take_break() {
                std::thread::yield_now();
            }
        }
        value
    }

    /// Returns whether the thread waits in an instance.
    #[inline]
    pub fn is_occupied(&self) -> bool {
        !self.epoll.load(Ordering::Relaxed).is_null()
    }

    /// Wakes the thread if it waits in an instance. The caller has left it a token before, and
    /// executed a full barrier after that.
    #[inline]
    pub fn wake(&self) {
        if !self.is_occupied() {
            return;
        }
        // SAFETY: null, or an Epoll: it is never freed, and not closed before the sleeper has left.
        if let Some(epoll) = unsafe { self.epoll.swap(null_mut(), Ordering::AcqRel).as_ref() } {
            epoll.put_break();
        }
    }
}
