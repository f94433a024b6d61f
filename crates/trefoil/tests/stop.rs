//! The end of a runtime with goroutines left: what the rest of the process shares with them is not lost.

mod common;

use common::{child_test, hold_until, tasks, watchdog};
use std::hint::black_box;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use trefoil::{Runtime, blocking, go, lock_os_thread};

/// Drops a runtime of `procs` Ps in which `n` goroutines do `work` for ever.
fn leave_behind(procs: usize, n: usize, work: fn()) {
    leave_behind_after(Duration::from_millis(25), procs, n, work);
}

/// As [`leave_behind`], after they have worked for a while.
fn leave_behind_after(worked: Duration, procs: usize, n: usize, work: fn()) {
    let rt = Runtime::builder().procs(procs).build().unwrap();
    rt.run(|| {
        for _ in 0..n {
            go(move || {
                loop {
                    work()
                }
            });
        }
        std::thread::sleep(worked);
    });
}

/// malloc and its locks, as others need them: every size, on a thread of its own arena and on this one.
fn allocate() {
    let all = || {
        for n in 0..300_usize {
            black_box(vec![1_u8; 500 + n * 701]);
        }
    };
    all();
    std::thread::spawn(all).join().unwrap();
}

/// Nearly always inside malloc, with its lock: it is found there often enough to be stopped there.
fn trim() {
    // SAFETY: no arguments that could be wrong.
    unsafe { libc::malloc_trim(0) };
    common::spin(Duration::from_micros(2));
}

/// A goroutine that was stopped inside malloc kept an arena's lock when its runtime was dropped.
#[test]
fn no_lock_of_malloc_is_lost() {
    let _watchdog = watchdog();
    for round in 0..12 {
        leave_behind(1 + round % 3, 4, trim);
        allocate();
    }
}

/// All threads waited for a lock in the hands of a goroutine that was stopped, and so did the aide, which was to start
/// the one that could resume it.
#[test]
fn a_holder_of_mallocs_lock_is_resumed_before_threads_run_out() {
    let _watchdog = watchdog();
    for _ in 0..5 {
        Runtime::builder().procs(2).build().unwrap().run(|| {
            let end = Instant::now() + Duration::from_millis(120);
            let work = move || {
                while Instant::now() < end {
                    trim();
                    black_box(vec![1_u8; 300_000]);
                }
            };
            let all: Vec<_> = (0..8).map(|_| go(work)).collect();
            all.into_iter().for_each(|g| g.join().unwrap());
        });
    }
}

