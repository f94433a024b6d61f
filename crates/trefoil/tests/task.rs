//! Tasks: futures on the scheduler, beside goroutines.

mod common;

use std::future::{Future, pending, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};
use trefoil::task::{self, JoinSet};

#[trefoil::test]
fn a_thousand_tasks_return_their_outputs() {
    let tasks: Vec<_> = (0..1000u64).map(|i| task::spawn(async move { i })).collect();
    let sum: u64 = tasks.into_iter().map(|t| t.join().unwrap()).sum();
    assert_eq!(sum, 499_500);
}

#[test]
fn a_plain_thread_spawns_and_joins_a_task() {
    assert_eq!(task::spawn(async { 7 }).join().unwrap(), 7);
}

#[trefoil::test]
fn a_task_awaits_tasks_and_goroutines() {
    let task = task::spawn(async {
        let inner = task::spawn(async { 1 }).await.unwrap();
        let goroutine = trefoil::go(|| 2).await.unwrap();
        inner + goroutine
    });
    assert_eq!(task.join().unwrap(), 3);
}

#[trefoil::test]
fn a_task_yields_to_other_tasks() {
    let order = Arc::new(Mutex::new(Vec::new()));
    let tasks: Vec<_> = (0..3)
        .map(|n| {
            let order = order.clone();
            task::spawn(async move {
                for round in 0..3 {
                    order.lock().unwrap().push((round, n));
                    task::yield_now().await;
                }
            })
        })
        .collect();
    tasks.into_iter().for_each(|t| t.join().unwrap());
    assert_eq!(order.lock().unwrap().len(), 9);
}

#[trefoil::test]
fn an_output_larger_than_a_block_is_boxed() {
    let task = task::spawn(async {
        let large = [7u8; 5000];
        task::yield_now().await;
        large
    });
    assert_eq!(task.join().unwrap(), [7; 5000]);
}

#[trefoil::test]
fn a_panic_comes_out_of_join_and_of_await() {
    let payload = task::spawn(async { panic!("a") }).join().unwrap_err();
    assert_eq!(payload.downcast_ref(), Some(&"a"));
    let error = trefoil::block_on(task::spawn(async { panic!("b") })).unwrap_err();
    assert!(error.is_panic());
    assert!(error.to_string().ends_with("panicked: b"), "{error}");
}

struct SetOnDrop(Arc<AtomicBool>);

impl Drop for SetOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[trefoil::test]
fn abort_drops_the_future_of_a_task_that_waits() {
    let dropped = Arc::new(AtomicBool::new(false));
    let guard = SetOnDrop(dropped.clone());
    let task = task::spawn(async move {
        let _guard = guard;
        pending::<()>().await;
    });
    trefoil::yield_now();
    task.abort();
    let error = trefoil::block_on(task).unwrap_err();
    assert!(error.is_cancelled());
    assert!(dropped.load(Ordering::SeqCst));
}

#[trefoil::test]
fn abort_after_the_end_keeps_the_output() {
    let task = task::spawn(async { 5 });
    while !task.is_finished() {
        trefoil::yield_now();
    }
    task.abort();
    assert_eq!(task.join().unwrap(), 5);
}

#[trefoil::test]
fn a_detached_task_continues() {
    let (tx, rx) = trefoil::chan::bounded(1);
    drop(task::spawn(async move {
        task::yield_now().await;
        tx.send(1).unwrap();
    }));
    assert_eq!(rx.recv(), Ok(1));
}

#[trefoil::test]
fn polls_that_block_stall_no_other_task() {
    const TASKS: usize = 64;
    let _watchdog = common::watchdog();
    let inside = Arc::new(AtomicUsize::new(0));
    let tasks: Vec<_> = (0..TASKS)
        .map(|_| {
            let inside = inside.clone();
            task::spawn(async move {
                inside.fetch_add(1, Ordering::SeqCst);
                // No poll ends before all tasks are in one.
                while inside.load(Ordering::SeqCst) < TASKS {
                    std::thread::sleep(Duration::from_millis(20));
                }
            })
        })
        .collect();
    tasks.into_iter().for_each(|t| t.join().unwrap());
}

