//! What users are promised about the scheduler, statement by statement: m01 to m17, each seen from outside. (Blocking
//! and preemption, m18 to m26, are in `blocking.rs` and `preempt.rs`, the network in `poller.rs`, m29 among the examples.)
//!
//! A test quotes its statement and says how it would fail. What looks at the whole process, or needs
//! every P to itself, is a child process (`common::Child`): traced tests read the scheduler's own
//! trace between two marks, while goroutines hold their Ps still.

mod common;

use common::{
    Child, Trace, child_test, flag, hold_to_the_end, hold_until, join_all, mark, once_in_five,
    runtime, same, traces, watchdog, yield_until,
};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::hint::black_box;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use trefoil::net::UnixStream;

/// m01: a goroutine is one short expression, and far cheaper than a thread.
///
/// Broken, a parked goroutine would take a thread's memory, or start and join in a thread's time.
#[test]
fn m01_short_and_cheap() {
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
        yield_until("all to run", || running.load(SeqCst) == ALIVE);
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
            // Rather a hundred times; two are enough to tell, and a busy machine keeps them.
            if goroutines * 2 < threads {
                return Ok(());
            }
            Err(format!("{N} goroutines: {goroutines:?}, threads: {threads:?}"))
        });
    });
}

/// m02: a new goroutine goes to the current P's queue.
///
/// Broken, the order on one P would not be Go's: the newest first (`runnext`), then the queue.
#[test]
fn m02_spawn_order_on_one_p() {
    let _w = watchdog();
    once_in_five(|| {
        let order = runtime(1).run(|| {
            let order = Arc::new(Mutex::new(Vec::new()));
            join_all((0..5).map(|i| {
                let order = order.clone();
                trefoil::go(move || order.lock().unwrap().push(i))
            }));
            order.lock().unwrap().clone()
        });
        same(order, vec![4, 0, 1, 2, 3])
    });
}

/// m02: if the local queue is full, the global queue.
///
/// Broken, goroutines beyond 257 would be lost or run twice, or the trace would not show Go's
/// numbers: 1 in runnext and 256 in the ring fit; the next moves 128 + 1 to the global queue.
#[test]
fn m02_full_local_queue_overflows_to_the_global() {
    const SPAWN: &str = "TREFOIL_TEST_SPAWN";
    child_test!(|child| {
        for (spawned, global, local) in [("257", 0, 257), ("258", 129, 129)] {
            once_in_five(|| {
                let stderr = child.traced().env(SPAWN, spawned).succeed();
                for trace in traces(&stderr, "spawned", "end") {
                    same((trace.get("runqueue"), trace.local()), (global, vec![local]))?;
                }
                Ok(())
            });
        }
    });
    let n: usize = std::env::var(SPAWN).unwrap().parse().unwrap();
    runtime(1).run(|| {
        let ran = Arc::new(AtomicUsize::new(0));
        let spawn = || {
            let ran = ran.clone();
            trefoil::go(move || ran.fetch_add(1, SeqCst))
        };
        // One that the OS leaves waiting for long would be preempted, and the queues would move.
        let held = trefoil::no_preempt();
        let mut handles: Vec<_> = (0..n).map(|_| spawn()).collect();
        mark("spawned");
        common::let_trace();
        mark("end");
        drop(held);
        handles.extend((0..10_000).map(|_| spawn()));
        let before: BTreeSet<_> = join_all(handles).into_iter().collect();
        // Each saw a different count: none was lost, none ran twice.
        assert_eq!(before.len(), n + 10_000);
        assert_eq!(ran.load(SeqCst), n + 10_000);
    });
}

/// m03: created → runnable → running → waiting → runnable again → dead; its resources are reused.
///
/// Broken, the trace would show a goroutine in another state than the one it was brought into, or
/// memory would grow with the number of goroutines that ever lived.
#[test]
fn m03_states() {
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
            // Its slice is used up; the next call would stop it. Begin a new one.
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
        // Its slice is used up when the traces have passed: it keeps its P until it parks.
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

/// m04: before it runs it gets what it needs.
///
/// Broken, a goroutine would start without room for its frames, or with the thread-locals that its
/// predecessor on the same stack left behind.
#[test]
fn m04_stack_and_thread_locals_of_its_own() {
    let _w = watchdog();
    thread_local!(static VALUE: Cell<u32> = const { Cell::new(7) });
    #[inline(never)]
    fn deep(levels: usize) -> usize {
        let frame = black_box([levels as u8; 1024]);
        if levels == 0 { 0 } else { deep(levels - 1) + usize::from(frame[512] == levels as u8) }
    }
    runtime(1).run(|| {
        for _ in 0..300 {
            let h = trefoil::go(|| {
                let fresh = VALUE.replace(8);
                (fresh, deep(60))
            });
            assert_eq!(h.join().unwrap(), (7, 60));
        }
        let big = trefoil::Builder::new().stack_size(8 << 20).go(|| deep(3_000)).unwrap();
        assert_eq!(big.join().unwrap(), 3_000);
        assert_eq!(VALUE.get(), 7, "main's own");
    });
}

/// m04: … and not before: one that waits to run costs no stack.
///
/// Broken, a thousand that have not begun would have a thousand stacks, or those that have would have none.
#[test]
fn m04_no_stack_before_it_runs() {
    child_test!(|child| {
        // The numbers are of the whole process.
        child.succeed();
    });
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
        assert_eq!((begun.load(SeqCst), live()), (0, before), "begun, and stacks");
        drop(held);
        yield_until("all to begin", || begun.load(SeqCst) == N);
        assert!(live() >= N, "{} stacks for {N}", live());
        drop(tx);
        join_all(handles);
    });
}

