//! The simulated network: hosts, streams and datagrams between them, faults, crashes.

#![cfg(feature = "std")]

mod common;

use std::ffi::c_int;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream, ToSocketAddrs, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::panic::catch_unwind;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};
use trefoil::{go, sim, time};

const SECOND: Duration = Duration::from_secs(1);
const MILLI: Duration = Duration::from_millis(1);

/// Answers every connection with what it sends, in upper case.
fn shout() {
    let listener = TcpListener::bind("0.0.0.0:7").unwrap();
    for stream in listener.incoming() {
        let mut stream = stream.unwrap();
        go(move || {
            let mut buffer = [0; 1000];
            while let Ok(n @ 1..) = stream.read(&mut buffer) {
                buffer[..n].make_ascii_uppercase();
                if stream.write_all(&buffer[..n]).is_err() {
                    return;
                }
            }
        });
    }
}

/// Starts the host `shouter`, and waits until it listens.
fn start_shouter() -> sim::Host {
    let host = sim::host("shouter", shout);
    sim::settle();
    host
}

fn ask(stream: &mut TcpStream, text: &str) -> std::io::Result<String> {
    stream.write_all(text.as_bytes())?;
    let mut answer = vec![0; text.len()];
    stream.read_exact(&mut answer)?;
    Ok(String::from_utf8(answer).unwrap())
}

#[test]
fn std_streams_connect_hosts_by_name_in_virtual_time() {
    sim::run(|| {
        let host = start_shouter();
        let begin = Instant::now();
        let mut stream = TcpStream::connect("shouter:7").unwrap();
        let connected = begin.elapsed();
        assert!((MILLI..=3 * MILLI).contains(&connected), "{connected:?}");
        assert_eq!(stream.peer_addr().unwrap(), (host.address(), 7).into());
        assert_eq!(stream.local_addr().unwrap().ip().to_string(), "10.0.0.1");
        assert_eq!(ask(&mut stream, "hello").unwrap(), "HELLO");
        let answered = begin.elapsed() - connected;
        assert!((MILLI..=3 * MILLI).contains(&answered), "{answered:?}");
    });
}

#[test]
fn streams_of_this_crate_connect_hosts_too() {
    use trefoil::net::{TcpListener, TcpStream};
    sim::run(|| {
        let server = sim::host("server", || {
            let listener = TcpListener::bind("0.0.0.0:80").unwrap();
            let (mut stream, from) = listener.accept().unwrap();
            assert_eq!(from, stream.peer_addr().unwrap());
            assert_eq!(stream.local_addr().unwrap().to_string(), "10.0.0.2:80");
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            stream.write_all(text.to_uppercase().as_bytes()).unwrap();
        });
        sim::settle();
        let mut stream = TcpStream::connect((server.address(), 80)).unwrap();
        assert_eq!(stream.peer_addr().unwrap().to_string(), "10.0.0.2:80");
        stream.write_all(b"one").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "ONE");
        assert!(server.wait());
    });
}

#[test]
fn tasks_use_the_simulated_network() {
    use trefoil::net::{TcpListener, TcpStream};
    sim::run(|| {
        let server = sim::host("server", || {
            trefoil::block_on(async {
                let listener = TcpListener::bind("0.0.0.0:80").unwrap();
                let (stream, _) = listener.accept_async().await.unwrap();
                let mut bytes = [0; 4];
                stream.read_async(&mut bytes).await.unwrap();
                stream.write_async(&bytes).await.unwrap();
            });
        });
        sim::settle();
        let task = trefoil::task::spawn(async {
            let stream = TcpStream::connect_async("server:80").await.unwrap();
            stream.write_async(b"ping").await.unwrap();
            let mut bytes = [0; 4];
            stream.read_async(&mut bytes).await.unwrap();
            bytes
        });
        assert_eq!(task.join().unwrap(), *b"ping");
        server.wait();
    });
}