#[trefoil::test]
fn polls_that_compute_stall_no_other_task() {
    let stop = Arc::new(AtomicBool::new(false));
    let hogs: Vec<_> = (0..2 * trefoil::procs())
        .map(|_| {
            let stop = stop.clone();
            task::spawn(async move { while !stop.load(Ordering::Relaxed) {} })
        })
        .collect();
    // Without preemption this task would never run.
    task::spawn(async { task::yield_now().await }).join().unwrap();
    stop.store(true, Ordering::Relaxed);
    hogs.into_iter().for_each(|t| t.join().unwrap());
}

#[trefoil::test]
fn a_waker_may_be_called_from_a_plain_thread() {
    let slot: Arc<Mutex<Option<Waker>>> = Arc::default();
    let done = Arc::new(AtomicBool::new(false));
    let task = {
        let (slot, done) = (slot.clone(), done.clone());
        task::spawn(poll_fn(move |context| {
            if done.load(Ordering::SeqCst) {
                return Poll::Ready(9);
            }
            *slot.lock().unwrap() = Some(context.waker().clone());
            Poll::Pending
        }))
    };
    let thread = std::thread::spawn(move || {
        loop {
            if let Some(waker) = slot.lock().unwrap().take() {
                done.store(true, Ordering::SeqCst);
                waker.wake();
                return;
            }
            std::thread::yield_now();
        }
    });
    assert_eq!(task.join().unwrap(), 9);
    thread.join().unwrap();
}

#[trefoil::test]
fn a_waker_outlives_its_task_and_its_block_is_reused() {
    let slot: Arc<Mutex<Option<Waker>>> = Arc::default();
    let kept = slot.clone();
    task::spawn(poll_fn(move |context| {
        *kept.lock().unwrap() = Some(context.waker().clone());
        Poll::Ready(())
    }))
    .join()
    .unwrap();
    let stale = slot.lock().unwrap().take().unwrap();
    let polls = Arc::new(AtomicUsize::new(0));
    let counted = polls.clone();
    let task = task::spawn(poll_fn(move |_| {
        counted.fetch_add(1, Ordering::SeqCst);
        Poll::<()>::Pending
    }));
    while polls.load(Ordering::SeqCst) == 0 {
        trefoil::yield_now();
    }
    for _ in 0..10 {
        stale.wake_by_ref();
        trefoil::yield_now();
    }
    assert_eq!(polls.load(Ordering::SeqCst), 1, "the stale waker woke another task");
    task.abort();
    assert!(task.join().is_err());
}

#[trefoil::test]
fn a_handle_that_was_polled_may_be_dropped_or_joined() {
    for join in [false, true] {
        let (tx, rx) = trefoil::chan::bounded::<()>(0);
        let mut handle = trefoil::go(move || {
            let _ = rx.recv();
            String::from("result")
        });
        let mut context = Context::from_waker(Waker::noop());
        assert!(Pin::new(&mut handle).poll(&mut context).is_pending());
        drop(tx);
        if join {
            assert_eq!(handle.join().unwrap(), "result");
        }
    }
}

#[trefoil::test]
fn join_set_returns_outputs_panics_and_aborts() {
    let mut set = JoinSet::new();
    for i in 0..100 {
        set.spawn(async move {
            task::yield_now().await;
            i
        });
    }
    set.spawn(async { panic!("one") });
    set.spawn(async {
        pending::<()>().await;
        0
    })
    .abort();
    let (mut sum, mut panics, mut aborts) = (0, 0, 0);
    trefoil::block_on(async {
        while let Some(output) = set.join_next().await {
            match output {
                Ok(i) => sum += i,
                Err(e) if e.is_panic() => panics += 1,
                Err(_) => aborts += 1,
            }
        }
    });
    assert_eq!((sum, panics, aborts), (4950, 1, 1));
    assert!(set.is_empty());
}

