//! Reading and writing: `std::net`, pipes and everything on top of them park the goroutine.
//!
//! On a goroutine a call is tried without blocking, *for this call only* (MSG_DONTWAIT, RWF_NOWAIT, a poll
//! beforehand): the descriptor's own flags are never touched, others may share it. If the kernel has
//! nothing, and the descriptor is a blocking one, the goroutine waits in the poller and the call is tried again.
//! A descriptor that the user made non-blocking answers EAGAIN as ever; SO_RCVTIMEO and SO_SNDTIMEO are
//! kept, and end a call with EAGAIN as the kernel does.
//!
//! What cannot be waited for (regular files) or is not worth it goes to the kernel as it is: then the thread
//! blocks, and loses its P.
//!
//! A blocking write to a stream is whole: what the kernel did not take at once follows in further attempts
//! ([`write_whole`]). Only an error or the limit ends it early, and then it returns how much was written.

use super::fds::{self, PLAIN, SOCKET, Slot};
use super::{Next, begin_wait};
use crate::runtime;
use crate::sched::netpoll::pollable::{BACK_OFF_MAX_NANOS, BACK_OFF_MIN_NANOS, Direction, IoWait};
use crate::sys::clock::{self, NEVER, Nanos, now};
use crate::sys::outputs;
use crate::sys::raw::syscall;
use crate::time::sleep_until_nanos;
use libc::{iovec, msghdr, pollfd, size_t, sockaddr, socklen_t, ssize_t};
use std::ffi::{c_int, c_long, c_ulong, c_void};
use std::mem::transmute;
use std::sync::atomic::{AtomicBool, Ordering};

const EAGAIN: isize = -(libc::EAGAIN as isize);
const EALREADY: isize = -(libc::EALREADY as isize);
const EBADF: isize = -(libc::EBADF as isize);
const EINPROGRESS: isize = -(libc::EINPROGRESS as isize);
const EISCONN: isize = -(libc::EISCONN as isize);
const NOT_SOCKET: isize = -(libc::ENOTSOCK as isize);
const NOT_SUPPORTED: isize = -(libc::EOPNOTSUPP as isize);
const RWF_NOWAIT: usize = 8;

