//! The network: sockets that read like std's, and the poller beneath them.
//!
//! Loopback only, bounded in count and time. Behaviours that Go's own tests assert are tried at one, two and eight
//! Ps, with Go's numbers.

mod common;

use common::{Child, in_child, watchdog, yield_until};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use trefoil::context::{Context, ContextError};
use trefoil::net::{
    PipeReader, TcpListener, TcpStream, UdpSocket, UnixDatagram, UnixListener, UnixStream, copy,
    pipe,
};
use trefoil::time::sleep;
use trefoil::{Runtime, chan, go};

const MS: Duration = Duration::from_millis(1);

fn runtime(procs: usize) -> Runtime {
    Runtime::builder().procs(procs).build().unwrap()
}

/// At one, two and eight Ps. Afterwards nobody may wait for a descriptor any more.
fn at_each(f: impl Fn() + Sync) {
    let _watchdog = watchdog();
    for procs in [1, 2, 8] {
        runtime(procs).run(|| {
            f();
            yield_until("the goroutines to end", || trefoil::num_goroutines() == 1);
            assert_eq!(trefoil::debug::stats().io_waiters, 0, "with {procs} Ps");
        });
    }
}

fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    (listener, addr)
}

fn tcp_pair() -> (TcpStream, TcpStream) {
    let (listener, addr) = listen();
    let client = TcpStream::connect(addr).unwrap();
    (client, listener.accept().unwrap().0)
}

fn soon(d: Duration) -> Option<Instant> {
    Some(Instant::now() + d)
}

fn past() -> Option<Instant> {
    Some(Instant::now().checked_sub(MS).unwrap())
}

/// Fills what the kernel keeps until nothing more goes in.
fn fill(stream: &TcpStream) -> usize {
    let chunk = vec![7; 64 << 10];
    let mut total = 0;
    loop {
        stream.set_write_deadline(soon(20 * MS)).unwrap();
        match (&mut &*stream).write(&chunk) {
            Ok(n) => total += n,
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::TimedOut);
                stream.set_write_deadline(None).unwrap();
                return total;
            }
        }
    }
}

/// Sockets and pipes of this process. (The runtime itself opens other files now and then.)
fn open_sockets() -> usize {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| {
        std::fs::read_link(entry.ok()?.path()).ok()?.into_os_string().into_string().ok()
    });
    links.filter(|link| link.starts_with("socket:") || link.starts_with("pipe:")).count()
}

/// Raises the soft limit of descriptors to the hard one. The limit.
fn raise_fd_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: reads and writes our own struct.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        limit.rlim_cur = limit.rlim_max;
        libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
    }
    limit.rlim_cur
}

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
        // Gets the same number.
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

// ---- the poller -------------------------------------------------------------------------------------------

#[test]
fn m22_waiting_occupies_no_thread() {
    let _watchdog = watchdog();
    if !in_child() {
        Child::of("m22_waiting_occupies_no_thread").succeed();
        return;
    }
    raise_fd_limit();
    for procs in [1, 2, 8] {
        runtime(procs).run(|| {
            const WAITING: usize = 400;
            let pairs: Vec<_> = (0..WAITING).map(|_| UnixStream::pair().unwrap()).collect();
            let (readers, mut writers): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
            let handles: Vec<_> = readers
                .into_iter()
                .map(|mut stream| go(move || stream.read(&mut [0; 8]).unwrap()))
                .collect();
            yield_until("all to wait", || trefoil::debug::stats().io_waiters == WAITING);
            let threads = common::ms().len();
            assert!(threads <= procs + 3, "{threads} threads for {procs} Ps");
            for writer in &mut writers {
                writer.write_all(b"x").unwrap();
            }
            assert!(handles.into_iter().all(|h| h.join().unwrap() == 1));
            assert_eq!(trefoil::debug::stats().io_waiters, 0);
        });
    }
}

