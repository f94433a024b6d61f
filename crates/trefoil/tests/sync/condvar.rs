//! `Condvar`.

use super::common::{MS, join_all, watchdog, yield_until};
use super::{join_thread, mixed, next, on, on_every};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};
use trefoil::sync::{Condvar, Mutex};
use trefoil::time::sleep;
use trefoil::{Runtime, go, scope, yield_now};

/// Go: TestCondSignal. One notification wakes one.
#[test]
fn notify_wakes_one() {
    let _w = watchdog();
    on_every(|| {
        let pair = Arc::new((Mutex::new(0), Condvar::new()));
        let awake = Arc::new(AtomicUsize::new(0));
        let handles: Vec<_> = (0..2)
            .map(|_| {
                let (pair, awake) = (pair.clone(), awake.clone());
                go(move || {
                    let mut running = pair.0.lock();
                    *running += 1;
                    pair.1.wait(&mut running);
                    awake.fetch_add(1, SeqCst);
                })
            })
            .collect();
        yield_until("both to wait", || *pair.0.lock() == 2);
        for n in 1..=2 {
            assert_eq!(awake.load(SeqCst), n - 1);
            let guard = pair.0.lock();
            assert!(pair.1.notify_one());
            drop(guard);
            yield_until("one", || awake.load(SeqCst) == n);
            sleep(MS);
            assert_eq!(awake.load(SeqCst), n, "woken for no reason");
        }
        assert!(!pair.1.notify_one());
        assert_eq!(pair.1.notify_all(), 0);
        join_all(handles);
    });
}

/// Go: TestCondSignalGenerations. First come, first served, a hundred times.
#[test]
fn is_fifo() {
    let _w = watchdog();
    const N: usize = 100;
    on_every(|| {
        let pair = Arc::new((Mutex::new((0, Vec::new())), Condvar::new()));
        let handles: Vec<_> = (0..N)
            .map(|i| {
                let p = pair.clone();
                let handle = go(move || {
                    let mut state = p.0.lock();
                    state.0 += 1;
                    p.1.wait(&mut state);
                    state.1.push(i);
                });
                yield_until("it to wait", || pair.0.lock().0 == i + 1);
                handle
            })
            .collect();
        for n in 1..=N {
            assert!(pair.1.notify_one());
            yield_until("the next", || pair.0.lock().1.len() == n);
        }
        assert_eq!(pair.0.lock().1, (0..N).collect::<Vec<_>>());
        join_all(handles);
    });
}

/// Go: TestCondBroadcast, 200 of them, again and again; half are plain threads here.
#[test]
fn broadcast() {
    let _w = watchdog();
    const ROUNDS: u64 = 5;
    let check = |n: usize, threads: bool| {
        // (round, arrived in this round)
        let pair = Arc::new((Mutex::new((0, 0)), Condvar::new(), Condvar::new()));
        let worker = {
            let pair = pair.clone();
            move |_| {
                for round in 0..ROUNDS {
                    let mut state = pair.0.lock();
                    state.1 += 1;
                    pair.2.notify_one();
                    while state.0 == round {
                        pair.1.wait(&mut state);
                    }
                }
            }
        };
        let main = {
            let pair = pair.clone();
            go(move || {
                for _ in 0..ROUNDS {
                    let mut state = pair.0.lock();
                    pair.2.wait_while(&mut state, |state| state.1 < n);
                    *state = (state.0 + 1, 0);
                    assert_eq!(pair.1.notify_all(), n);
                }
            })
        };
        if threads {
            mixed(n, worker);
        } else {
            join_all((0..n).map(|i| {
                go({
                    let worker = worker.clone();
                    move || worker(i)
                })
            }));
        }
        main.join().unwrap();
    };
    on_every(|| check(200, false));
    on(2, || check(32, true));
}

/// Go: TestCondSignalStealing, 1000 times. A notification is for one who waited when it was made,
/// not for one who comes afterwards.
#[test]
fn notification_is_not_stolen() {
    let _w = watchdog();
    on_every(|| {
        for _ in 0..250 {
            let pair = Arc::new((Mutex::new(false), Condvar::new()));
            let waiting = Arc::new(AtomicBool::new(false));
            let first = go({
                let (pair, waiting) = (pair.clone(), waiting.clone());
                move || {
                    let mut guard = pair.0.lock();
                    waiting.store(true, SeqCst);
                    pair.1.wait(&mut guard);
                }
            });
            yield_until("the first to wait", || waiting.load(SeqCst));
            drop(pair.0.lock());
            let done = Arc::new(AtomicBool::new(false));
            let second = go({
                let (pair, done) = (pair.clone(), done.clone());
                move || {
                    let mut guard = pair.0.lock();
                    pair.1.wait_while(&mut guard, |done| !*done);
                    done.store(true, SeqCst);
                }
            });
            assert!(pair.1.notify_one());
            first.join().unwrap();
            assert!(!done.load(SeqCst));
            *pair.0.lock() = true;
            pair.1.notify_all();
            second.join().unwrap();
        }
    });
}

