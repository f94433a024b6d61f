//! The network: sockets that read like std's, and who uses them. (Other types than TCP are in `net_types.rs`.)
//!
//! Loopback only, bounded in count and time. Behaviours that Go's own tests assert are tried at one, two and eight
//! Ps, with Go's numbers.

mod common;
#[path = "common/sockets.rs"]
mod sockets;

use common::{Child, in_child, runtime, watchdog, yield_until};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use sockets::{MS, at_each, fill, listen, past, soon, tcp_pair};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use trefoil::net::{TcpStream, UnixStream, pipe};
use trefoil::time::sleep;
use trefoil::{Runtime, go};

// ---- what Go's tests assert -------------------------------------------------------------------------------

#[test]
fn connect_times_out() {
    at_each(|| {
        // A queue of one, and nobody accepts: the kernel lets later ones wait.
        let full = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        // SAFETY: a system call on our own descriptor.
        assert_eq!(unsafe { libc::listen(full.as_raw_fd(), 0) }, 0);
        let addr = full.local_addr().unwrap();
        let mut inside = Vec::new();
        let start = loop {
            let start = Instant::now();
            match TcpStream::connect_timeout(addr, 30 * MS) {
                Ok(stream) => inside.push(stream),
                Err(e) => {
                    assert_eq!(e.kind(), ErrorKind::TimedOut);
                    break start;
                }
            }
            assert!(inside.len() < 10);
        };
        assert!(start.elapsed() >= 30 * MS);
        assert!(start.elapsed() < Duration::from_secs(10));
    });
}

#[test]
fn connection_refused() {
    at_each(|| {
        let (listener, addr) = listen();
        drop(listener);
        assert_eq!(TcpStream::connect(addr).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    });
}

#[test]
fn accept_times_out() {
    at_each(|| {
        let (listener, addr) = listen();
        for timeout in [Duration::ZERO, MS, 20 * MS] {
            let start = Instant::now();
            listener.set_deadline(soon(timeout)).unwrap();
            for _ in 0..2 {
                assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::TimedOut);
                assert!(start.elapsed() >= timeout);
            }
        }
        listener.set_deadline(None).unwrap();
        let client = go(move || TcpStream::connect(addr).unwrap());
        listener.accept().unwrap();
        client.join().unwrap();
    });
}

#[test]
fn read_times_out_and_goes_on() {
    at_each(|| {
        let (mut client, mut server) = tcp_pair();
        let mut bytes = [0; 16];
        for timeout in [Duration::ZERO, MS, 20 * MS] {
            let start = Instant::now();
            client.set_read_deadline(soon(timeout)).unwrap();
            for _ in 0..3 {
                assert_eq!(client.read(&mut bytes).unwrap_err().kind(), ErrorKind::TimedOut);
                assert!(start.elapsed() >= timeout);
            }
        }
        client.set_read_deadline(None).unwrap();
        server.write_all(b"late").unwrap();
        assert_eq!(client.read(&mut bytes).unwrap(), 4);
    });
}

#[test]
fn write_times_out_and_loses_nothing() {
    at_each(|| {
        let (client, mut server) = tcp_pair();
        let written = fill(&client);
        client.set_write_deadline(past()).unwrap();
        assert_eq!((&client).write(b"x").unwrap_err().kind(), ErrorKind::TimedOut);
        client.shutdown(Shutdown::Write).unwrap();
        let mut all = Vec::new();
        server.read_to_end(&mut all).unwrap();
        assert_eq!(all.len(), written);
    });
}

