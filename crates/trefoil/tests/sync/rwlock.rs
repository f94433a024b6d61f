//! `RwLock`.

use super::common::{MS, change_after_time_out, join_all, watchdog, yield_until};
use super::{Workers, join_thread, mixed, next, on, on_every};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::SeqCst};
use std::time::Duration;
use trefoil::sync::{
    Barrier, RwLock, RwLockReadGuard, RwLockUpgradableReadGuard, RwLockWriteGuard,
};
use trefoil::time::sleep;
use trefoil::{go, sim, yield_now};

/// Go: TestParallelReaders.
#[test]
fn readers_hold_the_lock_at_the_same_time() {
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

fn hammer_rwlock(readers: usize, rounds: usize, workers: Workers) {
    let lock = Arc::new(RwLock::new(0u64));
    let activity = Arc::new(AtomicI32::new(0));
    // As in Go's test: two writers, and readers before, between and behind them.
    let worker = {
        let (lock, activity) = (lock.clone(), activity.clone());
        move |i: usize| {
            for _ in 0..rounds {
                if i < 2 {
                    let mut value = lock.write();
                    let n = activity.fetch_add(10_000, SeqCst) + 10_000;
                    assert_eq!(n, 10_000, "a writer is not alone");
                    *value += 1;
                    for _ in 0..100 {
                        std::hint::spin_loop();
                    }
                    activity.fetch_sub(10_000, SeqCst);
                } else {
                    let _value = lock.read();
                    let n = activity.fetch_add(1, SeqCst) + 1;
                    assert!((1..10_000).contains(&n), "a reader and a writer hold the lock: {n}");
                    for _ in 0..100 {
                        std::hint::spin_loop();
                    }
                    activity.fetch_sub(1, SeqCst);
                }
            }
        }
    };
    workers.run(readers + 2, worker);
    assert_eq!(*lock.read(), 2 * rounds as u64);
}

/// Go: TestRWMutex, HammerRWMutex: procs 1, 4, 10 with 1 to 10 readers.
#[test]
fn a_writer_holds_the_rwlock_alone() {
    let _w = watchdog();
    for (procs, readers) in
        [(1, 1), (1, 3), (1, 10), (4, 1), (4, 3), (4, 10), (10, 1), (10, 3), (10, 10), (10, 5)]
    {
        on(procs, || hammer_rwlock(readers, 300, Workers::Goroutines));
    }
    on_every(|| hammer_rwlock(4, 200, Workers::GoroutinesAndThreads));
}

#[trefoil::test(virtual_time)]
fn readers_behind_a_waiting_writer_run_after_it_and_before_the_next_writer() {
    let lock = Arc::new(RwLock::new(0));
    let first = lock.read();
    let start = |access: fn(&RwLock<i32>) -> i32| {
        let lock = lock.clone();
        let handle = go(move || access(&lock));
        sim::settle();
        assert!(!handle.is_finished());
        handle
    };
    let read = |lock: &RwLock<i32>| *lock.read();
    let write = |lock: &RwLock<i32>| {
        let mut n = lock.write();
        *n += 1;
        *n
    };
    let w1 = start(write);
    assert!(lock.try_read().is_none(), "a reader overtakes the writer");
    let (r1, w2, r2) = (start(read), start(write), start(read));
    assert_eq!(*first, 0);
    drop(first);
    assert_eq!([w1, r1, r2, w2].map(|h| h.join().unwrap()), [1, 1, 1, 2]);
}

#[test]
fn a_writer_that_times_out_lets_readers_in_and_downgrade_keeps_writers_out() {
    let _w = watchdog();
    static L: RwLock<i32> = RwLock::new(0);
    on_every(|| {
        let read = L.read();
        assert!(L.try_write_for(MS).is_none());
        assert!(L.try_read().is_some(), "a writer that timed out must let readers in");
        // A writer that times out lets in the readers that wait behind it.
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

/// Readers and writers time out while the lock is passed on.
#[test]
fn rwlock_timeouts_that_race_with_unlocks_lose_no_write() {
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

#[test]
fn a_rwlock_that_is_unlocked_before_a_timed_out_goroutine_runs_is_locked() {
    static LOCK: RwLock<()> = RwLock::new(());
    let held = LOCK.write();
    let wait = |limit| LOCK.try_read_for(limit).is_some();
    assert!(change_after_time_out(wait, move || drop(held)), "the writer has unlocked");
    let held = LOCK.read();
    let wait = |limit| LOCK.try_write_for(limit).is_some();
    assert!(change_after_time_out(wait, move || drop(held)), "the reader has unlocked");
    let held = LOCK.write();
    let wait = |limit| LOCK.try_write_for(limit).is_some();
    assert!(change_after_time_out(wait, move || drop(held)), "the other writer has unlocked");
    assert!(LOCK.try_write().is_some(), "all of them must have unlocked");
}

#[test]
fn an_upgradable_reader_excludes_writers_and_its_like_but_no_readers() {
    let _w = watchdog();
    on_every(|| {
        let lock = RwLock::new(1);
        let upgradable = lock.upgradable_read();
        assert!(lock.is_locked() && !lock.is_locked_exclusive());
        assert_eq!((*upgradable, *lock.read()), (1, 1));
        assert!(lock.try_write().is_none() && lock.try_upgradable_read().is_none());
        assert!(lock.try_write_for(MS).is_none() && lock.try_upgradable_read_for(MS).is_none());

        let reader = lock.read();
        let upgradable = RwLockUpgradableReadGuard::try_upgrade(upgradable).unwrap_err();
        let upgradable = RwLockUpgradableReadGuard::try_upgrade_for(upgradable, MS).unwrap_err();
        assert_eq!(*lock.try_read().expect("admitted again"), 1);
        drop(reader);
        let mut writer = RwLockUpgradableReadGuard::try_upgrade(upgradable).unwrap();
        *writer = 2;
        assert!(lock.try_read().is_none());

        let upgradable = RwLockWriteGuard::downgrade_to_upgradable(writer);
        assert_eq!((*upgradable, *lock.read()), (2, 2));
        assert!(lock.try_write().is_none());
        let reader = RwLockUpgradableReadGuard::downgrade(upgradable);
        assert!(lock.try_upgradable_read().is_some() && lock.try_write().is_none());
        drop(reader);
        assert!(!lock.is_locked());
        drop(lock.try_write().expect("free at the end"));
    });
}

#[test]
fn upgrades_wait_for_readers_and_lose_no_update() {
    let _w = watchdog();
    on_every(|| {
        const ROUNDS: usize = 100;
        let lock = Arc::new(RwLock::new((0, 0)));
        mixed(9, {
            let lock = lock.clone();
            move |i| {
                for _ in 0..ROUNDS {
                    match i % 3 {
                        0 => {
                            let guard = lock.upgradable_read();
                            let seen = guard.0;
                            let mut guard = RwLockUpgradableReadGuard::upgrade(guard);
                            assert_eq!(guard.0, seen, "a writer came between");
                            guard.0 += 1;
                            std::hint::spin_loop();
                            guard.1 += 1;
                            RwLockWriteGuard::bump(&mut guard);
                        }
                        1 => {
                            let mut guard = lock.write();
                            guard.0 += 1;
                            guard.1 += 1;
                            RwLockWriteGuard::unlock_fair(guard);
                        }
                        _ => {
                            let mut guard = lock.read();
                            assert_eq!(guard.0, guard.1);
                            RwLockReadGuard::bump(&mut guard);
                            assert_eq!(guard.0, guard.1);
                        }
                    }
                }
            }
        });
        assert!(!lock.is_locked());
        assert_eq!(*lock.read(), (6 * ROUNDS, 6 * ROUNDS));
    });
}

#[test]
fn bump_of_a_read_guard_lets_the_waiting_writer_in() {
    let _w = watchdog();
    on_every(|| {
        let lock = Arc::new(RwLock::new(0));
        let mut reader = lock.read();
        let writer = go({
            let lock = lock.clone();
            move || *lock.write() = 1
        });
        yield_until("the writer to wait", || lock.try_read().is_none());
        assert_eq!(*reader, 0);
        RwLockReadGuard::bump(&mut reader);
        assert_eq!(*reader, 1);
        writer.join().unwrap();
    });
}
