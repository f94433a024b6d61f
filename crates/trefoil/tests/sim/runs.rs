//! Single runs: the clock, the schedule, the seeds, and what counts as a failure.

use crate::common;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::{Duration, Instant, SystemTime};
use trefoil::sim::{self, FailureKind, Seed};
use trefoil::{chan, go, time, yield_now};

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn sleeps_of_all_kinds_take_exactly_their_simulated_time() {
    let real = Instant::now();
    sim::run(|| {
        let begin = (Instant::now(), SystemTime::now());
        std::thread::sleep(1000 * SECOND);
        assert_eq!(begin.0.elapsed(), 1000 * SECOND);
        time::sleep(1000 * SECOND);
        // SAFETY: a plain call.
        unsafe { libc::sleep(1000) };
        assert_eq!(begin.0.elapsed(), 3000 * SECOND);
        assert_eq!(begin.1.elapsed().unwrap(), 3000 * SECOND);
        let (_tx, rx) = mpsc::channel::<()>();
        assert!(rx.recv_timeout(500 * SECOND).is_err());
        let (mutex, condvar) = (Mutex::new(()), Condvar::new());
        let (_guard, result) = condvar.wait_timeout(mutex.lock().unwrap(), 500 * SECOND).unwrap();
        assert!(result.timed_out());
        assert_eq!(begin.0.elapsed(), 4000 * SECOND);
    });
    assert!(real.elapsed() < 60 * SECOND);
}

#[test]
fn time_begins_alike_in_every_run() {
    let times = || sim::run(|| (Instant::now(), SystemTime::now()));
    assert_eq!(times(), times());
    let since_1970 = times().1.duration_since(SystemTime::UNIX_EPOCH).unwrap();
    assert_eq!(since_1970, Duration::from_secs(946_684_800), "2000-01-01");
}

#[test]
fn the_wall_clock_stops_at_the_last_time_that_it_can_show() {
    const CENTURY: Duration = Duration::from_secs(36_525 * 24 * 3600);
    sim::run(|| {
        let since_1970 = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let begin = (Instant::now(), since_1970());
        time::sleep(5 * CENTURY);
        assert_eq!(since_1970(), begin.1 + 5 * CENTURY);
        time::sleep(CENTURY / 2);
        time::sleep(CENTURY / 4);
        assert_eq!(since_1970(), Duration::from_nanos(u64::MAX));
        assert_eq!(begin.0.elapsed(), 5 * CENTURY + CENTURY / 2 + CENTURY / 4);
    });
}

