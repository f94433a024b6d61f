//! Statements 1 to 6 and 29 of the table in `main.rs`: what a goroutine is and costs.

use crate::common::{
    self, child_test, flag, hold_until, join_all, mark, once_in_five, runtime, same, traces,
    watchdog, yield_until,
};
use std::cell::Cell;
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A goroutine is started by one short expression and costs far less than a thread.
///
/// Fails if a parked goroutine takes a thread's memory, or start and join take a thread's time.
#[test]
fn goroutines_cost_far_less_than_threads() {
    child_test!();
    const ALIVE: usize = 20_000;
    const EACH: u64 = 24 << 10;
    trefoil::run(|| {
        assert_eq!(trefoil::go(|| 6 * 7).join().unwrap(), 42);

        let before = common::rss();
        let gate = flag();
        let open = gate.clone();
        let mut last = trefoil::go(move || {
            yield_until("the gate", || open.load(SeqCst));
            1
        });
        let running = Arc::new(AtomicUsize::new(1));
        for _ in 1..ALIVE {
            let (previous, running) = (last, running.clone());
            last = trefoil::go(move || {
                running.fetch_add(1, SeqCst);
                previous.join().unwrap() + 1
            });
        }
        yield_until("all goroutines to run", || running.load(SeqCst) == ALIVE);
        assert_eq!(trefoil::num_goroutines(), ALIVE + 1);
        let each = common::rss().saturating_sub(before) / ALIVE as u64;
        assert!(each <= EACH, "{each} bytes for a parked goroutine");
        gate.store(true, SeqCst);
        assert_eq!(last.join().unwrap(), ALIVE);

        once_in_five(|| {
            const N: usize = 300;
            let start = Instant::now();
            join_all((0..N).map(|i| trefoil::go(move || black_box(i))));
            let goroutines = start.elapsed();
            let start = Instant::now();
            let threads: Vec<_> =
                (0..N).map(|i| std::thread::spawn(move || black_box(i))).collect();
            threads.into_iter().for_each(|t| assert!(t.join().is_ok()));
            let threads = start.elapsed();
            // Usually a hundred times less. A factor of two holds on a busy machine too.
            if goroutines * 2 < threads {
                return Ok(());
            }
            Err(format!("{N} goroutines: {goroutines:?}, threads: {threads:?}"))
        });
    });
}

/// A goroutine is created, runnable, running, waiting, runnable again and dead; its memory is
/// reused.
///
/// Fails if the trace shows a goroutine in a state other than the one that it was brought into, or
/// if memory grows with the number of goroutines that ever lived.
#[test]
fn goroutine_passes_through_every_state_and_its_memory_is_reused() {
    child_test!(|child| {
        once_in_five(|| {
            let stderr = child.traced().succeed();
            let id = stderr.lines().find_map(|l| l.strip_prefix("id ")?.parse().ok()).unwrap();
            for (from, to, goroutine, expected) in [
                ("created", "created ends", id, Some("runnable")),
                ("created", "created ends", 1, Some("running")),
                ("running", "running ends", id, Some("running")),
                ("running", "running ends", 1, Some("join")),
                ("waiting", "waiting ends", id, Some("join")),
                ("dead", "dead ends", id, None),
                ("dead", "dead ends", 1, Some("running")),
            ] {
                for trace in traces(&stderr, from, to) {
                    same(trace.status_of(goroutine), expected)
                        .map_err(|e| format!("{from}: {e}"))?;
                }
            }
            Ok(())
        });
    });
    runtime(1).run(|| {
        let child = trefoil::go(|| {
            mark("running");
            common::let_trace();
            mark("running ends");
            // Its time slice has expired, so that the next call would stop it: begin a new one.
            trefoil::yield_now();
            trefoil::go(|| {
                mark("waiting");
                common::let_trace();
                mark("waiting ends");
            })
            .join()
            .unwrap();
        });
        mark(&format!("id {}", child.id()));
        mark("created");
        // Its time slice expires while it waits for traces: keep the P until it parks.
        let held = trefoil::no_preempt();
        common::let_trace();
        mark("created ends");
        child.join().unwrap();
        drop(held);
        mark("dead");
        common::let_trace();
        mark("dead ends");

        let churn = || join_all((0..5_000).map(|_| trefoil::go(|| black_box([0u8; 512])[7])));
        churn();
        let before = common::rss();
        for _ in 0..20 {
            churn();
        }
        let grown = common::rss().saturating_sub(before);
        assert!(grown < 16 << 20, "100,000 goroutines, 5,000 at a time, left {grown} bytes");
        assert_eq!(trefoil::num_goroutines(), 1);
    });
}

