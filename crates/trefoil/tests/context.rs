//! `trefoil::context`.

mod common;

use common::{MS, join_all, watchdog, yield_until};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use trefoil::chan::unbounded;
use trefoil::context::{Context, ContextError};
use trefoil::time::sleep;
use trefoil::{Runtime, go, select, yield_now};

const LONG: Duration = Duration::from_secs(60);

fn on_every(f: impl Fn() + Sync) {
    for procs in [1, 2, 4, 16] {
        Runtime::builder().procs(procs).build().unwrap().run(&f);
    }
}

/// Returns whether the context is not done.
fn is_open(ctx: &Context) -> bool {
    select! {
        recv(ctx.done()) -> _ => false,
        default => true,
    }
}

#[trefoil::test(virtual_time)]
fn background_is_never_done() {
    let ctx = Context::background();
    assert_eq!((ctx.err(), ctx.deadline()), (None, None));
    assert!(is_open(&ctx));
    assert!(ctx.done().recv_timeout(LONG).is_err());
    assert!(is_open(&ctx.with_value(1)));
}

/// Go: TestParentFinishesChild, TestChildFinishesFirst.
#[test]
fn cancel_reaches_children_but_not_parents() {
    let _w = watchdog();
    on_every(|| {
        let (top, cancel_top) = Context::background().with_cancel();
        let (left, cancel_left) = top.with_cancel();
        let right = top.with_value("x").with_timeout(LONG).0;
        let below = left.with_value(1).with_cancel().0;
        cancel_left.cancel();
        assert_eq!(below.err(), Some(ContextError::Canceled));
        assert!(below.done().recv().is_err() && !is_open(&left));
        assert!(is_open(&top) && is_open(&right));
        cancel_top.cancel();
        cancel_top.clone().cancel();
        assert_eq!(right.err(), Some(ContextError::Canceled));
        assert!(!is_open(&right));
        // A child of a cancelled context is done at once, for its parent's reason.
        let (late, _) = right.with_deadline(Instant::now());
        assert_eq!(late.err(), Some(ContextError::Canceled));
        assert!(!is_open(&late));
    });
}

#[test]
fn cancel_wakes_every_waiting_goroutine_and_thread() {
    let _w = watchdog();
    on_every(|| {
        let (ctx, cancel) = Context::background().with_cancel();
        let goroutines: Vec<_> = (0..100)
            .map(|i| {
                let ctx = if i % 2 == 0 { ctx.clone() } else { ctx.with_cancel().0 };
                go(move || {
                    select! {
                        recv(ctx.done()) -> v => assert!(v.is_err()),
                        after(LONG) => panic!("not cancelled"),
                    }
                    ctx.err()
                })
            })
            .collect();
        let thread = std::thread::spawn({
            let ctx = ctx.clone();
            move || (ctx.done().recv().is_err(), ctx.err())
        });
        sleep(MS);
        join_all((0..4).map(|_| {
            let cancel = cancel.clone();
            go(move || cancel.cancel())
        }));
        assert!(join_all(goroutines).iter().all(|e| *e == Some(ContextError::Canceled)));
        assert_eq!(thread.join().unwrap(), (true, Some(ContextError::Canceled)));
    });
}