/// Until when a blocking call on this side may wait: SO_RCVTIMEO, SO_SNDTIMEO.
fn limit(fd: c_int, side: Direction) -> Nanos {
    let option = if side == Direction::Read { libc::SO_RCVTIMEO } else { libc::SO_SNDTIMEO };
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

/// Whether the descriptor is non-blocking; the kernel's error number if there is no such descriptor.
fn is_nonblocking(fd: c_int) -> Result<bool, isize> {
    // SAFETY: a question without pointers.
    let flags = unsafe { syscall(libc::SYS_fcntl, [fd as usize, libc::F_GETFL as usize]) };
    if flags < 0 { Err(flags) } else { Ok(flags & libc::O_NONBLOCK as isize != 0) }
}

/// What comes of a wait.
pub(super) enum Then {
    TryAgain,
    /// Give this to the user.
    Return(isize),
    /// Let the kernel block the thread.
    Block,
}

/// One call's waits: its limit counts from the first.
struct Waits {
    fd: c_int,
    side: Direction,
    until: Option<Nanos>,
    slot: Option<&'static Slot>,
    /// The slot's closes before the last attempt.
    closes: u32,
    /// Attempts since the last progress that the kernel had nothing for.
    failures: u32,
    /// Pauses in a row ([`Waits::back_off`]).
    pauses: u32,
}

/// Failures in a row after which the kernel is asked whether the descriptor is ready all the same. Two may be chance:
/// another goroutine was faster.
const CHANCE_FAILURES: u32 = 2;

impl Waits {
    #[inline]
    fn new(fd: c_int, side: Direction) -> Waits {
        Waits { fd, side, until: None, slot: fds::slot(fd), closes: 0, failures: 0, pauses: 0 }
    }

    /// The next attempt is about to begin.
    #[inline]
    fn begin(&mut self) {
        self.closes = self.slot.map_or(0, Slot::closes);
    }

    /// The kernel had nothing.
    #[cold]
    fn wait(&mut self) -> Then {
        let until = match self.until {
            Some(until) => until,
            None => {
                let (fd, side) = (self.fd, self.side);
                let ask = || match is_nonblocking(fd) {
                    Ok(false) => Ok(limit(fd, side)),
                    Ok(true) => Err(EAGAIN),
                    Err(e) => Err(e),
                };
                let mut answer = Ok(NEVER);
                match self.slot {
                    None => answer = ask(),
                    Some(slot) => {
                        _ = slot.is_calm(|| {
                            answer = ask();
                            // What is kept is kept for both directions.
                            let other = if side == Direction::Read {
                                Direction::Write
                            } else {
                                Direction::Read
                            };
                            answer == Ok(NEVER) && limit(fd, other) == NEVER
                        })
                    }
                }
                match answer {
                    Ok(until) => *self.until.insert(until),
                    Err(result) => return Then::Return(result),
                }
            }
        };
        self.failures += 1;
        if self.failures > CHANCE_FAILURES && is_ready(self.fd, self.side.events()) {
            return self.back_off(until);
        }
        self.pauses = 0;
        wait_ready(self.fd, self.side, until, Some(self.closes))
    }

    /// The kernel says both that the descriptor is ready and that the call would block, again and again. So the call is
    /// tried again after ever longer pauses.
    ///
    /// - A datagram socket has room, and the queue of the socket that it sends to is full. No event tells when that
    ///   changes, and each failed attempt causes one that means nothing.
    /// - A socket has a message in its error queue, and the caller reads something else. An event ends that pause.
    #[cold]
    fn back_off(&mut self, until: Nanos) -> Then {
        let (Some(_wait), Some(slot), Ok(sched)) =
            (begin_wait(), self.slot, runtime::current_sched())
        else {
            return Then::Block;
        };
        let start = now();
        if start >= until {
            return Then::Return(EAGAIN);
        }
        let pause = (BACK_OFF_MIN_NANOS << self.pauses.min(u64::BITS / 2)).min(BACK_OFF_MAX_NANOS);
        self.pauses += 1;
        let end = start.saturating_add(pause).min(until);
        match self.side {
            Direction::Write => sleep_until_nanos(end),
            Direction::Read => {
                let pollable = slot.pollable();
                let seen = pollable.edges(Direction::Read);
                // However it ends, the call is tried again.
                _ = pollable.wait(sched, self.fd, Direction::Read, end, seen);
            }
        }
        if slot.closes() == self.closes { Then::TryAgain } else { Then::Return(EBADF) }
    }
}

/// Waits in the poller, until `until`. If the descriptor's slot has seen more than `closes`, there is nothing to
/// wait for.
pub(super) fn wait_ready(fd: c_int, side: Direction, until: Nanos, closes: Option<u32>) -> Then {
    let (Some(_wait), Some(slot), Ok(sched)) =
        (begin_wait(), fds::slot(fd), runtime::current_sched())
    else {
        return Then::Block;
    };
    let pollable = slot.pollable();
    // In this order: a close that comes later is an edge.
    let seen = pollable.edges(side);
    if closes.is_some_and(|closes| closes != slot.closes()) {
        return Then::TryAgain;
    }
    match pollable.wait_armed(sched, fd, side, until, seen) {
        Ok(IoWait::Ready) => Then::TryAgain,
        Ok(IoWait::TimedOut) => Then::Return(EAGAIN),
        Ok(IoWait::Closed) => Then::Return(EBADF),
        Err(_) => Then::Block,
    }
}

/// Tries `attempt` until it has an answer; `real` is the blocking call.
fn patiently(
    fd: c_int,
    side: Direction,
    attempt: impl FnMut() -> isize,
    real: impl FnOnce() -> isize,
) -> isize {
    patiently_in(&mut Waits::new(fd, side), attempt, real)
}

fn patiently_in(
    waits: &mut Waits,
    mut attempt: impl FnMut() -> isize,
    real: impl FnOnce() -> isize,
) -> isize {
    loop {
        waits.begin();
        match attempt() {
            EAGAIN => match waits.wait() {
                Then::TryAgain => {}
                Then::Return(result) => return result,
                Then::Block => return real(),
            },
            NOT_SUPPORTED => return real(),
            result => return result,
        }
    }
}

/// Whether something can be read, or written, now.
fn is_ready(fd: c_int, events: i16) -> bool {
    let mut one = pollfd { fd, events, revents: 0 };
    // SAFETY: one entry of our own.
    unsafe { poll_now(&raw mut one, 1) != 0 }
}

/// `poll` without waiting. The kernel gives up even then if a signal is pending, and that may be the runtime's own.
///
/// # Safety
/// `count` entries.
pub(super) unsafe fn poll_now(list: *mut pollfd, count: usize) -> isize {
    loop {
        // SAFETY: the caller's.
        let found = unsafe { syscall(libc::SYS_poll, [list as usize, count, 0]) };
        if found != -(libc::EINTR as isize) {
            return found;
        }
    }
}

/// Flags with which a call does not block, or means more than one round trip: straight to the kernel.
const STRAIGHT: c_int = libc::MSG_DONTWAIT | libc::MSG_WAITALL | libc::MSG_ERRQUEUE;

/// The same for a call that sends: each part of a `MSG_ZEROCOPY` would have a notification of its own.
const SEND_STRAIGHT: c_int = STRAIGHT | libc::MSG_ZEROCOPY;

/// Which part of a call's bytes an attempt is about.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    /// All of them: the call as it was made.
    Whole,
    /// Those behind so many, on a stream that is connected. No address and no control data go with them, and they raise
    /// no SIGPIPE: for a call that has written something the kernel raises none.
    After(usize),
}

