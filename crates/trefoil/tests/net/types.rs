//! Datagrams, Unix sockets and pipes, copies between them, and peers that behave badly.
//!
//! Loopback only, bounded in count and time.

use crate::common::{self, Child, child_test, runtime, test_name, yield_until};
#[cfg(feature = "std")]
use crate::common::{flag, once_in_five, same, watchdog};
use crate::sockets::{MS, at_each, fill, listen, past, soon, tcp_pair};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use trefoil::context::{Context, ContextError};
use trefoil::net::{
    PipeReader, TcpListener, TcpStream, UdpSocket, UnixDatagram, UnixListener, UnixStream, copy,
    pipe,
};
use trefoil::time::sleep;
use trefoil::{chan, go};

/// Returns the number of open sockets and pipes. (The runtime opens other files now and then.)
fn open_sockets() -> usize {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| {
        std::fs::read_link(entry.ok()?.path()).ok()?.into_os_string().into_string().ok()
    });
    links.filter(|link| link.starts_with("socket:") || link.starts_with("pipe:")).count()
}

#[test]
fn udp_sockets_send_receive_peek_and_time_out() {
    at_each(|| {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let addr = server.local_addr().unwrap();
        server.set_read_deadline(soon(5 * MS)).unwrap();
        assert_eq!(server.recv_from(&mut [0; 8]).unwrap_err().kind(), ErrorKind::TimedOut);
        server.set_read_deadline(None).unwrap();
        let echo = go(move || {
            let mut bytes = [0; 64];
            loop {
                let (n, from) = server.peek_from(&mut bytes).unwrap();
                assert_eq!(server.recv_from(&mut bytes).unwrap(), (n, from));
                if n == 0 {
                    return;
                }
                server.send_to(&bytes[..n], from).unwrap();
            }
        });
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        client.connect(addr).unwrap();
        assert_eq!(client.peer_addr().unwrap(), addr);
        for i in 0..100u32 {
            assert_eq!(client.send(&i.to_le_bytes()).unwrap(), 4);
            let mut answer = [0; 8];
            assert_eq!(client.peek(&mut answer).unwrap(), 4);
            assert_eq!(client.recv(&mut answer).unwrap(), 4);
            assert_eq!(answer[..4], i.to_le_bytes());
        }
        client.send(&[]).unwrap();
        echo.join().unwrap();
        client.set_broadcast(true).unwrap();
        assert!(client.broadcast().unwrap());
        client.set_ttl(9).unwrap();
        assert_eq!(client.ttl().unwrap(), 9);
        assert!(client.take_error().is_ok());
    });
}

#[test]
fn unix_datagrams_end_after_shutdown_of_the_reading_direction() {
    at_each(|| {
        let (one, other) = UnixDatagram::pair().unwrap();
        one.send(b"before").unwrap();
        let other = Arc::new(other);
        other.shutdown(Shutdown::Read).unwrap();
        assert_eq!(one.send(b"after").unwrap_err().kind(), ErrorKind::BrokenPipe);
        assert_eq!(other.recv(&mut [0; 8]).unwrap(), 6);
        assert_eq!(other.peek(&mut [0; 8]).unwrap(), 0);
        let (n, from) = other.recv_from(&mut [0; 8]).unwrap();
        assert!(n == 0 && from.is_unnamed());

        let (_one, other) = UnixDatagram::pair().unwrap();
        let other = Arc::new(other);
        let receiving = other.clone();
        let receiver = go(move || receiving.recv(&mut [0; 8]));
        yield_until("the receiver", || trefoil::debug::stats().io_waiters == 1);
        other.shutdown(Shutdown::Both).unwrap();
        assert_eq!(receiver.join().unwrap().unwrap(), 0);
    });
}

