//! What `net` has like std: `Debug`, conversions, non-blocking calls, socket options, and
//! descriptors and credentials over Unix sockets.

use crate::common::{MS, join_all, watchdog};
use std::fs::File;
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use trefoil::net::{
    TcpListener, TcpStream, UdpSocket, UnixDatagram, UnixListener, UnixStream, pipe,
};
use trefoil::time::sleep;
use trefoil::{Runtime, go};

/// Runs `f` as the main goroutine of runtimes with 1, 2 and 8 Ps, and on a plain thread.
fn everywhere(f: impl Fn() + Sync) {
    let _watchdog = watchdog();
    for procs in [1, 2, 8] {
        Runtime::builder().procs(procs).build().unwrap().run(&f);
    }
    f();
}

fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (client, listener.accept().unwrap().0)
}

/// Returns an abstract address that no other test uses.
fn abstract_address(name: &str) -> SocketAddr {
    let id = trefoil::id();
    SocketAddr::from_abstract_name(format!("trefoil-{name}-{}-{id}", std::process::id())).unwrap()
}

#[test]
fn debug_shows_what_std_shows() {
    everywhere(|| {
        // The descriptor keeps its number when it becomes std's.
        macro_rules! check {
            ($socket:expr, $part:expr) => {{
                let socket = $socket;
                let text = format!("{socket:?}");
                assert!(text.contains(&$part), "{text} should contain {}", $part);
                assert_eq!(text, format!("{:?}", socket.into_std().unwrap()));
            }};
        }
        let (client, server) = tcp_pair();
        check!(client, server.local_addr().unwrap().to_string());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        check!(listener, address);
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = udp.local_addr().unwrap().to_string();
        check!(udp, address);
        check!(UnixStream::pair().unwrap().0, "unnamed");
        check!(UnixDatagram::pair().unwrap().0, "unnamed");
        check!(UnixListener::bind_addr(&abstract_address("debug")).unwrap(), "trefoil-debug");

        let (client, _server) = tcp_pair();
        let fd = client.as_raw_fd();
        client.close().unwrap();
        assert_eq!(format!("{client:?}"), format!("TcpStream {{ fd: {fd}, closed: true }}"));
    });
}

#[test]
fn into_std_refuses_while_a_clone_would_become_blocking() {
    everywhere(|| {
        let (one, mut other) = UnixStream::pair().unwrap();
        let mut clone = one.try_clone().unwrap();
        let second_clone = clone.try_clone().unwrap();
        assert_eq!(one.into_std().unwrap_err().kind(), ErrorKind::ResourceBusy);
        // The clone still parks: otherwise its thread would block, and no timeout would end it.
        clone.set_read_timeout(Some(2 * MS)).unwrap();
        assert_eq!(clone.read(&mut [0]).unwrap_err().kind(), ErrorKind::TimedOut);
        drop(second_clone);
        let mut plain = clone.into_std().expect("the last handle");
        other.write_all(b"x").unwrap();
        assert_eq!(plain.read(&mut [0; 8]).unwrap(), 1);

        let (reader, _writer) = pipe().unwrap();
        let clone = reader.try_clone().unwrap();
        assert_eq!(OwnedFd::try_from(reader).unwrap_err().kind(), ErrorKind::ResourceBusy);
        OwnedFd::try_from(clone).expect("the last handle");
    });
}

#[test]
fn sockets_convert_from_and_to_descriptors() {
    everywhere(|| {
        let (one, mut other) = UnixStream::pair().unwrap();
        let fd = OwnedFd::try_from(one).unwrap();
        let mut one = UnixStream::try_from(fd).unwrap();
        one.set_read_timeout(Some(2 * MS)).unwrap();
        assert_eq!(one.read(&mut [0]).unwrap_err().kind(), ErrorKind::TimedOut);
        other.write_all(b"hello").unwrap();
        assert_eq!(one.read(&mut [0; 8]).unwrap(), 5);
    });
}

