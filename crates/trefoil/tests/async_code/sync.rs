//! Locks, semaphores and other primitives of `sync` in async code: tasks, `block_on`, and an
//! executor of the tests.

// Guards may be held across an await: a task that waits for the lock holds no thread.
#![allow(clippy::await_holding_lock)]

use crate::common::{hold_until, watchdog};
use crate::executor::{GiveUp, Parking, at_each_procs, await_or_give_up, pending, poll_once};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;
use trefoil::context::{Context as RequestContext, ContextError};
use trefoil::sync::{
    Barrier, Mutex, MutexExt as _, Notify, OnceLock, RwLock, RwLockExt as _, Semaphore, WaitGroup,
};
use trefoil::task::{self, JoinHandle};
use trefoil::{block_on, go};

/// Runs the futures that `make` makes of clones of `shared`: as a task, in `block_on` on a
/// goroutine and on a thread, and in another executor. Returns handles.
fn in_all_ways<S: Clone, F: Future<Output = ()> + Send + 'static>(
    shared: &S,
    make: impl Fn(S) -> F,
) -> Vec<JoinHandle<()>> {
    let [in_task, on_goroutine, on_thread, elsewhere] = [(); 4].map(|()| make(shared.clone()));
    let in_thread = |f: Box<dyn FnOnce() + Send>| {
        go(move || trefoil::blocking(|| std::thread::spawn(f).join()).unwrap())
    };
    vec![
        task::spawn(in_task),
        go(move || block_on(on_goroutine)),
        in_thread(Box::new(move || block_on(on_thread))),
        in_thread(Box::new(move || Parking::block_on(elsewhere))),
    ]
}

fn join_all(handles: Vec<JoinHandle<()>>) {
    handles.into_iter().for_each(|h| h.join().unwrap());
}

#[test]
fn a_mutex_excludes_tasks_goroutines_and_threads() {
    at_each_procs(|| {
        let total = Arc::new(Mutex::new(0));
        let mut handles = in_all_ways(&total, |total| async move {
            for _ in 0..300 {
                let mut guard = total.lock_async().await;
                let seen = *guard;
                task::yield_now().await; // the guard is held across an await
                *guard = seen + 1;
            }
        });
        handles.push(go({
            let total = total.clone();
            move || {
                for _ in 0..300 {
                    let mut guard = total.lock();
                    let seen = *guard;
                    trefoil::yield_now();
                    *guard = seen + 1;
                }
            }
        }));
        join_all(handles);
        assert_eq!(*total.lock(), 1500);
    });
}

#[test]
fn a_lock_future_that_is_dropped_leaves_the_mutex_free() {
    let _w = watchdog();
    let mutex = Mutex::new(());
    let guard = mutex.lock();
    let first = pending(mutex.lock_async());
    let mut second = pending(mutex.lock_async());
    drop(guard); // wakes `first`
    drop(first); // which passes the wake-up on
    assert!(poll_once(second.as_mut()).is_ready());
    assert!(mutex.try_lock().is_some());
}

#[test]
fn a_lock_handed_over_in_starvation_mode_is_passed_on_by_a_dropped_future() {
    let _w = watchdog();
    let mutex = Mutex::new(());
    let mut guard = mutex.lock();
    let mut first = pending(mutex.lock_async());
    let mut second = pending(mutex.lock_async());
    // Both have waited for more than a millisecond. The first loses to a newcomer, and demands
    // starvation mode.
    std::thread::sleep(Duration::from_millis(3));
    drop(guard);
    guard = mutex.try_lock().unwrap();
    assert!(poll_once(first.as_mut()).is_pending());
    assert!(mutex.try_lock().is_none());
    drop(guard); // hands the mutex to `first`
    assert!(mutex.try_lock().is_none(), "the mutex was handed over");
    drop(first);
    assert!(poll_once(second.as_mut()).is_ready());
    assert!(mutex.try_lock().is_some());
}

