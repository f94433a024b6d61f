//! The preemption signal beside a program's own handlers, system calls and forks.

use crate::common::raw::{raw, raw_read, raw_sleep};
use crate::common::{
    MS, TOO_LONG, child_test, flag, hogs, is_emulated, join_all, ms, rounds, runtime, spin,
};
use std::hint::black_box;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};
use trefoil::time::sleep;
use trefoil::{debug, go, yield_now};

static URGENT: AtomicUsize = AtomicUsize::new(0);

extern "C" fn on_urgent(signal: libc::c_int) {
    URGENT.fetch_add(usize::from(signal == libc::SIGURG), SeqCst);
}

extern "C" fn on_urgent_with_info(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes a valid siginfo.
    let number = unsafe { (*info).si_signo };
    let right = signal == libc::SIGURG && number == signal && !context.is_null();
    URGENT.fetch_add(usize::from(right), SeqCst);
}

/// The function that installs a handler.
#[derive(PartialEq)]
enum Installer {
    Signal,
    Sigaction,
}

/// Installs a handler for SIGURG and returns its address.
fn install(by: &Installer) -> usize {
    // SAFETY: handlers of the right types, which only count.
    unsafe {
        if *by == Installer::Signal {
            let handler = on_urgent as *const () as usize;
            assert_ne!(libc::signal(libc::SIGURG, handler), libc::SIG_ERR);
            return handler;
        }
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_urgent_with_info as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        assert_eq!(libc::sigaction(libc::SIGURG, &action, std::ptr::null_mut()), 0);
        action.sa_sigaction
    }
}

/// A user's handler for SIGURG, installed before or after the runtime starts, by `sigaction` or
/// `signal`, is called for signals from other senders and not for the runtime's own. Preemption
/// works nevertheless.
#[test]
fn a_users_sigurg_handler_gets_only_the_users_signals() {
    const VARIANT: &str = "TREFOIL_TEST_VARIANT";
    child_test!(|child| {
        for variant in ["before sigaction", "before signal", "after sigaction", "after signal"] {
            child.env(VARIANT, variant).succeed();
        }
    });
    let variant = std::env::var(VARIANT).unwrap();
    let before = variant.contains("before");
    let by = if variant.ends_with("signal") { Installer::Signal } else { Installer::Sigaction };
    let mut installed = if before { install(&by) } else { 0 };
    let rt = runtime(2);
    if !before {
        installed = install(&by);
    }
    rt.run(|| {
        let stop = flag();
        let loops = hogs(4, &stop);
        let send = |how: &str, send: &dyn Fn()| {
            // Two pending signals are merged into one, so each is waited for.
            for i in 0..20 {
                let seen = URGENT.load(SeqCst);
                send();
                let start = Instant::now();
                while URGENT.load(SeqCst) == seen {
                    assert!(start.elapsed() < Duration::from_secs(5), "{how} {i} was lost");
                    sleep(MS / 4);
                    // A signal that is merged with one of the runtime's own is lost.
                    if start.elapsed() > Duration::from_secs(1) {
                        send();
                    }
                }
            }
        };
        // SAFETY: sends a signal that has a handler.
        unsafe {
            send("kill", &|| assert_eq!(libc::kill(libc::getpid(), libc::SIGURG), 0));
            send("raise", &|| assert_eq!(libc::raise(libc::SIGURG), 0));
        }
        let preempted = debug::stats().preemptions;
        let seen = URGENT.load(SeqCst);
        sleep(100 * MS);
        assert!(debug::stats().preemptions > preempted, "no preemption any more");
        assert_eq!(URGENT.load(SeqCst), seen, "called for the runtime's own signals");
        // `sigaction` and `signal` return the user's handler, not the runtime's.
        // SAFETY: reads an action.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            assert_eq!(libc::sigaction(libc::SIGURG, std::ptr::null(), &mut action), 0);
            assert_eq!(action.sa_sigaction, installed);
            assert_eq!(libc::signal(libc::SIGURG, libc::SIG_IGN), installed);
            libc::kill(libc::getpid(), libc::SIGURG);
        }
        sleep(5 * MS);
        assert_eq!(URGENT.load(SeqCst), seen, "called while ignored");
        stop.store(true, SeqCst);
        join_all(loops);
    });
}

