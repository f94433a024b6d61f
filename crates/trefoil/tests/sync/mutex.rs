//! `Mutex`.

use super::common::{MS, change_after_time_out, join_all, once_in_five, same, watchdog};
use super::{join_thread, mixed, next, on, on_every};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};
use trefoil::sync::{Mutex, MutexGuard, RwLock};
use trefoil::time::sleep;
use trefoil::{go, yield_now};

/// Go: TestMutex, HammerMutex. Ten times a thousand, every third with try_lock.
fn hammer_mutex(with_threads: bool) {
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
    if with_threads {
        mixed(10, worker);
    } else {
        join_all((0..10).map(|i| {
            go({
                let worker = worker.clone();
                move || worker(i)
            })
        }));
    }
    assert_eq!(*mutex.lock(), 10 * 666 + tried.load(SeqCst));
}

#[test]
fn hammer() {
    let _w = watchdog();
    on_every(|| hammer_mutex(false));
}

#[test]
fn hammer_with_threads() {
    let _w = watchdog();
    on_every(|| hammer_mutex(true));
}

/// A holder that parks with the mutex in hand makes everybody queue.
#[test]
fn holders_that_park() {
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
fn basics() {
    let _w = watchdog();
    static M: Mutex<Vec<i32>> = Mutex::new(Vec::new());
    assert_eq!((size_of::<Mutex<()>>(), size_of::<RwLock<()>>()), (4, 8));
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
fn panic_unlocks_without_poison() {
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
            panic!("with the guard in hand");
        });
        assert!(broken.join().is_err());
        join_all(waiters);
        assert_eq!(*mutex.lock(), 14);
    });
}

/// Go: TestMutexFairness. Beside one who holds it nearly always, ten locks take less than 10 s.
#[test]
fn fairness_beside_a_hog() {
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

/// Who has waited for a millisecond and loses again gets it from hand to hand, and runs at once.
#[test]
fn starvation_is_direct_handoff() {
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
                    // Held while main tries.
                    yield_now();
                }
            });
            sleep(5 * MS);
            // Normal mode: the waiter is woken, and we are faster. It finds the mutex locked.
            drop(guard);
            let guard = mutex.lock();
            same(got.load(SeqCst), false)?;
            yield_now();
            same(got.load(SeqCst), false)?;
            // Now it starves: the unlock is a handover, and yields.
            drop(guard);
            same(got.load(SeqCst), true)?;
            same(mutex.try_lock().is_none(), true)?;
            waiter.join().unwrap();
            same(mutex.try_lock().is_some(), true)
        })
    });
}

#[test]
fn timeouts() {
    let _w = watchdog();
    static M: Mutex<i32> = Mutex::new(0);
    let check = || {
        let guard = M.lock();
        for limit in [Duration::ZERO, MS, 5 * MS] {
            let (seconds, late) = go(move || {
                let start = Instant::now();
                (start.elapsed(), M.try_lock_for(limit).is_none() && start.elapsed() >= limit)
            })
            .join()
            .unwrap();
            assert!(late, "after {seconds:?} of {limit:?}");
            let until = Instant::now() + limit;
            let late = std::thread::spawn(move || {
                M.try_lock_until(until).is_none() && Instant::now() >= until
            });
            assert!(join_thread(late));
        }
        let in_time = go(|| M.try_lock_for(Duration::from_secs(30)).is_some());
        let for_ever = std::thread::spawn(|| M.try_lock_for(Duration::MAX).is_some());
        sleep(MS);
        drop(guard);
        assert!(in_time.join().unwrap() && join_thread(for_ever));
        assert!(M.try_lock().is_some());
    };
    on_every(check);
}

/// Deadlines that pass just when the mutex is given: nobody is forgotten, nothing is lost.
#[test]
fn timeouts_race_with_unlocks() {
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

/// Many locks with sleepers at once share the table.
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
    let _dog = watchdog();
    static MUTEX: Mutex<()> = Mutex::new(());
    let held = MUTEX.lock();
    let wait = |limit| MUTEX.try_lock_for(limit).is_some();
    assert!(change_after_time_out(wait, || drop(held)));
}

#[test]
fn a_rwlock_that_is_unlocked_before_a_timed_out_goroutine_runs_is_locked() {
    let _dog = watchdog();
    static LOCK: RwLock<()> = RwLock::new(());
    let held = LOCK.write();
    let wait = |limit| LOCK.try_read_for(limit).is_some();
    assert!(change_after_time_out(wait, || drop(held)), "the writer left");
    let held = LOCK.read();
    let wait = |limit| LOCK.try_write_for(limit).is_some();
    assert!(change_after_time_out(wait, || drop(held)), "the reader left");
    let held = LOCK.write();
    let wait = |limit| LOCK.try_write_for(limit).is_some();
    assert!(change_after_time_out(wait, || drop(held)), "the other writer left");
    assert!(LOCK.try_write().is_some(), "all of them have given it back");
}
