//! The behaviours of `trefoil::sync`: what Go's own tests assert, with the same numbers, and what
//! is ours: plain threads beside goroutines, deadlines, statics, panics.

mod common;

use common::{MS, join_all, once_in_five, same, watchdog, yield_until};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};
use trefoil::context::{Context, ContextError};
use trefoil::sync::{
    Barrier, Condvar, ErrGroup, Mutex, MutexGuard, Once, OnceLock, RwLock, RwLockWriteGuard,
    Semaphore, WaitGroup,
};
use trefoil::time::sleep;
use trefoil::{Runtime, debug, go, scope, yield_now};

const PROCS: [usize; 4] = [1, 2, 4, 16];
/// Runs `f` as the main goroutine of runtimes with 1, 2, 4 and 16 Ps.
fn on_every(f: impl Fn() + Sync) {
    for procs in PROCS {
        on(procs, &f);
    }
}

fn on<T: Send>(procs: usize, f: impl FnOnce() -> T + Send) -> T {
    Runtime::builder().procs(procs).build().unwrap().run(f)
}

/// Runs `f(0)`, … `f(n - 1)` at once: even numbers as goroutines, odd ones as plain threads.
fn mixed(n: usize, f: impl Fn(usize) + Send + Sync + 'static) {
    let f = Arc::new(f);
    let (mut threads, mut goroutines) = (Vec::new(), Vec::new());
    for i in 0..n {
        let f = f.clone();
        if i % 2 == 0 {
            goroutines.push(go(move || f(i)));
        } else {
            threads.push(std::thread::spawn(move || f(i)));
        }
    }
    join_all(goroutines);
    threads.into_iter().for_each(join_thread);
}

/// Joins a thread without keeping the P: the thread may wait for goroutines.
fn join_thread<T>(thread: std::thread::JoinHandle<T>) -> T {
    while !thread.is_finished() {
        sleep(Duration::from_micros(50));
    }
    thread.join().unwrap()
}

fn panic_text(f: impl FnOnce()) -> String {
    let payload = catch_unwind(AssertUnwindSafe(f)).expect_err("it must panic");
    let text = payload.downcast_ref::<String>().cloned();
    text.or_else(|| payload.downcast_ref::<&str>().map(|s| (*s).to_owned())).unwrap()
}

/// A little pseudo-randomness.
fn next(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}

// Mutex.

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
fn mutex_hammer() {
    let _w = watchdog();
    on_every(|| hammer_mutex(false));
}

#[test]
fn mutex_hammer_with_threads() {
    let _w = watchdog();
    on_every(|| hammer_mutex(true));
}

