//! Reads: of no bytes, with `MSG_WAITALL`, with `SO_RCVLOWAT`.

use crate::common::{MS, watchdog};
use crate::{NOTHING, eventfd, read, recv, same_on_both, set, tcp, udp};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::thread;

#[test]
fn read_of_no_bytes_returns_at_once() {
    let _w = watchdog();
    let found = same_on_both(|| {
        // With timeouts, a call that waits returns something else than one that does not.
        let (a, _b) = tcp();
        a.set_read_timeout(Some(300 * MS)).unwrap();
        let (c, d) = udp();
        d.set_read_timeout(Some(300 * MS)).unwrap();
        let (pipe, _end) = std::io::pipe().unwrap();
        let idle = [read(&a, &mut []), read(&d, &mut []), read(&pipe, &mut [])];
        c.send(b"abc").unwrap();
        let waiting = [read(&d, &mut []), read(&d, &mut [0; 8])];
        (idle, waiting, read(&eventfd(), &mut []))
    });
    let invalid = -(libc::EINVAL as isize);
    assert_eq!(found, ([0, 0, 0], [0, 3], invalid));
}

/// Starts a thread that sends the pieces, one every 20 ms. The stream stays open as long as the
/// caller keeps `to`.
fn send_late(to: &impl AsFd, pieces: &'static [&'static [u8]]) {
    let mut to = std::fs::File::from(to.as_fd().try_clone_to_owned().unwrap());
    thread::spawn(move || {
        for piece in pieces {
            thread::sleep(20 * MS);
            to.write_all(piece).unwrap();
        }
    });
}

#[test]
fn recv_with_waitall_waits_for_all() {
    let _w = watchdog();
    let found = same_on_both(|| {
        let (a, b) = tcp();
        send_late(&a, &[b"abc", b"defgh", b"ij"]);
        let all = recv(&b, &mut [0; 8], libc::MSG_WAITALL);
        let (c, d) = UnixStream::pair().unwrap();
        send_late(&c, &[b"abc", b"defgh", b"ij"]);
        let unix = recv(&d, &mut [0; 10], libc::MSG_WAITALL);
        d.set_read_timeout(Some(30 * MS)).unwrap();
        (all, unix, recv(&d, &mut [0; 10], libc::MSG_WAITALL))
    });
    assert_eq!(found, (8, 10, NOTHING));
}

#[test]
fn a_read_waits_for_so_rcvlowat_bytes() {
    let _w = watchdog();
    let found = same_on_both(|| {
        let lowat = |fd: &dyn Fn() -> RawFd, bytes| {
            struct Raw(RawFd);
            impl AsRawFd for Raw {
                fn as_raw_fd(&self) -> RawFd {
                    self.0
                }
            }
            set(&Raw(fd()), libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes);
        };
        let mut found = Vec::new();
        let (a, mut b) = tcp();
        lowat(&|| b.as_raw_fd(), 8);
        // The kernel wakes a reader that has read less than the mark only for a whole mark more.
        send_late(&a, &[b"abc", b"defghijk", b"lmnopqrs"]);
        found.push(read(&b, &mut [0; 11]));
        found.push(recv(&b, &mut [0; 100], 0));
        let (c, d) = UnixStream::pair().unwrap();
        lowat(&|| d.as_raw_fd(), 4);
        send_late(&c, &[b"abc", b"defg", b"hi", b"jk"]);
        found.push(recv(&d, &mut [0; 7], 0));
        found.push(b.read_vectored(&mut []).unwrap() as isize);
        let mut bytes = [[0u8; 3]; 2];
        let [one, two] = &mut bytes;
        let mut both = [std::io::IoSliceMut::new(one), std::io::IoSliceMut::new(two)];
        found.push((&d).read_vectored(&mut both).unwrap() as isize);
        // The buffer is smaller than the mark.
        let (mut e, f) = tcp();
        lowat(&|| f.as_raw_fd(), 100);
        e.write_all(b"hello").unwrap();
        found.push(read(&f, &mut [0; 5]));
        // A timeout; a call that does not wait; the end of the stream.
        e.write_all(b"abc").unwrap();
        f.set_read_timeout(Some(50 * MS)).unwrap();
        found.push(read(&f, &mut [0; 100]));
        found.push(read(&f, &mut [0; 100]));
        f.set_read_timeout(None).unwrap();
        e.write_all(b"abcd").unwrap();
        thread::sleep(10 * MS);
        found.push(recv(&f, &mut [0; 100], libc::MSG_DONTWAIT));
        send_late(&e, &[b"xy"]);
        drop(e);
        found.push(read(&f, &mut [0; 100]));
        found
    });
    assert_eq!(found, [11, 8, 7, 0, 4, 5, 3, NOTHING, 4, 2]);
}