#[test]
fn a_past_deadline_refuses_unix_datagrams_to_an_address() {
    at_each(|| {
        let path = temp_path("dgram-deadline");
        let server = UnixDatagram::bind(&path).unwrap();
        let client = UnixDatagram::unbound().unwrap();
        client.set_write_deadline(past()).unwrap();
        let to = server.local_addr().unwrap();
        assert_eq!(client.send_to(b"late", &path).unwrap_err().kind(), ErrorKind::TimedOut);
        assert_eq!(client.send_to_addr(b"late", &to).unwrap_err().kind(), ErrorKind::TimedOut);
        client.set_write_deadline(None).unwrap();
        let (ctx, cancel) = Context::background().with_cancel();
        cancel.cancel();
        let guard = client.cancel_on(&ctx);
        assert_eq!(client.send_to(b"late", &path).unwrap_err().kind(), ErrorKind::Other);
        drop(guard);
        client.set_write_timeout(Some(5 * MS)).unwrap();
        let error = loop {
            if let Err(error) = client.send_to(b"again", &path) {
                break error;
            }
        };
        assert_eq!(error.kind(), ErrorKind::TimedOut, "the queue is full");
        std::fs::remove_file(&path).unwrap();
    });
}

#[cfg(feature = "std")]
#[test]
fn an_address_that_needs_no_lookup_does_not_cost_the_p() {
    let _watchdog = watchdog();
    // A page fault may block the thread, and then it loses its P nevertheless.
    once_in_five(|| {
        runtime(1).run(|| {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            let addr = socket.local_addr().unwrap();
            let text = addr.to_string();
            let ran = flag();
            let guard = trefoil::no_preempt();
            let other = go({
                let ran = ran.clone();
                move || ran.store(true, Ordering::Relaxed)
            });
            for _ in 0..1000 {
                socket.send_to(b"x", addr).unwrap();
                socket.send_to(b"x", &text[..]).unwrap();
                socket.connect((addr.ip(), addr.port())).unwrap();
            }
            let ran_early = ran.load(Ordering::Relaxed);
            drop(guard);
            other.join().unwrap();
            same(ran_early, false)
        })
    });
}

/// Returns a path that is not used otherwise.
fn temp_path(name: &str) -> std::path::PathBuf {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("trefoil-{name}-{}-{n}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    path
}

#[test]
fn unix_streams_echo_to_twenty_clients() {
    at_each(|| {
        let path = temp_path("stream");
        let listener = UnixListener::bind(&path).unwrap();
        assert_eq!(listener.local_addr().unwrap().as_pathname(), Some(&*path));
        listener.set_deadline(soon(5 * MS)).unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::TimedOut);
        listener.set_deadline(None).unwrap();
        let server = go(move || {
            for stream in listener.incoming().take(20) {
                let (mut reads, mut writes) = stream.unwrap().split();
                go(move || io::copy(&mut reads, &mut writes).unwrap());
            }
        });
        let clients: Vec<_> = (0..20)
            .map(|i| {
                let path = path.clone();
                go(move || {
                    let mut stream = UnixStream::connect(path).unwrap();
                    let text = format!("client {i}").repeat(500);
                    stream.write_all(text.as_bytes()).unwrap();
                    stream.shutdown(Shutdown::Write).unwrap();
                    assert_eq!(io::read_to_string(stream).unwrap(), text);
                })
            })
            .collect();
        clients.into_iter().for_each(|h| h.join().unwrap());
        server.join().unwrap();
        let _ = std::fs::remove_file(path);
    });
}

/// epoll reports no event for a full queue: `connect` waits nevertheless, as std's does.
#[test]
fn unix_connect_waits_for_room_in_the_queue() {
    at_each(|| {
        let path = temp_path("full");
        let listener = UnixListener::bind(&path).unwrap();
        // SAFETY: a system call on the test's own descriptor.
        assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
        let clients: Vec<_> = (0..5)
            .map(|_| {
                let path = path.clone();
                go(move || UnixStream::connect(path).unwrap())
            })
            .collect();
        sleep(5 * MS);
        let accepted: Vec<_> = (0..5).map(|_| listener.accept().unwrap()).collect();
        clients.into_iter().for_each(|h| drop(h.join().unwrap()));
        drop(accepted);
        let _ = std::fs::remove_file(path);
    });
}

