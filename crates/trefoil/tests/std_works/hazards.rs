//! Forks, signal handlers and panics among goroutines.

use super::common::{MS, child_test, is_emulated, runtime};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::Instant;

#[test]
fn a_child_forked_on_a_goroutine_may_close_sleep_and_write() {
    child_test!();
    runtime(2).run(|| {
        // A goroutine waits for a descriptor that the child closes; another one keeps locks busy.
        let (x, mut y) = UnixStream::pair().unwrap();
        let waiter = trefoil::go(move || {
            let mut buf = [0; 2];
            y.read_exact(&mut buf).unwrap();
            buf
        });
        let stop = Arc::new(AtomicBool::new(false));
        let s = stop.clone();
        let load = trefoil::go(move || {
            while !s.load(SeqCst) {
                drop(vec![1; 1000]);
                thread::yield_now();
            }
        });
        for _ in 0..10 {
            let (mut reader, writer) = io::pipe().unwrap();
            let fd = writer.as_raw_fd();
            // SAFETY: the child makes async-signal-safe calls only.
            unsafe {
                let pid = libc::fork();
                if pid == 0 {
                    for other in 3..200 {
                        if other != fd {
                            libc::close(other);
                        }
                    }
                    libc::usleep(100);
                    libc::sched_yield();
                    libc::write(fd, b"from the child".as_ptr().cast(), 14);
                    libc::_exit(7);
                }
                drop(writer);
                let mut text = String::new();
                reader.read_to_string(&mut text).unwrap();
                assert_eq!(text, "from the child");
                let mut status = 0;
                assert_eq!(libc::waitpid(pid, &raw mut status, 0), pid);
                assert_eq!(libc::WEXITSTATUS(status), 7);
            }
        }
        stop.store(true, SeqCst);
        load.join().unwrap();
        (&x).write_all(b"ok").unwrap();
        assert_eq!(&waiter.join().unwrap(), b"ok");
    });
}

static HANDLED: AtomicUsize = AtomicUsize::new(0);
static HANDLER_FD: AtomicI32 = AtomicI32::new(-1);

extern "C" fn on_usr1(_: i32) {
    HANDLED.fetch_add(1, SeqCst);
    // SAFETY: writes one byte; errno is restored.
    unsafe {
        let errno = *libc::__errno_location();
        libc::write(HANDLER_FD.load(SeqCst), b".".as_ptr().cast(), 1);
        *libc::__errno_location() = errno;
    }
}

#[test]
fn a_handler_that_writes_to_a_pipe_disturbs_no_goroutine() {
    child_test!();
    runtime(2).run(|| {
        // The handler must not park if the pipe is full. The reader below makes room.
        let (mut dots, pipe) = io::pipe().unwrap();
        HANDLER_FD.store(pipe.as_raw_fd(), SeqCst);
        // SAFETY: a handler that makes one call.
        unsafe { libc::signal(libc::SIGUSR1, on_usr1 as *const () as libc::sighandler_t) };
        let stop = Arc::new(AtomicBool::new(false));
        let pairs: Vec<_> = (0..20)
            .map(|_| {
                let (mut x, mut y) = UnixStream::pair().unwrap();
                let s = stop.clone();
                let echo = trefoil::go(move || {
                    let mut buf = [0; 10];
                    while y.read_exact(&mut buf).is_ok() {
                        y.write_all(&buf).unwrap();
                    }
                });
                let asks = trefoil::go(move || {
                    let (mut buf, mut n) = ([0; 10], 0u64);
                    while !s.load(SeqCst) {
                        x.write_all(&[n as u8; 10]).unwrap();
                        x.read_exact(&mut buf).unwrap();
                        assert_eq!(buf, [n as u8; 10]);
                        n += 1;
                    }
                    n
                });
                (echo, asks)
            })
            .collect();
        let reader = thread::spawn(move || {
            let mut n = 0;
            let mut buf = [0; 1000];
            loop {
                match dots.read(&mut buf).unwrap() {
                    0 => return n,
                    more => n += more,
                }
            }
        });
        let start = Instant::now();
        let mut sent = 0;
        while start.elapsed() < 300 * MS {
            // SAFETY: sends a signal to this process.
            unsafe { libc::kill(libc::getpid(), libc::SIGUSR1) };
            sent += 1;
            thread::sleep(MS / 4);
        }
        stop.store(true, SeqCst);
        let turns: u64 = pairs
            .into_iter()
            .map(|(echo, asks)| {
                let n = asks.join().unwrap();
                echo.join().unwrap();
                n
            })
            .sum();
        // SAFETY: as above.
        unsafe { libc::signal(libc::SIGUSR1, libc::SIG_IGN) };
        drop(pipe);
        let n = trefoil::blocking(|| reader.join().unwrap());
        let turns_min = if is_emulated() { 1 } else { 100 };
        assert!(
            n > 0 && n <= sent && HANDLED.load(SeqCst) == n && turns > turns_min,
            "{n} bytes for {sent} signals, {turns} turns"
        );
    });
}

#[test]
fn lines_that_many_goroutines_print_stay_whole() {
    child_test!(|child| {
        let out = child.output();
        assert!(out.status.success(), "{out:?}");
        let (lines, errors) =
            (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        let whole = |l: &&str| l.starts_with("line ") && l.ends_with(" of all");
        // The harness's own output may share a line with the first one.
        assert!(lines.lines().filter(whole).count() >= 1999, "{lines}");
        assert_eq!(errors.matches("on purpose").count(), 10, "{errors}");
    });
    std::panic::set_hook(Box::new(|info| eprintln!("hook: {info}")));
    runtime(4).run(|| {
        let all: Vec<_> = (0..100)
            .map(|i| {
                trefoil::go(move || {
                    for j in 0..20 {
                        println!("line {i}.{j} of all");
                    }
                    if i % 10 == 0 {
                        panic!("on purpose {i}");
                    }
                })
            })
            .collect();
        let panics = all.into_iter().filter_map(|h| h.join().err()).count();
        assert_eq!(panics, 10);
    });
}