#[trefoil::test(virtual_time)]
fn the_earliest_deadline_ends_a_context_and_the_first_reason_stays() {
    let start = Instant::now();
    let (ctx, cancel) = Context::background().with_timeout(5 * MS);
    let below = ctx.with_timeout(LONG).0;
    assert_eq!(ctx.deadline(), Some(start + 5 * MS));
    assert_eq!(below.deadline(), ctx.deadline(), "the earlier deadline counts");
    assert!(below.done().recv().is_err());
    assert_eq!(start.elapsed(), 5 * MS);
    assert_eq!(ctx.err(), Some(ContextError::DeadlineExceeded));
    assert_eq!(below.err(), Some(ContextError::DeadlineExceeded));
    cancel.cancel();
    assert_eq!(ctx.err(), Some(ContextError::DeadlineExceeded), "the first reason stays");

    // An earlier deadline below a later one; a timeout of zero and an endless one.
    let (late, _) = Context::background().with_timeout(LONG);
    let (early, _) = late.with_timeout(MS);
    assert!(early.done().recv().is_err() && is_open(&late));
    assert_eq!(start.elapsed(), 6 * MS);
    assert!(!is_open(&late.with_timeout(Duration::ZERO).0));
    let (never, cancel) = Context::background().with_timeout(Duration::MAX);
    assert_eq!(never.deadline(), None);
    cancel.cancel();
    assert_eq!(never.err(), Some(ContextError::Canceled));

    // Cancelled at the last moment before its deadline.
    let (ctx, cancel) = Context::background().with_timeout(10 * MS);
    sleep(10 * MS - Duration::from_nanos(1));
    assert!(is_open(&ctx));
    cancel.cancel();
    sleep(MS);
    assert_eq!(ctx.err(), Some(ContextError::Canceled));
}

#[test]
fn a_deadline_ends_a_context_in_real_time() {
    let _w = watchdog();
    on_every(|| {
        let start = Instant::now();
        let (ctx, _cancel) = Context::background().with_timeout(5 * MS);
        assert!(ctx.with_timeout(LONG).0.done().recv().is_err());
        assert!(start.elapsed() >= 5 * MS);
        assert_eq!(ctx.err(), Some(ContextError::DeadlineExceeded));
    });
}

#[test]
fn contexts_with_deadlines_may_be_dropped_and_dropping_cancel_does_not_cancel() {
    let _w = watchdog();
    on_every(|| {
        for _ in 0..1000 {
            drop(Context::background().with_timeout(LONG));
        }
        let ctx = Context::background().with_cancel().0;
        assert!(is_open(&ctx));
    });
}

