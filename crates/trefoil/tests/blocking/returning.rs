//! A goroutine returns from a blocking call: where it gets a P from.

use crate::common::raw::raw_sleep;
use crate::common::{flag, hold_until, join_all, runtime, tid, watchdog};
use crate::outside_until;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};
use trefoil::chan::bounded;
use trefoil::{blocking, debug, go, no_preempt, yield_now};

/// On return a goroutine gets a P or queues. Results are right; no goroutine is lost or runs twice.
#[test]
fn goroutines_return_from_blocking_calls_exactly_once() {
    let _watchdog = watchdog();
    for procs in [1, 2, 8, 64] {
        runtime(procs).run(|| {
            let done = Arc::new(AtomicUsize::new(0));
            let results = join_all((0..100usize).map(|i| {
                let done = done.clone();
                go(move || {
                    let mut sum = 0;
                    for k in 0..10 {
                        sum += match k % 3 {
                            0 => blocking(|| {
                                raw_sleep(Duration::from_micros(i as u64));
                                i
                            }),
                            1 => {
                                raw_sleep(Duration::from_micros(100));
                                i
                            }
                            // Nested, with calls of the runtime inside.
                            _ => blocking(|| {
                                yield_now();
                                blocking(|| go(move || i).join().unwrap())
                            }),
                        };
                    }
                    done.fetch_add(1, SeqCst);
                    sum
                })
            }));
            assert_eq!(results, (0..100).map(|i| 10 * i).collect::<Vec<_>>());
            assert_eq!(done.load(SeqCst), 100);
            assert_eq!(debug::stats().threads_without_p, 0);
        });
    }
}

/// Returns the number of the P that runs the caller: the P that counts a goroutine which the caller
/// starts. No other goroutine may start one meanwhile.
fn my_p() -> usize {
    let _held = no_preempt();
    let spawned = || debug::stats().procs.into_iter().map(|p| p.spawned);
    let before: Vec<_> = spawned().collect();
    go(|| ());
    let mut counts = spawned().zip(before);
    counts.position(|(now, before)| now != before).expect("a P that started one")
}

/// On return a goroutine gets its old P if that is idle.
///
/// Fails if it takes the P that became idle last: another one did after its own.
#[test]
fn a_returning_goroutine_gets_its_old_p_if_that_is_idle() {
    let _watchdog = watchdog();
    const ROUNDS: usize = 40;
    let rt = runtime(4);
    let (away, over) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (says, sees) = (away.clone(), over.clone());
    let goroutine = rt.go(move || {
        let round = |n: usize| {
            // If the OS does not run the thread for long, a preemption would move the goroutine.
            let _held = no_preempt();
            let before = (my_p(), tid());
            blocking(|| {
                says.store(n, SeqCst);
                outside_until(|| sees.load(SeqCst) == n);
                outside_until(|| debug::stats().procs.iter().all(|p| p.status == "idle"));
            });
            (before, (my_p(), tid()))
        };
        (1..=ROUNDS).map(round).collect::<Vec<_>>()
    });
    for round in 1..=ROUNDS {
        outside_until(|| away.load(SeqCst) == round);
        // Two other goroutines use its P and another P at once, and release them in any order.
        let here = Arc::new(AtomicUsize::new(0));
        let other = || {
            let here = here.clone();
            rt.go(move || {
                here.fetch_add(1, SeqCst);
                hold_until("the other goroutine", || here.load(SeqCst) == 2);
            })
        };
        join_all([other().unwrap(), other().unwrap()]);
        over.store(round, SeqCst);
    }
    for (before, after) in goroutine.unwrap().join().unwrap() {
        assert_eq!(before, after, "P and thread");
    }
}

