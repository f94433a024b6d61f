//! `accept`, `connect` and TCP Fast Open.

use crate::common::{MS, watchdog};
use crate::{check, same_on_both, same_on_both_at_once, set, tcp, udp, write};
use std::io::Read;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Instant;

fn tcp_socket() -> OwnedFd {
    // SAFETY: returns a new descriptor, which has no other owner.
    unsafe { OwnedFd::from_raw_fd(libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0)) }
}

#[test]
fn accept_refuses_a_socket_that_does_not_listen() {
    let _w = watchdog();
    let found = same_on_both(|| {
        let accept = |fd: RawFd| {
            use std::ptr::null_mut;
            // SAFETY: null pointers: no address is requested.
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
    // SAFETY: a local variable.
    check(unsafe { libc::connect(fd.as_raw_fd(), at, size) } as isize)
}

fn set_send_timeout(fd: &impl AsRawFd, millis: i64) {
    let limit = libc::timeval { tv_sec: 0, tv_usec: millis * 1_000 };
    let (at, size) = ((&raw const limit).cast(), size_of_val(&limit) as u32);
    let (level, name) = (libc::SOL_SOCKET, libc::SO_SNDTIMEO);
    // SAFETY: a local variable.
    assert_eq!(unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, at, size) }, 0);
}

#[test]
fn connect_of_a_connecting_socket_waits() {
    let _w = watchdog();
    let found = same_on_both_at_once(|| {
        let listener = tcp_socket();
        // SAFETY: the test's own socket; the kernel chooses its address.
        assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
        let listener = TcpListener::from(listener);
        let port = listener.local_addr().unwrap().port();
        // As many connections as the queue has room for. Of one more the kernel drops the SYN, and
        // the client repeats it after a second.
        let mut waiting = Vec::new();
        loop {
            let socket = tcp_socket();
            set_send_timeout(&socket, 50);
            if connect(&socket, port) != 0 {
                break;
            }
            waiting.push(socket);
            assert!(waiting.len() < 10, "the listener's queue is never full");
        }
        let socket = tcp_socket();
        set_send_timeout(&socket, 100);
        let mut found = Vec::new();
        for _ in 0..2 {
            let start = Instant::now();
            found.push(connect(&socket, port));
            assert!(start.elapsed() >= 100 * MS, "{:?}", start.elapsed());
        }
        set_send_timeout(&socket, 0);
        let socket = TcpStream::from(socket);
        let client = socket.local_addr().unwrap();
        let server = thread::spawn(move || while listener.accept().unwrap().1 != client {});
        found.push(connect(&socket, port));
        trefoil::blocking(|| server.join()).unwrap();
        found.push(connect(&socket, port));
        found
    });
    let [in_progress, already, connected] =
        [libc::EINPROGRESS, libc::EALREADY, libc::EISCONN].map(|error| -(error as isize));
    assert_eq!(found, [in_progress, already, 0, connected]);
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

/// Calls `sendto` with `MSG_FASTOPEN`.
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
    // SAFETY: the caller's bytes and a local address.
    check(unsafe { libc::sendto(fd, data, bytes.len(), flags, at, size) })
}

#[test]
fn tcp_fast_open_connects_and_sends() {
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
            // The second connection has a cookie, if the server sent one.
            for _ in 0..2 {
                let socket = tcp_socket();
                found.push(send_fast(socket.as_raw_fd(), &[7; 100_000], addr.port()));
            }
            // With the socket option the connection begins with the first write.
            let socket = tcp_socket();
            set(&socket, libc::IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT, 1);
            // SAFETY: a local variable.
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
        // No socket listens.
        let port =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        found.push(send_fast(tcp_socket().as_raw_fd(), b"hello", port));
        found
    });
    let refused = -(libc::ECONNREFUSED as isize);
    assert_eq!(found, [100_000, 100_000, 1_000, 100_000, 100_000, 1_000, refused]);
}
