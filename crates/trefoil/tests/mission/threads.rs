//! Statements 7 to 10, 16 and 17 of the table in `main.rs`: goroutines, threads and Ps.

use crate::common::{
    self, Child, child_test, flag, hold_until, join_all, mark, once_in_five, runtime, same, traces,
    watchdog,
};
use std::collections::BTreeSet;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Many goroutines run on few OS threads.
///
/// Fails if the number of threads grows with the goroutines: there may be one per P, and few
/// others.
#[test]
fn ten_thousand_goroutines_run_on_few_threads() {
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
        // Two more are sysmon and the helper thread. A thread that reads a file, or waits for the
        // kernel's lock of the memory map, is replaced: on a busy machine that happens often.
        const MORE: usize = 30;
        assert!(ours <= PROCS + MORE, "{threads:?}");
        join_all(handles);
        let seen = seen.lock();
        assert!((1..=PROCS + MORE).contains(&seen.len()), "{seen:?}");
    });
}

/// Goroutines are switched in user space.
///
/// Fails if a switch between goroutines is a context switch of the kernel.
#[test]
fn switches_between_goroutines_stay_in_user_space() {
    child_test!();
    const YIELDS: u64 = 20_000;
    runtime(1).run(|| {
        // Of all Ms: reading files may block one, and main goes on on another.
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
        assert!(
            kernel < YIELDS / 10,
            "{kernel} context switches of the kernel for {YIELDS} yields"
        );
    });
}

/// Returns the largest number of goroutines that ran at once, of `n` with short pieces of work.
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

/// Runs `n` goroutines that end only when all of them run at once.
fn all_at_once(n: usize) {
    let here = Arc::new(AtomicUsize::new(0));
    join_all((0..n).map(|_| {
        let here = here.clone();
        trefoil::go(move || {
            here.fetch_add(1, SeqCst);
            hold_until("the other goroutines to run", || here.load(SeqCst) == n);
        })
    }));
}

/// At most `procs` goroutines run at once; the limit can be changed at run time.
///
/// Fails if more goroutines are inside a piece of work than there are Ps, or if not as many as
/// there are Ps can be. In a child without preemption: a goroutine that is stopped inside a piece
/// of work would still count as inside.
#[test]
fn at_most_procs_goroutines_run_at_once() {
    child_test!(|child| child.env("TREFOIL_DEBUG", "asyncpreemptoff=1").succeed());
    runtime(1).run(|| {
        let mut before = 1;
        for procs in [1, 3, 2, 8, 1, 4] {
            assert_eq!(trefoil::set_procs(procs), before);
            assert_eq!(trefoil::procs(), procs);
            before = procs;
            // A goroutine whose P is taken away goes on until its next scheduling point. Here only
            // main runs, and its P is decided when `set_procs` returns.
            let most = most_at_once(20);
            assert!(most <= procs, "{most} at once with procs = {procs}");
            all_at_once(procs);
        }
    });
}

