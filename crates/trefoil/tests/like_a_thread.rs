//! A call of libc on a goroutine has the result that it has on a plain thread. Most tests here run the same code on
//! both and compare; what a plain thread does is the specification.
#![cfg(feature = "std")]

mod common;

use common::{Child, MS, cpu_time, in_child, raise_fd_limit, runtime, tasks, watchdog};
use std::ffi::{c_int, c_void};
use std::fmt::Debug;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixDatagram, UnixStream};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

/// Runs `f` on a plain thread and on a goroutine, and compares what it returns.
#[track_caller]
fn same_on_both<T: Debug + PartialEq + Send + 'static>(f: fn() -> T) -> T {
    let thread = thread::spawn(f).join().unwrap();
    for procs in [1, 2] {
        let goroutine = runtime(procs).run(f);
        assert_eq!(goroutine, thread, "a goroutine (left) and a thread (right), {procs} Ps");
    }
    thread
}

/// The result of a call, or its error number below zero.
fn check(result: isize) -> isize {
    if result < 0 {
        -(std::io::Error::last_os_error().raw_os_error().unwrap() as isize)
    } else {
        result
    }
}

const NOTHING: isize = -(libc::EAGAIN as isize);

fn tcp() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (client, listener.accept().unwrap().0)
}

fn udp() -> (UdpSocket, UdpSocket) {
    let [a, b] = std::array::from_fn(|_| UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    a.connect(b.local_addr().unwrap()).unwrap();
    b.connect(a.local_addr().unwrap()).unwrap();
    (a, b)
}

fn set(fd: &impl AsRawFd, level: c_int, name: c_int, value: c_int) {
    let at = (&raw const value).cast();
    // SAFETY: an int of our own.
    let rc =
        unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, at, size_of::<c_int>() as u32) };
    assert_eq!(rc, 0);
}

fn read(fd: &impl AsRawFd, buf: &mut [u8]) -> isize {
    // SAFETY: our buffer.
    check(unsafe { libc::read(fd.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len()) })
}

fn recv(fd: &impl AsRawFd, buf: &mut [u8], flags: c_int) -> isize {
    // SAFETY: our buffer.
    check(unsafe { libc::recv(fd.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len(), flags) })
}

fn write(fd: &impl AsRawFd, buf: &[u8]) -> isize {
    // SAFETY: our buffer.
    check(unsafe { libc::write(fd.as_raw_fd(), buf.as_ptr().cast(), buf.len()) })
}

fn eventfd() -> OwnedFd {
    // SAFETY: makes a descriptor, which is ours.
    unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, 0)) }
}

#[test]
fn read_of_no_bytes_returns_at_once() {
    let _w = watchdog();
    let found = same_on_both(|| {
        // Limits, so that a call that waits has another result than one that does not.
        let (a, _b) = tcp();
        a.set_read_timeout(Some(300 * MS)).unwrap();
        let (c, d) = udp();
        d.set_read_timeout(Some(300 * MS)).unwrap();
        let (pipe, _end) = std::io::pipe().unwrap();
        let idle = [read(&a, &mut []), read(&d, &mut []), read(&pipe, &mut [])];
        c.send(b"abc").unwrap();
        let waiting = [read(&d, &mut []), read(&d, &mut [0; 8])];
        (idle, waiting, read(&eventfd(), &mut []))
    });
    let invalid = -(libc::EINVAL as isize);
    assert_eq!(found, ([0, 0, 0], [0, 3], invalid));
}

#[test]
fn write_of_no_bytes_sends_an_empty_datagram() {
    let _w = watchdog();
    let found = same_on_both(|| {
        let mut found = Vec::new();
        let (a, b) = udp();
        b.set_read_timeout(Some(100 * MS)).unwrap();
        found.push((write(&a, &[]), recv(&b, &mut [0; 8], 0)));
        let (c, d) = UnixDatagram::pair().unwrap();
        d.set_read_timeout(Some(100 * MS)).unwrap();
        found.push((write(&c, &[]), recv(&d, &mut [0; 8], 0)));
        // SAFETY: no buffers.
        let none = check(unsafe { libc::writev(a.as_raw_fd(), std::ptr::null(), 0) });
        found.push((none, recv(&b, &mut [0; 8], 0)));
        let (e, _f) = tcp();
        found.push((write(&e, &[]), 0));
        let (_end, pipe) = std::io::pipe().unwrap();
        found.push((write(&pipe, &[]), write(&eventfd(), &[])));
        found
    });
    let invalid = -(libc::EINVAL as isize);
    assert_eq!(found, [(0, 0), (0, 0), (0, NOTHING), (0, 0), (0, invalid)]);
}

const LARGE: usize = 4 << 20;

/// Buffers of uneven sizes that make up `bytes`.
fn uneven(bytes: &[u8], count: usize) -> Vec<libc::iovec> {
    let mut list = Vec::new();
    let mut rest = bytes;
    for i in 0..count {
        let len = if i + 1 == count { rest.len() } else { rest.len() / (count - i) / (1 + i % 3) };
        let (one, more) = rest.split_at(len);
        list.push(libc::iovec { iov_base: one.as_ptr() as *mut c_void, iov_len: len });
        rest = more;
    }
    list
}

/// `LARGE` bytes, so that one in a wrong place is noticed.
fn pattern() -> &'static [u8] {
    static PATTERN: OnceLock<Vec<u8>> = OnceLock::new();
    PATTERN.get_or_init(|| (0..LARGE).map(|i| (i / 7 + i / 1_000) as u8).collect())
}

fn writev(fd: RawFd, list: &[libc::iovec]) -> isize {
    // SAFETY: buffers of the caller.
    check(unsafe { libc::writev(fd, list.as_ptr(), list.len() as c_int) })
}

fn sendmsg(fd: RawFd, list: &[libc::iovec]) -> isize {
    // SAFETY: buffers of the caller; zeros are a message without a name and control data.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = list.as_ptr().cast_mut();
        message.msg_iovlen = list.len();
        check(libc::sendmsg(fd, &raw const message, 0))
    }
}

/// Writes `LARGE` bytes by one call for a reader that takes some and then closes its end.
fn write_large<W: Into<OwnedFd>, R: Read + Send + 'static>(
    (to, mut from): (W, R),
    call: fn(RawFd, &[libc::iovec]) -> isize,
    count: usize,
    taken: usize,
) -> isize {
    let to: OwnedFd = to.into();
    let reader = thread::spawn(move || {
        let expected = pattern();
        let mut found = vec![0; taken];
        from.read_exact(&mut found).unwrap();
        assert!(found == expected[..taken], "other bytes than were written");
    });
    let bytes = pattern();
    let written = call(to.as_raw_fd(), &uneven(bytes, count));
    drop(to);
    trefoil::blocking(|| reader.join()).unwrap();
    written
}

fn swapped<A, B>((a, b): (A, B)) -> (B, A) {
    (b, a)
}

#[test]
fn large_writes_to_a_blocking_stream_are_whole() {
    let _w = watchdog();
    let found = same_on_both(|| {
        let mut found = Vec::new();
        for count in [1, 3, 100] {
            found.push(write_large(tcp(), writev, count, LARGE));
            found.push(write_large(tcp(), sendmsg, count, LARGE));
            found.push(write_large(UnixStream::pair().unwrap(), writev, count, LARGE));
            found.push(write_large(UnixStream::pair().unwrap(), sendmsg, count, LARGE));
            found.push(write_large(swapped(std::io::pipe().unwrap()), writev, count, LARGE));
        }
        found
    });
    assert_eq!(found, [LARGE as isize; 15]);
}

