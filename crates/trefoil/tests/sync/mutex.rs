//! `Mutex`.

use super::common::{MS, change_after_time_out, join_all, once_in_five, same, watchdog};
use super::{Workers, join_thread, mixed, next, on, on_every};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};
use trefoil::sync::{Mutex, MutexGuard, RwLock};
use trefoil::time::sleep;
use trefoil::{go, yield_now};

/// Go: TestMutex, HammerMutex. Ten workers lock a thousand times each, every third time by
/// `try_lock`.
fn hammer_mutex(workers: Workers) {
    let mutex = Arc::new(Mutex::new(0u64));
    let tried = Arc::new(AtomicU64::new(0));
    let worker = {
        let (mutex, tried) = (mutex.clone(), tried.clone());
        move |_| {
            for i in 0..1000 {
                if i % 3 == 0 {
                    if let Some(mut n) = mutex.try_lock() {
                        *n += 1;
                        tried.fetch_add(1, SeqCst);
                    }
                    continue;
                }
                *mutex.lock() += 1;
            }
        }
    };
    workers.run(10, worker);
    assert_eq!(*mutex.lock(), 10 * 666 + tried.load(SeqCst));
}

#[test]
fn goroutines_exclude_each_other_by_a_mutex() {
    let _w = watchdog();
    on_every(|| hammer_mutex(Workers::Goroutines));
}

#[test]
fn goroutines_and_threads_exclude_each_other_by_a_mutex() {
    let _w = watchdog();
    on_every(|| hammer_mutex(Workers::GoroutinesAndThreads));
}

#[test]
fn a_goroutine_that_parks_keeps_its_mutex() {
    let _w = watchdog();
    on_every(|| {
        let mutex = Arc::new(Mutex::new(0));
        join_all((0..20).map(|i| {
            let mutex = mutex.clone();
            go(move || {
                for k in 0..50 {
                    let mut n = mutex.lock();
                    let seen = *n;
                    if (i + k) % 7 == 0 {
                        sleep(Duration::from_micros(20));
                    } else {
                        yield_now();
                    }
                    *n = seen + 1;
                }
            })
        }));
        assert_eq!(*mutex.lock(), 1000);
    });
}

#[test]
fn a_mutex_takes_8_bytes_and_a_rwlock_12() {
    assert_eq!((size_of::<Mutex<()>>(), size_of::<RwLock<()>>()), (8, 12));
}

#[test]
fn try_lock_fails_while_locked_and_a_guard_may_be_dropped_elsewhere() {
    let _w = watchdog();
    static M: Mutex<Vec<i32>> = Mutex::new(Vec::new());
    on_every(|| {
        let guard = M.lock();
        assert!(M.is_locked() && M.try_lock().is_none());
        assert!(go(|| M.try_lock().is_none()).join().unwrap());
        drop(guard);
        // A guard may be dropped by another goroutine, and by a thread.
        let guard: MutexGuard<'_, _> = M.lock();
        go(move || drop(guard)).join().unwrap();
        let guard = M.lock();
        join_thread(std::thread::spawn(move || drop(guard)));
        assert!(M.try_lock().is_some());
    });
}

#[test]
fn a_panic_unlocks_the_mutex_without_poison() {
    let _w = watchdog();
    on_every(|| {
        let mutex = Arc::new(Mutex::new(0));
        let waiters: Vec<_> = (0..4)
            .map(|_| {
                let mutex = mutex.clone();
                go(move || *mutex.lock() += 1)
            })
            .collect();
        let m = mutex.clone();
        let broken = go(move || {
            let mut guard = m.lock();
            *guard += 10;
            panic!("while the mutex is locked");
        });
        assert!(broken.join().is_err());
        join_all(waiters);
        assert_eq!(*mutex.lock(), 14);
    });
}