#[test]
fn values_are_found_by_type_and_the_last_one_wins() {
    let _w = watchdog();
    #[derive(Debug, PartialEq)]
    struct User(&'static str);
    on_every(|| {
        let ctx = Context::background().with_value(User("ada")).with_value(7u32);
        let (below, cancel) = ctx.with_cancel();
        let below = below.with_value(User("bob"));
        cancel.cancel();
        assert_eq!(below.value(), Some(&User("bob")));
        assert_eq!(below.value::<u32>(), Some(&7));
        assert_eq!(ctx.value(), Some(&User("ada")));
        assert_eq!(ctx.value::<u64>(), None);
        assert!(below.err().is_some() && ctx.err().is_none());
    });
}

/// Recursion would overflow the stack.
#[test]
fn twenty_thousand_nested_contexts_are_cancelled_and_dropped() {
    let _w = watchdog();
    Runtime::builder().procs(2).build().unwrap().run(|| {
        go(|| {
            let (top, cancel) = Context::background().with_cancel();
            let mut ctx = top.clone();
            for i in 0..20_000 {
                ctx = ctx.with_value(i).with_cancel().0;
            }
            assert!(is_open(&ctx));
            cancel.cancel();
            assert!(!is_open(&ctx));
            drop(ctx);
            // The same without a cancel.
            let mut ctx = Context::background();
            for i in 0..20_000 {
                ctx = ctx.with_value(i).with_cancel().0;
            }
        })
        .join()
        .unwrap();
    });
}

/// Children are created while a cancel and a deadline race.
#[test]
fn a_child_is_done_for_the_same_reason_as_its_parent() {
    let _w = watchdog();
    on_every(|| {
        for round in 0..200 {
            let limit = Duration::from_micros(round);
            let (ctx, cancel) = Context::background().with_timeout(limit);
            let done = Arc::new(AtomicUsize::new(0));
            let children: Vec<_> = (0..4)
                .map(|i| {
                    let (ctx, done) = (ctx.clone(), done.clone());
                    go(move || {
                        let (child, _cancel) = ctx.with_timeout(LONG / (i + 1));
                        drop(ctx.with_cancel());
                        assert!(child.done().recv().is_err());
                        done.fetch_add(1, SeqCst);
                        (ctx.err().unwrap(), child.err().unwrap())
                    })
                })
                .collect();
            if round % 2 == 0 {
                sleep(limit / 2);
                cancel.cancel();
            }
            for (above, below) in join_all(children) {
                assert_eq!(above, below);
            }
            assert_eq!(done.load(SeqCst), 4);
        }
    });
}

/// Go: TestCause.
#[test]
fn a_cause_is_that_of_the_context_through_which_it_was_cancelled() {
    let _w = watchdog();
    let cause = |ctx: &Context| ctx.cause().map(|cause| cause.to_string());
    on_every(|| {
        let (top, cancel_top) = Context::background().with_cancel_cause();
        let (mid, cancel_mid) = top.with_cancel_cause();
        let below = mid.with_timeout_cause(LONG, "too slow").0.with_value(1);
        assert_eq!((cause(&top), cause(&below)), (None, None));
        cancel_mid.cancel("first");
        cancel_mid.cancel("second");
        cancel_top.clone().cancel(std::io::Error::other("third"));
        assert_eq!(cause(&top).as_deref(), Some("third"));
        assert_eq!(cause(&mid).as_deref(), Some("first"));
        assert_eq!(cause(&below).as_deref(), Some("first"));
        assert_eq!(below.err(), Some(ContextError::Canceled));
        let late = below.with_deadline_cause(Instant::now(), "late").0;
        assert_eq!(cause(&late).as_deref(), Some("first"), "it was cancelled first");

        // The cause of one context is passed on to another.
        let (one, cancel_one) = Context::background().with_cancel_cause();
        let (other, cancel_other) = Context::background().with_cancel_cause();
        cancel_one.cancel(io::Error::from(io::ErrorKind::BrokenPipe));
        cancel_other.cancel(one.cause().unwrap());
        let passed_on = other.cause().unwrap();
        let error: &io::Error = passed_on.downcast_ref().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);

        let (ctx, cancel) = Context::background().with_timeout_cause(MS, "too slow");
        let below = ctx.with_cancel().0;
        assert!(below.done().recv().is_err());
        cancel.cancel();
        assert_eq!(cause(&below).as_deref(), Some("too slow"));
        assert_eq!(ctx.err(), Some(ContextError::DeadlineExceeded));
        // A cancel without a cause, and a deadline without one.
        let (ctx, cancel) = Context::background().with_timeout_cause(LONG, "too slow");
        cancel.cancel();
        assert_eq!(cause(&ctx).as_deref(), Some("context canceled"));
        let ctx = Context::background().with_deadline(Instant::now()).0;
        assert_eq!(cause(&ctx).as_deref(), Some("context deadline exceeded"));
        assert_eq!(cause(&Context::background()), None);
    });
}

#[test]
fn a_context_without_cancel_keeps_only_the_values() {
    let _w = watchdog();
    on_every(|| {
        let (ctx, cancel) = Context::background().with_value(7).with_timeout(LONG);
        let free = ctx.without_cancel();
        cancel.cancel();
        assert_eq!((free.err(), free.deadline(), free.value()), (None, None, Some(&7)));
        assert!(free.cause().is_none() && is_open(&free));
        let (below, cancel) = free.with_cancel();
        assert!(is_open(&below));
        cancel.cancel();
        assert!(!is_open(&below));
    });
}