#[test]
fn unix_datagrams_wait_for_room_and_keep_their_order() {
    at_each(|| {
        let (path, back) = (temp_path("datagram"), temp_path("back"));
        let server = UnixDatagram::bind(&path).unwrap();
        let client = UnixDatagram::bind(&back).unwrap();
        // More than the queue has room for: sending waits.
        let sender = {
            let path = path.clone();
            go(move || {
                for i in 0..200u32 {
                    assert_eq!(client.send_to(&i.to_le_bytes(), &path).unwrap(), 4);
                }
                client
            })
        };
        sleep(5 * MS);
        for i in 0..200u32 {
            let mut bytes = [0; 8];
            let (n, from) = server.recv_from(&mut bytes).unwrap();
            assert_eq!((n, &bytes[..4]), (4, &i.to_le_bytes()[..]));
            assert_eq!(from.as_pathname(), Some(&*back));
        }
        let client = sender.join().unwrap();
        server.connect(&back).unwrap();
        server.send(b"answer").unwrap();
        let mut bytes = [0; 16];
        assert_eq!(client.peek(&mut bytes).unwrap(), 6);
        assert_eq!(client.recv(&mut bytes).unwrap(), 6);
        let (one, other) = UnixDatagram::pair().unwrap();
        other.set_read_deadline(past()).unwrap();
        one.send(b"x").unwrap();
        assert_eq!(other.recv(&mut bytes).unwrap_err().kind(), ErrorKind::TimedOut);
        let nowhere = UnixDatagram::unbound().unwrap().send_to(b"x", "/nowhere/at/all");
        assert_eq!(nowhere.unwrap_err().kind(), ErrorKind::NotFound);
        let _ = (std::fs::remove_file(path), std::fs::remove_file(back));
    });
}

#[test]
fn abstract_unix_addresses_can_be_bound_and_connected() {
    use std::os::linux::net::SocketAddrExt;
    at_each(|| {
        let name = temp_path("abstract");
        let addr =
            std::os::unix::net::SocketAddr::from_abstract_name(name.to_str().unwrap()).unwrap();
        let listener = UnixListener::bind_addr(&addr).unwrap();
        let client = UnixStream::connect_addr(&addr).unwrap();
        let (server, _) = listener.accept().unwrap();
        assert_eq!(server.local_addr().unwrap().as_abstract_name(), addr.as_abstract_name());
        assert_eq!(client.peer_addr().unwrap().as_abstract_name(), addr.as_abstract_name());
        drop(listener);
        let receiver = UnixDatagram::bind_addr(&addr).unwrap();
        UnixDatagram::unbound().unwrap().send_to_addr(b"abc", &addr).unwrap();
        assert_eq!(receiver.recv(&mut [0; 8]).unwrap(), 3);
    });
}

