//! Writes: of no bytes, of more than the buffers hold, and what interrupts them.

use crate::common::{MS, child_test, watchdog};
use crate::{
    LARGE, NOTHING, check, eventfd, pattern, read, recv, same_on_both, set, tcp, udp, uneven, write,
};
use std::ffi::c_int;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::Instant;

#[test]
fn write_of_no_bytes_sends_an_empty_datagram() {
    let _w = watchdog();
    let found = same_on_both(|| {
        let mut found = Vec::new();
        let (a, b) = udp();
        b.set_read_timeout(Some(100 * MS)).unwrap();
        found.push((write(&a, &[]), recv(&b, &mut [0; 8], 0)));
        let (c, d) = UnixDatagram::pair().unwrap();
        d.set_read_timeout(Some(100 * MS)).unwrap();
        found.push((write(&c, &[]), recv(&d, &mut [0; 8], 0)));
        // SAFETY: no buffers.
        let none = check(unsafe { libc::writev(a.as_raw_fd(), std::ptr::null(), 0) });
        found.push((none, recv(&b, &mut [0; 8], 0)));
        let (e, _f) = tcp();
        found.push((write(&e, &[]), 0));
        let (_end, pipe) = std::io::pipe().unwrap();
        found.push((write(&pipe, &[]), write(&eventfd(), &[])));
        found
    });
    let invalid = -(libc::EINVAL as isize);
    assert_eq!(found, [(0, 0), (0, 0), (0, NOTHING), (0, 0), (0, invalid)]);
}

fn writev(fd: RawFd, list: &[libc::iovec]) -> isize {
    // SAFETY: the caller's buffers.
    check(unsafe { libc::writev(fd, list.as_ptr(), list.len() as c_int) })
}

fn sendmsg(fd: RawFd, list: &[libc::iovec]) -> isize {
    // SAFETY: the caller's buffers; zeros are a message without a name and control data.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = list.as_ptr().cast_mut();
        message.msg_iovlen = list.len();
        check(libc::sendmsg(fd, &raw const message, 0))
    }
}

/// Writes `LARGE` bytes by one call. The reader receives `taken` bytes and then closes its end.
fn write_large<W: Into<OwnedFd>, R: Read + Send + 'static>(
    (to, mut from): (W, R),
    call: fn(RawFd, &[libc::iovec]) -> isize,
    count: usize,
    taken: usize,
) -> isize {
    let to: OwnedFd = to.into();
    let reader = thread::spawn(move || {
        let expected = pattern();
        let mut found = vec![0; taken];
        from.read_exact(&mut found).unwrap();
        assert!(found == expected[..taken], "the reader received other bytes than were written");
    });
    let bytes = pattern();
    let written = call(to.as_raw_fd(), &uneven(bytes, count));
    drop(to);
    trefoil::blocking(|| reader.join()).unwrap();
    written
}

fn swapped<A, B>((a, b): (A, B)) -> (B, A) {
    (b, a)
}

#[test]
fn large_writes_to_a_blocking_stream_are_complete() {
    let _w = watchdog();
    let found = same_on_both(|| {
        let mut found = Vec::new();
        for count in [1, 3, 100] {
            found.push(write_large(tcp(), writev, count, LARGE));
            found.push(write_large(tcp(), sendmsg, count, LARGE));
            found.push(write_large(UnixStream::pair().unwrap(), writev, count, LARGE));
            found.push(write_large(UnixStream::pair().unwrap(), sendmsg, count, LARGE));
            found.push(write_large(swapped(std::io::pipe().unwrap()), writev, count, LARGE));
        }
        found
    });
    assert_eq!(found, [LARGE as isize; 15]);
}

#[test]
fn large_write_that_fails_returns_what_was_written() {
    let _w = watchdog();
    same_on_both(|| {
        let part = |n: isize| n > 0 && n < LARGE as isize;
        let mut found = Vec::new();
        for call in [writev, sendmsg] {
            // The reader closes its end.
            found.push(part(write_large(UnixStream::pair().unwrap(), call, 3, LARGE / 4)));
            // The peer does not read, and the write has a timeout.
            let (a, _b) = UnixStream::pair().unwrap();
            a.set_write_timeout(Some(30 * MS)).unwrap();
            let bytes = pattern();
            found.push(part(call(a.as_raw_fd(), &uneven(bytes, 3))));
            found.push(call(a.as_raw_fd(), &uneven(bytes, 3)) == NOTHING);
        }
        assert_eq!(found, [true; 6]);
    });
}

