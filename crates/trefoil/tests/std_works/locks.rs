//! std's locks, channels, sleep and threads.

use super::common::{MS, TOO_LONG, assert_passed, join_all, runtime, watchdog};
use super::{Actor, Started, every_pair, everywhere, until};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{RecvTimeoutError, TryRecvError, channel, sync_channel};
use std::sync::{Arc, Barrier, Condvar, LazyLock, Mutex, Once, OnceLock, RwLock};
use std::thread;
use std::time::{Duration, Instant};

#[test]
fn a_std_mutex_excludes_goroutines_and_threads() {
    let _w = watchdog();
    every_pair(|a, b| {
        let n = Arc::new(Mutex::new(0u64));
        let all: Vec<_> = [a, b, a, b]
            .into_iter()
            .map(|actor| {
                let n = n.clone();
                actor.start(move || {
                    for i in 0..300 {
                        let mut n = n.lock().unwrap();
                        let was = *n;
                        if i % 16 == 0 {
                            thread::yield_now(); // while the mutex is locked
                        }
                        *n = was + 1;
                    }
                })
            })
            .collect();
        all.into_iter().for_each(Started::join);
        assert_eq!(*n.lock().unwrap(), 1200);
    });
}

#[test]
fn goroutines_do_not_starve_a_thread_at_a_std_mutex() {
    let _w = watchdog();
    runtime(2).run(|| {
        let (lock, stop) = (Arc::new(Mutex::new(())), Arc::new(AtomicBool::new(false)));
        let hogs: Vec<_> = (0..8)
            .map(|_| {
                let (lock, stop) = (lock.clone(), stop.clone());
                trefoil::go(move || {
                    while !stop.load(SeqCst) {
                        let _held = lock.lock().unwrap();
                        trefoil::yield_now();
                    }
                })
            })
            .collect();
        let (l, s) = (lock.clone(), stop.clone());
        let thread = Actor::Thread.start(move || {
            let start = Instant::now();
            let mut turns = 0;
            while turns < 20 && start.elapsed() < TOO_LONG / 4 {
                drop(l.lock().unwrap());
                turns += 1;
            }
            s.store(true, SeqCst);
            turns
        });
        until("the thread to have its turns", || stop.load(SeqCst));
        join_all(hogs);
        assert_eq!(thread.join(), 20);
    });
}

#[test]
fn a_std_rwlock_writer_excludes_readers() {
    let _w = watchdog();
    every_pair(|a, b| {
        let lock = Arc::new(RwLock::new((0u64, 0u64)));
        let all: Vec<_> = [a, b, a, b]
            .into_iter()
            .enumerate()
            .map(|(k, actor)| {
                let lock = lock.clone();
                actor.start(move || {
                    for i in 0..300 {
                        if (i + k) % 4 == 0 {
                            let mut both = lock.write().unwrap();
                            both.0 += 1;
                            if i % 32 == 0 {
                                thread::yield_now();
                            }
                            both.1 += 1;
                        } else {
                            let both = lock.read().unwrap();
                            assert_eq!(both.0, both.1);
                        }
                    }
                })
            })
            .collect();
        all.into_iter().for_each(Started::join);
        assert_eq!(*lock.read().unwrap(), (300, 300));
    });
}

#[test]
fn two_sides_take_turns_by_a_std_condvar() {
    let _w = watchdog();
    every_pair(|a, b| {
        let both = Arc::new((Mutex::new(0u32), Condvar::new()));
        let turns = |mine: u32, both: Arc<(Mutex<u32>, Condvar)>| {
            move || {
                let (n, changed) = &*both;
                for _ in 0..100 {
                    let mut n = changed.wait_while(n.lock().unwrap(), |n| *n % 2 != mine).unwrap();
                    *n += 1;
                    changed.notify_all();
                }
            }
        };
        let first = a.start(turns(0, both.clone()));
        let second = b.start(turns(1, both.clone()));
        first.join();
        second.join();
        assert_eq!(*both.0.lock().unwrap(), 200);
    });
}

#[test]
fn a_std_condvar_times_out_and_accepts_endless_timeouts() {
    let _w = watchdog();
    fn check() {
        let (m, c) = (Mutex::new(()), Condvar::new());
        let start = Instant::now();
        let (guard, out) = c.wait_timeout(m.lock().unwrap(), 20 * MS).unwrap();
        assert!(out.timed_out());
        assert_passed(start, 20 * MS);
        let (guard, out) = c.wait_timeout(guard, Duration::ZERO).unwrap();
        assert!(out.timed_out());
        drop(guard);
        // Timeouts beyond any clock.
        for far in [Duration::MAX, Duration::from_secs(1 << 61), Duration::from_secs(1 << 34)] {
            let both = Arc::new((Mutex::new(false), Condvar::new()));
            let (b, waits) = (both.clone(), Arc::new(AtomicBool::new(false)));
            let w = waits.clone();
            let waiter = trefoil::go(move || {
                let guard = b.0.lock().unwrap();
                w.store(true, SeqCst);
                let (set, out) = b.1.wait_timeout_while(guard, far, |set| !*set).unwrap();
                *set && !out.timed_out()
            });
            until("the waiter to begin", || waits.load(SeqCst));
            thread::sleep(2 * MS);
            *both.0.lock().unwrap() = true;
            both.1.notify_one();
            assert!(waiter.join().unwrap(), "{far:?}");
        }
    }
    trefoil::sim::run(check);
    everywhere(check);
}