/// Go: TestAfterFuncCalledAfterCancel, TestAfterFuncCalledAfterTimeout,
/// TestAfterFuncCalledImmediately, TestAfterFuncNotCalledAfterStop.
#[trefoil::test(virtual_time)]
fn after_func_is_called_when_the_context_is_done_unless_it_was_stopped() {
    let (tx, rx) = unbounded();
    let tell = |what: &'static str| {
        let tx = tx.clone();
        move || tx.send(what).unwrap()
    };
    let (ctx, cancel) = Context::background().with_cancel();
    let called = ctx.after_func({
        let (ctx, tell) = (ctx.clone(), tell("called"));
        move || {
            assert!(ctx.err().is_some(), "the context is done when its function runs");
            tell();
        }
    });
    let stopped = ctx.with_cancel().0.with_value(1).after_func(tell("stopped"));
    assert!(stopped.stop() && !stopped.stop());
    cancel.cancel();
    assert_eq!(rx.recv(), Ok("called"));
    assert!(!called.stop() && !stopped.stop());
    let at_once = ctx.after_func(tell("at once"));
    assert_eq!(rx.recv(), Ok("at once"));
    assert!(!at_once.stop());
    let start = Instant::now();
    drop(Context::background().with_timeout(MS).0.after_func(tell("timed out")));
    assert_eq!((rx.recv(), start.elapsed()), (Ok("timed out"), MS));
    let never = Context::background().after_func(tell("never"));
    assert!(never.stop() && !never.stop());
    assert!(rx.recv_timeout(LONG).unwrap_err().is_timeout());
}

#[trefoil::test(virtual_time)]
fn after_func_outlives_its_handle_and_its_context() {
    let (tx, rx) = unbounded();
    let tell = |what: &'static str| {
        let tx = tx.clone();
        move || tx.send(what).unwrap()
    };
    // Through two contexts that are gone, to the one that is cancelled.
    let (top, cancel) = Context::background().with_cancel();
    drop(top.with_cancel().0.with_cancel().0.after_func(tell("above")));
    // A context with a deadline that is gone: its deadline counts, and the context above it.
    let stop = top.with_timeout(LONG).0.after_func(tell("above the deadline"));
    let stopped = top.with_timeout(LONG).0.after_func(tell("stopped"));
    let start = Instant::now();
    drop(top.with_timeout(5 * MS).0.after_func(tell("deadline")));
    assert_eq!((rx.recv(), start.elapsed()), (Ok("deadline"), 5 * MS));
    assert!(stopped.stop());
    cancel.cancel();
    let mut called = [rx.recv().unwrap(), rx.recv().unwrap()];
    called.sort_unstable();
    assert_eq!(called, ["above", "above the deadline"]);
    assert!(!stop.stop());
    // No context is left that could call them: they are dropped.
    let (ctx, cancel) = Context::background().with_cancel();
    let handle = ctx.with_cancel().0.after_func(tell("never"));
    drop((ctx, cancel, handle));
    drop(tx);
    assert!(rx.recv().is_err(), "a function was kept or called");
}

/// Functions that are registered and stopped leave nothing in a context that lives on.
#[test]
fn stopped_functions_are_dropped_at_once() {
    let _w = watchdog();
    on_every(|| {
        let owned = Arc::new(());
        let (ctx, _cancel) = Context::background().with_cancel();
        for _ in 0..100 {
            let owned = owned.clone();
            assert!(ctx.after_func(move || drop(owned)).stop());
        }
        assert_eq!(Arc::strong_count(&owned), 1);
    });
}

/// Calls `f(round, 0)` and `f(round, 1)` for each round, at the same time if there are two Ps.
/// Returns the number of calls that return false.
fn rounds_of_two(rounds: usize, f: impl Fn(usize, usize) -> bool + Send + Sync + 'static) -> usize {
    let shared = Arc::new((f, AtomicUsize::new(0)));
    let both = [0, 1].map(|which| {
        let shared = shared.clone();
        go(move || {
            let (f, arrived) = &*shared;
            let run = |round: &usize| {
                arrived.fetch_add(1, SeqCst);
                while arrived.load(SeqCst) < 2 * round + 2 {
                    (0..100).for_each(|_| std::hint::spin_loop());
                    yield_now();
                }
                !f(*round, which)
            };
            (0..rounds).filter(run).count()
        })
    });
    both.map(|goroutine| goroutine.join().unwrap()).iter().sum()
}