#[test]
fn large_write_that_fails_returns_what_was_written() {
    let _w = watchdog();
    same_on_both(|| {
        let part = |n: isize| n > 0 && n < LARGE as isize;
        let mut found = Vec::new();
        for call in [writev, sendmsg] {
            // The reader goes away.
            found.push(part(write_large(UnixStream::pair().unwrap(), call, 3, LARGE / 4)));
            // Nobody reads, and there is a limit.
            let (a, _b) = UnixStream::pair().unwrap();
            a.set_write_timeout(Some(30 * MS)).unwrap();
            let bytes = pattern();
            found.push(part(call(a.as_raw_fd(), &uneven(bytes, 3))));
            found.push(call(a.as_raw_fd(), &uneven(bytes, 3)) == NOTHING);
        }
        assert_eq!(found, [true; 6]);
    });
}

#[test]
fn reset_during_a_large_write_is_reported_by_the_next_write() {
    let _w = watchdog();
    let found = same_on_both(|| {
        let mut found = Vec::new();
        for call in [writev, sendmsg] {
            let (a, mut peer) = tcp();
            set(&a, libc::SOL_SOCKET, libc::SO_SNDBUF, 1 << 16);
            set(&peer, libc::SOL_SOCKET, libc::SO_RCVBUF, 1 << 16);
            let reader = thread::spawn(move || {
                peer.read_exact(&mut [0; 1_000]).unwrap();
                // The writer has filled the buffers and waits.
                thread::sleep(50 * MS);
                let linger = libc::linger { l_onoff: 1, l_linger: 0 };
                let (at, len) = ((&raw const linger).cast(), size_of_val(&linger) as u32);
                let (fd, level) = (peer.as_raw_fd(), libc::SOL_SOCKET);
                // SAFETY: a structure of our own.
                assert_eq!(unsafe { libc::setsockopt(fd, level, libc::SO_LINGER, at, len) }, 0);
            });
            let first = call(a.as_raw_fd(), &uneven(pattern(), 3));
            assert!(first > 0 && first < LARGE as isize, "{first}");
            found.extend([write(&a, b"x"), write(&a, b"y")]);
            trefoil::blocking(|| reader.join()).unwrap();
        }
        found
    });
    let (reset, pipe) = (-(libc::ECONNRESET as isize), -(libc::EPIPE as isize));
    assert_eq!(found, [reset, pipe, reset, pipe]);
}

/// Identifiers of `MSG_ZEROCOPY` calls of which the error queue tells. Waits for the first, and for more as long as they
/// come.
fn zerocopy_ids(fd: &impl AsRawFd) -> u32 {
    let mut ids = 0;
    for tries in 0.. {
        let mut control = [0u64; 16];
        // SAFETY: buffers of our own; the kernel's structure follows the header.
        unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = size_of_val(&control);
            let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
            if libc::recvmsg(fd.as_raw_fd(), &raw mut message, flags) >= 0 {
                let header = libc::CMSG_FIRSTHDR(&raw const message);
                let error =
                    libc::CMSG_DATA(header).cast::<libc::sock_extended_err>().read_unaligned();
                assert_eq!(error.ee_origin, 5, "SO_EE_ORIGIN_ZEROCOPY");
                ids += error.ee_data - error.ee_info + 1;
                continue;
            }
        }
        if tries > 300 || (tries > 10 && ids > 0) {
            break;
        }
        thread::sleep(10 * MS);
    }
    ids
}

#[test]
fn large_send_with_zerocopy_is_one_call() {
    let _w = watchdog();
    let found = same_on_both(|| {
        let mut found = Vec::new();
        for by_message in [false, true] {
            let (a, mut b) = tcp();
            set(&a, libc::SOL_SOCKET, libc::SO_ZEROCOPY, 1);
            set(&a, libc::SOL_SOCKET, libc::SO_SNDBUF, 1 << 16);
            let reader = thread::spawn(move || b.read_exact(&mut vec![0; LARGE]).unwrap());
            let (fd, bytes) = (a.as_raw_fd(), pattern());
            let list = uneven(bytes, 3);
            // SAFETY: our buffers; zeros are a message without a name and control data.
            let sent = check(unsafe {
                if by_message {
                    let mut message: libc::msghdr = std::mem::zeroed();
                    (message.msg_iov, message.msg_iovlen) = (list.as_ptr().cast_mut(), list.len());
                    libc::sendmsg(fd, &raw const message, libc::MSG_ZEROCOPY)
                } else {
                    libc::send(fd, bytes.as_ptr().cast(), LARGE, libc::MSG_ZEROCOPY)
                }
            });
            if sent == LARGE as isize {
                trefoil::blocking(|| reader.join()).unwrap();
                found.push((sent, zerocopy_ids(&a)));
            } else {
                found.push((sent, 0));
            }
        }
        found
    });
    // Less memory may be locked than that.
    if found[0].0 != -(libc::ENOBUFS as isize) {
        assert_eq!(found, [(LARGE as isize, 1); 2]);
    }
}

#[test]
fn short_write_of_an_eventfd_is_final() {
    let _w = watchdog();
    let found = same_on_both(|| {
        let event = eventfd();
        write(&event, &1u64.to_ne_bytes());
        let two = [1u64, 1].map(u64::to_ne_bytes);
        let written = write(&event, two.as_flattened());
        let mut count = [0; 8];
        (written, read(&event, &mut count), u64::from_ne_bytes(count))
    });
    // Newer kernels take nothing but eight bytes.
    assert!([(8, 8, 2), (-(libc::EINVAL as isize), 8, 1)].contains(&found), "{found:?}");
}

/// The socket that the handler writes to, and what came of it.
static WRITES_TO: AtomicI32 = AtomicI32::new(-1);
static WRITTEN: AtomicI32 = AtomicI32::new(0);

extern "C" fn write_large_in_handler(_: c_int) {
    let fd = WRITES_TO.load(SeqCst);
    // SAFETY: the test's socket, and bytes that were made before.
    let n = unsafe { libc::write(fd, pattern().as_ptr().cast(), LARGE) };
    WRITTEN.store(n as i32, SeqCst);
}

#[test]
fn limit_of_a_write_that_blocks_its_thread_counts_once() {
    let _w = watchdog();
    if !in_child() {
        Child::of("limit_of_a_write_that_blocks_its_thread_counts_once").succeed();
        return;
    }
    pattern();
    // A goroutine does not park in a handler.
    // SAFETY: a handler that calls nothing but `write`.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = write_large_in_handler as *const () as usize;
        action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()), 0);
    }
    same_on_both(|| {
        let (a, mut b) = tcp();
        set(&a, libc::SOL_SOCKET, libc::SO_SNDBUF, 1 << 16);
        set(&b, libc::SOL_SOCKET, libc::SO_RCVBUF, 1 << 16);
        a.set_write_timeout(Some(300 * MS)).unwrap();
        WRITES_TO.store(a.as_raw_fd(), SeqCst);
        let over = Arc::new(AtomicUsize::new(0));
        let theirs = over.clone();
        let reader = thread::spawn(move || {
            // Some room now and then, but never enough.
            for _ in 0..15 {
                thread::sleep(100 * MS);
                if theirs.load(SeqCst) != 0 {
                    break;
                }
                b.read_exact(&mut [0; 100_000]).unwrap();
            }
        });
        let start = Instant::now();
        // SAFETY: the handler of this test.
        unsafe { libc::raise(libc::SIGUSR1) };
        let took = start.elapsed();
        over.store(1, SeqCst);
        let written = WRITTEN.load(SeqCst);
        assert!(written > 0 && written < LARGE as i32, "{written}");
        assert!((250 * MS..900 * MS).contains(&took), "{took:?}");
        trefoil::blocking(|| reader.join()).unwrap();
    });
}