#[test]
fn dropped_lock_futures_lose_no_wake_up() {
    at_each_procs(|| {
        let mutex = Arc::new(Mutex::new(0u64));
        let done = Arc::new(AtomicUsize::new(0));
        let handles: Vec<_> = (0..6u64)
            .map(|n| {
                let (mutex, done) = (mutex.clone(), done.clone());
                let mut rng = SmallRng::seed_from_u64(n);
                let slow = move |guard: &mut u64, rng: &mut SmallRng| {
                    *guard += 1;
                    if rng.random_ratio(1, 200) {
                        trefoil::time::sleep(Duration::from_micros(1500)); // starvation mode
                    }
                };
                if n == 0 {
                    return go(move || {
                        for _ in 0..500 {
                            slow(&mut mutex.lock(), &mut rng);
                            done.fetch_add(1, Ordering::Relaxed);
                        }
                    });
                }
                task::spawn(async move {
                    for _ in 0..500 {
                        let guard = await_or_give_up(&mut rng, mutex.lock_async()).await;
                        if let Some(mut guard) = guard {
                            slow(&mut guard, &mut rng);
                            done.fetch_add(1, Ordering::Relaxed);
                        }
                        if rng.random_bool(0.1) {
                            task::yield_now().await;
                        }
                    }
                })
            })
            .collect();
        join_all(handles);
        assert_eq!(*mutex.lock(), done.load(Ordering::Relaxed) as u64);
        assert!(mutex.try_lock().is_some());
    });
}

#[test]
fn a_read_write_lock_admits_readers_or_one_writer() {
    at_each_procs(|| {
        let lock = Arc::new(RwLock::new((0u64, 0u64)));
        let mut handles = in_all_ways(&lock, |lock| async move {
            for _ in 0..100 {
                let mut guard = lock.write_async().await;
                guard.0 += 1;
                task::yield_now().await;
                guard.1 += 1;
            }
        });
        handles.extend(in_all_ways(&lock, |lock| async move {
            for _ in 0..100 {
                let guard = lock.read_async().await;
                task::yield_now().await;
                assert_eq!(guard.0, guard.1);
            }
        }));
        join_all(handles);
        assert_eq!(*lock.read(), (400, 400));
    });
}

#[test]
fn dropped_read_and_write_futures_leave_the_lock_free() {
    let _w = watchdog();
    let lock = RwLock::new(());
    // A writer that waits for a reader keeps readers out until it is dropped.
    let reader = lock.read();
    let write = pending(lock.write_async());
    let mut read = pending(lock.read_async());
    drop(write);
    assert!(poll_once(read.as_mut()).is_ready());
    drop((reader, read));
    assert!(lock.try_write().is_some());
    // A writer that the last reader has admitted, and a reader that a writer has admitted.
    let reader = lock.read();
    let write = pending(lock.write_async());
    drop(reader);
    assert!(lock.try_read().is_none(), "the writer has the lock");
    drop(write);
    assert!(lock.try_write().is_some());
    let writer = lock.write();
    let read = pending(lock.read_async());
    drop(writer);
    assert!(lock.try_write().is_none(), "the reader has the lock");
    drop(read);
    assert!(lock.try_write().is_some());
    // A second writer waits in the mutex of the writers.
    let writer = lock.write();
    let write = pending(lock.write_async());
    drop(write);
    drop(writer);
    assert!(lock.try_write().is_some());
}

#[test]
fn dropped_futures_of_a_read_write_lock_lose_no_wake_up() {
    at_each_procs(|| {
        let lock = Arc::new(RwLock::new((0u64, 0u64)));
        let handles: Vec<_> = (0..6u64)
            .map(|n| {
                let lock = lock.clone();
                let mut rng = SmallRng::seed_from_u64(n);
                task::spawn(async move {
                    for _ in 0..500 {
                        if rng.random_bool(0.5) {
                            let guard = await_or_give_up(&mut rng, lock.write_async()).await;
                            if let Some(mut guard) = guard {
                                guard.0 += 1;
                                task::yield_now().await;
                                guard.1 += 1;
                            }
                        } else {
                            let guard = await_or_give_up(&mut rng, lock.read_async()).await;
                            if let Some(guard) = guard {
                                task::yield_now().await;
                                assert_eq!(guard.0, guard.1);
                            }
                        }
                    }
                })
            })
            .collect();
        join_all(handles);
        assert!(lock.try_write().is_some());
    });
}