/// Go: TestMutexFairness.
#[test]
fn ten_locks_take_less_than_10_s_beside_a_hog_of_the_mutex() {
    let _w = watchdog();
    for hog_is_a_thread in [false, true] {
        on_every(|| {
            let mutex = Arc::new(Mutex::new(()));
            let stop = Arc::new(AtomicBool::new(false));
            let hog = {
                let (mutex, stop) = (mutex.clone(), stop.clone());
                move || {
                    while !stop.load(SeqCst) {
                        let _guard = mutex.lock();
                        sleep(Duration::from_micros(100));
                    }
                }
            };
            let hog: Box<dyn FnOnce()> = if hog_is_a_thread {
                let t = std::thread::spawn(hog);
                Box::new(move || join_thread(t))
            } else {
                let h = go(hog);
                Box::new(move || h.join().unwrap())
            };
            let start = Instant::now();
            for _ in 0..10 {
                sleep(Duration::from_micros(100));
                drop(mutex.lock());
            }
            assert!(start.elapsed() < Duration::from_secs(10), "took {:?}", start.elapsed());
            stop.store(true, SeqCst);
            hog();
        });
    }
}

/// A waiter that has waited for a millisecond and loses again gets the mutex directly, and runs at
/// once.
#[test]
fn a_starving_waiter_gets_the_mutex_by_direct_handoff() {
    let _w = watchdog();
    once_in_five(|| {
        on(1, || {
            let mutex = Arc::new(Mutex::new(()));
            let got = Arc::new(AtomicBool::new(false));
            let guard = mutex.lock();
            let waiter = go({
                let (mutex, got) = (mutex.clone(), got.clone());
                move || {
                    let _guard = mutex.lock();
                    got.store(true, SeqCst);
                    // Keeps the mutex while main tries.
                    yield_now();
                }
            });
            sleep(5 * MS);
            // Normal mode: the waiter is woken, but this goroutine locks first.
            drop(guard);
            let guard = mutex.lock();
            same(got.load(SeqCst), false)?;
            yield_now();
            same(got.load(SeqCst), false)?;
            // The waiter starves: the unlock passes the mutex on, and yields.
            drop(guard);
            same(got.load(SeqCst), true)?;
            same(mutex.try_lock().is_none(), true)?;
            waiter.join().unwrap();
            same(mutex.try_lock().is_some(), true)
        })
    });
}

#[trefoil::test(virtual_time)]
fn try_lock_for_fails_at_its_timeout_and_succeeds_before() {
    static M: Mutex<i32> = Mutex::new(0);
    let guard = M.lock();
    for limit in [Duration::ZERO, MS, Duration::from_secs(3600)] {
        let start = Instant::now();
        assert!(go(move || M.try_lock_for(limit).is_none()).join().unwrap());
        assert_eq!(start.elapsed(), limit);
        assert!(M.try_lock_until(start + 2 * limit).is_none());
        assert_eq!(start.elapsed(), 2 * limit);
    }
    let start = Instant::now();
    let waiters = [MS, Duration::MAX].map(|limit| go(move || M.try_lock_for(limit).is_some()));
    sleep(MS / 2);
    drop(guard);
    assert_eq!(join_all(waiters), [true, true]);
    assert_eq!(start.elapsed(), MS / 2);
    assert!(M.try_lock().is_some());
}

#[test]
fn try_lock_for_on_goroutines_and_threads_fails_not_before_its_timeout() {
    let _w = watchdog();
    static M: Mutex<i32> = Mutex::new(0);
    fn wait() {
        let start = Instant::now();
        assert!(M.try_lock_for(5 * MS).is_none());
        assert!(start.elapsed() >= 5 * MS);
    }
    on_every(|| {
        let guard = M.lock();
        mixed(2, |_| wait());
        let in_time = go(|| M.try_lock_for(Duration::from_secs(30)).is_some());
        let for_ever = std::thread::spawn(|| M.try_lock_for(Duration::MAX).is_some());
        sleep(MS);
        drop(guard);
        assert!(in_time.join().unwrap() && join_thread(for_ever));
        assert!(M.try_lock().is_some());
    });
}