impl Part {
    /// How many bytes went before.
    fn start(self) -> usize {
        match self {
            Part::Whole => 0,
            Part::After(bytes) => bytes,
        }
    }

    /// The flags of this part.
    fn flags(self, flags: c_int) -> c_int {
        match self {
            Part::Whole => flags,
            Part::After(_) => flags & !libc::MSG_FASTOPEN | libc::MSG_NOSIGNAL,
        }
    }
}

/// Whether an attempt may block the thread.
#[derive(Clone, Copy, PartialEq, Eq)]
enum May {
    Block,
    NotBlock,
}

impl May {
    /// The flags of a socket call.
    fn flags(self, flags: c_int) -> c_int {
        match self {
            May::Block => flags,
            May::NotBlock => flags | libc::MSG_DONTWAIT,
        }
    }
}

/// Writes everything, as a blocking descriptor does. `total` is asked for only after the kernel has taken something, so
/// the caller's vectors are readable.
fn write_whole(
    fd: c_int,
    total: impl Fn() -> usize,
    attempt: impl Fn(Part, May) -> isize,
) -> isize {
    let mut part = Part::Whole;
    // One limit for all of it, as the kernel has.
    let mut waits = Waits::new(fd, Direction::Write);
    loop {
        let written = part.start();
        let try_now = || match part {
            // The attempt would take the socket's error, and it belongs to the next call.
            Part::After(1..) if has_broken(fd) => 0,
            _ => attempt(part, May::NotBlock),
        };
        let mut has_blocked = false;
        let n = patiently_in(&mut waits, try_now, || {
            has_blocked = true;
            attempt(part, May::Block)
        });
        match n {
            // The kernel's own answer to a blocking call is final: an eventfd takes eight bytes, a limit has passed.
            0.. if has_blocked => return (written + n as usize) as isize,
            1.. if written + (n as usize) < total() => {
                part = Part::After(written + n as usize);
                (waits.failures, waits.pauses) = (0, 0);
            }
            0.. => return (written + n as usize) as isize,
            // The write has begun a connection (`MSG_FASTOPEN`, `TCP_FASTOPEN_CONNECT`).
            EINPROGRESS
                if part == Part::Whole && !has_blocked && is_nonblocking(fd) == Ok(false) =>
            {
                match connected(fd) {
                    0 => part = Part::After(0),
                    error => return error,
                }
            }
            // What was sent counts; the error comes with the next call.
            _ if written > 0 => return written as isize,
            _ => return n,
        }
    }
}

/// Whether the descriptor is a socket whose connection was reset, or failed otherwise, and whose error no call has
/// returned yet. (A message in the error queue is reported without a hang-up.)
fn has_broken(fd: c_int) -> bool {
    const BROKEN: i16 = libc::POLLERR | libc::POLLHUP;
    let mut one = pollfd { fd, events: 0, revents: 0 };
    // SAFETY: one entry of our own.
    is_socket(fd) && unsafe { poll_now(&raw mut one, 1) } == 1 && one.revents & BROKEN == BROKEN
}

/// Vectors that are passed to the kernel at once for what is left of a call.
const WINDOW: usize = 16;

