//! Deadlocks and SIGQUIT: what is printed, the exit code, and when there may be no alarm.
//!
//! A program of its own (`harness = false`): the test harness has a thread that could wake a goroutine,
//! so under it there is never a deadlock. Without arguments it runs itself once for each scene.

mod common;

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;
use trefoil::chan::bounded;
use trefoil::sync::{Mutex, WaitGroup};
use trefoil::time::sleep;
use trefoil::{Builder, Runtime, go, run, yield_now};

const DEADLOCK: &str = "fatal error: all goroutines are asleep - deadlock!";
const SCENE: &str = "TREFOIL_DEADLOCK_SCENE";

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Name, what the child does, the exit code, what stderr must contain.
type Scene = (&'static str, fn(), i32, &'static [&'static str]);

const SCENES: &[Scene] = &[
    (
        "everyone_waits",
        everyone_waits,
        2,
        &[
            DEADLOCK,
            "goroutine 1 \"main\" [chan receive]:",
            "\"locker\" [sync.Mutex.Lock]:",
            "[sync.WaitGroup.Wait]:",
            "[select (no cases)]:",
            "everyone_waits",
            "created by deadlock::everyone_waits",
        ],
    ),
    ("a_plain_thread_waits", a_plain_thread_waits, 2, &[DEADLOCK, "[chan receive]:"]),
    ("after_a_while", after_a_while, 2, &[DEADLOCK]),
    ("a_timer_has_fired", a_timer_has_fired, 2, &[DEADLOCK, "[chan receive]:"]),
    ("a_timer_is_set", a_timer_is_set, 0, &[]),
    ("a_thread_could_act", a_thread_could_act, 0, &[]),
    ("another_runtime_could_act", another_runtime_could_act, 0, &[]),
    ("a_runtime_was_left", a_runtime_was_left, 0, &[]),
    ("a_thread_runs_late_after_its_wake_up", a_thread_runs_late_after_its_wake_up, 0, &[]),
    ("the_longest_sleep", || alone(|| std::thread::sleep(Duration::MAX)), 0, &[]),
    ("a_sleep_of_600_years", || alone(|| sleep(Duration::from_secs(600 * 365 * 86_400))), 0, &[]),
    ("the_longest_timeout", || alone(the_longest_timeout), 0, &[]),
    ("poll_of_nothing", || alone(poll_of_nothing), 0, &[]),
    ("select_of_nothing", || alone(select_of_nothing), 0, &[]),
    ("quit", quit, 2, &["SIGQUIT: quit", "goroutine 1 \"main\" [sleep]:", "\"spinner\""]),
];

fn everyone_waits() {
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

fn a_plain_thread_waits() {
    let handle = go(|| {
        let (_tx, rx) = bounded::<()>(0);
        let _ = rx.recv();
    });
    let _ = handle.join();
}

fn after_a_while() {
    run(|| {
        sleep(ms(100));
        let (_tx, rx) = bounded::<()>(0);
        let _ = rx.recv();
    });
}

fn a_timer_has_fired() {
    run(|| {
        let chan = trefoil::time::after(ms(10));
        chan.recv().unwrap();
        let _ = chan.recv();
    });
}

fn a_timer_is_set() {
    run(|| {
        let (tx, rx) = bounded::<()>(0);
        trefoil::time::after_func(ms(300), move || tx.send(()).unwrap());
        rx.recv().unwrap();
    });
}

fn a_thread_could_act() {
    run(|| {
        let (tx, rx) = bounded::<()>(0);
        std::thread::spawn(move || {
            std::thread::sleep(ms(300));
            tx.send(()).unwrap();
        });
        rx.recv().unwrap();
    });
}

fn another_runtime_could_act() {
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

fn a_runtime_was_left() {
    let left = Runtime::builder().procs(1).build().unwrap();
    drop(left.go(|| trefoil::select! {}).unwrap());
    std::thread::sleep(ms(50));
    drop(left);
    std::thread::sleep(ms(50));
    a_thread_could_act();
}

/// A plain thread of the lowest priority beside busy processes on one CPU: between its wake-up and its next step the
/// runtime sleeps for a long time, and yet the thread is not blocked.
fn a_thread_runs_late_after_its_wake_up() {
    const ROUNDS: u32 = 5;
    let (_tx, rx) = bounded::<()>(0);
    go(move || rx.recv());
    common::run_on_one_cpu();
    let hogs = common::BusyProcesses::start(4);
    let set_policy = |policy| {
        let param = libc::sched_param { sched_priority: 0 };
        // SAFETY: of this thread alone.
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

/// Runs `f` on the only goroutine. A signal ends the process after a second: that is what `f` waits for.
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

fn the_longest_timeout() {
    let (_tx, rx) = bounded::<()>(0);
    let _ = rx.recv_timeout(Duration::MAX);
}

fn poll_of_nothing() {
    // SAFETY: no descriptors.
    unsafe { libc::poll(std::ptr::null_mut(), 0, -1) };
}

fn select_of_nothing() {
    let none = std::ptr::null_mut();
    // SAFETY: no descriptors.
    unsafe { libc::select(0, none, none, none, none.cast()) };
}

fn quit() {
    run(|| {
        let spin = || loop {
            std::hint::spin_loop();
        };
        Builder::new().name("spinner").go(spin).unwrap();
        eprintln!("ready");
        sleep(Duration::MAX);
    });
}

fn main() -> ExitCode {
    if let Ok(name) = std::env::var(SCENE) {
        // A shell starts its background jobs with SIGQUIT ignored, and the runtime respects that.
        // SAFETY: the default action.
        unsafe { libc::signal(libc::SIGQUIT, libc::SIG_DFL) };
        if let Some(scene) = SCENES.iter().find(|scene| scene.0 == name) {
            (scene.1)();
        }
        return ExitCode::SUCCESS;
    }
    let failed = SCENES.iter().filter(|scene| !passes(scene)).count();
    println!("{} passed, {failed} failed", SCENES.len() - failed);
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn passes(&(name, _, code, texts): &Scene) -> bool {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .env(SCENE, name)
        .env("TREFOIL_PROCS", "2")
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut text = String::new();
    if name == "quit" {
        stderr.read_line(&mut text).unwrap();
        // Between its line and its sleep the OS may not run it for a while.
        std::thread::sleep(ms(500));
        // SAFETY: our own child, which we have not waited for yet.
        unsafe { libc::kill(child.id() as i32, libc::SIGQUIT) };
    }
    // A hang must be a failure: the child is ended after a minute, and then its code is none.
    let pid = child.id() as i32;
    let (done, wait) = std::sync::mpsc::channel::<()>();
    let guard = std::thread::spawn(move || {
        if wait
            .recv_timeout(Duration::from_secs(60))
            .is_err_and(|e| e == std::sync::mpsc::RecvTimeoutError::Timeout)
        {
            // SAFETY: still not waited for: its pid is its own.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
    });
    stderr.read_to_string(&mut text).unwrap();
    drop(done);
    guard.join().unwrap();
    let status = child.wait().unwrap();
    let missing: Vec<_> = texts.iter().filter(|t| !text.contains(**t)).collect();
    let ok = status.code() == Some(code) && missing.is_empty();
    println!("scene {name} ... {}", if ok { "ok" } else { "FAILED" });
    if !ok {
        println!("ended with {status}, missing {missing:?}, stderr:\n{text}");
    }
    ok
}