#[test]
fn reset_during_a_large_write_is_reported_by_the_next_write() {
    let _w = watchdog();
    let found = same_on_both(|| {
        let mut found = Vec::new();
        for call in [writev, sendmsg] {
            let (a, mut peer) = tcp();
            set(&a, libc::SOL_SOCKET, libc::SO_SNDBUF, 1 << 16);
            set(&peer, libc::SOL_SOCKET, libc::SO_RCVBUF, 1 << 16);
            let reader = thread::spawn(move || {
                peer.read_exact(&mut [0; 1_000]).unwrap();
                // The writer has filled the buffers and waits.
                thread::sleep(50 * MS);
                let linger = libc::linger { l_onoff: 1, l_linger: 0 };
                let (at, len) = ((&raw const linger).cast(), size_of_val(&linger) as u32);
                let (fd, level) = (peer.as_raw_fd(), libc::SOL_SOCKET);
                // SAFETY: a local variable.
                assert_eq!(unsafe { libc::setsockopt(fd, level, libc::SO_LINGER, at, len) }, 0);
            });
            let first = call(a.as_raw_fd(), &uneven(pattern(), 3));
            assert!(first > 0 && first < LARGE as isize, "{first}");
            found.extend([write(&a, b"x"), write(&a, b"y")]);
            trefoil::blocking(|| reader.join()).unwrap();
        }
        found
    });
    let (reset, pipe) = (-(libc::ECONNRESET as isize), -(libc::EPIPE as isize));
    assert_eq!(found, [reset, pipe, reset, pipe]);
}

/// Counts the `MSG_ZEROCOPY` calls that the error queue reports as complete. Waits for the first
/// report, and for more as long as they arrive.
fn zerocopy_ids(fd: &impl AsRawFd) -> u32 {
    let mut ids = 0;
    for tries in 0.. {
        let mut control = [0u64; 16];
        // SAFETY: local buffers; the kernel writes `sock_extended_err` behind the header.
        unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = size_of_val(&control);
            let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
            if libc::recvmsg(fd.as_raw_fd(), &raw mut message, flags) >= 0 {
                let header = libc::CMSG_FIRSTHDR(&raw const message);
                let error =
                    libc::CMSG_DATA(header).cast::<libc::sock_extended_err>().read_unaligned();
                assert_eq!(error.ee_origin, 5, "SO_EE_ORIGIN_ZEROCOPY");
                ids += error.ee_data - error.ee_info + 1;
                continue;
            }
        }
        if tries > 300 || (tries > 10 && ids > 0) {
            break;
        }
        thread::sleep(10 * MS);
    }
    ids
}

#[test]
fn large_send_with_zerocopy_is_one_call() {
    let _w = watchdog();
    let found = same_on_both(|| {
        let mut found = Vec::new();
        for by_message in [false, true] {
            let (a, mut b) = tcp();
            set(&a, libc::SOL_SOCKET, libc::SO_ZEROCOPY, 1);
            set(&a, libc::SOL_SOCKET, libc::SO_SNDBUF, 1 << 16);
            let reader = thread::spawn(move || b.read_exact(&mut vec![0; LARGE]).unwrap());
            let (fd, bytes) = (a.as_raw_fd(), pattern());
            let list = uneven(bytes, 3);
            // SAFETY: buffers that outlive the call; zeros are a message without a name and control
            // data.
            let sent = check(unsafe {
                if by_message {
                    let mut message: libc::msghdr = std::mem::zeroed();
                    (message.msg_iov, message.msg_iovlen) = (list.as_ptr().cast_mut(), list.len());
                    libc::sendmsg(fd, &raw const message, libc::MSG_ZEROCOPY)
                } else {
                    libc::send(fd, bytes.as_ptr().cast(), LARGE, libc::MSG_ZEROCOPY)
                }
            });
            if sent == LARGE as isize {
                trefoil::blocking(|| reader.join()).unwrap();
                found.push((sent, zerocopy_ids(&a)));
            } else {
                found.push((sent, 0));
            }
        }
        found
    });
    // ENOBUFS: the limit of locked memory is smaller than the message.
    if found[0].0 != -(libc::ENOBUFS as isize) {
        assert_eq!(found, [(LARGE as isize, 1); 2]);
    }
}

