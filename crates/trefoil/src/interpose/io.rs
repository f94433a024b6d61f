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

use super::fds::{self, PLAIN, SOCKET, Slot};
use super::{Next, may_park};
use crate::runtime;
use crate::sched::pollable::{Side, Waited};
use crate::sched::{WaitingHolder, may_hold_lock};
use crate::sys::clock::{NEVER, Nanos, now};
use crate::sys::outputs;
use crate::sys::raw::syscall;
use libc::{iovec, msghdr, pollfd, size_t, sockaddr, socklen_t, ssize_t};
use std::ffi::{c_int, c_long, c_ulong, c_void};
use std::mem::transmute;

const EAGAIN: isize = -(libc::EAGAIN as isize);
const NOT_SUPPORTED: isize = -(libc::EOPNOTSUPP as isize);
const RWF_NOWAIT: usize = 8;

/// Until when a blocking call on this side may wait: SO_RCVTIMEO, SO_SNDTIMEO.
fn limit(fd: c_int, side: Side) -> Nanos {
    let option = if side == Side::Read { libc::SO_RCVTIMEO } else { libc::SO_SNDTIMEO };
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
    if rc != 0 || nanos == 0 { NEVER } else { now().saturating_add(nanos) }
}

fn is_nonblocking(fd: c_int) -> bool {
    // SAFETY: a question without pointers.
    let flags = unsafe { syscall(libc::SYS_fcntl, [fd as usize, libc::F_GETFL as usize]) };
    flags < 0 || flags & libc::O_NONBLOCK as isize != 0
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
    side: Side,
    until: Option<Nanos>,
    slot: Option<&'static Slot>,
    /// The slot's closes before the last attempt.
    closes: u32,
}

impl Waits {
    #[inline]
    fn new(fd: c_int, side: Side) -> Waits {
        Waits { fd, side, until: None, slot: fds::slot(fd), closes: 0 }
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
                // None: it does not block.
                let ask = || if is_nonblocking(fd) { None } else { Some(limit(fd, side)) };
                let mut answer = Some(NEVER);
                match self.slot {
                    None => answer = ask(),
                    Some(slot) => {
                        _ = slot.is_calm(|| {
                            answer = ask();
                            // What is kept is kept for both directions.
                            let other = if side == Side::Read { Side::Write } else { Side::Read };
                            answer == Some(NEVER) && limit(fd, other) == NEVER
                        })
                    }
                }
                let Some(until) = answer else { return Then::Return(EAGAIN) };
                *self.until.insert(until)
            }
        };
        wait_ready(self.fd, self.side, until, Some(self.closes))
    }
}

/// Waits in the poller, until `until`. If the descriptor's slot has seen more than `closes`, there is nothing to
/// wait for.
pub(super) fn wait_ready(fd: c_int, side: Side, until: Nanos, closes: Option<u32>) -> Then {
    if !may_park() {
        return Then::Block;
    }
    let (Some(slot), Ok(sched)) = (fds::slot(fd), runtime::current_sched()) else {
        return Then::Block;
    };
    let pollable = slot.pollable();
    // In this order: a close that comes later is an edge.
    let seen = pollable.edges(side);
    if closes.is_some_and(|closes| closes != slot.closes()) {
        return Then::TryAgain;
    }
    let _holder = may_hold_lock().then(WaitingHolder::new);
    match pollable.wait_armed(sched, fd, side, until, seen) {
        Ok(Waited::Ready) => Then::TryAgain,
        Ok(Waited::TimedOut) => Then::Return(EAGAIN),
        Ok(Waited::Closed) => Then::Return(-(libc::EBADF as isize)),
        Err(_) => Then::Block,
    }
}

/// Tries `attempt` until it has an answer; `real` is the blocking call.
fn patiently(
    fd: c_int,
    side: Side,
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
    unsafe { syscall(libc::SYS_poll, [&raw mut one as usize, 1, 0]) != 0 }
}

/// Flags with which a call does not block, or means more than one round trip: straight to the kernel.
const STRAIGHT: c_int = libc::MSG_DONTWAIT | libc::MSG_WAITALL | libc::MSG_ERRQUEUE;

