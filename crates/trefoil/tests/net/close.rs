//! `close` of sockets and pipes: waiting calls fail, the peer sees the end, and the descriptor
//! stays valid for safe code that has borrowed it.

#[allow(dead_code)]
use crate::common::{self, child_test, yield_until};
use crate::sockets::{at_each, listen, tcp_pair};
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::SocketAddr as UnixAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use trefoil::context::Context;
use trefoil::go;
use trefoil::net::{
    TcpListener, TcpStream, UdpSocket, UnixDatagram, UnixListener, UnixStream, pipe,
};

/// Device and inode: which file a descriptor refers to.
fn identity(fd: BorrowedFd<'_>) -> (u64, u64) {
    let file = File::from(fd.try_clone_to_owned().expect("a borrowed descriptor is valid"));
    let metadata = file.metadata().unwrap();
    (metadata.dev(), metadata.ino())
}

/// The same of a number, or None if it is not in use.
fn identity_of_number(fd: RawFd) -> Option<(u64, u64)> {
    let metadata = std::fs::metadata(format!("/proc/self/fd/{fd}")).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

fn abstract_name() -> UnixAddr {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    UnixAddr::from_abstract_name(format!("trefoil-close-{}-{n}", std::process::id())).unwrap()
}

/// Borrows the descriptor, closes, and checks that the borrow still refers to the same open file.
macro_rules! borrow_outlives_close {
    ($socket:expr) => {{
        let socket = &$socket;
        let fd = socket.as_fd();
        let before = identity(fd);
        socket.close().unwrap();
        assert_eq!(identity(fd), before, "{socket:?}");
        assert_eq!(identity(socket.as_fd()), before, "{socket:?}");
        // SAFETY: reads flags.
        assert!(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) } >= 0, "{socket:?}");
        assert_eq!(socket.close().unwrap_err().kind(), ErrorKind::NotConnected);
    }};
}

#[test]
fn a_borrowed_descriptor_is_the_same_file_after_close() {
    at_each(|| {
        let (client, _server) = tcp_pair();
        borrow_outlives_close!(client);
        borrow_outlives_close!(listen().0);
        borrow_outlives_close!(UdpSocket::bind("127.0.0.1:0").unwrap());
        borrow_outlives_close!(UnixStream::pair().unwrap().0);
        borrow_outlives_close!(UnixListener::bind_addr(&abstract_name()).unwrap());
        borrow_outlives_close!(UnixDatagram::pair().unwrap().0);
        let (reader, writer) = pipe().unwrap();
        borrow_outlives_close!(reader);
        borrow_outlives_close!(writer);
    });
}

#[test]
fn peers_see_the_close_of_a_borrowed_socket() {
    at_each(|| {
        let (client, mut server) = tcp_pair();
        let _fd = client.as_fd();
        client.close().unwrap();
        assert_eq!(server.read(&mut [0; 8]).unwrap(), 0);

        let (one, mut other) = UnixStream::pair().unwrap();
        let _fd = one.as_fd();
        one.close().unwrap();
        assert_eq!(other.read(&mut [0; 8]).unwrap(), 0);
        assert_eq!(other.write(b"late").unwrap_err().kind(), ErrorKind::BrokenPipe);

        let (listener, addr) = listen();
        let _fd = listener.as_fd();
        listener.close().unwrap();
        let error = TcpStream::connect(addr).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);

        let name = abstract_name();
        let listener = UnixListener::bind_addr(&name).unwrap();
        let _fd = listener.as_fd();
        listener.close().unwrap();
        let error = UnixStream::connect_addr(&name).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    });
}

#[test]
fn the_peer_of_a_borrowed_pipe_sees_the_end_at_drop() {
    at_each(|| {
        let (mut reader, writer) = pipe().unwrap();
        let raw = writer.as_fd().as_raw_fd();
        writer.close().unwrap();
        assert_eq!((&writer).write(b"late").unwrap_err().kind(), ErrorKind::NotConnected);
        assert_eq!(writer.as_raw_fd(), raw);
        let reading = go(move || reader.read(&mut [0; 8]));
        yield_until("the reader", || trefoil::debug::stats().io_waiters == 1);
        drop(writer);
        assert_eq!(reading.join().unwrap().unwrap(), 0);
    });
}

#[test]
fn close_without_a_borrow_frees_addresses_and_ends_pipes() {
    at_each(|| {
        let (client, mut server) = tcp_pair();
        client.close().unwrap();
        assert_eq!(server.read(&mut [0; 8]).unwrap(), 0);

        let (mut reader, writer) = pipe().unwrap();
        writer.close().unwrap();
        assert_eq!(reader.read(&mut [0; 8]).unwrap(), 0);
        let (reader, mut writer) = pipe().unwrap();
        reader.close().unwrap();
        assert_eq!(writer.write(b"late").unwrap_err().kind(), ErrorKind::BrokenPipe);

        let (listener, addr) = listen();
        let mut waiting = TcpStream::connect(addr).unwrap();
        listener.close().unwrap();
        let error = TcpStream::connect(addr).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        let error = waiting.read(&mut [0; 8]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "a connection in the queue");
        TcpListener::bind(addr).unwrap();

        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let addr = socket.local_addr().unwrap();
        socket.close().unwrap();
        UdpSocket::bind(addr).unwrap();

        let name = abstract_name();
        let listener = UnixListener::bind_addr(&name).unwrap();
        let mut waiting = UnixStream::connect_addr(&name).unwrap();
        listener.close().unwrap();
        let error = waiting.read(&mut [0; 8]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "a connection in the queue");
        UnixListener::bind_addr(&name).unwrap();
    });
}

