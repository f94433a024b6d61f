//! TCP sockets and deadlines. (Other types are in `types.rs`.)
//!
//! Loopback only, bounded in count and time. What Go's own tests assert is tested at 1, 2 and 8 Ps,
//! with Go's numbers.

use crate::common::{child_test, runtime, watchdog, yield_until};
use crate::sockets::{MS, at_each, fill, listen, past, soon, tcp_pair};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use trefoil::net::{TcpStream, UnixStream, pipe};
use trefoil::time::sleep;
use trefoil::{Runtime, go};

#[test]
fn connect_to_a_full_queue_times_out() {
    at_each(|| {
        // The queue has one place, and the listener does not accept: later connections wait.
        let full = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        // SAFETY: a system call on the test's own descriptor.
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
fn connect_to_a_closed_port_is_refused() {
    at_each(|| {
        let (listener, addr) = listen();
        drop(listener);
        assert_eq!(TcpStream::connect(addr).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    });
}

#[test]
fn accept_times_out_and_works_afterwards() {
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
fn a_read_times_out_and_works_afterwards() {
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
fn a_write_that_times_out_loses_no_bytes() {
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
fn a_read_timeout_applies_to_each_call() {
    at_each(|| {
        let (mut one, mut other) = UnixStream::pair().unwrap();
        assert_eq!(one.read_timeout().unwrap(), None);
        assert_eq!(
            one.set_read_timeout(Some(Duration::ZERO)).unwrap_err().kind(),
            ErrorKind::InvalidInput
        );
        one.set_read_timeout(Some(15 * MS)).unwrap();
        assert_eq!(one.read_timeout().unwrap(), Some(15 * MS));
        // The timeout starts anew with each call, so that the sum of the waits may exceed it.
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
            // On a busy machine the writer may be late: then the call times out.
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
fn a_deadline_that_is_replaced_does_not_fire() {
    at_each(|| {
        let (client, mut server) = tcp_pair();
        let client = Arc::new(client);
        client.set_read_deadline(soon(Duration::from_secs(20))).unwrap();
        let reader = {
            let client = client.clone();
            go(move || (&*client).read(&mut [0; 4]))
        };
        // Deadlines that are replaced during the read; far enough away for a busy machine.
        for _ in 0..100 {
            client.set_read_deadline(soon(Duration::from_secs(20))).unwrap();
            sleep(MS / 2);
        }
        server.write_all(b"x").unwrap();
        assert_eq!(reader.join().unwrap().unwrap(), 1);
        // As in Go's test: deadlines that are replaced before they are reached.
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
fn calls_return_while_deadlines_are_set_at_the_same_time() {
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
        // The deadlines have passed: neither call may wait for ever.
        reader.join().unwrap();
        writer.join().unwrap();
        drop(server);
    });
}

#[test]
fn a_past_deadline_fails_calls_that_need_not_wait() {
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
                yield_until("three readers and an acceptor to wait", || {
                    trefoil::debug::stats().io_waiters >= 4
                });
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

/// In the first round a writer waits as well, and is ended by the close of a clone.
fn fill_once(round: usize, client: &TcpStream) {
    if round != 0 {
        return;
    }
    fill(client);
    let clone = client.try_clone().unwrap();
    let closed = Arc::new(clone);
    let writing = closed.clone();
    // The kernel may still find room for some bytes.
    let writer = go(move || {
        loop {
            if let Err(e) = (&*writing).write(&[0; 1000]) {
                return e.kind();
            }
        }
    });
    yield_until("the writer to wait", || trefoil::debug::stats().io_waiters >= 1);
    closed.close().unwrap();
    assert_eq!(writer.join().unwrap(), ErrorKind::NotConnected);
}

#[test]
fn a_closed_socket_does_not_touch_a_reused_descriptor() {
    child_test!();
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
fn reads_and_writes_of_no_bytes_do_not_wait() {
    at_each(|| {
        let (mut client, _server) = tcp_pair();
        assert_eq!(client.read(&mut []).unwrap(), 0);
        assert_eq!(client.write(&[]).unwrap(), 0);
    });
}

#[test]
fn ten_acceptors_accept_every_connection() {
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

/// epoll may report two connections by one edge: both acceptors must return, also one that is about
/// to wait.
#[test]
fn two_connections_wake_two_acceptors() {
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
fn two_connections_echo_ten_thousand_messages_in_order() {
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
            yield_until("a hundred readers to wait", || trefoil::debug::stats().io_waiters == 100);
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

#[test]
fn plain_threads_and_goroutines_use_the_same_sockets() {
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
    // The same socket on a goroutine.
    let client = trefoil::run(move || {
        client.write_all(b"four").unwrap();
        client.read_exact(&mut [0; 4]).unwrap();
        client
    });
    drop(client);
    echo.join().unwrap();
}

#[test]
fn two_runtimes_read_from_one_socket() {
    let _watchdog = watchdog();
    let (client, server) = tcp_pair();
    let (client, server) = (Arc::new(client), Arc::new(server));
    let (one, two) = (runtime(1), runtime(2));
    // Both wait for the same socket. Each byte is read by one of them.
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
fn goroutines_of_a_dropped_runtime_take_no_wake_ups_of_a_socket() {
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
        // Threads use the socket: the orphaned goroutines must not take their wake-ups.
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
fn a_socket_is_read_and_written_at_the_same_time() {
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
fn split_halves_do_vectored_io_and_close_their_direction() {
    at_each(|| {
        let (client, server) = tcp_pair();
        let (mut reads, mut writes) = client.split();
        let mut server = server;
        let writer = go(move || {
            let parts = [IoSlice::new(b"one "), IoSlice::new(b"two "), IoSlice::new(b"three")];
            assert_eq!(writes.write_vectored(&parts).unwrap(), 13);
            // Dropping this half closes its direction.
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
        assert_eq!(server.read(&mut [0; 8]).unwrap(), 0, "the direction is closed");
        server.write_all(b"still open").unwrap();
        drop(server);
        let mut rest = String::new();
        reads.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "still open");
    });
}