/// The number of rounds of a race. Fewer on one CPU: there each round takes the kernel's time
/// slices, and two goroutines never run at the same time. Fewer without optimisation.
fn rounds() -> usize {
    if std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() == 1) {
        500
    } else {
        common::rounds(1_000, 10_000)
    }
}

/// Races two goroutines, number 0 and number 1, for a fresh context in each round. Each returns
/// whether it saw what it should. On one and two Ps: with more Ps than cores the two would only
/// wait for each other.
fn race_for_contexts(
    wrong: &str,
    run: impl Fn(&Context, &trefoil::context::Cancel, usize, usize) -> bool
    + Copy
    + Send
    + Sync
    + 'static,
) {
    for procs in [1, 2] {
        Runtime::builder().procs(procs).build().unwrap().run(|| {
            let contexts: Vec<_> =
                (0..rounds()).map(|_| Context::background().with_cancel()).collect();
            let count = rounds_of_two(contexts.len(), move |round, which| {
                let (ctx, cancel) = &contexts[round];
                run(ctx, cancel, round, which)
            });
            assert_eq!(count, 0, "{wrong}");
        });
    }
}

#[test]
fn err_is_set_exactly_when_done_is_closed() {
    let _w = watchdog();
    race_for_contexts(
        "`err` was set before `done` was closed, or `done` was closed without an error",
        |ctx, cancel, round, which| {
            if which == 0 {
                cancel.cancel();
                return true;
            }
            loop {
                match round % 2 {
                    0 if ctx.err().is_some() => return ctx.done().is_closed(),
                    1 if ctx.done().is_closed() => return ctx.err().is_some(),
                    _ => yield_now(),
                }
            }
        },
    );
}

#[test]
fn a_context_is_done_when_any_cancel_returns() {
    let _w = watchdog();
    race_for_contexts("a context was not done after `cancel`", |ctx, cancel, _, _| {
        cancel.cancel();
        ctx.err() == Some(ContextError::Canceled) && ctx.done().is_closed()
    });
}

#[test]
fn a_child_is_not_done_before_its_parent() {
    let _w = watchdog();
    race_for_contexts("a child was done before its parent", |ctx, cancel, _, which| {
        if which == 0 {
            cancel.cancel();
            return true;
        }
        loop {
            let (child, _) = ctx.with_cancel();
            if child.err().is_some() {
                return ctx.err().is_some() && ctx.done().is_closed();
            }
            yield_now();
        }
    });
}

/// `stop` is in time, or the function is called: never both, never neither. The context is
/// cancelled, or its last handle is dropped meanwhile.
#[test]
fn after_func_beside_cancel_is_called_exactly_if_stop_is_late() {
    let _w = watchdog();
    for procs in [1, 2] {
        Runtime::builder().procs(procs).build().unwrap().run(|| {
            let calls = Arc::new(AtomicUsize::new(0));
            let late = Arc::new(AtomicUsize::new(0));
            let races: Vec<_> = (0..rounds())
                .map(|round| {
                    let (top, cancel) = Context::background().with_cancel();
                    let ctx = if round % 2 == 0 { top } else { top.with_timeout(LONG).0 };
                    let calls = calls.clone();
                    let func = ctx.after_func(move || _ = calls.fetch_add(1, SeqCst));
                    (Mutex::new(Some(ctx)), cancel, func)
                })
                .collect();
            let stops = late.clone();
            let rounds = races.len();
            rounds_of_two(rounds, move |round, which| {
                let (ctx, cancel, func) = &races[round];
                match which {
                    0 => cancel.cancel(),
                    _ if round % 3 == 0 => drop(ctx.lock().unwrap().take()),
                    _ => _ = stops.fetch_add(usize::from(func.stop()), SeqCst),
                }
                true
            });
            let stopped = late.load(SeqCst);
            let called = || calls.load(SeqCst) + stopped == rounds;
            yield_until("the functions that were not stopped", called);
            sleep(MS);
            assert!(called(), "{calls:?} calls, {stopped} stopped of {rounds}");
        });
    }
}
