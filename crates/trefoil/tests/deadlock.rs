//! Deadlocks and SIGQUIT: what is printed, the exit code, and when no deadlock may be reported.
//!
//! A program without libtest (`harness = false`), which has a thread that could wake a goroutine,
//! so that there is never a deadlock. The program runs itself once for each case.

mod common;

use std::io::{BufRead, BufReader, Read};
use std::process::{ExitCode, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use trefoil::chan::bounded;
use trefoil::sync::{Mutex, WaitGroup};
use trefoil::time::sleep;
use trefoil::{Builder, Runtime, go, run, yield_now};

const DEADLOCK: &str = "fatal error: all goroutines are asleep - deadlock!";
const CASE: &str = "TREFOIL_DEADLOCK_CASE";

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Name, what the child does, the exit code, what stderr must contain.
type Case = (&'static str, fn(), i32, &'static [&'static str]);

const CASES: &[Case] = &[
    (
        "deadlock_if_all_goroutines_wait",
        deadlock_if_all_goroutines_wait,
        2,
        &[
            DEADLOCK,
            "goroutine 1 \"main\" [chan receive]:",
            "\"locker\" [sync.Mutex.Lock]:",
            "[sync.WaitGroup.Wait]:",
            "[select (no cases)]:",
            "deadlock_if_all_goroutines_wait",
            "created by deadlock::deadlock_if_all_goroutines_wait",
        ],
    ),
    (
        "deadlock_if_a_plain_thread_joins",
        deadlock_if_a_plain_thread_joins,
        2,
        &[DEADLOCK, "[chan receive]:"],
    ),
    (
        "deadlock_of_a_task",
        deadlock_of_a_task,
        2,
        &[
            DEADLOCK,
            "goroutine 1 \"main\" [join]:",
            "task 2 \"waits\" [future]:",
            "\ta task that waits has no stack",
            "created by deadlock::deadlock_of_a_task",
        ],
    ),
    ("deadlock_after_a_sleep", deadlock_after_a_sleep, 2, &[DEADLOCK]),
    ("deadlock_beside_a_pool", deadlock_beside_a_pool, 2, &[DEADLOCK]),
    (
        "deadlock_after_the_last_timer",
        deadlock_after_the_last_timer,
        2,
        &[DEADLOCK, "[chan receive]:"],
    ),
    ("no_deadlock_before_a_timer", no_deadlock_before_a_timer, 0, &[]),
    ("no_deadlock_while_a_thread_sleeps", no_deadlock_while_a_thread_sleeps, 0, &[]),
    ("no_deadlock_while_another_runtime_works", no_deadlock_while_another_runtime_works, 0, &[]),
    ("no_deadlock_by_a_dropped_runtime", no_deadlock_by_a_dropped_runtime, 0, &[]),
    ("no_deadlock_if_a_woken_thread_runs_late", no_deadlock_if_a_woken_thread_runs_late, 0, &[]),
    ("no_deadlock_in_the_longest_sleep", || alone(|| std::thread::sleep(Duration::MAX)), 0, &[]),
    (
        "no_deadlock_in_a_sleep_of_600_years",
        || alone(|| sleep(Duration::from_secs(600 * 365 * 86_400))),
        0,
        &[],
    ),
    ("no_deadlock_in_the_longest_timeout", || alone(no_deadlock_in_the_longest_timeout), 0, &[]),
    (
        "no_deadlock_in_poll_without_descriptors",
        || alone(no_deadlock_in_poll_without_descriptors),
        0,
        &[],
    ),
    (
        "no_deadlock_in_select_without_descriptors",
        || alone(no_deadlock_in_select_without_descriptors),
        0,
        &[],
    ),
    (
        "sigquit_prints_all_goroutines",
        sigquit_prints_all_goroutines,
        2,
        &["SIGQUIT: quit", "goroutine 1 \"main\" [sleep]:", "\"spinner\""],
    ),
    (
        "sigquit_is_not_ignored",
        sigquit_prints_all_goroutines,
        2,
        &["SIGQUIT: quit", "goroutine 1 \"main\" [sleep]:", "\"spinner\""],
    ),
    // With the flight recorder, see `TRACE`.
    (
        "deadlock_writes_a_trace",
        deadlock_if_all_goroutines_wait,
        2,
        &[DEADLOCK, "trefoil: trace written to ", "cargo install trefoil-cli"],
    ),
    (
        "sigquit_writes_a_trace",
        sigquit_prints_all_goroutines,
        2,
        &["SIGQUIT: quit", "trefoil: trace written to ", "cargo install trefoil-cli"],
    ),
];

/// The end of the names of cases with the flight recorder. A signal that the recorder watches must
/// not keep a deadlock from being noticed.
const TRACE: &str = "_writes_a_trace";

fn deadlock_if_all_goroutines_wait() {
    run(|| {
        let (_tx, rx) = bounded::<()>(0);
        let locked: &'static Mutex<()> = Box::leak(Box::new(Mutex::new(())));
        let _held = locked.lock();
        Builder::new().name("locker").go(|| drop(locked.lock())).unwrap();
        let group = WaitGroup::new();
        group.add(1);
        go(move || group.wait());
        go(|| trefoil::select! {});
        let _ = rx.recv();
    });
}

fn deadlock_beside_a_pool() {
    static POOL: trefoil::sync::Pool<u8> = trefoil::sync::Pool::new(|| 0);
    run(|| {
        // The thread that empties pools sleeps: it wakes no goroutine.
        POOL.put(1);
        let (_tx, rx) = bounded::<()>(0);
        let _ = rx.recv();
    });
}

fn deadlock_of_a_task() {
    run(|| {
        let task = async { std::future::pending::<()>().await };
        let task = trefoil::task::Builder::new().name("waits").spawn(task).unwrap();
        task.join()
    })
    .unwrap();
}

fn deadlock_if_a_plain_thread_joins() {
    let handle = go(|| {
        let (_tx, rx) = bounded::<()>(0);
        let _ = rx.recv();
    });
    let _ = handle.join();
}

fn deadlock_after_a_sleep() {
    run(|| {
        sleep(ms(100));
        let (_tx, rx) = bounded::<()>(0);
        let _ = rx.recv();
    });
}

fn deadlock_after_the_last_timer() {
    run(|| {
        let chan = trefoil::time::after(ms(10));
        chan.recv().unwrap();
        let _ = chan.recv();
    });
}

fn no_deadlock_before_a_timer() {
    run(|| {
        let (tx, rx) = bounded::<()>(0);
        trefoil::time::after_func(ms(300), move || tx.send(()).unwrap());
        rx.recv().unwrap();
    });
}

fn no_deadlock_while_a_thread_sleeps() {
    run(|| {
        let (tx, rx) = bounded::<()>(0);
        std::thread::spawn(move || {
            std::thread::sleep(ms(300));
            tx.send(()).unwrap();
        });
        rx.recv().unwrap();
    });
}

fn no_deadlock_while_another_runtime_works() {
    let other = Runtime::builder().procs(1).build().unwrap();
    let (tx, rx) = bounded::<()>(0);
    other
        .go(move || {
            let start = std::time::Instant::now();
            while start.elapsed() < ms(300) {
                yield_now();
            }
            tx.send(()).unwrap();
        })
        .unwrap();
    run(|| rx.recv().unwrap());
}

fn no_deadlock_by_a_dropped_runtime() {
    let left = Runtime::builder().procs(1).build().unwrap();
    drop(left.go(|| trefoil::select! {}).unwrap());
    std::thread::sleep(ms(50));
    drop(left);
    std::thread::sleep(ms(50));
    no_deadlock_while_a_thread_sleeps();
}

/// A plain thread of the lowest priority beside busy processes on one CPU: the runtime is idle for
/// long between the thread's wake-up and its next step, although the thread is not blocked.
fn no_deadlock_if_a_woken_thread_runs_late() {
    const ROUNDS: u32 = 5;
    let (_tx, rx) = bounded::<()>(0);
    go(move || rx.recv());
    common::run_on_one_cpu();
    let hogs = common::BusyProcesses::start(4);
    let set_policy = |policy| {
        let param = libc::sched_param { sched_priority: 0 };
        // SAFETY: of this thread only.
        unsafe { libc::sched_setscheduler(0, policy, &raw const param) };
    };
    for _ in 0..ROUNDS {
        let handle = go(|| sleep(ms(5)));
        set_policy(libc::SCHED_IDLE);
        handle.join().unwrap();
        set_policy(libc::SCHED_OTHER);
    }
    drop(hogs);
}

/// Runs `f` on the only goroutine. A signal ends the process after a second.
fn alone(f: fn()) {
    extern "C" fn end(_: libc::c_int) {
        // SAFETY: safe in a signal handler.
        unsafe { libc::_exit(0) };
    }
    // SAFETY: a handler that only ends the process.
    unsafe {
        libc::signal(libc::SIGALRM, end as *const () as libc::sighandler_t);
        libc::alarm(1);
    }
    run(f);
}

fn no_deadlock_in_the_longest_timeout() {
    let (_tx, rx) = bounded::<()>(0);
    let _ = rx.recv_timeout(Duration::MAX);
}

fn no_deadlock_in_poll_without_descriptors() {
    // SAFETY: no descriptors.
    unsafe { libc::poll(std::ptr::null_mut(), 0, -1) };
}

fn no_deadlock_in_select_without_descriptors() {
    let none = std::ptr::null_mut();
    // SAFETY: no descriptors.
    unsafe { libc::select(0, none, none, none, none.cast()) };
}

fn sigquit_prints_all_goroutines() {
    run(|| {
        let spin = || loop {
            std::hint::spin_loop();
        };
        Builder::new().name("spinner").go(spin).unwrap();
        eprintln!("ready");
        sleep(Duration::MAX);
    });
}

/// Cases that run at the same time.
const AT_ONCE: usize = 4;

fn main() -> ExitCode {
    if let Ok(name) = std::env::var(CASE) {
        // A shell starts the background jobs of a script with SIGQUIT ignored.
        let is_ignored = name == "sigquit_is_not_ignored";
        let action = if is_ignored { libc::SIG_IGN } else { libc::SIG_DFL };
        // SAFETY: one of the predefined actions.
        unsafe { libc::signal(libc::SIGQUIT, action) };
        if let Some(case) = CASES.iter().find(|case| case.0 == name) {
            (case.1)();
        }
        return ExitCode::SUCCESS;
    }
    // Each case waits longer than it computes.
    let (next, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|threads| {
        for _ in 0..AT_ONCE {
            threads.spawn(|| {
                while let Some(case) = CASES.get(next.fetch_add(1, Ordering::Relaxed)) {
                    failed.fetch_add(usize::from(!passes(case)), Ordering::Relaxed);
                }
            });
        }
    });
    let failed = failed.into_inner();
    println!("{} passed, {failed} failed", CASES.len() - failed);
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs a case in a child, prints the result, and returns whether it passed.
fn passes(&(name, _, code, texts): &Case) -> bool {
    let mut program = common::this_program();
    let dir = std::env::temp_dir().join(format!("trefoil-{name}-{}", std::process::id()));
    if name.ends_with(TRACE) {
        std::fs::create_dir_all(&dir).unwrap();
        program.env("TREFOIL_TRACE", format!("on,on=signal:USR1,dir={}", dir.display()));
    }
    let mut child = program
        .env(CASE, name)
        .env("TREFOIL_PROCS", "2")
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut text = String::new();
    if name.starts_with("sigquit_") {
        stderr.read_line(&mut text).unwrap();
        // The OS may not run it for a while between its line and its sleep.
        std::thread::sleep(ms(500));
        // SAFETY: a child that has not been waited for yet.
        unsafe { libc::kill(child.id() as i32, libc::SIGQUIT) };
    }
    // A hang is a failure: the child is killed after a minute, and then has no exit code.
    let pid = child.id() as i32;
    let (done, wait) = std::sync::mpsc::channel::<()>();
    let guard = std::thread::spawn(move || {
        if wait
            .recv_timeout(Duration::from_secs(60))
            .is_err_and(|e| e == std::sync::mpsc::RecvTimeoutError::Timeout)
        {
            // SAFETY: not waited for yet, so that the pid is still the child's.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
    });
    stderr.read_to_string(&mut text).unwrap();
    drop(done);
    guard.join().unwrap();
    let status = child.wait().unwrap();
    let missing: Vec<_> = texts.iter().filter(|t| !text.contains(**t)).collect();
    let ok = status.code() == Some(code)
        && missing.is_empty()
        && (!name.ends_with(TRACE) || has_one_trace(&dir));
    println!("test {name} ... {}", if ok { "ok" } else { "FAILED" });
    if !ok {
        println!("ended with {status}, missing {missing:?}, stderr:\n{text}");
    }
    ok
}

/// Returns whether a folder contains one file, and that is a recording. Removes it.
fn has_one_trace(dir: &std::path::Path) -> bool {
    let files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|file| file.unwrap().path()).collect();
    let read = |path| trefoil::trace::Snapshot::read(std::fs::File::open(path).unwrap());
    let ok = files.len() == 1 && read(&files[0]).is_ok_and(|snapshot| snapshot.why(1).is_some());
    std::fs::remove_dir_all(dir).unwrap();
    ok
}
