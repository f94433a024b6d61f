//! What Go's own scheduler tests assert, with the same numbers, as far as it needs no channels,
//! timers or preemption by signal.

mod common;

use common::{hold_until, join_all, once_in_five, runtime, watchdog, yield_until};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};
use trefoil::JoinHandle;

/// Goroutines that start their successor and end, until they are told to stop.
struct Respawn {
    stop: AtomicBool,
    alive: AtomicUsize,
    born: AtomicU64,
}

impl Respawn {
    fn new(lines: usize) -> Arc<Respawn> {
        let all = Arc::new(Respawn {
            stop: AtomicBool::new(false),
            alive: AtomicUsize::new(lines),
            born: AtomicU64::new(0),
        });
        (0..lines).for_each(|_| all.clone().next());
        all
    }

    fn next(self: Arc<Self>) {
        trefoil::go(move || {
            self.born.fetch_add(1, SeqCst);
            if self.stop.load(SeqCst) {
                self.alive.fetch_sub(1, SeqCst);
            } else {
                self.next();
            }
        });
    }

    fn end(&self) {
        self.stop.store(true, SeqCst);
        yield_until("the last of the line", || self.alive.load(SeqCst) == 0);
    }
}

/// Go: TestStopTheWorldDeadlock. 1000 changes beside endless respawning come to an end.
#[test]
fn a_thousand_times_three_procs_beside_respawning() {
    let _w = watchdog();
    runtime(3).run(|| {
        let others = Respawn::new(3);
        for _ in 0..1000 {
            assert_eq!(trefoil::set_procs(3), 3);
        }
        let before = others.born.load(SeqCst);
        yield_until("the others", || others.born.load(SeqCst) > before + 100);
        others.end();
    });
}

/// The same with real changes, by two goroutines at once. A line of respawning goroutines goes on in
/// one time slice, so who loses its P waits some slices for its next turn: few lines, few changes.
#[test]
fn changing_procs_beside_respawning() {
    let _w = watchdog();
    runtime(3).run(|| {
        let others = Respawn::new(3);
        join_all((0..2usize).map(|who| {
            trefoil::go(move || {
                for i in 0..15 {
                    trefoil::set_procs(1 + (i * 7 + who * 5) % 9);
                }
            })
        }));
        trefoil::set_procs(2);
        assert_eq!(trefoil::procs(), 2);
        others.end();
        yield_until("all to end", || trefoil::num_goroutines() == 1);
    });
}

/// Go: TestYieldProgress. Who yields in a loop lets others make progress.
#[test]
fn yield_loops_let_others_progress() {
    let _w = watchdog();
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
            // Main yields, too, and sees every one of them go on, again and again.
            for _ in 0..20 {
                let before: Vec<_> = turns.iter().map(|t| t.load(SeqCst)).collect();
                yield_until("everyone's turn", || {
                    turns.iter().zip(&before).all(|(t, &before)| t.load(SeqCst) > before)
                });
            }
            stop.store(true, SeqCst);
            join_all(yielders);
        });
    }
}

const P: usize = 4;

/// `P` goroutines count to `3 P` in turns. None lets go of its P, so all must execute at once.
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
fn lock_step_on_all_ps() {
    let _w = watchdog();
    runtime(P).run(|| (0..10).for_each(|_| lock_step()));
}

/// Go: TestGoroutineParallelism2 with load: lots of goroutines have just run on all Ps.
#[test]
fn lock_step_after_load() {
    let _w = watchdog();
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

/// Main is a plain thread here, and the Ps have all gone to sleep before.
#[test]
fn lock_step_after_idleness() {
    let _w = watchdog();
    let rt = runtime(P);
    for _ in 0..10 {
        std::thread::sleep(Duration::from_millis(1));
        rt.run(lock_step);
    }
}

/// Nested spawns: each goroutine starts the next one, then they meet.
#[test]
fn lock_step_of_nested_goroutines() {
    let _w = watchdog();
    fn nest(left: usize, here: Arc<AtomicUsize>) {
        let inner = here.clone();
        let child = (left > 1).then(|| trefoil::go(move || nest(left - 1, inner)));
        here.fetch_add(1, SeqCst);
        hold_until("the others", || here.load(SeqCst) == P);
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

/// After `set_procs` as many run at once as it says, also when idle threads must be woken for it.
#[test]
fn lock_step_after_growing() {
    let _w = watchdog();
    runtime(1).run(|| {
        for _ in 0..20 {
            trefoil::set_procs(P);
            lock_step();
            trefoil::set_procs(1);
        }
    });
}

/// More Ps for goroutines that are already waiting: nothing else wakes a thread.
#[test]
fn growing_wakes_threads_for_waiting_goroutines() {
    let _w = watchdog();
    for _ in 0..20 {
        runtime(1).run(|| {
            let here = Arc::new(AtomicUsize::new(1));
            let others: Vec<_> = (1..P)
                .map(|_| {
                    let here = here.clone();
                    trefoil::go(move || {
                        here.fetch_add(1, SeqCst);
                        hold_until("the others", || here.load(SeqCst) == P);
                    })
                })
                .collect();
            trefoil::set_procs(P);
            hold_until("the others", || here.load(SeqCst) == P);
            join_all(others);
        });
    }
}

/// Go: TestNumGoroutine, as far as there is no dump to compare with.
#[test]
fn a_new_runtime_counts_one_goroutine() {
    let _w = watchdog();
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

/// Rounds of `size` steps that a pair does: one goroutine starts the other and waits for it.
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

/// Go: TestPingPongHog. On one P two pairs, one with 1e6 steps of work a round and one with 1e3, do
/// about the same amount of work: a factor of 20 over 100 ms and more.
///
/// Who wakes another puts it into `runnext`, which runs in the same time slice. Broken, a pair that
/// goes on like this for ever would keep everyone else away.
#[test]
fn a_pair_does_not_starve_another() {
    let _w = watchdog();
    // The OS may take most of one time away, and then few slices are left to share.
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

/// The same without main's yields: nobody but the pairs, and one who yields.
#[test]
fn a_pair_does_not_starve_one_who_yields() {
    let _w = watchdog();
    for size in [100, 10_000, 1_000_000] {
        runtime(1).run(|| {
            let stop = Arc::new(AtomicBool::new(false));
            let hog = pair(size, Arc::default(), stop.clone());
            // Each yield is a wait for the pair's slice to end.
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
fn a_thousand_procs() {
    let _w = watchdog();
    runtime(1024).run(|| {
        assert_eq!(trefoil::procs(), 1024);
        assert_eq!(join_all((0..2000).map(|i| trefoil::go(move || i))).len(), 2000);
        assert_eq!(trefoil::set_procs(1), 1024);
        assert_eq!(join_all((0..2000).map(|i| trefoil::go(move || i))).len(), 2000);
        assert_eq!(trefoil::set_procs(5000), 1);
        assert_eq!(trefoil::procs(), 1024, "the most there can be");
        assert_eq!(trefoil::set_procs(0), 1024);
        assert_eq!(trefoil::procs(), 1, "the least there can be");
        assert_eq!(join_all((0..100).map(|i| trefoil::go(move || i))).len(), 100);
    });
}

/// Wake-ups are not lost: a parent joins a child that ends at any moment of the parent's parking.
#[test]
fn joins_and_ends_that_meet() {
    let _w = watchdog();
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