/// Sends all of it, as a blocking socket does.
unsafe fn send_all(
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    attempt: impl Fn(usize, usize, bool) -> isize,
) -> isize {
    let mut sent = 0;
    // One limit for all of it, as the kernel has.
    let mut waits = Waits::new(fd, Side::Write);
    loop {
        let (at, left) = (buf as usize + sent, len - sent);
        let n = patiently_in(&mut waits, || attempt(at, left, true), || attempt(at, left, false));
        match n {
            1.. if (n as usize) < left => sent += n as usize,
            0.. => return (sent + n as usize) as isize,
            // What was sent counts; the error comes with the next call.
            _ if sent > 0 => return sent as isize,
            _ => return n,
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
    patiently(fd, Side::Read, || go(flags | libc::MSG_DONTWAIT), || go(flags))
}

door! {
    /// libc's function.
    RECVMSG = recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t,
    message(libc::SYS_recvmsg, Side::Read, fd, msg as usize, flags)
}

unsafe fn message(number: c_long, side: Side, fd: c_int, msg: usize, flags: c_int) -> isize {
    // SAFETY: the caller's.
    let go = |flags: c_int| unsafe { syscall(number, [fd as usize, msg, flags as usize]) };
    if flags & STRAIGHT != 0 {
        return go(flags);
    }
    patiently(fd, side, || go(flags | libc::MSG_DONTWAIT), || go(flags))
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
    let go = |at: usize, left: usize, wait: bool| {
        let flags = if wait { flags | libc::MSG_DONTWAIT } else { flags };
        // SAFETY: the caller's buffer, from `at` on.
        unsafe {
            syscall(libc::SYS_sendto, [fd as usize, at, left, flags as usize, addr, addr_len])
        }
    };
    if flags & STRAIGHT != 0 {
        return go(buf as usize, len, false);
    }
    // SAFETY: the caller's.
    unsafe { send_all(fd, buf, len, go) }
}

door! {
    /// libc's function.
    SENDMSG = sendmsg(fd: c_int, msg: *const msghdr, flags: c_int) -> ssize_t,
    message(libc::SYS_sendmsg, Side::Write, fd, msg as usize, flags)
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
fn look_first(fd: c_int, side: Side, real: impl Fn() -> isize) -> isize {
    let events = if side == Side::Read { libc::POLLIN } else { libc::POLLOUT };
    if is_nonblocking(fd) {
        return real();
    }
    while !is_ready(fd, events) {
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
        let not_socket = -(libc::ENOTSOCK as isize);
        // What was known of the number may be about another file.
        let received = if is_socket(fd) { recv_from(fd, buf as usize, len, 0, 0, 0) } else { not_socket };
        if received != not_socket {
            received
        } else if is_plain(fd) {
            real()
        } else {
            let one = iovec { iov_base: buf, iov_len: len };
            let at = &raw const one as usize;
            let attempt = || vectored(libc::SYS_preadv2, fd, at, 1);
            patiently(fd, Side::Read, attempt, || look_first(fd, Side::Read, real))
        }
    }
}

door! {
    /// libc's function.
    WRITE = write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t,
    {
        outputs::note_writer(fd);
        if is_plain(fd) {
            syscall(libc::SYS_write, [fd as usize, buf as usize, len])
        } else {
            send_all(fd, buf, len, |at, left, wait| {
                let real = || syscall(libc::SYS_write, [fd as usize, at, left]);
                if wait {
                    let one = iovec { iov_base: at as *mut c_void, iov_len: left };
                    vectored(libc::SYS_pwritev2, fd, &raw const one as usize, 1)
                } else {
                    look_first(fd, Side::Write, real)
                }
            })
        }
    }
}

door! {
    /// libc's function.
    READV = readv(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t,
    vectored_patiently(libc::SYS_readv, libc::SYS_preadv2, Side::Read, fd, vectors, count)
}

/// `readv` or `writev`, and its form that need not wait.
unsafe fn vectored_patiently(
    number: c_long,
    nowait: c_long,
    side: Side,
    fd: c_int,
    vectors: *const iovec,
    count: c_int,
) -> isize {
    let (vectors, count) = (vectors as usize, count as usize);
    // SAFETY: the caller's.
    let real = || unsafe { syscall(number, [fd as usize, vectors, count]) };
    if is_plain(fd) {
        return real();
    }
    // SAFETY: the caller's.
    let attempt = || unsafe { vectored(nowait, fd, vectors, count) };
    patiently(fd, side, attempt, || look_first(fd, side, real))
}

door! {
    /// libc's function. On a goroutine it may write less than it was given, as it may anyway.
    WRITEV = writev(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t,
    vectored_patiently(libc::SYS_writev, libc::SYS_pwritev2, Side::Write, fd, vectors, count)
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
    let attempt = || if is_ready(fd, libc::POLLIN) { real() } else { EAGAIN };
    patiently(fd, Side::Read, attempt, real)
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
                e if e == -(libc::EINPROGRESS as isize) => connected(fd),
                // A Unix socket whose listener has no room: nothing is under way, and nothing tells when there is.
                EAGAIN => crate::blocking(go),
                result => result,
            }
        }
    }
}

/// Waits for a connection under way.
fn connected(fd: c_int) -> isize {
    let until = limit(fd, Side::Write);
    while !is_ready(fd, libc::POLLOUT) {
        match wait_ready(fd, Side::Write, until, None) {
            Then::TryAgain => {}
            Then::Return(EAGAIN) => return -(libc::EINPROGRESS as isize),
            Then::Return(result) => return result,
            Then::Block => {
                let mut one = pollfd { fd, events: libc::POLLOUT, revents: 0 };
                // SAFETY: one entry of our own.
                unsafe { syscall(libc::SYS_poll, [&raw mut one as usize, 1, usize::MAX]) };
            }
        }
    }
    let (mut error, mut len) = (0i32, size_of::<i32>());
    // SAFETY: the kernel writes an int and its length.
    unsafe {
        let (level, option) = (libc::SOL_SOCKET as usize, libc::SO_ERROR as usize);
        let at = [fd as usize, level, option, &raw mut error as usize, &raw mut len as usize];
        syscall(libc::SYS_getsockopt, at);
    }
    -(error as isize)
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

/// libc's function.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dup2(from: c_int, to: c_int) -> c_int {
    let known = from != to && fds::closing(to);
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
    let known = from != to && fds::closing(to);
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
    if level == libc::SOL_SOCKET && matches!(name, libc::SO_RCVTIMEO | libc::SO_SNDTIMEO) {
        fds::no_longer_calm();
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
