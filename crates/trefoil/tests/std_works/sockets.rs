//! std's sockets: between goroutines, and between goroutines and threads.

use super::common::{MS, TOO_LONG, child_test, join_all, runtime, watchdog};
use super::{Actor, Started, every_pair, everywhere, is_blocking, until};
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream, ToSocketAddrs, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

/// Returns a connected pair of blocking sockets.
fn tcp() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let addr = listener.local_addr().unwrap();
    let client = trefoil::go(move || TcpStream::connect(addr).unwrap());
    let server = listener.accept().unwrap().0;
    let client = client.join().unwrap();
    assert!(is_blocking(&listener) && is_blocking(&server) && is_blocking(&client));
    (client, server)
}

#[test]
fn std_tcp_streams_echo_between_goroutines_and_threads() {
    let _w = watchdog();
    every_pair(|a, b| {
        let (mut client, mut server) = tcp();
        let echo = b.start(move || {
            let mut buf = [0; 1000];
            loop {
                match server.read(&mut buf).unwrap() {
                    0 => break assert!(is_blocking(&server)),
                    n => server.write_all(&buf[..n]).unwrap(),
                }
            }
        });
        let asks = a.start(move || {
            for i in 0..60u8 {
                client.write_all(&[i; 100]).unwrap();
                let mut buf = [0; 100];
                client.read_exact(&mut buf).unwrap();
                assert_eq!(buf, [i; 100]);
            }
            assert!(is_blocking(&client));
            client.shutdown(Shutdown::Write).unwrap();
            assert_eq!(client.read(&mut [0]).unwrap(), 0);
        });
        asks.join();
        echo.join();
    });
}

#[test]
#[ignore = "takes long"]
fn a_large_std_write_to_a_slow_reader_is_one_call() {
    let _w = watchdog();
    every_pair(|a, b| {
        const LEN: usize = 6 << 20;
        let (mut client, mut server) = tcp();
        let writer = a.start(move || {
            let data: Vec<u8> = (0..LEN).map(|i| (i / 7) as u8).collect();
            let half = LEN / 2;
            // A blocking socket accepts all bytes in one call.
            assert_eq!(client.write(&data[..half]).unwrap(), half);
            let mut rest = &data[half..];
            while !rest.is_empty() {
                let (one, two) = rest.split_at(rest.len() / 3);
                let n = client.write_vectored(&[IoSlice::new(one), IoSlice::new(two)]).unwrap();
                rest = &rest[n..];
            }
            assert!(is_blocking(&client));
        });
        let reader = b.start(move || {
            let (mut at, mut one, mut two) = (0, vec![0; 100_000], vec![0; 150_000]);
            loop {
                if at < 1 << 20 {
                    thread::sleep(MS / 2);
                }
                let mut both = [IoSliceMut::new(&mut one), IoSliceMut::new(&mut two)];
                let n = server.read_vectored(&mut both).unwrap();
                for byte in one.iter().chain(&two).take(n) {
                    assert_eq!(*byte, (at / 7) as u8);
                    at += 1;
                }
                if n == 0 {
                    break at;
                }
            }
        });
        writer.join();
        assert_eq!(reader.join(), LEN);
    });
}