/// The thread that a goroutine is locked to stays until that one is outside of malloc.
#[test]
fn a_locked_goroutine_gives_mallocs_lock_back() {
    let _watchdog = watchdog();
    for _ in 0..6 {
        let rt = Runtime::builder().procs(2).build().unwrap();
        rt.run(|| {
            for _ in 0..3 {
                go(|| {
                    let _thread = lock_os_thread();
                    loop {
                        trim();
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(25));
        });
        drop(rt);
        allocate();
    }
}

/// Goroutines that print all the time were left with the lock of standard output in their hands.
#[test]
fn standard_output_is_not_lost() {
    child_test!(|child| {
        let out = child.output();
        assert!(out.status.success(), "{}", out.status);
        for text in [out.stdout, out.stderr] {
            assert_eq!(String::from_utf8_lossy(&text).lines().filter(|l| *l == "after").count(), 3);
        }
    });
    for procs in [1, 2, 4] {
        leave_behind(procs, 3, || std::io::stdout().write_all(b"x\n").unwrap());
        std::io::stdout().write_all(b"after\n").unwrap();
        leave_behind(procs, 3, || {
            let mut out = std::io::stderr().lock();
            out.write_all(b"x").unwrap();
            std::thread::sleep(Duration::from_micros(50));
            out.write_all(b"\n").unwrap();
        });
        std::io::stderr().write_all(b"after\n").unwrap();
    }
}

/// Somebody keeps standard output for ever: the end of a runtime does not wait for that.
#[test]
fn an_output_that_is_never_given_back_delays_the_end_a_little() {
    child_test!(|child| child.fail(7));
    let rt = Runtime::builder().procs(2).build().unwrap();
    rt.run(|| {
        let (tell, told) = mpsc::channel();
        go(move || {
            let _out = std::io::stdout().lock();
            tell.send(()).unwrap();
            std::thread::sleep(Duration::from_secs(3600));
        });
        told.recv().unwrap();
    });
    let start = Instant::now();
    drop(rt);
    let took = start.elapsed();
    // SAFETY: ends the process; the harness would wait for its standard output.
    unsafe { libc::_exit(if took < Duration::from_secs(2) { 7 } else { 8 }) };
}

/// Who holds standard output and drops a runtime meanwhile goes on printing.
#[test]
fn the_one_who_drops_may_hold_standard_output() {
    child_test!(|child| {
        let out = child.output();
        assert!(out.status.success(), "{}", out.status);
        assert!(String::from_utf8_lossy(&out.stdout).contains("after\n"));
    });
    let mut out = std::io::stdout().lock();
    leave_behind(2, 2, std::thread::yield_now);
    out.write_all(b"after\n").unwrap();
}

/// Loops of every kind end with their runtime, and so do the threads; but for one in a call that blocks.
#[test]
fn threads_leave_whatever_their_goroutines_did() {
    child_test!();
    static STOP: AtomicBool = AtomicBool::new(false);
    let before = tasks().len();
    for work in [
        || common::spin(Duration::from_millis(1)),
        || drop(black_box(vec![1_u8; 1 << 20])),
        || std::thread::sleep(Duration::from_micros(10)),
        trefoil::yield_now,
        || blocking(std::thread::yield_now),
        trim,
    ] as [fn(); 6]
    {
        leave_behind(3, 5, work);
    }
    let rt = Runtime::builder().procs(1).build().unwrap();
    rt.run(|| {
        go(|| {
            blocking(|| {
                while !STOP.load(Ordering::Relaxed) {
                    // SAFETY: no memory involved.
                    unsafe { libc::poll(std::ptr::null_mut(), 0, 1) };
                }
            })
        });
        trefoil::yield_now();
    });
    drop(rt);
    hold_until("all threads but those of the last runtime have left", || {
        tasks().len() <= before + 3
    });
    STOP.store(true, Ordering::Relaxed);
    hold_until("its threads too", || tasks().len() == before);
}

/// Who holds one of the two outputs may want the other, before or after the drop.
#[test]
fn the_one_who_drops_may_hold_standard_error_and_print() {
    child_test!(|child| {
        let out = child.output();
        assert!(out.status.success(), "{}", out.status);
        assert!(String::from_utf8_lossy(&out.stdout).contains("after\n"));
        assert!(String::from_utf8_lossy(&out.stderr).contains("after\n"));
    });
    let mut err = std::io::stderr().lock();
    leave_behind(2, 2, std::thread::yield_now);
    std::io::stdout().write_all(b"after\n").unwrap();
    err.write_all(b"after\n").unwrap();
}

/// One that was blocked in the kernel when its runtime was dropped prints when it is back, and is not stopped there.
#[test]
fn one_that_was_blocked_may_print_afterwards() {
    child_test!(|child| {
        let out = child.output();
        assert!(out.status.success(), "{}", out.status);
        let lines = String::from_utf8_lossy(&out.stdout);
        assert_eq!(lines.lines().filter(|l| l.ends_with("after")).count(), 20);
    });
    let rt = Runtime::builder().procs(2).build().unwrap();
    rt.run(|| {
        for _ in 0..3 {
            go(|| {
                // SAFETY: no memory involved. Not a door: the thread blocks, and loses its P.
                unsafe { libc::syscall(libc::SYS_poll, 0, 0, 60) };
                for _ in 0..30_000 {
                    std::io::stdout().write_all(b"x\n").unwrap();
                }
            });
        }
        std::thread::sleep(Duration::from_millis(20));
    });
    drop(rt);
    for _ in 0..20 {
        std::io::stdout().write_all(b"after\n").unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What lies in std's buffer is written at exit, also if goroutines were still running when the runtime was dropped.
#[test]
fn the_last_word_is_printed() {
    child_test!(|child| {
        for _ in 0..5 {
            let out = child.output();
            assert!(String::from_utf8_lossy(&out.stdout).ends_with("the last word"));
        }
    });
    let rt = Runtime::builder().procs(2).build().unwrap();
    rt.run(|| {
        for _ in 0..2 {
            go(|| {
                let mut bytes = vec![1_u8; 1 << 20];
                loop {
                    bytes.fill(black_box(3));
                }
            });
        }
        std::thread::sleep(Duration::from_millis(5));
    });
    std::io::stdout().write_all(b"the last word").unwrap();
    drop(rt);
    std::process::exit(0);
}

/// A runtime may be dropped on one of its own goroutines, while others print.
#[test]
fn standard_output_is_not_lost_if_a_goroutine_drops_its_own_runtime() {
    child_test!(|child| {
        let out = child.output();
        assert!(out.status.success(), "{}", out.status);
        let lines = String::from_utf8_lossy(&out.stdout);
        assert_eq!(lines.lines().filter(|l| l.ends_with("after")).count(), 30);
    });
    for procs in [1, 2, 4] {
        let rt = Arc::new(Runtime::builder().procs(procs).build().unwrap());
        for _ in 0..3 {
            let print = || {
                loop {
                    std::io::stdout().write_all(b"x\n").unwrap();
                }
            };
            rt.go(print).unwrap();
        }
        let (tell, told) = mpsc::channel();
        let own = rt.clone();
        rt.go(move || {
            std::thread::sleep(Duration::from_millis(5));
            drop(own);
            tell.send(()).unwrap();
            std::thread::sleep(Duration::from_secs(3600));
        })
        .unwrap();
        drop(rt);
        let _ = told.recv();
        for _ in 0..10 {
            std::thread::sleep(Duration::from_millis(2));
            std::io::stdout().write_all(b"after\n").unwrap();
        }
    }
}

/// Beside busy processes: goroutines that compute, some of them back from a call that blocked, were not stopped in the
/// short time in which that was tried, and computed for ever.
#[test]
fn loops_end_on_a_busy_machine_too() {
    child_test!();
    let before = tasks().len();
    let hogs = common::BusyProcesses::start(6);
    for _ in 0..50 {
        let rt = Runtime::builder().procs(2).build().unwrap();
        for i in 0..4 {
            let compute = move || {
                if i % 2 == 0 {
                    common::raw::raw_sleep(Duration::from_millis(3));
                }
                loop {
                    black_box(i);
                }
            };
            drop(rt.go(compute).unwrap());
        }
        std::thread::sleep(Duration::from_millis(2));
        drop(rt);
    }
    hold_until("their threads have left", || tasks().len() == before);
    drop(hogs);
}

/// A goroutine was left in the panic hook, which runs under a lock of std's: the next `set_hook`, and then every panic,
/// waited for ever.
#[test]
fn the_panic_hook_is_not_lost() {
    child_test!(|child| {
        for backtrace in ["1", "0"] {
            child.env("RUST_BACKTRACE", backtrace).succeed();
        }
    });
    for round in 0..12 {
        leave_behind(1 + round % 3, 4, || {
            let _ = std::panic::catch_unwind(|| panic!("on a goroutine"));
        });
        drop(std::panic::take_hook());
        std::panic::set_hook(Box::new(|_| {
            std::io::stderr().write_all(b"after the end\n").unwrap();
        }));
        let _ = std::panic::catch_unwind(|| panic!("afterwards"));
        drop(std::panic::take_hook());
    }
}

/// A goroutine that had been woken for a lock when its runtime was dropped took the wake-up with it: all others that
/// waited for the lock waited for ever.
#[test]
fn a_lock_that_two_runtimes_share_is_not_lost() {
    static SHARED: std::sync::Mutex<u64> = std::sync::Mutex::new(0);
    static OVER: AtomicBool = AtomicBool::new(false);
    fn hold_for_a_moment() {
        let mut shared = SHARED.lock().unwrap();
        *shared += 1;
        common::spin(Duration::from_micros(1));
    }
    let _watchdog = watchdog();
    let thread = std::thread::spawn(|| {
        while !OVER.load(Ordering::Relaxed) {
            hold_for_a_moment();
        }
    });
    for round in 0..60 {
        // They are left at a runtime call, where they do not have the lock, or wait for it.
        leave_behind_after(Duration::from_millis(3), 1 + round % 3, 8, || {
            hold_for_a_moment();
            trefoil::yield_now();
        });
        hold_for_a_moment();
    }
    OVER.store(true, Ordering::Relaxed);
    thread.join().unwrap();
}

/// A goroutine had been woken for a lock, and stood behind another one when its runtime ended: it was resumed, and stopped
/// again before it had tried to take the lock.
#[test]
fn a_wake_up_for_a_lock_survives_the_end() {
    static SHARED: std::sync::Mutex<()> = std::sync::Mutex::new(());
    static STEP: AtomicU32 = AtomicU32::new(0);
    let reach = |step| hold_until("the next step", || STEP.load(Ordering::Acquire) >= step);
    let _watchdog = watchdog();
    for _ in 0..10 {
        STEP.store(0, Ordering::Relaxed);
        let rt = Runtime::builder().procs(1).build().unwrap();
        let held = SHARED.lock().unwrap();
        let waits = || {
            STEP.store(1, Ordering::Release);
            drop(SHARED.lock().unwrap());
        };
        drop(rt.go(waits).unwrap());
        reach(1);
        std::thread::sleep(Duration::from_millis(5));
        let thread = std::thread::spawn(|| drop(SHARED.lock().unwrap()));
        std::thread::sleep(Duration::from_millis(5));
        let keeps_the_p = || {
            STEP.store(2, Ordering::Release);
            loop {
                black_box(());
            }
        };
        drop(rt.go(keeps_the_p).unwrap());
        reach(2);
        // Wakes the goroutine, not the thread: that is the goroutine's to do when it has had the lock.
        drop(held);
        drop(rt);
        thread.join().unwrap();
    }
}

/// A mutex of C code, for all.
struct CMutex(std::cell::UnsafeCell<libc::pthread_mutex_t>);

// SAFETY: it is made for that.
unsafe impl Sync for CMutex {}

impl CMutex {
    const fn new() -> CMutex {
        CMutex(std::cell::UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER))
    }

    fn lock(&self) {
        // SAFETY: initialised, and never moved.
        assert_eq!(unsafe { libc::pthread_mutex_lock(self.0.get()) }, 0);
    }

    fn unlock(&self) {
        // SAFETY: initialised; whoever calls this has locked it.
        assert_eq!(unsafe { libc::pthread_mutex_unlock(self.0.get()) }, 0);
    }
}

/// A goroutine that was blocked in the kernel when its runtime ended, with a C lock, was left with it at its next runtime
/// call, although that would not have waited.
#[test]
fn a_goroutine_that_was_blocked_with_a_c_lock_gives_it_back() {
    static LOCK: CMutex = CMutex::new();
    static HELD: AtomicBool = AtomicBool::new(false);
    let _watchdog = watchdog();
    let rt = Runtime::builder().procs(2).build().unwrap();
    let holds = || {
        let (tx, _rx) = trefoil::chan::bounded::<u32>(4);
        LOCK.lock();
        HELD.store(true, Ordering::Release);
        common::raw::raw_sleep(Duration::from_millis(100));
        tx.try_send(1).unwrap();
        LOCK.unlock();
    };
    drop(rt.go(holds).unwrap());
    hold_until("it has the lock", || HELD.load(Ordering::Acquire));
    std::thread::sleep(Duration::from_millis(30));
    drop(rt);
    LOCK.lock();
    LOCK.unlock();
}

/// The same, in a wait for one of several descriptors.
#[test]
fn a_goroutine_that_polls_with_a_c_lock_gives_it_back() {
    static LOCK: CMutex = CMutex::new();
    static HELD: AtomicBool = AtomicBool::new(false);
    let _watchdog = watchdog();
    let rt = Runtime::builder().procs(2).build().unwrap();
    let (first, second) = (common::raw::pipe(), common::raw::pipe());
    let fds = [first.0.as_raw_fd(), second.0.as_raw_fd()];
    let holds = move || {
        LOCK.lock();
        HELD.store(true, Ordering::Release);
        let mut list = fds.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
        // SAFETY: a list of our own.
        assert_eq!(unsafe { libc::poll(list.as_mut_ptr(), 2, -1) }, 1);
        LOCK.unlock();
    };
    drop(rt.go(holds).unwrap());
    hold_until("it has the lock", || HELD.load(Ordering::Acquire));
    std::thread::sleep(Duration::from_millis(30));
    drop(rt);
    common::raw::raw_write(&second.1, b"x");
    LOCK.lock();
    LOCK.unlock();
}

/// A goroutine that waits for a condition holds no lock, and keeps no thread.
#[test]
fn waits_for_a_condition_end_with_the_runtime() {
    child_test!();
    struct Condition(std::cell::UnsafeCell<libc::pthread_cond_t>);
    // SAFETY: it is made for that.
    unsafe impl Sync for Condition {}
    static LOCK: CMutex = CMutex::new();
    static CONDITION: Condition =
        Condition(std::cell::UnsafeCell::new(libc::PTHREAD_COND_INITIALIZER));
    static OVER: AtomicBool = AtomicBool::new(false);
    let _watchdog = watchdog();
    let before = tasks().len();
    let signals = std::thread::spawn(|| {
        while !OVER.load(Ordering::Relaxed) {
            // SAFETY: initialised, and never moved.
            unsafe { libc::pthread_cond_signal(CONDITION.0.get()) };
        }
    });
    for _ in 0..20 {
        leave_behind_after(Duration::from_millis(5), 2, 4, || {
            LOCK.lock();
            // SAFETY: initialised; the mutex is ours.
            unsafe { libc::pthread_cond_wait(CONDITION.0.get(), LOCK.0.get()) };
            LOCK.unlock();
        });
    }
    OVER.store(true, Ordering::Relaxed);
    signals.join().unwrap();
    LOCK.lock();
    LOCK.unlock();
    hold_until("their threads have left", || tasks().len() == before);
}