#[test]
fn accept_refuses_a_socket_that_does_not_listen() {
    let _w = watchdog();
    let found = same_on_both(|| {
        let accept = |fd: RawFd| {
            use std::ptr::null_mut;
            // SAFETY: no address is asked for.
            unsafe {
                let one = check(libc::accept(fd, null_mut(), null_mut()) as isize);
                assert_eq!(check(libc::accept4(fd, null_mut(), null_mut(), 0) as isize), one);
                one
            }
        };
        let ((a, _b), (c, _d)) = (tcp(), udp());
        let (e, _f) = UnixStream::pair().unwrap();
        let (pipe, _end) = std::io::pipe().unwrap();
        [a.as_raw_fd(), c.as_raw_fd(), e.as_raw_fd(), tcp_socket().as_raw_fd(), pipe.as_raw_fd()]
            .map(accept)
    });
    let [invalid, unsupported, no_socket] =
        [libc::EINVAL, libc::EOPNOTSUPP, libc::ENOTSOCK].map(|error| -(error as isize));
    assert_eq!(found, [invalid, unsupported, invalid, invalid, no_socket]);
}

fn connect(fd: &impl AsRawFd, port: u16) -> isize {
    let to = libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from(Ipv4Addr::LOCALHOST).to_be() },
        sin_zero: [0; 8],
    };
    let (at, size) = ((&raw const to).cast(), size_of_val(&to) as u32);
    // SAFETY: an address of our own.
    check(unsafe { libc::connect(fd.as_raw_fd(), at, size) } as isize)
}

fn set_send_limit(fd: &impl AsRawFd, millis: i64) {
    let limit = libc::timeval { tv_sec: 0, tv_usec: millis * 1_000 };
    let (at, size) = ((&raw const limit).cast(), size_of_val(&limit) as u32);
    let (level, name) = (libc::SOL_SOCKET, libc::SO_SNDTIMEO);
    // SAFETY: a structure of our own.
    assert_eq!(unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, at, size) }, 0);
}

#[test]
fn connect_of_a_connecting_socket_waits() {
    let _w = watchdog();
    let found = same_on_both(|| {
        let listener = tcp_socket();
        // SAFETY: a listening socket of our own, at an address that the kernel chooses.
        assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
        let listener = TcpListener::from(listener);
        let port = listener.local_addr().unwrap().port();
        // As many connections as there is room for. For one more the kernel drops what the client sends, and the client
        // sends it again after a second.
        let mut waiting = Vec::new();
        loop {
            let socket = tcp_socket();
            set_send_limit(&socket, 50);
            if connect(&socket, port) != 0 {
                break;
            }
            waiting.push(socket);
            assert!(waiting.len() < 10, "the queue of the listener is never full");
        }
        let socket = tcp_socket();
        set_send_limit(&socket, 100);
        let mut found = Vec::new();
        for _ in 0..2 {
            let start = Instant::now();
            found.push(connect(&socket, port));
            assert!(start.elapsed() >= 100 * MS, "{:?}", start.elapsed());
        }
        set_send_limit(&socket, 0);
        let socket = TcpStream::from(socket);
        let ours = socket.local_addr().unwrap();
        let server = thread::spawn(move || while listener.accept().unwrap().1 != ours {});
        found.push(connect(&socket, port));
        trefoil::blocking(|| server.join()).unwrap();
        found.push(connect(&socket, port));
        found
    });
    let [begun, again, connected] =
        [libc::EINPROGRESS, libc::EALREADY, libc::EISCONN].map(|error| -(error as isize));
    assert_eq!(found, [begun, again, 0, connected]);
}

#[test]
fn connect_may_be_tried_again_after_it_was_refused() {
    let _w = watchdog();
    let found = same_on_both(|| {
        let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
        let socket = tcp_socket();
        let refused = [connect(&socket, address.port()), connect(&socket, address.port())];
        let _listener = TcpListener::bind(address).unwrap();
        (refused, connect(&socket, address.port()), connect(&socket, address.port()))
    });
    let refused = -(libc::ECONNREFUSED as isize);
    assert_eq!(found, ([refused; 2], 0, -(libc::EISCONN as isize)));
}

#[test]
fn descriptors_travel_once_with_a_large_message() {
    let _w = watchdog();
    let found = same_on_both(|| {
        let (a, b) = UnixStream::pair().unwrap();
        let reader = thread::spawn(move || {
            let (mut bytes, mut rights, mut total) = (vec![0u8; 1 << 16], 0, 0);
            loop {
                let mut control = [0u64; 32];
                let mut one =
                    libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
                // SAFETY: buffers of our own; a descriptor that comes is closed.
                unsafe {
                    let mut message: libc::msghdr = std::mem::zeroed();
                    (message.msg_iov, message.msg_iovlen) = (&raw mut one, 1);
                    message.msg_control = control.as_mut_ptr().cast();
                    message.msg_controllen = size_of_val(&control);
                    let n = libc::recvmsg(b.as_raw_fd(), &raw mut message, 0);
                    let header = libc::CMSG_FIRSTHDR(&raw const message);
                    if !header.is_null() {
                        rights += 1;
                        libc::close(libc::CMSG_DATA(header).cast::<c_int>().read_unaligned());
                    }
                    match n {
                        1.. => total += n,
                        _ => return (total, rights),
                    }
                }
            }
        });
        let bytes = pattern();
        let event = eventfd();
        let mut control = [0u64; 4];
        let list = uneven(bytes, 5);
        // SAFETY: as above.
        let sent = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (list.as_ptr().cast_mut(), list.len());
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(4) as usize;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(4) as usize;
            libc::CMSG_DATA(header).cast::<c_int>().write_unaligned(event.as_raw_fd());
            check(libc::sendmsg(a.as_raw_fd(), &raw const message, 0))
        };
        drop(a);
        (sent, trefoil::blocking(|| reader.join()).unwrap())
    });
    assert_eq!(found, (LARGE as isize, (LARGE as isize, 1)));
}

/// Sends each piece, some time after the one before. The stream stays open as long as the caller keeps it.
fn sends_late(to: &impl AsFd, pieces: &'static [&'static [u8]]) {
    let mut to = std::fs::File::from(to.as_fd().try_clone_to_owned().unwrap());
    thread::spawn(move || {
        for piece in pieces {
            thread::sleep(20 * MS);
            to.write_all(piece).unwrap();
        }
    });
}

#[test]
fn recv_with_waitall_waits_for_all() {
    let _w = watchdog();
    let found = same_on_both(|| {
        let (a, b) = tcp();
        sends_late(&a, &[b"abc", b"defgh", b"ij"]);
        let all = recv(&b, &mut [0; 8], libc::MSG_WAITALL);
        let (c, d) = UnixStream::pair().unwrap();
        sends_late(&c, &[b"abc", b"defgh", b"ij"]);
        let unix = recv(&d, &mut [0; 10], libc::MSG_WAITALL);
        d.set_read_timeout(Some(30 * MS)).unwrap();
        (all, unix, recv(&d, &mut [0; 10], libc::MSG_WAITALL))
    });
    assert_eq!(found, (8, 10, NOTHING));
}

#[test]
fn a_read_waits_for_as_much_as_so_rcvlowat_says() {
    let _w = watchdog();
    let found = same_on_both(|| {
        let lowat = |fd: &dyn Fn() -> RawFd, bytes| {
            struct Raw(RawFd);
            impl AsRawFd for Raw {
                fn as_raw_fd(&self) -> RawFd {
                    self.0
                }
            }
            set(&Raw(fd()), libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes);
        };
        let mut found = Vec::new();
        let (a, mut b) = tcp();
        lowat(&|| b.as_raw_fd(), 8);
        // The kernel wakes a reader that has taken less than the mark only for a whole mark more.
        sends_late(&a, &[b"abc", b"defghijk", b"lmnopqrs"]);
        found.push(read(&b, &mut [0; 11]));
        found.push(recv(&b, &mut [0; 100], 0));
        let (c, d) = UnixStream::pair().unwrap();
        lowat(&|| d.as_raw_fd(), 4);
        sends_late(&c, &[b"abc", b"defg", b"hi", b"jk"]);
        found.push(recv(&d, &mut [0; 7], 0));
        found.push(b.read_vectored(&mut []).unwrap() as isize);
        let mut bytes = [[0u8; 3]; 2];
        let [one, two] = &mut bytes;
        let mut both = [std::io::IoSliceMut::new(one), std::io::IoSliceMut::new(two)];
        found.push((&d).read_vectored(&mut both).unwrap() as isize);
        // Less is asked for than the mark says.
        let (mut e, f) = tcp();
        lowat(&|| f.as_raw_fd(), 100);
        e.write_all(b"hello").unwrap();
        found.push(read(&f, &mut [0; 5]));
        // A limit; a call that does not wait; the end.
        e.write_all(b"abc").unwrap();
        f.set_read_timeout(Some(50 * MS)).unwrap();
        found.push(read(&f, &mut [0; 100]));
        found.push(read(&f, &mut [0; 100]));
        f.set_read_timeout(None).unwrap();
        e.write_all(b"abcd").unwrap();
        thread::sleep(10 * MS);
        found.push(recv(&f, &mut [0; 100], libc::MSG_DONTWAIT));
        sends_late(&e, &[b"xy"]);
        drop(e);
        found.push(read(&f, &mut [0; 100]));
        found
    });
    assert_eq!(found, [11, 8, 7, 0, 4, 5, 3, NOTHING, 4, 2]);
}