/// Each turn needs the poller, and there is nobody else to look: if the P did not, sysmon would, 10 ms later.
#[test]
fn m23_a_p_without_work_polls_the_network() {
    let _watchdog = watchdog();
    for procs in [1, 2, 8] {
        common::once_in_five(|| {
            runtime(procs).run(|| {
                const TURNS: u32 = 300;
                let (mut here, mut there) = UnixStream::pair().unwrap();
                let echo = go(move || {
                    let mut byte = [0];
                    while there.read(&mut byte).unwrap() == 1 {
                        there.write_all(&byte).unwrap();
                    }
                });
                let start = Instant::now();
                for _ in 0..TURNS {
                    here.write_all(b"x").unwrap();
                    here.read_exact(&mut [0]).unwrap();
                }
                let each = start.elapsed() / TURNS;
                drop(here);
                echo.join().unwrap();
                if each < 2 * MS { Ok(()) } else { Err(format!("{each:?} with {procs} Ps")) }
            })
        });
    }
}

/// The thread that keeps the timers lay down when every P was busy and nobody waited for a descriptor. It must be
/// told when that changes.
#[test]
fn a_keeper_that_sleeps_for_a_timer_learns_of_the_network() {
    let _watchdog = watchdog();
    runtime(1).run(|| {
        let _timer = trefoil::time::Timer::new(Duration::from_secs(20));
        let (mut here, mut there) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut stream = UnixStream::from_std(here.try_clone().unwrap()).unwrap();
        let (began, end) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let blocked = {
            let (began, end) = (began.clone(), end.clone());
            go(move || {
                trefoil::blocking(|| {
                    began.store(true, Ordering::SeqCst);
                    while !end.load(Ordering::SeqCst) {
                        common::pause();
                    }
                });
            })
        };
        yield_until("the other to block", || began.load(Ordering::SeqCst));
        // It comes back while we hold the P, and its thread lies down.
        end.store(true, Ordering::SeqCst);
        let guard = trefoil::no_preempt();
        common::spin(20 * MS);
        drop(guard);
        let writer = std::thread::spawn(move || {
            std::thread::sleep(50 * MS);
            there.write_all(b"x").unwrap();
            there
        });
        let start = Instant::now();
        stream.read_exact(&mut [0]).unwrap();
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        writer.join().unwrap();
        blocked.join().unwrap();
        here.flush().unwrap();
    });
}

#[test]
fn no_deadlock_is_reported_while_a_socket_is_waited_for() {
    let _watchdog = watchdog();
    if in_child() {
        let addr = std::env::var("TREFOIL_TEST_ADDR").unwrap();
        trefoil::run(move || {
            let reader = go(move || TcpStream::connect(addr).unwrap().read(&mut [0; 8]).unwrap());
            assert_eq!(reader.join().unwrap(), 1);
        });
        return;
    }
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let peer = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        std::thread::sleep(400 * MS);
        stream.write_all(b"x").unwrap();
    });
    Child::of("no_deadlock_is_reported_while_a_socket_is_waited_for")
        .env("TREFOIL_TEST_ADDR", &addr)
        .succeed();
    peer.join().unwrap();
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

// ---- other types ------------------------------------------------------------------------------------------

