//! A goroutine blocks its thread: its P goes to another M, at once or by sysmon.

use crate::common::raw::{pipe, raw_lock, raw_read, raw_sleep, raw_sleep_through, raw_write};
use crate::common::{
    MS, flag, hold_until, join_all, once_in_five, runtime, same, tid, watchdog, yield_until,
};
use crate::{lock_files, outside_until};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};
use trefoil::{blocking, debug, go, no_preempt, yield_now};

/// A call that blocks until `end` is called.
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
                    assert_eq!(raw_sleep_through(20 * MS), 0);
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

/// A goroutine in a blocking call keeps its thread; another M serves its P; the rest of its queue
/// runs on. Every P is blocked at once.
///
/// Fails if the children behind the blocked goroutines do not run, or main does not: a hang.
#[test]
fn a_blocked_goroutine_keeps_its_thread_and_its_queue_runs_on() {
    let _watchdog = watchdog();
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
                // No other goroutine runs on the threads of the blocked ones.
                let theirs: Vec<_> = blocks.iter().map(|(_, at)| at.load(SeqCst)).collect();
                for other in join_all((0..100).map(|_| go(tid))) {
                    assert!(
                        !theirs.contains(&other),
                        "thread {other} is blocked and runs another goroutine"
                    );
                }
                for (block, _) in &blocks {
                    block.end();
                }
                assert!(join_all(blocked).into_iter().all(|same| same), "moved during a call");
            });
        }
    }
}

/// With `blocking`, the handoff is immediate: neither sysmon nor a signal is needed.
#[test]
fn blocking_hands_off_its_p_at_once() {
    let _watchdog = watchdog();
    once_in_five(|| {
        runtime(1).run(|| {
            let (ran, before) = (flag(), debug::stats());
            let ours = ran.clone();
            go(move || ours.store(true, SeqCst));
            let start = Instant::now();
            // It computes, so that it would have to be preempted if it had a P.
            blocking(|| hold_until("the other goroutine", || ran.load(SeqCst)));
            let (took, after) = (start.elapsed(), debug::stats());
            let found = (after.retakes - before.retakes, after.preemptions - before.preemptions);
            if found != (0, 0) || took > 8 * MS {
                return Err(format!("retaken, preempted: {found:?}; after {took:?}"));
            }
            Ok(())
        })
    });
}

/// Without `blocking`, sysmon retakes the P if the call lasts and other goroutines wait.
#[test]
fn sysmon_retakes_the_p_of_an_unannounced_blocking_call() {
    let _watchdog = watchdog();
    const CALL: Duration = Duration::from_millis(200);
    once_in_five(|| {
        runtime(1).run(|| {
            let before = debug::stats().retakes;
            let start = Instant::now();
            let other = go(move || start.elapsed());
            raw_sleep(CALL);
            let (after, waited) = (debug::stats().retakes, other.join().unwrap());
            if after == before || waited > CALL / 4 {
                return Err(format!(
                    "{} retakes, the other goroutine ran after {waited:?}",
                    after - before
                ));
            }
            Ok(())
        })
    });
}

/// Short calls keep their P, however many there are and although another goroutine waits: no
/// handoff, no other thread.
///
/// A call during which the OS stops the thread is not short, and sysmon is right to retake its P.
#[test]
fn short_calls_keep_their_p() {
    let _watchdog = watchdog();
    once_in_five(|| {
        runtime(1).run(|| {
            let (read, write) = pipe();
            let ran = flag();
            let (ours, before) = (ran.clone(), debug::stats().retakes);
            let other = go(move || ours.store(true, SeqCst));
            // The end of the time slice must not stop it: only the calls count here.
            let held = no_preempt();
            let (start, at) = (Instant::now(), tid());
            let mut calls = 0;
            while start.elapsed() < 30 * MS {
                assert_eq!(raw_write(&write, b"x"), 1);
                assert_eq!(raw_read(&read), 1);
                calls += 2;
            }
            let retaken = debug::stats().retakes - before;
            let found = (ran.load(SeqCst), retaken, tid());
            drop(held);
            other.join().unwrap();
            same(found, (false, 0, at)).map_err(|e| format!("in {calls} calls: {e}"))
        })
    });
}

/// A goroutine that only yields steals the goroutine that waits behind one that must not be
/// preempted. (No thread is woken for that: both Ps are busy.)
#[test]
fn yield_now_steals_from_a_p_that_cannot_be_preempted() {
    let _watchdog = watchdog();
    runtime(2).run(|| {
        let [yields, ran, stop] = [flag(), flag(), flag()];
        let (begun, end) = (yields.clone(), stop.clone());
        let yielder = go(move || {
            while !end.load(SeqCst) {
                begun.store(true, SeqCst);
                yield_now();
            }
        });
        yield_until("the yielding goroutine", || yields.load(SeqCst));
        let held = no_preempt();
        yields.store(false, SeqCst);
        // The yielding goroutine now runs on the other P, because this one is kept.
        outside_until(|| yields.load(SeqCst));
        let ours = ran.clone();
        let waits = go(move || ours.store(true, SeqCst));
        let start = Instant::now();
        outside_until(|| ran.load(SeqCst) || start.elapsed() > 2_000 * MS);
        assert!(ran.load(SeqCst), "waited for 2 s beside a goroutine that yields");
        drop(held);
        stop.store(true, SeqCst);
        yielder.join().unwrap();
        waits.join().unwrap();
    });
}