static USER1: AtomicUsize = AtomicUsize::new(0);

static DEEPEST: AtomicUsize = AtomicUsize::new(0);

static DEPTH: AtomicUsize = AtomicUsize::new(0);

extern "C" fn on_user1(_: libc::c_int) {
    let depth = DEPTH.fetch_add(1, SeqCst) + 1;
    DEEPEST.fetch_max(depth, SeqCst);
    spin(Duration::from_micros(30));
    USER1.fetch_add(1, SeqCst);
    DEPTH.fetch_sub(1, SeqCst);
}

/// Handlers of other signals run on the Ms, nested (SA_NODEFER), while goroutines are preempted.
#[test]
fn nested_handlers_run_while_goroutines_are_preempted() {
    child_test!(|child| child.env("TREFOIL_DEBUG", "slice=50").succeed());
    // SAFETY: a handler of the right type.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_user1 as *const () as usize;
        action.sa_flags = libc::SA_NODEFER | libc::SA_RESTART;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()), 0);
    }
    let count = rounds(50, 150);
    for procs in [1, 2, 8] {
        runtime(procs).run(|| {
            let stop = flag();
            let work = |i: u64| {
                let stop = stop.clone();
                go(move || {
                    let mut sum = 0u64;
                    while !stop.load(SeqCst) {
                        let list: Vec<u64> = (0..100).map(|k| k ^ i).collect();
                        sum = sum.wrapping_add(black_box(list).into_iter().sum());
                    }
                    sum
                })
            };
            let workers: Vec<_> = (0..6).map(work).collect();
            for round in 0..count {
                let tids = ms();
                for &tid in tids.iter().take(4) {
                    // SAFETY: sends a signal that has a handler to a thread of this process.
                    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, libc::SIGUSR1) };
                }
                // SAFETY: as above, to ourselves.
                unsafe { libc::raise(libc::SIGUSR1) };
                if round % 4 == 0 {
                    sleep(MS / 2);
                }
            }
            stop.store(true, SeqCst);
            join_all(workers);
            if procs < 8 {
                assert!(debug::stats().preemptions > 10, "{:?}", debug::stats());
            }
        });
    }
    assert!(USER1.load(SeqCst) >= 3 * count, "{} calls", USER1.load(SeqCst));
    assert_eq!(DEPTH.load(SeqCst), 0);
}

/// With `TREFOIL_DEBUG=preemptsignal=34` the runtime uses signal 34 and leaves SIGURG alone.
#[test]
fn preemptsignal_selects_another_signal() {
    child_test!(|child| child.env("TREFOIL_DEBUG", "preemptsignal=34").succeed());
    let caught = || {
        let text = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = text.lines().find_map(|l| l.strip_prefix("SigCgt:")).unwrap().trim().to_owned();
        u64::from_str_radix(&line, 16).unwrap()
    };
    runtime(1).run(|| {
        let stop = flag();
        let loops = hogs(3, &stop);
        for _ in 0..5 {
            sleep(MS);
        }
        assert!(debug::stats().preemptions > 0);
        assert_eq!(caught() >> (34 - 1) & 1, 1, "{:x}", caught());
        assert_eq!(caught() >> (libc::SIGURG - 1) & 1, 0, "{:x}", caught());
        install(&Installer::Signal);
        assert_eq!(caught() >> (libc::SIGURG - 1) & 1, 1, "{:x}", caught());
        stop.store(true, SeqCst);
        join_all(loops);
    });
}