#[test]
fn udp() {
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

fn temp_path(name: &str) -> std::path::PathBuf {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("trefoil-{name}-{}-{n}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    path
}

#[test]
fn unix_streams() {
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

/// A listener's queue that is full has no event: connecting waits all the same, as std's does.
#[test]
fn unix_connect_waits_for_room_in_the_queue() {
    at_each(|| {
        let path = temp_path("full");
        let listener = UnixListener::bind(&path).unwrap();
        // SAFETY: a system call on our own descriptor.
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
fn unix_datagrams() {
    at_each(|| {
        let (path, back) = (temp_path("datagram"), temp_path("back"));
        let server = UnixDatagram::bind(&path).unwrap();
        let client = UnixDatagram::bind(&back).unwrap();
        // More than the queue holds: sending waits for room.
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
fn abstract_addresses() {
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
fn pipes() {
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
        // The other end is gone.
        let (reader, mut writer) = pipe().unwrap();
        drop(reader);
        assert_eq!(writer.write(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
    });
}

#[test]
fn a_childs_output_is_a_pipe() {
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
fn from_std_and_back() {
    at_each(|| {
        let listener = TcpListener::from(std::net::TcpListener::bind("127.0.0.1:0").unwrap());
        let addr = listener.local_addr().unwrap();
        let client = go(move || TcpStream::connect(addr).unwrap());
        let (mut server, _) = listener.accept().unwrap();
        let client = client.join().unwrap();
        server.write_all(b"hello").unwrap();
        // It blocks again, like any of std's.
        let mut client = client.into_std().unwrap();
        let mut bytes = [0; 5];
        client.read_exact(&mut bytes).unwrap();
        let client = TcpStream::from_std(client).unwrap();
        assert!(client.as_fd().as_raw_fd() > 0);
        let (reads, writes) = client.split();
        let raw = server.into_raw_fd();
        // SAFETY: just taken out of its owner.
        drop(unsafe { OwnedFd::from_raw_fd(raw) });
        drop((reads, writes));
        let (one, _other) = UnixStream::pair().unwrap();
        one.close().unwrap();
        assert!(one.into_std().is_err());
    });
}

#[test]
fn a_context_ends_calls() {
    at_each(|| {
        let (client, mut server) = tcp_pair();
        let client = Arc::new(client);
        let (ctx, cancel) = Context::background().with_cancel();
        let guard = client.cancel_on(&ctx);
        let reading = client.clone();
        let reader = go(move || (&*reading).read(&mut [0; 8]));
        yield_until("the reader", || trefoil::debug::stats().io_waiters == 1);
        cancel.cancel();
        let e = reader.join().unwrap().unwrap_err();
        let source = e.get_ref().and_then(|e| e.downcast_ref::<ContextError>());
        assert_eq!(source, Some(&ContextError::Canceled));
        assert!((&*client).write(b"x").is_err());
        // Without the guard it is a socket as before.
        drop(guard);
        server.write_all(b"x").unwrap();
        assert_eq!((&*client).read(&mut [0; 8]).unwrap(), 1);

        let start = Instant::now();
        let (ctx, _cancel) = Context::background().with_timeout(10 * MS);
        let guard = client.cancel_on(&ctx);
        assert_eq!((&*client).read(&mut [0; 8]).unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(start.elapsed() >= 10 * MS);
        // A second guard of a context that is done already.
        let second = client.cancel_on(&ctx);
        drop(guard);
        assert!((&*client).read(&mut [0; 8]).is_err());
        drop(second);
        // A guard that goes first leaves nothing behind.
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
fn copies_from_socket_to_socket() {
    at_each(|| {
        // Few bytes by reads and writes, many by splice, and both in pieces.
        for size in [0, 1, 1000, 3_000_000usize] {
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

// ---- bad peers --------------------------------------------------------------------------------------------

/// So that closing it resets the connection.
fn reset(stream: &TcpStream) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    // SAFETY: reads our own struct.
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
fn peers_that_reset_stall_and_half_close() {
    at_each(|| {
        // A reset while a read waits.
        let (mut client, server) = tcp_pair();
        let reader = go(move || {
            let e = client.read(&mut [0; 8]).unwrap_err().kind();
            (e, client.write(b"x").map_err(|e| e.kind()))
        });
        yield_until("the reader", || trefoil::debug::stats().io_waiters == 1);
        reset(&server);
        let (read, write) = reader.join().unwrap();
        assert_eq!((read, write), (ErrorKind::ConnectionReset, Err(ErrorKind::BrokenPipe)));

        // A reset while a write waits.
        let (client, server) = tcp_pair();
        fill(&client);
        // The kernel may find room for some more.
        let writer = go(move || {
            loop {
                if let Err(e) = (&client).write_all(&[0; 1000]) {
                    return e.kind();
                }
            }
        });
        yield_until("the writer", || trefoil::debug::stats().io_waiters == 1);
        reset(&server);
        assert_eq!(writer.join().unwrap(), ErrorKind::ConnectionReset);

        // Half a frame, and then nothing.
        let (mut client, mut server) = tcp_pair();
        server.write_all(b"half").unwrap();
        client.set_read_deadline(soon(20 * MS)).unwrap();
        assert_eq!(client.read_exact(&mut [0; 8]).unwrap_err().kind(), ErrorKind::TimedOut);

        // Half a frame, and then the end; the answer still goes out.
        let (mut client, mut server) = tcp_pair();
        server.write_all(b"half").unwrap();
        server.shutdown(Shutdown::Write).unwrap();
        assert_eq!(client.read_exact(&mut [0; 8]).unwrap_err().kind(), ErrorKind::UnexpectedEof);
        client.write_all(b"answer").unwrap();
        server.read_exact(&mut [0; 6]).unwrap();
    });
}

#[test]
fn accepting_goes_on_after_too_many_files() {
    let _watchdog = watchdog();
    if !in_child() {
        Child::of("accepting_goes_on_after_too_many_files").succeed();
        return;
    }
    const CLIENTS: usize = 60;
    const FREE: u64 = 20;
    for procs in [1, 2, 8] {
        runtime(procs).run(|| {
            let (listener, addr) = listen();
            // What the runtime needs of descriptors is there from now on.
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
            // SAFETY: descriptors of our own, and structs of our own.
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
fn a_thousand_connections_killed_at_random() {
    let _watchdog = watchdog();
    if !in_child() {
        Child::of("a_thousand_connections_killed_at_random").succeed();
        return;
    }
    const CONNS: usize = 1000;
    let limit = raise_fd_limit();
    if limit < 2 * CONNS as u64 + 100 {
        common::mark(&format!("skipped: only {limit} descriptors"));
        return;
    }
    for procs in [1, 2, 8] {
        runtime(procs).run(|| {
            let (listener, addr) = listen();
            let before = {
                // The poller's own descriptors are there from now on.
                drop((TcpStream::connect(addr).unwrap(), listener.accept().unwrap()));
                let (mut a, b) = UnixStream::pair().unwrap();
                a.set_read_deadline(soon(MS)).unwrap();
                let _ = a.read(&mut [0; 1]);
                drop((a, b));
                open_sockets()
            };
            let (kill_tx, kill_rx) = chan::unbounded::<Arc<TcpStream>>();
            let server = go(move || {
                for id in 0..CONNS {
                    let stream = Arc::new(listener.accept().unwrap().0);
                    let tx = kill_tx.clone();
                    go(move || {
                        // The first byte says whether this one is to be killed, and where.
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
            let clients: Vec<_> = (0..CONNS as u64)
                .map(|id| {
                    go(move || {
                        let mut rng = StdRng::seed_from_u64(id);
                        let stream = Arc::new(TcpStream::connect(addr).unwrap());
                        // 1: killed by the server's side; 2: by ours; else it survives.
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
                        let mut whole = true;
                        for turn in 0..10u8 {
                            let sent = vec![turn ^ id as u8; rng.random_range(1..2000)];
                            let mut got = vec![0; sent.len()];
                            if (&*stream).write_all(&sent).is_err()
                                || (&*stream).read_exact(&mut got).is_err()
                            {
                                whole = false;
                                break;
                            }
                            assert!(sent == got, "connection {id}, turn {turn}");
                        }
                        if let Some(killer) = killer {
                            killer.join().unwrap();
                        }
                        assert!(whole || fate == 1 || fate == 2, "connection {id} was lost");
                        whole
                    })
                })
                .collect();
            let survivors = clients
                .into_iter()
                .filter(|_| true)
                .map(|h| h.join().unwrap())
                .filter(|w| *w)
                .count();
            assert!((300..1000).contains(&survivors), "{survivors}");
            server.join().unwrap();
            killer.join().unwrap();
            yield_until("all goroutines to end", || trefoil::num_goroutines() == 1);
            assert_eq!(trefoil::debug::stats().io_waiters, 0);
            // The listener went with its goroutine.
            assert_eq!(open_sockets(), before - 1);
        });
    }
}

/// Held open and used: `TREFOIL_TEST_CONNECTIONS` says how many.
#[test]
fn thousands_of_connections_at_once() {
    const NAME: &str = "thousands_of_connections_at_once";
    const TURNS: usize = 3;
    let count: usize =
        std::env::var("TREFOIL_TEST_CONNECTIONS").map_or(2000, |n| n.parse().unwrap());
    let _watchdog = watchdog();
    if !in_child() {
        Child::of(NAME).succeed();
        return;
    }
    let limit = raise_fd_limit();
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
    // The other half of the descriptors is a process of its own.
    runtime(2).run(|| {
        let (listener, addr) = listen();
        let before = open_sockets();
        let client = std::thread::spawn(move || {
            Child::of(NAME).env("TREFOIL_TEST_ADDR", &addr.to_string()).succeed()
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
