//! What Go's own scheduler tests assert, with the same numbers, unless it needs channels, timers or
//! preemption by signal.

use crate::common::{self, hold_until, join_all, once_in_five, runtime, watchdog, yield_until};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};
use trefoil::JoinHandle;

/// Lines of goroutines: each starts its successor and ends, until they are told to stop.
struct Respawn {
    stop: AtomicBool,
    alive: AtomicUsize,
    started: AtomicU64,
}

impl Respawn {
    fn new(lines: usize) -> Arc<Respawn> {
        let all = Arc::new(Respawn {
            stop: AtomicBool::new(false),
            alive: AtomicUsize::new(lines),
            started: AtomicU64::new(0),
        });
        (0..lines).for_each(|_| all.clone().next());
        all
    }

    fn next(self: Arc<Self>) {
        trefoil::go(move || {
            self.started.fetch_add(1, SeqCst);
            if self.stop.load(SeqCst) {
                self.alive.fetch_sub(1, SeqCst);
            } else {
                self.next();
            }
        });
    }

    fn end(&self) {
        self.stop.store(true, SeqCst);
        yield_until("the last goroutine of each line", || self.alive.load(SeqCst) == 0);
    }
}

/// Go: TestStopTheWorldDeadlock. 1000 calls beside endless respawning end.
#[test]
fn a_thousand_set_procs_end_beside_respawning_goroutines() {
    let _watchdog = watchdog();
    runtime(3).run(|| {
        let others = Respawn::new(3);
        for _ in 0..1000 {
            assert_eq!(trefoil::set_procs(3), 3);
        }
        let before = others.started.load(SeqCst);
        yield_until("the respawning goroutines", || others.started.load(SeqCst) > before + 100);
        others.end();
    });
}

/// The same with real changes, by two goroutines at once. A line of respawning goroutines continues
/// in one time slice, so that a goroutine that loses its P waits for some slices: few lines, few
/// changes.
#[test]
fn procs_change_beside_respawning_goroutines() {
    let _watchdog = watchdog();
    runtime(3).run(|| {
        let others = Respawn::new(3);
        join_all((0..2usize).map(|caller| {
            trefoil::go(move || {
                for i in 0..15 {
                    trefoil::set_procs(1 + (i * 7 + caller * 5) % 9);
                }
            })
        }));
        trefoil::set_procs(2);
        assert_eq!(trefoil::procs(), 2);
        others.end();
        yield_until("all goroutines to end", || trefoil::num_goroutines() == 1);
    });
}

/// Go: TestYieldProgress. Goroutines that yield in a loop let others make progress.
#[test]
fn yield_loops_let_others_progress() {
    let _watchdog = watchdog();
    for procs in [1, 2, 4] {
        runtime(procs).run(|| {
            let stop = Arc::new(AtomicBool::new(false));
            let turns: Vec<_> = (0..4).map(|_| Arc::new(AtomicU64::new(0))).collect();
            let yielders: Vec<_> = turns
                .iter()
                .map(|turns| {
                    let (turns, stop) = (turns.clone(), stop.clone());
                    trefoil::go(move || {
                        while !stop.load(SeqCst) {
                            turns.fetch_add(1, SeqCst);
                            trefoil::yield_now();
                        }
                    })
                })
                .collect();
            // Main yields too, and sees each of them make progress again and again.
            for _ in 0..20 {
                let before: Vec<_> = turns.iter().map(|t| t.load(SeqCst)).collect();
                yield_until("a turn of each goroutine", || {
                    turns.iter().zip(&before).all(|(t, &before)| t.load(SeqCst) > before)
                });
            }
            stop.store(true, SeqCst);
            join_all(yielders);
        });
    }
}

const P: usize = 4;

/// `P` goroutines count to `3 P` in turns. None releases its P, so that all must run at once.
fn lock_step() {
    let turn = Arc::new(AtomicUsize::new(0));
    join_all((0..P).map(|me| {
        let turn = turn.clone();
        trefoil::go(move || {
            for i in 0..3 {
                hold_until("its turn", || turn.load(SeqCst) == P * i + me);
                turn.store(P * i + me + 1, SeqCst);
            }
        })
    }));
    assert_eq!(turn.load(SeqCst), 3 * P);
}