#[test]
fn a_connection_is_refused_without_a_listener_and_times_out_without_a_host() {
    sim::run(|| {
        let host = sim::host("silent", || ());
        let refused = TcpStream::connect("silent:80").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        host.crash();
        let begin = Instant::now();
        let lost = TcpStream::connect("silent:80").unwrap_err();
        assert_eq!(lost.kind(), ErrorKind::TimedOut);
        // As in Linux: requests after 1, 2, 4, … seconds.
        assert!((127 * SECOND..128 * SECOND).contains(&begin.elapsed()), "{:?}", begin.elapsed());
        let begin = Instant::now();
        let address = (host.address(), 80).into();
        let lost = TcpStream::connect_timeout(&address, 5 * SECOND).unwrap_err();
        assert_eq!(lost.kind(), ErrorKind::TimedOut);
        assert_eq!(begin.elapsed(), 5 * SECOND);
        assert!("nowhere:80".to_socket_addrs().is_err());
        let nowhere = TcpStream::connect("192.0.2.1:80").unwrap_err();
        assert_eq!(nowhere.kind(), ErrorKind::HostUnreachable);
    });
}

#[test]
fn a_connection_with_a_timeout_is_established() {
    sim::run(|| {
        let host = start_shouter();
        let address = (host.address(), 7).into();
        let mut stream = TcpStream::connect_timeout(&address, SECOND).unwrap();
        assert_eq!(ask(&mut stream, "x").unwrap(), "X");
    });
}

#[test]
fn ports_are_in_use_until_their_sockets_are_closed() {
    sim::run(|| {
        let one = TcpListener::bind("0.0.0.0:80").unwrap();
        assert_eq!(TcpListener::bind("0.0.0.0:80").unwrap_err().kind(), ErrorKind::AddrInUse);
        // Another host has its own ports.
        assert!(sim::host("a", || drop(TcpListener::bind("0.0.0.0:80").unwrap())).wait());
        drop(one);
        TcpListener::bind("0.0.0.0:80").unwrap();
        let any = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        assert!(any.port() >= 49152);
        let foreign = TcpListener::bind("10.9.9.9:80").unwrap_err();
        assert_eq!(foreign.kind(), ErrorKind::AddrNotAvailable);
    });
}

#[test]
fn options_and_timeouts_work_as_on_real_sockets() {
    sim::run(|| {
        start_shouter();
        let mut stream = TcpStream::connect("shouter:7").unwrap();
        stream.set_nodelay(true).unwrap();
        assert!(stream.nodelay().unwrap());
        stream.set_ttl(9).unwrap();
        assert_eq!(stream.ttl().unwrap(), 9);
        stream.set_read_timeout(Some(3 * SECOND)).unwrap();
        let begin = Instant::now();
        let late = stream.read(&mut [0]).unwrap_err();
        assert_eq!(late.kind(), ErrorKind::WouldBlock);
        assert_eq!(begin.elapsed(), 3 * SECOND);
        stream.set_nonblocking(true).unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
        stream.set_nonblocking(false).unwrap();
        let mut clone = stream.try_clone().unwrap();
        drop(stream);
        assert_eq!(ask(&mut clone, "clone").unwrap(), "CLONE");
        assert!(clone.take_error().unwrap().is_none());
    });
}

#[test]
fn a_large_transfer_arrives_whole_and_takes_the_time_of_the_bandwidth() {
    const BYTES: usize = 3_000_000;
    let pattern = |i: usize| (i * 7 + i / 1000) as u8;
    sim::run(move || {
        sim::net().all_links().set_bandwidth(Some(1_000_000));
        sim::host("source", move || {
            let (mut stream, _) = TcpListener::bind("0.0.0.0:80").unwrap().accept().unwrap();
            let bytes: Vec<u8> = (0..BYTES).map(pattern).collect();
            stream.write_all(&bytes).unwrap();
        });
        sim::settle();
        let begin = Instant::now();
        let mut all = Vec::new();
        TcpStream::connect("source:80").unwrap().read_to_end(&mut all).unwrap();
        assert_eq!(all.len(), BYTES);
        assert!(all.iter().enumerate().all(|(i, byte)| *byte == pattern(i)));
        let took = begin.elapsed();
        assert!((3 * SECOND..4 * SECOND).contains(&took), "{took:?}");
    });
}

