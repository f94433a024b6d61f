//! `poll` on goroutines.

use crate::common::{MS, child_test, cpu_time, raise_fd_limit, runtime, tasks, watchdog};
use crate::{BUSY, check, eventfd, read, same_on_both, tcp, write};
use std::ffi::c_int;
use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

#[test]
fn poll_of_own_and_shared_descriptors_needs_no_threads() {
    child_test!();
    const GOROUTINES: usize = 1_500;
    assert!(raise_fd_limit() > 3 * GOROUTINES as u64);
    runtime(2).run(|| {
        let shared = Arc::new(eventfd());
        let own: Vec<_> = (0..GOROUTINES).map(|_| Arc::new(eventfd())).collect();
        let waiting = Arc::new(AtomicUsize::new(0));
        let goroutines: Vec<_> = own
            .iter()
            .map(|own| {
                let (own, shared, waiting) = (own.clone(), shared.clone(), waiting.clone());
                trefoil::go(move || {
                    let entry = |fd: &OwnedFd| libc::pollfd {
                        fd: fd.as_raw_fd(),
                        events: libc::POLLIN,
                        revents: 0,
                    };
                    let mut list = [entry(&own), entry(&shared)];
                    let mut poll = |ms| {
                        // SAFETY: a local list.
                        let n = unsafe { libc::poll(list.as_mut_ptr(), 2, ms) };
                        (n, list[0].revents, list[1].revents)
                    };
                    assert_eq!(poll(1), (0, 0, 0));
                    waiting.fetch_add(1, SeqCst);
                    assert_eq!(poll(-1), (1, libc::POLLIN, 0));
                    assert_eq!(read(&*own, &mut [0; 8]), 8);
                    waiting.fetch_add(1, SeqCst);
                    assert_eq!(poll(-1), (1, 0, libc::POLLIN));
                })
            })
            .collect();
        let all_wait = |times| {
            let start = Instant::now();
            while waiting.load(SeqCst) != times * GOROUTINES {
                assert!(start.elapsed() < Duration::from_secs(20), "{waiting:?}");
                thread::sleep(MS);
            }
            thread::sleep(50 * MS);
            let threads = tasks().len();
            assert!(threads < 40, "{threads} threads");
        };
        all_wait(1);
        for own in &own {
            assert_eq!(write(&**own, &1u64.to_ne_bytes()), 8);
        }
        all_wait(2);
        assert_eq!(write(&*shared, &1u64.to_ne_bytes()), 8);
        for goroutine in goroutines {
            goroutine.join().unwrap();
        }
    });
}

#[test]
fn poll_for_a_hang_up_uses_no_cpu_while_data_waits() {
    child_test!();
    runtime(2).run(|| {
        let (a, mut b) = tcp();
        let (c, _d) = tcp();
        b.write_all(b"hello").unwrap();
        let before = cpu_time();
        let poll = |list: &mut [libc::pollfd], ms| {
            // SAFETY: the caller's list.
            let n = unsafe { libc::poll(list.as_mut_ptr(), list.len() as u64, ms) };
            (n, list[0].revents)
        };
        let one = |fd: &TcpStream, events| libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
        for events in [libc::POLLRDHUP, 0, libc::POLLPRI] {
            assert_eq!(poll(&mut [one(&a, events)], 100), (0, 0));
            assert_eq!(poll(&mut [one(&a, events), one(&c, libc::POLLIN)], 100), (0, 0));
        }
        let used = cpu_time() - before;
        assert!(used < 150 * MS, "{used:?} of CPU time in 600 ms of waiting");
        let late = trefoil::go(move || {
            thread::sleep(20 * MS);
            b.shutdown(Shutdown::Write).unwrap();
            b
        });
        assert_eq!(poll(&mut [one(&a, libc::POLLRDHUP)], 5_000), (1, libc::POLLRDHUP));
        drop(late.join().unwrap());
    });
}

#[test]
fn poll_reports_a_descriptor_that_epoll_ctl_refuses() {
    let _w = watchdog();
    let found = same_on_both(|| {
        let event = eventfd();
        let entry = |fd: RawFd, events| libc::pollfd { fd, events, revents: 0 };
        // Epolls nested as deeply as the kernel allows: the last one fits into no other.
        let mut chain = vec![event.as_raw_fd()];
        loop {
            // SAFETY: local descriptors and a local event.
            unsafe {
                let outer = libc::epoll_create1(libc::EPOLL_CLOEXEC);
                let mut wanted = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
                let inner = *chain.last().unwrap();
                let rc = libc::epoll_ctl(outer, libc::EPOLL_CTL_ADD, inner, &raw mut wanted);
                if rc != 0 {
                    libc::close(outer);
                    break;
                }
                chain.push(outer);
            }
        }
        let deepest = *chain.last().unwrap();
        let (other, _end) = std::io::pipe().unwrap();
        let mut found = Vec::new();
        for more in [0, libc::POLLPRI] {
            let late = event.try_clone().unwrap();
            let writer = thread::spawn(move || {
                thread::sleep(20 * MS);
                write(&late, &1u64.to_ne_bytes())
            });
            let mut list =
                [entry(deepest, libc::POLLIN | more), entry(other.as_raw_fd(), libc::POLLIN)];
            // SAFETY: a local list.
            let n = unsafe { libc::poll(list.as_mut_ptr(), 2, 5_000) };
            found.push((n, list[0].revents));
            assert_eq!(trefoil::blocking(|| writer.join()).unwrap(), 8);
            assert_eq!(read(&event, &mut [0; 8]), 8);
        }
        // SAFETY: descriptors that the loop above created.
        chain[1..].iter().for_each(|fd| unsafe { _ = libc::close(*fd) });
        found
    });
    assert_eq!(found, [(1, libc::POLLIN); 2]);
}

extern "C" fn do_nothing(_: c_int) {}

#[test]
fn a_signal_does_not_end_a_poll_on_a_goroutine() {
    child_test!();
    // As for preemption, a signal is sent to the thread on which a goroutine runs.
    // SAFETY: an async-signal-safe handler.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = do_nothing as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        assert_eq!(libc::sigaction(libc::SIGUSR2, &raw const action, std::ptr::null_mut()), 0);
    }
    let over = Arc::new(AtomicUsize::new(0));
    let theirs = over.clone();
    let sender = thread::spawn(move || {
        while theirs.load(SeqCst) == 0 {
            let thread = BUSY.load(SeqCst);
            // SAFETY: signals a thread of this process, if it still exists.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, libc::SIGUSR2) };
        }
    });
    runtime(2).run(|| {
        let (one, other) = (eventfd(), eventfd());
        let entry =
            |fd: &OwnedFd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let mut list = [entry(&one), entry(&other)];
        for i in 0..20_000 {
            // SAFETY: no arguments; a local list.
            unsafe {
                BUSY.store(libc::syscall(libc::SYS_gettid) as i32, SeqCst);
                let ms = i32::from(i % 1_000 == 0);
                assert_eq!(check(libc::poll(list.as_mut_ptr(), 2, ms) as isize), 0);
            }
        }
    });
    over.store(1, SeqCst);
    sender.join().unwrap();
}
