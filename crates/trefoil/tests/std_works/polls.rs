//! `poll`, `select`, `epoll`, eventfd and pipes on goroutines.

use super::common::{MS, child_test, is_emulated, watchdog};
use super::{every_pair, everywhere, is_blocking};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Instant;

fn poll(list: &mut [(RawFd, i16)], ms: i32) -> (i32, Vec<i16>) {
    let entry = |&(fd, events): &(RawFd, i16)| libc::pollfd { fd, events, revents: 0 };
    let mut all: Vec<_> = list.iter().map(entry).collect();
    // SAFETY: a local list.
    let n = unsafe { libc::poll(all.as_mut_ptr(), all.len() as u64, ms) };
    (n, all.iter().map(|e| e.revents).collect())
}

#[test]
fn poll_and_ppoll_report_events_and_time_out() {
    let _w = watchdog();
    everywhere(|| {
        const IN: i16 = libc::POLLIN;
        const OUT: i16 = libc::POLLOUT;
        let (a, mut b) = UnixStream::pair().unwrap();
        let (c, mut d) = UnixStream::pair().unwrap();
        let (fa, fc) = (a.as_raw_fd(), c.as_raw_fd());
        // Timeouts.
        for list in
            [&mut [][..], &mut [(fa, IN)], &mut [(fa, IN), (fc, IN)], &mut [(-1, IN), (fa, IN)]]
        {
            let start = Instant::now();
            assert_eq!(poll(list, 10).0, 0);
            assert!(start.elapsed() >= 10 * MS);
            assert_eq!(poll(list, 0).0, 0);
        }
        assert_eq!(poll(&mut [(fa, IN | OUT)], -1), (1, vec![OUT]));
        // One of several; then the same descriptor twice, of which the second entry becomes ready.
        let (go_on, may_go_on) = channel();
        let late = trefoil::go(move || {
            thread::sleep(3 * MS);
            d.write_all(b"d").unwrap();
            may_go_on.recv().unwrap();
            thread::sleep(3 * MS);
            b.write_all(b"b").unwrap();
            (b, d)
        });
        assert_eq!(poll(&mut [(fa, IN), (fc, IN)], -1), (1, vec![0, IN]));
        go_on.send(()).unwrap();
        assert_eq!(poll(&mut [(fa, libc::POLLPRI), (fa, IN)], -1), (1, vec![0, IN]));
        assert_eq!(poll(&mut [(fa, IN)], 5_000), (1, vec![IN]));
        let (b, d) = late.join().unwrap();
        // Hang-ups, and a number that is no descriptor.
        drop((b, d));
        assert_eq!(poll(&mut [(fa, 0)], -1), (1, vec![libc::POLLHUP]));
        assert_eq!(poll(&mut [(1 << 28, IN)], -1), (1, vec![libc::POLLNVAL]));
        let (e, _f) = UnixStream::pair().unwrap();
        let mut one = libc::pollfd { fd: e.as_raw_fd(), events: IN, revents: 0 };
        for time in [
            libc::timespec { tv_sec: 0, tv_nsec: 5_000_000 },
            libc::timespec { tv_sec: 0, tv_nsec: 0 },
        ] {
            // SAFETY: local variables.
            let n = unsafe { libc::ppoll(&raw mut one, 1, &raw const time, std::ptr::null()) };
            assert_eq!(n, 0);
        }
    });
}