/// m05: when main returns, the program ends, whatever goroutines are left.
///
/// Broken, the child would hang on its endless goroutines (the watchdog tells), or exit badly.
#[test]
fn m05_main_does_not_wait() {
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
        yield_until("all to start", || started.load(SeqCst) == 3);
    });
    assert_eq!(started.load(SeqCst), 3);
}

/// m05: who wants them all waits for them (here: joins).
///
/// Broken, main would go on before the last has ended.
#[test]
fn m05_joining_waits_for_all() {
    let _w = watchdog();
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

/// m06: output of several goroutines interleaves on several Ps.
///
/// Broken, one would print only after the other is done: each waits for the other's line and never
/// yields, so both must run at the same time.
#[test]
fn m06_output_interleaves() {
    let _w = watchdog();
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

/// m07: many goroutines on few OS threads.
///
/// Broken, the threads would grow with the goroutines: there may be one a P, and sysmon.
#[test]
fn m07_many_goroutines_few_threads() {
    child_test!();
    const PROCS: usize = 3;
    runtime(PROCS).run(|| {
        let seen = Arc::new(trefoil::sync::Mutex::new(BTreeSet::new()));
        let handles: Vec<_> = (0..10_000)
            .map(|_| {
                let seen = seen.clone();
                trefoil::go(move || {
                    seen.lock().insert(common::tid());
                    trefoil::yield_now();
                    seen.lock().insert(common::tid());
                })
            })
            .collect();
        let threads = common::tasks();
        let ours = threads.iter().filter(|(_, name)| name.starts_with("trefoil")).count();
        // Two more watch (sysmon) and help (the aide), and reading files blocks a thread.
        assert!(ours <= PROCS + 5, "{threads:?}");
        join_all(handles);
        let seen = seen.lock();
        // Reading files blocks a thread, and another takes its P.
        assert!((1..=PROCS + 3).contains(&seen.len()), "{seen:?}");
        assert!(common::ms().is_superset(&seen));
    });
}

/// m07: … and all in user space.
///
/// Broken, a switch between goroutines would be a switch of the kernel's.
#[test]
fn m07_switches_in_user_space() {
    child_test!();
    const YIELDS: u64 = 20_000;
    runtime(1).run(|| {
        // Of all threads: reading files may block one, and main goes on elsewhere.
        let of = |tid| {
            let file = format!("/proc/self/task/{tid}/status");
            common::proc_number(&file, "voluntary_ctxt_switches")
        };
        let switches = || common::ms().into_iter().map(of).sum::<u64>();
        let before = switches();
        join_all((0..2).map(|_| {
            trefoil::go(|| {
                for _ in 0..YIELDS {
                    trefoil::yield_now();
                }
            })
        }));
        let kernel = switches().saturating_sub(before);
        assert!(kernel < YIELDS / 10, "{kernel} switches of the kernel for {YIELDS} of ours");
    });
}

/// The most goroutines that were executing at once, among `n` that do short pieces of work.
fn most_at_once(n: usize) -> usize {
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    join_all((0..n).map(|_| {
        let (now, most) = (now.clone(), most.clone());
        trefoil::go(move || {
            for _ in 0..4 {
                most.fetch_max(now.fetch_add(1, SeqCst) + 1, SeqCst);
                common::spin(Duration::from_micros(100));
                common::pause();
                now.fetch_sub(1, SeqCst);
                trefoil::yield_now();
            }
        })
    }));
    most.load(SeqCst)
}

/// `n` goroutines that only end when all of them execute at once.
fn all_at_once(n: usize) {
    let here = Arc::new(AtomicUsize::new(0));
    join_all((0..n).map(|_| {
        let here = here.clone();
        trefoil::go(move || {
            here.fetch_add(1, SeqCst);
            hold_until("the others to run", || here.load(SeqCst) == n);
        })
    }));
}

/// m08: at most GOMAXPROCS goroutines execute at once; it can be changed at run time.
///
/// Broken, more would be seen inside a piece of work than there are Ps, or fewer than Ps could meet.
#[test]
fn m08_at_most_procs_at_once() {
    child_test!(|child| {
        // In a child without preemption: who is stopped inside the work still counts as inside.
        child.env("TREFOIL_DEBUG", "asyncpreemptoff=1").succeed();
    });
    runtime(1).run(|| {
        let mut before = 1;
        for procs in [1, 3, 2, 8, 1, 4] {
            assert_eq!(trefoil::set_procs(procs), before);
            assert_eq!(trefoil::procs(), procs);
            before = procs;
            // Those who lose their P go on until their next scheduling step: here nobody runs but
            // main, and main's own P is settled when `set_procs` returns.
            let most = most_at_once(20);
            assert!(most <= procs, "{most} at once with procs = {procs}");
            all_at_once(procs);
        }
    });
}

/// m08: the default is the number of logical processors; the environment can say otherwise.
///
/// Broken, `procs()` would be another number, here or in a child that is told.
#[test]
fn m08_default_and_environment() {
    child_test!(|child| {
        let cpus = std::thread::available_parallelism().unwrap().get();
        let says = |child: &Child, procs: usize| {
            let stderr = child.succeed();
            let expected = format!("procs {procs} of {cpus}\n");
            assert!(stderr.contains(&expected), "expected {expected}in {stderr}");
        };
        says(child, cpus);
        says(&child.env("GOMAXPROCS", "5"), 5);
        says(&child.env("TREFOIL_PROCS", "3").env("GOMAXPROCS", "5"), 3);
        says(&child.env("TREFOIL_PROCS", "1024"), 1024);
        assert_eq!(trefoil::num_cpus(), cpus);
        assert_eq!(runtime(3).run(trefoil::procs), 3, "the builder wins over everything");
    });
    mark(&trefoil::run(|| format!("procs {} of {}", trefoil::procs(), trefoil::num_cpus())));
}

/// m08: … that the process may run on, also if that changes, until somebody says how many.
///
/// Broken, `procs()` would count CPUs that are not ours, or stay as it was.
#[test]
fn m08_the_default_follows_the_cpus() {
    child_test!();
    let (cpus, all) = (common::cpus(), trefoil::run(trefoil::procs));
    let one = &cpus[..1];
    common::run_on(one);
    assert_eq!((trefoil::num_cpus(), trefoil::run(trefoil::procs)), (1, 1));
    common::run_on(&cpus);
    trefoil::run(|| {
        assert_eq!(trefoil::procs(), all);
        // Somebody looks every second.
        let becomes = |n: usize| {
            let start = Instant::now();
            while trefoil::procs() != n {
                assert!(start.elapsed() < common::TOO_LONG / 2, "{} Ps", trefoil::procs());
                trefoil::time::sleep(Duration::from_millis(5));
            }
        };
        common::run_on(one);
        becomes(1);
        common::run_on(&cpus);
        becomes(all);
        trefoil::set_procs(all + 1);
        common::run_on(one);
        for _ in 0..250 {
            trefoil::time::sleep(Duration::from_millis(5));
            assert_eq!(trefoil::procs(), all + 1, "said is said");
        }
    });
}

/// m09: an M holds one P at a time, and needs one to run a goroutine.
///
/// Broken, the trace would show an M at two Ps, or a busy P without an M.
#[test]
fn m09_one_m_one_p() {
    const PROCS: usize = 4;
    child_test!(|child| {
        let stderr = child.traced().succeed();
        for trace in traces(&stderr, "busy", "end") {
            assert_eq!(trace.get("idleprocs"), 0, "{}", trace.summary);
            let ms: BTreeSet<u64> = trace.ps().map(|p| common::number(p, "m")).collect();
            assert_eq!(ms.len(), PROCS, "{:?}", trace.detail);
        }
    });
    runtime(PROCS).run(|| {
        let (here, end) = (Arc::new(AtomicUsize::new(1)), flag());
        let others: Vec<_> = (1..PROCS)
            .map(|_| {
                let (here, end) = (here.clone(), end.clone());
                trefoil::go(move || {
                    here.fetch_add(1, SeqCst);
                    hold_until("the end", || end.load(SeqCst));
                })
            })
            .collect();
        hold_until("all Ps", || here.load(SeqCst) == PROCS);
        mark("busy");
        common::let_trace();
        mark("end");
        end.store(true, SeqCst);
        join_all(others);
    });
}

/// m10: a goroutine keeps its P–M pairing where it can.
///
/// Broken, a goroutine that yields with nobody else about would wander between the threads.
#[test]
fn m10_alone_it_stays_where_it_is() {
    let _w = watchdog();
    const YIELDS: usize = 2_000;
    let moves = runtime(4).run(|| {
        let mut moves = 0;
        let mut at = common::tid();
        for _ in 0..YIELDS {
            trefoil::yield_now();
            let now = common::tid();
            moves += usize::from(now != at);
            at = now;
        }
        moves
    });
    assert!(moves <= YIELDS / 10, "moved {moves} times in {YIELDS} yields");
}

/// m10: … few moves also between two that wake each other.
///
/// Broken, a parent and the child it joins would change threads at every turn.
#[test]
fn m10_a_pair_stays_together_on_one_p() {
    let _w = watchdog();
    let rt = runtime(1);
    let tids: BTreeSet<_> = rt.run(|| {
        (0..1_000).flat_map(|_| [common::tid(), trefoil::go(common::tid).join().unwrap()]).collect()
    });
    assert_eq!(tids.len(), 1, "one P, nothing that blocks a thread: one thread");
}

/// m10: … also with other Ps at hand: what talks stays together.
///
/// Broken, thieves would tear the two apart: each would change threads again and again, and wake the other elsewhere.
#[test]
fn m10_a_pair_stays_together_on_four_ps() {
    let _w = watchdog();
    const TURNS: usize = 20_000;
    /// Counts the turns at which a goroutine found itself on another thread.
    struct Moves(i32, usize);
    impl Moves {
        fn note(&mut self) {
            let now = common::tid();
            self.1 += usize::from(std::mem::replace(&mut self.0, now) != now);
        }
    }
    let (moves, together) = runtime(4).run(|| {
        let (ping, pinged) = trefoil::chan::bounded(0);
        let (pong, ponged) = trefoil::chan::bounded(0);
        let partner = trefoil::go(move || {
            let mut moves = Moves(common::tid(), 0);
            while pinged.recv().is_ok() {
                moves.note();
                pong.send(moves.0).unwrap();
            }
            moves.1
        });
        let mut moves = Moves(common::tid(), 0);
        let mut together = 0;
        for _ in 0..TURNS {
            ping.send(()).unwrap();
            let there = ponged.recv().unwrap();
            moves.note();
            together += usize::from(there == moves.0);
        }
        drop(ping);
        (moves.1.max(partner.join().unwrap()), together)
    });
    println!("in {TURNS} turns moved {moves} times, on one thread {together} times");
    assert!(moves <= TURNS / 10, "moved {moves} times in {TURNS} turns");
    assert!(together >= TURNS * 9 / 10, "together in {together} of {TURNS} turns");
}

/// m11: each P has a local queue; there is one global queue, open to all.
///
/// Broken, goroutines started on a P would not be in its queue, or those started by a plain thread,
/// which has none, not in the global one.
#[test]
fn m11_local_and_global_queue() {
    child_test!(|child| {
        once_in_five(|| {
            let stderr = child.traced().succeed();
            for trace in traces(&stderr, "queued", "end") {
                same((trace.get("runqueue"), trace.local()), (7, vec![10]))?;
            }
            Ok(())
        });
    });
    let rt = runtime(1);
    let (busy, end) = (flag(), flag());
    let holder = {
        let (busy, end) = (busy.clone(), end.clone());
        rt.go(move || {
            let local: Vec<_> = (0..10).map(|_| trefoil::go(|| 1)).collect();
            busy.store(true, SeqCst);
            hold_until("the end", || end.load(SeqCst));
            join_all(local).len()
        })
    };
    hold_until("the P", || busy.load(SeqCst));
    let global: Vec<_> = (0..7).map(|_| rt.go(|| 1).unwrap()).collect();
    mark("queued");
    common::let_trace();
    mark("end");
    end.store(true, SeqCst);
    assert_eq!(holder.unwrap().join().unwrap() + join_all(global).len(), 17);
}

/// m12: 1/61 of the time the global queue comes first; else local, then global.
///
/// Broken without the 61: what is in the global queue would run only after all that is local. Broken
/// without "local first": it would run before. Here the first 128 overflow to the global queue.
#[test]
fn m12_every_61st_from_the_global_queue() {
    child_test!(|child| {
        // Without preemption: it would put main into the global queue.
        child.env("TREFOIL_DEBUG", "asyncpreemptoff=1").succeed();
    });
    once_in_five(|| {
        let order = runtime(1).run(|| {
            let order = Arc::new(Mutex::new(Vec::new()));
            join_all((0..258usize).map(|i| {
                let order = order.clone();
                trefoil::go(move || order.lock().unwrap().push(i))
            }));
            order.lock().unwrap().clone()
        });
        assert_eq!(order.len(), 258);
        // Ring and runnext held 0..=256; 257 made the ring's first 128 and the one that did not fit
        // (256) spill, in this order.
        let global = |i: &usize| *i < 128 || *i == 256;
        // As long as there are local ones, every 61st is a global one.
        let end = order.iter().rposition(|i| !global(i)).unwrap();
        let early: Vec<_> = (0..=end).filter(|&at| global(&order[at])).collect();
        let every_61st = early.windows(2).all(|pair| pair[1] - pair[0] == 61);
        if !(2..=4).contains(&early.len()) || early[0] > 61 || !every_61st {
            return Err(format!("of the first {end}, these came from the global queue: {early:?}"));
        }
        // Each queue by itself is first in, first out, behind runnext.
        let globals: Vec<_> = order.iter().copied().filter(global).collect();
        let ring: Vec<_> = order[1..].iter().copied().filter(|i| !global(i)).collect();
        same((order[0], globals.is_sorted(), ring.is_sorted()), (257, true, true))
    });
}

/// m12: … and a goroutine in the global queue is not starved by local ones that never stop.
///
/// Broken, the foreign goroutine would wait for ever.
#[test]
fn m12_global_is_not_starved() {
    let _w = watchdog();
    let rt = runtime(1);
    let end = flag();
    let yielders: Vec<_> = (0..3)
        .map(|_| {
            let end = end.clone();
            rt.go(move || {
                // Its own endless company, in the local queue.
                let inner = end.clone();
                let h = trefoil::go(move || yield_until("the end", || inner.load(SeqCst)));
                yield_until("the end", || end.load(SeqCst));
                h.join().unwrap();
            })
            .unwrap()
        })
        .collect();
    for _ in 0..20 {
        rt.go(|| ()).unwrap().join().unwrap();
    }
    end.store(true, SeqCst);
    join_all(yielders);
}

/// m12: local → network → others' queues, seen on a P that finds something in all three.
///
/// Broken, the goroutine whose socket is ready would run before the local ones, or after those of the other P.
#[test]
fn m12_local_then_network_then_others() {
    child_test!(|child| child.env("TREFOIL_DEBUG", "asyncpreemptoff=1").succeed());
    const ROUNDS: usize = 40;
    const OTHERS: usize = 10;
    let round = || {
        let order = Arc::new(Mutex::new(Vec::new()));
        let note = |what: &'static str| {
            let order = order.clone();
            move || order.lock().unwrap().push(what)
        };
        let (mut here, mut there) = UnixStream::pair().unwrap();
        let (waits, loaded) = (flag(), flag());
        let (local, network) = ([note("local"), note("local")], note("network"));
        let (says, sees) = (waits.clone(), loaded.clone());
        // Main keeps its P, so all of this is on the other one.
        trefoil::go(move || {
            trefoil::go(move || {
                there.read_exact(&mut [0]).unwrap();
                network();
            });
            yield_until("the reader", || trefoil::debug::stats().io_waiters == 1);
            says.store(true, SeqCst);
            // Two take turns: of a P with one that does not, sysmon would poll in its place.
            let company = sees.clone();
            trefoil::go(move || yield_until("the others", || company.load(SeqCst)));
            yield_until("the others", || sees.load(SeqCst));
            here.write_all(b"x").unwrap();
            local.into_iter().for_each(|note| drop(trefoil::go(note)));
            // Its end of the socket is open until the reader has read.
            std::mem::forget(here);
        });
        hold_until("the reader", || waits.load(SeqCst));
        let others: Vec<_> = (0..OTHERS).map(|_| trefoil::go(note("other"))).collect();
        loaded.store(true, SeqCst);
        hold_until("all", || order.lock().unwrap().len() == OTHERS + 3);
        join_all(others);
        order.lock().unwrap().clone()
    };
    let orders: Vec<_> = (0..ROUNDS).map(|_| runtime(2).run(round)).collect();
    let network = |order: &[&str]| order.iter().position(|&what| what == "network").unwrap();
    let early = orders.iter().filter(|order| network(order) == 0).count();
    let late = orders.iter().filter(|order| order[..network(order)].contains(&"other")).count();
    // Not quite none: sysmon may poll first, and who was woken by it does not queue.
    assert!(early < ROUNDS / 2, "before the local ones {early} of {ROUNDS} times: {orders:?}");
    assert!(late < ROUNDS / 8, "after the others {late} of {ROUNDS} times: {orders:?}");
}

/// m13: a take from the global queue is a fair share: 6 waiting and 3 Ps → 2 each.
///
/// Broken, the P that takes would leave another number than 4 in the global queue, and have another
/// number than 1 behind the one it runs.
#[test]
fn m13_fair_share_of_the_global_queue() {
    const PROCS: usize = 3;
    child_test!(|child| {
        let stderr = child.traced().succeed();
        let queues = |trace: &Trace<'_>| {
            let mut local = trace.local();
            local.sort();
            (trace.get("runqueue"), local)
        };
        for trace in traces(&stderr, "six", "take") {
            assert_eq!(queues(&trace), (6, vec![0, 0, 0]), "{}", trace.summary);
        }
        for trace in traces(&stderr, "taken", "end") {
            assert_eq!(queues(&trace), (4, vec![0, 0, 1]), "{}", trace.summary);
        }
    });
    let rt = runtime(PROCS);
    let here = Arc::new(AtomicUsize::new(0));
    let ends: Vec<_> = (0..PROCS).map(|_| flag()).collect();
    let holders: Vec<_> = ends
        .iter()
        .map(|end| {
            let (here, end) = (here.clone(), end.clone());
            rt.go(move || {
                here.fetch_add(1, SeqCst);
                hold_to_the_end("its end", || end.load(SeqCst));
            })
            .unwrap()
        })
        .collect();
    hold_until("all Ps", || here.load(SeqCst) == PROCS);
    let last = flag();
    let six: Vec<_> = (0..6)
        .map(|_| {
            let (here, last) = (here.clone(), last.clone());
            rt.go(move || {
                here.fetch_add(1, SeqCst);
                hold_until("the end", || last.load(SeqCst));
            })
            .unwrap()
        })
        .collect();
    mark("six");
    common::let_trace();
    mark("take");
    ends[0].store(true, SeqCst);
    hold_until("the take", || here.load(SeqCst) == PROCS + 1);
    mark("taken");
    common::let_trace();
    mark("end");
    last.store(true, SeqCst);
    ends.iter().for_each(|end| end.store(true, SeqCst));
    join_all(holders);
    join_all(six);
}