/// `sendto` with `MSG_FASTOPEN`.
fn send_fast(fd: RawFd, bytes: &[u8], port: u16) -> isize {
    let to = libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from(Ipv4Addr::LOCALHOST).to_be() },
        sin_zero: [0; 8],
    };
    let at = (&raw const to).cast();
    let size = size_of_val(&to) as u32;
    let (data, flags) = (bytes.as_ptr().cast(), libc::MSG_FASTOPEN | libc::MSG_NOSIGNAL);
    // SAFETY: our bytes and address.
    check(unsafe { libc::sendto(fd, data, bytes.len(), flags, at, size) })
}

fn tcp_socket() -> OwnedFd {
    // SAFETY: makes a descriptor, which is ours.
    unsafe { OwnedFd::from_raw_fd(libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0)) }
}

#[test]
fn fast_open_connects_and_sends() {
    let _w = watchdog();
    let found = same_on_both(|| {
        let mut found = Vec::new();
        for backlog_accepts in [false, true] {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            if backlog_accepts {
                set(&listener, libc::IPPROTO_TCP, libc::TCP_FASTOPEN, 5);
            }
            let addr = listener.local_addr().unwrap();
            let server = thread::spawn(move || {
                let mut lengths = Vec::new();
                for _ in 0..3 {
                    let mut all = Vec::new();
                    listener.accept().unwrap().0.read_to_end(&mut all).unwrap();
                    lengths.push(all.len());
                }
                lengths
            });
            // The second one has a cookie, if the server gave one.
            for _ in 0..2 {
                let socket = tcp_socket();
                found.push(send_fast(socket.as_raw_fd(), &[7; 100_000], addr.port()));
            }
            // The same by an option: the connection begins with the first write.
            let socket = tcp_socket();
            set(&socket, libc::IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT, 1);
            // SAFETY: an address of our own.
            let rc = unsafe {
                let to = libc::sockaddr_in {
                    sin_family: libc::AF_INET as u16,
                    sin_port: addr.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from(Ipv4Addr::LOCALHOST).to_be() },
                    sin_zero: [0; 8],
                };
                libc::connect(socket.as_raw_fd(), (&raw const to).cast(), size_of_val(&to) as u32)
            };
            assert_eq!(rc, 0);
            found.push(write(&socket, &[8; 1_000]));
            drop(socket);
            let lengths = trefoil::blocking(|| server.join()).unwrap();
            assert_eq!(lengths, [100_000, 100_000, 1_000]);
        }
        // Nobody listens.
        let port =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        found.push(send_fast(tcp_socket().as_raw_fd(), b"hello", port));
        found
    });
    let refused = -(libc::ECONNREFUSED as isize);
    assert_eq!(found, [100_000, 100_000, 1_000, 100_000, 100_000, 1_000, refused]);
}

/// A datagram socket whose queue is full, with an address of this test's own.
fn full_receiver(name: &str) -> (UnixDatagram, UnixAddr) {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, SeqCst);
    let name = format!("trefoil-test-{name}-{}-{number}", std::process::id());
    let addr = UnixAddr::from_abstract_name(name).unwrap();
    let receiver = UnixDatagram::bind_addr(&addr).unwrap();
    let filler = UnixDatagram::unbound().unwrap();
    filler.set_nonblocking(true).unwrap();
    while filler.send_to_addr(b"full", &addr).is_ok() {}
    (receiver, addr)
}

#[test]
fn sending_to_a_full_peer_uses_no_cpu() {
    let _w = watchdog();
    if !in_child() {
        Child::of("sending_to_a_full_peer_uses_no_cpu").succeed();
        return;
    }
    runtime(2).run(|| {
        let (receiver, addr) = full_receiver("cpu");
        let before = cpu_time();
        let senders: Vec<_> = (0..6)
            .map(|i| {
                let addr = addr.clone();
                trefoil::go(move || {
                    let bytes = [i; 3];
                    let socket = UnixDatagram::unbound().unwrap();
                    if i < 2 {
                        return socket.send_to_addr(&bytes, &addr).unwrap();
                    }
                    if i == 3 {
                        let socket = trefoil::net::UnixDatagram::unbound().unwrap();
                        return socket.send_to_addr(&bytes, &addr).unwrap();
                    }
                    // For a connected socket the kernel tells when there is room.
                    if i == 4 {
                        socket.connect_addr(&addr).unwrap();
                        return socket.send(&bytes).unwrap();
                    }
                    if i == 5 {
                        let socket = trefoil::net::UnixDatagram::unbound().unwrap();
                        socket.connect_addr(&addr).unwrap();
                        return socket.send(&bytes).unwrap();
                    }
                    // The same by `sendmsg`.
                    let name = addr.as_abstract_name().unwrap();
                    // SAFETY: an address and buffers of our own.
                    unsafe {
                        let mut to: libc::sockaddr_un = std::mem::zeroed();
                        to.sun_family = libc::AF_UNIX as u16;
                        for (to, from) in to.sun_path[1..].iter_mut().zip(name) {
                            *to = *from as i8;
                        }
                        let mut one = libc::iovec {
                            iov_base: bytes.as_ptr() as *mut c_void,
                            iov_len: bytes.len(),
                        };
                        let mut message: libc::msghdr = std::mem::zeroed();
                        message.msg_name = (&raw mut to).cast();
                        message.msg_namelen = (3 + name.len()) as u32;
                        (message.msg_iov, message.msg_iovlen) = (&raw mut one, 1);
                        check(libc::sendmsg(socket.as_raw_fd(), &raw const message, 0)) as usize
                    }
                })
            })
            .collect();
        // A limit ends it.
        let limited = UnixDatagram::unbound().unwrap();
        limited.set_write_timeout(Some(50 * MS)).unwrap();
        let start = Instant::now();
        let e = limited.send_to_addr(b"late", &addr).unwrap_err();
        assert_eq!(e.raw_os_error(), Some(libc::EAGAIN));
        assert!(start.elapsed() >= 50 * MS);
        thread::sleep(400 * MS);
        let used = cpu_time() - before;
        assert!(used < 150 * MS, "{used:?} of CPU time while the queue was full");
        // All are served when there is room.
        receiver.set_read_timeout(Some(500 * MS)).unwrap();
        let mut lengths = Vec::new();
        while let Ok(n) = receiver.recv(&mut [0; 8]) {
            lengths.push(n);
        }
        assert_eq!(lengths.iter().filter(|n| **n == 3).count(), 6);
        for sender in senders {
            assert_eq!(sender.join().unwrap(), 3);
        }
    });
}

