//! Threads that block: handoff of their Ps, `blocking`, `lock_os_thread`. Statements m18 to m21 of those that
//! `mission.rs` begins, and what Go's own tests ask.
//!
//! Blocking calls are made with a bare `syscall` instruction: nothing between the goroutine and the kernel
//! can see them. What looks at the whole process is a child (`common::Child`).

mod common;

use common::raw::{pipe, raw_lock, raw_read, raw_sleep, raw_write};
use common::{
    MS, child_test, flag, hogs, hold_until, join_all, median, ms, once_in_five, runtime, spin,
    ticks, tid, watchdog, yield_until,
};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};
use trefoil::chan::bounded;
use trefoil::time::sleep;
use trefoil::{Runtime, blocking, debug, go, lock_os_thread, no_preempt, yield_now};

/// A file of its own for each call, opened `n` times: the descriptors lock each other out.
fn lock_files(n: usize) -> Vec<OwnedFd> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("trefoil-lock-{}-{}", std::process::id(), NEXT.fetch_add(1, SeqCst));
    let path = std::env::temp_dir().join(name);
    let open = || std::fs::OpenOptions::new().write(true).create(true).truncate(true).open(&path);
    let all = (0..n).map(|_| open().unwrap().into()).collect();
    std::fs::remove_file(&path).unwrap();
    all
}

/// A way to block until someone ends it.
enum Block {
    Read(OwnedFd, OwnedFd),
    Lock(OwnedFd, OwnedFd),
    Sleep(AtomicBool),
}

impl Block {
    fn kinds() -> [Block; 3] {
        let (read, write) = pipe();
        let mut files = lock_files(2);
        assert_eq!(raw_lock(&files[0], libc::LOCK_EX), 0);
        [
            Block::Read(read, write),
            Block::Lock(files.pop().unwrap(), files.pop().unwrap()),
            Block::Sleep(AtomicBool::new(false)),
        ]
    }

    fn block(&self) {
        match self {
            Block::Read(read, _) => assert_eq!(raw_read(read), 1),
            Block::Lock(wanted, _) => {
                assert_eq!(raw_lock(wanted, libc::LOCK_EX), 0);
                assert_eq!(raw_lock(wanted, libc::LOCK_UN), 0);
            }
            Block::Sleep(over) => {
                while !over.load(SeqCst) {
                    assert_eq!(raw_sleep(20 * MS), 0);
                }
            }
        }
    }

    fn end(&self) {
        match self {
            Block::Read(_, write) => assert_eq!(raw_write(write, b"x"), 1),
            Block::Lock(_, held) => assert_eq!(raw_lock(held, libc::LOCK_UN), 0),
            Block::Sleep(over) => over.store(true, SeqCst),
        }
    }
}

// ---- Blocking system calls ----

/// m18: a goroutine in a blocking call keeps its thread; its P is served by another one; the rest of its queue runs
/// on. Every P is blocked at once.
///
/// Broken, the children behind the blocked goroutines would not run, and main would not either: a hang.
#[test]
fn m18_a_blocked_goroutine_keeps_its_thread_and_its_queue_runs_on() {
    let _w = watchdog();
    const CHILDREN: usize = 50;
    for procs in [1, 2, 8] {
        for kind in 0..3 {
            runtime(procs).run(|| {
                let ran = Arc::new(AtomicUsize::new(0));
                let blocks: Vec<_> = (0..procs)
                    .map(|_| {
                        let kind = Block::kinds().into_iter().nth(kind).unwrap();
                        (Arc::new(kind), Arc::new(AtomicI32::new(0)))
                    })
                    .collect();
                let blocked: Vec<_> = blocks
                    .iter()
                    .map(|(block, at)| {
                        let (block, at, ran) = (block.clone(), at.clone(), ran.clone());
                        go(move || {
                            for _ in 0..CHILDREN {
                                let ran = ran.clone();
                                go(move || ran.fetch_add(1, SeqCst));
                            }
                            // From here to the comparison there is no call of the runtime.
                            let before = tid();
                            at.store(before, SeqCst);
                            block.block();
                            before == tid()
                        })
                    })
                    .collect();
                yield_until("the rest of their queues", || {
                    ran.load(SeqCst) == procs * CHILDREN
                        && blocks.iter().all(|(_, at)| at.load(SeqCst) != 0)
                });
                // The threads are theirs: nobody else runs there.
                let theirs: Vec<_> = blocks.iter().map(|(_, at)| at.load(SeqCst)).collect();
                for other in join_all((0..100).map(|_| go(tid))) {
                    assert!(!theirs.contains(&other), "{other} is blocked, and runs another");
                }
                for (block, _) in &blocks {
                    block.end();
                }
                assert!(join_all(blocked).into_iter().all(|same| same), "moved during a call");
            });
        }
    }
}