#[test]
fn dropping_a_runtime_drops_the_futures_of_its_tasks() {
    let dropped = Arc::new(AtomicBool::new(false));
    let runtime = trefoil::Runtime::builder().procs(2).build().unwrap();
    let guard = SetOnDrop(dropped.clone());
    runtime.run(move || {
        task::spawn(async move {
            let _guard = guard;
            pending::<()>().await;
        });
        trefoil::yield_now();
    });
    drop(runtime);
    assert!(dropped.load(Ordering::SeqCst));
}

#[trefoil::test]
fn a_dump_lists_tasks_that_wait_and_tasks_that_block() {
    let (tx, rx) = trefoil::chan::bounded::<()>(0);
    let waits = task::Builder::new().name("waits").spawn(pending::<()>()).unwrap();
    let blocks = task::Builder::new().name("blocks").spawn(async move { rx.recv() }).unwrap();
    let wanted = |text: &str| {
        text.contains(&format!("task {} \"waits\" [future]:", waits.id()))
            && text.contains(&format!("task {} \"blocks\" [chan receive, polled by", blocks.id()))
    };
    let start = Instant::now();
    while !wanted(&trefoil::debug::dump()) {
        assert!(start.elapsed() < Duration::from_secs(10), "{}", trefoil::debug::dump());
        trefoil::time::sleep(Duration::from_millis(1));
    }
    assert!(trefoil::debug::dump().contains("tests/task.rs"));
    drop(tx);
    assert!(blocks.join().unwrap().is_err());
    waits.abort();
    assert!(waits.join().is_err());
}

#[trefoil::test]
fn carriers_are_not_counted_as_goroutines() {
    let before = trefoil::num_goroutines();
    let (tx, rx) = trefoil::chan::bounded::<()>(0);
    let tasks: Vec<_> = (0..10)
        .map(|_| {
            let rx = rx.clone();
            task::spawn(async move { rx.recv() })
        })
        .collect();
    let start = Instant::now();
    while trefoil::debug::stats().carriers < 10 && start.elapsed() < Duration::from_secs(10) {
        trefoil::yield_now();
    }
    let stats = trefoil::debug::stats();
    assert!(stats.carriers >= 10 && stats.tasks >= 10, "{stats:?}");
    assert_eq!(trefoil::num_goroutines(), before);
    drop(tx);
    tasks.into_iter().for_each(|t| assert!(t.join().unwrap().is_err()));
}

/// A task is preempted while it holds a lock, and thousands of polls need the lock. Without a bound
/// each of them would get a stack.
#[test]
fn polls_that_wait_for_a_preempted_lock_holder_get_few_carriers() {
    let runtime = trefoil::Runtime::builder().procs(1).build().unwrap();
    let started = runtime.run(|| {
        let lock = Arc::new(Mutex::new(()));
        for _ in 0..5 {
            let held = Arc::new(AtomicBool::new(false));
            let hog = {
                let (lock, held) = (lock.clone(), held.clone());
                task::spawn(async move {
                    let _guard = lock.lock().unwrap();
                    held.store(true, Ordering::SeqCst);
                    let start = Instant::now();
                    while start.elapsed() < Duration::from_millis(30) {}
                })
            };
            while !held.load(Ordering::SeqCst) {
                trefoil::yield_now();
            }
            let others: Vec<_> = (0..2000)
                .map(|_| {
                    let lock = lock.clone();
                    task::spawn(async move { drop(lock.lock().unwrap()) })
                })
                .collect();
            hog.join().unwrap();
            others.into_iter().for_each(|t| t.join().unwrap());
        }
        trefoil::debug::stats().carriers_started
    });
    assert!(started < 5 * 150, "{started} carriers");
}