#[test]
fn poll_of_own_and_shared_descriptors_needs_no_threads() {
    const GOROUTINES: usize = 1_500;
    let _w = watchdog();
    if !in_child() {
        Child::of("poll_of_own_and_shared_descriptors_needs_no_threads").succeed();
        return;
    }
    assert!(raise_fd_limit() > 3 * GOROUTINES as u64);
    runtime(2).run(|| {
        let shared = Arc::new(eventfd());
        let own: Vec<_> = (0..GOROUTINES).map(|_| Arc::new(eventfd())).collect();
        let waiting = Arc::new(AtomicUsize::new(0));
        let goroutines: Vec<_> = own
            .iter()
            .map(|own| {
                let (own, shared, waiting) = (own.clone(), shared.clone(), waiting.clone());
                trefoil::go(move || {
                    let entry = |fd: &OwnedFd| libc::pollfd {
                        fd: fd.as_raw_fd(),
                        events: libc::POLLIN,
                        revents: 0,
                    };
                    let mut list = [entry(&own), entry(&shared)];
                    let mut poll = |ms| {
                        // SAFETY: our list.
                        let n = unsafe { libc::poll(list.as_mut_ptr(), 2, ms) };
                        (n, list[0].revents, list[1].revents)
                    };
                    assert_eq!(poll(1), (0, 0, 0));
                    waiting.fetch_add(1, SeqCst);
                    assert_eq!(poll(-1), (1, libc::POLLIN, 0));
                    assert_eq!(read(&*own, &mut [0; 8]), 8);
                    waiting.fetch_add(1, SeqCst);
                    assert_eq!(poll(-1), (1, 0, libc::POLLIN));
                })
            })
            .collect();
        let all_wait = |times| {
            let start = Instant::now();
            while waiting.load(SeqCst) != times * GOROUTINES {
                assert!(start.elapsed() < Duration::from_secs(20), "{waiting:?}");
                thread::sleep(MS);
            }
            thread::sleep(50 * MS);
            let threads = tasks().len();
            assert!(threads < 40, "{threads} threads");
        };
        all_wait(1);
        for own in &own {
            assert_eq!(write(&**own, &1u64.to_ne_bytes()), 8);
        }
        all_wait(2);
        assert_eq!(write(&*shared, &1u64.to_ne_bytes()), 8);
        for goroutine in goroutines {
            goroutine.join().unwrap();
        }
    });
}

#[test]
fn poll_for_a_hang_up_uses_no_cpu_while_data_waits() {
    let _w = watchdog();
    if !in_child() {
        Child::of("poll_for_a_hang_up_uses_no_cpu_while_data_waits").succeed();
        return;
    }
    runtime(2).run(|| {
        let (a, mut b) = tcp();
        let (c, _d) = tcp();
        b.write_all(b"hello").unwrap();
        let before = cpu_time();
        let poll = |list: &mut [libc::pollfd], ms| {
            // SAFETY: the caller's list.
            let n = unsafe { libc::poll(list.as_mut_ptr(), list.len() as u64, ms) };
            (n, list[0].revents)
        };
        let one = |fd: &TcpStream, events| libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
        for events in [libc::POLLRDHUP, 0, libc::POLLPRI] {
            assert_eq!(poll(&mut [one(&a, events)], 200), (0, 0));
            assert_eq!(poll(&mut [one(&a, events), one(&c, libc::POLLIN)], 200), (0, 0));
        }
        let used = cpu_time() - before;
        assert!(used < 150 * MS, "{used:?} of CPU time in 1.2 s of waiting");
        let late = trefoil::go(move || {
            thread::sleep(20 * MS);
            b.shutdown(Shutdown::Write).unwrap();
            b
        });
        assert_eq!(poll(&mut [one(&a, libc::POLLRDHUP)], 5_000), (1, libc::POLLRDHUP));
        drop(late.join().unwrap());
    });
}

#[test]
fn poll_reports_a_descriptor_that_no_epoll_takes() {
    let _w = watchdog();
    let found = same_on_both(|| {
        let event = eventfd();
        let entry = |fd: RawFd, events| libc::pollfd { fd, events, revents: 0 };
        // Epolls in epolls, as deep as the kernel allows: the last one goes into no other.
        let mut chain = vec![event.as_raw_fd()];
        loop {
            // SAFETY: descriptors and an event of our own.
            unsafe {
                let outer = libc::epoll_create1(libc::EPOLL_CLOEXEC);
                let mut wanted = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
                let inner = *chain.last().unwrap();
                let rc = libc::epoll_ctl(outer, libc::EPOLL_CTL_ADD, inner, &raw mut wanted);
                if rc != 0 {
                    libc::close(outer);
                    break;
                }
                chain.push(outer);
            }
        }
        let deepest = *chain.last().unwrap();
        let (other, _end) = std::io::pipe().unwrap();
        let mut found = Vec::new();
        for more in [0, libc::POLLPRI] {
            let late = event.try_clone().unwrap();
            let writer = thread::spawn(move || {
                thread::sleep(20 * MS);
                write(&late, &1u64.to_ne_bytes())
            });
            let mut list =
                [entry(deepest, libc::POLLIN | more), entry(other.as_raw_fd(), libc::POLLIN)];
            // SAFETY: our list.
            let n = unsafe { libc::poll(list.as_mut_ptr(), 2, 5_000) };
            found.push((n, list[0].revents));
            assert_eq!(trefoil::blocking(|| writer.join()).unwrap(), 8);
            assert_eq!(read(&event, &mut [0; 8]), 8);
        }
        // SAFETY: ours.
        chain[1..].iter().for_each(|fd| unsafe { _ = libc::close(*fd) });
        found
    });
    assert_eq!(found, [(1, libc::POLLIN); 2]);
}

/// A reader of one end of a stream, and whatever `f` does to the reader's descriptor meanwhile; then a byte comes. What
/// the reader returns, and `f`.
fn meanwhile<T>(f: impl FnOnce(RawFd) -> T) -> (isize, T) {
    let (a, mut b) = UnixStream::pair().unwrap();
    let fd = a.as_raw_fd();
    let tid = Arc::new(AtomicUsize::new(0));
    let begun = tid.clone();
    let go = move || {
        begun.store(1, SeqCst);
        read(&a, &mut [0; 8])
    };
    let on_goroutine = trefoil::id() != 0;
    let reader: Box<dyn FnOnce() -> isize> = if on_goroutine {
        let handle = trefoil::go(go);
        Box::new(|| handle.join().unwrap())
    } else {
        let handle = thread::spawn(go);
        Box::new(|| handle.join().unwrap())
    };
    while tid.load(SeqCst) == 0 {
        thread::sleep(MS);
    }
    thread::sleep(20 * MS);
    let done = f(fd);
    thread::sleep(20 * MS);
    b.write_all(b"x").unwrap();
    (reader(), done)
}

#[test]
fn dup_that_fails_leaves_readers_of_its_target_alone() {
    let _w = watchdog();
    let found = same_on_both(|| {
        // SAFETY: no pointers.
        let dup2 = |from| meanwhile(|to| check(unsafe { libc::dup2(from, to) } as isize));
        let flags = |from: RawFd| {
            // SAFETY: as above.
            meanwhile(|to| check(unsafe { libc::dup3(from, to, 0x4000_0000) } as isize))
        };
        let open = eventfd();
        [dup2(1 << 28), dup2(-1), flags(open.as_raw_fd())]
    });
    let (bad, invalid) = (-(libc::EBADF as isize), -(libc::EINVAL as isize));
    assert_eq!(found, [(1, bad), (1, bad), (1, invalid)]);
}