#[test]
fn the_number_stays_in_use_until_the_drop() {
    // Closed descriptors are all one file, so another test could give the number the same identity.
    child_test!();
    at_each(|| {
        let (one, _other) = UnixStream::pair().unwrap();
        let raw = one.as_raw_fd();
        let open = identity_of_number(raw).unwrap();
        one.close().unwrap();
        // The connection is gone, but no other file can get its number.
        let closed = identity_of_number(raw).expect("the number is in use");
        assert_ne!(closed, open);
        assert_eq!(identity(one.as_fd()), closed, "a borrow after `close` is valid");
        assert_eq!(one.as_raw_fd(), raw);
        drop(one);
        assert_ne!(identity_of_number(raw), Some(closed));

        let (one, _other) = UnixStream::pair().unwrap();
        let (raw, open) = (one.as_raw_fd(), identity(one.as_fd()));
        one.close().unwrap();
        assert_eq!(identity_of_number(raw), Some(open));
        drop(one);
        assert_ne!(identity_of_number(raw), Some(open));

        // A failed conversion drops the socket.
        let (one, _other) = UnixStream::pair().unwrap();
        let raw = one.as_raw_fd();
        one.close().unwrap();
        let closed = identity_of_number(raw);
        assert!(one.into_std().is_err());
        assert_ne!(identity_of_number(raw), closed);
    });
}

#[test]
fn clones_stay_open() {
    at_each(|| {
        let (one, mut other) = UnixStream::pair().unwrap();
        let mut clone = one.try_clone().unwrap();
        one.close().unwrap();
        clone.write_all(b"open").unwrap();
        let mut bytes = [0; 4];
        other.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"open");
        drop(clone);
        assert_eq!(other.read(&mut bytes).unwrap(), 0);
    });
}

#[test]
fn close_ends_the_connection_of_halves_and_guards() {
    at_each(|| {
        let (one, mut other) = UnixStream::pair().unwrap();
        let (reader, mut writer) = one.split();
        reader.stream().close().unwrap();
        assert_eq!(writer.write(b"late").unwrap_err().kind(), ErrorKind::NotConnected);
        assert_eq!(other.read(&mut [0; 8]).unwrap(), 0);

        let (one, mut other) = UnixStream::pair().unwrap();
        let (ctx, _cancel) = Context::background().with_cancel();
        let guard = one.cancel_on(&ctx);
        one.close().unwrap();
        assert_eq!(other.read(&mut [0; 8]).unwrap(), 0, "the guard keeps the number only");
        let raw = one.as_raw_fd();
        let closed = identity_of_number(raw).unwrap();
        drop(one);
        assert_eq!(identity_of_number(raw), Some(closed));
        drop(guard);
        yield_until("the drop", || identity_of_number(raw) != Some(closed));
    });
}

#[test]
fn close_ends_waiting_calls_of_every_type() {
    at_each(|| {
        macro_rules! ends {
            ($socket:expr, |$s:ident| $call:expr) => {{
                let socket = Arc::new($socket);
                let $s = socket.clone();
                let waiting = go(move || $call.map(|_| ()));
                yield_until("the call", || trefoil::debug::stats().io_waiters == 1);
                socket.close().unwrap();
                let error = waiting.join().unwrap().unwrap_err();
                assert_eq!(error.kind(), ErrorKind::NotConnected, "{socket:?}");
            }};
        }
        let (client, _server) = tcp_pair();
        ends!(client, |s| (&*s).read(&mut [0; 8]));
        ends!(listen().0, |s| s.accept());
        ends!(UdpSocket::bind("127.0.0.1:0").unwrap(), |s| s.recv_from(&mut [0; 8]));
        let (one, _other) = UnixStream::pair().unwrap();
        ends!(one, |s| (&*s).read(&mut [0; 8]));
        ends!(UnixListener::bind_addr(&abstract_name()).unwrap(), |s| s.accept());
        let (one, _other) = UnixDatagram::pair().unwrap();
        ends!(one, |s| s.recv(&mut [0; 8]));
        let (reader, _writer) = pipe().unwrap();
        ends!(reader, |s| (&*s).read(&mut [0; 8]));
        let (_reader, writer) = pipe().unwrap();
        ends!(writer, |s| loop {
            if let Err(e) = (&*s).write(&[0; 4096]) {
                break Err::<(), _>(e);
            }
        });
    });
}

#[test]
fn a_borrow_that_races_with_close_keeps_its_file() {
    at_each(|| {
        for _ in 0..300 {
            let (one, _other) = UnixStream::pair().unwrap();
            let one = Arc::new(one);
            let closing = one.clone();
            let closer = go(move || closing.close());
            let fd = one.as_fd();
            let before = identity(fd);
            closer.join().unwrap().unwrap();
            assert_eq!(identity(fd), before);
        }
    });
}

#[test]
fn close_ends_a_pipe_when_no_descriptor_is_left() {
    child_test!();
    common::runtime(1).run(|| {
        let (mut reader, writer) = pipe().unwrap();
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: reads and writes one local rlimit.
        unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
        limit.rlim_cur = limit.rlim_cur.min(256);
        // SAFETY: as above.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
        let all: Vec<_> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
        writer.close().unwrap();
        assert_eq!(reader.read(&mut [0]).unwrap(), 0, "{} files are open", all.len());
    });
}