#[test]
fn a_semaphore_limits_tasks_goroutines_and_threads() {
    at_each_procs(|| {
        let shared = (Arc::new(Semaphore::new(3)), Arc::new(AtomicUsize::new(0)));
        let handles = (0..3).flat_map(|_| {
            in_all_ways(&shared, |(semaphore, inside)| async move {
                for n in 1..=100 {
                    let permits = 1 + n % 2;
                    let permit = semaphore.acquire_many_async(permits).await;
                    let before = inside.fetch_add(permits, Ordering::SeqCst);
                    assert!(before + permits <= 3);
                    task::yield_now().await;
                    inside.fetch_sub(permits, Ordering::SeqCst);
                    drop(permit);
                }
            })
        });
        join_all(handles.collect());
        assert_eq!(shared.0.available_permits(), 3);
    });
}

#[test]
fn a_dropped_acquire_passes_its_permits_on() {
    let _w = watchdog();
    let semaphore = Semaphore::new(0);
    let first = pending(semaphore.acquire_many_async(2));
    let mut second = pending(semaphore.acquire_async());
    semaphore.add_permits(1);
    assert!(poll_once(second.as_mut()).is_pending(), "the first waits for two");
    drop(first); // was not served
    assert!(poll_once(second.as_mut()).is_ready());
    assert_eq!(semaphore.available_permits(), 1);

    let taken = semaphore.acquire();
    let first = pending(semaphore.acquire_async());
    let mut second = pending(semaphore.acquire_async());
    drop(taken);
    assert_eq!(semaphore.available_permits(), 0, "the first has the permit");
    drop(first);
    assert!(poll_once(second.as_mut()).is_ready());
    assert_eq!(semaphore.available_permits(), 1);
}

#[test]
fn dropped_acquires_lose_no_permit_and_no_wake_up() {
    at_each_procs(|| {
        let semaphore = Arc::new(Semaphore::new(3));
        let mut handles: Vec<_> = (0..6u64)
            .map(|n| {
                let semaphore = semaphore.clone();
                let mut rng = SmallRng::seed_from_u64(n);
                task::spawn(async move {
                    for _ in 0..500 {
                        let acquire = semaphore.acquire_many_async(rng.random_range(1..=3));
                        let permit = await_or_give_up(&mut rng, acquire).await;
                        task::yield_now().await;
                        drop(permit);
                    }
                })
            })
            .collect();
        handles.push(go({
            let semaphore = semaphore.clone();
            move || (0..500).for_each(|_| drop(semaphore.acquire_many(2)))
        }));
        join_all(handles);
        assert_eq!(semaphore.available_permits(), 3);
        let owned = block_on(semaphore.clone().acquire_owned_async());
        assert_eq!(semaphore.available_permits(), 2);
        drop(owned);
        assert_eq!(semaphore.available_permits(), 3);
    });
}

#[test]
fn a_wait_group_wakes_all_that_wait_and_forgets_dropped_futures() {
    at_each_procs(|| {
        for _ in 0..50 {
            let group = WaitGroup::new();
            let finished = Arc::new(AtomicBool::new(false));
            group.add(1);
            let shared = (group.clone(), finished.clone());
            let handles = in_all_ways(&shared, |(group, finished)| async move {
                group.wait_async().await;
                assert!(finished.load(Ordering::Acquire));
            });
            let mut dropped: Vec<_> = (0..3).map(|_| pending(group.wait_async())).collect();
            drop(dropped.remove(1));
            finished.store(true, Ordering::Release);
            group.done();
            drop(dropped);
            join_all(handles);
            // No waiter is left: the group can be used again.
            group.add(1);
            group.done();
            block_on(group.wait_async());
        }
    });
}