/// m19: with `blocking`, the handoff is immediate: no sysmon and no signal is needed.
#[test]
fn m19_blocking_hands_off_at_once() {
    let _w = watchdog();
    once_in_five(|| {
        runtime(1).run(|| {
            let (ran, before) = (flag(), debug::stats());
            let ours = ran.clone();
            go(move || ours.store(true, SeqCst));
            let start = Instant::now();
            // It computes, and would have to be preempted; but it has no P to lose.
            blocking(|| hold_until("the other", || ran.load(SeqCst)));
            let (took, after) = (start.elapsed(), debug::stats());
            let found = (after.retakes - before.retakes, after.preemptions - before.preemptions);
            if found != (0, 0) || took > 8 * MS {
                return Err(format!("retaken, preempted: {found:?}; after {took:?}"));
            }
            Ok(())
        })
    });
}

/// m19: unannounced, sysmon takes the P, if the call lasts and somebody waits.
#[test]
fn m19_unannounced_blocking_is_noticed() {
    let _w = watchdog();
    const CALL: Duration = Duration::from_millis(200);
    once_in_five(|| {
        runtime(1).run(|| {
            let before = debug::stats().retakes;
            let start = Instant::now();
            let other = go(move || start.elapsed());
            raw_sleep(CALL);
            let (after, waited) = (debug::stats().retakes, other.join().unwrap());
            if after == before || waited > CALL / 4 {
                return Err(format!("{} retaken, the other ran after {waited:?}", after - before));
            }
            Ok(())
        })
    });
}

/// m19: short calls keep their P, however many there are and whoever waits: no handoff, no other thread.
#[test]
fn m19_short_calls_keep_their_p() {
    let _w = watchdog();
    runtime(1).run(|| {
        let (read, write) = pipe();
        let ran = flag();
        let (ours, before) = (ran.clone(), debug::stats().retakes);
        let other = go(move || ours.store(true, SeqCst));
        // The slice must not end it: only the calls are to be seen.
        let held = no_preempt();
        let (start, at) = (Instant::now(), tid());
        let mut calls = 0;
        while start.elapsed() < 30 * MS {
            assert_eq!(raw_write(&write, b"x"), 1);
            assert_eq!(raw_read(&read), 1);
            calls += 2;
        }
        let retaken = debug::stats().retakes - before;
        assert_eq!((ran.load(SeqCst), retaken, tid()), (false, 0, at), "in {calls} calls");
        drop(held);
        other.join().unwrap();
    });
}

/// One who only yields is as good as idle: it fetches who waits behind one that is not to be preempted. (No thread is
/// woken for that: both Ps are at work.)
#[test]
fn one_who_yields_fetches_who_waits_elsewhere() {
    let _w = watchdog();
    runtime(2).run(|| {
        let [yields, ran, stop] = [flag(), flag(), flag()];
        let (begun, end) = (yields.clone(), stop.clone());
        let yielder = go(move || {
            while !end.load(SeqCst) {
                begun.store(true, SeqCst);
                yield_now();
            }
        });
        yield_until("the one who yields", || yields.load(SeqCst));
        let held = no_preempt();
        yields.store(false, SeqCst);
        // On the other P: ours is in our hands.
        outside_until(|| yields.load(SeqCst));
        let ours = ran.clone();
        let waits = go(move || ours.store(true, SeqCst));
        let start = Instant::now();
        outside_until(|| ran.load(SeqCst) || start.elapsed() > 2_000 * MS);
        assert!(ran.load(SeqCst), "waited for 2 s beside one who yields");
        drop(held);
        stop.store(true, SeqCst);
        yielder.join().unwrap();
        waits.join().unwrap();
    });
}