/// Some of the caller's vectors, from a byte on.
struct Window {
    vectors: [iovec; WINDOW],
    count: usize,
}

impl Window {
    /// # Safety
    /// `count` vectors, with more than `start` bytes.
    unsafe fn new(all: *const iovec, count: usize, start: usize) -> Window {
        const EMPTY: iovec = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let mut window = Window { vectors: [EMPTY; WINDOW], count: 0 };
        let mut skip = start;
        for i in 0..count {
            // SAFETY: the caller's.
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
            if window.count == WINDOW {
                break;
            }
        }
        window
    }
}

/// The bytes of all vectors.
///
/// # Safety
/// `count` vectors.
unsafe fn total_of(vectors: *const iovec, count: usize) -> usize {
    // SAFETY: the caller's.
    (0..count).map(|i| unsafe { (*vectors.add(i)).iov_len }).fold(0, usize::saturating_add)
}

/// Set when the program first sets a low-water mark (`SO_RCVLOWAT`). Accepted sockets inherit it.
static LOW_WATER: AtomicBool = AtomicBool::new(false);

/// How a read is to be made.
enum ReadCall {
    /// Without blocking, and again when the descriptor is ready.
    Usual,
    /// As it is: the kernel has what it waits for, or must wait itself.
    AsItIs,
    /// Once, without blocking: its limit has passed.
    Once,
    Return(isize),
}

fn option(fd: c_int, name: c_int) -> Option<c_int> {
    let (mut value, mut len) = (0 as c_int, size_of::<c_int>());
    let (level, name) = (libc::SOL_SOCKET as usize, name as usize);
    let args = [fd as usize, level, name, &raw mut value as usize, &raw mut len as usize];
    // SAFETY: the kernel writes an int and its length.
    let rc = unsafe { syscall(libc::SYS_getsockopt, args) };
    (rc == 0).then_some(value)
}

/// Whether a read of `len` bytes has to wait for the socket's low-water mark, and waits. (Without blocking the kernel
/// would give less.)
#[inline]
fn low_water(fd: c_int, len: impl FnOnce() -> usize) -> ReadCall {
    if LOW_WATER.load(Ordering::Relaxed) { low_water_slow(fd, len()) } else { ReadCall::Usual }
}

#[cold]
fn low_water_slow(fd: c_int, len: usize) -> ReadCall {
    let mark = option(fd, libc::SO_RCVLOWAT).map_or(0, |mark| mark as usize);
    if mark <= 1
        || len <= 1
        || option(fd, libc::SO_TYPE) != Some(libc::SOCK_STREAM)
        || is_nonblocking(fd) != Ok(false)
    {
        return ReadCall::Usual;
    }
    let until = limit(fd, Direction::Read);
    loop {
        let mut there: c_int = 0;
        let args = [fd as usize, libc::FIONREAD as usize, &raw mut there as usize];
        // SAFETY: the kernel writes an int.
        let rc = unsafe { syscall(libc::SYS_ioctl, args) };
        // Ready with less: the end of the stream, an error; or a Unix socket, which is ready with a single byte.
        if rc != 0 || there as usize >= mark.min(len) || is_ready(fd, libc::POLLIN) {
            return ReadCall::AsItIs;
        }
        match wait_ready(fd, Direction::Read, until, None) {
            Then::TryAgain => {}
            Then::Return(EAGAIN) => return ReadCall::Once,
            Then::Return(result) => return ReadCall::Return(result),
            Then::Block => return ReadCall::AsItIs,
        }
    }
}

door! {
    /// libc's function.
    RECV = recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t,
    recv_from(fd, buf as usize, len, flags, 0, 0)
}

door! {
    /// libc's function.
    RECVFROM = recvfrom(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int,
        addr: *mut sockaddr, addr_len: *mut socklen_t) -> ssize_t,
    recv_from(fd, buf as usize, len, flags, addr as usize, addr_len as usize)
}

