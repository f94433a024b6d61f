//! Waits of datagram sockets that `poll` reports as ready: they must not spin.

use crate::common::{MS, child_test, cpu_time, runtime};
use crate::{NOTHING, check, recv, same_on_both, set, udp};
use std::ffi::c_void;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixDatagram};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::Instant;

/// Returns a datagram socket whose queue is full, and its address, which is unique.
fn full_receiver(name: &str) -> (UnixDatagram, UnixAddr) {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, SeqCst);
    let name = format!("trefoil-test-{name}-{}-{number}", std::process::id());
    let addr = UnixAddr::from_abstract_name(name).unwrap();
    let receiver = UnixDatagram::bind_addr(&addr).unwrap();
    let filler = UnixDatagram::unbound().unwrap();
    filler.set_nonblocking(true).unwrap();
    while filler.send_to_addr(b"full", &addr).is_ok() {}
    (receiver, addr)
}

#[test]
fn sending_to_a_full_peer_uses_no_cpu() {
    child_test!();
    runtime(2).run(|| {
        let (receiver, addr) = full_receiver("cpu");
        let before = cpu_time();
        let senders: Vec<_> = (0..6)
            .map(|i| {
                let addr = addr.clone();
                trefoil::go(move || {
                    let bytes = [i; 3];
                    let socket = UnixDatagram::unbound().unwrap();
                    if i < 2 {
                        return socket.send_to_addr(&bytes, &addr).unwrap();
                    }
                    if i == 3 {
                        let socket = trefoil::net::UnixDatagram::unbound().unwrap();
                        return socket.send_to_addr(&bytes, &addr).unwrap();
                    }
                    // For a connected socket `poll` reports when the queue has room.
                    if i == 4 {
                        socket.connect_addr(&addr).unwrap();
                        return socket.send(&bytes).unwrap();
                    }
                    if i == 5 {
                        let socket = trefoil::net::UnixDatagram::unbound().unwrap();
                        socket.connect_addr(&addr).unwrap();
                        return socket.send(&bytes).unwrap();
                    }
                    // The same by `sendmsg`.
                    let name = addr.as_abstract_name().unwrap();
                    // SAFETY: local variables.
                    unsafe {
                        let mut to: libc::sockaddr_un = std::mem::zeroed();
                        to.sun_family = libc::AF_UNIX as u16;
                        for (to, from) in to.sun_path[1..].iter_mut().zip(name) {
                            *to = *from as libc::c_char;
                        }
                        let mut one = libc::iovec {
                            iov_base: bytes.as_ptr() as *mut c_void,
                            iov_len: bytes.len(),
                        };
                        let mut message: libc::msghdr = std::mem::zeroed();
                        message.msg_name = (&raw mut to).cast();
                        message.msg_namelen = (3 + name.len()) as u32;
                        (message.msg_iov, message.msg_iovlen) = (&raw mut one, 1);
                        check(libc::sendmsg(socket.as_raw_fd(), &raw const message, 0)) as usize
                    }
                })
            })
            .collect();
        // A timeout ends the wait.
        let limited = UnixDatagram::unbound().unwrap();
        limited.set_write_timeout(Some(50 * MS)).unwrap();
        let start = Instant::now();
        let e = limited.send_to_addr(b"late", &addr).unwrap_err();
        assert_eq!(e.raw_os_error(), Some(libc::EAGAIN));
        assert!(start.elapsed() >= 50 * MS);
        thread::sleep(200 * MS);
        let used = cpu_time() - before;
        assert!(used < 100 * MS, "{used:?} of CPU time while the queue was full");
        // All senders proceed when the queue has room, and each message arrives once.
        let mut arrived = 0;
        while arrived < 6 {
            arrived += usize::from(receiver.recv(&mut [0; 8]).unwrap() == 3);
        }
        for sender in senders {
            assert_eq!(sender.join().unwrap(), 3);
        }
        receiver.set_nonblocking(true).unwrap();
        while let Ok(n) = receiver.recv(&mut [0; 8]) {
            assert_ne!(n, 3, "a message arrived twice");
        }
    });
}

#[test]
fn a_read_uses_no_cpu_while_the_error_queue_holds_a_message() {
    child_test!();
    let found = same_on_both(|| {
        let (a, b) = udp();
        let peer = b.local_addr().unwrap();
        drop(b);
        set(&a, libc::SOL_IP, libc::IP_RECVERR, 1);
        a.send(b"to a closed port").unwrap();
        thread::sleep(10 * MS);
        // The error is returned once; its message stays in the error queue, and `poll` reports
        // that.
        let refused = recv(&a, &mut [0; 8], 0);
        a.set_read_timeout(Some(200 * MS)).unwrap();
        let before = cpu_time();
        let late = recv(&a, &mut [0; 8], 0);
        let used = cpu_time() - before;
        assert!(used < 80 * MS, "{used:?} of CPU time in 200 ms of waiting");
        a.set_read_timeout(None).unwrap();
        let receiver = a.local_addr().unwrap();
        let sender = thread::spawn(move || {
            thread::sleep(20 * MS);
            UdpSocket::bind(peer).unwrap().send_to(b"hello", receiver).unwrap()
        });
        let found = (refused, late, recv(&a, &mut [0; 8], 0));
        assert_eq!(trefoil::blocking(|| sender.join()).unwrap(), 5);
        found
    });
    assert_eq!(found, (-(libc::ECONNREFUSED as isize), NOTHING, 5));
}