#[test]
fn a_barrier_counts_tasks_and_forgets_dropped_futures() {
    at_each_procs(|| {
        for _ in 0..50 {
            let barrier = Arc::new(Barrier::new(5));
            let leaders = Arc::new(AtomicUsize::new(0));
            drop(pending(barrier.wait_async()));
            let shared = (barrier.clone(), leaders.clone());
            let handles = in_all_ways(&shared, |(barrier, leaders)| async move {
                for _ in 0..3 {
                    let result = barrier.wait_async().await;
                    leaders.fetch_add(usize::from(result.is_leader()), Ordering::Relaxed);
                }
            });
            for _ in 0..3 {
                let result = barrier.wait();
                leaders.fetch_add(usize::from(result.is_leader()), Ordering::Relaxed);
            }
            join_all(handles);
            assert_eq!(leaders.load(Ordering::Relaxed), 3);
        }
    });
}

#[test]
fn notify_one_stores_one_permit_and_serves_in_order() {
    let _w = watchdog();
    let notify = Notify::new();
    notify.notify_one();
    notify.notify_one();
    assert!(poll_once(Box::pin(notify.notified()).as_mut()).is_ready());
    let mut waiting: Vec<_> = (0..3).map(|_| pending(notify.notified())).collect();
    notify.notify_one();
    assert!(poll_once(waiting[1].as_mut()).is_pending());
    assert!(poll_once(waiting[0].as_mut()).is_ready());
    // A future that was woken and is dropped passes the wake-up on, or stores it.
    notify.notify_one();
    drop(waiting.remove(1));
    assert!(poll_once(waiting[1].as_mut()).is_ready());
    let last = pending(notify.notified());
    notify.notify_one();
    drop(last);
    notify.wait();
}

#[test]
fn notify_waiters_wakes_those_that_exist_and_stores_nothing() {
    let _w = watchdog();
    let notify = Notify::new();
    let mut polled = pending(notify.notified());
    let mut unpolled = Box::pin(notify.notified());
    let dropped = pending(notify.notified());
    notify.notify_waiters();
    drop(dropped); // passes nothing on
    drop(pending(notify.notified()));
    assert!(poll_once(polled.as_mut()).is_ready());
    assert!(poll_once(unpolled.as_mut()).is_ready());
}

#[test]
fn no_notification_is_lost_between_tasks_goroutines_and_threads() {
    at_each_procs(|| {
        let notify = Arc::new(Notify::new());
        let left = Arc::new(AtomicUsize::new(2000));
        // Each consumer takes the number down by one per wake-up; a permit is never taken twice.
        let shared = (notify.clone(), left.clone());
        let mut handles = in_all_ways(&shared, |(notify, left)| async move {
            let mut rng = SmallRng::seed_from_u64(7);
            while left.load(Ordering::SeqCst) > 0 {
                let notified = Box::pin(notify.notified());
                if GiveUp(notified, rng.random_range(0..4)).await.is_some() {
                    let down = |n: usize| n.checked_sub(1);
                    let _ = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, down);
                }
                task::yield_now().await;
            }
        });
        handles.push(go(move || {
            while left.load(Ordering::SeqCst) > 0 {
                notify.notify_one();
                trefoil::yield_now();
            }
        }));
        join_all(handles);
    });
}

#[test]
fn a_task_and_a_goroutine_notify_each_other() {
    at_each_procs(|| {
        let (ping, pong) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let task = task::spawn({
            let (ping, pong) = (ping.clone(), pong.clone());
            async move {
                for _ in 0..1000 {
                    ping.notified().await;
                    pong.notify_one();
                }
            }
        });
        for _ in 0..1000 {
            ping.notify_one();
            pong.wait();
        }
        task.join().unwrap();
    });
}