unsafe fn recv_from(
    fd: c_int,
    buf: usize,
    len: usize,
    flags: c_int,
    addr: usize,
    addr_len: usize,
) -> isize {
    let go = |flags: c_int| {
        let args = [fd as usize, buf, len, flags as usize, addr, addr_len];
        // SAFETY: the caller's.
        unsafe { syscall(libc::SYS_recvfrom, args) }
    };
    if flags & STRAIGHT != 0 {
        return go(flags);
    }
    match low_water(fd, || len) {
        ReadCall::Usual => {
            patiently(fd, Direction::Read, || go(flags | libc::MSG_DONTWAIT), || go(flags))
        }
        ReadCall::AsItIs => go(flags),
        ReadCall::Once => go(flags | libc::MSG_DONTWAIT),
        ReadCall::Return(result) => result,
    }
}

door! {
    /// libc's function.
    RECVMSG = recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t,
    {
        let go = |flags: c_int| syscall(libc::SYS_recvmsg, [fd as usize, msg as usize, flags as usize]);
        if flags & STRAIGHT != 0 {
            go(flags)
        } else {
            match low_water(fd, || total_of((*msg).msg_iov, (*msg).msg_iovlen)) {
                ReadCall::Usual => {
                    patiently(fd, Direction::Read, || go(flags | libc::MSG_DONTWAIT), || go(flags))
                }
                ReadCall::AsItIs => go(flags),
                ReadCall::Once => go(flags | libc::MSG_DONTWAIT),
                ReadCall::Return(result) => result,
            }
        }
    }
}

door! {
    /// libc's function.
    SEND = send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t,
    send_to(fd, buf, len, flags, 0, 0)
}

door! {
    /// libc's function.
    SENDTO = sendto(fd: c_int, buf: *const c_void, len: size_t, flags: c_int,
        addr: *const sockaddr, addr_len: socklen_t) -> ssize_t,
    send_to(fd, buf, len, flags, addr as usize, addr_len as usize)
}

unsafe fn send_to(
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
    addr: usize,
    addr_len: usize,
) -> isize {
    let go = |part: Part, may: May| {
        let (at, left) = (buf as usize + part.start(), len - part.start());
        let (addr, addr_len) = if part == Part::Whole { (addr, addr_len) } else { (0, 0) };
        let flags = may.flags(part.flags(flags)) as usize;
        // SAFETY: the caller's buffer, from `at` on.
        unsafe { syscall(libc::SYS_sendto, [fd as usize, at, left, flags, addr, addr_len]) }
    };
    if flags & SEND_STRAIGHT != 0 {
        return go(Part::Whole, May::Block);
    }
    write_whole(fd, || len, go)
}

door! {
    /// libc's function.
    SENDMSG = sendmsg(fd: c_int, msg: *const msghdr, flags: c_int) -> ssize_t,
    send_message(fd, msg, flags)
}

unsafe fn send_message(fd: c_int, msg: *const msghdr, flags: c_int) -> isize {
    let go = |part: Part, may: May| {
        let send = |msg: *const msghdr| {
            let flags = may.flags(part.flags(flags)) as usize;
            // SAFETY: the caller's message, or a part of it.
            unsafe { syscall(libc::SYS_sendmsg, [fd as usize, msg as usize, flags]) }
        };
        match part {
            Part::Whole => send(msg),
            // SAFETY: the kernel has read the caller's vectors. Zeros are a message without a name and control data.
            Part::After(start) => unsafe {
                let mut window = Window::new((*msg).msg_iov, (*msg).msg_iovlen, start);
                let mut rest: msghdr = std::mem::zeroed();
                rest.msg_iov = window.vectors.as_mut_ptr();
                rest.msg_iovlen = window.count;
                send(&raw const rest)
            },
        }
    };
    if flags & SEND_STRAIGHT != 0 {
        return go(Part::Whole, May::Block);
    }
    // SAFETY: as above.
    write_whole(fd, || unsafe { total_of((*msg).msg_iov, (*msg).msg_iovlen) }, go)
}

/// Vectors of buffers, without blocking: −1 is "where the file stands".
unsafe fn vectored(number: c_long, fd: c_int, vectors: usize, count: usize) -> isize {
    // SAFETY: the caller's.
    unsafe { syscall(number, [fd as usize, vectors, count, usize::MAX, usize::MAX, RWF_NOWAIT]) }
}

fn is_plain(fd: c_int) -> bool {
    fds::slot(fd).is_none_or(|slot| slot.kind(fd) == PLAIN)
}

fn is_socket(fd: c_int) -> bool {
    fds::slot(fd).is_some_and(|slot| slot.kind(fd) == SOCKET)
}