/// Go: TestGoroutineParallelism.
#[test]
fn as_many_goroutines_as_ps_run_in_lock_step() {
    let _watchdog = watchdog();
    runtime(P).run(|| (0..10).for_each(|_| lock_step()));
}

/// Go: TestGoroutineParallelism2 with load: many goroutines have just run on all Ps.
#[test]
fn goroutines_run_in_lock_step_after_load() {
    let _watchdog = watchdog();
    runtime(P).run(|| {
        for _ in 0..10 {
            join_all((0..P).map(|_| {
                trefoil::go(|| {
                    join_all((0..100).map(|i| trefoil::go(move || black_box(i))));
                })
            }));
            lock_step();
        }
    });
}

/// A plain thread calls `run` after all Ps have become idle.
#[test]
fn goroutines_run_in_lock_step_after_an_idle_time() {
    let _watchdog = watchdog();
    let rt = runtime(P);
    for _ in 0..10 {
        std::thread::sleep(Duration::from_millis(1));
        rt.run(lock_step);
    }
}

/// Each goroutine starts the next one, then all wait for each other.
#[test]
fn nested_goroutines_run_at_once_on_all_ps() {
    let _watchdog = watchdog();
    fn nest(left: usize, here: Arc<AtomicUsize>) {
        let inner = here.clone();
        let child = (left > 1).then(|| trefoil::go(move || nest(left - 1, inner)));
        here.fetch_add(1, SeqCst);
        hold_until("the other goroutines", || here.load(SeqCst) == P);
        if let Some(child) = child {
            child.join().unwrap();
        }
    }
    runtime(P).run(|| {
        for _ in 0..20 {
            nest(P, Arc::default());
        }
    });
}

/// After `set_procs` as many goroutines run at once, also if idle threads must be woken for it.
#[test]
fn goroutines_run_in_lock_step_after_procs_grow() {
    let _watchdog = watchdog();
    runtime(1).run(|| {
        for _ in 0..20 {
            trefoil::set_procs(P);
            lock_step();
            trefoil::set_procs(1);
        }
    });
}

/// More Ps for goroutines that are already runnable: nothing else wakes a thread.
#[test]
fn growing_procs_wakes_threads_for_waiting_goroutines() {
    let _watchdog = watchdog();
    for _ in 0..20 {
        runtime(1).run(|| {
            let here = Arc::new(AtomicUsize::new(1));
            let has_grown = Arc::new(AtomicBool::new(false));
            let others: Vec<_> = (1..P)
                .map(|_| {
                    let (here, has_grown) = (here.clone(), has_grown.clone());
                    trefoil::go(move || {
                        // The main goroutine may be preempted before `set_procs`: then this one
                        // must not keep the only P.
                        yield_until("set_procs", || has_grown.load(SeqCst));
                        here.fetch_add(1, SeqCst);
                        hold_until("the other goroutines", || here.load(SeqCst) == P);
                    })
                })
                .collect();
            trefoil::set_procs(P);
            has_grown.store(true, SeqCst);
            hold_until("the other goroutines", || here.load(SeqCst) == P);
            join_all(others);
        });
    }
}

/// Go: TestNumGoroutine, without its comparison with a dump.
#[test]
fn a_new_runtime_counts_one_goroutine() {
    let _watchdog = watchdog();
    assert_eq!(trefoil::run(trefoil::num_goroutines), 1);
    trefoil::run(|| {
        let gate = Arc::new(AtomicBool::new(false));
        let handles: Vec<_> = (0..100)
            .map(|_| {
                let gate = gate.clone();
                trefoil::go(move || yield_until("the gate", || gate.load(SeqCst)))
            })
            .collect();
        assert_eq!(trefoil::num_goroutines(), 101);
        gate.store(true, SeqCst);
        join_all(handles);
        assert_eq!(trefoil::num_goroutines(), 1);
    });
}

