//! Preemption corrupts nothing: `no_preempt`, locks, unwinding, the end of a runtime, and the cost.

use crate::common::raw::{pipe, raw_read, raw_sleep};
use crate::common::{
    MS, child_test, cpu_time, flag, hog, hogs, is_emulated, join_all, ms, once_in_five, runtime,
    skip_if_emulated, spin, watchdog, yield_until,
};
use crate::endless;
use std::cell::{Cell, RefCell};
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use trefoil::chan::bounded;
use trefoil::time::sleep;
use trefoil::{blocking, debug, go, lock_os_thread, no_preempt, yield_now};

/// Goroutines are preempted inside malloc, with a locked std mutex, with a borrowed thread-local
/// and during unwinding; all is unchanged when they continue.
#[test]
fn preemption_in_malloc_locks_and_unwinding_corrupts_nothing() {
    thread_local!(static OWN: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) });
    struct Slow<'a>(&'a Cell<u32>);
    impl Drop for Slow<'_> {
        fn drop(&mut self) {
            spin(Duration::from_micros(300));
            assert!(std::thread::panicking());
            self.0.set(self.0.get() + 1);
        }
    }
    child_test!(|child| child.env("TREFOIL_DEBUG", "slice=50").succeed());
    for procs in [1, 2, 8] {
        runtime(procs).run(|| {
            let stop = flag();
            let shared = Arc::new(Mutex::new((0u64, 0u64)));
            let work = |i: u64, shared: &Mutex<(u64, u64)>| {
                assert!(!std::thread::panicking(), "the panic of another goroutine");
                match i % 4 {
                    0 => OWN.with_borrow_mut(|own| {
                        own.clear();
                        own.extend((0..50).map(|k| k * i));
                        spin(Duration::from_micros(200));
                        assert!(own.iter().enumerate().all(|(k, &n)| n == k as u64 * i));
                    }),
                    1 => {
                        let mut pair = shared.lock().unwrap();
                        pair.0 += 1;
                        spin(Duration::from_micros(100));
                        pair.1 += 1;
                        assert_eq!(pair.0, pair.1);
                        drop(pair);
                        spin(Duration::from_micros(100));
                    }
                    2 => {
                        let drops = Cell::new(0);
                        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                            let _slow = (Slow(&drops), Slow(&drops));
                            std::panic::resume_unwind(Box::new(i));
                        }));
                        assert_eq!(*caught.unwrap_err().downcast::<u64>().unwrap(), i);
                        assert_eq!(drops.get(), 2);
                    }
                    _ => {
                        let blocks: Vec<Vec<u8>> =
                            (1..200).map(|k| vec![k as u8; 37 * k]).collect();
                        for (k, block) in blocks.iter().enumerate() {
                            assert!(block.iter().all(|&b| b == (k + 1) as u8));
                        }
                    }
                }
            };
            let rounds: Arc<[AtomicU64; 12]> = Arc::default();
            let workers: Vec<_> = (0..12)
                .map(|i| {
                    let (stop, shared, rounds) = (stop.clone(), shared.clone(), rounds.clone());
                    go(move || {
                        while !stop.load(SeqCst) {
                            work(i, &shared);
                            rounds[i as usize].fetch_add(1, SeqCst);
                        }
                    })
                })
                .collect();
            sleep(200 * MS);
            let start = Instant::now();
            while rounds.iter().any(|n| n.load(SeqCst) == 0) || debug::stats().preemptions < 50 {
                let late = start.elapsed() > Duration::from_secs(15);
                assert!(!late, "{rounds:?}, {:?}", debug::stats());
                sleep(10 * MS);
            }
            stop.store(true, SeqCst);
            join_all(workers);
        });
    }
}

/// A goroutine that waits for a std mutex gets it, although the holder locks it again at once and
/// is preempted while it holds it. Threads share such a mutex evenly, also on one CPU.
#[test]
fn waiters_for_a_std_mutex_are_not_starved() {
    let _watchdog = watchdog();
    runtime(1).run(|| {
        let (stop, lock) = (flag(), Arc::new(Mutex::new(())));
        let rounds: Arc<[AtomicU64; 3]> = Arc::default();
        let work = |i: usize| {
            let (stop, lock, rounds) = (stop.clone(), lock.clone(), rounds.clone());
            go(move || {
                while !stop.load(SeqCst) {
                    let held = lock.lock().unwrap();
                    spin(MS / 10);
                    drop(held);
                    rounds[i].fetch_add(1, SeqCst);
                }
            })
        };
        let workers: Vec<_> = (0..3).map(work).collect();
        let all_had_turns = || rounds.iter().all(|n| n.load(SeqCst) > 50);
        // Turns, not seconds: on a busy machine this program runs for a part of the time.
        let turns = || rounds.iter().map(|n| n.load(SeqCst)).sum::<u64>();
        while !all_had_turns() && turns() < 20_000 {
            sleep(10 * MS);
        }
        stop.store(true, SeqCst);
        join_all(workers);
        assert!(all_had_turns(), "{rounds:?}");
    });
}

