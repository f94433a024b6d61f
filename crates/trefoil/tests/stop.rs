//! The end of a runtime with goroutines left: they leave no shared lock locked and no thread
//! running.

mod common;

use common::{child_test, hold_until, rounds, tasks, watchdog};
use std::hint::black_box;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use trefoil::{Runtime, blocking, go, lock_os_thread};

/// Drops a runtime of `procs` Ps in which `n` goroutines do `work` for ever.
fn drop_while_working(procs: usize, n: usize, work: fn()) {
    drop_after_working(Duration::from_millis(25), procs, n, work);
}

/// As [`drop_while_working`], after a given time.
fn drop_after_working(worked: Duration, procs: usize, n: usize, work: fn()) {
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

/// Allocates every size, on a new thread with an arena of its own and on this one.
fn allocate() {
    let all = || {
        for n in 0..300_usize {
            black_box(vec![1_u8; 500 + n * 701]);
        }
    };
    all();
    std::thread::spawn(all).join().unwrap();
}

/// Is nearly always inside malloc with its lock, so that goroutines are often stopped there.
fn trim() {
    // SAFETY: any argument is valid.
    unsafe { libc::malloc_trim(0) };
    common::spin(Duration::from_micros(2));
}

/// A goroutine that was stopped inside malloc kept an arena's lock when its runtime was dropped.
#[test]
fn dropping_a_runtime_leaves_no_lock_of_malloc_locked() {
    let _watchdog = watchdog();
    for round in 0..rounds(6, 12) {
        drop_while_working(1 + round % 3, 4, trim);
        allocate();
    }
}

/// All threads waited for the lock of a goroutine that was stopped, and so did the helper thread,
/// which was to start the thread that could resume it.
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

/// The M of a locked goroutine stays until that goroutine has left malloc.
#[test]
fn a_goroutine_locked_to_its_thread_releases_mallocs_lock() {
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

/// Goroutines that print all the time kept the lock of standard output when their runtime ended.
#[test]
fn dropping_a_runtime_leaves_standard_output_unlocked() {
    child_test!(|child| {
        let out = child.output();
        assert!(out.status.success(), "{}", out.status);
        for text in [out.stdout, out.stderr] {
            assert_eq!(String::from_utf8_lossy(&text).lines().filter(|l| *l == "after").count(), 3);
        }
    });
    for procs in [1, 2, 4] {
        drop_while_working(procs, 3, || std::io::stdout().write_all(b"x\n").unwrap());
        std::io::stdout().write_all(b"after\n").unwrap();
        drop_while_working(procs, 3, || {
            let mut out = std::io::stderr().lock();
            out.write_all(b"x").unwrap();
            std::thread::sleep(Duration::from_micros(50));
            out.write_all(b"\n").unwrap();
        });
        std::io::stderr().write_all(b"after\n").unwrap();
    }
}

/// A goroutine keeps standard output locked for ever: the end of its runtime does not wait for
/// that.
#[test]
fn dropping_a_runtime_waits_only_briefly_for_a_locked_standard_output() {
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

/// A thread that has locked standard output and drops a runtime can still print.
#[test]
fn the_dropping_thread_may_hold_the_lock_of_standard_output() {
    child_test!(|child| {
        let out = child.output();
        assert!(out.status.success(), "{}", out.status);
        assert!(String::from_utf8_lossy(&out.stdout).contains("after\n"));
    });
    let mut out = std::io::stdout().lock();
    drop_while_working(2, 2, std::thread::yield_now);
    out.write_all(b"after\n").unwrap();
}

/// Loops of every kind end with their runtime, and so do the threads, except one in a blocking
/// call.
#[test]
fn threads_end_whatever_their_goroutines_do() {
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
        drop_while_working(3, 5, work);
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
    hold_until("all threads except those of the last runtime to end", || {
        tasks().len() <= before + 3
    });
    STOP.store(true, Ordering::Relaxed);
    hold_until("its threads to end too", || tasks().len() == before);
}

/// A thread that has locked one of the two outputs can still write to the other.
#[test]
fn the_dropping_thread_may_hold_the_lock_of_standard_error_and_print() {
    child_test!(|child| {
        let out = child.output();
        assert!(out.status.success(), "{}", out.status);
        assert!(String::from_utf8_lossy(&out.stdout).contains("after\n"));
        assert!(String::from_utf8_lossy(&out.stderr).contains("after\n"));
    });
    let mut err = std::io::stderr().lock();
    drop_while_working(2, 2, std::thread::yield_now);
    std::io::stdout().write_all(b"after\n").unwrap();
    err.write_all(b"after\n").unwrap();
}

/// A goroutine that was blocked in the kernel when its runtime was dropped prints when it returns,
/// and is not stopped meanwhile.
#[test]
fn a_goroutine_that_was_blocked_at_the_end_may_still_print() {
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
                // Not interposed: the thread blocks and loses its P.
                common::raw::raw_sleep(Duration::from_millis(60));
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

/// Output in std's buffer is written at exit, also if goroutines ran when the runtime was dropped.
#[test]
fn buffered_output_is_written_at_exit_after_a_drop() {
    child_test!(|child| {
        for _ in 0..5 {
            let out = child.output();
            assert!(String::from_utf8_lossy(&out.stdout).ends_with("the last line"));
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
    std::io::stdout().write_all(b"the last line").unwrap();
    drop(rt);
    std::process::exit(0);
}

/// A goroutine drops its own runtime while others print.
#[test]
fn a_goroutine_that_drops_its_own_runtime_leaves_standard_output_unlocked() {
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

/// Beside busy processes, goroutines that computed, some of them after a blocking call, were not
/// stopped within the short time that was allowed for it, and computed for ever.
#[test]
#[ignore = "takes long"]
fn endless_loops_end_with_their_runtime_on_a_busy_machine() {
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
    hold_until("their threads to end", || tasks().len() == before);
    drop(hogs);
}

/// A goroutine was left in the panic hook, which runs under a lock of std: the next `set_hook`, and
/// then every panic, waited for ever.
#[test]
fn dropping_a_runtime_leaves_the_panic_hook_unlocked() {
    child_test!(|child| {
        for backtrace in ["1", "0"] {
            child.env("RUST_BACKTRACE", backtrace).succeed();
        }
    });
    for round in 0..rounds(3, 12) {
        drop_while_working(1 + round % 3, 4, || {
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

/// A goroutine had been woken for a lock when its runtime was dropped, and the wake-up was lost:
/// all other waiters waited for ever.
#[test]
fn waiters_for_a_lock_are_woken_after_one_runtime_is_dropped() {
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
    for round in 0..rounds(20, 60) {
        // They are stopped at a call of the runtime, where they wait for the lock or do not have
        // it.
        drop_after_working(Duration::from_millis(3), 1 + round % 3, 8, || {
            hold_for_a_moment();
            trefoil::yield_now();
        });
        hold_for_a_moment();
    }
    OVER.store(true, Ordering::Relaxed);
    thread.join().unwrap();
}

/// A goroutine had been woken for a lock and was queued behind another one when its runtime ended:
/// it was resumed, and stopped again before it had tried to take the lock.
#[test]
fn a_goroutine_woken_for_a_lock_passes_it_on_when_its_runtime_ends() {
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
        let keep_the_p = || {
            STEP.store(2, Ordering::Release);
            loop {
                black_box(());
            }
        };
        drop(rt.go(keep_the_p).unwrap());
        reach(2);
        // Wakes the goroutine, not the thread, which the goroutine wakes after it had the lock.
        drop(held);
        drop(rt);
        thread.join().unwrap();
    }
}

/// A mutex of C that threads share.
struct CMutex(std::cell::UnsafeCell<libc::pthread_mutex_t>);

// SAFETY: C allows all threads to use it at once.
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
        // SAFETY: initialised; the caller has locked it.
        assert_eq!(unsafe { libc::pthread_mutex_unlock(self.0.get()) }, 0);
    }
}

/// A goroutine was blocked in the kernel with a C lock when its runtime ended. It was stopped at
/// its next call of the runtime, although that call would not have waited, and kept the lock.
#[test]
fn a_goroutine_that_was_blocked_releases_its_c_lock() {
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
    hold_until("the goroutine to lock", || HELD.load(Ordering::Acquire));
    std::thread::sleep(Duration::from_millis(30));
    drop(rt);
    LOCK.lock();
    LOCK.unlock();
}

/// The same while the goroutine waits for one of several descriptors.
#[test]
fn a_goroutine_that_polls_releases_its_c_lock() {
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
        // SAFETY: a list of two entries.
        assert_eq!(unsafe { libc::poll(list.as_mut_ptr(), 2, -1) }, 1);
        LOCK.unlock();
    };
    drop(rt.go(holds).unwrap());
    hold_until("the goroutine to lock", || HELD.load(Ordering::Acquire));
    std::thread::sleep(Duration::from_millis(30));
    drop(rt);
    common::raw::raw_write(&second.1, b"x");
    LOCK.lock();
    LOCK.unlock();
}

/// A goroutine that waits for a condition holds no lock and keeps no thread.
#[test]
fn goroutines_that_wait_for_a_condition_end_with_the_runtime() {
    child_test!();
    struct Condition(std::cell::UnsafeCell<libc::pthread_cond_t>);
    // SAFETY: C allows all threads to use it at once.
    unsafe impl Sync for Condition {}
    static LOCK: CMutex = CMutex::new();
    static CONDITION: Condition =
        Condition(std::cell::UnsafeCell::new(libc::PTHREAD_COND_INITIALIZER));
    static OVER: AtomicBool = AtomicBool::new(false);
    let before = tasks().len();
    let signals = std::thread::spawn(|| {
        while !OVER.load(Ordering::Relaxed) {
            // SAFETY: initialised, and never moved.
            unsafe { libc::pthread_cond_signal(CONDITION.0.get()) };
        }
    });
    for _ in 0..20 {
        drop_after_working(Duration::from_millis(5), 2, 4, || {
            LOCK.lock();
            // SAFETY: initialised; this goroutine has locked the mutex.
            unsafe { libc::pthread_cond_wait(CONDITION.0.get(), LOCK.0.get()) };
            LOCK.unlock();
        });
    }
    OVER.store(true, Ordering::Relaxed);
    signals.join().unwrap();
    LOCK.lock();
    LOCK.unlock();
    hold_until("their threads to end", || tasks().len() == before);
}