/// The default number of Ps is the number of logical processors; environment variables override it.
///
/// Fails if `procs()` is another number, with or without the variables.
#[test]
fn procs_default_to_the_cpus_or_the_environment() {
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

/// The default counts the CPUs on which the process may run, also if these change later, until an
/// explicit `set_procs`.
///
/// Fails if `procs()` counts other CPUs or does not follow the change.
#[test]
fn default_procs_follow_the_cpu_affinity() {
    child_test!();
    let (cpus, all) = (common::cpus(), trefoil::run(trefoil::procs));
    let one = &cpus[..1];
    common::run_on(one);
    assert_eq!((trefoil::num_cpus(), trefoil::run(trefoil::procs)), (1, 1));
    common::run_on(&cpus);
    trefoil::run(|| {
        assert_eq!(trefoil::procs(), all);
        // The runtime checks every second.
        let becomes = |n: usize| {
            let start = Instant::now();
            while trefoil::procs() != n {
                assert!(start.elapsed() < common::TOO_LONG / 2, "{} Ps", trefoil::procs());
                trefoil::time::sleep(Duration::from_millis(5));
            }
        };
        let (is_explicit, is_restricted) = (flag(), flag());
        let explicit = std::thread::spawn({
            let (is_explicit, is_restricted) = (is_explicit.clone(), is_restricted.clone());
            move || {
                runtime(1).run(move || {
                    trefoil::set_procs(all + 1);
                    is_explicit.store(true, SeqCst);
                    hold_until("fewer CPUs", || is_restricted.load(SeqCst));
                    for _ in 0..250 {
                        trefoil::time::sleep(Duration::from_millis(5));
                        let procs = trefoil::procs();
                        assert_eq!(procs, all + 1, "an explicit set_procs must not be overridden");
                    }
                });
            }
        });
        hold_until("set_procs", || is_explicit.load(SeqCst));
        common::run_on(one);
        is_restricted.store(true, SeqCst);
        becomes(1);
        trefoil::blocking(|| explicit.join()).unwrap();
        common::run_on(&cpus);
        becomes(all);
    });
}

/// An M has one P at a time, and needs one to run a goroutine.
///
/// Fails if the trace shows an M with two Ps, or a busy P without an M.
#[test]
fn every_busy_p_has_an_m_of_its_own() {
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

/// A goroutine stays with its P and M where it can.
///
/// Fails if a goroutine that yields while no other is runnable moves between the threads.
#[test]
fn lone_goroutine_stays_on_its_thread() {
    let _watchdog = watchdog();
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

/// Two goroutines that wake each other rarely move either.
///
/// Fails if a parent and the child that it joins change threads at every turn.
#[test]
fn pair_shares_one_thread_on_one_p() {
    let _watchdog = watchdog();
    // Tests that run beside it may hold the kernel's lock of the memory map, which blocks a thread.
    once_in_five(|| {
        let tids: BTreeSet<_> = runtime(1).run(|| {
            let pair = |_| [common::tid(), trefoil::go(common::tid).join().unwrap()];
            (0..1_000).flat_map(pair).collect()
        });
        same(tids.len(), 1)
    });
}

/// Two goroutines that wake each other stay on one thread although other Ps are idle.
///
/// Fails if idle Ps steal one of the two again and again, so that each wakes the other elsewhere.
#[test]
fn pair_shares_one_thread_on_four_ps() {
    let _watchdog = watchdog();
    const TURNS: usize = 20_000;
    /// Counts the turns in which a goroutine runs on another thread than in the turn before.
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

/// Idle threads are parked, not ended, and reused.
///
/// Fails if the threads of a later burst are not those of the first, or if idle threads use the
/// CPU.
#[test]
fn idle_threads_park_and_are_reused() {
    child_test!();
    const PROCS: usize = 4;
    let rt = runtime(PROCS);
    // As many threads as there will ever be: four goroutines run at once, and a spare thread is
    // started when no other is idle.
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
    assert!(
        used < Duration::from_millis(50),
        "the idle runtime used {used:?} of CPU time in 200 ms"
    );
}

/// Threads spin before they park, never more than there are Ps; without work they stop.
///
/// Fails if no trace shows a spinning thread, or one shows more of them than Ps, or some still spin
/// after a while without work.
#[test]
fn at_most_procs_threads_spin_and_none_without_work() {
    child_test!(|child| {
        let stderr = child.traced().succeed();
        let at_work = traces(&stderr, "work", "rest");
        for trace in &at_work {
            assert!(trace.get("spinningthreads") <= trace.get("gomaxprocs"), "{}", trace.summary);
            assert!(trace.get("idlethreads") <= trace.get("threads"), "{}", trace.summary);
        }
        let spinning = at_work.iter().filter(|trace| trace.get("spinningthreads") > 0).count();
        println!("{spinning} of {} traces show spinning threads", at_work.len());
        assert!(spinning > 0, "no thread spins in {} traces", at_work.len());
        let at_rest = traces(&stderr, "rest", "end").pop().unwrap();
        assert_eq!(at_rest.get("spinningthreads"), 0, "{}", at_rest.summary);
        assert_eq!(at_rest.get("idleprocs"), 4, "{}", at_rest.summary);
    });
    let rt = runtime(4);
    mark("work");
    for _ in 0..8 {
        let passed = common::traces_passed();
        while !passed.load(SeqCst) {
            // Bursts with pauses: threads begin and stop spinning all the time.
            rt.run(|| drop(join_all((0..20).map(|i| trefoil::go(move || black_box(i))))));
            common::spin(Duration::from_micros(30));
        }
    }
    mark("rest");
    // So many that the last one sees the end of spinning on a slow machine too.
    (0..4).for_each(|_| common::let_trace());
    mark("end");
}

/// When work appears and no thread spins, one more is woken.
///
/// Fails if the new goroutine waits for main, which waits for it and keeps its P.
#[test]
fn new_work_wakes_an_idle_thread() {
    let _watchdog = watchdog();
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
