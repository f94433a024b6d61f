//! Reads after a short read, which has emptied a TCP stream: they wait without a system call, and
//! must still notice everything that comes, or has come already.

use crate::sockets::{at_each, listen};
use std::io::{ErrorKind, IoSliceMut, Read, Write};
use std::net::TcpStream as Plain;
use std::os::fd::AsRawFd;
use std::time::Duration;
use trefoil::go;
use trefoil::net::TcpStream;
use trefoil::time::sleep;

/// Returns an accepted stream, and its peer, which is a plain socket.
fn accepted() -> (TcpStream, Plain) {
    let (listener, addr) = listen();
    let peer = Plain::connect(addr).unwrap();
    peer.set_nodelay(true).unwrap();
    (listener.accept().unwrap().0, peer)
}

/// Calls `f` with an accepted stream and its peer, at each number of Ps: first a stream that the
/// poller does not know, then one that it knows.
fn with_new_and_registered(f: impl Fn(TcpStream, Plain) + Sync) {
    at_each(|| {
        let (stream, peer) = accepted();
        f(stream, peer);
    });
    with_registered(f);
}

/// Calls `f` with an accepted stream that the poller knows, and its peer, at each number of Ps.
fn with_registered(f: impl Fn(TcpStream, Plain) + Sync) {
    at_each(|| {
        let (mut stream, peer) = accepted();
        register(&mut stream, &peer);
        f(stream, peer);
    });
}

/// Reads into more bytes than there are.
fn read_short(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = [0; 64];
    let n = stream.read(&mut bytes).unwrap();
    bytes[..n].to_vec()
}

/// Sends one byte of urgent data.
fn send_urgent(peer: &Plain, byte: u8) {
    // SAFETY: one byte of our own.
    let n = unsafe { libc::send(peer.as_raw_fd(), (&raw const byte).cast(), 1, libc::MSG_OOB) };
    assert_eq!(n, 1);
}

/// Long enough for the kernel and the poller to have seen what was sent.
fn settle() {
    sleep(Duration::from_millis(5));
}

/// Makes the descriptor known to the poller: a read that waits.
fn register(stream: &mut TcpStream, peer: &Plain) {
    let mut peer = peer.try_clone().unwrap();
    let writer = go(move || {
        settle();
        peer.write_all(b"first").unwrap();
    });
    assert_eq!(read_short(stream), b"first");
    writer.join().unwrap();
}

#[test]
fn an_end_that_came_with_the_last_bytes_is_read() {
    with_new_and_registered(|mut stream, mut peer| {
        peer.write_all(b"ab").unwrap();
        drop(peer);
        settle();
        assert_eq!(read_short(&mut stream), b"ab");
        assert_eq!(read_short(&mut stream), b"");
        assert_eq!(read_short(&mut stream), b"", "the end stays");
    });
}

#[test]
fn an_end_that_comes_after_a_short_read_is_read() {
    with_registered(|mut stream, peer| {
        let closer = go(move || {
            settle();
            drop(peer);
        });
        assert_eq!(read_short(&mut stream), b"");
        closer.join().unwrap();
    });
}

#[test]
fn bytes_behind_urgent_data_are_read() {
    with_new_and_registered(|mut stream, mut peer| {
        peer.write_all(b"ab").unwrap();
        send_urgent(&peer, b'!');
        peer.write_all(b"cd").unwrap();
        settle();
        assert_eq!(read_short(&mut stream), b"ab", "a read stops at urgent data");
        assert_eq!(read_short(&mut stream), b"cd");
    });
}

#[test]
fn a_reset_after_a_short_read_is_an_error() {
    with_registered(|mut stream, peer| {
        // The peer has not read this byte, so its close is a reset.
        stream.write_all(b"x").unwrap();
        settle();
        drop(peer);
        let error = stream.read(&mut [0; 64]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn bytes_below_a_low_water_mark_are_read() {
    with_registered(|mut stream, mut peer| {
        let mark: libc::c_int = 4;
        // SAFETY: an int of our own.
        let rc = unsafe {
            libc::setsockopt(
                stream.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_RCVLOWAT,
                (&raw const mark).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        assert_eq!(rc, 0);
        peer.write_all(b"ab").unwrap();
        settle();
        assert_eq!(read_short(&mut stream), b"ab", "the descriptor was used by other code");
    });
}

#[test]
fn no_message_of_many_short_ones_is_lost() {
    at_each(|| {
        let (listener, addr) = listen();
        let server = go(move || {
            let mut stream = listener.accept().unwrap().0;
            let mut bytes = [0; 64];
            loop {
                match stream.read(&mut bytes).unwrap() {
                    0 => return,
                    n => stream.write_all(&bytes[..n]).unwrap(),
                }
            }
        });
        let mut client = TcpStream::connect(addr).unwrap();
        for i in 0..5_000u16 {
            client.write_all(&i.to_le_bytes()).unwrap();
            let mut bytes = [0; 2];
            client.read_exact(&mut bytes).unwrap();
            assert_eq!(u16::from_le_bytes(bytes), i);
        }
        drop(client);
        server.join().unwrap();
    });
}

/// The kernel takes at most 1,024 buffers: a read that fills those is not short.
#[test]
fn a_vectored_read_into_too_many_buffers_does_not_drain_the_stream() {
    with_registered(|mut stream, mut peer| {
        peer.write_all(&[7; 2_000]).unwrap();
        settle();
        let mut bytes = [0u8; 1_500];
        let mut bufs: Vec<_> = bytes.chunks_mut(1).map(IoSliceMut::new).collect();
        let n = stream.read_vectored(&mut bufs).unwrap();
        assert!(n <= 1_024, "{n}");
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.read_exact(&mut vec![0; 2_000 - n]).unwrap();
    });
}

/// Bytes that have been in the socket for a while are read, however short the time-out is.
#[test]
fn a_read_with_a_short_time_out_returns_what_is_there() {
    with_registered(|mut stream, mut peer| {
        peer.write_all(b"second").unwrap();
        settle();
        stream.set_read_timeout(Some(Duration::from_nanos(1))).unwrap();
        assert_eq!(read_short(&mut stream), b"second");
    });
}