/// Spawns, wakes, aborts, joins and drops at random moments, from goroutines and plain threads.
#[test]
fn torture_of_wakes_aborts_and_drops() {
    struct Shared {
        wakers: Mutex<Vec<Waker>>,
        drops: AtomicUsize,
    }
    struct Guard(Arc<Shared>);
    impl Drop for Guard {
        fn drop(&mut self) {
            self.0.drops.fetch_add(1, Ordering::SeqCst);
        }
    }
    let stop = Arc::new(AtomicBool::new(false));
    let shared = Arc::new(Shared { wakers: Mutex::default(), drops: AtomicUsize::new(0) });
    let runtime = trefoil::Runtime::builder().procs(4).build().unwrap();
    let wakers: Vec<_> = (0..2)
        .map(|_| {
            let (shared, stop) = (shared.clone(), stop.clone());
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let waker = shared.wakers.lock().unwrap().pop();
                    match waker {
                        Some(waker) => waker.wake(),
                        None => std::thread::yield_now(),
                    }
                }
            })
        })
        .collect();
    let spawned = {
        let shared = shared.clone();
        runtime.run(move || {
            let start = Instant::now();
            let (mut spawned, mut seed) = (0, 1u64);
            while start.elapsed() < Duration::from_millis(1500) {
                let mut tasks = Vec::new();
                for _ in 0..50 {
                    seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let polls = (seed >> 33) % 5;
                    let guard = Guard(shared.clone());
                    let mut done = 0;
                    let task = poll_fn(move |context| {
                        done += 1;
                        if done > polls {
                            return Poll::Ready(done);
                        }
                        guard.0.wakers.lock().unwrap().push(context.waker().clone());
                        if done % 2 == 0 {
                            context.waker().wake_by_ref();
                        }
                        Poll::Pending
                    });
                    spawned += 1;
                    tasks.push((task::spawn(task), polls, seed >> 40));
                }
                for (task, polls, choice) in tasks {
                    match choice % 4 {
                        0 => assert_eq!(task.join().unwrap(), polls + 1),
                        1 => drop(task),
                        2 => {
                            task.abort();
                            let _ = task.join();
                        }
                        _ => {
                            let abort = task.abort_handle();
                            trefoil::go(move || abort.abort());
                            let _ = trefoil::block_on(task);
                        }
                    }
                }
            }
            spawned
        })
    };
    // The end of the runtime drops the futures that are left.
    drop(runtime);
    stop.store(true, Ordering::Relaxed);
    wakers.into_iter().for_each(|t| t.join().unwrap());
    assert_eq!(shared.drops.load(Ordering::SeqCst), spawned);
}

#[trefoil::test]
fn local_set_polls_futures_that_are_not_send() {
    use std::rc::Rc;
    let set = task::LocalSet::new();
    let count = Rc::new(std::cell::Cell::new(0));
    for _ in 0..100 {
        let count = count.clone();
        set.spawn_local(async move {
            for _ in 0..10 {
                task::yield_now().await;
                count.set(count.get() + 1);
            }
        });
    }
    let inner = count.clone();
    let seen = set.block_on(async move {
        task::spawn_local(async move { inner.set(inner.get() + 1) }).await.unwrap();
        task::spawn(async { 5 }).await.unwrap()
    });
    assert_eq!(seen, 5);
    trefoil::block_on(set);
    assert_eq!(count.get(), 1001);
    assert_eq!(Rc::strong_count(&count), 1);
}

#[trefoil::test]
fn dropping_a_local_set_drops_its_futures_and_aborts_its_handles() {
    let dropped = Arc::new(AtomicBool::new(false));
    let set = task::LocalSet::new();
    let guard = SetOnDrop(dropped.clone());
    let handle = set.spawn_local(async move {
        let _guard = guard;
        pending::<()>().await;
    });
    set.block_on(task::yield_now());
    drop(set);
    assert!(dropped.load(Ordering::SeqCst));
    assert!(trefoil::block_on(handle).unwrap_err().is_cancelled());
}

#[trefoil::test]
fn a_local_task_is_woken_from_other_goroutines() {
    let set = task::LocalSet::new();
    for i in 0..200 {
        let sum = set.block_on(async move {
            let a = task::spawn_local(async move { trefoil::go(move || i).await.unwrap() });
            let b = task::spawn_local(async move { task::spawn(async move { i }).await.unwrap() });
            a.await.unwrap() + b.await.unwrap()
        });
        assert_eq!(sum, 2 * i);
    }
}