/// m14: a lopsided load is stolen.
///
/// Broken, main's queue would be served by nobody: main starts all and never lets go of its P.
#[test]
fn m14_others_steal() {
    let _w = watchdog();
    runtime(3).run(|| {
        let main = common::tid();
        let (done, elsewhere) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let handles: Vec<_> = (0..200)
            .map(|_| {
                let (done, elsewhere) = (done.clone(), elsewhere.clone());
                trefoil::go(move || {
                    elsewhere.fetch_add(usize::from(common::tid() != main), SeqCst);
                    done.fetch_add(1, SeqCst);
                })
            })
            .collect();
        hold_until("thieves", || done.load(SeqCst) == 200);
        assert!(elsewhere.load(SeqCst) >= 100, "{elsewhere:?} of 200 ran on other threads");
        join_all(handles);
    });
}

/// m14: stealing takes half of the victim's queue.
///
/// Broken, emptying a queue of 200 would take about 200 steals (one each) or one (all).
#[test]
fn m14_half_at_a_time() {
    const JOBS: usize = 200;
    child_test!(|child| {
        once_in_five(|| {
            let stderr = child.traced().succeed();
            for trace in traces(&stderr, "stolen", "end") {
                let sum = |name| trace.ps().map(|p| common::number(p, name)).sum::<u64>();
                // 199 in the ring: 100, 50, 25, 12, 6, 3, 2, 1; and runnext.
                let (steals, stolen) = (sum("steals"), sum("stolen"));
                if !(7..=12).contains(&steals) || stolen != JOBS as u64 {
                    return Err(format!("{stolen} stolen by {steals}: {:?}", trace.detail));
                }
            }
            Ok(())
        });
    });
    runtime(1).run(|| {
        let done = Arc::new(AtomicUsize::new(0));
        let handles: Vec<_> = (0..JOBS)
            .map(|_| {
                let done = done.clone();
                trefoil::go(move || done.fetch_add(1, SeqCst))
            })
            .collect();
        // Only now there is someone to steal, and main does not let go.
        trefoil::set_procs(2);
        hold_until("the thief", || done.load(SeqCst) == JOBS);
        mark("stolen");
        common::let_trace();
        mark("end");
        join_all(handles);
    });
}