#[test]
fn std_sockets_respect_timeouts_and_nonblocking_mode() {
    let _w = watchdog();
    everywhere(|| {
        let (mut client, mut server) = tcp();
        let mut buf = [0; 64];
        client.set_read_timeout(Some(20 * MS)).unwrap();
        for _ in 0..2 {
            let start = Instant::now();
            assert_eq!(client.read(&mut buf).unwrap_err().kind(), ErrorKind::WouldBlock);
            assert!(start.elapsed() >= 19 * MS, "{:?}", start.elapsed());
        }
        assert_eq!(client.peek(&mut buf).unwrap_err().kind(), ErrorKind::WouldBlock);
        client.set_read_timeout(Some(Duration::from_secs(10_000_000_000_000_000))).unwrap();
        server.write_all(b"seven b").unwrap();
        assert_eq!(client.peek(&mut buf).unwrap(), 7);
        assert_eq!(client.read(&mut buf).unwrap(), 7);
        client.set_read_timeout(None).unwrap();

        // After a wait without a timeout: timeouts and flags set by another descriptor of the
        // socket.
        let writer = trefoil::go(move || {
            thread::sleep(2 * MS);
            server.write_all(b"x").unwrap();
            server
        });
        assert_eq!(client.read(&mut buf).unwrap(), 1);
        let mut server = writer.join().unwrap();
        let other = client.try_clone().unwrap();
        other.set_read_timeout(Some(5 * MS)).unwrap();
        assert_eq!(client.read(&mut buf).unwrap_err().kind(), ErrorKind::WouldBlock);
        other.set_read_timeout(None).unwrap();
        other.set_nonblocking(true).unwrap();
        assert_eq!(client.read(&mut buf).unwrap_err().kind(), ErrorKind::WouldBlock);
        assert_eq!(client.peek(&mut buf).unwrap_err().kind(), ErrorKind::WouldBlock);
        assert!(!is_blocking(&client));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        other.set_nonblocking(false).unwrap();
        server.write_all(b"y").unwrap();
        assert_eq!(client.read(&mut buf).unwrap(), 1);

        // The peer does not read: the write returns what fitted, then times out.
        client.set_write_timeout(Some(20 * MS)).unwrap();
        let (start, big) = (Instant::now(), vec![0; 16 << 20]);
        let n = client.write(&big).unwrap();
        assert!(n > 0 && n < big.len() && start.elapsed() >= 19 * MS);
        // (The peer's buffer may grow meanwhile.)
        let mut fill = || {
            (0..100)
                .find_map(|_| client.write(&big).err())
                .expect("the buffer must be full at last")
                .kind()
        };
        assert_eq!(fill(), ErrorKind::WouldBlock);
        other.set_nonblocking(true).unwrap();
        assert_eq!(fill(), ErrorKind::WouldBlock);
    });
}