#[test]
fn calls_that_would_wait_fail_after_set_nonblocking() {
    everywhere(|| {
        let would_block = |error: std::io::Error| assert_eq!(error.kind(), ErrorKind::WouldBlock);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        would_block(listener.accept().map(drop).unwrap_err());
        let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        while listener.accept().is_err() {
            sleep(MS);
        }

        // What has arrived is read, also right after a short read.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut far = listener.accept().unwrap().0;
        near.set_nonblocking(true).unwrap();
        for _ in 0..100 {
            far.write_all(b"a").unwrap();
            assert_eq!(near.read(&mut [0; 8]).unwrap(), 1);
        }

        let (mut one, other) = UnixStream::pair().unwrap();
        one.set_nonblocking(true).unwrap();
        would_block(one.read(&mut [0]).unwrap_err());
        let full = loop {
            if let Err(error) = one.write(&[0; 4096]) {
                break error;
            }
        };
        would_block(full);
        // Async calls wait nevertheless.
        let reader = go(move || trefoil::block_on(one.read_async(&mut [0; 8])));
        sleep(MS);
        (&other).write_all(b"late").unwrap();
        assert_eq!(reader.join().unwrap().unwrap(), 4);

        let address = abstract_address("nonblocking");
        let receiver = UnixDatagram::bind_addr(&address).unwrap();
        receiver.set_nonblocking(true).unwrap();
        would_block(receiver.recv(&mut [0]).unwrap_err());
        let sender = UnixDatagram::unbound().unwrap();
        sender.set_nonblocking(true).unwrap();
        let full = loop {
            if let Err(error) = sender.send_to_addr(b"x", &address) {
                break error;
            }
        };
        would_block(full);
        sender.set_nonblocking(false).unwrap();
        sender.set_write_timeout(Some(2 * MS)).unwrap();
        let error = sender.send_to_addr(b"x", &address).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);

        // std's socket keeps the setting.
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        udp.set_nonblocking(true).unwrap();
        would_block(udp.into_std().unwrap().recv(&mut [0]).unwrap_err());
    });
}

#[test]
fn socket_options_are_those_of_the_kernel() {
    everywhere(|| {
        let (client, _server) = tcp_pair();
        assert_eq!(client.linger().unwrap(), None);
        client.set_linger(Some(Duration::from_secs(3))).unwrap();
        assert_eq!(client.linger().unwrap(), Some(Duration::from_secs(3)));
        for (set, whole) in [(1, 1), (999, 1), (1000, 1), (1001, 2)] {
            client.set_linger(Some(Duration::from_millis(set))).unwrap();
            assert_eq!(client.linger().unwrap(), Some(Duration::from_secs(whole)), "{set} ms");
        }
        client.set_linger(Some(Duration::MAX)).unwrap();
        assert_eq!(client.linger().unwrap(), Some(Duration::from_secs(i32::MAX as u64)));
        client.set_linger(None).unwrap();
        client.close().unwrap();
        assert_eq!(client.linger().unwrap_err().kind(), ErrorKind::NotConnected);
        assert!(client.set_nonblocking(true).is_err());

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_ttl(77).unwrap();
        assert_eq!(listener.ttl().unwrap(), 77);
        assert_eq!(listener.set_ttl(0).unwrap_err().kind(), ErrorKind::InvalidInput);
    });
}

#[test]
fn peek_from_returns_every_kind_of_address_and_leaves_the_datagram() {
    everywhere(|| {
        let (to, from) = (abstract_address("peek-to"), abstract_address("peek-from"));
        let receiver = Arc::new(UnixDatagram::bind_addr(&to).unwrap());
        let peeking = {
            let receiver = receiver.clone();
            go(move || receiver.peek_from(&mut [0; 16]).unwrap())
        };
        let sender = UnixDatagram::bind_addr(&from).unwrap();
        sender.send_to_addr(b"abstract", &to).unwrap();
        let (n, address) = peeking.join().unwrap();
        assert_eq!((n, address.as_abstract_name()), (8, from.as_abstract_name()));
        let (n, address) = receiver.recv_from(&mut [0; 16]).unwrap();
        assert_eq!((n, address.as_abstract_name()), (8, from.as_abstract_name()));

        let name = format!("trefoil-peek-{}-{}", std::process::id(), trefoil::id());
        let path = std::env::temp_dir().join(name);
        UnixDatagram::bind(&path).unwrap().send_to_addr(b"path", &to).unwrap();
        let mut bytes = [0; 2];
        let (n, address) = receiver.peek_from(&mut bytes).unwrap();
        assert_eq!((n, &bytes, address.as_pathname()), (2, b"pa", Some(&*path)));
        std::fs::remove_file(&path).unwrap();
        assert_eq!(receiver.recv(&mut [0; 16]).unwrap(), 4);

        UnixDatagram::unbound().unwrap().send_to_addr(b"unnamed", &to).unwrap();
        assert!(receiver.peek_from(&mut [0; 16]).unwrap().1.is_unnamed());
        receiver.recv(&mut [0; 16]).unwrap();
        receiver.shutdown(Shutdown::Read).unwrap();
        assert_eq!(receiver.peek_from(&mut [0; 16]).unwrap().0, 0);
    });
}