#[test]
fn a_writer_waits_while_the_reader_does_not_read() {
    sim::run(|| {
        let written = Arc::new(AtomicU32::new(0));
        let count = written.clone();
        sim::host("source", move || {
            let (mut stream, _) = TcpListener::bind("0.0.0.0:80").unwrap().accept().unwrap();
            while stream.write_all(&[1; 10_000]).is_ok() {
                count.fetch_add(10_000, SeqCst);
            }
        });
        sim::settle();
        let mut stream = TcpStream::connect("source:80").unwrap();
        time::sleep(10 * SECOND);
        let buffered = written.load(SeqCst);
        assert!((200_000..2_000_000).contains(&buffered), "{buffered}");
        stream.read_exact(&mut vec![0; 1_500_000]).unwrap();
        time::sleep(10 * SECOND);
        assert!(written.load(SeqCst) > buffered + 1_000_000);
    });
}

#[test]
fn a_partition_delays_streams_until_it_heals() {
    sim::run(|| {
        start_shouter();
        let mut stream = TcpStream::connect("shouter:7").unwrap();
        sim::net().partition("test", "shouter");
        let healer = go(|| {
            time::sleep(20 * SECOND);
            sim::net().heal("test", "shouter");
        });
        let begin = Instant::now();
        assert_eq!(ask(&mut stream, "again").unwrap(), "AGAIN");
        // The pauses between attempts double: 0.2, 0.4, …, 12.8 seconds.
        let took = begin.elapsed();
        assert!((20 * SECOND..40 * SECOND).contains(&took), "{took:?}");
        healer.join().unwrap();
    });
}

#[test]
fn a_partition_that_lasts_resets_streams_after_a_quarter_of_an_hour() {
    sim::run(|| {
        start_shouter();
        let mut stream = TcpStream::connect("shouter:7").unwrap();
        sim::net().one_way("test", "shouter").cut();
        let begin = Instant::now();
        assert!(ask(&mut stream, "never").is_err());
        let took = begin.elapsed();
        assert!((900 * SECOND..1200 * SECOND).contains(&took), "{took:?}");
    });
}

#[test]
fn a_reset_fails_both_sides() {
    sim::run(|| {
        let server = sim::host("server", || {
            let (mut stream, _) = TcpListener::bind("0.0.0.0:80").unwrap().accept().unwrap();
            let error = stream.read(&mut [0]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        });
        sim::settle();
        let mut stream = TcpStream::connect("server:80").unwrap();
        sim::settle();
        sim::net().reset("test", "server");
        assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        assert!(server.wait());
    });
}

#[test]
fn a_crashed_host_is_silent_and_resets_old_connections_when_it_is_up_again() {
    sim::run(|| {
        let host = start_shouter();
        let mut stream = TcpStream::connect("shouter:7").unwrap();
        assert_eq!(ask(&mut stream, "one").unwrap(), "ONE");
        host.crash();
        assert!(!host.is_up());
        stream.set_read_timeout(Some(SECOND)).unwrap();
        let silent = ask(&mut stream, "two").unwrap_err();
        assert_eq!(silent.kind(), ErrorKind::WouldBlock);
        host.restart();
        stream.set_read_timeout(Some(10 * SECOND)).unwrap();
        // What was sent before is sent again, and the host does not know the connection.
        let reset = stream.read(&mut [0]).unwrap_err();
        assert_eq!(reset.kind(), ErrorKind::ConnectionReset);
        let mut stream = TcpStream::connect("shouter:7").unwrap();
        assert_eq!(ask(&mut stream, "three").unwrap(), "THREE");
    });
}

#[test]
fn a_goroutine_may_crash_its_own_host() {
    sim::run(|| {
        let ran_on = Arc::new(AtomicU32::new(0));
        let flag = ran_on.clone();
        let host = sim::host("a", || time::sleep(1000 * SECOND));
        let own = host.clone();
        drop(host.go(move || {
            own.crash();
            flag.store(1, SeqCst);
        }));
        assert!(!host.wait());
        time::sleep(2000 * SECOND);
        assert_eq!(ran_on.load(SeqCst), 0);
    });
}

#[test]
fn datagrams_arrive_with_the_senders_address() {
    sim::run(|| {
        let echo = sim::host("echo", || {
            let socket = UdpSocket::bind("0.0.0.0:7").unwrap();
            let mut buffer = [0; 100];
            while let Ok((n, from)) = socket.recv_from(&mut buffer) {
                socket.send_to(&buffer[..n], from).unwrap();
            }
        });
        sim::settle();
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        let mut buffer = [0; 100];
        socket.send_to(b"plain", "echo:7").unwrap();
        let (n, from) = socket.recv_from(&mut buffer).unwrap();
        assert_eq!((&buffer[..n], from), (&b"plain"[..], (echo.address(), 7).into()));
        socket.connect("echo:7").unwrap();
        assert_eq!(socket.peer_addr().unwrap(), from);
        socket.send(b"connected").unwrap();
        let n = socket.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..n], b"connected");
        let socket = trefoil::net::UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.send_to(b"own", (echo.address(), 7)).unwrap();
        let (n, from) = socket.recv_from(&mut buffer).unwrap();
        assert_eq!((&buffer[..n], from), (&b"own"[..], (echo.address(), 7).into()));
    });
}