#[test]
fn timeouts_of_each_call() {
    at_each(|| {
        let (mut one, mut other) = UnixStream::pair().unwrap();
        assert_eq!(one.read_timeout().unwrap(), None);
        assert_eq!(
            one.set_read_timeout(Some(Duration::ZERO)).unwrap_err().kind(),
            ErrorKind::InvalidInput
        );
        one.set_read_timeout(Some(15 * MS)).unwrap();
        assert_eq!(one.read_timeout().unwrap(), Some(15 * MS));
        // Each call has its own: no sum of them fails.
        let writer = go(move || {
            for _ in 0..4 {
                sleep(3 * MS);
                other.write_all(b"x").unwrap();
            }
            other
        });
        let mut byte = [0];
        let mut got = 0;
        while got < 4 {
            // A busy machine may be late; the call itself is right either way.
            match one.read(&mut byte) {
                Ok(n) => got += n,
                Err(e) => assert_eq!(e.kind(), ErrorKind::TimedOut),
            }
        }
        let _other = writer.join().unwrap();
        let start = Instant::now();
        assert_eq!(one.read(&mut byte).unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(start.elapsed() >= 15 * MS);
    });
}

#[test]
fn a_prolonged_deadline_never_fires() {
    at_each(|| {
        let (client, mut server) = tcp_pair();
        let client = Arc::new(client);
        client.set_read_deadline(soon(Duration::from_secs(20))).unwrap();
        let reader = {
            let client = client.clone();
            go(move || (&*client).read(&mut [0; 4]))
        };
        // Each of them would fire before the next is set, if it were not for the next: on a machine that is not
        // late. So they are far enough away, and many.
        for _ in 0..100 {
            client.set_read_deadline(soon(Duration::from_secs(20))).unwrap();
            sleep(MS / 2);
        }
        server.write_all(b"x").unwrap();
        assert_eq!(reader.join().unwrap().unwrap(), 1);
        // Go's: deadlines that are moved before they are reached.
        for _ in 0..50 {
            client.set_read_deadline(soon(10 * MS)).unwrap();
            client.set_read_deadline(None).unwrap();
            client.set_read_deadline(soon(Duration::from_secs(30))).unwrap();
        }
        let reader = {
            let client = client.clone();
            go(move || (&*client).read(&mut [0; 4]))
        };
        sleep(25 * MS);
        server.write_all(b"x").unwrap();
        assert_eq!(reader.join().unwrap().unwrap(), 1);
    });
}

#[test]
fn deadlines_race_with_calls() {
    at_each(|| {
        let (client, server) = tcp_pair();
        let client = Arc::new(client);
        let setter = |set: fn(&TcpStream, Option<Instant>) -> io::Result<()>| {
            let client = client.clone();
            go(move || {
                for i in 0..1000 {
                    set(&client, soon(Duration::from_micros(2))).unwrap();
                    if i % 100 == 0 {
                        sleep(MS / 10);
                    }
                }
            })
        };
        let setters = [
            setter(TcpStream::set_read_deadline),
            setter(TcpStream::set_write_deadline),
            setter(TcpStream::set_read_deadline),
        ];
        let (reading, writing) = (client.clone(), client.clone());
        let reader = go(move || {
            for _ in 0..1000 {
                let _ = (&*reading).read(&mut [0; 8]);
            }
        });
        let writer = go(move || {
            for _ in 0..1000 {
                let _ = (&*writing).write(b"x");
            }
        });
        for handle in setters {
            handle.join().unwrap();
        }
        // Whoever waits now waits for a deadline that has passed.
        reader.join().unwrap();
        writer.join().unwrap();
        drop(server);
    });
}

#[test]
fn a_past_deadline_fails_even_with_data_waiting() {
    at_each(|| {
        let (mut client, mut server) = tcp_pair();
        server.write_all(b"hello").unwrap();
        let mut bytes = [0; 8];
        assert_eq!(client.peek(&mut bytes).unwrap(), 5);
        client.set_read_deadline(past()).unwrap();
        assert_eq!(client.read(&mut bytes).unwrap_err().kind(), ErrorKind::TimedOut);
        client.set_write_deadline(past()).unwrap();
        assert_eq!(client.write(b"x").unwrap_err().kind(), ErrorKind::TimedOut);
        client.set_read_deadline(None).unwrap();
        assert_eq!(client.read(&mut bytes).unwrap(), 5);
    });
}

#[test]
fn a_past_deadline_ends_a_waiting_read() {
    at_each(|| {
        for _ in 0..20 {
            let (client, _server) = tcp_pair();
            let client = Arc::new(client);
            let reading = client.clone();
            let reader = go(move || (&*reading).read(&mut [0; 8]));
            trefoil::yield_now();
            client.set_read_deadline(past()).unwrap();
            assert_eq!(reader.join().unwrap().unwrap_err().kind(), ErrorKind::TimedOut);
        }
    });
}

#[test]
fn close_ends_waiting_calls() {
    at_each(|| {
        for round in 0..20 {
            let (listener, _) = listen();
            let listener = Arc::new(listener);
            let (client, _server) = tcp_pair();
            fill_once(round, &client);
            let client = Arc::new(client);
            let accept = {
                let listener = listener.clone();
                go(move || listener.accept().map(|_| ()))
            };
            let readers: Vec<_> = (0..3)
                .map(|_| {
                    let client = client.clone();
                    go(move || (&*client).read(&mut [0; 8]))
                })
                .collect();
            if round % 2 == 0 {
                yield_until("three readers", || trefoil::debug::stats().io_waiters >= 4);
            }
            client.close().unwrap();
            listener.close().unwrap();
            for reader in readers {
                assert_eq!(reader.join().unwrap().unwrap_err().kind(), ErrorKind::NotConnected);
            }
            assert_eq!(accept.join().unwrap().unwrap_err().kind(), ErrorKind::NotConnected);
            assert!(client.close().is_err() && listener.accept().is_err());
            assert!(client.set_read_deadline(None).is_err() && client.peer_addr().is_err());
        }
    });
}

/// In the first round a writer waits as well.
fn fill_once(round: usize, client: &TcpStream) {
    if round != 0 {
        return;
    }
    fill(client);
    let clone = client.try_clone().unwrap();
    let closed = Arc::new(clone);
    let writing = closed.clone();
    // The kernel may find room for some more.
    let writer = go(move || {
        loop {
            if let Err(e) = (&*writing).write(&[0; 1000]) {
                return e.kind();
            }
        }
    });
    yield_until("a writer", || trefoil::debug::stats().io_waiters >= 1);
    closed.close().unwrap();
    assert_eq!(writer.join().unwrap(), ErrorKind::NotConnected);
}

#[test]
fn a_closed_socket_is_closed_once() {
    let _watchdog = watchdog();
    if !in_child() {
        Child::of("a_closed_socket_is_closed_once").succeed();
        return;
    }
    runtime(1).run(|| {
        let (mut one, _other) = UnixStream::pair().unwrap();
        one.close().unwrap();
        // The number stays in use, so this file gets another one.
        let file = std::fs::File::open("/proc/self/status").unwrap();
        for _ in 0..3 {
            assert!(one.read(&mut [0; 4]).is_err());
        }
        assert!(io::read_to_string(file).unwrap().contains("Threads"));
        drop(one);
    });
}

#[test]
fn a_read_of_no_bytes_does_not_wait() {
    at_each(|| {
        let (mut client, _server) = tcp_pair();
        assert_eq!(client.read(&mut []).unwrap(), 0);
        assert_eq!(client.write(&[]).unwrap(), 0);
    });
}

#[test]
fn many_accept_at_once() {
    at_each(|| {
        const ACCEPTORS: usize = 10;
        const EACH: usize = 20;
        let (listener, addr) = listen();
        let listener = Arc::new(listener);
        let acceptors: Vec<_> = (0..ACCEPTORS)
            .map(|_| {
                let listener = listener.clone();
                go(move || (0..EACH).filter(|_| listener.accept().is_ok()).count())
            })
            .collect();
        let clients: Vec<_> =
            (0..ACCEPTORS * EACH).map(|_| go(move || TcpStream::connect(addr).unwrap())).collect();
        let accepted: usize = acceptors.into_iter().map(|h| h.join().unwrap()).sum();
        assert_eq!(accepted, ACCEPTORS * EACH);
        clients.into_iter().for_each(|h| drop(h.join().unwrap()));
    });
}

/// One edge for two connections: both acceptors must come out, also the one that was just going to wait.
#[test]
fn no_acceptor_sleeps_through_an_edge() {
    at_each(|| {
        let (listener, addr) = listen();
        let listener = Arc::new(listener);
        for _ in 0..200 {
            let accept = || {
                let listener = listener.clone();
                go(move || drop(listener.accept().unwrap()))
            };
            let (one, other) = (accept(), accept());
            let clients = [TcpStream::connect(addr).unwrap(), TcpStream::connect(addr).unwrap()];
            one.join().unwrap();
            other.join().unwrap();
            drop(clients);
        }
    });
}

#[test]
fn stress() {
    at_each(|| {
        const CONNS: usize = 2;
        const MESSAGES: usize = 10_000;
        const BYTES: usize = 512;
        let (listener, addr) = listen();
        let server = go(move || {
            let handlers: Vec<_> = (0..CONNS)
                .map(|_| {
                    let (mut stream, _) = listener.accept().unwrap();
                    go(move || {
                        let mut bytes = [0; BYTES];
                        for _ in 0..MESSAGES {
                            stream.read_exact(&mut bytes).unwrap();
                            stream.write_all(&bytes).unwrap();
                        }
                    })
                })
                .collect();
            handlers.into_iter().for_each(|h| h.join().unwrap());
        });
        let clients: Vec<_> = (0..CONNS)
            .map(|id| {
                go(move || {
                    let stream = TcpStream::connect(addr).unwrap();
                    let (mut reads, mut writes) = stream.split();
                    let writer = go(move || {
                        let mut bytes = [id as u8; BYTES];
                        for i in 0..MESSAGES {
                            bytes[..8].copy_from_slice(&i.to_le_bytes());
                            writes.write_all(&bytes).unwrap();
                        }
                        writes
                    });
                    let mut bytes = [0; BYTES];
                    for i in 0..MESSAGES {
                        reads.read_exact(&mut bytes).unwrap();
                        assert_eq!(bytes[..8], i.to_le_bytes());
                        assert!(bytes[8..].iter().all(|&b| b == id as u8));
                    }
                    writer.join().unwrap();
                })
            })
            .collect();
        clients.into_iter().for_each(|h| h.join().unwrap());
        server.join().unwrap();
    });
}

#[test]
fn a_hundred_blocked_pipe_reads_need_no_threads() {
    let _watchdog = watchdog();
    for procs in [1, 2, 8] {
        let runtime = Runtime::builder().procs(procs).max_threads(50).build().unwrap();
        runtime.run(|| {
            let (readers, writers): (Vec<_>, Vec<_>) = (0..100).map(|_| pipe().unwrap()).unzip();
            let handles: Vec<_> = readers
                .into_iter()
                .map(|mut reader| {
                    go(move || {
                        let mut byte = [0];
                        reader.read_exact(&mut byte).unwrap();
                        byte[0]
                    })
                })
                .collect();
            yield_until("a hundred readers", || trefoil::debug::stats().io_waiters == 100);
            assert!(trefoil::debug::stats().threads <= 12, "{:?}", trefoil::debug::stats());
            for (i, mut writer) in writers.into_iter().enumerate() {
                writer.write_all(&[i as u8]).unwrap();
            }
            for (i, handle) in handles.into_iter().enumerate() {
                assert_eq!(handle.join().unwrap(), i as u8);
            }
        });
    }
}

// ---- who uses them ----------------------------------------------------------------------------------------

#[test]
fn plain_threads_use_the_same_sockets() {
    let _watchdog = watchdog();
    let (mut client, mut server) = tcp_pair();
    client.set_read_deadline(soon(20 * MS)).unwrap();
    assert_eq!(client.read(&mut [0; 4]).unwrap_err().kind(), ErrorKind::TimedOut);
    client.set_read_deadline(None).unwrap();
    let echo = std::thread::spawn(move || {
        let mut bytes = [0; 64];
        while let Ok(n @ 1..) = server.read(&mut bytes) {
            server.write_all(&bytes[..n]).unwrap();
        }
    });
    for i in 0..200u32 {
        client.write_all(&i.to_le_bytes()).unwrap();
        let mut answer = [0; 4];
        client.read_exact(&mut answer).unwrap();
        assert_eq!(u32::from_le_bytes(answer), i);
    }
    // And a goroutine beside them.
    let client = trefoil::run(move || {
        client.write_all(b"four").unwrap();
        client.read_exact(&mut [0; 4]).unwrap();
        client
    });
    drop(client);
    echo.join().unwrap();
}

#[test]
fn two_runtimes_share_sockets() {
    let _watchdog = watchdog();
    let (client, server) = tcp_pair();
    let (client, server) = (Arc::new(client), Arc::new(server));
    let (one, two) = (runtime(1), runtime(2));
    // Both wait for the same socket, and each byte is read by one of them.
    let read = Arc::new(AtomicU64::new(0));
    let reader = |runtime: &Runtime| {
        let (server, read) = (server.clone(), read.clone());
        runtime.run(move || {
            go(move || {
                let mut bytes = [0; 3];
                while let Ok(n @ 1..) = (&*server).read(&mut bytes) {
                    read.fetch_add(n as u64, Ordering::SeqCst);
                }
            })
        })
    };
    let readers = [reader(&one), reader(&two)];
    for i in 0..500 {
        (&*client).write_all(&[7; 10]).unwrap();
        if i % 50 == 0 {
            std::thread::sleep(MS);
        }
    }
    client.shutdown(Shutdown::Write).unwrap();
    for reader in readers {
        reader.join().unwrap();
    }
    assert_eq!(read.load(Ordering::SeqCst), 5000);
}

#[test]
fn a_runtime_goes_while_goroutines_wait() {
    let _watchdog = watchdog();
    for procs in [1, 2, 8] {
        let (client, server) = tcp_pair();
        let (client, server) = (Arc::new(client), Arc::new(server));
        let runtime = runtime(procs);
        let (reading, (listener, addr)) = (server.clone(), listen());
        runtime.run(move || {
            go(move || (&*reading).read(&mut [0; 8]));
            go(move || listener.accept().map(|_| ()));
            yield_until("two to wait", || trefoil::debug::stats().io_waiters == 2);
        });
        drop(runtime);
        // Others go on with the socket: who is left does not take their wake-ups.
        for _ in 0..20 {
            let reading = server.clone();
            let reader = std::thread::spawn(move || (&*reading).read(&mut [0; 1]).unwrap());
            (&*client).write_all(b"x").unwrap();
            assert_eq!(reader.join().unwrap(), 1);
        }
        drop(TcpStream::connect(addr).unwrap());
    }
}

#[test]
fn reader_and_writer_at_once() {
    at_each(|| {
        let (client, server) = tcp_pair();
        let (client, server) = (Arc::new(client), Arc::new(server));
        const BYTES: usize = 1 << 20;
        let pump = |stream: &Arc<TcpStream>, seed: u64| {
            let stream = stream.clone();
            go(move || {
                let mut rng = StdRng::seed_from_u64(seed);
                let mut left = BYTES;
                while left > 0 {
                    let n = rng.random_range(1..5000).min(left);
                    let bytes: Vec<u8> = (0..n).map(|i| ((BYTES - left + i) % 251) as u8).collect();
                    (&*stream).write_all(&bytes).unwrap();
                    left -= n;
                }
            })
        };
        let drain = |stream: &Arc<TcpStream>| {
            let stream = stream.clone();
            go(move || {
                let (mut at, mut bytes) = (0, [0; 3000]);
                while at < BYTES {
                    let n = (&*stream).read(&mut bytes).unwrap();
                    assert!(
                        n > 0
                            && bytes[..n]
                                .iter()
                                .enumerate()
                                .all(|(i, &b)| b == ((at + i) % 251) as u8)
                    );
                    at += n;
                }
            })
        };
        let all = [pump(&client, 1), pump(&server, 2), drain(&client), drain(&server)];
        all.into_iter().for_each(|h| h.join().unwrap());
    });
}

#[test]
fn halves_vectors_peeks_and_half_closes() {
    at_each(|| {
        let (client, server) = tcp_pair();
        let (mut reads, mut writes) = client.split();
        let mut server = server;
        let writer = go(move || {
            let parts = [IoSlice::new(b"one "), IoSlice::new(b"two "), IoSlice::new(b"three")];
            assert_eq!(writes.write_vectored(&parts).unwrap(), 13);
            // The half is dropped: the direction ends.
        });
        let mut peeked = [0; 13];
        while server.peek(&mut peeked).unwrap() < 13 {
            sleep(MS);
        }
        assert_eq!(&peeked, b"one two three");
        let (mut a, mut b) = ([0; 6], [0; 32]);
        let n =
            server.read_vectored(&mut [IoSliceMut::new(&mut a), IoSliceMut::new(&mut b)]).unwrap();
        assert_eq!((n, &a[..], &b[..7]), (13, &b"one tw"[..], &b"o three"[..]));
        writer.join().unwrap();
        assert_eq!(server.read(&mut [0; 8]).unwrap(), 0, "half closed");
        server.write_all(b"still open").unwrap();
        drop(server);
        let mut rest = String::new();
        reads.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "still open");
    });
}