#[test]
fn a_pipe_transfers_more_than_it_holds_and_reports_a_closed_end() {
    at_each(|| {
        let (mut reader, mut writer) = pipe().unwrap();
        reader.set_read_deadline(soon(5 * MS)).unwrap();
        assert_eq!(reader.read(&mut [0; 4]).unwrap_err().kind(), ErrorKind::TimedOut);
        reader.set_read_deadline(None).unwrap();
        let bytes: Vec<u8> = (0..1_000_000u32).map(|i| (i % 249) as u8).collect();
        let sent = bytes.clone();
        let handle = go(move || writer.write_all(&sent).unwrap());
        let mut all = Vec::new();
        reader.read_to_end(&mut all).unwrap();
        assert!(all == bytes);
        handle.join().unwrap();
        // The other end is closed.
        let (reader, mut writer) = pipe().unwrap();
        drop(reader);
        assert_eq!(writer.write(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
    });
}

#[test]
fn the_output_of_a_child_can_be_read_as_a_pipe() {
    at_each(|| {
        let mut child = std::process::Command::new("sh")
            .args(["-c", "sleep 0.02; echo from the child"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let out = OwnedFd::from(child.stdout.take().unwrap());
        let text = io::read_to_string(PipeReader::try_from(out).unwrap()).unwrap();
        assert_eq!(text, "from the child\n");
        child.wait().unwrap();
    });
}

#[test]
fn sockets_convert_from_std_and_back() {
    at_each(|| {
        let listener = TcpListener::from(std::net::TcpListener::bind("127.0.0.1:0").unwrap());
        let addr = listener.local_addr().unwrap();
        let client = go(move || TcpStream::connect(addr).unwrap());
        let (mut server, _) = listener.accept().unwrap();
        let client = client.join().unwrap();
        server.write_all(b"hello").unwrap();
        // It blocks again, like any socket of std.
        let mut client = client.into_std().unwrap();
        let mut bytes = [0; 5];
        client.read_exact(&mut bytes).unwrap();
        let client = TcpStream::from_std(client).unwrap();
        assert!(client.as_fd().as_raw_fd() > 0);
        let (reads, writes) = client.split();
        let raw = server.into_raw_fd();
        // SAFETY: `into_raw_fd` has given up the ownership.
        drop(unsafe { OwnedFd::from_raw_fd(raw) });
        drop((reads, writes));
        let (one, _other) = UnixStream::pair().unwrap();
        one.close().unwrap();
        assert!(one.into_std().is_err());
    });
}

#[test]
fn a_context_that_is_done_ends_socket_calls() {
    at_each(|| {
        let (client, mut server) = tcp_pair();
        let client = Arc::new(client);
        let (ctx, cancel) = Context::background().with_cancel();
        let guard = client.cancel_on(&ctx);
        let reading = client.clone();
        let reader = go(move || (&*reading).read(&mut [0; 8]));
        yield_until("the reader to wait", || trefoil::debug::stats().io_waiters == 1);
        cancel.cancel();
        let e = reader.join().unwrap().unwrap_err();
        let source = e.get_ref().and_then(|e| e.downcast_ref::<ContextError>());
        assert_eq!(source, Some(&ContextError::Canceled));
        assert!((&*client).write(b"x").is_err());
        // After the guard is dropped, the socket works as before.
        drop(guard);
        server.write_all(b"x").unwrap();
        assert_eq!((&*client).read(&mut [0; 8]).unwrap(), 1);

        let start = Instant::now();
        let (ctx, _cancel) = Context::background().with_timeout(10 * MS);
        let guard = client.cancel_on(&ctx);
        assert_eq!((&*client).read(&mut [0; 8]).unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(start.elapsed() >= 10 * MS);
        // A second guard, of a context that is done already.
        let second = client.cancel_on(&ctx);
        drop(guard);
        assert!((&*client).read(&mut [0; 8]).is_err());
        drop(second);
        // A guard that is dropped before the cancel has no effect.
        let (ctx, cancel) = Context::background().with_cancel();
        drop(client.cancel_on(&ctx));
        cancel.cancel();
        server.write_all(b"x").unwrap();
        assert_eq!((&*client).read(&mut [0; 8]).unwrap(), 1);

        let (listener, _) = listen();
        let (ctx, cancel) = Context::background().with_cancel();
        let _guard = listener.cancel_on(&ctx);
        go(move || cancel.cancel());
        assert!(listener.accept().is_err());
    });
}

#[test]
fn copy_to_a_closed_socket_does_not_raise_sigpipe() {
    child_test!();
    // SAFETY: the default action, which ends the process.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    runtime(2).run(|| {
        let (mut client, inner) = UnixStream::pair().unwrap();
        let (outer, server) = UnixStream::pair().unwrap();
        drop(server);
        client.write_all(b"a few bytes").unwrap();
        assert_eq!(copy(&inner, &outer).unwrap_err().kind(), ErrorKind::BrokenPipe);

        // Enough for `splice`.
        let (mut client, inner) = UnixStream::pair().unwrap();
        let (outer, mut server) = UnixStream::pair().unwrap();
        let writer = go(move || while client.write_all(&[7; 4096]).is_ok() {});
        let forwarder = go(move || copy(&inner, &outer));
        server.read_exact(&mut vec![0; 200_000]).unwrap();
        drop(server);
        let kind = forwarder.join().unwrap().unwrap_err().kind();
        assert!(matches!(kind, ErrorKind::BrokenPipe | ErrorKind::ConnectionReset), "{kind:?}");
        writer.join().unwrap();
    });
}

#[test]
fn copy_transfers_every_byte_between_sockets_and_pipes() {
    at_each(|| {
        // Few bytes are copied by reads and writes, many by splice.
        for size in [0, 1, 1000, common::rounds(600_000, 3_000_000usize)] {
            let (mut client, inner) = tcp_pair();
            let (outer, server) = tcp_pair();
            let forwarder = go(move || {
                let n = copy(&inner, &outer).unwrap();
                outer.shutdown(Shutdown::Write).unwrap();
                n
            });
            let writer = go(move || {
                let mut rng = StdRng::seed_from_u64(size as u64);
                let mut at = 0;
                while at < size {
                    let n = rng.random_range(1..60_000).min(size - at);
                    let bytes: Vec<u8> = (at..at + n).map(|i| (i % 253) as u8).collect();
                    client.write_all(&bytes).unwrap();
                    at += n;
                }
            });
            let mut server = server;
            let mut all = Vec::new();
            server.read_to_end(&mut all).unwrap();
            assert!(
                all.len() == size && all.iter().enumerate().all(|(i, &b)| b == (i % 253) as u8)
            );
            assert_eq!(forwarder.join().unwrap(), size as u64);
            writer.join().unwrap();
        }
        // Into a pipe, and out of it.
        let (mut client, inner) = tcp_pair();
        let (reader, writer) = pipe().unwrap();
        let (outer, server) = UnixStream::pair().unwrap();
        let one = go(move || copy(&inner, &writer).unwrap());
        let two = go(move || copy(&reader, &outer).unwrap());
        let feed = go(move || client.write_all(&vec![b'x'; 500_000]).unwrap());
        assert_eq!(io::read_to_string(server).unwrap().len(), 500_000);
        feed.join().unwrap();
        assert_eq!((one.join().unwrap(), two.join().unwrap()), (500_000, 500_000));
    });
}

/// Closes the stream so that the peer gets a reset.
fn reset(stream: &TcpStream) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    // SAFETY: reads a local variable.
    let rc = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            size_of_val(&linger) as u32,
        )
    };
    assert_eq!(rc, 0);
    stream.close().unwrap();
}