#[test]
fn datagrams_are_lost_and_reordered_as_the_link_says() {
    const SENT: u32 = 1000;
    sim::run(|| {
        sim::net().all_links().set_loss(0.3);
        sim::net().all_links().set_latency(MILLI..=100 * MILLI);
        let sink = sim::host("sink", || ());
        let receive = sink.go(|| {
            let socket = UdpSocket::bind("0.0.0.0:9").unwrap();
            socket.set_read_timeout(Some(10 * SECOND)).unwrap();
            let mut got = Vec::new();
            let mut buffer = [0; 4];
            while socket.recv(&mut buffer).is_ok() {
                got.push(u32::from_ne_bytes(buffer));
            }
            got
        });
        sim::settle();
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        for i in 0..SENT {
            socket.send_to(&i.to_ne_bytes(), "sink:9").unwrap();
            time::sleep(MILLI);
        }
        let got = receive.join().unwrap();
        let lost = SENT - got.len() as u32;
        assert!((200..400).contains(&lost), "{lost}");
        assert!(!got.is_sorted(), "no datagram overtook another");
        let mut sorted = got.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), got.len());
    });
}

#[test]
fn hosts_that_are_left_end_with_the_test_and_leave_no_descriptors() {
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let program = || {
        start_shouter();
        let mut stream = TcpStream::connect("shouter:7").unwrap();
        assert_eq!(ask(&mut stream, "x").unwrap(), "X");
    };
    sim::builder().explore(5, program).unwrap();
    let before = open();
    let explored = sim::builder().seed(1).explore(100, program).unwrap();
    assert_eq!(explored.runs, 100);
    // Other tests of this program open descriptors at the same time.
    assert!(open() < before + 100, "{before} before, {} after", open());
}

#[test]
fn tasks_of_a_crashed_host_never_run_again_and_their_sockets_are_closed() {
    use trefoil::net::{TcpListener, TcpStream};
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let program = || {
        let ran_on = Arc::new(AtomicU32::new(0));
        let flag = ran_on.clone();
        let host = sim::host("tasks", move || {
            let listener = TcpListener::bind("0.0.0.0:80").unwrap();
            let flag = flag.clone();
            trefoil::block_on(async move {
                while let Ok((stream, _)) = listener.accept_async().await {
                    let flag = flag.clone();
                    trefoil::task::spawn(async move {
                        trefoil::time::sleep_async(SECOND).await;
                        stream.write_async(b"late").await.unwrap();
                        flag.store(1, SeqCst);
                    });
                }
            });
        });
        sim::settle();
        let stream = TcpStream::connect("tasks:80").unwrap();
        time::sleep(SECOND / 2);
        host.crash();
        time::sleep(10 * SECOND);
        assert_eq!(ran_on.load(SeqCst), 0);
        drop(stream);
    };
    sim::builder().explore(3, program).unwrap();
    let before = open();
    let runs = common::rounds(10, 30);
    sim::builder().seed(1).explore(runs, program).unwrap();
    assert!(open() < before + 2 * runs as usize, "{before} before, {} after", open());
}