/// If its old P is taken, a returning goroutine gets another idle P.
///
/// Fails if it waits for its own P, which is taken for as long as it waits: a hang.
#[test]
fn a_returning_goroutine_gets_another_idle_p() {
    let _watchdog = watchdog();
    const ROUNDS: usize = 40;
    let elsewhere = runtime(2).run(|| {
        let round = || {
            let _held = no_preempt();
            let (taken, end) = (Arc::new(AtomicUsize::new(usize::MAX)), flag());
            let (says, sees) = (taken.clone(), end.clone());
            let (p, thread) = (my_p(), tid());
            let squatter = go(move || {
                let _held = no_preempt();
                says.store(my_p(), SeqCst);
                hold_until("its end", || sees.load(SeqCst));
            });
            blocking(|| {
                outside_until(|| taken.load(SeqCst) != usize::MAX);
                // It must not belong to a spinning M.
                let other = 1 - taken.load(SeqCst);
                outside_until(|| debug::stats().procs[other].status == "idle");
            });
            let now = my_p();
            assert_eq!((now, tid()), (1 - taken.load(SeqCst), thread), "P and thread");
            end.store(true, SeqCst);
            squatter.join().unwrap();
            now != p
        };
        (0..ROUNDS).filter(|_| round()).count()
    });
    // If the other P steals the squatter, the goroutine's own P is idle.
    println!("{elsewhere} of {ROUNDS} times on another P");
    assert!(elsewhere > 0, "always back to its own P");
}

/// If no P is idle, a returning goroutine goes to the global queue.
///
/// Fails if it goes on beside the goroutine that has the only P, which would then not see it queue.
#[test]
fn a_returning_goroutine_queues_globally_if_no_p_is_idle() {
    let _watchdog = watchdog();
    runtime(1).run(|| {
        for _ in 0..20 {
            let (taken, seen) = (flag(), flag());
            let (says, sees) = (taken.clone(), seen.clone());
            let squatter = go(move || {
                let _held = no_preempt();
                says.store(true, SeqCst);
                hold_until("the returning goroutine to queue", || {
                    let stats = debug::stats();
                    (stats.global_queue, stats.threads_without_p) == (1, 0)
                });
                sees.store(true, SeqCst);
            });
            blocking(|| outside_until(|| taken.load(SeqCst)));
            assert!(seen.load(SeqCst), "went on without a P");
            squatter.join().unwrap();
        }
    });
}

/// A panic that leaves `blocking` continues with a P too.
#[test]
fn a_panic_in_blocking_returns_with_a_p() {
    let _watchdog = watchdog();
    runtime(1).run(|| {
        let failed =
            std::panic::catch_unwind(|| blocking(|| std::panic::resume_unwind(Box::new("out"))));
        assert_eq!(*failed.unwrap_err().downcast::<&str>().unwrap(), "out");
        assert_eq!(go(|| 5).join().unwrap(), 5);
        assert_eq!(debug::stats().threads_without_p, 0);
    });
    assert_eq!(blocking(|| 3), 3, "on a plain thread");
}

/// Go's test of preemption after system calls: 8 goroutines on 2 Ps in calls of 10, 100 and 1000
/// µs, started and stopped ten times in less than 5 s.
#[test]
fn goroutines_in_short_calls_start_and_stop_promptly() {
    let _watchdog = watchdog();
    for micros in [10, 100, 1000] {
        runtime(2).run(|| {
            let start = Instant::now();
            for _ in 0..10 {
                let stop = flag();
                let (tx, rx) = bounded(8);
                for _ in 0..8 {
                    let (stop, tx) = (stop.clone(), tx.clone());
                    go(move || {
                        tx.send(()).unwrap();
                        while !stop.load(SeqCst) {
                            raw_sleep(Duration::from_micros(micros));
                        }
                        tx.send(()).unwrap();
                    });
                }
                (0..8).for_each(|_| rx.recv().unwrap());
                stop.store(true, SeqCst);
                (0..8).for_each(|_| rx.recv().unwrap());
            }
            assert!(start.elapsed() < Duration::from_secs(5), "{micros} µs: {:?}", start.elapsed());
        });
    }
}