/// Deadlines that expire while the mutex is passed on: no waiter and no unlock is lost.
#[test]
fn timeouts_that_race_with_unlocks_lose_no_wake_up() {
    let _w = watchdog();
    on_every(|| {
        let mutex = Arc::new(Mutex::new(0u64));
        let entered = Arc::new(AtomicU64::new(0));
        mixed(8, {
            let (mutex, entered) = (mutex.clone(), entered.clone());
            move |i| {
                let mut seed = 0x9E37_79B9 + i as u64;
                for k in 0..300 {
                    let limit = Duration::from_nanos(next(&mut seed) % 100_000);
                    let guard =
                        if k % 4 == 0 { Some(mutex.lock()) } else { mutex.try_lock_for(limit) };
                    let Some(mut n) = guard else { continue };
                    *n += 1;
                    entered.fetch_add(1, SeqCst);
                    if next(&mut seed).is_multiple_of(4) {
                        sleep(Duration::from_nanos(next(&mut seed) % 50_000));
                    }
                }
            }
        });
        assert_eq!(*mutex.try_lock().unwrap(), entered.load(SeqCst));
    });
}

/// All waits share the table of wait queues.
#[test]
fn ten_thousand_mutexes_are_waited_for_at_once() {
    let _w = watchdog();
    on(2, || {
        let mutexes: Arc<Vec<Mutex<u32>>> = Arc::new((0..10_000).map(|_| Mutex::new(0)).collect());
        let guards: Vec<_> = mutexes.iter().map(Mutex::lock).collect();
        let handles: Vec<_> = (0..20_000)
            .map(|i| {
                let mutexes = mutexes.clone();
                go(move || *mutexes[i % 10_000].lock() += 1)
            })
            .collect();
        sleep(20 * MS);
        drop(guards);
        join_all(handles);
        assert!(mutexes.iter().all(|m| *m.lock() == 2));
    });
}

#[test]
fn a_mutex_that_is_unlocked_before_a_timed_out_goroutine_runs_is_locked() {
    static MUTEX: Mutex<()> = Mutex::new(());
    let held = MUTEX.lock();
    let wait = |limit| MUTEX.try_lock_for(limit).is_some();
    assert!(change_after_time_out(wait, move || drop(held)));
}

#[test]
fn bump_lets_waiters_in_although_the_guard_is_never_dropped() {
    let _w = watchdog();
    on_every(|| {
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut guard = order.lock();
        for i in 0..20 {
            let waiter = go({
                let order = order.clone();
                move || order.lock().push(i)
            });
            while guard.len() == i {
                MutexGuard::bump(&mut guard);
                yield_now();
            }
            waiter.join().unwrap();
        }
        assert!(guard.iter().copied().eq(0..20));
        MutexGuard::unlock_fair(guard);
        assert!(order.try_lock().is_some());
    });
}

#[test]
fn bump_and_unlock_fair_keep_the_mutex_exclusive() {
    let _w = watchdog();
    on_every(|| {
        let total = Arc::new(Mutex::new((0, false)));
        mixed(8, {
            let total = total.clone();
            move |i| {
                for round in 0..200 {
                    let Some(mut guard) = total
                        .try_lock_for(Duration::from_micros(50))
                        .or_else(|| (i % 3 != 0).then(|| total.lock()))
                    else {
                        continue;
                    };
                    for _ in 0..2 {
                        assert!(!std::mem::replace(&mut guard.1, true), "two holders");
                        std::hint::spin_loop();
                        guard.0 += 1;
                        guard.1 = false;
                        MutexGuard::bump(&mut guard);
                    }
                    if round % 2 == 0 {
                        MutexGuard::unlock_fair(guard);
                    }
                }
            }
        });
        let total = total.try_lock().expect("free at the end");
        assert!(total.0 >= 2 * 200 * 5, "{}", total.0);
    });
}