/// Reads with a timeout, polls and sleeps, which a signal would interrupt, almost never return
/// EINTR beside goroutines that are signalled all the time.
#[test]
fn preemption_rarely_interrupts_system_calls() {
    child_test!();
    /// The least number of calls that counts as a measurement.
    const CALLS: usize = 200;
    let (calls, interrupted) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum AfterCalls {
        Yield,
        Nothing,
    }
    let run = |after: AfterCalls, time: Duration| {
        calls.store(0, SeqCst);
        interrupted.store(0, SeqCst);
        runtime(2).run(|| {
            let stop = flag();
            let loops = hogs(2, &stop);
            let work = |i: usize| {
                let (stop, calls, interrupted) = (stop.clone(), calls.clone(), interrupted.clone());
                go(move || {
                    let wait = Duration::from_micros(1000 + 300 * i as u64);
                    let (ours, theirs) = std::os::unix::net::UnixDatagram::pair().unwrap();
                    ours.set_read_timeout(Some(wait)).unwrap();
                    let fd: OwnedFd = ours.into();
                    while !stop.load(SeqCst) {
                        let result = match i % 3 {
                            0 => raw_sleep(wait),
                            1 => raw_read(&fd),
                            _ => {
                                let mut poll =
                                    libc::pollfd { fd: fd.as_raw_fd(), events: 1, revents: 0 };
                                let ms = 1 + i as i64 / 3;
                                let time = libc::timespec { tv_sec: 0, tv_nsec: ms * 1_000_000 };
                                let [poll, time] =
                                    [&raw mut poll as usize, &raw const time as usize];
                                raw(libc::SYS_ppoll, [poll, 1, time, 0])
                            }
                        };
                        calls.fetch_add(1, SeqCst);
                        interrupted
                            .fetch_add(usize::from(result == -(libc::EINTR as isize)), SeqCst);
                        spin(Duration::from_micros(50));
                        if after == AfterCalls::Yield {
                            yield_now();
                        }
                    }
                    drop(theirs);
                })
            };
            let workers: Vec<_> = (0..9).map(work).collect();
            let start = Instant::now();
            while start.elapsed() < time || calls.load(SeqCst) <= CALLS {
                assert!(start.elapsed() < TOO_LONG / 2, "{} calls", calls.load(SeqCst));
                sleep(10 * MS);
            }
            stop.store(true, SeqCst);
            join_all(workers);
            join_all(loops);
            assert!(debug::stats().preemptions > 0);
        });
        let (calls, interrupted) = (calls.load(SeqCst), interrupted.load(SeqCst));
        println!("{calls} calls, {interrupted} of them interrupted (after each: {after:?})");
        (calls, interrupted)
    };
    let time = rounds(300 * MS, 1_000 * MS);
    let (calls, interrupted) = run(AfterCalls::Yield, time);
    // sysmon checks that a thread does not sleep before it signals it. If the OS does not run
    // sysmon in between (a busy machine), the thread may have fallen asleep. On a quiet machine
    // none has.
    assert!(interrupted * 20 <= calls, "{interrupted} of {calls} calls");
    // A goroutine that never calls the runtime and computes more than it sleeps is preempted by a
    // signal, which may arrive in the moment in which it falls asleep.
    let (calls, interrupted) = run(AfterCalls::Nothing, time);
    assert!(interrupted * 20 <= calls, "{interrupted} of {calls} calls");
}

/// A goroutine forks while it is preempted often.
#[test]
fn children_forked_under_preemption_exit_normally() {
    child_test!(|child| child.env("TREFOIL_DEBUG", "slice=200").succeed());
    let children = if is_emulated() { 5 } else { 50 };
    for procs in [1, 2] {
        runtime(procs).run(|| {
            let stop = flag();
            let loops = hogs(2, &stop);
            join_all((0..2).map(|_| {
                go(move || {
                    for i in 0..children {
                        // SAFETY: the child only ends.
                        unsafe {
                            match libc::fork() {
                                0 => libc::_exit(i),
                                -1 => panic!("fork: {}", std::io::Error::last_os_error()),
                                pid => {
                                    let mut status = 0;
                                    assert_eq!(libc::waitpid(pid, &mut status, 0), pid);
                                    assert!(libc::WIFEXITED(status), "{status:x}");
                                    assert_eq!(libc::WEXITSTATUS(status), i);
                                }
                            }
                        }
                    }
                })
            }));
            stop.store(true, SeqCst);
            join_all(loops);
        });
    }
}