#[test]
fn close_in_a_child_that_shares_memory_leaves_readers_alone() {
    /// The child of `vfork`, or what is the same for it: its stack is another part of the parent's memory.
    extern "C" fn child(fd: *mut c_void) -> c_int {
        // SAFETY: a descriptor of this process, whose table is a copy.
        unsafe {
            let rc = libc::close(fd as usize as c_int);
            libc::dup2(0, fd as usize as c_int);
            libc::_exit(if rc == 0 { 7 } else { 8 })
        }
    }
    let _w = watchdog();
    let found = same_on_both(|| {
        meanwhile(|fd| {
            let mut stack = vec![0u128; 16 << 10];
            let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
            // SAFETY: a stack of its own; the parent waits until the child has ended.
            unsafe {
                let top = stack.as_mut_ptr_range().end.cast();
                let pid = libc::clone(child, top, flags, fd as usize as *mut c_void);
                let mut status = 0;
                assert_eq!(libc::waitpid(pid, &raw mut status, 0), pid);
                libc::WEXITSTATUS(status)
            }
        })
    });
    assert_eq!(found, (1, 7));
}

/// What the handler is to close; −1 when it has.
static TO_CLOSE: AtomicI32 = AtomicI32::new(-1);

/// A thread that is in the runtime most of the time.
static BUSY: AtomicI32 = AtomicI32::new(0);

extern "C" fn close_one(_: c_int) {
    let fd = TO_CLOSE.swap(-1, SeqCst);
    if fd >= 0 {
        // SAFETY: handed over by the test.
        unsafe {
            let before = *libc::__errno_location();
            libc::close(fd);
            *libc::__errno_location() = before;
        }
    }
}

#[test]
fn close_in_a_handler_that_interrupts_the_runtime_ends_waits() {
    let _w = watchdog();
    if !in_child() {
        Child::of("close_in_a_handler_that_interrupts_the_runtime_ends_waits").succeed();
        return;
    }
    // SAFETY: a handler that may be one.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = close_one as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()), 0);
    }
    let over = Arc::new(AtomicUsize::new(0));
    runtime(2).run(move || {
        // Threads that are in the runtime most of the time, with its locks.
        let busy: Vec<_> = (0..4)
            .map(|_| {
                let over = over.clone();
                trefoil::go(move || {
                    let (mut a, mut b) = UnixStream::pair().unwrap();
                    while over.load(SeqCst) == 0 {
                        // SAFETY: no arguments.
                        let tid = unsafe { libc::syscall(libc::SYS_gettid) };
                        BUSY.store(tid as i32, SeqCst);
                        let reader = trefoil::go(move || {
                            a.read_exact(&mut [0]).unwrap();
                            a
                        });
                        b.write_all(b"x").unwrap();
                        a = reader.join().unwrap();
                        trefoil::yield_now();
                    }
                })
            })
            .collect();
        for round in 0..500 {
            let (a, b) = UnixStream::pair().unwrap();
            // A number that nobody else gets: the reader may begin after the close.
            // SAFETY: makes a descriptor, which the handler closes.
            let fd = unsafe { libc::fcntl(a.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 900) };
            drop(a);
            // SAFETY: its own buffer.
            let reader = trefoil::go(move || unsafe {
                check(libc::read(fd, [0u8; 8].as_mut_ptr().cast(), 8))
            });
            if round % 2 == 0 {
                thread::sleep(MS / 2);
            } else {
                trefoil::yield_now();
            }
            TO_CLOSE.store(fd, SeqCst);
            while TO_CLOSE.load(SeqCst) >= 0 {
                // SAFETY: to a thread of this process, if it is still there.
                unsafe {
                    let (process, thread) = (libc::getpid(), BUSY.load(SeqCst));
                    libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGUSR1);
                }
                thread::sleep(MS / 10);
            }
            assert_eq!(reader.join().unwrap(), -(libc::EBADF as isize));
            drop(b);
        }
        over.store(1, SeqCst);
        busy.into_iter().for_each(|one| one.join().unwrap());
    });
}

/// Whether a wait in the private word ends by `wake`, which gets the word, and another one that nobody waits at.
fn is_woken_by(wake: fn(&AtomicU32, &AtomicU32) -> i64) -> bool {
    let words = Arc::new([const { AtomicU32::new(0) }; 2]);
    let theirs = words.clone();
    let wait = move || {
        let limit = libc::timespec { tv_sec: 3, tv_nsec: 0 };
        let start = Instant::now();
        while theirs[0].load(SeqCst) == 0 {
            let (at, op) = (theirs[0].as_ptr(), libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG);
            // SAFETY: our word and time.
            unsafe { libc::syscall(libc::SYS_futex, at, op, 0, &raw const limit) };
        }
        start.elapsed() < Duration::from_secs(2)
    };
    let waker = move || {
        thread::sleep(20 * MS);
        words[0].store(1, SeqCst);
        wake(&words[0], &words[1])
    };
    let (woken, count) = if trefoil::id() != 0 {
        let waiter = trefoil::go(wait);
        let count = waker();
        (waiter.join().unwrap(), count)
    } else {
        let waiter = thread::spawn(wait);
        let count = waker();
        (waiter.join().unwrap(), count)
    };
    // None if the waiter had not begun to wait.
    woken && (0..=1).contains(&count)
}

/// `FUTEX_OP_ADD` of 0 to the second word, and a comparison with 0 that holds if `holds`.
const fn add_nothing(holds: bool) -> u32 {
    const ADD: u32 = 1;
    const NOT_EQUAL: u32 = 1;
    ADD << 28 | if holds { 0 } else { NOT_EQUAL << 24 }
}

fn wake_op(first: &AtomicU32, second: &AtomicU32, counts: [usize; 2], operation: u32) -> i64 {
    let op = libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG;
    let (first, second) = (first.as_ptr(), second.as_ptr());
    // SAFETY: our words.
    unsafe { libc::syscall(libc::SYS_futex, first, op, counts[0], counts[1], second, operation) }
}

/// Linux 6.7 has a call for each operation on futexes.
const FUTEX_WAKE: i64 = 454;
const FUTEX_REQUEUE: i64 = 456;
/// A word of 32 bits, private.
const FLAGS: u32 = 2 | 128;

#[repr(C)]
struct FutexWaitv {
    value: u64,
    address: u64,
    flags: u32,
    reserved: u32,
}

#[test]
fn every_wake_of_a_futex_ends_a_private_wait() {
    let _w = watchdog();
    let word = AtomicU32::new(0);
    // SAFETY: a question that wakes nobody.
    let is_new = unsafe { libc::syscall(FUTEX_WAKE, word.as_ptr(), 1u64, 0, FLAGS) } == 0;
    let found = same_on_both(|| {
        [
            is_woken_by(|a, b| wake_op(a, b, [1, 0], add_nothing(false))),
            is_woken_by(|a, b| {
                wake_op(b, a, [0, 1], {
                    // The waiter's word is 1 by now.
                    add_nothing(true) | 1
                })
            }),
        ]
    });
    assert_eq!(found, [true; 2]);
    if !is_new {
        return;
    }
    let found = same_on_both(|| {
        [
            // SAFETY: our words, in all of them.
            is_woken_by(|a, _| unsafe {
                libc::syscall(FUTEX_WAKE, a.as_ptr(), u64::from(u32::MAX), 1, FLAGS)
            }),
            // SAFETY: as above.
            is_woken_by(|a, _| unsafe { libc::syscall(FUTEX_WAKE, a.as_ptr(), 1u64, 1, FLAGS) }),
            is_woken_by(|a, b| {
                let one = |word: &AtomicU32, value| FutexWaitv {
                    value,
                    address: word.as_ptr() as u64,
                    flags: FLAGS,
                    reserved: 0,
                };
                let both = [one(a, 1), one(b, 0)];
                // SAFETY: as above.
                unsafe { libc::syscall(FUTEX_REQUEUE, both.as_ptr(), 0, 1, 0) }
            }),
        ]
    });
    assert_eq!(found, [true; 3]);
}

const BIT_A: u32 = 1;
const BIT_B: u32 = 2;