#[test]
fn short_write_of_an_eventfd_is_final() {
    let _w = watchdog();
    let found = same_on_both(|| {
        let event = eventfd();
        write(&event, &1u64.to_ne_bytes());
        let two = [1u64, 1].map(u64::to_ne_bytes);
        let written = write(&event, two.as_flattened());
        let mut count = [0; 8];
        (written, read(&event, &mut count), u64::from_ne_bytes(count))
    });
    // Newer kernels accept eight bytes only.
    assert!([(8, 8, 2), (-(libc::EINVAL as isize), 8, 1)].contains(&found), "{found:?}");
}

/// The socket that the handler writes to.
static WRITES_TO: AtomicI32 = AtomicI32::new(-1);
/// What the handler's `write` returned.
static WRITTEN: AtomicI32 = AtomicI32::new(0);

extern "C" fn write_large_in_handler(_: c_int) {
    let fd = WRITES_TO.load(SeqCst);
    // SAFETY: the test's socket, and bytes that were initialised before.
    let n = unsafe { libc::write(fd, pattern().as_ptr().cast(), LARGE) };
    WRITTEN.store(n as i32, SeqCst);
}

#[test]
fn timeout_of_a_write_in_a_handler_counts_once() {
    child_test!();
    pattern();
    // A goroutine does not park in a handler: the write blocks the thread.
    // SAFETY: a handler that calls nothing but `write`.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = write_large_in_handler as *const () as usize;
        action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()), 0);
    }
    same_on_both(|| {
        let (a, mut b) = tcp();
        set(&a, libc::SOL_SOCKET, libc::SO_SNDBUF, 1 << 16);
        set(&b, libc::SOL_SOCKET, libc::SO_RCVBUF, 1 << 16);
        a.set_write_timeout(Some(300 * MS)).unwrap();
        WRITES_TO.store(a.as_raw_fd(), SeqCst);
        let over = Arc::new(AtomicUsize::new(0));
        let theirs = over.clone();
        let reader = thread::spawn(move || {
            // Frees some room now and then, but never enough.
            for _ in 0..15 {
                thread::sleep(100 * MS);
                if theirs.load(SeqCst) != 0 {
                    break;
                }
                b.read_exact(&mut [0; 100_000]).unwrap();
            }
        });
        let start = Instant::now();
        // SAFETY: the handler of this test.
        unsafe { libc::raise(libc::SIGUSR1) };
        let took = start.elapsed();
        over.store(1, SeqCst);
        let written = WRITTEN.load(SeqCst);
        assert!(written > 0 && written < LARGE as i32, "{written}");
        assert!((250 * MS..900 * MS).contains(&took), "{took:?}");
        trefoil::blocking(|| reader.join()).unwrap();
    });
}

#[test]
fn descriptors_travel_once_with_a_large_message() {
    let _w = watchdog();
    let found = same_on_both(|| {
        let (a, b) = UnixStream::pair().unwrap();
        let reader = thread::spawn(move || {
            let (mut bytes, mut rights, mut total) = (vec![0u8; 1 << 16], 0, 0);
            loop {
                let mut control = [0u64; 32];
                let mut one =
                    libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
                // SAFETY: local buffers; a received descriptor is closed.
                unsafe {
                    let mut message: libc::msghdr = std::mem::zeroed();
                    (message.msg_iov, message.msg_iovlen) = (&raw mut one, 1);
                    message.msg_control = control.as_mut_ptr().cast();
                    message.msg_controllen = size_of_val(&control);
                    let n = libc::recvmsg(b.as_raw_fd(), &raw mut message, 0);
                    let header = libc::CMSG_FIRSTHDR(&raw const message);
                    if !header.is_null() {
                        rights += 1;
                        libc::close(libc::CMSG_DATA(header).cast::<c_int>().read_unaligned());
                    }
                    match n {
                        1.. => total += n,
                        _ => return (total, rights),
                    }
                }
            }
        });
        let bytes = pattern();
        let event = eventfd();
        let mut control = [0u64; 4];
        let list = uneven(bytes, 5);
        // SAFETY: as above.
        let sent = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (list.as_ptr().cast_mut(), list.len());
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(4) as usize;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(4) as usize;
            libc::CMSG_DATA(header).cast::<c_int>().write_unaligned(event.as_raw_fd());
            check(libc::sendmsg(a.as_raw_fd(), &raw const message, 0))
        };
        drop(a);
        (sent, trefoil::blocking(|| reader.join()).unwrap())
    });
    assert_eq!(found, (LARGE as isize, (LARGE as isize, 1)));
}