#[test]
fn the_end_of_a_context_wakes_tasks() {
    at_each_procs(|| {
        let (context, cancel) = RequestContext::background().with_cancel();
        let handles = in_all_ways(&context, |context| async move {
            assert_eq!(context.done_async().await, ContextError::Canceled);
        });
        drop(pending(context.done_async()));
        cancel.cancel();
        join_all(handles);
        assert_eq!(block_on(context.done_async()), ContextError::Canceled);
        let never = RequestContext::background();
        drop(pending(never.done_async()));
        let (late, _cancel) = never.with_timeout(Duration::from_millis(2));
        let task = task::spawn(async move { late.done_async().await });
        assert_eq!(task.join().unwrap(), ContextError::DeadlineExceeded);
    });
}

/// The futures and guards may be sent to other threads.
#[test]
fn futures_and_guards_are_send() {
    fn is_send<T: Send>(_: &T) {}
    let (mutex, lock, semaphore) = (Mutex::new(1), RwLock::new(1), Semaphore::new(2));
    is_send(&mutex.lock_async());
    is_send(&lock.read_async());
    is_send(&lock.write_async());
    is_send(&semaphore.acquire_async());
    is_send(&WaitGroup::new().wait_async());
    is_send(&Barrier::new(1).wait_async());
    is_send(&Notify::new().notified());
    is_send(&RequestContext::background().done_async());
    is_send(&mutex.lock());
}

/// Goroutines, threads, tasks and other executors wait for one initializer, a closure or a future.
#[test]
fn a_once_lock_is_initialised_by_one_future() {
    at_each_procs(|| {
        for round in 0..20 {
            let place = Arc::new(OnceLock::new());
            let runs = Arc::new(AtomicUsize::new(0));
            let shared = (place.clone(), runs.clone());
            let mut handles = in_all_ways(&shared, |(place, runs)| async move {
                let init = || async {
                    runs.fetch_add(1, Ordering::Relaxed);
                    task::yield_now().await;
                    trefoil::time::sleep_async(Duration::from_micros(100)).await;
                    Box::new(42)
                };
                assert_eq!(**place.get_or_init_async(init).await, 42);
            });
            for _ in 0..2 {
                let (place, runs) = (place.clone(), runs.clone());
                handles.push(go(move || {
                    let init = || {
                        runs.fetch_add(1, Ordering::Relaxed);
                        trefoil::time::sleep(Duration::from_micros(100));
                        Box::new(42)
                    };
                    assert_eq!(**place.get_or_init(init), 42);
                }));
            }
            join_all(handles);
            assert_eq!(runs.load(Ordering::Relaxed), 1, "round {round}");
            assert_eq!(place.get().map(|n| **n), Some(42));
        }
    });
}

#[test]
fn an_initialiser_that_is_dropped_lets_the_next_one_try() {
    at_each_procs(|| {
        let place = Arc::new(OnceLock::new());
        let started = Arc::new(Semaphore::new(0));
        let (held, signal) = (place.clone(), started.clone());
        let hanging = task::spawn(async move {
            held.get_or_init_async(|| async {
                signal.add_permits(1);
                std::future::pending::<()>().await;
                0
            })
            .await;
        });
        started.acquire().forget();
        // Tasks and goroutines wait for the initializer that hangs.
        let mut waiters = in_all_ways(&place, |place| async move {
            assert_eq!(*place.get_or_init_async(|| async { 1 }).await, 1);
        });
        let waiting = place.clone();
        waiters.push(go(move || assert_eq!(*waiting.get_or_init(|| 1), 1)));
        // A wait that is dropped leaves the queue.
        for _ in 0..10 {
            drop(pending(place.get_or_init_async(|| async { 2 })));
        }
        assert_eq!(place.get(), None);
        hanging.abort();
        assert!(hanging.join().is_err());
        join_all(waiters);
        assert_eq!(place.get(), Some(&1));
    });
}