/// For what knows no RWF_NOWAIT (terminals, some devices): a look first, then the blocking call. Another reader
/// may be faster: then the thread blocks.
fn look_first(fd: c_int, side: Direction, real: impl Fn() -> isize) -> isize {
    if is_nonblocking(fd) != Ok(false) {
        return real();
    }
    while !is_ready(fd, side.events()) {
        match wait_ready(fd, side, NEVER, None) {
            Then::TryAgain => {}
            Then::Return(result) => return result,
            Then::Block => break,
        }
    }
    real()
}

door! {
    /// libc's function.
    READ = read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t,
    {
        let real = || syscall(libc::SYS_read, [fd as usize, buf as usize, len]);
        // What was known of the number may be about another file. A read of no bytes returns at once; a `recv` does not.
        let is_socket = len != 0 && is_socket(fd);
        let received = if is_socket { recv_from(fd, buf as usize, len, 0, 0, 0) } else { NOT_SOCKET };
        if received != NOT_SOCKET {
            received
        } else if len == 0 || is_plain(fd) {
            real()
        } else {
            let one = iovec { iov_base: buf, iov_len: len };
            let at = &raw const one as usize;
            let attempt = || vectored(libc::SYS_preadv2, fd, at, 1);
            patiently(fd, Direction::Read, attempt, || look_first(fd, Direction::Read, real))
        }
    }
}

door! {
    /// libc's function.
    WRITE = write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t,
    {
        outputs::note_writer(fd);
        // The vectored form would send no empty datagram.
        let sent = if len == 0 && is_socket(fd) { send_to(fd, buf, 0, 0, 0, 0) } else { NOT_SOCKET };
        if sent != NOT_SOCKET {
            sent
        } else if len == 0 || is_plain(fd) {
            syscall(libc::SYS_write, [fd as usize, buf as usize, len])
        } else {
            let one = iovec { iov_base: buf.cast_mut(), iov_len: len };
            let real = |at: *const iovec, _| {
                let (base, len) = ((*at).iov_base, (*at).iov_len);
                syscall(libc::SYS_write, [fd as usize, base as usize, len])
            };
            write_vectors(fd, &raw const one, 1, real)
        }
    }
}

/// `write` and `writev` of what is not a regular file; `real` is the call itself, for some of the vectors.
unsafe fn write_vectors(
    fd: c_int,
    vectors: *const iovec,
    count: usize,
    real: impl Fn(*const iovec, usize) -> isize,
) -> isize {
    let call = |part: Part, may: May, vectors: *const iovec, count: usize| match (part, may) {
        (Part::After(_), _) if is_socket(fd) => {
            // SAFETY: zeros are a message without a name and control data; the caller's vectors.
            unsafe {
                let mut rest: msghdr = std::mem::zeroed();
                rest.msg_iov = vectors.cast_mut();
                rest.msg_iovlen = count;
                let flags = may.flags(libc::MSG_NOSIGNAL) as usize;
                syscall(libc::SYS_sendmsg, [fd as usize, &raw const rest as usize, flags])
            }
        }
        // SAFETY: the caller's vectors.
        (_, May::NotBlock) => unsafe { vectored(libc::SYS_pwritev2, fd, vectors as usize, count) },
        (_, May::Block) => look_first(fd, Direction::Write, || real(vectors, count)),
    };
    let attempt = |part: Part, may: May| match part {
        Part::Whole => call(part, may, vectors, count),
        Part::After(start) => {
            // SAFETY: the kernel has read the caller's vectors.
            let window = unsafe { Window::new(vectors, count, start) };
            call(part, may, window.vectors.as_ptr(), window.count)
        }
    };
    // SAFETY: as above.
    write_whole(fd, || unsafe { total_of(vectors, count) }, attempt)
}