#[test]
fn resets_stalls_and_half_closes_of_a_peer_are_reported() {
    at_each(|| {
        // A reset while a read waits.
        let (mut client, server) = tcp_pair();
        let reader = go(move || {
            let e = client.read(&mut [0; 8]).unwrap_err().kind();
            (e, client.write(b"x").map_err(|e| e.kind()))
        });
        yield_until("the reader to wait", || trefoil::debug::stats().io_waiters == 1);
        reset(&server);
        let (read, write) = reader.join().unwrap();
        assert_eq!((read, write), (ErrorKind::ConnectionReset, Err(ErrorKind::BrokenPipe)));

        // A reset while a write waits.
        let (client, server) = tcp_pair();
        fill(&client);
        // The kernel may still find room for some bytes.
        let writer = go(move || {
            loop {
                if let Err(e) = (&client).write_all(&[0; 1000]) {
                    return e.kind();
                }
            }
        });
        yield_until("the writer to wait", || trefoil::debug::stats().io_waiters == 1);
        reset(&server);
        assert_eq!(writer.join().unwrap(), ErrorKind::ConnectionReset);

        // Half a frame, and then silence.
        let (mut client, mut server) = tcp_pair();
        server.write_all(b"half").unwrap();
        client.set_read_deadline(soon(20 * MS)).unwrap();
        assert_eq!(client.read_exact(&mut [0; 8]).unwrap_err().kind(), ErrorKind::TimedOut);

        // Half a frame, and then a half close; the answer is still sent.
        let (mut client, mut server) = tcp_pair();
        server.write_all(b"half").unwrap();
        server.shutdown(Shutdown::Write).unwrap();
        assert_eq!(client.read_exact(&mut [0; 8]).unwrap_err().kind(), ErrorKind::UnexpectedEof);
        client.write_all(b"answer").unwrap();
        server.read_exact(&mut [0; 6]).unwrap();
    });
}

