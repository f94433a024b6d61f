//! Reads whose descriptor is closed or replaced meanwhile.

use crate::common::{self, MS, child_test, runtime, watchdog};
use crate::{BUSY, check, eventfd, read, same_on_both};
use std::ffi::{c_int, c_void};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering::SeqCst};
use std::thread;

/// Starts a reader of one end of a stream, calls `f` with the reader's descriptor, then writes a
/// byte to the other end. Returns the results of the reader and of `f`.
fn during_a_read<T>(f: impl FnOnce(RawFd) -> T) -> (isize, T) {
    let (a, mut b) = UnixStream::pair().unwrap();
    let fd = a.as_raw_fd();
    let begun = Arc::new(AtomicUsize::new(0));
    let signal = begun.clone();
    let go = move || {
        signal.store(1, SeqCst);
        read(&a, &mut [0; 8])
    };
    let on_goroutine = trefoil::id() != 0;
    let reader: Box<dyn FnOnce() -> isize> = if on_goroutine {
        let handle = trefoil::go(go);
        Box::new(|| handle.join().unwrap())
    } else {
        let handle = thread::spawn(go);
        Box::new(|| handle.join().unwrap())
    };
    while begun.load(SeqCst) == 0 {
        thread::sleep(MS);
    }
    thread::sleep(20 * MS);
    let done = f(fd);
    thread::sleep(20 * MS);
    b.write_all(b"x").unwrap();
    (reader(), done)
}

#[test]
fn dup_that_fails_leaves_readers_of_its_target_alone() {
    let _w = watchdog();
    let found = same_on_both(|| {
        // SAFETY: no pointers.
        let dup2 = |from| during_a_read(|to| check(unsafe { libc::dup2(from, to) } as isize));
        let flags = |from: RawFd| {
            // SAFETY: as above.
            during_a_read(|to| check(unsafe { libc::dup3(from, to, 0x4000_0000) } as isize))
        };
        let open = eventfd();
        [dup2(1 << 28), dup2(-1), flags(open.as_raw_fd())]
    });
    let (bad, invalid) = (-(libc::EBADF as isize), -(libc::EINVAL as isize));
    assert_eq!(found, [(1, bad), (1, bad), (1, invalid)]);
}

#[test]
fn close_in_a_child_that_shares_memory_leaves_readers_alone() {
    /// Runs as the child of a `vfork`-like `clone`; its stack is in the parent's memory.
    extern "C" fn child(fd: *mut c_void) -> c_int {
        // SAFETY: this process has a copy of the descriptor table.
        unsafe {
            let rc = libc::close(fd as usize as c_int);
            libc::dup2(0, fd as usize as c_int);
            libc::_exit(if rc == 0 { 7 } else { 8 })
        }
    }
    let _w = watchdog();
    let found = same_on_both(|| {
        during_a_read(|fd| {
            let mut stack = vec![0u128; 16 << 10];
            let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
            // SAFETY: the stack has no other user; the parent waits until the child has ended.
            unsafe {
                let top = stack.as_mut_ptr_range().end.cast();
                let pid = libc::clone(child, top, flags, fd as usize as *mut c_void);
                let mut status = 0;
                assert_eq!(libc::waitpid(pid, &raw mut status, 0), pid);
                libc::WEXITSTATUS(status)
            }
        })
    });
    assert_eq!(found, (1, 7));
}

/// The descriptor that the handler closes; −1 afterwards.
static TO_CLOSE: AtomicI32 = AtomicI32::new(-1);

extern "C" fn close_one(_: c_int) {
    let fd = TO_CLOSE.swap(-1, SeqCst);
    if fd >= 0 {
        // SAFETY: the test stores a descriptor that it does not use again.
        unsafe {
            let before = *libc::__errno_location();
            libc::close(fd);
            *libc::__errno_location() = before;
        }
    }
}