/// A goroutine gets its stack and thread-locals before it runs.
///
/// Fails if a goroutine starts without room for its frames, or with the thread-locals that its
/// predecessor on the same stack left behind.
#[test]
fn goroutine_starts_with_its_own_stack_and_fresh_thread_locals() {
    let _watchdog = watchdog();
    thread_local!(static VALUE: Cell<u32> = const { Cell::new(7) });
    #[inline(never)]
    fn deep(levels: usize) -> usize {
        let frame = black_box([levels as u8; 1024]);
        if levels == 0 { 0 } else { deep(levels - 1) + usize::from(frame[512] == levels as u8) }
    }
    runtime(1).run(|| {
        for _ in 0..300 {
            let h = trefoil::go(|| {
                let initial = VALUE.replace(8);
                (initial, deep(60))
            });
            assert_eq!(h.join().unwrap(), (7, 60));
        }
        let big = trefoil::Builder::new().stack_size(8 << 20).go(|| deep(3_000)).unwrap();
        assert_eq!(big.join().unwrap(), 3_000);
        assert_eq!(VALUE.get(), 7, "the main goroutine's own value");
    });
}

/// A goroutine gets its stack when it first runs: one that waits for its first turn has none.
///
/// Fails if a thousand goroutines that have not begun have a thousand stacks, or if those that have
/// begun have none. In a child, because the numbers are of the whole process.
#[test]
fn goroutine_has_no_stack_before_it_runs() {
    child_test!();
    const N: usize = 1_000;
    runtime(1).run(|| {
        let live = || trefoil::debug::stats().stacks_live;
        let (tx, rx) = trefoil::chan::bounded::<()>(0);
        let begun = Arc::new(AtomicUsize::new(0));
        let held = trefoil::no_preempt();
        let before = live();
        let handles: Vec<_> = (0..N)
            .map(|_| {
                let (rx, begun) = (rx.clone(), begun.clone());
                trefoil::go(move || {
                    begun.fetch_add(1, SeqCst);
                    assert!(rx.recv().is_err());
                })
            })
            .collect();
        assert_eq!((begun.load(SeqCst), live()), (0, before), "goroutines that began, and stacks");
        drop(held);
        yield_until("all goroutines to begin", || begun.load(SeqCst) == N);
        assert!(live() >= N, "{} stacks for {N} goroutines", live());
        drop(tx);
        join_all(handles);
    });
}

/// When main returns, the program ends, whatever goroutines are left.
///
/// Fails if the child hangs on its endless goroutines (the watchdog reports it) or exits with an
/// error.
#[test]
fn run_returns_while_goroutines_still_run() {
    child_test!();
    let started = Arc::new(AtomicUsize::new(0));
    trefoil::run(|| {
        for _ in 0..3 {
            let started = started.clone();
            trefoil::go(move || {
                started.fetch_add(1, SeqCst);
                loop {
                    trefoil::yield_now();
                }
            });
        }
        yield_until("all goroutines to start", || started.load(SeqCst) == 3);
    });
    assert_eq!(started.load(SeqCst), 3);
}

/// Main can wait for all its goroutines, here by joining them.
///
/// Fails if main goes on before the last has ended.
#[test]
fn join_waits_for_each_of_a_hundred_goroutines() {
    let _watchdog = watchdog();
    let ended = Arc::new(AtomicUsize::new(0));
    trefoil::run(|| {
        join_all((0..100).map(|i| {
            let ended = ended.clone();
            trefoil::go(move || {
                for _ in 0..i {
                    trefoil::yield_now();
                }
                ended.fetch_add(1, SeqCst);
            })
        }));
        assert_eq!(ended.load(SeqCst), 100);
    });
}

/// The output of several goroutines interleaves on several Ps.
///
/// Each goroutine waits for the other's line and never yields, so that both must run at the same
/// time. Fails if one prints only after the other has ended.
#[test]
fn outputs_of_two_goroutines_interleave() {
    let _watchdog = watchdog();
    const LINES: usize = 50;
    let printed = runtime(2).run(|| {
        let lines = Arc::new(Mutex::new(String::new()));
        join_all(['a', 'b'].map(|name| {
            let lines = lines.clone();
            trefoil::go(move || {
                for i in 0..LINES {
                    hold_until("the other's line", || {
                        let mut lines = lines.lock().unwrap();
                        let turn = lines.matches(|c| c != name).count() >= i;
                        if turn {
                            lines.push(name);
                        }
                        turn
                    });
                }
            })
        }));
        lines.lock().unwrap().clone()
    });
    assert_eq!(printed.len(), 2 * LINES);
    let changes = printed.as_bytes().windows(2).filter(|w| w[0] != w[1]).count();
    assert!(changes >= LINES, "{printed}");
}

/// Two printers that compute between their lines, on two Ps, do not wait for each other.
///
/// Fails if one prints all its lines before the other begins.
#[test]
fn computing_printers_do_not_wait_for_each_other() {
    let _watchdog = watchdog();
    const LINES: usize = 5;
    let lines = runtime(2).run(|| {
        let lines = Arc::new(Mutex::new(Vec::new()));
        join_all(["first", "second"].map(|name| {
            let lines = lines.clone();
            trefoil::go(move || {
                for i in 1..=LINES {
                    lines.lock().unwrap().push((name, i));
                    common::spin(Duration::from_millis(20));
                }
            })
        }));
        lines.lock().unwrap().clone()
    });
    for name in ["first", "second"] {
        let own: Vec<_> = lines.iter().filter(|line| line.0 == name).map(|line| line.1).collect();
        assert_eq!(own, (1..=LINES).collect::<Vec<_>>());
        assert!(lines[..LINES].iter().any(|line| line.0 == name), "{lines:?}");
    }
}