/// Waits with these bits while `word` is 0. Returns whether the wait was shorter than its limit.
fn wait_for_bits(word: &AtomicU32, bits: u32) -> bool {
    const LIMIT: Duration = Duration::from_secs(3);
    let start = Instant::now();
    while word.load(SeqCst) == 0 {
        let limit = deadline_after(LIMIT);
        let op = libc::FUTEX_WAIT_BITSET | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: our word and time.
        unsafe {
            libc::syscall(libc::SYS_futex, word.as_ptr(), op, 0, &raw const limit, 0usize, bits)
        };
    }
    start.elapsed() < LIMIT
}

/// So long from now, for `FUTEX_WAIT_BITSET`.
fn deadline_after(after: Duration) -> libc::timespec {
    let mut at = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a structure of our own.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut at) }, 0);
    at.tv_sec += after.as_secs() as i64;
    at
}

fn futex_call(
    word: &AtomicU32,
    op: c_int,
    value: u32,
    value2: usize,
    word2: &AtomicU32,
    value3: u32,
) -> isize {
    let (op, at) = (op | libc::FUTEX_PRIVATE_FLAG, word.as_ptr());
    // SAFETY: our words.
    check(unsafe {
        libc::syscall(libc::SYS_futex, at, op, value, value2, word2.as_ptr(), value3) as isize
    })
}

/// So many threads wait at a word for bit B, and a goroutine for bit A. Sets the word and calls `wake` with it, and with
/// another one that nobody waits at. Returns which of the waits ended early: all threads', the goroutine's.
fn threads_and_a_goroutine(
    threads: usize,
    wake: impl FnOnce(&AtomicU32, &AtomicU32) + Send + 'static,
) -> (bool, bool) {
    runtime(2).run(move || {
        let words = Arc::new([const { AtomicU32::new(0) }; 2]);
        let on_threads: Vec<_> = (0..threads)
            .map(|_| {
                let words = words.clone();
                thread::spawn(move || wait_for_bits(&words[0], BIT_B))
            })
            .collect();
        let theirs = words.clone();
        let goroutine = trefoil::go(move || wait_for_bits(&theirs[0], BIT_A));
        thread::sleep(50 * MS);
        words[0].store(1, SeqCst);
        wake(&words[0], &words[1]);
        let all = on_threads.into_iter().map(|one| trefoil::blocking(|| one.join()).unwrap()).min();
        (all.unwrap(), goroutine.join().unwrap())
    })
}

const ALL: usize = i32::MAX as usize;

#[test]
fn requeued_threads_and_goroutines_are_all_woken() {
    let _w = watchdog();
    for threads in [1, 2] {
        let woken = threads_and_a_goroutine(threads, |from, to| {
            let requeue = |value| futex_call(from, libc::FUTEX_CMP_REQUEUE, 1, ALL, to, value);
            // The word has another value: nobody is woken or moved.
            assert_eq!(requeue(7), NOTHING);
            assert!(requeue(1) >= 1);
            futex_call(to, libc::FUTEX_WAKE, ALL as u32, 0, to, 0);
        });
        assert_eq!(woken, (true, true), "{threads} threads");
        let woken = threads_and_a_goroutine(threads, |from, to| {
            assert!(futex_call(from, libc::FUTEX_REQUEUE, 0, ALL, to, 0) >= 0);
            futex_call(to, libc::FUTEX_WAKE, ALL as u32, 0, to, 0);
        });
        assert_eq!(woken, (true, true), "{threads} threads, none of them woken first");
    }
}

#[test]
fn wake_of_one_bit_reaches_the_thread_that_waits_for_it() {
    let _w = watchdog();
    // More than once: now and then threads come first at any wake.
    for _ in 0..3 {
        let woken = threads_and_a_goroutine(1, |word, other| {
            assert!(futex_call(word, libc::FUTEX_WAKE_BITSET, 1, 0, other, BIT_B) >= 1);
            // For the goroutine, if it was not woken before.
            futex_call(word, libc::FUTEX_WAKE_BITSET, 1, 0, other, BIT_A);
        });
        assert_eq!(woken, (true, true));
    }
}

unsafe extern "C" {
    // Not declared by the crate `libc`.
    fn pthread_getcpuclockid(thread: libc::pthread_t, clock: *mut libc::clockid_t) -> c_int;
    fn pthread_rwlock_timedrdlock(
        lock: *mut libc::pthread_rwlock_t,
        at: *const libc::timespec,
    ) -> c_int;
    fn pthread_rwlock_timedwrlock(
        lock: *mut libc::pthread_rwlock_t,
        at: *const libc::timespec,
    ) -> c_int;
}

#[test]
fn times_that_are_none_are_refused() {
    let _w = watchdog();
    let found = same_on_both(|| {
        use std::ptr::{null, null_mut};
        let mut found = Vec::new();
        for (tv_sec, tv_nsec) in [(0, 1_000_000_000), (0, -1), (1 << 32, 1_000_000_000), (-1, 0)] {
            let bad = libc::timespec { tv_sec, tv_nsec };
            let at = &raw const bad;
            let word = AtomicU32::new(0);
            let futex = |op: c_int, value: u32, bits: u32| {
                let op = op | libc::FUTEX_PRIVATE_FLAG;
                let zero = 0usize;
                // SAFETY: our word and time.
                let rc = unsafe {
                    libc::syscall(libc::SYS_futex, word.as_ptr(), op, value, at, zero, bits)
                };
                check(rc as isize)
            };
            found.extend([
                futex(libc::FUTEX_WAIT, 0, 0),
                futex(libc::FUTEX_WAIT, 1, 0),
                futex(libc::FUTEX_WAIT_BITSET, 0, u32::MAX),
                futex(libc::FUTEX_WAIT_BITSET, 1, u32::MAX),
                futex(libc::FUTEX_WAIT_BITSET, 0, 0),
                futex(libc::FUTEX_WAKE_BITSET, 1, 0),
            ]);
            // SAFETY: our times, locks and lists. Locks that were taken are not used any more.
            unsafe {
                found.extend([
                    check(libc::nanosleep(at, null_mut()) as isize),
                    libc::clock_nanosleep(libc::CLOCK_MONOTONIC, 0, at, null_mut()) as isize,
                    check(libc::ppoll(null_mut(), 0, at, null()) as isize),
                    check(libc::pselect(0, null_mut(), null_mut(), null_mut(), at, null()) as isize),
                ]);
                let mut time = libc::timeval { tv_sec, tv_usec: tv_nsec.min(0) };
                if tv_sec < 1 {
                    let none = null_mut;
                    let n = libc::select(0, none(), none(), none(), &raw mut time);
                    found.push(check(n as isize));
                }
                if tv_sec == -1 {
                    continue; // a time that has passed, for what takes absolute ones
                }
                let clock = libc::CLOCK_REALTIME;
                found.push(
                    libc::clock_nanosleep(clock, libc::TIMER_ABSTIME, at, null_mut()) as isize
                );
                for permits in [0, 1] {
                    let mut sem: libc::sem_t = std::mem::zeroed();
                    libc::sem_init(&raw mut sem, 0, permits);
                    found.push(check(libc::sem_timedwait(&raw mut sem, at) as isize));
                }
                let mut lock = libc::PTHREAD_RWLOCK_INITIALIZER;
                found.push(pthread_rwlock_timedrdlock(&raw mut lock, at) as isize);
                found.push(pthread_rwlock_timedwrlock(&raw mut lock, at) as isize);
                let mut mutex = libc::PTHREAD_MUTEX_INITIALIZER;
                let mut cond = libc::PTHREAD_COND_INITIALIZER;
                found.push(libc::pthread_mutex_timedlock(&raw mut mutex, at) as isize);
                found.push(libc::pthread_mutex_timedlock(&raw mut mutex, at) as isize);
                let (cond, mutex) = (&raw mut cond, &raw mut mutex);
                found.push(libc::pthread_cond_timedwait(cond, mutex, at) as isize);
            }
        }
        found
    });
    assert!(found.iter().filter(|rc| rc.abs() == libc::EINVAL as isize).count() > 30, "{found:?}");
}