#[trefoil::test]
#[should_panic(expected = "spawn_local was called outside of a LocalSet")]
fn spawn_local_outside_of_a_set_says_what_to_do() {
    task::spawn_local(async {});
}

/// Many polls block, and as many compute for ever as there are Ps: one more task still runs.
#[test]
fn a_task_runs_beside_many_blocked_and_endless_polls() {
    let runtime = trefoil::Runtime::builder().procs(2).build().unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    runtime.run(|| {
        let sleepers: Vec<_> = (0..100)
            .map(|_| {
                let stop = stop.clone();
                task::spawn(async move {
                    while !stop.load(Ordering::Relaxed) {
                        std::thread::sleep(Duration::from_millis(5));
                    }
                })
            })
            .collect();
        let hogs: Vec<_> = (0..2)
            .map(|_| {
                let stop = stop.clone();
                task::spawn(async move { while !stop.load(Ordering::Relaxed) {} })
            })
            .collect();
        trefoil::time::sleep(Duration::from_millis(30));
        assert_eq!(task::spawn(async { 5 }).join().unwrap(), 5);
        stop.store(true, Ordering::Relaxed);
        sleepers.into_iter().chain(hogs).for_each(|t| t.join().unwrap());
    });
}

#[trefoil::test]
fn a_local_set_may_be_polled_inside_of_its_own_task() {
    let set = std::rc::Rc::new(task::LocalSet::new());
    let (tx, rx) = trefoil::chan::bounded(0);
    let outer = set.clone();
    set.spawn_local(async move { outer.block_on(async { task::yield_now().await }) });
    trefoil::go(move || {
        trefoil::time::sleep(Duration::from_millis(20));
        tx.send(7).unwrap();
    });
    let waits = set.spawn_local(async move { rx.recv_async().await.unwrap() });
    assert_eq!(set.block_on(waits).unwrap(), 7);
}

/// A goroutine waits for a lock in `block_on`, and its runtime ends: the lock goes to the next
/// waiter.
#[test]
fn a_lock_is_not_handed_to_a_goroutine_that_never_runs_again() {
    use trefoil::sync::MutexExt as _;
    static LOCK: trefoil::sync::Mutex<()> = trefoil::sync::Mutex::new(());
    let held = LOCK.lock();
    let runtime = trefoil::Runtime::builder().procs(1).build().unwrap();
    runtime.run(|| {
        trefoil::go(|| trefoil::block_on(async { drop(LOCK.lock_async().await) }));
        trefoil::time::sleep(Duration::from_millis(20));
    });
    drop(runtime);
    let (tx, rx) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        drop(LOCK.lock());
        tx.send(()).unwrap();
    });
    std::thread::sleep(Duration::from_millis(50));
    drop(held);
    rx.recv_timeout(Duration::from_secs(20)).expect("the lock went to an orphaned goroutine");
}

/// Tasks that are spawned while their runtime ends are dropped, too.
#[test]
fn the_end_of_a_runtime_drops_tasks_that_are_spawned_meanwhile() {
    for _ in 0..100 {
        let (spawned, dropped) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        struct Count(Arc<AtomicUsize>);
        impl Drop for Count {
            fn drop(&mut self) {
                self.0.fetch_add(1, Ordering::SeqCst);
            }
        }
        let runtime = trefoil::Runtime::builder().procs(2).build().unwrap();
        let counts = (spawned.clone(), dropped.clone());
        runtime.run(move || {
            let (spawned, dropped) = counts;
            task::spawn(async move {
                loop {
                    {
                        // What is preempted at the end of the runtime does not go on, and would
                        // have been counted without having been spawned.
                        let _together = trefoil::no_preempt();
                        let guard = Count(dropped.clone());
                        spawned.fetch_add(1, Ordering::SeqCst);
                        task::spawn(async move {
                            let _guard = guard;
                            pending::<()>().await;
                        });
                    }
                    task::yield_now().await;
                }
            });
        });
        drop(runtime);
        assert_eq!(spawned.load(Ordering::SeqCst), dropped.load(Ordering::SeqCst));
    }
}