#[test]
fn a_goroutine_of_the_test_that_waits_for_a_socket_at_the_end_is_a_failure() {
    let failure = sim::builder()
        .explore(1, || {
            start_shouter();
            let mut stream = TcpStream::connect("shouter:7").unwrap();
            go(move || stream.read(&mut [0]).unwrap());
            sim::settle();
        })
        .unwrap_err();
    assert_eq!(failure.kind, sim::FailureKind::Outlived);
}

#[test]
fn a_wait_that_no_host_ends_is_a_deadlock() {
    let failure = sim::builder()
        .explore(1, || {
            start_shouter();
            let mut stream = TcpStream::connect("shouter:7").unwrap();
            _ = stream.read(&mut [0]);
        })
        .unwrap_err();
    assert_eq!(failure.kind, sim::FailureKind::Deadlock);
    assert!(failure.message.contains("IO wait"), "{failure}");
}

/// Closes, resets, and makes sockets with the same addresses again. Returns when each step ended.
fn closes_and_resets() -> Vec<Duration> {
    let begin = Instant::now();
    let mut steps = Vec::new();
    let host = start_shouter();
    let resets = go(|| {
        for _ in 0..20 {
            time::sleep(MILLI);
            sim::net().reset("test", "shouter");
        }
    });
    for _ in 0..20 {
        if let Ok(mut stream) = TcpStream::connect("shouter:7") {
            _ = ask(&mut stream, "x");
        }
        steps.push(begin.elapsed());
    }
    resets.join().unwrap();
    let mut stream = TcpStream::connect("shouter:7").unwrap();
    assert_eq!(ask(&mut stream, "x").unwrap(), "X");
    host.restart();
    sim::settle();
    assert_eq!(ask(&mut stream, "x").unwrap_err().kind(), ErrorKind::ConnectionReset);
    steps.push(begin.elapsed());
    steps
}

/// Starts children on another thread, each with `command`, while simulations run that must not
/// notice it.
fn run_beside_children(command: fn() -> Command) {
    let run = || sim::builder().seed(1).run(closes_and_resets);
    // The first run initialises statics.
    let (_, expected) = (run(), run());
    let has_ended = AtomicBool::new(false);
    let different = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !has_ended.load(SeqCst) {
                assert!(command().status().unwrap().success());
            }
        });
        let mut results = (0..common::rounds(30, 60)).map(|_| catch_unwind(run).ok());
        let different = results.find(|steps| steps.as_ref() != Some(&expected));
        has_ended.store(true, SeqCst);
        different
    });
    assert!(different.is_none(), "{different:?} instead of {expected:?}");
}

#[test]
fn children_that_are_spawned_at_the_same_time_change_nothing() {
    run_beside_children(|| Command::new("true"));
}

#[test]
fn children_that_are_forked_at_the_same_time_change_nothing() {
    run_beside_children(|| {
        let mut command = Command::new("true");
        let slowly = || {
            std::thread::sleep(MILLI);
            Ok(())
        };
        // SAFETY: sleeps only. With such a closure std calls `fork`.
        unsafe { command.pre_exec(slowly) };
        command
    });
}