#[test]
fn timeouts() {
    let _w = watchdog();
    static M: Mutex<u32> = Mutex::new(0);
    static C: Condvar = Condvar::new();
    let waits = || {
        let mut guard = M.lock();
        let start = Instant::now();
        assert!(C.wait_for(&mut guard, 2 * MS).timed_out());
        assert!(start.elapsed() >= 2 * MS);
        assert!(C.wait_until(&mut guard, Instant::now() + MS).timed_out());
        assert!(C.wait_until(&mut guard, start).timed_out(), "a past deadline");
        assert!(C.wait_for(&mut guard, Duration::ZERO).timed_out());
    };
    on_every(|| {
        join_all((0..4).map(|_| go(waits)));
        join_thread(std::thread::spawn(waits));
        let told = [Duration::from_secs(30), Duration::MAX].map(|limit| {
            go(move || {
                let mut guard = M.lock();
                *guard += 1;
                !C.wait_for(&mut guard, limit).timed_out()
            })
        });
        yield_until("them to wait", || *M.lock() == 2);
        *M.lock() = 0;
        assert_eq!(C.notify_all(), 2);
        assert_eq!(join_all(told), [true, true]);
        assert!(!C.notify_one(), "those that timed out are gone");
    });
}

/// Every notification that says "somebody" has woken exactly one, whatever the deadlines do.
#[test]
fn notifications_are_counted_exactly() {
    let _w = watchdog();
    on_every(|| {
        let pair = Arc::new((Mutex::new(()), Condvar::new()));
        let (told, left) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(8)));
        let notifier = go({
            let (pair, left) = (pair.clone(), left.clone());
            move || {
                let mut said = 0;
                while left.load(SeqCst) != 0 {
                    said += usize::from(pair.1.notify_one());
                    yield_now();
                }
                said
            }
        });
        mixed(8, {
            let (pair, told, left) = (pair.clone(), told.clone(), left.clone());
            move |i| {
                let mut seed = 3 + i as u64;
                for _ in 0..100 {
                    let mut guard = pair.0.lock();
                    let limit = Duration::from_nanos(next(&mut seed) % 100_000);
                    if !pair.1.wait_for(&mut guard, limit).timed_out() {
                        told.fetch_add(1, SeqCst);
                    }
                }
                left.fetch_sub(1, SeqCst);
            }
        });
        assert_eq!(notifier.join().unwrap(), told.load(SeqCst));
    });
}

/// Those whom `notify_all` moves to the mutex's queue, those with a deadline, and plain threads: all of them come back,
/// whether the notifier has the mutex or not.
#[test]
fn everybody_who_waited_comes_back_from_notify_all() {
    let _watchdog = watchdog();
    const ROUNDS: u64 = 300;
    const WAITERS: u64 = 24;
    for procs in [1, 4] {
        let state = Mutex::new((0_u64, 0_u64)); // the round, and how many have seen it
        let changed = Condvar::new();
        let wait = |who: u64| {
            for round in 1..=ROUNDS {
                let mut state = state.lock();
                while state.0 < round {
                    if who.is_multiple_of(3) {
                        changed.wait_for(&mut state, Duration::from_millis(1 + who % 2));
                    } else {
                        changed.wait(&mut state);
                    }
                }
                state.1 += 1;
            }
        };
        std::thread::scope(|threads| {
            threads.spawn(|| wait(0));
            threads.spawn(|| wait(1));
            Runtime::builder().procs(procs).build().unwrap().run(|| {
                scope(|s| {
                    for who in 2..WAITERS {
                        {
                            let wait = &wait;
                            s.go(move || wait(who));
                        }
                    }
                    for round in 1..=ROUNDS {
                        let mut now = state.lock();
                        now.0 = round;
                        if round.is_multiple_of(2) {
                            changed.notify_all();
                            drop(now);
                        } else {
                            drop(now);
                            changed.notify_all();
                        }
                        yield_until("all have seen it", || state.lock().1 == round * WAITERS);
                    }
                });
            });
        });
    }
}
