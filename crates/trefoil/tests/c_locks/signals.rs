//! `sem_post` and a futex wake-up in real signal handlers.

use super::semaphore::{Semaphore, post, semaphore, wait};
use super::*;
use crate::common::{child_test, join_all};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32};

static POSTED: AtomicPtr<sem_t> = AtomicPtr::new(std::ptr::null_mut());
static POSTS: AtomicUsize = AtomicUsize::new(0);
static WORD: AtomicU32 = AtomicU32::new(0);

extern "C" fn post_in_handler(_: c_int) {
    // SAFETY: a semaphore that is never freed; both calls are async-signal-safe.
    unsafe {
        let before = errno();
        *libc::__errno_location() = 4711;
        assert_eq!(libc::sem_post(POSTED.load(Ordering::SeqCst)), 0);
        assert_eq!(errno(), 4711);
        *libc::__errno_location() = before;
    }
    POSTS.fetch_add(1, Ordering::SeqCst);
}

extern "C" fn wake_in_handler(_: c_int) {
    WORD.fetch_add(1, Ordering::SeqCst);
    let op = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: a futex word.
    unsafe { libc::syscall(libc::SYS_futex, WORD.as_ptr(), op, i32::MAX) };
}

fn install(handler: extern "C" fn(c_int)) {
    // SAFETY: an async-signal-safe handler.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()), 0);
    }
}

/// Sends a signal to one thread after the other until `stop`.
fn storm(stop: &'static AtomicBool) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        // SAFETY: no arguments, touches no memory.
        let pid = unsafe { libc::getpid() };
        while !stop.load(Ordering::SeqCst) {
            for (tid, _) in common::tasks() {
                for _ in 0..20 {
                    // SAFETY: signals a thread of this process, if it still exists.
                    unsafe { libc::syscall(libc::SYS_tgkill, pid, tid, libc::SIGUSR1) };
                }
            }
        }
    })
}

#[test]
fn sem_post_in_a_storm_of_handlers_loses_no_permit() {
    child_test!();
    static STOP: AtomicBool = AtomicBool::new(false);
    for procs in [1, 2, 8] {
        STOP.store(false, Ordering::SeqCst);
        let sem = semaphore(0);
        POSTED.store(sem.at(), Ordering::SeqCst);
        let posts_before = POSTS.load(Ordering::SeqCst);
        install(post_in_handler);
        let (takers, each) = (16, size(400, 150));
        runtime(procs).run(move || {
            let taking: Vec<_> = (0..takers)
                .map(|_| {
                    trefoil::go(move || {
                        for _ in 0..each {
                            wait(sem);
                        }
                    })
                })
                .collect();
            // These keep the runtime busy, so that handlers interrupt it.
            static BUSY: AtomicBool = AtomicBool::new(true);
            BUSY.store(true, Ordering::SeqCst);
            let (tx, rx) = trefoil::chan::bounded::<u64>(2);
            let other = semaphore(0);
            let busy = [
                trefoil::go(move || {
                    while BUSY.load(Ordering::SeqCst) {
                        let _ = tx.send(1);
                        post(other);
                        trefoil::yield_now();
                    }
                }),
                trefoil::go(move || {
                    while rx.recv().is_ok() {
                        wait(other);
                    }
                }),
            ];
            let sending = storm(&STOP);
            join_all(taking);
            STOP.store(true, Ordering::SeqCst);
            trefoil::blocking(|| sending.join()).unwrap();
            BUSY.store(false, Ordering::SeqCst);
            join_all(busy);
        });
        let (posts, taken) = (POSTS.load(Ordering::SeqCst) - posts_before, takers * each);
        let mut left = 0;
        // SAFETY: never freed.
        unsafe { libc::sem_getvalue(sem.at(), &mut left) };
        assert_eq!(posts, taken + left as usize);
    }
}

#[test]
fn waiting_for_a_post_by_a_handler_is_no_deadlock() {
    child_test!();
    let sem: Semaphore = semaphore(0);
    POSTED.store(sem.at(), Ordering::SeqCst);
    install(post_in_handler);
    // SAFETY: a timer of the kernel that sends SIGUSR1 to the process, later than the deadlock
    // check.
    unsafe {
        let timer = Object::<libc::timer_t>::zeroed();
        let mut event: libc::sigevent = std::mem::zeroed();
        event.sigev_notify = libc::SIGEV_SIGNAL;
        event.sigev_signo = libc::SIGUSR1;
        assert_eq!(libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, timer.at()), 0);
        let mut spec: libc::itimerspec = std::mem::zeroed();
        spec.it_value.tv_nsec = 500_000_000;
        assert_eq!(libc::timer_settime(*timer.at(), 0, &spec, std::ptr::null_mut()), 0);
    }
    runtime(2).run(move || wait(sem));
}

#[test]
fn futex_wake_in_a_storm_of_handlers_wakes_goroutines() {
    child_test!();
    static STOP: AtomicBool = AtomicBool::new(false);
    install(wake_in_handler);
    runtime(2).run(|| {
        let one = |_| {
            trefoil::go(|| {
                for _ in 0..size(400, 150) {
                    let seen = WORD.load(Ordering::SeqCst);
                    let op = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
                    while WORD.load(Ordering::SeqCst) == seen {
                        // SAFETY: a futex word, without a timeout.
                        unsafe {
                            let never = std::ptr::null::<timespec>();
                            libc::syscall(libc::SYS_futex, WORD.as_ptr(), op, seen, never);
                        }
                    }
                }
            })
        };
        let waiting: Vec<_> = (0..8).map(one).collect();
        let sending = storm(&STOP);
        join_all(waiting);
        STOP.store(true, Ordering::SeqCst);
        trefoil::blocking(|| sending.join()).unwrap();
    });
}