door! {
    /// libc's function.
    READV = readv(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t,
    {
        let (at, len) = (vectors as usize, count as usize);
        let real = || syscall(libc::SYS_readv, [fd as usize, at, len]);
        let attempt = || vectored(libc::SYS_preadv2, fd, at, len);
        let is_countable = (1..=libc::UIO_MAXIOV).contains(&count);
        let total = || if is_countable { total_of(vectors, len) } else { 0 };
        if is_plain(fd) {
            real()
        } else {
            match if is_socket(fd) { low_water(fd, total) } else { ReadCall::Usual } {
                ReadCall::Usual => {
                    patiently(fd, Direction::Read, attempt, || look_first(fd, Direction::Read, real))
                }
                ReadCall::AsItIs => real(),
                ReadCall::Once => attempt(),
                ReadCall::Return(result) => result,
            }
        }
    }
}

door! {
    /// libc's function.
    WRITEV = writev(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t,
    {
        let real = |at: *const iovec, count: usize| {
            syscall(libc::SYS_writev, [fd as usize, at as usize, count])
        };
        // No vectors, or more than the kernel takes: its own answer.
        if is_plain(fd) || !(1..=libc::UIO_MAXIOV).contains(&count) {
            syscall(libc::SYS_writev, [fd as usize, vectors as usize, count as usize])
        } else {
            write_vectors(fd, vectors, count as usize, real)
        }
    }
}

door! {
    /// libc's function.
    ACCEPT = accept(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int,
    accept_patiently(fd, addr, len, 0)
}

door! {
    /// libc's function.
    ACCEPT4 = accept4(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int,
    accept_patiently(fd, addr, len, flags)
}

unsafe fn accept_patiently(
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> isize {
    let real = || {
        let args = [fd as usize, addr as usize, len as usize, flags as usize];
        // SAFETY: the caller's.
        let fd = unsafe { syscall(libc::SYS_accept4, args) };
        fds::opened(fd as c_int);
        fd
    };
    // There is no flag for it. If somebody else is faster, the thread blocks.
    // A socket that does not listen is never ready; the kernel refuses it at once.
    let attempt = || {
        let waits = !is_ready(fd, libc::POLLIN) && option(fd, libc::SO_ACCEPTCONN) == Some(1);
        if waits { EAGAIN } else { real() }
    };
    patiently(fd, Direction::Read, attempt, real)
}

door! {
    /// libc's function.
    CONNECT = connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int,
    {
        let go = || syscall(libc::SYS_connect, [fd as usize, addr as usize, len as usize]);
        let flags = syscall(libc::SYS_fcntl, [fd as usize, libc::F_GETFL as usize]);
        if flags < 0 || flags & libc::O_NONBLOCK as isize != 0 {
            go()
        } else {
            // There is no flag for it: for the moment of the call the socket does not block.
            let set = |flags: isize| {
                syscall(libc::SYS_fcntl, [fd as usize, libc::F_SETFL as usize, flags as usize])
            };
            set(flags | libc::O_NONBLOCK as isize);
            let begun = go();
            set(flags);
            match begun {
                // Under way by this call, or by one before it.
                EINPROGRESS | EALREADY => match wait_connected(fd) {
                    // The kernel notes that the connection is made, or begins anew with the next call.
                    0 => match go() {
                        EISCONN => 0,
                        result => result,
                    },
                    EINPROGRESS => begun,
                    error => error,
                },
                // A Unix socket whose listener has no room: nothing is under way, and nothing tells when there is.
                EAGAIN => crate::blocking(go),
                result => result,
            }
        }
    }
}

/// Waits until a connection under way is made or has failed: 0, or the error that ended the wait.
fn wait_connected(fd: c_int) -> isize {
    let until = limit(fd, Direction::Write);
    while !is_ready(fd, libc::POLLOUT) {
        match wait_ready(fd, Direction::Write, until, None) {
            Then::TryAgain => {}
            Then::Return(EAGAIN) => return EINPROGRESS,
            Then::Return(result) => return result,
            Then::Block => {
                let mut one = pollfd { fd, events: libc::POLLOUT, revents: 0 };
                // SAFETY: one entry of our own.
                unsafe { syscall(libc::SYS_poll, [&raw mut one as usize, 1, usize::MAX]) };
            }
        }
    }
    0
}

/// As [`wait_connected`], with the connection's own error.
fn connected(fd: c_int) -> isize {
    match wait_connected(fd) {
        // Without an answer the descriptor was closed meanwhile.
        0 => option(fd, libc::SO_ERROR).map_or(EBADF, |error| -(error as isize)),
        error => error,
    }
}

static CLOSE: Next = Next::new(c"close");
static DUP2: Next = Next::new(c"dup2");
static DUP3: Next = Next::new(c"dup3");

/// libc's function: who waits for the descriptor gives up.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn close(fd: c_int) -> c_int {
    let known = fds::closing(fd);
    // SAFETY: libc's function of that name and type, with the caller's argument.
    let rc =
        unsafe { transmute::<*mut c_void, unsafe extern "C" fn(c_int) -> c_int>(CLOSE.get())(fd) };
    if known {
        fds::closed(fd);
    }
    rc
}

/// Whether `dup3` closes `to`: not if it fails.
fn is_replaced(from: c_int, to: c_int, flags: c_int) -> bool {
    // SAFETY: a question without pointers.
    let is_open =
        || unsafe { syscall(libc::SYS_fcntl, [from as usize, libc::F_GETFD as usize]) >= 0 };
    from != to && flags & !libc::O_CLOEXEC == 0 && is_open()
}

/// libc's function.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dup2(from: c_int, to: c_int) -> c_int {
    let known = is_replaced(from, to, 0) && fds::closing(to);
    type Real = unsafe extern "C" fn(c_int, c_int) -> c_int;
    // SAFETY: libc's function of that name and type, with the caller's arguments.
    let rc = unsafe { transmute::<*mut c_void, Real>(DUP2.get())(from, to) };
    if known {
        fds::closed(to);
    }
    rc
}

/// libc's function.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int {
    let known = is_replaced(from, to, flags) && fds::closing(to);
    type Real = unsafe extern "C" fn(c_int, c_int, c_int) -> c_int;
    // SAFETY: libc's function of that name and type, with the caller's arguments.
    let rc = unsafe { transmute::<*mut c_void, Real>(DUP3.get())(from, to, flags) };
    if known {
        fds::closed(to);
    }
    rc
}

/// A door that looks at what libc's function has done; `$rc` is its result, `$arg`s its arguments.
macro_rules! afterwards {
    ($(#[$doc:meta])* $static:ident = $symbol:literal,
     $name:ident($($arg:ident: $type:ty),*) -> $rc:ident: $ret:ty, $look:expr) => {
        static $static: Next = Next::new($symbol);

        $(#[$doc])*
        ///
        /// # Safety
        /// As its manual page says.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> $ret {
            type Real = unsafe extern "C" fn($($type),*) -> $ret;
            // SAFETY: libc's function of that name and type, with the caller's arguments.
            let $rc = unsafe { transmute::<*mut c_void, Real>($static.get())($($arg),*) };
            $look;
            $rc
        }
    };
}

/// After `F_SETFL`, and after what makes a descriptor.
fn after_fcntl(command: c_int, arg: usize, rc: c_int) {
    match command {
        libc::F_SETFL if arg as c_int & libc::O_NONBLOCK != 0 => fds::no_longer_calm(),
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => fds::opened(rc),
        _ => {}
    }
}

afterwards! {
    /// libc's function. It takes its third argument where every function does.
    FCNTL = c"fcntl", fcntl(fd: c_int, command: c_int, arg: usize) -> rc: c_int,
    after_fcntl(command, arg, rc)
}
afterwards! {
    /// libc's function, by its other name.
    FCNTL64 = c"fcntl64", fcntl64(fd: c_int, command: c_int, arg: usize) -> rc: c_int,
    after_fcntl(command, arg, rc)
}
afterwards! {
    /// libc's function.
    IOCTL = c"ioctl", ioctl(fd: c_int, request: c_ulong, arg: usize) -> rc: c_int,
    if request as u32 == libc::FIONBIO as u32 {
        fds::no_longer_calm();
    }
}
afterwards! {
    /// libc's function.
    SETSOCKOPT = c"setsockopt", setsockopt(fd: c_int, level: c_int, name: c_int,
        value: *const c_void, len: socklen_t) -> rc: c_int,
    if level == libc::SOL_SOCKET {
        match name {
            libc::SO_RCVTIMEO | libc::SO_SNDTIMEO => fds::no_longer_calm(),
            libc::SO_RCVLOWAT => LOW_WATER.store(true, Ordering::Relaxed),
            _ => {}
        }
    }
}
afterwards! {
    /// libc's function.
    SOCKET_ = c"socket", socket(domain: c_int, kind: c_int, protocol: c_int) -> rc: c_int,
    fds::opened(rc)
}
afterwards! {
    /// libc's function.
    CLOSE_RANGE = c"close_range", close_range(first: std::ffi::c_uint, last: std::ffi::c_uint,
        flags: c_int) -> rc: c_int,
    fds::no_longer_calm()
}
