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
    let start = Instant::now();
    let tasks: Vec<_> = (0..64)
        .map(|_| task::spawn(async { std::thread::sleep(Duration::from_millis(20)) }))
        .collect();
    tasks.into_iter().for_each(|t| t.join().unwrap());
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
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