#[test]
fn close_range_closes_simulated_sockets() {
    /// From here on, so that no other test gets the numbers.
    const FIRST: RawFd = 900;
    fn family(fd: RawFd) -> c_int {
        // SAFETY: a place for an address of this length.
        unsafe {
            let mut address: libc::sockaddr_storage = std::mem::zeroed();
            let mut len = size_of_val(&address) as libc::socklen_t;
            libc::getsockname(fd, (&raw mut address).cast(), &raw mut len);
            c_int::from(address.ss_family)
        }
    }
    sim::run(|| {
        start_shouter();
        let mut stream = TcpStream::connect("shouter:7").unwrap();
        let (other, _peer) = UnixStream::pair().unwrap();
        // SAFETY: descriptors of the test's own.
        unsafe {
            for fd in FIRST..FIRST + 3 {
                let made = libc::fcntl(stream.as_raw_fd(), libc::F_DUPFD_CLOEXEC, fd);
                assert_eq!((made, family(fd)), (fd, libc::AF_INET));
            }
            assert_eq!(libc::close_range(FIRST as u32, FIRST as u32 + 1, 0), 0);
            // The system call, so that only `close_range` can have told that the socket is closed.
            let flags = libc::O_CLOEXEC;
            libc::syscall(libc::SYS_dup3, other.as_raw_fd(), FIRST, flags);
            assert_eq!([family(FIRST), family(FIRST + 2)], [libc::AF_UNIX, libc::AF_INET]);
            assert_eq!(libc::close_range(FIRST as u32, FIRST as u32 + 2, 0), 0);
        }
        assert_eq!(ask(&mut stream, "x").unwrap(), "X");
    });
}

#[test]
fn closing_ends_the_first_wait_for_a_number() {
    const SEEDS: u32 = 100;
    /// From here on, so that no goroutine has waited for one of the numbers.
    static NEXT: AtomicU32 = AtomicU32::new(400);
    for close_range in [false, true] {
        for seed in 0..SEEDS {
            let seed: sim::Seed = format!("uniform:{seed:x}").parse().unwrap();
            let run = sim::builder().replay(&seed, move || {
                let listener = TcpListener::bind("0.0.0.0:80").unwrap();
                let stream = TcpStream::connect("127.0.0.1:80").unwrap();
                let _peer = listener.accept().unwrap();
                let fd = NEXT.fetch_add(1, SeqCst) as c_int;
                // SAFETY: descriptors of the test's own, and a byte.
                unsafe {
                    let made = libc::fcntl(stream.as_raw_fd(), libc::F_DUPFD_CLOEXEC, fd);
                    assert_eq!(made, fd);
                    let reader = go(move || {
                        let mut byte = [0u8; 1];
                        libc::read(fd, byte.as_mut_ptr().cast(), 1)
                    });
                    let closed = if close_range {
                        libc::close_range(fd as u32, fd as u32, 0)
                    } else {
                        libc::close(fd)
                    };
                    assert_eq!((closed, reader.join().unwrap()), (0, -1));
                }
            });
            run.unwrap();
        }
    }
}

#[test]
fn a_child_of_vfork_closes_only_its_own_descriptors() {
    sim::run(|| {
        start_shouter();
        let mut stream = TcpStream::connect("shouter:7").unwrap();
        let (fd, copy) = (stream.as_raw_fd(), stream.try_clone().unwrap().into_raw_fd());
        for call in 0..3 {
            // SAFETY: descriptors of the test's own. The child only makes calls that need no memory.
            unsafe {
                #[expect(deprecated, reason = "what the test is about")]
                let child = libc::vfork();
                if child == 0 {
                    match call {
                        0 => libc::close(fd),
                        1 => libc::close_range(fd as u32, fd as u32, 0),
                        _ => libc::dup2(2, copy),
                    };
                    libc::_exit(0);
                }
                assert_eq!(libc::waitpid(child, std::ptr::null_mut(), 0), child);
            }
        }
        assert_eq!(ask(&mut stream, "x").unwrap(), "X");
        // SAFETY: a copy of the test's own.
        let mut copy = unsafe { TcpStream::from_raw_fd(copy) };
        assert_eq!(ask(&mut copy, "y").unwrap(), "Y");
    });
}