/// m14: … of a random victim.
///
/// Broken, a thief that finds something at three Ps would always begin with the same one.
#[test]
fn m14_victims_are_random() {
    let _w = watchdog();
    const ROUNDS: usize = 40;
    const EACH: usize = 3;
    runtime(4).run(|| {
        let round = Arc::new(AtomicUsize::new(0));
        let loaded = Arc::new(AtomicUsize::new(0));
        let ran = Arc::new(Mutex::new(Vec::new()));
        // Fills its queue, in each round once.
        let load = |victim: usize| {
            let (loaded, ran) = (loaded.clone(), ran.clone());
            move || {
                for _ in 0..EACH {
                    let ran = ran.clone();
                    trefoil::go(move || ran.lock().unwrap().push(victim));
                }
                loaded.fetch_add(1, SeqCst);
            }
        };
        // They keep their Ps all the time: main and two more.
        let held = trefoil::no_preempt();
        let here = Arc::new(AtomicUsize::new(0));
        let victims: Vec<_> = (1..3)
            .map(|victim| {
                let (load, round, here) = (load(victim), round.clone(), here.clone());
                trefoil::go(move || {
                    let _held = trefoil::no_preempt();
                    here.fetch_add(1, SeqCst);
                    for n in 1..=ROUNDS {
                        hold_until("the next round", || round.load(SeqCst) >= n);
                        load();
                    }
                })
            })
            .collect();
        hold_until("the victims", || here.load(SeqCst) == 2);
        let load = load(0);
        let mut first = BTreeSet::new();
        for n in 1..=ROUNDS {
            let (busy, end) = (flag(), flag());
            let (says, sees) = (busy.clone(), end.clone());
            trefoil::go(move || {
                says.store(true, SeqCst);
                hold_to_the_end("the queues to be full", || sees.load(SeqCst));
            });
            hold_until("the thief", || busy.load(SeqCst));
            round.store(n, SeqCst);
            load();
            hold_until("full queues", || loaded.load(SeqCst) == 3 * n);
            end.store(true, SeqCst);
            hold_until("the thief", || ran.lock().unwrap().len() == 3 * EACH);
            first.insert(std::mem::take(&mut *ran.lock().unwrap())[0]);
        }
        drop(held);
        join_all(victims);
        assert_eq!(first, BTreeSet::from([0, 1, 2]), "whom the thief robbed first");
    });
}