#[test]
fn an_initialiser_that_panics_lets_the_next_one_try() {
    at_each_procs(|| {
        let place = Arc::new(OnceLock::new());
        let attempts = Arc::new(AtomicUsize::new(0));
        let tasks: Vec<_> = (0..8)
            .map(|_| {
                let (place, attempts) = (place.clone(), attempts.clone());
                task::spawn(async move {
                    *place
                        .get_or_init_async(|| async {
                            let attempt = attempts.fetch_add(1, Ordering::Relaxed);
                            task::yield_now().await;
                            if attempt < 3 {
                                std::panic::resume_unwind(Box::new("an initializer panics"));
                            }
                            attempt
                        })
                        .await
                })
            })
            .collect();
        let results: Vec<_> = tasks.into_iter().map(|t| t.join()).collect();
        assert_eq!(results.iter().filter(|r| r.is_err()).count(), 3);
        assert!(results.iter().flatten().all(|n| *n == 3));
        assert_eq!(attempts.load(Ordering::Relaxed), 4);
    });
}

/// Waits and initializers are dropped at random moments. Exactly one initializer succeeds, and no
/// waiter is left behind.
#[test]
fn once_locks_survive_dropped_waits_and_initialisers() {
    at_each_procs(|| {
        for round in 0..100 {
            let place = Arc::new(OnceLock::new());
            let done = Arc::new(AtomicUsize::new(0));
            let handles: Vec<_> = (0..6)
                .map(|i| {
                    let (place, done) = (place.clone(), done.clone());
                    task::spawn(async move {
                        let mut random = SmallRng::seed_from_u64(round * 10 + i);
                        loop {
                            let (yields, done) = (random.random_range(0..4), &done);
                            let init = || async move {
                                for _ in 0..yields {
                                    task::yield_now().await;
                                }
                                done.fetch_add(1, Ordering::Relaxed);
                                7
                            };
                            let polls = i as u32 % 3;
                            let attempt = Box::pin(place.get_or_init_async(init));
                            if let Some(value) = GiveUp(attempt, polls).await {
                                assert_eq!(*value, 7);
                                return;
                            }
                            task::yield_now().await;
                        }
                    })
                })
                .collect();
            join_all(handles);
            assert_eq!(done.load(Ordering::Relaxed), 1);
        }
    });
}

/// A future was in the queue of a mutex, and its goroutine ran, when the runtime ended and the
/// mutex was unlocked: the mutex passed the future over, and the drop of the future waited for
/// ever.
#[test]
fn a_future_that_was_passed_over_at_the_end_of_its_runtime_can_be_dropped() {
    static STEP: AtomicU32 = AtomicU32::new(0);
    let reached = |step| move || STEP.load(Ordering::Acquire) >= step;
    let _watchdog = watchdog();
    let shared: &'static Mutex<()> = Box::leak(Box::new(Mutex::new(())));
    let held = shared.lock();
    let rt = trefoil::Runtime::builder().procs(1).build().unwrap();
    let waits = move || {
        let _here = trefoil::no_preempt();
        trefoil::block_on(async {
            let mut lock = Box::pin(shared.lock_async());
            std::future::poll_fn(|context| {
                assert!(lock.as_mut().poll(context).is_pending());
                Poll::Ready(())
            })
            .await;
            STEP.store(1, Ordering::Release);
            while STEP.load(Ordering::Acquire) < 2 {
                std::hint::spin_loop();
            }
            drop(lock);
            STEP.store(3, Ordering::Release);
        });
    };
    drop(rt.go(waits).unwrap());
    hold_until("the future waits", reached(1));
    let end = std::thread::spawn(move || drop(rt));
    std::thread::sleep(Duration::from_millis(30));
    drop(held);
    STEP.store(2, Ordering::Release);
    hold_until("the future is dropped", reached(3));
    end.join().unwrap();
    drop(shared.lock());
}
