//! Statements 2, 11 to 15 and 23 of the table in `main.rs`: run queues and the scheduling order.

use crate::common::{
    self, Trace, child_test, flag, hold_to_the_end, hold_until, join_all, mark, once_in_five,
    runtime, same, traces, watchdog, yield_until,
};
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use trefoil::net::UnixStream;

/// A new goroutine goes to the current P's queue.
///
/// Fails if the order on one P is not Go's: the newest first (`runnext`), then the queue.
#[test]
fn newest_goroutine_runs_first_then_the_others_in_order() {
    let _watchdog = watchdog();
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

/// If the local queue is full, half of it moves to the global queue.
///
/// Fails if goroutines beyond 257 are lost or run twice, or if the trace does not show Go's
/// numbers: 1 in `runnext` and 256 in the ring fit; the next moves 128 + 1 to the global queue.
#[test]
fn full_local_queue_moves_half_to_the_global_queue() {
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
        // If the OS does not run this thread for long, a preemption would change the queues.
        let held = trefoil::no_preempt();
        let mut handles: Vec<_> = (0..n).map(|_| spawn()).collect();
        mark("spawned");
        common::let_trace();
        mark("end");
        drop(held);
        handles.extend((0..10_000).map(|_| spawn()));
        let before: BTreeSet<_> = join_all(handles).into_iter().collect();
        // Each saw a different count: none was lost and none ran twice.
        assert_eq!(before.len(), n + 10_000);
        assert_eq!(ran.load(SeqCst), n + 10_000);
    });
}

/// Each P has a local queue; there is one global queue, open to all threads.
///
/// Fails if goroutines started on a P are not in its queue, or if those started by a plain thread,
/// which has no P, are not in the global queue.
#[test]
fn goroutines_queue_locally_and_threads_queue_globally() {
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

/// Every 61st time the global queue comes first, otherwise the local queue, then the global one.
///
/// Here the first 128 overflow to the global queue. Fails without the 61st turn, because these
/// would run after all local goroutines, and without "local first", because they would run before
/// them. In a child without preemption, which would put main into the global queue.
#[test]
fn every_61st_goroutine_comes_from_the_global_queue() {
    child_test!(|child| child.env("TREFOIL_DEBUG", "asyncpreemptoff=1").succeed());
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
        // The ring and runnext had 0..=256. When 257 came, the ring's first 128 moved, and 256
        // after them, because it no longer fitted.
        let global = |i: &usize| *i < 128 || *i == 256;
        // While there are local goroutines, every 61st is a global one.
        let end = order.iter().rposition(|i| !global(i)).unwrap();
        let early: Vec<_> = (0..=end).filter(|&at| global(&order[at])).collect();
        let every_61st = early.windows(2).all(|pair| pair[1] - pair[0] == 61);
        if !(2..=4).contains(&early.len()) || early[0] > 61 || !every_61st {
            return Err(format!(
                "of the first {end}, those at {early:?} came from the global queue"
            ));
        }
        // Each queue by itself is first in, first out, behind runnext.
        let globals: Vec<_> = order.iter().copied().filter(global).collect();
        let ring: Vec<_> = order[1..].iter().copied().filter(|i| !global(i)).collect();
        same((order[0], globals.is_sorted(), ring.is_sorted()), (257, true, true))
    });
}