/// Calls `select` with three sets. Returns its result, the descriptors that are left in each set,
/// and the milliseconds that are left.
fn select(sets: [&[RawFd]; 3], ms: Option<i64>) -> (i32, [Vec<RawFd>; 3], i64) {
    let mut raw = sets.map(|fds| {
        // SAFETY: a set is plain bits, and these descriptors are small.
        unsafe {
            let mut set: libc::fd_set = std::mem::zeroed();
            fds.iter().for_each(|fd| libc::FD_SET(*fd, &raw mut set));
            set
        }
    });
    let mut time =
        libc::timeval { tv_sec: ms.unwrap_or(0) / 1_000, tv_usec: ms.unwrap_or(0) % 1_000 * 1_000 };
    let at = if ms.is_some() { &raw mut time } else { std::ptr::null_mut() };
    let most = sets.iter().flat_map(|fds| fds.iter()).max().map_or(0, |fd| fd + 1);
    let [r, w, e] = &mut raw;
    // SAFETY: local sets and a local time.
    let n = unsafe { libc::select(most, r, w, e, at) };
    // SAFETY: as above.
    let is_in = |fd: RawFd, set: &libc::fd_set| unsafe { libc::FD_ISSET(fd, set) };
    let left = std::array::from_fn(|i| {
        sets[i].iter().copied().filter(|fd| n >= 0 && is_in(*fd, &raw[i])).collect()
    });
    (n, left, time.tv_sec * 1_000 + time.tv_usec / 1_000)
}

#[test]
fn select_and_pselect_report_sets_times_and_errors() {
    // In a child, because a set has 1024 bits and the other tests have many descriptors.
    child_test!();
    everywhere(|| {
        let (mut a, b) = UnixStream::pair().unwrap();
        let (c, mut d) = UnixStream::pair().unwrap();
        let [fb, fc] = [b.as_raw_fd(), c.as_raw_fd()];
        // A timeout leaves empty sets and no time.
        let start = Instant::now();
        let (n, left, time) = select([&[fb, fc], &[], &[fb]], Some(20));
        assert_eq!((n, left, time), (0, [vec![], vec![], vec![]], 0));
        assert!(start.elapsed() >= 20 * MS);
        assert_eq!(select([&[fb], &[], &[]], Some(0)).0, 0);
        // Without descriptors it is a sleep.
        let start = Instant::now();
        assert_eq!(select([&[], &[], &[]], Some(10)).0, 0);
        assert!(start.elapsed() >= 10 * MS);
        // One of two becomes ready by a write of another goroutine, which needs the only P
        // meanwhile.
        let writer = trefoil::go(move || {
            thread::sleep(10 * MS);
            d.write_all(b"x").unwrap();
            d
        });
        let (n, left, time) = select([&[fb, fc], &[], &[]], Some(10_000));
        assert_eq!((n, left), (1, [vec![fc], vec![], vec![]]));
        assert!((1_000..10_000).contains(&time), "{time}");
        drop(writer.join().unwrap());
        // Both directions of a descriptor count as two.
        a.write_all(b"y").unwrap();
        assert_eq!(select([&[fb, fc], &[fb], &[]], None).0, 3);
        // A number that is no descriptor.
        let gone = 900;
        assert_eq!(select([&[gone], &[], &[]], None).0, -1);
        assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EBADF));
        // A hang-up is no exceptional condition: the call times out.
        let start = Instant::now();
        let (e, f) = UnixStream::pair().unwrap();
        drop(f);
        assert_eq!(select([&[], &[], &[e.as_raw_fd()]], Some(10)).0, 0);
        assert!(start.elapsed() >= 10 * MS);
        // SAFETY: null for no set; the others are local.
        unsafe {
            let null = std::ptr::null_mut;
            let mut odd = libc::timeval { tv_sec: -1, tv_usec: 0 };
            assert_eq!(libc::select(0, null(), null(), null(), &raw mut odd), -1);
            assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EINVAL));
            let odd = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000_000 };
            let n = libc::ppoll(std::ptr::null_mut(), 0, &raw const odd, std::ptr::null());
            assert_eq!(n, -1);
            assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EINVAL));
            // Beyond the size of a set the kernel checks only numbers that may be descriptors. The
            // second call passes the same set twice.
            let mut sets: [libc::fd_set; 2] = std::mem::zeroed();
            libc::FD_SET(fb, &raw mut sets[0]);
            libc::FD_SET(1000, &raw mut sets[1]);
            let mut time = libc::timeval { tv_sec: 0, tv_usec: 0 };
            let all = &raw mut sets[0];
            // qemu-user refuses more numbers than a set has.
            let numbers = if is_emulated() { fb + 1 } else { 1 << 16 };
            assert_eq!(libc::select(numbers, all, null(), null(), &raw mut time), 1);
            assert_eq!(libc::select(fb + 1, all, all, null(), &raw mut time), 2);
            assert!(libc::FD_ISSET(fb, all) && libc::FD_ISSET(1000, &raw const sets[1]));
            let time = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
            let mut set: libc::fd_set = std::mem::zeroed();
            libc::FD_SET(fb, &raw mut set);
            let mask = std::ptr::null();
            let n = libc::pselect(fb + 1, &raw mut set, null(), null(), &raw const time, mask);
            assert_eq!((n, libc::FD_ISSET(fb, &raw const set)), (1, true));
            let mut mask: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut mask);
            let n = libc::pselect(0, null(), null(), null(), &raw const time, &raw const mask);
            assert_eq!(n, 0);
        }
    });
}