#[test]
fn a_minute_of_a_thousand_sleepers_is_exact() {
    let ticks = sim::run(|| {
        let ticks = Arc::new(AtomicU64::new(0));
        let handles: Vec<_> = (0..1000)
            .map(|_| {
                let ticks = ticks.clone();
                go(move || {
                    for _ in 0..60 {
                        time::sleep(SECOND);
                        ticks.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        handles.into_iter().for_each(|handle| handle.join().unwrap());
        ticks.load(Ordering::Relaxed)
    });
    assert_eq!(ticks, 60 * 1000);
}

#[test]
fn settle_returns_when_all_others_wait_and_takes_no_time() {
    sim::run(|| {
        let begin = Instant::now();
        let done = Arc::new(AtomicU32::new(0));
        let handles: Vec<_> = (0..10)
            .map(|_| {
                let done = done.clone();
                go(move || {
                    (0..100).for_each(|_| yield_now());
                    done.fetch_add(1, Ordering::SeqCst);
                    time::sleep(SECOND);
                    done.fetch_add(1, Ordering::SeqCst);
                })
            })
            .collect();
        sim::settle();
        assert_eq!(done.load(Ordering::SeqCst), 10);
        assert_eq!(begin.elapsed(), Duration::ZERO);
        handles.into_iter().for_each(|handle| handle.join().unwrap());
        assert_eq!(done.load(Ordering::SeqCst), 20);
    });
}

#[test]
#[should_panic(expected = "not in a simulation")]
fn settle_panics_outside_a_simulation() {
    trefoil::run(sim::settle);
}

#[test]
fn a_deadlock_is_reported_with_the_places() {
    let failure = sim::builder()
        .explore(1, || {
            let (tx, rx) = chan::bounded::<()>(1);
            rx.recv().unwrap();
            drop(tx);
        })
        .unwrap_err();
    assert_eq!(failure.kind, FailureKind::Deadlock);
    assert!(failure.message.contains("chan receive"), "{}", failure.message);
    assert!(!failure.message.contains("wait_for_end"), "{}", failure.message);
    assert!(failure.is_repeatable);
}

#[test]
fn a_goroutine_that_is_left_is_reported() {
    let failure = sim::builder()
        .explore(1, || {
            let handle = go(|| time::sleep(SECOND));
            drop(handle);
        })
        .unwrap_err();
    assert_eq!(failure.kind, FailureKind::Outlived);
    assert!(failure.message.contains("sleep"), "{}", failure.message);
}

#[test]
fn a_panic_of_any_goroutine_is_reported_with_its_message() {
    let failure = sim::builder()
        .explore(1, || {
            let handle = go(|| panic!("in the second one"));
            drop(handle);
        })
        .unwrap_err();
    assert_eq!(failure.kind, FailureKind::Panic);
    assert!(failure.message.contains("in the second one"), "{}", failure.message);
}

#[test]
fn too_many_steps_end_a_run() {
    let lone_loop = || {
        loop {
            yield_now();
        }
    };
    let polls_the_clock = || {
        let start = Instant::now();
        while start.elapsed() < SECOND {}
    };
    let sleeps_beside_a_deadlock = || {
        let other = go(|| {
            loop {
                time::sleep(SECOND);
            }
        });
        other.join().unwrap();
    };
    let programs: [fn(); 3] = [lone_loop, polls_the_clock, sleeps_beside_a_deadlock];
    for program in programs {
        let failure = sim::builder().max_steps(5000).explore(1, program).unwrap_err();
        assert_eq!(failure.kind, FailureKind::TooManySteps);
    }
}

#[test]
fn a_sleep_without_an_end_is_part_of_a_deadlock() {
    let program = || time::sleep(Duration::MAX);
    let failure = sim::builder().explore(1, program).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Deadlock);
}

#[trefoil::test(virtual_time)]
fn ticks_have_their_simulated_time() {
    let begin = Instant::now();
    let ticks = chan::tick(SECOND);
    for i in 1..=10 {
        assert_eq!(ticks.recv().unwrap() - begin, i * SECOND);
        assert_eq!(begin.elapsed(), i * SECOND);
    }
}

#[test]
fn a_panic_that_is_caught_is_no_failure_and_that_of_a_task_is() {
    let caught = || {
        let result = std::panic::catch_unwind(|| panic!("caught"));
        assert!(result.is_err());
    };
    sim::builder().explore(3, caught).unwrap();
    let in_task = move || {
        caught();
        drop(trefoil::task::spawn(async { panic!("in the task") }));
    };
    let failure = sim::builder().explore(1, in_task).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Panic);
    assert!(failure.message.contains("in the task"), "{}", failure.message);
}

#[test]
fn a_simulation_has_one_p() {
    sim::run(|| {
        trefoil::set_procs(4);
        assert_eq!(trefoil::procs(), 1);
    });
}

/// Goroutines that do a bit of everything. Returns what they have seen.
fn mixed_program() -> Vec<u64> {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (tx, rx) = chan::bounded::<u64>(2);
    let mut handles = Vec::new();
    for i in 0..4u64 {
        let (tx, seen) = (tx.clone(), seen.clone());
        handles.push(go(move || {
            let map: HashMap<u64, u64> = (0..8).map(|k| (k, i)).collect();
            for k in map.keys() {
                tx.send(*k + 100 * i).unwrap();
                if k % 3 == 0 {
                    time::sleep(Duration::from_millis(k + i));
                }
            }
            seen.lock().unwrap().push(1000 + i);
        }));
    }
    drop(tx);
    let to = seen.clone();
    handles.push(go(move || {
        for value in rx.iter() {
            to.lock().unwrap().push(value);
        }
    }));
    handles.into_iter().for_each(|handle| handle.join().unwrap());
    Arc::into_inner(seen).unwrap().into_inner().unwrap()
}

#[test]
fn a_seed_repeats_a_run_and_seeds_differ() {
    let all: Arc<Mutex<Vec<Vec<u64>>>> = Arc::default();
    for _ in 0..3 {
        let to = all.clone();
        let program = move || to.lock().unwrap().push(mixed_program());
        sim::builder().seed(5).explore(40, program).unwrap();
    }
    let all = all.lock().unwrap();
    for i in 0..40 {
        assert_eq!(all[i], all[40 + i], "run {i}");
        assert_eq!(all[i], all[80 + i], "run {i}");
    }
    let mut different = all[..40].to_vec();
    different.sort();
    different.dedup();
    assert!(different.len() > 30, "{}", different.len());
}

/// Four goroutines read a number, and then write one more.
fn loses_updates() {
    let n = Arc::new(AtomicU32::new(0));
    let add = |n: &AtomicU32| {
        let before = n.load(Ordering::SeqCst);
        std::hint::black_box(Instant::now());
        n.store(before + 1, Ordering::SeqCst);
    };
    let handles: Vec<_> = (0..4)
        .map(|_| {
            let n = n.clone();
            go(move || add(&n))
        })
        .collect();
    handles.into_iter().for_each(|handle| handle.join().unwrap());
    assert_eq!(n.load(Ordering::SeqCst), 4, "an update was lost");
}

#[test]
fn a_lost_update_is_found_shrunk_and_repeated() {
    let failure = sim::builder().explore(1000, loses_updates).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Panic);
    assert!(failure.is_repeatable);
    assert!(failure.message.contains("an update was lost"), "{}", failure.message);
    let shrunk = failure.shrunk.clone().expect("the run can be repeated without its strategy");
    // The ordinary schedule, and one preemption.
    let deviations = shrunk.to_string().matches('.').count();
    assert!(deviations <= 2, "{shrunk}");
    assert_eq!(shrunk.to_string().parse::<Seed>().unwrap(), shrunk);
    // In other processes, by both seeds.
    for seed in [failure.seed.clone(), shrunk] {
        let out = common::this_program()
            .args(["--exact", "runs::explores_by_the_seed_of_the_environment", "--nocapture"])
            .args(["--include-ignored"])
            .env("TREFOIL_SEED", seed.to_string())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&out.stderr) + String::from_utf8_lossy(&out.stdout);
        assert!(!out.status.success(), "{seed}: {text}");
        assert!(text.contains("an update was lost"), "{seed}: {text}");
        assert!(text.contains(&format!("TREFOIL_SEED={seed}")), "{seed}: {text}");
        assert!(!text.contains("differs"), "{seed}: {text}");
    }
}

#[test]
#[ignore = "for the test above, in a process of its own"]
fn explores_by_the_seed_of_the_environment() {
    if std::env::var_os("TREFOIL_SEED").is_some() {
        sim::explore(1000, loses_updates);
    }
}

#[test]
fn waiting_for_a_descriptor_is_refused_with_a_reason() {
    use std::os::unix::net::UnixStream;
    sim::run(|| {
        let (a, _b) = trefoil::net::UnixStream::pair().unwrap();
        let error = std::io::Read::read(&mut &a, &mut [0]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::Unsupported);
        assert!(error.to_string().contains("outside the simulation"), "{error}");
        let (mut a, _b) = UnixStream::pair().unwrap();
        let error = std::io::Read::read(&mut a, &mut [0]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP));
    });
}