/// Under the guard a goroutine is not preempted; guards nest; after the last one it is.
#[test]
fn no_preempt_guards_prevent_preemption_and_nest() {
    let _watchdog = watchdog();
    once_in_five(|| {
        runtime(1).run(|| {
            let ran = flag();
            let ours = ran.clone();
            let outer = no_preempt();
            let other = go(move || ours.store(true, SeqCst));
            spin(15 * MS);
            let inner = no_preempt();
            spin(5 * MS);
            drop(inner);
            // A call of the runtime does not stop it either.
            drop(go(|| ()));
            trefoil::set_procs(1);
            spin(15 * MS);
            let during = ran.load(SeqCst);
            drop(outer);
            hog(&ran);
            other.join().unwrap();
            if during { Err("it was preempted".into()) } else { Ok(()) }
        })
    });
    // On a plain thread the guard does nothing.
    drop(no_preempt());
}

/// A forgotten guard ends with its goroutine: the next goroutine with the same G is preempted.
#[test]
fn a_forgotten_no_preempt_guard_ends_with_its_goroutine() {
    let _watchdog = watchdog();
    runtime(1).run(|| {
        for _ in 0..5 {
            go(|| std::mem::forget(no_preempt())).join().unwrap();
            drop(go(|| std::mem::forget(no_preempt())));
            yield_now();
            let stop = flag();
            let loops = hogs(3, &stop);
            sleep(MS);
            stop.store(true, SeqCst);
            join_all(loops);
        }
    });
}

/// A goroutine may park under the guard, which is still effective afterwards.
#[test]
fn no_preempt_still_holds_after_a_park() {
    let _watchdog = watchdog();
    once_in_five(|| {
        runtime(1).run(|| {
            let guard = no_preempt();
            let counter = Arc::new(AtomicU64::new(0));
            let (ours, stop) = (counter.clone(), flag());
            let stopped = stop.clone();
            let other = go(move || {
                while !stopped.load(SeqCst) {
                    ours.fetch_add(1, SeqCst);
                }
            });
            // On a busy machine the timer may be due before the other goroutine has begun.
            while counter.load(SeqCst) == 0 {
                sleep(MS);
            }
            let before = counter.load(SeqCst);
            spin(30 * MS);
            let moved = counter.load(SeqCst) - before;
            drop(guard);
            stop.store(true, SeqCst);
            other.join().unwrap();
            if moved == 0 { Ok(()) } else { Err(format!("the other goroutine ran {moved} rounds")) }
        })
    });
}

#[inline(never)]
fn spin_in_here(stop: &AtomicBool, begun: &AtomicBool) {
    begun.store(true, SeqCst);
    hog(stop);
    black_box(stop);
}

/// A dump shows where a preempted goroutine was stopped.
#[test]
fn a_dump_shows_where_a_preempted_goroutine_is() {
    skip_if_emulated!("a dump takes seconds there, in which the goroutine runs");
    let _watchdog = watchdog();
    runtime(1).run(|| {
        let (stop, begun) = (flag(), flag());
        let (ours, started) = (stop.clone(), begun.clone());
        let spinner = go(move || spin_in_here(&ours, &started));
        // Main runs on the only P, so that the spinner has been stopped.
        while !begun.load(SeqCst) {
            sleep(MS);
        }
        // A dump reads files and blocks; the spinner may run meanwhile.
        let start = Instant::now();
        loop {
            let text = debug::dump();
            let head = format!("goroutine {} [runnable]:", spinner.id());
            let shown = text.find(&head).and_then(|at| text[at..].split("\n\n").next());
            if shown.is_some_and(|shown| shown.contains("spin_in_here")) {
                break;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "{text}");
        }
        stop.store(true, SeqCst);
        spinner.join().unwrap();
    });
}