#[test]
fn epoll_wait_and_reads_of_an_eventfd_wait_for_writes() {
    let _w = watchdog();
    every_pair(|a, b| {
        // SAFETY: returns new descriptors, which have no other owner.
        let (epoll, event) = unsafe {
            let epoll = OwnedFd::from_raw_fd(libc::epoll_create1(libc::EPOLL_CLOEXEC));
            (epoll, OwnedFd::from_raw_fd(libc::eventfd(0, libc::EFD_CLOEXEC)))
        };
        let mut wanted = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 77 };
        let mut found = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: local descriptors and events.
        unsafe {
            let add = libc::EPOLL_CTL_ADD;
            let (e, f) = (epoll.as_raw_fd(), event.as_raw_fd());
            assert_eq!(libc::epoll_ctl(e, add, f, &raw mut wanted), 0);
            let start = Instant::now();
            assert_eq!(libc::epoll_wait(e, &raw mut found, 1, 10), 0);
            assert!(start.elapsed() >= 10 * MS);
        }
        let event = Arc::new(event);
        let (send, told) = channel();
        let e = event.clone();
        let waiter = a.start(move || {
            let mut found = libc::epoll_event { events: 0, u64: 0 };
            let (mut total, mut buf) = (0, [0u8; 8]);
            while total < 30 {
                // SAFETY: local descriptors and events, and a buffer of eight bytes.
                unsafe {
                    assert_eq!(libc::epoll_wait(epoll.as_raw_fd(), &raw mut found, 1, -1), 1);
                    assert_eq!({ found.u64 }, 77);
                    assert_eq!(libc::read(e.as_raw_fd(), buf.as_mut_ptr().cast(), 8), 8);
                }
                total += u64::from_ne_bytes(buf);
            }
            // The same without epoll.
            send.send(()).unwrap();
            // SAFETY: a buffer of eight bytes.
            assert_eq!(unsafe { libc::read(e.as_raw_fd(), buf.as_mut_ptr().cast(), 8) }, 8);
            assert!(is_blocking(&*e));
            total
        });
        let writer = b.start(move || {
            let put = |n: u64| {
                // SAFETY: a buffer of eight bytes.
                assert_eq!(unsafe { libc::write(event.as_raw_fd(), (&raw const n).cast(), 8) }, 8);
            };
            for _ in 0..10 {
                put(3);
                thread::sleep(MS / 4);
            }
            told.recv().unwrap();
            thread::sleep(2 * MS);
            put(1);
        });
        assert_eq!(waiter.join(), 30);
        writer.join();
    });
}

#[test]
fn std_pipes_transfer_more_than_they_hold() {
    let _w = watchdog();
    every_pair(|a, b| {
        let (mut reader, mut writer) = io::pipe().unwrap();
        let data: Vec<u8> = (0..1_000_000usize).map(|i| (i % 251) as u8).collect();
        let d = data.clone();
        let w = a.start(move || {
            writer.write_all(&d).unwrap();
            assert!(is_blocking(&writer));
        });
        let r = b.start(move || {
            let mut all = Vec::new();
            reader.read_to_end(&mut all).unwrap();
            assert!(is_blocking(&reader));
            all
        });
        w.join();
        assert!(r.join() == data);
    });
}