#[test]
fn time_stands_still_while_a_goroutine_waits_outside() {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    let (mut ours, mut theirs) = UnixStream::pair().unwrap();
    let has_ended = Arc::new(AtomicBool::new(false));
    let flag = has_ended.clone();
    let writer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        assert!(!flag.load(Ordering::SeqCst), "the simulated sleep ended first");
        ours.write_all(b"x").unwrap();
    });
    sim::builder().wait_outside().run(move || {
        let begin = Instant::now();
        let flag = has_ended.clone();
        let sleeper = go(move || {
            time::sleep(SECOND);
            flag.store(true, Ordering::SeqCst);
        });
        theirs.read_exact(&mut [0]).unwrap();
        assert_eq!(begin.elapsed(), Duration::ZERO);
        sleeper.join().unwrap();
        assert_eq!(begin.elapsed(), SECOND);
    });
    writer.join().unwrap();
}

#[test]
fn simulations_run_beside_each_other_and_beside_real_time() {
    let threads: Vec<_> = (0..4)
        .map(|_| {
            std::thread::spawn(|| {
                for _ in 0..20 {
                    let took = sim::run(|| {
                        let begin = Instant::now();
                        time::sleep(100 * SECOND);
                        begin.elapsed()
                    });
                    assert_eq!(took, 100 * SECOND);
                }
            })
        })
        .collect();
    let begin = Instant::now();
    trefoil::run(|| time::sleep(Duration::from_millis(50)));
    assert!((Duration::from_millis(50)..100 * SECOND).contains(&begin.elapsed()));
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[trefoil::test(virtual_time)]
fn the_attribute_runs_a_test_in_virtual_time() {
    let begin = Instant::now();
    std::thread::sleep(3600 * SECOND);
    assert_eq!(begin.elapsed(), 3600 * SECOND);
}

/// Tasks that sleep and send.
fn tasks_program() -> Vec<u64> {
    let (tx, rx) = chan::bounded::<u64>(1);
    let tasks: Vec<_> = (0..4u64)
        .map(|i| {
            let tx = tx.clone();
            trefoil::task::spawn(async move {
                for k in 0..3 {
                    time::sleep_async(Duration::from_millis(i * k)).await;
                    tx.send_async(10 * i + k).await.unwrap();
                }
            })
        })
        .collect();
    drop(tx);
    let all = rx.iter().collect();
    tasks.into_iter().for_each(|task| task.join().unwrap());
    all
}

#[test]
fn tasks_are_simulated_like_goroutines() {
    let all: Arc<Mutex<Vec<Vec<u64>>>> = Arc::default();
    for _ in 0..2 {
        let to = all.clone();
        sim::builder().explore(50, move || to.lock().unwrap().push(tasks_program())).unwrap();
    }
    let all = all.lock().unwrap();
    assert_eq!(all[..50], all[50..]);
    let mut different = all[..50].to_vec();
    different.sort();
    different.dedup();
    assert!(different.len() > 10, "{}", different.len());
    assert!(all.iter().all(|values| values.len() == 12));
}

#[test]
fn a_dump_says_how_long_goroutines_have_waited_in_simulated_time() {
    let failure = sim::builder().explore(1, || {
        let (tx, rx) = chan::bounded::<()>(0);
        let _waiting = go(move || rx.recv());
        std::mem::forget(tx);
        time::sleep(5 * 60 * SECOND);
    });
    let dump = failure.unwrap_err().message;
    assert!(dump.contains("chan receive, 5 minutes"), "{dump}");
}

#[test]
fn uncontended_locks_are_calls() {
    use trefoil::sync::{Mutex, RwLock};

    /// Two goroutines check and then act, each in two critical sections.
    fn check_then_act<L: Send + Sync + 'static>(lock: L, is_free: fn(&L) -> bool, take: fn(&L)) {
        let lock = Arc::new(lock);
        let take_if_free = move |lock: &L| {
            let was_free = is_free(lock);
            if was_free {
                take(lock);
            }
            was_free
        };
        let other = go({
            let lock = lock.clone();
            move || take_if_free(&lock)
        });
        let both = take_if_free(&lock) & other.join().unwrap();
        assert!(!both, "both have taken it");
    }
    let with_mutex = || check_then_act(Mutex::new(true), |m| *m.lock(), |m| *m.lock() = false);
    let with_rwlock = || check_then_act(RwLock::new(true), |l| *l.read(), |l| *l.write() = false);
    // A lock is held at the call that follows it.
    let in_two_orders = || {
        let locks = Arc::new((Mutex::new(()), Mutex::new(())));
        let other = go({
            let locks = locks.clone();
            move || {
                let _first = locks.0.lock();
                let _second = locks.1.lock();
            }
        });
        {
            let _first = locks.1.lock();
            let _second = locks.0.lock();
        }
        other.join().unwrap();
    };
    let programs: [(fn(), FailureKind); 3] = [
        (with_mutex, FailureKind::Panic),
        (with_rwlock, FailureKind::Panic),
        (in_two_orders, FailureKind::Deadlock),
    ];
    for (program, kind) in programs {
        let failure = sim::builder().explore(500, program).unwrap_err();
        assert_eq!(failure.kind, kind, "{failure}");
        assert!(failure.is_repeatable, "{failure}");
    }
}