#[test]
fn accept_works_again_after_emfile() {
    child_test!();
    const CLIENTS: usize = 60;
    const FREE: u64 = 20;
    for procs in [1, 2, 8] {
        runtime(procs).run(|| {
            let (listener, addr) = listen();
            // From now on the runtime has opened the descriptors that it needs.
            listener.set_deadline(soon(MS)).unwrap();
            assert!(listener.accept().is_err());
            listener.set_deadline(None).unwrap();
            let SocketAddr::V4(addr) = addr else { panic!("{addr}") };
            let to = libc::sockaddr_in {
                sin_family: libc::AF_INET as u16,
                sin_port: addr.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from(*addr.ip()).to_be() },
                sin_zero: [0; 8],
            };
            // SAFETY: local descriptors and variables.
            let clients: Vec<OwnedFd> = unsafe {
                let socket = || libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0);
                (0..CLIENTS).map(|_| OwnedFd::from_raw_fd(socket())).collect()
            };
            let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: as above.
            unsafe {
                libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
                let before = limit.rlim_cur;
                limit.rlim_cur = clients[CLIENTS - 1].as_raw_fd() as u64 + FREE;
                assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
                limit.rlim_cur = before;
                for client in &clients {
                    let size = size_of_val(&to) as u32;
                    assert_eq!(libc::connect(client.as_raw_fd(), (&raw const to).cast(), size), 0);
                }
            }
            let (mut open, mut accepted, mut refused) = (Vec::new(), 0, 0);
            while accepted < CLIENTS {
                match listener.accept() {
                    Ok((stream, _)) => {
                        open.push(stream);
                        accepted += 1;
                    }
                    Err(e) => {
                        assert_eq!(e.raw_os_error(), Some(libc::EMFILE), "{e}");
                        assert!(!open.is_empty());
                        refused += 1;
                        open.clear();
                    }
                }
            }
            assert!(refused >= CLIENTS / FREE as usize - 1, "{refused}");
            // SAFETY: as above.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
        });
    }
}

#[test]
fn killing_connections_at_random_spares_the_others_and_leaks_nothing() {
    child_test!();
    let connections = common::rounds(300, 1000);
    let limit = common::raise_fd_limit();
    if limit < 2 * connections as u64 + 100 {
        common::mark(&format!("skipped: only {limit} descriptors"));
        return;
    }
    for procs in [1, 2, 8] {
        runtime(procs).run(|| {
            let (listener, addr) = listen();
            let before = {
                // From now on the poller has opened its own descriptors.
                drop((TcpStream::connect(addr).unwrap(), listener.accept().unwrap()));
                let (mut a, b) = UnixStream::pair().unwrap();
                a.set_read_deadline(soon(MS)).unwrap();
                let _ = a.read(&mut [0; 1]);
                drop((a, b));
                open_sockets()
            };
            let (kill_tx, kill_rx) = chan::unbounded::<Arc<TcpStream>>();
            let server = go(move || {
                for id in 0..connections {
                    let stream = Arc::new(listener.accept().unwrap().0);
                    let tx = kill_tx.clone();
                    go(move || {
                        // The first byte decides whether the connection is killed, and where.
                        let mut fate = [0];
                        if (&*stream).read_exact(&mut fate).is_err() {
                            return;
                        }
                        if fate[0] == 1 {
                            tx.send(stream.clone()).unwrap();
                        }
                        drop(tx);
                        let mut bytes = [0; 700];
                        while let Ok(n @ 1..) = (&*stream).read(&mut bytes) {
                            if (&*stream).write_all(&bytes[..n]).is_err() {
                                break;
                            }
                        }
                        let _ = id;
                    });
                }
            });
            let killer = go(move || {
                let mut rng = StdRng::seed_from_u64(5);
                for victim in kill_rx.iter() {
                    if rng.random_bool(0.3) {
                        sleep(Duration::from_micros(rng.random_range(0..300)));
                    }
                    if rng.random_bool(0.5) {
                        reset(&victim);
                    } else {
                        let _ = victim.close();
                    }
                }
            });
            let clients: Vec<_> = (0..connections as u64)
                .map(|id| {
                    go(move || {
                        let mut rng = StdRng::seed_from_u64(id);
                        let stream = Arc::new(TcpStream::connect(addr).unwrap());
                        // 1: killed by the server; 2: killed by this client; else it survives.
                        let fate = rng.random_range(0..4u8);
                        if (&*stream).write_all(&[fate]).is_err() {
                            return false;
                        }
                        let killer = (fate == 2).then(|| {
                            let stream = stream.clone();
                            go(move || {
                                trefoil::yield_now();
                                let _ = stream.close();
                            })
                        });
                        let mut complete = true;
                        for turn in 0..10u8 {
                            let sent = vec![turn ^ id as u8; rng.random_range(1..2000)];
                            let mut got = vec![0; sent.len()];
                            if (&*stream).write_all(&sent).is_err()
                                || (&*stream).read_exact(&mut got).is_err()
                            {
                                complete = false;
                                break;
                            }
                            assert!(sent == got, "connection {id}, turn {turn}");
                        }
                        if let Some(killer) = killer {
                            killer.join().unwrap();
                        }
                        assert!(complete || fate == 1 || fate == 2, "connection {id} was lost");
                        complete
                    })
                })
                .collect();
            let survivors =
                clients.into_iter().map(|h| h.join().unwrap()).filter(|complete| *complete).count();
            assert!((3 * connections / 10..connections).contains(&survivors), "{survivors}");
            server.join().unwrap();
            killer.join().unwrap();
            yield_until("all goroutines to end", || trefoil::num_goroutines() == 1);
            assert_eq!(trefoil::debug::stats().io_waiters, 0);
            // The listener was dropped with its goroutine.
            assert_eq!(open_sockets(), before - 1);
        });
    }
}

