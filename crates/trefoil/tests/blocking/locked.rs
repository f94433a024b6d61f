//! `lock_os_thread`.

use crate::common::raw::raw_sleep;
use crate::common::{MS, flag, hogs, join_all, runtime, spin, tid, watchdog, yield_until};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};
use trefoil::chan::bounded;
use trefoil::time::sleep;
use trefoil::{blocking, debug, go, lock_os_thread, yield_now};

/// A locked goroutine stays on its thread through sleeps, channels, preemption, blocking and
/// yields, and no other goroutine runs there. Locks nest. With 1, 2, 8 and 64 Ps.
#[test]
fn a_locked_goroutine_stays_on_its_thread() {
    let _watchdog = watchdog();
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
                    assert_ne!(other, here, "another goroutine ran on the locked thread");
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

/// As in Go, a goroutine that ends while it is locked ends its thread; one that has unlocked does
/// not.
#[test]
fn a_goroutine_that_ends_locked_ends_its_thread() {
    let _watchdog = watchdog();
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
                // The same if its handle is dropped and it panics.
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

/// As in Go, locked goroutines end, still locked or not, while the number of Ps changes.
#[test]
fn locked_goroutines_end_while_procs_change() {
    let _watchdog = watchdog();
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

/// Two locked goroutines send a number to and fro and stay on their threads.
#[test]
fn locked_goroutines_exchange_messages_on_their_own_threads() {
    let _watchdog = watchdog();
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

/// As in Go, locked goroutines that yield in a loop let others run.
#[test]
fn yielding_locked_goroutines_let_others_run() {
    let _watchdog = watchdog();
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
            yield_until("each goroutine to have turns", || {
                turns.iter().all(|n| n.load(SeqCst) > 10)
            });
            stop.store(true, SeqCst);
            join_all(locked);
        });
    }
}

/// No P is lost when it passes between a locked goroutine's M and the other Ms.
#[test]
fn locked_goroutines_lose_no_p() {
    let _watchdog = watchdog();
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
