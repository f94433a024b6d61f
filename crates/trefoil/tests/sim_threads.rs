//! Threads of `std::thread` in simulations: they are goroutines there, with the clock and the
//! schedule of the test.

#![cfg(feature = "std")]

use std::cell::Cell;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};
use trefoil::sim;
use trefoil::sim::FailureKind;

const HOUR: Duration = Duration::from_secs(3600);

/// Returns how many OS threads the process has.
fn os_threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn a_thread_is_a_goroutine_and_sleeps_in_virtual_time() {
    let began = Instant::now();
    sim::run(|| {
        let begin = Instant::now();
        let handles: Vec<_> = (1..=100)
            .map(|i| {
                thread::spawn(move || {
                    thread::sleep(i * HOUR);
                    begin.elapsed()
                })
            })
            .collect();
        for (handle, i) in handles.into_iter().zip(1..) {
            assert_eq!(handle.join().unwrap(), i * HOUR);
        }
    });
    assert!(began.elapsed() < Duration::from_secs(60));
}

#[test]
fn threads_of_a_simulation_are_no_os_threads() {
    sim::run(|| {
        let before = os_threads();
        let (tx, rx) = mpsc::channel::<()>();
        let rx = Arc::new(Mutex::new(rx));
        let waiting: Vec<_> = (0..64)
            .map(|_| {
                let rx = rx.clone();
                thread::spawn(move || rx.lock().unwrap().recv().is_err())
            })
            .collect();
        sim::settle();
        // Other tests of this process may start some meanwhile.
        assert!(os_threads() < before + 32, "{} threads, {before} before", os_threads());
        drop(tx);
        assert!(waiting.into_iter().all(|handle| handle.join().unwrap()));
    });
}

#[test]
fn scoped_threads_park_and_share_what_they_borrow() {
    sim::explore(200, || {
        let turns = AtomicU32::new(0);
        let turns = &turns;
        thread::scope(|scope| {
            let parked = scope.spawn(|| {
                while turns.load(SeqCst) == 0 {
                    thread::park();
                }
                turns.fetch_add(1, SeqCst);
            });
            scope.spawn(move || {
                turns.fetch_add(1, SeqCst);
                parked.thread().unpark();
            });
        });
        assert_eq!(turns.load(SeqCst), 2);
    });
}