/// m15: an unblocked goroutine returns to a local queue: the one of the P that unblocked it.
///
/// Broken, it would run behind the others there, or not at all.
#[test]
fn m15_unblocked_runs_next_locally() {
    let _w = watchdog();
    once_in_five(|| {
        let order = runtime(1).run(|| {
            let order = Arc::new(Mutex::new(Vec::new()));
            let note = |what: &'static str| {
                let order = order.clone();
                move || order.lock().unwrap().push(what)
            };
            let (woken, first, second, child) =
                (note("woken"), note("first"), note("second"), note("child"));
            let waiter = trefoil::go(move || {
                let company = [trefoil::go(first), trefoil::go(second)];
                trefoil::go(child).join().unwrap();
                woken();
                company
            });
            join_all(waiter.join().unwrap());
            order.lock().unwrap().clone()
        });
        // The child is runnext; it wakes the waiter into runnext, before those that were there.
        same(order, vec!["child", "woken", "first", "second"])
    });
}

/// m15: … or to the global queue, when it is unblocked from outside.
///
/// Broken, a goroutine woken by another runtime would not be in its own runtime's global queue.
#[test]
fn m15_unblocked_from_outside_is_global() {
    child_test!(|child| {
        once_in_five(|| {
            let stderr = child.traced().succeed();
            // Two runtimes trace; only one of them ever has a queue.
            let queued = |from, to| -> BTreeSet<u64> {
                traces(&stderr, from, to).iter().map(|t| t.get("runqueue")).collect()
            };
            same(queued("parked", "wake"), [0].into())?;
            same(queued("woken", "end"), [0, 1].into())
        });
    });
    let (here, there) = (runtime(1), runtime(1));
    let (parked, ended, busy, end) = (flag(), flag(), flag(), flag());
    let far = {
        let ended = ended.clone();
        there.go(move || hold_until("its end", || ended.load(SeqCst))).unwrap()
    };
    let waiter = {
        let parked = parked.clone();
        here.go(move || {
            parked.store(true, SeqCst);
            far.join().unwrap();
        })
        .unwrap()
    };
    let holder = {
        let (parked, busy, end) = (parked.clone(), busy.clone(), end.clone());
        here.go(move || {
            // With one P, this runs after the waiter has parked.
            yield_until("the waiter", || parked.load(SeqCst));
            trefoil::yield_now();
            busy.store(true, SeqCst);
            hold_until("the end", || end.load(SeqCst));
        })
        .unwrap()
    };
    hold_until("the P", || busy.load(SeqCst));
    mark("parked");
    common::let_trace();
    mark("wake");
    ended.store(true, SeqCst);
    hold_until("the other runtime", || there.run(trefoil::num_goroutines) == 1);
    mark("woken");
    common::let_trace();
    mark("end");
    end.store(true, SeqCst);
    join_all([waiter, holder]);
}