/// A holder that parks with the mutex in hand makes everybody queue.
#[test]
fn mutex_holders_that_park() {
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
fn mutex_basics() {
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
fn mutex_panic_unlocks_without_poison() {
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
fn mutex_fairness_beside_a_hog() {
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
fn mutex_starvation_is_direct_handoff() {
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
fn mutex_timeouts() {
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
fn mutex_timeouts_race_with_unlocks() {
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

// RwLock.

/// Go: TestParallelReaders. They are inside together.
#[test]
fn rwlock_readers_are_parallel() {
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
fn rwlock_hammer() {
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
fn rwlock_order_of_writers_and_readers() {
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
fn rwlock_timeouts_and_downgrade() {
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
fn rwlock_timeouts_race() {
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

// Condvar.

/// Go: TestCondSignal. One notification wakes one.
#[test]
fn condvar_notify_wakes_one() {
    let _w = watchdog();
    on_every(|| {
        let pair = Arc::new((Mutex::new(0), Condvar::new()));
        let awake = Arc::new(AtomicUsize::new(0));
        let handles: Vec<_> = (0..2)
            .map(|_| {
                let (pair, awake) = (pair.clone(), awake.clone());
                go(move || {
                    let mut running = pair.0.lock();
                    *running += 1;
                    pair.1.wait(&mut running);
                    awake.fetch_add(1, SeqCst);
                })
            })
            .collect();
        yield_until("both to wait", || *pair.0.lock() == 2);
        for n in 1..=2 {
            assert_eq!(awake.load(SeqCst), n - 1);
            let guard = pair.0.lock();
            assert!(pair.1.notify_one());
            drop(guard);
            yield_until("one", || awake.load(SeqCst) == n);
            sleep(MS);
            assert_eq!(awake.load(SeqCst), n, "woken for no reason");
        }
        assert!(!pair.1.notify_one());
        assert_eq!(pair.1.notify_all(), 0);
        join_all(handles);
    });
}

/// Go: TestCondSignalGenerations. First come, first served, a hundred times.
#[test]
fn condvar_is_fifo() {
    let _w = watchdog();
    const N: usize = 100;
    on_every(|| {
        let pair = Arc::new((Mutex::new((0, Vec::new())), Condvar::new()));
        let handles: Vec<_> = (0..N)
            .map(|i| {
                let p = pair.clone();
                let handle = go(move || {
                    let mut state = p.0.lock();
                    state.0 += 1;
                    p.1.wait(&mut state);
                    state.1.push(i);
                });
                yield_until("it to wait", || pair.0.lock().0 == i + 1);
                handle
            })
            .collect();
        for n in 1..=N {
            assert!(pair.1.notify_one());
            yield_until("the next", || pair.0.lock().1.len() == n);
        }
        assert_eq!(pair.0.lock().1, (0..N).collect::<Vec<_>>());
        join_all(handles);
    });
}

/// Go: TestCondBroadcast, 200 of them, again and again; half are plain threads here.
#[test]
fn condvar_broadcast() {
    let _w = watchdog();
    const ROUNDS: u64 = 5;
    let check = |n: usize, threads: bool| {
        // (round, arrived in this round)
        let pair = Arc::new((Mutex::new((0, 0)), Condvar::new(), Condvar::new()));
        let worker = {
            let pair = pair.clone();
            move |_| {
                for round in 0..ROUNDS {
                    let mut state = pair.0.lock();
                    state.1 += 1;
                    pair.2.notify_one();
                    while state.0 == round {
                        pair.1.wait(&mut state);
                    }
                }
            }
        };
        let main = {
            let pair = pair.clone();
            go(move || {
                for _ in 0..ROUNDS {
                    let mut state = pair.0.lock();
                    pair.2.wait_while(&mut state, |state| state.1 < n);
                    *state = (state.0 + 1, 0);
                    assert_eq!(pair.1.notify_all(), n);
                }
            })
        };
        if threads {
            mixed(n, worker);
        } else {
            join_all((0..n).map(|i| {
                go({
                    let worker = worker.clone();
                    move || worker(i)
                })
            }));
        }
        main.join().unwrap();
    };
    on_every(|| check(200, false));
    on(2, || check(32, true));
}

/// Go: TestCondSignalStealing, 1000 times. A notification is for one who waited when it was made,
/// not for one who comes afterwards.
#[test]
fn condvar_notification_is_not_stolen() {
    let _w = watchdog();
    on_every(|| {
        for _ in 0..250 {
            let pair = Arc::new((Mutex::new(false), Condvar::new()));
            let waiting = Arc::new(AtomicBool::new(false));
            let first = go({
                let (pair, waiting) = (pair.clone(), waiting.clone());
                move || {
                    let mut guard = pair.0.lock();
                    waiting.store(true, SeqCst);
                    pair.1.wait(&mut guard);
                }
            });
            yield_until("the first to wait", || waiting.load(SeqCst));
            drop(pair.0.lock());
            let done = Arc::new(AtomicBool::new(false));
            let second = go({
                let (pair, done) = (pair.clone(), done.clone());
                move || {
                    let mut guard = pair.0.lock();
                    pair.1.wait_while(&mut guard, |done| !*done);
                    done.store(true, SeqCst);
                }
            });
            assert!(pair.1.notify_one());
            first.join().unwrap();
            assert!(!done.load(SeqCst));
            *pair.0.lock() = true;
            pair.1.notify_all();
            second.join().unwrap();
        }
    });
}

#[test]
fn condvar_timeouts() {
    let _w = watchdog();
    static M: Mutex<u32> = Mutex::new(0);
    static C: Condvar = Condvar::new();
    let waits = || {
        let mut guard = M.lock();
        let start = Instant::now();
        assert!(C.wait_for(&mut guard, 2 * MS).timed_out());
        assert!(start.elapsed() >= 2 * MS);
        assert!(C.wait_until(&mut guard, Instant::now() + MS).timed_out());
        assert!(C.wait_until(&mut guard, start).timed_out(), "a past deadline");
        assert!(C.wait_for(&mut guard, Duration::ZERO).timed_out());
    };
    on_every(|| {
        join_all((0..4).map(|_| go(waits)));
        join_thread(std::thread::spawn(waits));
        let told = [Duration::from_secs(30), Duration::MAX].map(|limit| {
            go(move || {
                let mut guard = M.lock();
                *guard += 1;
                !C.wait_for(&mut guard, limit).timed_out()
            })
        });
        yield_until("them to wait", || *M.lock() == 2);
        *M.lock() = 0;
        assert_eq!(C.notify_all(), 2);
        assert_eq!(join_all(told), [true, true]);
        assert!(!C.notify_one(), "those that timed out are gone");
    });
}

/// Every notification that says "somebody" has woken exactly one, whatever the deadlines do.
#[test]
fn condvar_notifications_are_counted_exactly() {
    let _w = watchdog();
    on_every(|| {
        let pair = Arc::new((Mutex::new(()), Condvar::new()));
        let (told, left) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(8)));
        let notifier = go({
            let (pair, left) = (pair.clone(), left.clone());
            move || {
                let mut said = 0;
                while left.load(SeqCst) != 0 {
                    said += usize::from(pair.1.notify_one());
                    yield_now();
                }
                said
            }
        });
        mixed(8, {
            let (pair, told, left) = (pair.clone(), told.clone(), left.clone());
            move |i| {
                let mut seed = 3 + i as u64;
                for _ in 0..100 {
                    let mut guard = pair.0.lock();
                    let limit = Duration::from_nanos(next(&mut seed) % 100_000);
                    if !pair.1.wait_for(&mut guard, limit).timed_out() {
                        told.fetch_add(1, SeqCst);
                    }
                }
                left.fetch_sub(1, SeqCst);
            }
        });
        assert_eq!(notifier.join().unwrap(), told.load(SeqCst));
    });
}

// Once, OnceLock.

/// Go: TestOnce. Ten at once: one call, and all see its effect.
#[test]
fn once_runs_once_and_all_wait_for_it() {
    let _w = watchdog();
    on_every(|| {
        let once = Arc::new(Once::new());
        let (calls, value) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        mixed(10, {
            let (once, calls, value) = (once.clone(), calls.clone(), value.clone());
            move |_| {
                once.call_once(|| {
                    calls.fetch_add(1, SeqCst);
                    sleep(MS);
                    value.store(7, SeqCst);
                });
                assert_eq!(value.load(SeqCst), 7);
            }
        });
        assert_eq!(calls.load(SeqCst), 1);
        assert!(once.is_completed());
    });
}

/// Go: TestOncePanic. A panic counts as done, also for those who waited.
#[test]
fn once_panic_counts_as_done() {
    let _w = watchdog();
    on_every(|| {
        let once = Arc::new(Once::new());
        let begun = Arc::new(AtomicBool::new(false));
        let first = go({
            let (once, begun) = (once.clone(), begun.clone());
            move || {
                once.call_once(|| {
                    begun.store(true, SeqCst);
                    sleep(2 * MS);
                    panic!("failed");
                });
            }
        });
        yield_until("it to begin", || begun.load(SeqCst));
        once.call_once(|| panic!("called twice"));
        assert!(first.join().is_err());
        once.call_once(|| panic!("called twice"));
        assert!(once.is_completed());
    });
}

#[test]
fn oncelock_makes_one_value_and_survives_panics() {
    let _w = watchdog();
    on_every(|| {
        let place = Arc::new(OnceLock::new());
        let made = Arc::new(AtomicUsize::new(0));
        mixed(10, {
            let (place, made) = (place.clone(), made.clone());
            move |i| {
                // The first two to come fail; the next makes it.
                let get = || {
                    *place.get_or_init(|| {
                        sleep(Duration::from_micros(200));
                        assert!(made.fetch_add(1, SeqCst) >= 2, "not yet");
                        vec![i; 100].len()
                    })
                };
                let value = catch_unwind(AssertUnwindSafe(get)).unwrap_or_else(|_| get_again(&get));
                assert_eq!(value, 100);
            }
        });
        assert_eq!(made.load(SeqCst), 3);
        assert_eq!(place.get(), Some(&100));
        assert_eq!(place.set(1), Err(1));
    });
    fn get_again(get: &dyn Fn() -> usize) -> usize {
        catch_unwind(AssertUnwindSafe(get)).unwrap_or_else(|_| get())
    }
    // What is in it is dropped once.
    let value = Arc::new(());
    let place = OnceLock::from(value.clone());
    assert_eq!(Arc::strong_count(&value), 2);
    drop(place);
    let mut place = OnceLock::from(value.clone());
    assert!(place.take().is_some() && place.take().is_none());
    drop(place);
    assert_eq!(Arc::strong_count(&value), 1);
}

// WaitGroup.

/// Go: TestWaitGroup. Two groups of 16, eight times.
#[test]
fn waitgroup_twice_sixteen() {
    let _w = watchdog();
    on_every(|| {
        let (one, two) = (WaitGroup::new(), WaitGroup::new());
        for _ in 0..8 {
            let exited = Arc::new(AtomicUsize::new(0));
            one.add(16);
            two.add(16);
            for _ in 0..16 {
                let (one, two, exited) = (one.clone(), two.clone(), exited.clone());
                go(move || {
                    one.done();
                    two.wait();
                    exited.fetch_add(1, SeqCst);
                });
            }
            one.wait();
            for _ in 0..16 {
                assert_eq!(exited.load(SeqCst), 0, "released too soon");
                two.done();
            }
            yield_until("all", || exited.load(SeqCst) == 16);
        }
    });
}

/// Go: TestWaitGroupRace. A thousand times: both effects are there.
#[test]
fn waitgroup_race() {
    let _w = watchdog();
    on_every(|| {
        for _ in 0..1000 {
            let wg = WaitGroup::new();
            let n = Arc::new(AtomicUsize::new(0));
            for _ in 0..2 {
                let (wg, n) = (
                    {
                        wg.add(1);
                        wg.clone()
                    },
                    n.clone(),
                );
                go(move || {
                    n.fetch_add(1, SeqCst);
                    wg.done();
                });
            }
            wg.wait();
            assert_eq!(n.load(SeqCst), 2);
        }
    });
}

#[test]
fn waitgroup_go_counts_panics_and_works_in_a_static() {
    let _w = watchdog();
    static WG: WaitGroup = WaitGroup::new();
    static N: AtomicUsize = AtomicUsize::new(0);
    on_every(|| {
        N.store(0, SeqCst);
        for i in 0..100 {
            WG.go(move || {
                N.fetch_add(1, SeqCst);
                assert!(i % 10 != 3, "no luck");
                i
            });
        }
        join_thread(std::thread::spawn(|| WG.wait()));
        WG.wait();
        assert_eq!(N.load(SeqCst), 100);
        // The goroutine keeps the counter when the handle is gone.
        let wg = WaitGroup::new();
        wg.go(|| sleep(MS));
        drop(wg);
    });
}

/// Go: TestWaitGroupMisuse, and the other rules.
#[test]
fn waitgroup_misuse_panics() {
    let _w = watchdog();
    let wg = WaitGroup::new();
    wg.add(1);
    wg.done();
    assert!(panic_text(|| wg.done()).contains("negative counter"));
    wg.wait();
    assert!(panic_text(|| wg.add(usize::MAX)).contains("cannot count"));
    wg.add(2);
    wg.done();
    wg.done();
    wg.wait();
}

// Semaphore.

/// Go: TestSemaHandoff. Given back to one who waits, that one runs first, in two thirds of 10,000.
#[test]
fn semaphore_handoff_lets_the_waiter_run_first() {
    let _w = watchdog();
    for procs in [1, 2, 4] {
        on(procs, || {
            // As in Go's test: the other Ps have a little to do, so that nobody is stolen away.
            let stop = Arc::new(AtomicBool::new(false));
            let busy: Vec<_> = (1..procs)
                .map(|_| {
                    let stop = stop.clone();
                    go(move || {
                        while !stop.load(SeqCst) {
                            yield_now();
                        }
                    })
                })
                .collect();
            let mut first = 0;
            for _ in 0..10_000 {
                let semaphore = Arc::new(Semaphore::new(1));
                let permit = semaphore.acquire();
                let winner = Arc::new(AtomicUsize::new(0));
                let waiting = Arc::new(AtomicBool::new(false));
                let waiter = go({
                    let (semaphore, winner) = (semaphore.clone(), winner.clone());
                    let waiting = waiting.clone();
                    move || {
                        waiting.store(true, SeqCst);
                        let _permit = semaphore.acquire();
                        let _ = winner.compare_exchange(0, 1, SeqCst, SeqCst);
                    }
                });
                while !waiting.load(SeqCst) {
                    yield_now();
                }
                yield_now();
                drop(permit);
                let _ = winner.compare_exchange(0, 2, SeqCst, SeqCst);
                waiter.join().unwrap();
                first += usize::from(winner.load(SeqCst) == 1);
            }
            stop.store(true, SeqCst);
            join_all(busy);
            assert!(first >= 10_000 * 2 / 3, "the waiter ran first {first} times, procs={procs}");
        });
    }
}

#[test]
fn semaphore_limits_and_loses_nothing() {
    let _w = watchdog();
    static S: Semaphore = Semaphore::new(3);
    static INSIDE: AtomicUsize = AtomicUsize::new(0);
    on_every(|| {
        mixed(12, |i| {
            let mut seed = 5 + i as u64;
            for k in 0..100 {
                let limit = Duration::from_nanos(next(&mut seed) % 100_000);
                let permit = match k % 4 {
                    0 => S.try_acquire(),
                    1 => S.acquire_timeout(limit),
                    2 => Some(S.acquire_many(2)),
                    _ => Some(S.acquire()),
                };
                let Some(permit) = permit else { continue };
                let inside = INSIDE.fetch_add(permit.permits(), SeqCst) + permit.permits();
                assert!(inside <= 3, "{inside} permits of 3");
                if next(&mut seed).is_multiple_of(3) {
                    sleep(Duration::from_nanos(next(&mut seed) % 30_000));
                }
                INSIDE.fetch_sub(permit.permits(), SeqCst);
            }
        });
        assert_eq!(S.available_permits(), 3);
    });
}

/// First come, first served: a large request is not starved by small ones; one that gives up makes
/// way.
#[test]
fn semaphore_is_fifo() {
    let _w = watchdog();
    on_every(|| {
        let semaphore = Arc::new(Semaphore::new(2));
        let order = Arc::new(Mutex::new(Vec::new()));
        let held = semaphore.acquire();
        let wants = [2, 1, 1].map(|n| {
            let (s, order) = (semaphore.clone(), order.clone());
            let handle = go(move || {
                let _permit = s.acquire_many(n);
                order.lock().push(n);
                yield_now();
            });
            // The first one waits from the moment when the permit that is left cannot be had.
            yield_until("the first in line", || semaphore.try_acquire().is_none());
            handle
        });
        assert_eq!(semaphore.available_permits(), 1);
        assert!(semaphore.try_acquire().is_none(), "others wait");
        drop(held);
        join_all(wants);
        assert_eq!(*order.lock(), [2, 1, 1]);

        let held = semaphore.acquire();
        let s = semaphore.clone();
        let gives_up = std::thread::spawn(move || s.acquire_timeout(Duration::ZERO).is_some());
        assert!(join_thread(gives_up));
        let s = semaphore.clone();
        let behind = go(move || {
            sleep(MS);
            drop(s.acquire());
        });
        // Wants two, gets none, leaves: the one behind it goes on with the one there is.
        let two = semaphore.clone();
        let large = go(move || {
            let all = two.try_acquire_many(2);
            assert!(all.is_none());
        });
        large.join().unwrap();
        behind.join().unwrap();
        drop(held);
        assert_eq!(semaphore.available_permits(), 2);
        assert!(panic_text(|| semaphore.add_permits(usize::MAX)).contains("MAX_PERMITS"));
        semaphore.add_permits(1);
        semaphore.acquire_many(2).forget();
        assert_eq!(semaphore.available_permits(), 1);
    });
}

// Barrier.

#[test]
fn barrier_rounds_with_one_leader_each() {
    let _w = watchdog();
    on_every(|| {
        const N: usize = 10;
        let barrier = Arc::new(Barrier::new(N));
        let (leaders, arrived) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        mixed(N, {
            let (leaders, arrived) = (leaders.clone(), arrived.clone());
            move |_| {
                for round in 1..=20 {
                    arrived.fetch_add(1, SeqCst);
                    leaders.fetch_add(usize::from(barrier.wait().is_leader()), SeqCst);
                    assert!(arrived.load(SeqCst) >= round * N);
                    barrier.wait();
                }
            }
        });
        assert_eq!(leaders.load(SeqCst), 20);
        assert!(Barrier::new(0).wait().is_leader());
    });
}

// ErrGroup.

#[test]
fn errgroup_first_error_wins() {
    let _w = watchdog();
    on_every(|| {
        let group = ErrGroup::new();
        group.go(|| Ok(()));
        assert_eq!(group.wait(), Ok(()));
        // Nothing tells that the first has ended: a sleep must do, and may be too short.
        once_in_five(|| {
            let gate = Arc::new(Barrier::new(2));
            let g = gate.clone();
            group.go(move || {
                g.wait();
                sleep(2 * MS);
                Err("second")
            });
            group.go(move || {
                gate.wait();
                Err("first")
            });
            same(group.wait(), Err("first"))
        });
        // It is taken out, and the group can be used again; a clone is the same group.
        assert_eq!(group.wait(), Ok(()));
        group.clone().go(|| Err("again"));
        assert_eq!(group.wait(), Err("again"));
    });
}

#[test]
fn errgroup_is_a_pool_with_a_limit() {
    let _w = watchdog();
    on_every(|| {
        let group = ErrGroup::<()>::new();
        group.set_limit(3);
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        for i in 0..60 {
            let (now, most) = (now.clone(), most.clone());
            group.go(move || {
                most.fetch_max(now.fetch_add(1, SeqCst) + 1, SeqCst);
                if i % 5 == 0 {
                    sleep(Duration::from_micros(200));
                } else {
                    yield_now();
                }
                now.fetch_sub(1, SeqCst);
                Ok(())
            });
        }
        group.wait().unwrap();
        assert!((1..=3).contains(&most.load(SeqCst)), "{most:?} at once");
        let gate = Arc::new(Semaphore::new(0));
        for _ in 0..3 {
            let gate = gate.clone();
            assert!(group.try_go(move || {
                gate.acquire().forget();
                Ok(())
            }));
        }
        assert!(!group.try_go(|| Ok(())), "the limit is reached");
        assert!(panic_text(|| group.set_limit(5)).contains("3 goroutines"));
        gate.add_permits(3);
        group.wait().unwrap();
        group.set_limit(5);
    });
}

#[test]
fn errgroup_panic_comes_out_of_wait() {
    let _w = watchdog();
    on_every(|| {
        let group = ErrGroup::<()>::new();
        group.set_limit(1);
        group.go(|| panic!("inside"));
        group.go(|| Ok(()));
        assert!(
            panic_text(|| assert!(group.wait().is_ok()))
                .contains("a goroutine of the group panicked")
        );
        assert_eq!(group.wait(), Ok(()));
    });
}

/// Go: errgroup's WithContext. The first failure cancels, and so does the end of the wait.
#[test]
fn errgroup_cancels_its_context() {
    let _w = watchdog();
    on_every(|| {
        let (group, ctx) = ErrGroup::with_context(&Context::background());
        for i in 0..4 {
            let ctx = ctx.clone();
            group.go(move || {
                if i == 2 {
                    return Err("two");
                }
                assert!(ctx.done().recv().is_err());
                Err("cancelled")
            });
        }
        assert_eq!(group.wait(), Err("two"));
        assert_eq!(ctx.err(), Some(ContextError::Canceled));

        let (group, ctx) = ErrGroup::<()>::with_context(&Context::background());
        group.go(|| Ok(()));
        assert_eq!(ctx.err(), None);
        assert_eq!(group.wait(), Ok(()));
        assert_eq!(ctx.err(), Some(ContextError::Canceled));
    });
}

// All together.

/// One mutex, one condition, two runtimes and threads: a queue of 2,000 numbers goes through.
#[test]
fn two_runtimes_and_threads_share_everything() {
    let _w = watchdog();
    static QUEUE: Mutex<Vec<u64>> = Mutex::new(Vec::new());
    static CHANGED: Condvar = Condvar::new();
    static SUM: RwLock<u64> = RwLock::new(0);
    static SLOTS: Semaphore = Semaphore::new(4);
    const EACH: u64 = 500;
    fn produce() {
        for n in 1..=EACH {
            let _slot = SLOTS.acquire();
            QUEUE.lock().push(n);
            CHANGED.notify_one();
        }
    }
    fn consume() {
        for _ in 0..EACH {
            let mut queue = QUEUE.lock();
            CHANGED.wait_while(&mut queue, |queue| queue.is_empty());
            let n = queue.pop().unwrap();
            drop(queue);
            *SUM.write() += n;
            let _ = *SUM.read();
        }
    }
    for procs in PROCS {
        *SUM.write() = 0;
        let (one, two) = [1, procs].map(|n| Runtime::builder().procs(n).build().unwrap()).into();
        std::thread::scope(|s| {
            s.spawn(|| one.run(|| join_all([go(produce), go(consume)])));
            s.spawn(|| two.run(|| join_all([go(produce), go(consume), go(produce), go(consume)])));
            s.spawn(produce);
            s.spawn(consume);
        });
        assert_eq!(*SUM.read(), 4 * EACH * (EACH + 1) / 2);
        assert!(QUEUE.lock().is_empty());
    }
}

// Goroutines that are left.

/// A goroutine of a runtime of its own that waits like this for ever: the runtime is gone.
fn left_behind(reason: &str, wait: impl FnOnce() + Send + 'static) {
    let runtime = Runtime::builder().procs(1).build().unwrap();
    let _ = runtime.go(wait).unwrap();
    let shown = format!("[{reason}]:");
    yield_until("it to wait", || runtime.run(|| debug::dump().contains(&shown)));
}

/// Who waits behind a goroutine of a runtime that was dropped is not forgotten, and what the dropped one
/// would have been given is not lost.
#[test]
fn goroutines_of_a_dropped_runtime_are_passed_over() {
    let _w = watchdog();
    let in_time = Duration::from_secs(20);

    // Twice: the first time somebody waits behind it; then also in starvation mode.
    for starving in [false, true] {
        let mutex = Arc::new(Mutex::new(0));
        let held = mutex.lock();
        let lock = |m: &Arc<Mutex<i32>>| {
            let m = m.clone();
            move || *m.lock() += 1
        };
        left_behind("sync.Mutex.Lock", lock(&mutex));
        if starving {
            std::thread::sleep(2 * MS);
        }
        let behind = std::thread::spawn({
            let mutex = mutex.clone();
            move || *mutex.try_lock_for(in_time).expect("forgotten") += 10
        });
        std::thread::sleep(5 * MS);
        left_behind("sync.Mutex.Lock", lock(&mutex));
        drop(held);
        behind.join().unwrap();
        assert_eq!(*mutex.try_lock_for(in_time).expect("locked by nobody"), 10);
        assert_eq!(*mutex.try_lock_for(in_time).expect("locked by nobody"), 10);
    }

    let lock = Arc::new(RwLock::new(()));
    let held = lock.write();
    let l = lock.clone();
    left_behind("sync.RWMutex.RLock", move || std::mem::forget(l.read()));
    drop(held);
    assert!(lock.try_write_for(in_time).is_some(), "a reader is inside");
    let held = lock.write();
    let l = lock.clone();
    left_behind("sync.RWMutex.Lock", move || std::mem::forget(l.write()));
    drop(held);
    assert!(lock.try_read_for(in_time).is_some(), "a writer is inside");

    let semaphore = Arc::new(Semaphore::new(0));
    let s = semaphore.clone();
    left_behind("semacquire", move || s.acquire_many(2).forget());
    let s = semaphore.clone();
    let behind =
        std::thread::spawn(move || s.acquire_timeout(in_time).expect("forgotten").forget());
    std::thread::sleep(2 * MS);
    semaphore.add_permits(1);
    behind.join().unwrap();
    semaphore.add_permits(1);
    assert!(semaphore.try_acquire().is_some(), "a permit is gone");
    let s = semaphore.clone();
    left_behind("semacquire", move || s.acquire_many(2).forget());
    assert!(semaphore.acquire_timeout(in_time).is_some(), "waits behind nobody");

    let pair = Arc::new((Mutex::new(0), Condvar::new()));
    let p = pair.clone();
    left_behind("sync.Cond.Wait", move || p.1.wait(&mut p.0.lock()));
    let p = pair.clone();
    let behind = std::thread::spawn(move || {
        let mut guard = p.0.lock();
        *guard = 1;
        assert!(!p.1.wait_for(&mut guard, in_time).timed_out(), "notified somebody else");
    });
    while *pair.0.lock() == 0 {
        std::thread::sleep(MS);
    }
    assert!(pair.1.notify_one());
    behind.join().unwrap();
    assert!(!pair.1.notify_one());
}

/// Those whom `notify_all` moves to the mutex's queue, those with a deadline, and plain threads: all of them come back,
/// whether the notifier has the mutex or not.
#[test]
fn everybody_who_waited_comes_back_from_notify_all() {
    let _watchdog = watchdog();
    const ROUNDS: u64 = 300;
    const WAITERS: u64 = 24;
    for procs in [1, 4] {
        let state = Mutex::new((0_u64, 0_u64)); // the round, and how many have seen it
        let changed = Condvar::new();
        let wait = |who: u64| {
            for round in 1..=ROUNDS {
                let mut state = state.lock();
                while state.0 < round {
                    if who.is_multiple_of(3) {
                        changed.wait_for(&mut state, Duration::from_millis(1 + who % 2));
                    } else {
                        changed.wait(&mut state);
                    }
                }
                state.1 += 1;
            }
        };
        std::thread::scope(|threads| {
            threads.spawn(|| wait(0));
            threads.spawn(|| wait(1));
            Runtime::builder().procs(procs).build().unwrap().run(|| {
                scope(|s| {
                    for who in 2..WAITERS {
                        {
                            let wait = &wait;
                            s.go(move || wait(who));
                        }
                    }
                    for round in 1..=ROUNDS {
                        let mut now = state.lock();
                        now.0 = round;
                        if round.is_multiple_of(2) {
                            changed.notify_all();
                            drop(now);
                        } else {
                            drop(now);
                            changed.notify_all();
                        }
                        yield_until("all have seen it", || state.lock().1 == round * WAITERS);
                    }
                });
            });
        });
    }
}