#[test]
fn a_goroutine_may_ask_about_its_thread() {
    let _w = watchdog();
    let found = same_on_both(|| {
        // SAFETY: structures of our own.
        unsafe {
            let own = libc::pthread_self();
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            let rc = libc::pthread_getaffinity_np(own, size_of_val(&set), &raw mut set);
            let cpus: Vec<_> = (0..1024).filter(|&cpu| libc::CPU_ISSET(cpu, &set)).collect();
            let small = libc::pthread_getaffinity_np(own, 1, &raw mut set);
            let (mut policy, mut param) = (-1, libc::sched_param { sched_priority: -1 });
            let scheduling = libc::pthread_getschedparam(own, &raw mut policy, &raw mut param);
            let (mut clock, mut time) = (-1, libc::timespec { tv_sec: -1, tv_nsec: -1 });
            let got = pthread_getcpuclockid(own, &raw mut clock);
            let read = libc::clock_gettime(clock, &raw mut time);
            let ran = time.tv_sec >= 0 && time.tv_nsec >= 0;
            ((rc, cpus, small), (scheduling, policy, param.sched_priority), (got, read, ran))
        }
    });
    assert_eq!(found.0.0, 0);
    assert_eq!(found.0.1, common::cpus());
    assert_eq!(found.1, (0, libc::SCHED_OTHER, 0));
    assert_eq!(found.2, (0, 0, true));
}

#[test]
fn affinity_and_priority_are_set_only_on_a_locked_thread() {
    let _w = watchdog();
    let set_both = || {
        // SAFETY: structures of our own.
        unsafe {
            let own = libc::pthread_self();
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            assert_eq!(libc::pthread_getaffinity_np(own, size_of_val(&set), &raw mut set), 0);
            // The first of the CPUs that it has.
            let first = (0..1024).find(|&cpu| libc::CPU_ISSET(cpu, &set)).unwrap();
            let mut one: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(first, &mut one);
            let pinned = libc::pthread_setaffinity_np(own, size_of_val(&one), &raw const one);
            let mut after: libc::cpu_set_t = std::mem::zeroed();
            libc::pthread_getaffinity_np(own, size_of_val(&after), &raw mut after);
            let param = libc::sched_param { sched_priority: 0 };
            let batch = libc::pthread_setschedparam(own, libc::SCHED_BATCH, &raw const param);
            let priority = libc::pthread_setschedprio(own, 0);
            let unchanged = libc::CPU_EQUAL(&set, &after);
            let is_pinned = libc::CPU_EQUAL(&one, &after);
            (pinned, batch, priority, unchanged, is_pinned)
        }
    };
    let (refused, allowed) = runtime(2).run(move || {
        let refused = trefoil::go(set_both).join().unwrap();
        // It ends while it is locked, and its thread with it.
        let locked = trefoil::go(move || {
            std::mem::forget(trefoil::lock_os_thread());
            set_both()
        });
        (refused, locked.join().unwrap())
    });
    let no = libc::EPERM;
    assert_eq!((refused.0, refused.1, refused.2, refused.3), (no, no, no, true));
    assert_eq!((allowed.0, allowed.1, allowed.2, allowed.4), (0, 0, 0, true));
}

#[test]
fn reading_beside_a_full_error_queue_uses_no_cpu() {
    let _w = watchdog();
    if !in_child() {
        Child::of("reading_beside_a_full_error_queue_uses_no_cpu").succeed();
        return;
    }
    let found = same_on_both(|| {
        let (a, b) = udp();
        let theirs = b.local_addr().unwrap();
        drop(b);
        set(&a, libc::SOL_IP, libc::IP_RECVERR, 1);
        a.send(b"nobody is there").unwrap();
        thread::sleep(10 * MS);
        // The error is told once; the message about it stays in the error queue, and `poll` reports that.
        let refused = recv(&a, &mut [0; 8], 0);
        a.set_read_timeout(Some(400 * MS)).unwrap();
        let before = cpu_time();
        let late = recv(&a, &mut [0; 8], 0);
        let used = cpu_time() - before;
        assert!(used < 150 * MS, "{used:?} of CPU time in 400 ms of waiting");
        a.set_read_timeout(None).unwrap();
        let ours = a.local_addr().unwrap();
        let sender = thread::spawn(move || {
            thread::sleep(20 * MS);
            UdpSocket::bind(theirs).unwrap().send_to(b"hello", ours).unwrap()
        });
        let found = (refused, late, recv(&a, &mut [0; 8], 0));
        assert_eq!(trefoil::blocking(|| sender.join()).unwrap(), 5);
        found
    });
    assert_eq!(found, (-(libc::ECONNREFUSED as isize), NOTHING, 5));
}

#[test]
fn a_read_that_races_with_a_close_fails_with_ebadf() {
    const ROUNDS: usize = 1_000;
    let _w = watchdog();
    if !in_child() {
        Child::of("a_read_that_races_with_a_close_fails_with_ebadf").succeed();
        return;
    }
    let turn = Arc::new(AtomicI32::new(-1));
    let theirs = turn.clone();
    let closer = thread::spawn(move || {
        for round in 0..ROUNDS {
            let (mut fd, mut looks) = (-1, 0u32);
            while fd < 0 {
                std::hint::spin_loop();
                fd = theirs.load(SeqCst);
                looks += 1;
                if looks.is_multiple_of(256) {
                    thread::yield_now(); // there may be one CPU only
                }
            }
            for _ in 0..round % 60 {
                std::hint::spin_loop();
            }
            // SAFETY: handed over by the reader.
            unsafe { libc::close(fd) };
            theirs.store(-2, SeqCst);
        }
    });
    let found = runtime(2).run(move || {
        let mut found = std::collections::BTreeMap::new();
        for _ in 0..ROUNDS {
            let (a, _b) = UnixStream::pair().unwrap();
            // SAFETY: makes a descriptor, which the other thread closes. Nobody else gets its number.
            let fd = unsafe { libc::fcntl(a.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 900) };
            drop(a);
            turn.store(fd, SeqCst);
            // SAFETY: our buffer.
            let n = check(unsafe { libc::read(fd, [0u8; 8].as_mut_ptr().cast(), 8) });
            *found.entry(n).or_insert(0) += 1;
            while turn.load(SeqCst) != -2 {
                thread::sleep(MS / 50);
            }
        }
        found
    });
    closer.join().unwrap();
    assert_eq!(Vec::from_iter(found), [(-(libc::EBADF as isize), ROUNDS)]);
}

extern "C" fn do_nothing(_: c_int) {}

#[test]
fn a_signal_does_not_end_a_poll_on_a_goroutine() {
    let _w = watchdog();
    if !in_child() {
        Child::of("a_signal_does_not_end_a_poll_on_a_goroutine").succeed();
        return;
    }
    // As the runtime does to preempt: a signal to the thread on which a goroutine runs.
    // SAFETY: a handler that may be one.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = do_nothing as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        assert_eq!(libc::sigaction(libc::SIGUSR2, &raw const action, std::ptr::null_mut()), 0);
    }
    let over = Arc::new(AtomicUsize::new(0));
    let theirs = over.clone();
    let sender = thread::spawn(move || {
        while theirs.load(SeqCst) == 0 {
            let thread = BUSY.load(SeqCst);
            // SAFETY: to a thread of this process, if it is still there.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, libc::SIGUSR2) };
        }
    });
    runtime(2).run(|| {
        let (one, other) = (eventfd(), eventfd());
        let entry =
            |fd: &OwnedFd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let mut list = [entry(&one), entry(&other)];
        for i in 0..20_000 {
            // SAFETY: no arguments; our list.
            unsafe {
                BUSY.store(libc::syscall(libc::SYS_gettid) as i32, SeqCst);
                let ms = i32::from(i % 1_000 == 0);
                assert_eq!(check(libc::poll(list.as_mut_ptr(), 2, ms) as isize), 0);
            }
        }
    });
    over.store(1, SeqCst);
    sender.join().unwrap();
}