/// m16: idle threads are parked, not ended, and reused.
///
/// Broken, the threads of a later burst would be others than those of the first, or idle threads
/// would use the CPU.
#[test]
fn m16_threads_are_parked_and_reused() {
    child_test!();
    const PROCS: usize = 4;
    let rt = runtime(PROCS);
    // As many threads as there will ever be: four goroutines execute at once, and one is started to spare when no
    // other is idle.
    rt.run(|| all_at_once(PROCS));
    std::thread::sleep(Duration::from_millis(20));
    let first = common::ms();
    assert!((PROCS..=PROCS + 1).contains(&first.len()), "{first:?}");
    for _ in 0..10 {
        std::thread::sleep(Duration::from_millis(10));
        rt.run(|| all_at_once(PROCS));
        let now = common::ms();
        assert!(now.is_superset(&first) && now.len() <= PROCS + 1, "{now:?} after {first:?}");
    }
    std::thread::sleep(Duration::from_millis(20));
    let before = common::cpu_time();
    std::thread::sleep(Duration::from_millis(200));
    let used = common::cpu_time() - before;
    assert!(used < Duration::from_millis(50), "idle, and used {used:?} of CPU in 200 ms");
}

/// m17: threads spin before they park, never more than GOMAXPROCS; without work they stop.
///
/// Broken, no trace would show a spinning thread, or one more of them than Ps, or some after a while of rest.
#[test]
fn m17_spinning_is_bounded() {
    child_test!(|child| {
        let stderr = child.traced().succeed();
        let at_work = traces(&stderr, "work", "rest");
        for trace in &at_work {
            assert!(trace.get("spinningthreads") <= trace.get("gomaxprocs"), "{}", trace.summary);
            assert!(trace.get("idlethreads") <= trace.get("threads"), "{}", trace.summary);
        }
        let spinning = at_work.iter().filter(|trace| trace.get("spinningthreads") > 0).count();
        println!("{spinning} of {} traces show spinning threads", at_work.len());
        assert!(spinning > 0, "{} traces, and nobody spins", at_work.len());
        let at_rest = traces(&stderr, "rest", "end").pop().unwrap();
        assert_eq!(at_rest.get("spinningthreads"), 0, "{}", at_rest.summary);
        assert_eq!(at_rest.get("idleprocs"), 4, "{}", at_rest.summary);
    });
    let rt = runtime(4);
    mark("work");
    for _ in 0..8 {
        let passed = common::traces_passed();
        while !passed.load(SeqCst) {
            // Bursts with pauses: threads begin and stop to spin all the time.
            rt.run(|| drop(join_all((0..20).map(|i| trefoil::go(move || black_box(i))))));
            common::spin(Duration::from_micros(30));
        }
    }
    mark("rest");
    // However slow the machine: the last of these sees the end of it.
    (0..4).for_each(|_| common::let_trace());
    mark("end");
}

