//! The threads that blocking calls need: their limit, their end, and timers beside them.

use crate::common::raw::{pipe, raw_lock, raw_read, raw_sleep, raw_write};
use crate::common::{
    MS, child_test, flag, join_all, median, ms, once_in_five, runtime, wake_up_delays, watchdog,
    yield_until,
};
use crate::lock_files;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};
use trefoil::time::sleep;
use trefoil::{Runtime, blocking, debug, go, lock_os_thread, yield_now};

/// The extra threads are limited and visible. All work is done nevertheless, and one line of output
/// says why it takes longer.
#[test]
fn threads_are_limited_and_the_limit_is_reported_once() {
    const LIMIT: usize = 8;
    child_test!(|child| {
        let stderr = child.succeed();
        let reports = stderr.matches("program exceeds 8-thread limit").count();
        assert_eq!(reports, 1, "{stderr}");
    });
    for procs in [1, 2, 8] {
        // The line is printed once per runtime: only one runtime reaches its limit.
        let limit = if procs == 2 { LIMIT } else { 100 };
        let rt = Runtime::builder().procs(procs).max_threads(limit).build().unwrap();
        let over = AtomicBool::new(false);
        let (most, without) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|s| {
            s.spawn(|| {
                while !over.load(SeqCst) {
                    most.fetch_max(ms().len(), SeqCst);
                    std::thread::sleep(MS);
                }
            });
            rt.run(|| {
                let done = join_all((0..50).map(|i| {
                    go(move || {
                        for _ in 0..3 {
                            if i % 2 == 0 {
                                blocking(|| raw_sleep(2 * MS));
                            } else {
                                raw_sleep(2 * MS);
                            }
                        }
                        let stats = debug::stats();
                        assert!(stats.threads <= limit, "{stats:?}");
                        (i, stats.threads_without_p)
                    })
                }));
                assert!(done.iter().enumerate().all(|(k, &(i, _))| k == i));
                without.store(done.iter().map(|&(_, n)| n).max().unwrap(), SeqCst);
            });
            over.store(true, SeqCst);
        });
        let most = most.load(SeqCst);
        assert!(most <= limit, "{most} threads");
        assert!(without.load(SeqCst) > 0, "no M without a P was counted");
        drop(rt);
        yield_until("the threads to end", || ms().is_empty());
    }
}

/// Threads that are no longer needed end after some seconds.
#[test]
#[ignore = "takes long"]
fn spare_threads_end_after_some_seconds() {
    child_test!();
    const BLOCKED: usize = 40;
    runtime(2).run(|| {
        let (read, write) = pipe();
        let (read, at) = (Arc::new(read), Arc::new(AtomicUsize::new(0)));
        let readers: Vec<_> = (0..BLOCKED)
            .map(|_| {
                let (read, at) = (read.clone(), at.clone());
                go(move || {
                    at.fetch_add(1, SeqCst);
                    assert_eq!(raw_read(&read), 1);
                })
            })
            .collect();
        yield_until("all goroutines to block", || {
            at.load(SeqCst) == BLOCKED && debug::stats().threads >= BLOCKED
        });
        assert_eq!(raw_write(&write, &[0; BLOCKED]), BLOCKED as isize);
        join_all(readers);
        let start = Instant::now();
        assert!(debug::stats().threads >= BLOCKED);
        while debug::stats().threads > 2 + 2 {
            assert!(start.elapsed() < Duration::from_secs(15), "{:?}", debug::stats());
            sleep(50 * MS);
        }
        assert!(start.elapsed() > Duration::from_secs(3), "after {:?}", start.elapsed());
        // An M is no longer counted a moment before its thread ends.
        yield_until("the threads to end", || ms().len() <= 4);
        // New threads start when they are needed.
        join_all((0..10).map(|_| go(|| raw_sleep(MS))));
    });
}

/// A P that is retaken or handed off may have timers: they fire in time.
#[test]
fn timers_fire_while_goroutines_block_their_threads() {
    let _watchdog = watchdog();
    const CALL: Duration = Duration::from_millis(600);
    once_in_five(|| {
        for procs in [1, 2, 8] {
            let rt = runtime(procs);
            let slept = rt.run(|| {
                let start = Instant::now();
                go(|| blocking(|| raw_sleep(CALL)));
                go(|| {
                    sleep(5 * MS);
                    raw_sleep(CALL);
                });
                go(|| {
                    let _guard = lock_os_thread();
                    sleep(5 * MS);
                    blocking(|| raw_sleep(CALL));
                });
                (0..10).for_each(|_| sleep(5 * MS));
                start.elapsed()
            });
            if slept > CALL / 2 {
                return Err(format!("{procs} Ps: 50 ms took {slept:?}"));
            }
        }
        Ok(())
    });
}

/// 64 goroutines block without `blocking`, in files, locks and sleeps; a ticker keeps its time.
#[test]
fn a_ticker_keeps_time_beside_64_blocked_goroutines() {
    child_test!();
    for procs in [1, 2] {
        once_in_five(|| {
            runtime(procs).run(|| {
                let stop = flag();
                let mut files = lock_files(17);
                let (held, (read, write)) = (files.pop().unwrap(), pipe());
                assert_eq!(raw_lock(&held, libc::LOCK_EX), 0);
                let read = Arc::new(read);
                let readers = (0..24).map(|_| {
                    let read = read.clone();
                    go(move || {
                        raw_read(&read);
                    })
                });
                let readers: Vec<_> = readers.collect();
                let lockers = files.into_iter().map(|file| {
                    go(move || {
                        raw_lock(&file, libc::LOCK_SH);
                    })
                });
                let lockers: Vec<_> = lockers.collect();
                let sleepers = (0..24).map(|_| {
                    let stop = stop.clone();
                    go(move || {
                        while !stop.load(SeqCst) {
                            raw_sleep(5 * MS);
                            yield_now();
                        }
                    })
                });
                let sleepers: Vec<_> = sleepers.collect();
                let late = wake_up_delays(500);
                stop.store(true, SeqCst);
                drop(write);
                drop(held);
                for handles in [readers, lockers, sleepers] {
                    join_all(handles);
                }
                let (middle, worst) = (median(late.clone()), late.iter().max().unwrap());
                println!("{procs} Ps, 64 blocked: median {middle:?}, worst {worst:?}");
                if middle < 2 * MS { Ok(()) } else { Err(format!("median {middle:?}")) }
            })
        });
    }
}