/// m20: on return it gets a P, or queues. Results are right, nobody is lost or runs twice.
#[test]
fn m20_back_from_a_call() {
    let _w = watchdog();
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
                            // Nested, and with calls of the runtime inside.
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

/// The number of the P that runs this goroutine: where a goroutine that it starts is counted. Nobody else may start one
/// meanwhile.
fn my_p() -> usize {
    let _held = no_preempt();
    let spawned = || debug::stats().procs.into_iter().map(|p| p.spawned);
    let before: Vec<_> = spawned().collect();
    go(|| ());
    let mut counts = spawned().zip(before);
    counts.position(|(now, before)| now != before).expect("a P that started one")
}

/// Waits without any call of the runtime: in `blocking` that would be the way back.
fn outside_until(done: impl Fn() -> bool) {
    while !done() {
        common::pause();
    }
}

/// m20: on return the old P, if it is free.
///
/// Broken, it would take whichever P became idle last: others did after its own.
#[test]
fn m20_back_to_its_own_p() {
    let _w = watchdog();
    const ROUNDS: usize = 40;
    let rt = runtime(4);
    let (away, over) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (says, sees) = (away.clone(), over.clone());
    let goroutine = rt.go(move || {
        let round = |n: usize| {
            // Whoever the OS leaves waiting for long would be preempted, and move.
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
        // Two others at once use its P and another one, and leave them in any order.
        let here = Arc::new(AtomicUsize::new(0));
        let other = || {
            let here = here.clone();
            rt.go(move || {
                here.fetch_add(1, SeqCst);
                hold_until("the other", || here.load(SeqCst) == 2);
            })
        };
        join_all([other().unwrap(), other().unwrap()]);
        over.store(round, SeqCst);
    }
    for (before, after) in goroutine.unwrap().join().unwrap() {
        assert_eq!(before, after, "P and thread");
    }
}

/// m20: … else another idle P.
///
/// Broken, it would wait for its own, which is taken for as long as it waits: a hang.
#[test]
fn m20_back_to_another_p() {
    let _w = watchdog();
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
                // Not in the hands of a thread that searches.
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
    // A thief may take the squatter to the other P, and then its own is free.
    println!("{elsewhere} of {ROUNDS} times elsewhere");
    assert!(elsewhere > 0, "always back to its own");
}

/// m20: … else the global queue.
///
/// Broken, it would go on beside the goroutine that has the only P, and that one would not see it queue.
#[test]
fn m20_back_to_the_global_queue() {
    let _w = watchdog();
    runtime(1).run(|| {
        for _ in 0..20 {
            let (taken, seen) = (flag(), flag());
            let (says, sees) = (taken.clone(), seen.clone());
            let squatter = go(move || {
                let _held = no_preempt();
                says.store(true, SeqCst);
                hold_until("the other to queue", || {
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

/// A panic out of `blocking` comes back with a P too.
#[test]
fn m20_a_panic_in_blocking() {
    let _w = watchdog();
    runtime(1).run(|| {
        let failed =
            std::panic::catch_unwind(|| blocking(|| std::panic::resume_unwind(Box::new("out"))));
        assert_eq!(*failed.unwrap_err().downcast::<&str>().unwrap(), "out");
        assert_eq!(go(|| 5).join().unwrap(), 5);
        assert_eq!(debug::stats().threads_without_p, 0);
    });
    assert_eq!(blocking(|| 3), 3, "on a plain thread");
}

/// Go's test of preemption after system calls: 8 goroutines on 2 Ps in calls of 10, 100 and 1000 µs, started and
/// stopped ten times, in less than 5 s.
#[test]
fn m20_go_preemption_after_syscall() {
    let _w = watchdog();
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

/// m21: the extra threads are bounded and visible. Everything is done nevertheless, and one line tells why it
/// takes longer.
#[test]
fn m21_threads_are_bounded_and_visible() {
    const LIMIT: usize = 8;
    child_test!(|child| {
        let stderr = child.succeed();
        let said = stderr.matches("program exceeds 8-thread limit").count();
        assert_eq!(said, 1, "{stderr}");
    });
    for procs in [1, 2, 8] {
        // The line comes once for each runtime: only the first is to say it.
        let limit = if procs == 2 { LIMIT } else { 100 };
        let rt = Runtime::builder().procs(procs).max_threads(limit).build().unwrap();
        let over = AtomicBool::new(false);
        let (most, without) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|s| {
            s.spawn(|| {
                while !over.load(SeqCst) {
                    most.fetch_max(ms().len(), SeqCst);
                    std::thread::sleep(MS);
                }
            });
            rt.run(|| {
                let done = join_all((0..50).map(|i| {
                    go(move || {
                        for _ in 0..3 {
                            if i % 2 == 0 {
                                blocking(|| raw_sleep(2 * MS));
                            } else {
                                raw_sleep(2 * MS);
                            }
                        }
                        let stats = debug::stats();
                        assert!(stats.threads <= limit, "{stats:?}");
                        (i, stats.threads_without_p)
                    })
                }));
                assert!(done.iter().enumerate().all(|(k, &(i, _))| k == i));
                without.store(done.iter().map(|&(_, n)| n).max().unwrap(), SeqCst);
            });
            over.store(true, SeqCst);
        });
        let most = most.load(SeqCst);
        assert!(most <= limit, "{most} threads");
        assert!(without.load(SeqCst) > 0, "nobody was seen without a P");
        drop(rt);
        yield_until("the threads to end", || ms().is_empty());
    }
}

/// m21: threads that nobody needs any more end after some seconds.
#[test]
fn m21_spare_threads_end() {
    child_test!();
    const BLOCKED: usize = 40;
    runtime(2).run(|| {
        let (read, write) = pipe();
        let (read, at) = (Arc::new(read), Arc::new(AtomicUsize::new(0)));
        let readers: Vec<_> = (0..BLOCKED)
            .map(|_| {
                let (read, at) = (read.clone(), at.clone());
                go(move || {
                    at.fetch_add(1, SeqCst);
                    assert_eq!(raw_read(&read), 1);
                })
            })
            .collect();
        yield_until("all to block", || {
            at.load(SeqCst) == BLOCKED && debug::stats().threads >= BLOCKED
        });
        assert_eq!(raw_write(&write, &[0; BLOCKED]), BLOCKED as isize);
        join_all(readers);
        let start = Instant::now();
        assert!(debug::stats().threads >= BLOCKED);
        while debug::stats().threads > 2 + 2 {
            assert!(start.elapsed() < Duration::from_secs(15), "{:?}", debug::stats());
            sleep(50 * MS);
        }
        assert!(start.elapsed() > Duration::from_secs(3), "after {:?}", start.elapsed());
        assert!(ms().len() <= 4);
        // And new ones come when they are needed.
        join_all((0..10).map(|_| go(|| raw_sleep(MS))));
    });
}

/// A P that is taken away or given away may have timers: someone is awake for them.
#[test]
fn timers_of_a_p_that_was_given_away() {
    let _w = watchdog();
    const CALL: Duration = Duration::from_millis(600);
    once_in_five(|| {
        for procs in [1, 2, 8] {
            let rt = runtime(procs);
            let slept = rt.run(|| {
                let start = Instant::now();
                go(|| blocking(|| raw_sleep(CALL)));
                go(|| {
                    sleep(5 * MS);
                    raw_sleep(CALL);
                });
                go(|| {
                    let _guard = lock_os_thread();
                    sleep(5 * MS);
                    blocking(|| raw_sleep(CALL));
                });
                (0..10).for_each(|_| sleep(5 * MS));
                start.elapsed()
            });
            if slept > CALL / 2 {
                return Err(format!("{procs} Ps: 50 ms took {slept:?}"));
            }
        }
        Ok(())
    });
}

/// 64 goroutines block unannounced, in files, locks and sleeps; a ticker keeps its time.
#[test]
fn a_ticker_beside_64_blocked_goroutines() {
    child_test!();
    for procs in [1, 2] {
        once_in_five(|| {
            runtime(procs).run(|| {
                let stop = flag();
                let mut files = lock_files(17);
                let (held, (read, write)) = (files.pop().unwrap(), pipe());
                assert_eq!(raw_lock(&held, libc::LOCK_EX), 0);
                let read = Arc::new(read);
                let readers = (0..24).map(|_| {
                    let read = read.clone();
                    go(move || {
                        raw_read(&read);
                    })
                });
                let readers: Vec<_> = readers.collect();
                let lockers = files.into_iter().map(|file| {
                    go(move || {
                        raw_lock(&file, libc::LOCK_SH);
                    })
                });
                let lockers: Vec<_> = lockers.collect();
                let sleepers = (0..24).map(|_| {
                    let stop = stop.clone();
                    go(move || {
                        while !stop.load(SeqCst) {
                            raw_sleep(5 * MS);
                            yield_now();
                        }
                    })
                });
                let sleepers: Vec<_> = sleepers.collect();
                let late = ticks(500);
                stop.store(true, SeqCst);
                drop(write);
                drop(held);
                for handles in [readers, lockers, sleepers] {
                    join_all(handles);
                }
                let (middle, worst) = (median(late.clone()), late.iter().max().unwrap());
                println!("{procs} Ps, 64 blocked: median {middle:?}, worst {worst:?}");
                if middle < 2 * MS { Ok(()) } else { Err(format!("median {middle:?}")) }
            })
        });
    }
}

// ---- lock_os_thread ----

/// A locked goroutine stays on its thread through sleeps, channels, preemption, blocking and yields, and nobody else
/// runs there; locks nest; at 1, 2, 8 and 64 Ps.
#[test]
fn a_locked_goroutine_stays_on_its_thread() {
    let _w = watchdog();
    for procs in [1, 2, 8, 64] {
        runtime(procs).run(|| {
            let stop = flag();
            let loops = hogs(2, &stop);
            let (tx, rx) = bounded::<i32>(0);
            let echo = go(move || rx.iter().map(i64::from).sum::<i64>());
            let locked = go(move || {
                let outer = lock_os_thread();
                let here = tid();
                for round in 0..5 {
                    let inner = lock_os_thread();
                    sleep(MS);
                    assert_eq!(tid(), here, "after a sleep");
                    tx.send(round).unwrap();
                    assert_eq!(tid(), here, "after a send");
                    spin(12 * MS);
                    assert_eq!(tid(), here, "after preemption");
                    blocking(|| raw_sleep(MS));
                    assert_eq!(tid(), here, "after blocking");
                    raw_sleep(MS);
                    drop(inner);
                    yield_now();
                    assert_eq!(tid(), here, "after a yield, with the outer lock");
                    let other = go(tid).join().unwrap();
                    assert_ne!(other, here, "somebody else ran on our thread");
                }
                drop(outer);
                drop(tx);
                here
            });
            locked.join().unwrap();
            assert_eq!(echo.join().unwrap(), 10);
            stop.store(true, SeqCst);
            join_all(loops);
        });
    }
    drop(lock_os_thread());
}

fn exists(tid: i32) -> bool {
    std::path::Path::new(&format!("/proc/self/task/{tid}")).exists()
}

/// Go's: a goroutine that ends while it is locked takes its thread with it; one that unlocked does not.
#[test]
fn exit_while_locked_ends_the_thread() {
    let _w = watchdog();
    for procs in [1, 2, 8] {
        runtime(procs).run(|| {
            for nesting in 1..4 {
                let gone = go(move || {
                    for _ in 0..nesting {
                        std::mem::forget(lock_os_thread());
                    }
                    drop(lock_os_thread());
                    sleep(MS / 10);
                    tid()
                });
                let gone = gone.join().unwrap();
                yield_until("the thread to end", || !exists(gone));
                // Its handle may also be dropped, or it may panic.
                let at = Arc::new(AtomicI32::new(0));
                let ours = at.clone();
                drop(go(move || {
                    std::mem::forget(lock_os_thread());
                    ours.store(tid(), SeqCst);
                    std::panic::resume_unwind(Box::new(()));
                }));
                yield_until("the thread to end", || {
                    at.load(SeqCst) != 0 && !exists(at.load(SeqCst))
                });
            }
            let kept = go(|| {
                drop((lock_os_thread(), lock_os_thread()));
                tid()
            });
            let kept = kept.join().unwrap();
            sleep(5 * MS);
            assert!(exists(kept));
            assert_eq!(go(|| 3).join().unwrap(), 3);
        });
    }
}

/// Go's, a hundred times: locked goroutines end, locked or not, while the number of Ps changes.
#[test]
fn locked_goroutines_end_while_procs_change() {
    let _w = watchdog();
    runtime(2).run(|| {
        for round in 0..100usize {
            let ended = (0..6).map(|i| {
                go(move || {
                    let guard = lock_os_thread();
                    if i % 3 == 0 {
                        sleep(Duration::from_micros(50 * i));
                    }
                    if i % 2 == 0 {
                        std::mem::forget(guard)
                    } else {
                        drop(guard)
                    }
                    i
                })
            });
            let ended: Vec<_> = ended.collect();
            trefoil::set_procs(1 + round % 5);
            if round % 3 == 0 {
                blocking(|| raw_sleep(Duration::from_micros(100)));
            }
            trefoil::set_procs(1 + round % 3);
            assert_eq!(join_all(ended).iter().sum::<u64>(), 15);
        }
    });
}

/// Two locked goroutines hand a ball to each other.
#[test]
fn locked_goroutines_play_ping_pong() {
    let _w = watchdog();
    for procs in [1, 2, 8] {
        runtime(procs).run(|| {
            let (ping, pinged) = bounded::<u32>(0);
            let (pong, ponged) = bounded::<u32>(0);
            let other = go(move || {
                let _guard = lock_os_thread();
                let here = tid();
                for ball in pinged.iter() {
                    pong.send(ball + 1).unwrap();
                }
                assert_eq!(tid(), here);
            });
            let _guard = lock_os_thread();
            let mut ball = 0;
            for _ in 0..500 {
                ping.send(ball).unwrap();
                ball = ponged.recv().unwrap();
            }
            assert_eq!(ball, 500);
            drop(ping);
            other.join().unwrap();
        });
    }
}

/// Go's: yield loops and locked goroutines let others progress.
#[test]
fn yielding_locked_goroutines_let_others_run() {
    let _w = watchdog();
    for procs in [1, 2] {
        runtime(procs).run(|| {
            let (stop, turns) = (flag(), Arc::<[AtomicU64; 4]>::default());
            let locked = (0..4).map(|i: usize| {
                let (stop, turns) = (stop.clone(), turns.clone());
                go(move || {
                    let _guard = lock_os_thread();
                    while !stop.load(SeqCst) {
                        yield_now();
                        turns[i].fetch_add(1, SeqCst);
                    }
                })
            });
            let locked: Vec<_> = locked.collect();
            for i in 0..200 {
                assert_eq!(go(move || i).join().unwrap(), i);
            }
            yield_until("each to have turns", || turns.iter().all(|n| n.load(SeqCst) > 10));
            stop.store(true, SeqCst);
            join_all(locked);
        });
    }
}

/// No P is lost between a locked goroutine's thread and those who send it home.
#[test]
fn locked_goroutines_lose_no_p() {
    let _w = watchdog();
    for procs in [2, 4] {
        runtime(procs).run(|| {
            for _ in 0..5 {
                join_all((0..6).map(|i| {
                    go(move || {
                        let _guard = (i % 2 == 0).then(lock_os_thread);
                        (0..300).for_each(|_| yield_now());
                    })
                }));
            }
            let running = || debug::stats().procs.iter().filter(|p| p.status == "running").count();
            let start = Instant::now();
            while running() > 1 {
                assert!(start.elapsed() < Duration::from_secs(5), "{:?}", debug::stats());
                sleep(MS);
            }
        });
    }
}