#[test]
fn std_connect_is_refused_times_out_and_resolves_names() {
    let _w = watchdog();
    everywhere(|| {
        let gone = {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            listener.local_addr().unwrap()
        };
        assert_eq!(TcpStream::connect(gone).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        let refused = TcpStream::connect_timeout(&gone, TOO_LONG).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let addr = listener.local_addr().unwrap();
        let client = TcpStream::connect_timeout(&addr, TOO_LONG).unwrap();
        assert!(is_blocking(&client));
        drop(listener.accept().unwrap());
        // By name.
        let by_name = ("localhost", addr.port()).to_socket_addrs().unwrap();
        assert!(by_name.into_iter().any(|found| found.ip().is_loopback()));
        // No answer, or an immediate error if the network is unreachable.
        let start = Instant::now();
        let nowhere = "192.0.2.1:9".parse().unwrap();
        TcpStream::connect_timeout(&nowhere, 20 * MS).unwrap_err();
        assert!(start.elapsed() < TOO_LONG / 4);
    });
}

#[test]
fn goroutines_and_a_thread_accept_from_one_listener() {
    let _w = watchdog();
    everywhere(|| {
        let listener = Arc::new(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
        let addr = listener.local_addr().unwrap();
        let taken = Arc::new(AtomicUsize::new(0));
        let accept = |actor: Actor| {
            let (listener, taken) = (listener.clone(), taken.clone());
            actor.start(move || {
                for _ in 0..10 {
                    listener.accept().unwrap().0.write_all(b"!").unwrap();
                    taken.fetch_add(1, SeqCst);
                }
            })
        };
        let all: Vec<_> =
            [Actor::Goroutine; 5].into_iter().chain([Actor::Thread]).map(accept).collect();
        let clients = (0..60).map(|_| {
            trefoil::go(move || {
                let mut buf = Vec::new();
                TcpStream::connect(addr).unwrap().read_to_end(&mut buf).unwrap();
                assert_eq!(buf, b"!");
            })
        });
        join_all(clients);
        all.into_iter().for_each(Started::join);
        assert_eq!(taken.load(SeqCst), 60);
        assert!(is_blocking(&*listener));
    });
}

#[test]
fn std_udp_sockets_exchange_datagrams_and_time_out() {
    let _w = watchdog();
    every_pair(|a, b| {
        let one = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let two = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let (to, from) = (two.local_addr().unwrap(), one.local_addr().unwrap());
        let echo = b.start(move || {
            let mut buf = [0; 100];
            for _ in 0..50 {
                let (n, sender) = two.recv_from(&mut buf).unwrap();
                assert_eq!(two.send_to(&buf[..n], sender).unwrap(), n);
            }
            two
        });
        let asks = a.start(move || {
            one.connect(to).unwrap();
            for i in 0..50u8 {
                assert_eq!(one.send(&[i; 10][..i as usize % 10]).unwrap(), i as usize % 10);
                let mut buf = [0; 100];
                assert_eq!(one.recv(&mut buf).unwrap(), i as usize % 10);
            }
            one.set_read_timeout(Some(5 * MS)).unwrap();
            assert_eq!(one.recv(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
            assert!(is_blocking(&one));
            one
        });
        let one = asks.join();
        let two = echo.join();
        two.send_to(b"abc", from).unwrap();
        one.set_read_timeout(None).unwrap();
        assert_eq!(one.peek(&mut [0; 8]).unwrap(), 3);
    });
}

#[test]
fn std_unix_sockets_exchange_streams_and_datagrams() {
    let _w = watchdog();
    every_pair(|a, b| {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("trefoil-std-{}-{}", std::process::id(), NEXT.fetch_add(1, SeqCst));
        let path = std::env::temp_dir().join(name);
        let listener = UnixListener::bind(&path).unwrap();
        let p = path.clone();
        let server = b.start(move || {
            let mut stream = listener.accept().unwrap().0;
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            stream.write_all(text.to_uppercase().as_bytes()).unwrap();
        });
        let client = a.start(move || {
            let mut stream = UnixStream::connect(p).unwrap();
            thread::sleep(MS);
            stream.write_all(b"quietly").unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            assert!(is_blocking(&stream));
            text
        });
        assert_eq!(client.join(), "QUIETLY");
        server.join();
        std::fs::remove_file(path).unwrap();
        let (x, y) = UnixDatagram::pair().unwrap();
        let reader = b.start(move || y.recv(&mut [0; 9]).unwrap());
        let writer = a.start(move || {
            thread::sleep(MS);
            x.send(b"dgram").unwrap()
        });
        assert_eq!((writer.join(), reader.join()), (5, 5));
    });
}

/// With a full backlog a Unix `connect` is not in progress: it must be repeated.
#[test]
fn std_unix_connect_waits_for_room_in_the_backlog() {
    let _w = watchdog();
    runtime(2).run(|| {
        let path = std::env::temp_dir().join(format!("trefoil-room-{}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        // SAFETY: the test's own socket.
        assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
        let begun = Arc::new(AtomicUsize::new(0));
        let clients: Vec<_> = (0..6)
            .map(|_| {
                let (path, begun) = (path.clone(), begun.clone());
                trefoil::go(move || {
                    begun.fetch_add(1, SeqCst);
                    let mut stream = UnixStream::connect(path).unwrap();
                    stream.write_all(b"?").unwrap();
                    stream.read_exact(&mut [0]).unwrap();
                })
            })
            .collect();
        until("the clients to begin", || begun.load(SeqCst) == 6);
        thread::sleep(5 * MS);
        for _ in 0..6 {
            let mut stream = listener.accept().unwrap().0;
            stream.read_exact(&mut [0]).unwrap();
            stream.write_all(b"!").unwrap();
        }
        join_all(clients);
        std::fs::remove_file(path).unwrap();
    });
}

#[test]
fn goroutines_and_threads_read_from_one_std_socket() {
    let _w = watchdog();
    everywhere(|| {
        const N: usize = 4000;
        let (x, y) = UnixStream::pair().unwrap();
        let y = Arc::new(y);
        let readers: Vec<_> = [Actor::Goroutine, Actor::Thread, Actor::Goroutine, Actor::Thread]
            .into_iter()
            .map(|actor| {
                let y = y.clone();
                actor.start(move || {
                    let (mut n, mut buf) = (0, [0; 3]);
                    loop {
                        match (&*y).read(&mut buf).unwrap() {
                            0 => return n,
                            more => n += more,
                        }
                    }
                })
            })
            .collect();
        let x = Arc::new(x);
        let writers: Vec<_> = [Actor::Thread, Actor::Goroutine]
            .into_iter()
            .map(|actor| {
                let x = x.clone();
                actor.start(move || (0..N / 2 / 4).for_each(|_| (&*x).write_all(b"four").unwrap()))
            })
            .collect();
        writers.into_iter().for_each(Started::join);
        x.shutdown(Shutdown::Write).unwrap();
        assert_eq!(readers.into_iter().map(Started::join).sum::<usize>(), N);
        assert!(is_blocking(&*x) && is_blocking(&*y));
    });
}

#[test]
fn close_close_range_and_dup2_end_a_wait_for_the_descriptor() {
    child_test!();
    everywhere(|| {
        for how in 0..5 {
            for pause in [0, 0, 0, 2] {
                let (x, y) = UnixStream::pair().unwrap();
                // From 900 on, so that no other `open` gets the number: the waiter may begin after
                // the close.
                // SAFETY: returns a new descriptor, which is closed below.
                let fd = unsafe { libc::fcntl(y.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 900) };
                assert!(fd >= 0);
                drop(y);
                let began = Arc::new(AtomicBool::new(false));
                let b = began.clone();
                let waiter = trefoil::go(move || {
                    let mut buf = [0u8; 4];
                    b.store(true, SeqCst);
                    // SAFETY: a local buffer; a list of one entry.
                    unsafe {
                        if how == 3 {
                            let mut one = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
                            libc::poll(&raw mut one, 1, -1) as isize - 2
                        } else {
                            libc::read(fd, buf.as_mut_ptr().cast(), 4)
                        }
                    }
                });
                until("the waiter to begin", || began.load(SeqCst));
                thread::sleep(pause * MS);
                // SAFETY: the test's own descriptor.
                unsafe {
                    match how {
                        0 | 3 => assert_eq!(libc::close(fd), 0),
                        4 => assert_eq!(libc::close_range(fd as u32, fd as u32, 0), 0),
                        1 => assert_eq!(thread::spawn(move || libc::close(fd)).join().unwrap(), 0),
                        _ => {
                            let (other, keep) = UnixStream::pair().unwrap();
                            assert_eq!(libc::dup2(other.as_raw_fd(), fd), fd);
                            // A waiter that tries again uses the new descriptor.
                            (&keep).write_all(b"").unwrap();
                            drop((other, keep));
                        }
                    }
                }
                assert!(waiter.join().unwrap() <= 0);
                if how == 2 {
                    // SAFETY: the duplicate, which has no other owner.
                    drop(unsafe { OwnedFd::from_raw_fd(fd) });
                }
                drop(x);
            }
        }
    });
}

#[test]
fn a_duplicate_may_be_closed_while_the_original_is_read() {
    let _w = watchdog();
    everywhere(|| {
        let (mut x, mut y) = UnixStream::pair().unwrap();
        let mut copy = y.try_clone().unwrap();
        let reader = trefoil::go(move || {
            let mut buf = [0; 4];
            copy.read_exact(&mut buf).unwrap();
            drop(copy);
            buf
        });
        thread::sleep(MS);
        x.write_all(b"copy").unwrap();
        assert_eq!(&reader.join().unwrap(), b"copy");
        // The duplicate is closed and its number is used again; the original still works.
        let (p, mut q) = UnixStream::pair().unwrap();
        let writer = trefoil::go(move || {
            thread::sleep(MS);
            x.write_all(b"orig").unwrap();
            (&p).write_all(b"next").unwrap();
            x
        });
        let mut buf = [0; 4];
        y.read_exact(&mut buf).unwrap();
        assert_eq!(&buf, b"orig");
        q.read_exact(&mut buf).unwrap();
        assert_eq!(&buf, b"next");
        writer.join().unwrap();
    });
}
