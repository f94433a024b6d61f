//! Signal handlers, alternate stacks and panic hooks of the program beside those of the runtime.

mod common;

use common::{Child, in_child, join_all, mark, ms, tasks, watchdog};
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};
use trefoil::{Runtime, go, yield_now};

fn runtime() -> Runtime {
    Runtime::builder().procs(2).build().unwrap()
}

/// Waits until the threads of dropped runtimes have ended, except `left` of them.
fn wait_for_threads(left: usize) {
    let start = Instant::now();
    while tasks().iter().filter(|(_, name)| name.starts_with("trefoil-")).count() > left {
        assert!(start.elapsed() < Duration::from_secs(20), "threads are left: {:?}", tasks());
        std::thread::sleep(Duration::from_millis(1));
    }
}

// ---- SIGQUIT -----------------------------------------------------------------------------------

#[test]
fn sigquit_ends_the_process_after_the_last_runtime() {
    if !in_child() {
        let out = Child::of("sigquit_ends_the_process_after_the_last_runtime").output();
        assert_eq!(out.status.signal(), Some(libc::SIGQUIT), "{:?}", out.status);
        return;
    }
    let _watchdog = watchdog();
    let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: passes a struct by reference.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const no_core) };
    for _ in 0..3 {
        runtime().run(|| join_all((0..10).map(|_| go(yield_now))));
    }
    wait_for_threads(0);
    // SAFETY: a signal to this process.
    unsafe { libc::kill(libc::getpid(), libc::SIGQUIT) };
    std::thread::sleep(Duration::from_secs(20));
}

#[test]
fn sigquit_reaches_an_older_runtime_after_a_newer_one_is_gone() {
    if !in_child() {
        let text = Child::of("sigquit_reaches_an_older_runtime_after_a_newer_one_is_gone").fail(2);
        assert!(text.contains("SIGQUIT: quit"), "{text}");
        assert!(text.contains("goroutine 1"), "{text}");
        return;
    }
    let _watchdog = watchdog();
    let older = runtime();
    older.run(|| {
        let threads = ms().len() + 2;
        runtime().run(yield_now);
        wait_for_threads(threads);
        // SAFETY: a signal to this process.
        unsafe { libc::kill(libc::getpid(), libc::SIGQUIT) };
        std::thread::sleep(Duration::from_secs(20));
    });
}

// ---- the panic hook ----------------------------------------------------------------------------

/// Starts goroutines, and the runtime with them, when it is dropped.
struct StartsInDrop;

impl Drop for StartsInDrop {
    fn drop(&mut self) {
        let (tx, rx) = trefoil::chan::bounded(0);
        let sender = go(move || tx.send(41).unwrap());
        assert_eq!(rx.recv(), Ok(41));
        sender.join().unwrap();
        assert!(go(|| panic!("on a goroutine")).join().is_err());
        mark("the destructor is done");
    }
}

#[test]
fn a_runtime_starts_during_unwinding() {
    if !in_child() {
        let text = Child::of("a_runtime_starts_during_unwinding").succeed();
        assert!(text.contains("the destructor is done"), "{text}");
        assert!(text.contains("goroutine "), "the hook is not in place: {text}");
        return;
    }
    let _watchdog = watchdog();
    let panicked = std::panic::catch_unwind(|| {
        let _starts = StartsInDrop;
        panic!("on a plain thread");
    });
    assert!(panicked.is_err());
}

#[test]
fn a_runtime_starts_in_a_panic_hook() {
    if !in_child() {
        let text = Child::of("a_runtime_starts_in_a_panic_hook").succeed();
        assert!(text.contains("the destructor is done"), "{text}");
        return;
    }
    let _watchdog = watchdog();
    std::panic::set_hook(Box::new(|_| {
        if std::thread::current().name() == Some("a_runtime_starts_in_a_panic_hook") {
            assert_eq!(go(|| 6 * 7).join().unwrap(), 42);
            mark("the destructor is done");
        }
    }));
    assert!(std::panic::catch_unwind(|| panic!("on a plain thread")).is_err());
    // Afterwards the runtime's own hook is put in.
    assert!(go(|| panic!("on a goroutine")).join().is_err());
}