/// `TREFOIL_TEST_CONNECTIONS` of them are open at once (default: 2000).
#[test]
fn thousands_of_connections_need_few_threads() {
    child_test!();
    const TURNS: usize = 3;
    let count: usize =
        std::env::var("TREFOIL_TEST_CONNECTIONS").map_or(2000, |n| n.parse().unwrap());
    let limit = common::raise_fd_limit();
    if limit < count as u64 + 100 {
        common::mark(&format!("skipped: only {limit} descriptors"));
        return;
    }
    let echo = |mut stream: TcpStream| {
        let mut bytes = [0; 16];
        while stream.read_exact(&mut bytes).is_ok() {
            stream.write_all(&bytes).unwrap();
        }
    };
    if let Ok(addr) = std::env::var("TREFOIL_TEST_ADDR") {
        let addr: SocketAddr = addr.parse().unwrap();
        runtime(2).run(|| {
            let gate = Arc::new(trefoil::sync::Semaphore::new(200));
            let open = Arc::new(trefoil::sync::Barrier::new(count));
            let clients: Vec<_> = (0..count as u64)
                .map(|id| {
                    let (gate, open) = (gate.clone(), open.clone());
                    go(move || {
                        let mut stream = {
                            let _permit = gate.acquire();
                            TcpStream::connect(addr).unwrap()
                        };
                        open.wait();
                        for turn in 0..TURNS as u64 {
                            let sent = [id.to_le_bytes(), turn.to_le_bytes()].concat();
                            stream.write_all(&sent).unwrap();
                            let mut got = [0; 16];
                            stream.read_exact(&mut got).unwrap();
                            assert!(sent == got);
                        }
                        open.wait();
                    })
                })
                .collect();
            clients.into_iter().for_each(|h| h.join().unwrap());
        });
        return;
    }
    // The clients are another process, which has half of the descriptors.
    runtime(2).run(|| {
        let (listener, addr) = listen();
        let before = open_sockets();
        let client = std::thread::spawn(move || {
            Child::of(test_name!()).env("TREFOIL_TEST_ADDR", &addr.to_string()).succeed()
        });
        let start = Instant::now();
        let handlers: Vec<_> = (0..count)
            .map(|_| {
                let stream = listener.accept().unwrap().0;
                go(move || echo(stream))
            })
            .collect();
        let accepted = start.elapsed();
        let stats = trefoil::debug::stats();
        handlers.into_iter().for_each(|h| h.join().unwrap());
        println!(
            "{count} connections: accepted in {accepted:?}, all done in {:?}, {} threads",
            start.elapsed(),
            stats.threads
        );
        assert!(stats.threads < 20, "{stats:?}");
        let done = trefoil::blocking(|| client.join());
        done.unwrap();
        assert!(open_sockets() <= before + 4);
    });
}