/// Starts a pair that does rounds of `size` steps: one goroutine starts the other and waits for it.
fn pair(size: u64, units: Arc<AtomicU64>, stop: Arc<AtomicBool>) -> JoinHandle<()> {
    fn work(size: u64) {
        for i in 0..size {
            black_box(i);
        }
    }
    trefoil::go(move || {
        while !stop.load(SeqCst) {
            let mine = units.clone();
            let other = trefoil::go(move || {
                work(size);
                mine.fetch_add(size, SeqCst);
            });
            other.join().unwrap();
        }
    })
}

/// Go: TestPingPongHog. On one P two pairs, one with 1e6 steps of work per round and one with 1e3,
/// do about the same amount of work, within a factor of 20.
///
/// A woken goroutine becomes `runnext` and runs in the same time slice. Fails if a pair that goes
/// on like this for ever starves the other goroutines.
#[test]
fn a_pair_that_wakes_itself_does_not_starve_another_pair() {
    let _watchdog = watchdog();
    // The OS may run the thread so little that few time slices are left to share.
    let attempt = || {
        let stop = Arc::new(AtomicBool::new(false));
        let done = [1_000_000, 1_000].map(|size| {
            let units = Arc::new(AtomicU64::new(0));
            (pair(size, units.clone(), stop.clone()), units)
        });
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(400) {
            trefoil::yield_now();
        }
        stop.store(true, SeqCst);
        let [hog, light] = done.map(|(handle, units)| {
            handle.join().unwrap();
            units.load(SeqCst)
        });
        if hog < 20 * light && light < 20 * hog {
            return Ok(());
        }
        Err(format!("work done: hog {hog}, light {light}"))
    };
    once_in_five(|| runtime(1).run(attempt));
}

/// The same with one pair and one goroutine that yields.
#[test]
fn a_pair_that_wakes_itself_does_not_starve_a_yielding_goroutine() {
    let _watchdog = watchdog();
    for size in [100, 10_000, 1_000_000] {
        runtime(1).run(|| {
            let stop = Arc::new(AtomicBool::new(false));
            let hog = pair(size, Arc::default(), stop.clone());
            // Each yield waits for the end of the pair's time slice.
            let start = Instant::now();
            for _ in 0..5 {
                trefoil::yield_now();
            }
            let waited = start.elapsed();
            stop.store(true, SeqCst);
            hog.join().unwrap();
            assert!(waited < Duration::from_secs(2), "5 yields beside a pair took {waited:?}");
        });
    }
}

/// Go: procs = 1024 works.
#[test]
fn runtimes_have_1_to_1024_procs() {
    common::skip_if_emulated!("an emulator without guard markers has too few mappings for 1024 Ps");
    let _watchdog = watchdog();
    runtime(1024).run(|| {
        assert_eq!(trefoil::procs(), 1024);
        assert_eq!(join_all((0..2000).map(|i| trefoil::go(move || i))).len(), 2000);
        assert_eq!(trefoil::set_procs(1), 1024);
        assert_eq!(join_all((0..2000).map(|i| trefoil::go(move || i))).len(), 2000);
        assert_eq!(trefoil::set_procs(5000), 1);
        assert_eq!(trefoil::procs(), 1024, "the largest number");
        assert_eq!(trefoil::set_procs(0), 1024);
        assert_eq!(trefoil::procs(), 1, "the smallest number");
        assert_eq!(join_all((0..100).map(|i| trefoil::go(move || i))).len(), 100);
    });
}

/// A parent joins a child that ends at any moment of the parent's parking.
#[test]
fn no_wake_up_is_lost_if_join_and_end_meet() {
    let _watchdog = watchdog();
    for procs in [1, 2, 4] {
        runtime(procs).run(|| {
            join_all((0..4u64).map(|lane| {
                trefoil::go(move || {
                    for i in 0..1_000u64 {
                        let child = trefoil::go(move || {
                            for n in 0..(i * 7 + lane) % 40 {
                                black_box(n);
                            }
                            i
                        });
                        for n in 0..(i * 13) % 40 {
                            black_box(n);
                        }
                        assert_eq!(child.join().unwrap(), i);
                    }
                })
            }));
            assert_eq!(trefoil::num_goroutines(), 1);
        });
    }
}