/// Endless goroutines in the local queue do not starve a goroutine in the global queue.
///
/// Fails if the goroutine that a plain thread starts waits for ever.
#[test]
fn local_goroutines_do_not_starve_the_global_queue() {
    let _watchdog = watchdog();
    let rt = runtime(1);
    let end = flag();
    let yielders: Vec<_> = (0..3)
        .map(|_| {
            let end = end.clone();
            rt.go(move || {
                // Another endless goroutine, in the local queue.
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

/// The order is: local queue, network, other Ps' queues, on a P that finds work in all three.
///
/// Fails if the goroutine whose socket is ready runs before the local ones or after those of the
/// other P.
#[test]
fn ready_sockets_come_after_local_and_before_stolen_work() {
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
        // Main keeps its P, so that all of this is on the other P.
        trefoil::go(move || {
            trefoil::go(move || {
                there.read_exact(&mut [0]).unwrap();
                network();
            });
            yield_until("the reader", || trefoil::debug::stats().io_waiters == 1);
            says.store(true, SeqCst);
            // Two take turns: if one goroutine kept the P, sysmon would poll instead.
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
        hold_until("all goroutines", || order.lock().unwrap().len() == OTHERS + 3);
        join_all(others);
        order.lock().unwrap().clone()
    };
    let orders: Vec<_> = (0..ROUNDS).map(|_| runtime(2).run(round)).collect();
    let network = |order: &[&str]| order.iter().position(|&what| what == "network").unwrap();
    let early = orders.iter().filter(|order| network(order) == 0).count();
    let late = orders.iter().filter(|order| order[..network(order)].contains(&"other")).count();
    // Some exceptions: sysmon may poll first, and a goroutine that it wakes does not queue.
    assert!(early < ROUNDS / 2, "before local work {early} of {ROUNDS} times: {orders:?}");
    assert!(late < ROUNDS / 8, "after stolen work {late} of {ROUNDS} times: {orders:?}");
}

/// A P takes a fair share of the global queue: with 6 goroutines and 3 Ps, 2 each.
///
/// Fails if the P that takes leaves another number than 4 in the global queue, or has another
/// number than 1 behind the goroutine that it runs.
#[test]
fn a_p_takes_its_share_of_the_global_queue() {
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

/// Other Ps steal from a P that has all the work.
///
/// Fails if main's queue is not served: main starts all goroutines and never releases its P.
#[test]
fn idle_ps_steal_from_a_busy_p() {
    let _watchdog = watchdog();
    runtime(3).run(|| {
        let main = common::tid();
        let (done, elsewhere) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        // From the first goroutine on: if main's slice ended, its own thread would run the queue.
        let held = trefoil::no_preempt();
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
        drop(held);
        assert!(elsewhere.load(SeqCst) >= 100, "{elsewhere:?} of 200 ran on other threads");
        join_all(handles);
    });
}

/// Stealing takes half of the victim's queue.
///
/// Fails if emptying a queue of 200 takes about 200 steals (one each) or one (all).
#[test]
fn stealing_takes_half_of_the_victims_queue() {
    const JOBS: usize = 200;
    child_test!(|child| {
        once_in_five(|| {
            let stderr = child.traced().succeed();
            for trace in traces(&stderr, "stolen", "end") {
                let sum = |name| trace.ps().map(|p| common::number(p, name)).sum::<u64>();
                // 199 in the ring: 100, 50, 25, 12, 6, 3, 2, 1; and runnext.
                let (steals, stolen) = (sum("steals"), sum("stolen"));
                if !(7..=12).contains(&steals) || stolen != JOBS as u64 {
                    return Err(format!(
                        "{stolen} goroutines in {steals} steals: {:?}",
                        trace.detail
                    ));
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
        // The P that steals exists only from here on, and main keeps its own.
        trefoil::set_procs(2);
        hold_until("the thief", || done.load(SeqCst) == JOBS);
        mark("stolen");
        common::let_trace();
        mark("end");
        join_all(handles);
    });
}

/// Stealing begins with a random victim.
///
/// Fails if a thief that finds work at three Ps always begins with the same one.
#[test]
fn thieves_choose_victims_at_random() {
    let _watchdog = watchdog();
    const ROUNDS: usize = 40;
    const EACH: usize = 3;
    runtime(4).run(|| {
        let round = Arc::new(AtomicUsize::new(0));
        let loaded = Arc::new(AtomicUsize::new(0));
        let ran = Arc::new(Mutex::new(Vec::new()));
        // Fills the queue of its P once per round.
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
        // The victims are main and two more goroutines, which keep their Ps all the time.
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
        assert_eq!(first, BTreeSet::from([0, 1, 2]), "the first victims");
    });
}

/// An unblocked goroutine returns to a local queue: that of the P that unblocked it.
///
/// Fails if it runs behind the others there, or not at all.
#[test]
fn unblocked_goroutine_runs_next_on_the_waking_p() {
    let _watchdog = watchdog();
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
        // The child is runnext; it makes the waiter runnext, before the two in the ring.
        same(order, vec!["child", "woken", "first", "second"])
    });
}

/// A goroutine that is unblocked from outside returns to the global queue.
///
/// Fails if a goroutine woken by another runtime is not in its own runtime's global queue.
#[test]
fn goroutine_woken_by_another_runtime_joins_the_global_queue() {
    child_test!(|child| {
        once_in_five(|| {
            let stderr = child.traced().succeed();
            // Two runtimes write traces; only one of them ever has goroutines in its queue.
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

/// A P without work polls the network; the goroutines that are ready become runnable there.
///
/// Fails if the first that runs finds some of the others in the global queue, of which a P takes
/// only its share, or if they become runnable one by one.
#[test]
fn ready_goroutines_join_the_queue_of_the_polling_p() {
    let _watchdog = watchdog();
    const ROUNDS: usize = 40;
    const READERS: usize = 5;
    let round = || {
        // The other P is kept busy, so that it neither takes nor steals any.
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
        // Begin a new time slice: while a goroutine runs for long, sysmon polls instead.
        trefoil::time::sleep(Duration::from_micros(100));
        near.iter().for_each(|mut stream| stream.write_all(b"x").unwrap());
        join_all(readers);
        end.store(true, SeqCst);
        holder.join().unwrap();
        *seen.lock().unwrap()
    };
    let seen: Vec<_> = (0..ROUNDS).map(|_| runtime(2).run(round)).collect();
    let right = seen.iter().filter(|&&queues| queues == (READERS - 1, 0)).count();
    println!("{right} of {ROUNDS} rounds as expected");
    // Now and then sysmon polls nevertheless.
    assert!(right > ROUNDS / 2, "local and global queue: {seen:?}");
}