#[test]
fn paths_that_are_no_address_are_invalid_input() {
    everywhere(|| {
        let socket = UnixDatagram::unbound().unwrap();
        let std_socket = std::os::unix::net::UnixDatagram::unbound().unwrap();
        for path in ["x".repeat(108), "x".repeat(200), "a\0b".into(), "\0abstract".into()] {
            let error = socket.send_to(b"x", &path).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{path:?}");
            assert_eq!(std_socket.send_to(b"x", &path).unwrap_err().kind(), error.kind());
        }
        assert_eq!(socket.send_to(b"x", "").unwrap_err().kind(), ErrorKind::InvalidInput);
        let error = socket.send_to(b"x", "x".repeat(107)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "the longest path that fits");
    });
}

/// Returns what identifies the file behind a descriptor.
fn identity(fd: OwnedFd) -> (u64, u64) {
    let metadata = File::from(fd).metadata().unwrap();
    (metadata.dev(), metadata.ino())
}

#[test]
fn descriptors_arrive_with_their_bytes_and_are_the_same_files() {
    everywhere(|| {
        let (one, other) = UnixStream::pair().unwrap();
        let (one, other) = (Arc::new(one), Arc::new(other));
        const MESSAGES: usize = 50;
        let receiver = {
            let other = other.clone();
            go(move || {
                let mut files = Vec::new();
                for i in 0..MESSAGES {
                    let mut bytes = [0; 4];
                    let mut bufs = [IoSliceMut::new(&mut bytes)];
                    let mut received = other.recv_with_fds(&mut bufs, 3).unwrap();
                    assert!(!received.lost_fds && received.credentials.is_none());
                    assert_eq!((received.len, received.fds.len()), (4, i % 4));
                    assert_eq!(u32::from_ne_bytes(bytes), i as u32);
                    files.extend(received.fds.drain(..).map(identity));
                }
                files
            })
        };
        let mut sent = Vec::new();
        for i in 0..MESSAGES {
            let pipes: Vec<_> = (0..i % 4).map(|_| pipe().unwrap().0).collect();
            let fds: Vec<_> = pipes.iter().map(|pipe| pipe.as_fd()).collect();
            let bytes = (i as u32).to_ne_bytes();
            assert_eq!(one.send_with_fds(&[IoSlice::new(&bytes)], &fds).unwrap(), 4);
            sent.extend(pipes.into_iter().map(|p| identity(p.try_into().unwrap())));
            if i % 10 == 0 {
                sleep(MS);
            }
        }
        assert_eq!(receiver.join().unwrap(), sent);
    });
}

#[test]
fn surplus_descriptors_are_closed_and_reported() {
    everywhere(|| {
        let (one, other) = UnixDatagram::pair().unwrap();
        for (sent, max) in [(1, 0), (2, 1), (9, 3), (253, 252), (253, 253), (2, 1000)] {
            let (reader, writer) = pipe().unwrap();
            let fds = vec![writer.as_fd(); sent];
            one.send_with_fds(&[IoSlice::new(b"datagram")], &fds).unwrap();
            let mut bytes = [0; 4];
            let received = other.recv_with_fds(&mut [IoSliceMut::new(&mut bytes)], max).unwrap();
            assert_eq!((received.len, received.fds.len()), (4, sent.min(max)));
            assert_eq!(received.lost_fds, sent > max, "{sent} sent, at most {max}");
            assert!(received.is_truncated);
            // When the received descriptors are closed, too, no writer is left.
            drop((writer, received));
            let mut reader = reader;
            assert_eq!(reader.read(&mut [0]).unwrap(), 0, "{sent} sent, at most {max}");
        }
    });
}