#[test]
fn a_failure_in_the_network_is_repeated_by_its_seed() {
    // Three clients race; the order of their requests depends on latencies and schedule.
    let program = || {
        let first = Arc::new(AtomicU32::new(0));
        let winner = first.clone();
        sim::host("server", move || {
            let listener = TcpListener::bind("0.0.0.0:80").unwrap();
            let mut byte = [0];
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut byte).unwrap();
            winner.store(byte[0].into(), SeqCst);
            time::sleep(100 * SECOND);
        });
        sim::settle();
        let client = |i: u8| {
            go(move || {
                let mut stream = TcpStream::connect("server:80").unwrap();
                stream.write_all(&[i]).unwrap();
                time::sleep(SECOND);
            })
        };
        let all = [client(1), client(2), client(3)];
        for one in all {
            one.join().unwrap();
        }
        assert_ne!(first.load(SeqCst), 3, "the third client was first");
    };
    let failure = sim::builder().explore(200, program).unwrap_err();
    assert_eq!(failure.kind, sim::FailureKind::Panic, "{failure}");
    assert!(failure.is_repeatable, "{failure}");
}

mod disk {
    use super::*;
    use std::fs::{self, File};
    use std::sync::Mutex;

    /// Runs `write` on a host, crashes it, and returns what is in `data` afterwards, for many
    /// seeds.
    fn after_crash(write: fn()) -> Vec<Option<Vec<u8>>> {
        let found = Arc::new(Mutex::new(Vec::new()));
        let all = found.clone();
        let explored = sim::builder().explore(60, move || {
            let host = sim::host("disk", move || {
                if !sim::disk().join("data").exists() && !sim::disk().join("begun").exists() {
                    File::create(sim::disk().join("begun")).unwrap();
                    File::open(sim::disk()).unwrap().sync_all().unwrap();
                    write();
                }
            });
            host.wait();
            host.restart();
            host.wait();
            let read = || fs::read(sim::disk().join("data")).ok();
            all.lock().unwrap().push(host.go(read).join().unwrap());
        });
        explored.unwrap();
        let found = found.lock().unwrap().clone();
        assert_eq!(found.len(), 60);
        found
    }

    fn sync(path: impl AsRef<std::path::Path>) {
        File::open(path).unwrap().sync_all().unwrap();
    }

    #[test]
    fn synced_bytes_in_a_synced_folder_survive_every_crash() {
        let all = after_crash(|| {
            fs::write(sim::disk().join("data"), "old").unwrap();
            sync(sim::disk().join("data"));
            sync(sim::disk());
        });
        assert!(all.iter().all(|bytes| bytes.as_deref() == Some(b"old")), "{all:?}");
    }

    #[test]
    fn what_was_not_synced_may_be_lost_or_torn() {
        let all = after_crash(|| {
            let path = sim::disk().join("data");
            fs::write(&path, [b'a'; 2048]).unwrap();
            sync(&path);
            sync(sim::disk());
            fs::write(&path, [b'b'; 2048]).unwrap();
        });
        let count = |wanted: u8| {
            let is_whole = |bytes: &&Option<Vec<u8>>| {
                bytes.as_ref().is_some_and(|bytes| bytes.iter().all(|byte| *byte == wanted))
            };
            all.iter().filter(is_whole).count()
        };
        let (old, new) = (count(b'a'), count(b'b'));
        assert!(old >= 8 && new >= 8 && old + new <= 52, "{old} {new}");
    }

    #[test]
    fn a_rename_is_kept_or_lost_as_a_whole() {
        let all = after_crash(|| {
            let (path, new) = (sim::disk().join("data"), sim::disk().join("new"));
            fs::write(&path, "old").unwrap();
            sync(&path);
            sync(sim::disk());
            fs::write(&new, "new").unwrap();
            sync(&new);
            fs::rename(&new, &path).unwrap();
        });
        let count = |wanted: &[u8]| all.iter().filter(|b| b.as_deref() == Some(wanted)).count();
        let (old, new) = (count(b"old"), count(b"new"));
        assert!(old >= 10 && new >= 10 && old + new == 60, "{all:?}");
    }
}