/// m17: when work appears and nobody spins, one more thread is woken.
///
/// Broken, the new goroutine would wait for main, which waits for it and holds its P.
#[test]
fn m17_new_work_wakes_a_thread() {
    let _w = watchdog();
    let rt = runtime(2);
    for round in 0..50u64 {
        let done = Arc::new(AtomicU64::new(0));
        if round % 5 == 0 {
            // Long enough for every thread to have parked.
            std::thread::sleep(Duration::from_millis(1));
        }
        rt.run(|| {
            let there = done.clone();
            let h = trefoil::go(move || there.store(round + 1, SeqCst));
            hold_until("another thread", || done.load(SeqCst) == round + 1);
            h.join().unwrap();
        });
    }
}

/// m23: a P without work polls the network; what is ready becomes runnable there.
///
/// Broken, the first that runs would find some of the others in the global queue, of which a P takes only its share; or
/// they would come one by one.
#[test]
fn m23_what_is_ready_becomes_runnable_locally() {
    let _w = watchdog();
    const ROUNDS: usize = 40;
    const READERS: usize = 5;
    let round = || {
        // Nobody else is to take or to steal any.
        let (busy, end) = (flag(), flag());
        let (says, sees) = (busy.clone(), end.clone());
        let holder = trefoil::go(move || {
            says.store(true, SeqCst);
            hold_to_the_end("the readers", || sees.load(SeqCst));
        });
        hold_until("the other P", || busy.load(SeqCst));
        let (seen, first) = (Arc::new(Mutex::new((0, 0))), flag());
        let (near, far): (Vec<_>, Vec<_>) =
            (0..READERS).map(|_| UnixStream::pair().unwrap()).unzip();
        let readers: Vec<_> = far
            .into_iter()
            .map(|mut stream| {
                let (seen, first) = (seen.clone(), first.clone());
                trefoil::go(move || {
                    stream.read_exact(&mut [0]).unwrap();
                    if !first.swap(true, SeqCst) {
                        let stats = trefoil::debug::stats();
                        let local = stats.procs.iter().map(|p| p.queue).sum();
                        *seen.lock().unwrap() = (local, stats.global_queue);
                    }
                })
            })
            .collect();
        yield_until("the readers", || trefoil::debug::stats().io_waiters == READERS);
        // A new slice: in place of those who have run for a while, sysmon polls.
        trefoil::time::sleep(Duration::from_micros(100));
        near.iter().for_each(|mut stream| stream.write_all(b"x").unwrap());
        join_all(readers);
        end.store(true, SeqCst);
        holder.join().unwrap();
        *seen.lock().unwrap()
    };
    let seen: Vec<_> = (0..ROUNDS).map(|_| runtime(2).run(round)).collect();
    let right = seen.iter().filter(|&&queues| queues == (READERS - 1, 0)).count();
    println!("{right} of {ROUNDS}");
    // Now and then sysmon polls all the same.
    assert!(right > ROUNDS / 2, "local and global queue: {seen:?}");
}

/// m29: two printers that compute between their lines, on two Ps: neither waits for the other.
///
/// Broken, one would print all its lines before the other begins.
#[test]
fn m29_two_printers_that_compute() {
    let _w = watchdog();
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
