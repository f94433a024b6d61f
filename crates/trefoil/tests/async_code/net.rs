//! Sockets, pipes and descriptors in async code.

use crate::executors::{everywhere, foreign_block_on};
use std::future::{Future, poll_fn};
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};
use trefoil::net::{
    AsyncFd, TcpListener, TcpStream, UdpSocket, UnixDatagram, UnixListener, UnixStream, pipe,
};
use trefoil::task;
use trefoil::time::{sleep_async, timeout_async};

const MS: Duration = Duration::from_millis(1);

fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let server = listener.accept().unwrap().0;
    client.set_nodelay(true).unwrap();
    server.set_nodelay(true).unwrap();
    (client, server)
}

async fn read_exact(stream: &TcpStream, buf: &mut [u8]) {
    let mut read = 0;
    while read < buf.len() {
        let n = stream.read_async(&mut buf[read..]).await.unwrap();
        assert_ne!(n, 0, "unexpected end-of-file");
        read += n;
    }
}

async fn write_all(stream: &TcpStream, mut buf: &[u8]) {
    while !buf.is_empty() {
        let n = stream.write_async(buf).await.unwrap();
        buf = &buf[n..];
    }
}

#[test]
fn an_echo_works_wherever_it_is_polled() {
    everywhere(|place| async move {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = task::spawn(async move {
            let (stream, _) = listener.accept_async().await.unwrap();
            stream.set_nodelay(true).unwrap();
            let mut buf = [0; 1000];
            loop {
                let n = stream.read_async(&mut buf).await.unwrap();
                if n == 0 {
                    break;
                }
                write_all(&stream, &buf[..n]).await;
            }
        });
        let stream = TcpStream::connect_async(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        for i in 0..50_usize {
            let message = vec![i as u8; 1 + i * 97];
            write_all(&stream, &message).await;
            let mut answer = vec![0; message.len()];
            read_exact(&stream, &mut answer).await;
            assert_eq!(answer, message, "{place}");
        }
        stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!(stream.read_async(&mut [0; 1]).await.unwrap(), 0, "{place}");
        server.await.unwrap();
    });
}

#[test]
fn a_large_transfer_waits_in_both_directions() {
    everywhere(|_| async move {
        let (one, other) = tcp_pair();
        const LEN: usize = 3 << 20;
        let writer = task::spawn(async move {
            let bytes: Vec<u8> = (0..LEN).map(|i| (i / 7) as u8).collect();
            write_all(&one, &bytes).await;
        });
        let mut bytes = vec![0; LEN];
        read_exact(&other, &mut bytes).await;
        assert!(bytes.iter().enumerate().all(|(i, &b)| b == (i / 7) as u8));
        writer.await.unwrap();
    });
}

#[test]
fn connect_reports_a_refusal() {
    everywhere(|_| async {
        let address = {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            listener.local_addr().unwrap()
        };
        let error = TcpStream::connect_async(address).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        // Several addresses, of which the last listens; and a name.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let good = listener.local_addr().unwrap();
        let stream = TcpStream::connect_async(&[address, address, good][..]).await.unwrap();
        assert_eq!(stream.peer_addr().unwrap(), good);
        TcpStream::connect_async(("localhost", good.port())).await.unwrap();
        let error = TcpStream::connect_async(&[address, address][..]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    });
}

#[test]
fn datagrams_and_unix_sockets_and_pipes_are_awaited() {
    let number = Arc::new(AtomicUsize::new(0));
    everywhere(move |_| {
        let number = number.fetch_add(1, Ordering::Relaxed);
        async move {
            let receiver = Arc::new(UdpSocket::bind("127.0.0.1:0").unwrap());
            let address = receiver.local_addr().unwrap();
            let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
            let task = {
                let receiver = receiver.clone();
                task::spawn(async move {
                    let mut buf = [0; 16];
                    let peeked = receiver.peek_async(&mut buf).await.unwrap();
                    let (n, from) = receiver.recv_from_async(&mut buf).await.unwrap();
                    assert_eq!(peeked, n);
                    (buf[..n].to_vec(), from)
                })
            };
            sender.send_to_async(b"hello", address).await.unwrap();
            let (bytes, from) = task.await.unwrap();
            assert_eq!((bytes, from), (b"hello".to_vec(), sender.local_addr().unwrap()));
            sender.connect(address).unwrap();
            sender.send_async(b"again").await.unwrap();
            receiver.readable().await.unwrap();
            assert_eq!(receiver.recv_async(&mut [0; 16]).await.unwrap(), 5);

            let (one, other) = UnixDatagram::pair().unwrap();
            let task = task::spawn(async move {
                assert_eq!(other.peek_async(&mut [0; 16]).await.unwrap(), 4);
                let (n, from) = other.peek_from_async(&mut [0; 2]).await.unwrap();
                assert_eq!((n, from.is_unnamed()), (2, true));
                other.recv_async(&mut [0; 16]).await.unwrap()
            });
            one.send_async(b"four").await.unwrap();
            assert_eq!(task.await.unwrap(), 4);

            let folder = std::env::temp_dir();
            let path = folder.join(format!("trefoil-async-{}-{number}", std::process::id()));
            let _ = std::fs::remove_file(&path);
            let listener = UnixListener::bind(&path).unwrap();
            let task = task::spawn(async move {
                let (stream, _) = listener.accept_async().await.unwrap();
                let bufs = [IoSlice::new(b"he"), IoSlice::new(b"llo")];
                assert_eq!(stream.write_vectored_async(&bufs).await.unwrap(), 5);
            });
            let stream = UnixStream::connect_async(&path).await.unwrap();
            let mut buf = [0; 16];
            assert_eq!(stream.peek_async(&mut buf).await.unwrap(), 5);
            assert_eq!(stream.read_async(&mut buf).await.unwrap(), 5);
            task.await.unwrap();
            std::fs::remove_file(&path).unwrap();

            let (reader, writer) = pipe().unwrap();
            let task = task::spawn(async move { reader.read_async(&mut [0; 16]).await.unwrap() });
            assert_eq!(writer.write_async(b"pipe").await.unwrap(), 4);
            assert_eq!(task.await.unwrap(), 4);
        }
    });
}

#[test]
fn close_ends_reads_that_wait() {
    everywhere(|place| async move {
        let (one, _other) = tcp_pair();
        let one = Arc::new(one);
        let closer = {
            let one = one.clone();
            trefoil::go(move || {
                std::thread::sleep(5 * MS);
                one.close().unwrap();
            })
        };
        let error = one.read_async(&mut [0; 8]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotConnected, "{place}");
        closer.join().unwrap();
    });
}

/// `close` comes at any moment of a poll, also between the attempt and the registration.
#[test]
fn close_during_a_poll_ends_the_read() {
    trefoil::run(|| {
        for i in 0..400 {
            let (one, _other) = tcp_pair();
            let one = Arc::new(one);
            let reader = one.clone();
            let task = task::spawn(async move { reader.read_async(&mut [0; 8]).await });
            (0..i % 50 * 40).for_each(|_| std::hint::spin_loop());
            one.close().unwrap();
            let error = task.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotConnected);
        }
    });
}

#[test]
fn deadlines_timeouts_and_contexts_end_reads_that_wait() {
    everywhere(|place| async move {
        let (one, _other) = tcp_pair();
        let start = Instant::now();
        one.set_read_deadline(Some(start + 4 * MS)).unwrap();
        let error = one.read_async(&mut [0; 8]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{place}");
        assert!(start.elapsed() >= 4 * MS, "{place}");

        // A deadline that is set while the call waits.
        one.set_read_deadline(None).unwrap();
        let one = Arc::new(one);
        let other_handle = one.clone();
        let setter = trefoil::go(move || {
            std::thread::sleep(3 * MS);
            other_handle.set_read_deadline(Some(Instant::now() + MS)).unwrap();
        });
        let error = one.read_async(&mut [0; 8]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{place}");
        setter.join().unwrap();

        one.set_read_deadline(None).unwrap();
        one.set_read_timeout(Some(3 * MS)).unwrap();
        let start = Instant::now();
        let error = one.readable().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{place}");
        assert!(start.elapsed() >= 3 * MS, "{place}");

        one.set_read_timeout(None).unwrap();
        let (ctx, cancel) = trefoil::context::Context::background().with_cancel();
        let _guard = one.cancel_on(&ctx);
        let canceller = trefoil::go(move || {
            std::thread::sleep(3 * MS);
            cancel.cancel();
        });
        let error = one.read_async(&mut [0; 8]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Other, "{place}: {error}");
        canceller.join().unwrap();
    });
}

#[test]
fn a_read_that_is_dropped_reads_nothing() {
    everywhere(|place| async move {
        let (one, mut other) = tcp_pair();
        for _ in 0..10 {
            assert!(timeout_async(MS / 10, one.read_async(&mut [0; 8])).await.is_err(), "{place}");
        }
        other.write_all(b"hello").unwrap();
        let mut buf = [0; 8];
        assert_eq!(one.read_async(&mut buf).await.unwrap(), 5, "{place}");
        assert_eq!(&buf[..5], b"hello");
    });
}

#[test]
fn a_task_that_waits_is_dropped_with_its_runtime() {
    let (one, other) = trefoil::run(tcp_pair);
    let one = Arc::new(one);
    let reader = one.clone();
    let runtime = trefoil::Runtime::builder().build().unwrap();
    runtime.run(move || {
        drop(task::spawn(async move { reader.read_async(&mut [0; 8]).await }));
        trefoil::time::sleep(2 * MS);
    });
    drop(runtime);
    assert_eq!(Arc::strong_count(&one), 1, "the future was dropped");
    // The socket works in another runtime.
    trefoil::run(move || {
        (&other).write_all(b"x").unwrap();
        assert_eq!(trefoil::block_on(one.read_async(&mut [0; 8])).unwrap(), 1);
    });
}

/// Tasks, goroutines and threads read one socket; each byte is read once.
#[test]
fn tasks_goroutines_and_threads_share_a_socket() {
    const BYTES: usize = 3000;
    let (one, other) = trefoil::run(tcp_pair);
    let one = Arc::new(one);
    let total = Arc::new(AtomicUsize::new(0));
    let thread = {
        let (one, total) = (one.clone(), total.clone());
        std::thread::spawn(move || {
            while let Ok(n @ 1..) = foreign_block_on(one.read_async(&mut [0; 5])) {
                total.fetch_add(n, Ordering::Relaxed);
            }
        })
    };
    trefoil::run(move || {
        let tasks: Vec<_> = (0..4)
            .map(|_| {
                let (one, total) = (one.clone(), total.clone());
                task::spawn(async move {
                    while let Ok(n @ 1..) = one.read_async(&mut [0; 3]).await {
                        total.fetch_add(n, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        let goroutines: Vec<_> = (0..2)
            .map(|_| {
                let (one, total) = (one.clone(), total.clone());
                trefoil::go(move || {
                    while let Ok(n @ 1..) = (&*one).read(&mut [0; 3]) {
                        total.fetch_add(n, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        for i in 0..BYTES / 10 {
            (&other).write_all(&[0; 10]).unwrap();
            if i % 16 == 0 {
                trefoil::time::sleep(Duration::from_micros(100));
            }
        }
        other.shutdown(Shutdown::Write).unwrap();
        tasks.into_iter().for_each(|task| task.join().unwrap());
        goroutines.into_iter().for_each(|goroutine| goroutine.join().unwrap());
        thread.join().unwrap();
        assert_eq!(total.load(Ordering::Relaxed), BYTES);
    });
}

/// Reads are polled and dropped at any moment, on all Ps, while data comes: nothing is lost, and no
/// read waits for ever.
#[test]
fn reads_that_are_dropped_while_data_comes_lose_no_wake_up() {
    trefoil::run(|| {
        let end = Instant::now() + Duration::from_millis(1200);
        let tasks: Vec<_> = (0..8_u64)
            .map(|t| {
                let (one, other) = tcp_pair();
                let sent = Arc::new(AtomicUsize::new(0));
                let stop = Arc::new(AtomicBool::new(false));
                let writer = {
                    let (sent, stop) = (sent.clone(), stop.clone());
                    task::spawn(async move {
                        let mut i = t;
                        while !stop.load(Ordering::Relaxed) {
                            let n = other.write_async(&[7; 16][..1 + i as usize % 16]).await;
                            sent.fetch_add(n.unwrap(), Ordering::Relaxed);
                            i = i
                                .wrapping_mul(6364136223846793005)
                                .wrapping_add(1442695040888963407);
                            match i >> 60 {
                                0..8 => task::yield_now().await,
                                8..12 => {}
                                _ => sleep_async(Duration::from_micros(i >> 56)).await,
                            }
                        }
                        drop(other);
                    })
                };
                task::spawn(async move {
                    let (mut read, mut i) = (0, t);
                    loop {
                        i = i.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                        let mut buf = [0; 8];
                        let limit = Duration::from_micros(i >> 57);
                        match timeout_async(limit, one.read_async(&mut buf)).await {
                            Ok(Ok(0)) => break,
                            Ok(n) => read += n.unwrap(),
                            Err(_) if i >> 62 == 0 => {
                                // Without a limit: the wake-up must come.
                                match one.read_async(&mut buf).await.unwrap() {
                                    0 => break,
                                    n => read += n,
                                }
                            }
                            Err(_) => {}
                        }
                        if Instant::now() > end {
                            stop.store(true, Ordering::Relaxed);
                        }
                    }
                    writer.await.unwrap();
                    assert_eq!(read, sent.load(Ordering::Relaxed));
                })
            })
            .collect();
        tasks.into_iter().for_each(|task| task.join().unwrap());
    });
}

#[test]
fn an_aborted_task_leaves_the_socket_usable() {
    trefoil::run(|| {
        let (one, other) = tcp_pair();
        let one = Arc::new(one);
        for i in 0..300 {
            let reader = one.clone();
            let task = task::spawn(async move { reader.read_async(&mut [0; 1]).await });
            if i % 3 == 0 {
                trefoil::yield_now();
            }
            if i % 7 == 0 {
                (&other).write_all(b"x").unwrap();
            }
            task.abort();
            let was_read = matches!(task.join(), Ok(Ok(1)));
            if i % 7 == 0 && !was_read {
                assert_eq!(trefoil::block_on(one.read_async(&mut [0; 1])).unwrap(), 1);
            }
        }
    });
}

fn eventfd() -> OwnedFd {
    // SAFETY: a new descriptor.
    unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)) }
}

fn eventfd_read(fd: &impl AsRawFd) -> std::io::Result<u64> {
    let mut n = 0_u64;
    // SAFETY: eight bytes of our own.
    let rc = unsafe { libc::read(fd.as_raw_fd(), (&raw mut n).cast(), 8) };
    if rc == 8 { Ok(n) } else { Err(std::io::Error::last_os_error()) }
}

fn eventfd_write(fd: &OwnedFd, n: u64) {
    // SAFETY: eight bytes of our own.
    assert_eq!(unsafe { libc::write(fd.as_raw_fd(), (&raw const n).cast(), 8) }, 8);
}

#[test]
fn an_async_fd_is_readable_until_its_readiness_is_cleared() {
    everywhere(|place| async move {
        let fd = Arc::new(AsyncFd::new(eventfd()).unwrap());
        let writable = fd.writable().await.unwrap();
        drop(writable);
        assert!(timeout_async(MS, fd.readable()).await.is_err(), "{place}");
        let writer = {
            let fd = fd.clone();
            trefoil::go(move || {
                for i in 1..=20 {
                    eventfd_write(fd.get_ref(), i);
                    std::thread::sleep(MS / 5);
                }
            })
        };
        let mut sum = 0;
        while sum < 210 {
            let mut guard = fd.readable().await.unwrap();
            if let Ok(n) = guard.try_io(|fd| eventfd_read(fd.get_ref())) {
                sum += n.unwrap();
            }
        }
        writer.join().unwrap();
        assert_eq!(sum, 210, "{place}");
        let fd = Arc::into_inner(fd).unwrap().into_inner();
        eventfd_write(&fd, 1);
        let fd = AsyncFd::new(fd).unwrap();
        poll_fn(|context| fd.poll_read_ready(context)).await.unwrap().clear_ready();
        let pending = poll_fn(|context| Poll::Ready(fd.poll_read_ready(context).is_pending()));
        assert!(pending.await, "{place}");
    });
}

/// Reads one number from `fd`.
async fn read_number(fd: &AsyncFd<BorrowedFd<'_>>) -> u64 {
    loop {
        let mut guard = fd.readable().await.unwrap();
        if let Ok(n) = guard.try_io(|fd| eventfd_read(fd.get_ref())) {
            return n.unwrap();
        }
    }
}

#[test]
fn each_async_fd_of_a_descriptor_gets_all_events() {
    everywhere(|place| async move {
        let fd = eventfd();
        let first = AsyncFd::new(fd.as_fd()).unwrap();
        let second = AsyncFd::new(fd.as_fd()).unwrap();
        for i in 1..=20 {
            eventfd_write(&fd, i);
            // Both see it, before one of them reads it.
            let ready = async {
                first.readable().await.unwrap().retain_ready();
                second.readable().await.unwrap().retain_ready();
            };
            assert!(timeout_async(Duration::from_secs(10), ready).await.is_ok(), "{place}");
            let (reader, other) = if i % 2 == 0 { (&first, &second) } else { (&second, &first) };
            assert_eq!(read_number(reader).await, i, "{place}");
            let mut guard = other.readable().await.unwrap();
            assert!(guard.try_io(|fd| eventfd_read(fd.get_ref())).is_err(), "{place}");
        }
        // What is left of one does not depend on the other.
        drop(second);
        eventfd_write(&fd, 7);
        let read = timeout_async(Duration::from_secs(10), read_number(&first)).await;
        assert_eq!(read.ok(), Some(7), "{place}");
    });
}

#[test]
fn an_async_fd_gets_events_beside_a_poll_of_its_descriptor() {
    trefoil::run(|| {
        let fd = Arc::new(eventfd());
        let events = Arc::new(AtomicUsize::new(0));
        let waiter = {
            let (fd, events) = (fd.clone(), events.clone());
            task::spawn(async move {
                let fd = AsyncFd::new(fd.as_fd()).unwrap();
                for _ in 0..20 {
                    fd.readable().await.unwrap().clear_ready();
                    events.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        for i in 0..20 {
            let poller = {
                let fd = fd.clone();
                trefoil::go(move || {
                    let events = libc::POLLIN;
                    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
                    // SAFETY: one entry of our own.
                    assert_eq!(unsafe { libc::poll(&raw mut poll, 1, 10_000) }, 1);
                })
            };
            std::thread::sleep(MS);
            eventfd_write(&fd, 1);
            poller.join().unwrap();
            let end = Instant::now() + Duration::from_secs(10);
            while events.load(Ordering::Relaxed) <= i {
                assert!(Instant::now() < end, "the task has missed event {i}");
                std::thread::sleep(MS / 10);
            }
            // Not before: epoll reports nothing that was consumed meanwhile.
            eventfd_read(&*fd).unwrap();
        }
        waiter.join().unwrap();
    });
}

#[test]
fn an_async_fd_may_share_the_descriptor_of_a_socket_of_this_crate() {
    trefoil::run(|| {
        let (one, other) = UnixStream::pair().unwrap();
        let fd = AsyncFd::new(one.as_fd()).unwrap();
        for _ in 0..20 {
            let mut writer = other.try_clone().unwrap();
            let writer = trefoil::go(move || {
                std::thread::sleep(MS);
                writer.write_all(b"x").unwrap();
            });
            let ready = trefoil::block_on(timeout_async(Duration::from_secs(10), fd.readable()));
            ready.unwrap().unwrap().clear_ready();
            assert_eq!((&one).read(&mut [0; 8]).unwrap(), 1);
            writer.join().unwrap();
            let reader = one.try_clone().unwrap();
            let reader = trefoil::go(move || (&reader).read(&mut [0; 8]).unwrap());
            std::thread::sleep(MS);
            (&other).write_all(b"xy").unwrap();
            assert_eq!(reader.join().unwrap(), 2);
        }
    });
}

/// Counts its wake-ups.
#[derive(Default)]
struct CountWakes(AtomicUsize);

impl Wake for CountWakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Release);
    }
}

/// Two threads that are no tasks of this crate call `poll` at the same time, which is to register
/// them for one direction. Then `make_ready` is called, and at least one of them must be woken.
fn one_of_two_foreign_tasks_is_woken<T: Send + Sync>(
    rounds: usize,
    subject: &T,
    poll: impl Fn(&T, &mut Context<'_>) -> bool + Sync,
    make_ready: impl Fn(&T),
) {
    for round in 0..rounds {
        let wakes = [(); 2].map(|()| Arc::new(CountWakes::default()));
        let start = Barrier::new(2);
        std::thread::scope(|scope| {
            for wakes in &wakes {
                let waker = Waker::from(wakes.clone());
                let (start, poll) = (&start, &poll);
                scope.spawn(move || {
                    let mut context = Context::from_waker(&waker);
                    start.wait();
                    (0..4).for_each(|_| assert!(poll(subject, &mut context), "not pending"));
                });
            }
        });
        make_ready(subject);
        let end = Instant::now() + Duration::from_secs(5);
        while wakes.iter().all(|wakes| wakes.0.load(Ordering::Acquire) == 0) {
            assert!(Instant::now() < end, "neither is woken in round {round}");
            std::thread::yield_now();
        }
        // Consumes the readiness.
        foreign_block_on(poll_fn(|context| match poll(subject, context) {
            true => Poll::Pending,
            false => Poll::Ready(()),
        }));
    }
}

#[test]
fn one_of_two_foreign_tasks_that_poll_an_async_fd_is_woken() {
    let fd = AsyncFd::new(eventfd()).unwrap();
    one_of_two_foreign_tasks_is_woken(
        3000,
        &fd,
        |fd, context| match fd.poll_read_ready(context) {
            Poll::Ready(guard) => {
                let mut guard = guard.unwrap();
                // Another thread may have cleared it meanwhile.
                let was_empty = guard.try_io(|fd| eventfd_read(fd.get_ref())).is_err();
                was_empty && fd.poll_read_ready(context).is_pending()
            }
            Poll::Pending => true,
        },
        |fd| eventfd_write(fd.get_ref(), 1),
    );
}

#[test]
fn a_regular_file_is_no_async_fd() {
    let file = std::fs::File::open("Cargo.toml").unwrap();
    assert_eq!(AsyncFd::new(file).unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn a_pending_read_is_woken_by_the_edge_that_comes_during_its_poll() {
    trefoil::run(|| {
        let (one, other) = tcp_pair();
        trefoil::block_on(async {
            for _ in 0..200 {
                let mut buf = [0; 4];
                let mut read = pin!(one.read_async(&mut buf));
                let first = poll_fn(|context| Poll::Ready(read.as_mut().poll(context))).await;
                assert!(first.is_pending());
                (&other).write_all(b"x").unwrap();
                assert_eq!(read.await.unwrap(), 1);
            }
        });
    });
}

#[cfg(feature = "tokio-io")]
mod tokio_io {
    use super::*;
    use std::pin::Pin;
    use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

    async fn read(mut stream: &TcpStream, buf: &mut [u8]) -> std::io::Result<usize> {
        let mut buf = ReadBuf::new(buf);
        poll_fn(|context| Pin::new(&mut stream).poll_read(context, &mut buf)).await?;
        Ok(buf.filled().len())
    }

    async fn write(mut stream: &TcpStream, buf: &[u8]) -> std::io::Result<usize> {
        poll_fn(|context| Pin::new(&mut stream).poll_write(context, buf)).await
    }

    #[test]
    fn poll_traits_wait_and_honour_deadlines_and_timeouts_and_close() {
        everywhere(|place| async move {
            let (one, other) = tcp_pair();
            let (one, other) = (Arc::new(one), Arc::new(other));
            let echo = {
                let other = other.clone();
                task::spawn(async move {
                    let mut buf = [0; 100];
                    while let Ok(n @ 1..) = read(&other, &mut buf).await {
                        write(&other, &buf[..n]).await.unwrap();
                    }
                })
            };
            let mut buf = [0; 100];
            for _ in 0..100 {
                write(&one, b"hello").await.unwrap();
                assert_eq!(read(&one, &mut buf).await.unwrap(), 5, "{place}");
            }
            one.set_read_timeout(Some(2 * MS)).unwrap();
            for _ in 0..2 {
                let start = Instant::now();
                let error = read(&one, &mut buf).await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::TimedOut, "{place}");
                assert!(start.elapsed() >= 2 * MS, "{place}");
            }
            one.set_read_timeout(None).unwrap();
            one.set_read_deadline(Some(Instant::now() + 2 * MS)).unwrap();
            assert_eq!(read(&one, &mut buf).await.unwrap_err().kind(), ErrorKind::TimedOut);
            one.set_read_deadline(None).unwrap();
            let closer = {
                let one = one.clone();
                trefoil::go(move || {
                    std::thread::sleep(2 * MS);
                    one.close().unwrap();
                })
            };
            let error = read(&one, &mut buf).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotConnected, "{place}");
            closer.join().unwrap();
            echo.await.unwrap();
        });
    }

    #[test]
    fn one_of_two_foreign_tasks_that_poll_a_stream_is_woken() {
        let (one, other) = tcp_pair();
        one_of_two_foreign_tasks_is_woken(
            3000,
            &one,
            |mut one, context| {
                let mut buf = [0; 8];
                Pin::new(&mut one).poll_read(context, &mut ReadBuf::new(&mut buf)).is_pending()
            },
            |_| (&other).write_all(b"x").unwrap(),
        );
    }

    /// Polls a read once, and gives it up.
    async fn begin_read(mut stream: &TcpStream) {
        let mut buf = [0; 8];
        poll_fn(|context| {
            let polled = Pin::new(&mut stream).poll_read(context, &mut ReadBuf::new(&mut buf));
            assert!(polled.is_pending());
            Poll::Ready(())
        })
        .await;
    }

    /// Writes a byte after `delay`, and returns what a read of it meanwhile returns. If the OS does
    /// not run the writer in time, the read times out, but not before the stream's timeout has
    /// passed; then the next read gets the byte.
    async fn read_delayed(one: &TcpStream, other: &Arc<TcpStream>, delay: Duration) -> usize {
        let writer = other.clone();
        let writer = trefoil::go(move || {
            trefoil::time::sleep(delay);
            (&*writer).write_all(b"x").unwrap();
        });
        let timeout = one.read_timeout().unwrap().unwrap();
        let n = loop {
            let start = Instant::now();
            match read(one, &mut [0; 8]).await {
                Ok(n) => break n,
                Err(e) => assert_eq!(e.kind(), ErrorKind::TimedOut),
            }
            let elapsed = start.elapsed();
            assert!(elapsed >= timeout, "a timeout of {timeout:?} ended after {elapsed:?}");
        };
        writer.await.unwrap();
        n
    }

    #[test]
    fn the_timeout_of_a_read_that_was_given_up_does_not_end_the_next() {
        everywhere(|place| async move {
            let (one, other) = tcp_pair();
            let other = Arc::new(other);
            one.set_read_timeout(Some(200 * MS)).unwrap();
            begin_read(&one).await;
            // Its timeout ends, and the task is woken for it.
            sleep_async(400 * MS).await;
            assert_eq!(read_delayed(&one, &other, 10 * MS).await, 1, "{place}");
            // The next call has the whole timeout.
            let start = Instant::now();
            assert_eq!(read(&one, &mut [0; 8]).await.unwrap_err().kind(), ErrorKind::TimedOut);
            assert!(start.elapsed() >= 200 * MS, "{place}");
        });
    }

    #[test]
    fn the_timeout_of_a_read_does_not_end_that_of_another_task() {
        everywhere(|place| async move {
            let (one, other) = tcp_pair();
            let (one, other) = (Arc::new(one), Arc::new(other));
            one.set_read_timeout(Some(300 * MS)).unwrap();
            begin_read(&one).await;
            sleep_async(200 * MS).await;
            // Another task begins a read, which takes longer than what is left of the timeout.
            let reader = task::spawn(async move { read_delayed(&one, &other, 200 * MS).await });
            assert_eq!(reader.await.unwrap(), 1, "{place}");
        });
    }

    #[test]
    fn a_new_timeout_replaces_that_of_a_read_that_was_given_up() {
        everywhere(|place| async move {
            let (one, other) = tcp_pair();
            let other = Arc::new(other);
            one.set_read_timeout(Some(20 * MS)).unwrap();
            begin_read(&one).await;
            one.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            assert_eq!(read_delayed(&one, &other, 50 * MS).await, 1, "{place}");
        });
    }

    #[test]
    fn a_read_times_out_though_each_poll_has_another_waker() {
        trefoil::run(|| {
            let (one, _other) = tcp_pair();
            one.set_read_timeout(Some(20 * MS)).unwrap();
            trefoil::block_on(async {
                let mut stream = &one;
                let mut buf = [0; 8];
                let polled = poll_fn(|context| {
                    let waker = context.waker().clone();
                    let waker = Waker::from(Arc::new(Forward(waker)));
                    let mut context = Context::from_waker(&waker);
                    Pin::new(&mut stream).poll_read(&mut context, &mut ReadBuf::new(&mut buf))
                });
                let end = timeout_async(Duration::from_secs(10), polled).await.unwrap();
                assert_eq!(end.unwrap_err().kind(), ErrorKind::TimedOut);
            });
        });
    }

    struct Forward(Waker);

    impl Wake for Forward {
        fn wake(self: Arc<Self>) {
            self.0.wake_by_ref();
        }
    }

    #[test]
    fn shutdown_ends_the_direction() {
        trefoil::run(|| {
            trefoil::block_on(async {
                let (one, other) = tcp_pair();
                let mut half = &one;
                poll_fn(|context| Pin::new(&mut half).poll_shutdown(context)).await.unwrap();
                assert_eq!(other.read_async(&mut [0; 1]).await.unwrap(), 0);
            });
        });
    }
}