#[test]
fn std_once_once_lock_and_lazy_lock_initialise_once() {
    let _w = watchdog();
    every_pair(|a, b| {
        let (once, cell, ran) =
            (Arc::new(Once::new()), Arc::new(OnceLock::new()), Arc::new(AtomicUsize::new(0)));
        let lazy: Arc<LazyLock<u64>> = Arc::new(LazyLock::new(|| {
            thread::sleep(2 * MS);
            7
        }));
        let all: Vec<_> = [a, b, a, b]
            .into_iter()
            .map(|actor| {
                let (once, cell, ran, lazy) =
                    (once.clone(), cell.clone(), ran.clone(), lazy.clone());
                actor.start(move || {
                    once.call_once(|| {
                        thread::sleep(2 * MS);
                        ran.fetch_add(1, SeqCst);
                    });
                    let seven = *cell.get_or_init(|| {
                        thread::yield_now();
                        ran.fetch_add(1, SeqCst);
                        7u64
                    });
                    once.wait();
                    seven + **lazy
                })
            })
            .collect();
        assert!(all.into_iter().all(|s| s.join() == 14));
        assert_eq!(ran.load(SeqCst), 2);
    });
}

#[test]
fn a_std_barrier_has_one_leader_per_round() {
    let _w = watchdog();
    every_pair(|a, b| {
        let (barrier, at) = (Arc::new(Barrier::new(4)), Arc::new(AtomicUsize::new(0)));
        let all: Vec<_> = [a, b, a, b]
            .into_iter()
            .map(|actor| {
                let (barrier, at) = (barrier.clone(), at.clone());
                actor.start(move || {
                    let mut led = 0;
                    for round in 1..=20 {
                        at.fetch_add(1, SeqCst);
                        led += usize::from(barrier.wait().is_leader());
                        assert!(at.load(SeqCst) >= 4 * round);
                        barrier.wait();
                    }
                    led
                })
            })
            .collect();
        assert_eq!(all.into_iter().map(Started::join).sum::<usize>(), 20);
    });
}

#[test]
fn std_mpsc_channels_pass_every_value_and_time_out() {
    let _w = watchdog();
    every_pair(|a, b| {
        // Unbounded, without a buffer, with a buffer.
        let (tx, rx) = channel();
        let sender = a.start(move || (0..300).for_each(|i| tx.send(i).unwrap()));
        let receiver = b.start(move || rx.iter().sum::<u32>());
        sender.join();
        assert_eq!(receiver.join(), 300 * 299 / 2);
        for room in [0, 1, 16] {
            let (tx, rx) = sync_channel(room);
            let sender = a.start(move || (0..150).for_each(|i| tx.send(i).unwrap()));
            let receiver = b.start(move || {
                for i in 0..150 {
                    assert_eq!(rx.recv().unwrap(), i);
                }
                rx.recv().unwrap_err();
            });
            sender.join();
            receiver.join();
        }
        // A request and its answer.
        let (tx, rx) = sync_channel::<u32>(0);
        let (back, results) = channel();
        let echo = b.start(move || rx.iter().for_each(|i| back.send(i + 1).unwrap()));
        let asker = a.start(move || {
            for i in 0..100 {
                tx.send(i).unwrap();
                assert_eq!(results.recv().unwrap(), i + 1);
            }
        });
        asker.join();
        echo.join();
        // Timeouts.
        let (tx, rx) = channel::<()>();
        let (late, now) = channel::<()>();
        let waiter = b.start(move || {
            let start = Instant::now();
            assert_eq!(rx.recv_timeout(10 * MS), Err(RecvTimeoutError::Timeout));
            assert!(start.elapsed() >= 10 * MS);
            assert_eq!(rx.try_recv(), Err(TryRecvError::Empty));
            late.send(()).unwrap();
            rx.recv_timeout(TOO_LONG).unwrap();
            assert_eq!(rx.recv_timeout(TOO_LONG), Err(RecvTimeoutError::Disconnected));
        });
        let sender = a.start(move || {
            now.recv().unwrap();
            thread::sleep(2 * MS);
            tx.send(()).unwrap();
        });
        sender.join();
        waiter.join();
    });
}