#[test]
fn each_thread_has_thread_locals_of_its_own_and_destroys_them() {
    struct Count(Arc<AtomicUsize>);
    impl Drop for Count {
        fn drop(&mut self) {
            self.0.fetch_add(1, SeqCst);
        }
    }
    thread_local! {
        static COUNT: Cell<Option<Count>> = const { Cell::new(None) };
    }
    sim::run(|| {
        let dropped = Arc::new(AtomicUsize::new(0));
        let threads: Vec<_> = (0..10)
            .map(|_| {
                let dropped = dropped.clone();
                thread::spawn(move || {
                    assert!(COUNT.take().is_none());
                    COUNT.set(Some(Count(dropped)));
                    thread::yield_now();
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(dropped.load(SeqCst), 10);
    });
}

#[test]
fn a_panic_of_a_thread_is_the_result_of_its_join() {
    sim::run(|| {
        let handle = thread::Builder::new().name("faulty".into()).spawn(|| panic!("on purpose"));
        let panic = handle.unwrap().join().unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"on purpose"));
    });
}

#[test]
fn names_and_ids_are_those_of_std() {
    sim::run(|| {
        let handle = thread::Builder::new().name("clerk".into());
        let handle = handle
            .spawn(|| (thread::current().id(), thread::current().name().map(str::to_owned)))
            .unwrap();
        let id = handle.thread().id();
        assert_eq!(handle.join().unwrap(), (id, Some("clerk".to_owned())));
    });
}

/// Two threads wait for each other's lock, if the schedule lets both take their first one.
fn locks_in_two_orders() {
    let locks = Arc::new((Mutex::new(()), Mutex::new(())));
    let other = locks.clone();
    let thread = thread::spawn(move || {
        let _first = other.0.lock().unwrap();
        thread::yield_now();
        let _second = other.1.lock().unwrap();
    });
    {
        let _first = locks.1.lock().unwrap();
        thread::yield_now();
        let _second = locks.0.lock().unwrap();
    }
    thread.join().unwrap();
}

#[test]
fn a_deadlock_of_threads_is_found_and_replayed() {
    let failure = sim::builder().explore(500, locks_in_two_orders).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Deadlock);
    assert!(failure.is_repeatable, "{failure}");
    let again = sim::builder().replay(&failure.seed, locks_in_two_orders).unwrap_err();
    assert!(again.is_repeatable, "{again}");
}

#[test]
fn a_thread_that_waits_at_the_end_does_not_count() {
    let explored = sim::builder().explore(20, || {
        let (tx, rx) = mpsc::channel::<()>();
        // Like a background thread of a library that is never stopped.
        thread::spawn(move || rx.recv());
        std::mem::forget(tx);
    });
    assert_eq!(explored.unwrap().runs, 20);
}

#[test]
fn a_runnable_thread_runs_to_its_end_after_the_root_has_returned() {
    static DONE: AtomicU32 = AtomicU32::new(0);
    sim::run(|| {
        struct AtEnd;
        impl Drop for AtEnd {
            fn drop(&mut self) {
                DONE.fetch_add(1, SeqCst);
            }
        }
        thread::spawn(|| {
            let _at_end = AtEnd;
            thread::yield_now();
        });
        assert_eq!(DONE.load(SeqCst), 0);
    });
    assert_eq!(DONE.load(SeqCst), 1);
}

#[test]
fn condition_variables_with_timeouts_work_between_threads() {
    sim::run(|| {
        let pair = Arc::new((Mutex::new(false), Condvar::new()));
        let other = pair.clone();
        let thread = thread::spawn(move || {
            thread::sleep(Duration::from_secs(10));
            *other.0.lock().unwrap() = true;
            other.1.notify_one();
        });
        let begin = Instant::now();
        let guard = pair.0.lock().unwrap();
        let wait = |guard, secs| {
            pair.1
                .wait_timeout_while(guard, Duration::from_secs(secs), |set: &mut bool| !*set)
                .unwrap()
        };
        let (guard, result) = wait(guard, 4);
        assert!(result.timed_out() && !*guard);
        let (guard, result) = wait(guard, 60);
        assert!(!result.timed_out() && *guard);
        assert_eq!(begin.elapsed(), Duration::from_secs(10));
        drop(guard);
        thread.join().unwrap();
    });
}

#[test]
fn a_server_with_a_thread_per_connection_runs_on_a_host_and_dies_with_it() {
    static SERVED: AtomicU32 = AtomicU32::new(0);
    sim::run(|| {
        SERVED.store(0, SeqCst);
        let server = sim::host("server", || {
            let listener = TcpListener::bind("0.0.0.0:7").unwrap();
            for stream in listener.incoming() {
                thread::spawn(move || {
                    let mut stream = stream.unwrap();
                    let mut byte = [0];
                    while stream.read(&mut byte).unwrap() > 0 {
                        SERVED.fetch_add(1, SeqCst);
                        stream.write_all(&byte).unwrap();
                    }
                });
            }
        });
        sim::settle();
        let clients: Vec<_> = (0..5)
            .map(|i| {
                thread::spawn(move || {
                    let mut stream = TcpStream::connect("server:7").unwrap();
                    let mut byte = [0];
                    stream.write_all(&[i]).unwrap();
                    stream.read_exact(&mut byte).unwrap();
                    assert_eq!(byte, [i]);
                })
            })
            .collect();
        clients.into_iter().for_each(|client| client.join().unwrap());
        assert_eq!(SERVED.load(SeqCst), 5);
        let mut stream = TcpStream::connect("server:7").unwrap();
        server.crash();
        let _ = stream.write_all(b"x");
        thread::sleep(HOUR);
        assert_eq!(SERVED.load(SeqCst), 5);
    });
}

#[test]
fn runs_with_threads_are_replayed_alike() {
    // Threads of several kinds, with locks, sleeps and channels; fails in some schedules.
    let program = || {
        let (tx, rx) = mpsc::channel();
        let shared = Arc::new(Mutex::new(0));
        let threads: Vec<_> = (0..4_u64)
            .map(|i| {
                let (tx, shared) = (tx.clone(), shared.clone());
                thread::spawn(move || {
                    thread::sleep(Duration::from_millis(i % 2));
                    *shared.lock().unwrap() += i;
                    tx.send(i).unwrap();
                })
            })
            .collect();
        drop(tx);
        let order: Vec<_> = rx.iter().collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_ne!(order, [2, 0, 3, 1], "the order that is sought");
    };
    let failure = sim::builder().explore(5_000, program).unwrap_err();
    assert!(failure.is_repeatable, "{failure}");
    for _ in 0..20 {
        let again = sim::builder().replay(&failure.seed, program).unwrap_err();
        assert!(again.is_repeatable, "{again}");
        assert_eq!(again.seed, failure.seed);
    }
}

/// Returns how many descriptors the process has.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Runs `test` alone in a child process, and asserts that it passes. Returns true in that child.
fn is_child_or_run_child(test: &str) -> bool {
    const VARIABLE: &str = "SIM_THREADS_ALONE";
    if std::env::var_os(VARIABLE).is_some() {
        return true;
    }
    let program = std::env::current_exe().unwrap();
    let output = std::process::Command::new(program)
        .args([test, "--exact", "--nocapture"])
        .env(VARIABLE, "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    false
}

#[test]
fn threads_that_are_left_keep_no_descriptors() {
    if !is_child_or_run_child("threads_that_are_left_keep_no_descriptors") {
        return;
    }
    let explore = |runs| {
        sim::explore(runs, || {
            // The root opens it, and a thread waits for it for ever.
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            thread::spawn(move || listener.accept());
            // An event loop of a host, as tokio's.
            sim::host("loop", || {
                // SAFETY: plain calls; the array has room for an event.
                unsafe {
                    let epoll = libc::epoll_create1(0);
                    let copy = libc::fcntl(epoll, libc::F_DUPFD_CLOEXEC, 3);
                    let wake = libc::eventfd(0, libc::EFD_NONBLOCK);
                    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
                    libc::epoll_ctl(copy, libc::EPOLL_CTL_ADD, wake, &raw mut event);
                    libc::epoll_wait(epoll, &raw mut event, 1, -1);
                }
            });
            sim::settle();
        });
    };
    explore(3);
    let before = descriptors();
    explore(50);
    assert!(descriptors() < before + 10, "{} descriptors, {before} before", descriptors());
}

#[test]
fn a_thread_that_is_joined_after_its_run_does_not_hang() {
    let (returned, left) = sim::run(|| {
        let returned = thread::spawn(|| 5);
        let left = thread::spawn(|| {
            thread::sleep(HOUR);
            6
        });
        sim::settle();
        (returned, left)
    });
    assert_eq!(returned.join().unwrap(), 5);
    // std panics: the thread has not ended, and never will.
    let joined = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| left.join()));
    assert!(joined.is_err());
}

#[test]
fn a_socket_that_a_thread_has_returned_stays_the_tests() {
    let listener = sim::run(|| {
        let left = thread::spawn(thread::park);
        drop(left);
        thread::spawn(|| TcpListener::bind("127.0.0.1:0").unwrap()).join().unwrap()
    });
    drop(listener);
}

#[test]
fn a_thread_that_never_waits_ends_with_the_test() {
    static STOP: AtomicU32 = AtomicU32::new(0);
    let explored = sim::builder().max_steps(100_000).explore(5, || {
        thread::spawn(|| {
            while STOP.load(SeqCst) == 0 {
                thread::yield_now();
            }
        });
    });
    assert_eq!(explored.unwrap().runs, 5);
}