#[test]
fn close_in_a_handler_that_interrupts_the_runtime_ends_waits() {
    child_test!();
    // SAFETY: an async-signal-safe handler.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = close_one as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()), 0);
    }
    let over = Arc::new(AtomicUsize::new(0));
    runtime(2).run(move || {
        // Threads that are in the runtime most of the time, with its locks.
        let busy: Vec<_> = (0..4)
            .map(|_| {
                let over = over.clone();
                trefoil::go(move || {
                    let (mut a, mut b) = UnixStream::pair().unwrap();
                    while over.load(SeqCst) == 0 {
                        // SAFETY: no arguments.
                        let tid = unsafe { libc::syscall(libc::SYS_gettid) };
                        BUSY.store(tid as i32, SeqCst);
                        let reader = trefoil::go(move || {
                            a.read_exact(&mut [0]).unwrap();
                            a
                        });
                        b.write_all(b"x").unwrap();
                        a = reader.join().unwrap();
                        trefoil::yield_now();
                    }
                })
            })
            .collect();
        for round in 0..500 {
            let (a, b) = UnixStream::pair().unwrap();
            // From 900 on, so that no other `open` gets the number: the reader may begin after the
            // close.
            // SAFETY: returns a new descriptor, which the handler closes.
            let fd = unsafe { libc::fcntl(a.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 900) };
            drop(a);
            // SAFETY: a local buffer.
            let reader = trefoil::go(move || unsafe {
                check(libc::read(fd, [0u8; 8].as_mut_ptr().cast(), 8))
            });
            if round % 2 == 0 {
                thread::sleep(MS / 2);
            } else {
                trefoil::yield_now();
            }
            TO_CLOSE.store(fd, SeqCst);
            while TO_CLOSE.load(SeqCst) >= 0 {
                // SAFETY: signals a thread of this process, if it still exists.
                unsafe {
                    let (process, thread) = (libc::getpid(), BUSY.load(SeqCst));
                    libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGUSR1);
                }
                thread::sleep(MS / 10);
            }
            assert_eq!(reader.join().unwrap(), -(libc::EBADF as isize));
            drop(b);
        }
        over.store(1, SeqCst);
        busy.into_iter().for_each(|one| one.join().unwrap());
    });
}

#[test]
fn a_read_that_races_with_a_close_fails_with_ebadf() {
    child_test!();
    let rounds: usize = common::rounds(300, 1_000);
    let turn = Arc::new(AtomicI32::new(-1));
    let theirs = turn.clone();
    let closer = thread::spawn(move || {
        for round in 0..rounds {
            let (mut fd, mut loads) = (-1, 0u32);
            while fd < 0 {
                std::hint::spin_loop();
                fd = theirs.load(SeqCst);
                loads += 1;
                if loads.is_multiple_of(256) {
                    thread::yield_now(); // the machine may have one CPU only
                }
            }
            for _ in 0..round % 60 {
                std::hint::spin_loop();
            }
            // SAFETY: the reader stores a descriptor that only this thread closes.
            unsafe { libc::close(fd) };
            theirs.store(-2, SeqCst);
        }
    });
    let found = runtime(2).run(move || {
        let mut found = std::collections::BTreeMap::new();
        for _ in 0..rounds {
            let (a, _b) = UnixStream::pair().unwrap();
            // SAFETY: returns a new descriptor, which the other thread closes. Its number, from 900
            // on, is not used otherwise.
            let fd = unsafe { libc::fcntl(a.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 900) };
            drop(a);
            turn.store(fd, SeqCst);
            // SAFETY: the caller's buffer.
            let n = check(unsafe { libc::read(fd, [0u8; 8].as_mut_ptr().cast(), 8) });
            *found.entry(n).or_insert(0) += 1;
            while turn.load(SeqCst) != -2 {
                thread::sleep(MS / 50);
            }
        }
        found
    });
    closer.join().unwrap();
    assert_eq!(Vec::from_iter(found), [(-(libc::EBADF as isize), rounds)]);
}