#[test]
fn descriptors_that_cannot_be_sent_are_an_error() {
    everywhere(|| {
        let (one, other) = UnixStream::pair().unwrap();
        let invalid = |bytes: &[u8], fds: usize| {
            let fds = vec![other.as_fd(); fds];
            let error = one.send_with_fds(&[IoSlice::new(bytes)], &fds).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
        };
        invalid(b"", 1);
        invalid(b"x", 254);
        assert_eq!(one.send_with_fds(&[], &[]).unwrap(), 0);
        // A datagram without bytes may carry descriptors.
        let (one, other) = UnixDatagram::pair().unwrap();
        one.send_with_fds(&[], &[one.as_fd()]).unwrap();
        assert_eq!(other.recv_with_fds(&mut [], 1).unwrap().fds.len(), 1);
    });
}

#[test]
fn credentials_come_with_messages_after_set_passcred() {
    everywhere(|| {
        let (one, other) = UnixStream::pair().unwrap();
        let expected = other.peer_cred().unwrap();
        assert_eq!(expected.pid, Some(std::process::id() as i32));
        other.set_passcred(true).unwrap();
        let (_reader, writer) = pipe().unwrap();
        let fds = vec![writer.as_fd(); 253];
        one.send_with_fds(&[IoSlice::new(b"x")], &fds).unwrap();
        let received = other.recv_with_fds(&mut [IoSliceMut::new(&mut [0; 4])], 253).unwrap();
        assert_eq!((received.credentials, received.fds.len()), (Some(expected), 253));
        assert!(!received.lost_fds && received.sender().unwrap().is_unnamed());
    });
}

#[test]
fn waits_for_descriptors_end_like_other_reads() {
    everywhere(|| {
        let receive =
            |socket: &UnixStream| socket.recv_with_fds(&mut [IoSliceMut::new(&mut [0; 4])], 1);
        let (one, other) = UnixStream::pair().unwrap();
        one.set_read_timeout(Some(2 * MS)).unwrap();
        assert_eq!(receive(&one).unwrap_err().kind(), ErrorKind::TimedOut);
        one.set_read_timeout(None).unwrap();
        let one = Arc::new(one);
        let waiting = {
            let one = one.clone();
            go(move || receive(&one))
        };
        sleep(MS);
        one.close().unwrap();
        assert_eq!(waiting.join().unwrap().unwrap_err().kind(), ErrorKind::NotConnected);
        assert_eq!(receive(&other).unwrap().len, 0, "end of file");

        let (one, other) = UnixDatagram::pair().unwrap();
        let task = trefoil::task::spawn(async move {
            let mut bytes = [0; 4];
            let received = other.recv_with_fds_async(&mut [IoSliceMut::new(&mut bytes)], 1).await;
            received.unwrap().fds.len()
        });
        sleep(MS);
        let send = async { one.send_with_fds_async(&[IoSlice::new(b"x")], &[one.as_fd()]).await };
        assert_eq!(trefoil::block_on(send).unwrap(), 1);
        assert_eq!(task.join().unwrap(), 1);
    });
}

#[test]
fn goroutines_pass_a_descriptor_around_a_ring() {
    let _watchdog = watchdog();
    for procs in [1, 4] {
        Runtime::builder().procs(procs).build().unwrap().run(|| {
            const MEMBERS: usize = 20;
            let pairs: Vec<_> = (0..MEMBERS).map(|_| UnixDatagram::pair().unwrap()).collect();
            let (outs, ins): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
            let (mut reader, writer) = pipe().unwrap();
            let pass = |from: &UnixDatagram, to: &UnixDatagram| {
                let mut received =
                    from.recv_with_fds(&mut [IoSliceMut::new(&mut [0; 4])], 1).unwrap();
                let fd = received.fds.pop().unwrap();
                to.send_with_fds(&[IoSlice::new(b"next")], &[fd.as_fd()]).unwrap();
            };
            let mut outs = outs.into_iter();
            let first = outs.next().unwrap();
            let mut ins = ins;
            let last = ins.pop().unwrap();
            let ring = ins.into_iter().zip(outs).map(|(from, to)| go(move || pass(&from, &to)));
            let ring: Vec<_> = ring.collect();
            first.send_with_fds(&[IoSlice::new(b"first")], &[writer.as_fd()]).unwrap();
            drop(writer);
            let mut received = last.recv_with_fds(&mut [IoSliceMut::new(&mut [0; 4])], 1).unwrap();
            join_all(ring);
            File::from(received.fds.pop().unwrap()).write_all(b"around").unwrap();
            let mut text = String::new();
            reader.read_to_string(&mut text).unwrap();
            assert_eq!(text, "around", "and no other duplicate of the writing end is left");
        });
    }
}
