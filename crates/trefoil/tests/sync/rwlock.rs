//! `RwLock`.

use super::common::{MS, join_all, once_in_five, same, watchdog};
use super::{PROCS, join_thread, mixed, next, on, on_every};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::SeqCst};
use std::time::Duration;
use trefoil::sync::{Barrier, RwLock, RwLockWriteGuard};
use trefoil::time::sleep;
use trefoil::{go, yield_now};

/// Go: TestParallelReaders. They are inside together.
#[test]
fn readers_are_parallel() {
    let _w = watchdog();
    for (readers, procs) in [(1, 4), (3, 4), (4, 2), (4, 1)] {
        on(procs, || {
            let lock = Arc::new(RwLock::new(()));
            let inside = Arc::new(Barrier::new(readers));
            join_all((0..readers).map(|_| {
                let (lock, inside) = (lock.clone(), inside.clone());
                go(move || {
                    let _guard = lock.read();
                    inside.wait();
                })
            }));
        });
    }
}

fn hammer_rwlock(readers: usize, rounds: usize, with_threads: bool) {
    let lock = Arc::new(RwLock::new(0u64));
    let activity = Arc::new(AtomicI32::new(0));
    // Go's: two writers, and readers before, between and behind them.
    let worker = {
        let (lock, activity) = (lock.clone(), activity.clone());
        move |i: usize| {
            for _ in 0..rounds {
                if i < 2 {
                    let mut value = lock.write();
                    let n = activity.fetch_add(10_000, SeqCst) + 10_000;
                    assert_eq!(n, 10_000, "a writer is alone");
                    *value += 1;
                    for _ in 0..100 {
                        std::hint::spin_loop();
                    }
                    activity.fetch_sub(10_000, SeqCst);
                } else {
                    let _value = lock.read();
                    let n = activity.fetch_add(1, SeqCst) + 1;
                    assert!((1..10_000).contains(&n), "a reader beside a writer: {n}");
                    for _ in 0..100 {
                        std::hint::spin_loop();
                    }
                    activity.fetch_sub(1, SeqCst);
                }
            }
        }
    };
    if with_threads {
        mixed(readers + 2, worker);
    } else {
        join_all((0..readers + 2).map(|i| {
            go({
                let worker = worker.clone();
                move || worker(i)
            })
        }));
    }
    assert_eq!(*lock.read(), 2 * rounds as u64);
}

/// Go: TestRWMutex, HammerRWMutex: procs 1, 4, 10 with 1 to 10 readers.
#[test]
fn hammer() {
    let _w = watchdog();
    for (procs, readers) in
        [(1, 1), (1, 3), (1, 10), (4, 1), (4, 3), (4, 10), (10, 1), (10, 3), (10, 10), (10, 5)]
    {
        on(procs, || hammer_rwlock(readers, 300, false));
    }
    on_every(|| hammer_rwlock(4, 200, true));
}

/// A waiting writer keeps new readers out; when it is done, all of them come before the next
/// writer.
#[test]
fn order_of_writers_and_readers() {
    let _w = watchdog();
    // Nothing tells that a goroutine waits already: a sleep must do, and may be too short.
    let attempt = || {
        let lock = Arc::new(RwLock::new(0));
        let first = lock.read();
        let start = |write: bool| {
            let lock = lock.clone();
            let handle = go(move || {
                if write {
                    let mut n = lock.write();
                    *n += 1;
                    *n
                } else {
                    *lock.read()
                }
            });
            sleep(2 * MS);
            handle
        };
        let w1 = start(true);
        let closed = lock.try_read().is_none();
        let (r1, w2, r2) = (start(false), start(true), start(false));
        assert_eq!(*first, 0);
        drop(first);
        let seen = [w1, r1, r2, w2].map(|h| h.join().unwrap());
        same((closed, seen), (true, [1, 1, 1, 2]))
    };
    for procs in PROCS {
        once_in_five(|| on(procs, attempt));
    }
}

#[test]
fn timeouts_and_downgrade() {
    let _w = watchdog();
    static L: RwLock<i32> = RwLock::new(0);
    on_every(|| {
        let read = L.read();
        assert!(L.try_write_for(MS).is_none());
        assert!(L.try_read().is_some(), "a writer that gave up opens the door");
        // A writer that gives up lets in the readers that came behind it.
        let writer = go(|| L.try_write_for(20 * MS).is_none());
        let late = std::thread::spawn(|| L.try_write_for(20 * MS).is_none());
        sleep(5 * MS);
        let reader = go(|| drop(L.read()));
        assert!(writer.join().unwrap() && join_thread(late));
        reader.join().unwrap();
        drop(read);

        let mut write = L.write();
        *write += 1;
        assert!(go(|| L.try_read_for(MS).is_none()).join().unwrap());
        assert!(join_thread(std::thread::spawn(|| L.try_read_for(MS).is_none())));
        let in_time = go(|| L.try_read_for(Duration::from_secs(30)).is_some());
        sleep(MS);
        let read = RwLockWriteGuard::downgrade(write);
        assert!(in_time.join().unwrap() && L.try_write().is_none());
        drop(read);
        assert!(L.try_write().is_some());
    });
}

/// Deadlines on both sides, at the moment of the door's opening.
#[test]
fn timeouts_race() {
    let _w = watchdog();
    on_every(|| {
        let lock = Arc::new(RwLock::new(0u64));
        let writes = Arc::new(AtomicU64::new(0));
        mixed(8, {
            let (lock, writes) = (lock.clone(), writes.clone());
            move |i| {
                let mut seed = 77 + i as u64;
                for _ in 0..200 {
                    let limit = Duration::from_nanos(next(&mut seed) % 60_000);
                    if i < 3 {
                        if let Some(mut n) = lock.try_write_for(limit) {
                            *n += 1;
                            writes.fetch_add(1, SeqCst);
                            yield_now();
                        }
                    } else if let Some(n) = lock.try_read_for(limit) {
                        let seen = *n;
                        sleep(Duration::from_nanos(next(&mut seed) % 20_000));
                        assert_eq!(*n, seen);
                    }
                }
            }
        });
        assert_eq!(*lock.try_write().unwrap(), writes.load(SeqCst));
    });
}