#[test]
fn unpark_wakes_a_parked_goroutine_or_thread() {
    let _w = watchdog();
    every_pair(|a, b| {
        let (tx, rx) = channel();
        let turn = Arc::new(AtomicUsize::new(0));
        let t = turn.clone();
        let parker = a.start(move || {
            tx.send(thread::current()).unwrap();
            for i in 1..=100 {
                while t.load(SeqCst) < i {
                    thread::park();
                }
            }
            let start = Instant::now();
            thread::park(); // consumes the token that was left before
            thread::park_timeout(5 * MS);
            // It may return early without a reason.
            if start.elapsed() < 5 * MS {
                thread::park_timeout(5 * MS);
            }
            thread::park_timeout(Duration::ZERO);
        });
        let waker = b.start(move || {
            let thread = rx.recv().unwrap();
            for _ in 0..100 {
                turn.fetch_add(1, SeqCst);
                thread.unpark();
            }
            thread.unpark();
            thread
        });
        let handle = waker.join();
        // Unparks until the parker has ended, whichever call consumed the token.
        let done = Arc::new(AtomicBool::new(false));
        let d = done.clone();
        let pusher = trefoil::go(move || {
            while !d.load(SeqCst) {
                handle.unpark();
                thread::sleep(MS);
            }
        });
        parker.join();
        done.store(true, SeqCst);
        pusher.join().unwrap();
    });
}

#[test]
fn a_thread_scope_on_a_goroutine_waits_for_its_threads() {
    let _w = watchdog();
    everywhere(|| {
        let mut parts = [0u64; 4];
        let gate = Barrier::new(5);
        thread::scope(|s| {
            for (i, part) in parts.iter_mut().enumerate() {
                let gate = &gate;
                s.spawn(move || {
                    gate.wait();
                    *part = i as u64 + 1;
                });
            }
            gate.wait(); // on the goroutine
        });
        assert_eq!(parts, [1, 2, 3, 4]);
        let mut sum = 0;
        trefoil::scope(|s| {
            s.go(|| sum = thread::scope(|s| s.spawn(|| parts.iter().sum::<u64>()).join().unwrap()));
        });
        assert_eq!(sum, 10);
    });
}

#[test]
fn sleeps_and_yields_of_std_and_libc_let_other_goroutines_run() {
    let _w = watchdog();
    everywhere(|| {
        let start = Instant::now();
        join_all((0..200).map(|_| trefoil::go(|| thread::sleep(20 * MS))));
        assert!(start.elapsed() >= 20 * MS);
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
        thread::sleep(Duration::ZERO);
        // SAFETY: local variables.
        unsafe {
            assert_eq!(libc::usleep(100), 0);
            assert_eq!(libc::sleep(0), 0);
            let bad = libc::timespec { tv_sec: 0, tv_nsec: 2_000_000_000 };
            assert_eq!(libc::nanosleep(&raw const bad, std::ptr::null_mut()), -1);
            assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EINVAL));
            let past = libc::timespec { tv_sec: 1, tv_nsec: 0 };
            let (clock, absolute) = (libc::CLOCK_MONOTONIC, libc::TIMER_ABSTIME);
            let none = std::ptr::null_mut();
            assert_eq!(libc::clock_nanosleep(clock, absolute, &raw const past, none), 0);
        }
    });
    // std's `yield_now` lets the other goroutine of the only P run.
    runtime(1).run(|| {
        let flag = Arc::new(AtomicBool::new(false));
        let f = flag.clone();
        let other = trefoil::go(move || f.store(true, SeqCst));
        while !flag.load(SeqCst) {
            thread::yield_now();
        }
        other.join().unwrap();
    });
}

#[test]
fn a_panicking_goroutine_poisons_std_locks() {
    let _w = watchdog();
    every_pair(|a, b| {
        let (lock, cond) = (Arc::new((Mutex::new(1), RwLock::new(1))), Arc::new(Once::new()));
        let (l, c) = (lock.clone(), cond.clone());
        let panics = a.start(move || {
            let _first = l.0.lock().unwrap();
            let _second = l.1.write().unwrap();
            thread::yield_now();
            c.call_once(|| std::panic::resume_unwind(Box::new("on purpose")));
        });
        panics.result().unwrap_err();
        let checks = b.start(move || {
            assert_eq!(*lock.0.lock().unwrap_err().into_inner(), 1);
            lock.0.clear_poison();
            drop(lock.0.lock().unwrap());
            assert!(lock.1.read().is_err());
            let mut seen = false;
            cond.call_once_force(|state| seen = state.is_poisoned());
            assert!(seen);
        });
        checks.join();
    });
}