/// A runtime is dropped while goroutines block, are locked, hold guards, or never end: nothing
/// hangs or crashes, and its threads end as soon as they can.
#[test]
fn dropping_a_busy_runtime_ends_its_threads() {
    child_test!();
    let (read, write) = pipe();
    let read = Arc::new(read);
    for round in 0..if is_emulated() { 12 } else { 100 } {
        let rt = runtime([1, 2, 8][round % 3]);
        let (tx, rx) = bounded::<u32>(0);
        rt.run(|| {
            let (in_pipe, in_blocking) = (read.clone(), read.clone());
            go(move || raw_read(&in_pipe));
            go(move || blocking(|| raw_read(&in_blocking)));
            go(|| endless());
            go(|| {
                std::mem::forget(lock_os_thread());
                endless();
            });
            go(|| {
                let _guard = lock_os_thread();
                blocking(|| raw_sleep(MS));
                sleep(Duration::MAX);
            });
            for _ in 0..2 {
                let (tx, rx) = (tx.clone(), rx.clone());
                go(move || {
                    let _guard = lock_os_thread();
                    while tx.send(1).is_ok() && rx.recv().is_ok() {}
                });
            }
            go(|| {
                let _guard = no_preempt();
                sleep(Duration::from_micros(300));
                spin(MS);
                yield_now();
            });
            if round % 2 == 0 {
                sleep(Duration::from_micros(30 * round as u64));
            }
        });
        drop(rt);
    }
    drop(write);
    yield_until("the threads to end", || ms().is_empty());
    let before = cpu_time();
    std::thread::sleep(100 * MS);
    let used = cpu_time() - before;
    assert!(used < 20 * MS, "{used:?} of CPU time in 100 ms");
}

/// An idle runtime uses less than 0.1 % of a CPU.
#[test]
fn an_idle_runtime_with_blocked_threads_uses_no_cpu() {
    skip_if_emulated!("the emulator's own CPU time is counted");
    child_test!();
    runtime(2).run(|| {
        go(|| bounded::<u8>(0).1.recv());
        // With a blocked thread.
        let (read, _write) = pipe();
        go(move || raw_read(&read));
        sleep(100 * MS);
        once_in_five(|| {
            let before = cpu_time();
            sleep(Duration::from_secs(1));
            let used = cpu_time() - before;
            println!("{used:?} in a second");
            if used < MS { Ok(()) } else { Err(format!("{used:?} of CPU time in a second")) }
        });
    });
}

/// Works under the shared locks until `stop` is set. Returns the number of rounds.
fn contended(stop: &AtomicBool, locks: &[Mutex<Vec<u64>>], seed: usize) -> u64 {
    let mut rounds = 0u64;
    while !stop.load(SeqCst) {
        let mut list = locks[(seed + rounds as usize) % locks.len()].lock().unwrap();
        list.clear();
        list.extend((0..20).map(|k| k ^ rounds));
        drop(list);
        black_box(vec![rounds as u8; 100 + (rounds % 2000) as usize]);
        rounds += 1;
    }
    rounds
}

/// Preemption of goroutines that hold locks of std or malloc costs little: 100 goroutines do at
/// least 60 % of what two threads do.
#[test]
fn preempted_lock_holders_cause_no_convoy() {
    child_test!();
    const TIME: Duration = Duration::from_millis(500);
    once_in_five(|| {
        let locks: Arc<Vec<_>> = Arc::new((0..8).map(|_| Mutex::new(Vec::new())).collect());
        let stop = flag();
        let threads: Vec<_> = (0..2)
            .map(|i| {
                let (stop, locks) = (stop.clone(), locks.clone());
                std::thread::spawn(move || contended(&stop, &locks, i))
            })
            .collect();
        std::thread::sleep(TIME);
        stop.store(true, SeqCst);
        let by_threads: u64 = threads.into_iter().map(|t| t.join().unwrap()).sum();
        let by_goroutines: u64 = runtime(2).run(|| {
            let stop = flag();
            let work = |i| {
                let (stop, locks) = (stop.clone(), locks.clone());
                go(move || contended(&stop, &locks, i))
            };
            let all: Vec<_> = (0..100).map(work).collect();
            sleep(TIME);
            stop.store(true, SeqCst);
            join_all(all).iter().sum()
        });
        let share = by_goroutines * 100 / by_threads.max(1);
        println!("{share} % ({by_goroutines} rounds, {by_threads} by threads)");
        if share >= 60 { Ok(()) } else { Err(format!("{share} %")) }
    });
}
