//! `Condvar`.

use super::common::{MS, assert_passed, join_all, watchdog, yield_until};
use super::{Workers, mixed, next, on, on_every};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};
use trefoil::sync::{Condvar, Mutex};
use trefoil::time::sleep;
use trefoil::{Runtime, go, scope, sim, yield_now};

/// Go: TestCondSignal.
#[test]
fn notify_one_wakes_exactly_one_waiter() {
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
            yield_until("one to wake", || awake.load(SeqCst) == n);
            sleep(MS);
            assert_eq!(awake.load(SeqCst), n, "a second waiter was woken");
        }
        assert!(!pair.1.notify_one());
        assert_eq!(pair.1.notify_all(), 0);
        join_all(handles);
    });
}

/// Go: TestCondSignalGenerations.
#[test]
fn a_condvar_notifies_its_waiters_in_fifo_order() {
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
                yield_until("the goroutine to wait", || pair.0.lock().0 == i + 1);
                handle
            })
            .collect();
        for n in 1..=N {
            assert!(pair.1.notify_one());
            yield_until("the next to wake", || pair.0.lock().1.len() == n);
        }
        assert_eq!(pair.0.lock().1, (0..N).collect::<Vec<_>>());
        join_all(handles);
    });
}

/// Go: TestCondBroadcast, with 200 goroutines; and with plain threads.
#[test]
fn notify_all_wakes_every_waiter_in_every_round() {
    let _w = watchdog();
    const ROUNDS: u64 = 5;
    let check = |n: usize, workers: Workers| {
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
        workers.run(n, worker);
        main.join().unwrap();
    };
    on_every(|| check(200, Workers::Goroutines));
    on(2, || check(32, Workers::GoroutinesAndThreads));
}

/// Go: TestCondSignalStealing, 1000 times in total.
#[test]
fn a_notification_is_not_stolen_by_a_later_waiter() {
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
fn condvar_waits_time_out_at_their_deadline() {
    let _w = watchdog();
    static M: Mutex<u32> = Mutex::new(0);
    static C: Condvar = Condvar::new();
    fn time_out() {
        let mut guard = M.lock();
        let start = Instant::now();
        assert!(C.wait_for(&mut guard, 2 * MS).timed_out());
        assert_passed(start, 2 * MS);
        assert!(C.wait_until(&mut guard, start + 3 * MS).timed_out());
        assert!(C.wait_until(&mut guard, start).timed_out(), "a past deadline");
        assert!(C.wait_for(&mut guard, Duration::ZERO).timed_out());
        assert_passed(start, 3 * MS);
    }
    fn check() {
        join_all((0..4).map(|_| go(time_out)));
        let notified = [Duration::from_secs(30), Duration::MAX].map(|limit| {
            go(move || {
                let mut guard = M.lock();
                *guard += 1;
                !C.wait_for(&mut guard, limit).timed_out()
            })
        });
        yield_until("both to wait", || *M.lock() == 2);
        *M.lock() = 0;
        assert_eq!(C.notify_all(), 2);
        assert_eq!(join_all(notified), [true, true]);
        assert!(!C.notify_one(), "a waiter that timed out is still in the queue");
    }
    sim::run(check);
    on_every(check);
    time_out(); // on this plain thread
}

/// `notify_one` returns true exactly as often as a wait ends without a timeout.
#[test]
fn every_successful_notify_one_wakes_one_waiter_despite_timeouts() {
    let _w = watchdog();
    on_every(|| {
        let pair = Arc::new((Mutex::new(()), Condvar::new()));
        let (notified, left) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(8)));
        let notifier = go({
            let (pair, left) = (pair.clone(), left.clone());
            move || {
                let mut successes = 0;
                while left.load(SeqCst) != 0 {
                    successes += usize::from(pair.1.notify_one());
                    yield_now();
                }
                successes
            }
        });
        mixed(8, {
            let (pair, notified, left) = (pair.clone(), notified.clone(), left.clone());
            move |i| {
                let mut seed = 3 + i as u64;
                for _ in 0..100 {
                    let mut guard = pair.0.lock();
                    let limit = Duration::from_nanos(next(&mut seed) % 100_000);
                    if !pair.1.wait_for(&mut guard, limit).timed_out() {
                        notified.fetch_add(1, SeqCst);
                    }
                }
                left.fetch_sub(1, SeqCst);
            }
        });
        assert_eq!(notifier.join().unwrap(), notified.load(SeqCst));
    });
}

/// Waiters that `notify_all` moves to the mutex's queue, waiters with a deadline, and plain threads
/// return, whether the notifier holds the mutex or not.
#[test]
fn all_kinds_of_waiters_return_after_notify_all() {
    let _watchdog = watchdog();
    const ROUNDS: u64 = 300;
    const WAITERS: u64 = 24;
    for procs in [1, 4] {
        let state = Mutex::new((0_u64, 0_u64)); // the round, and how many have seen it
        let changed = Condvar::new();
        let wait = |number: u64| {
            for round in 1..=ROUNDS {
                let mut state = state.lock();
                while state.0 < round {
                    if number.is_multiple_of(3) {
                        changed.wait_for(&mut state, Duration::from_millis(1 + number % 2));
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
                    for number in 2..WAITERS {
                        let wait = &wait;
                        s.go(move || wait(number));
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
                        yield_until("all to see the round", || state.lock().1 == round * WAITERS);
                    }
                });
            });
        });
    }
}
