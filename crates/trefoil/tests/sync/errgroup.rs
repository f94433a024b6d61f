//! `ErrGroup`.

use super::common::{MS, watchdog};
use super::{on_every, panic_text};
use std::error::Error;
use std::fmt::{self, Display, Formatter};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};
use trefoil::chan::bounded;
use trefoil::context::{Context, ContextError};
use trefoil::sync::{ErrGroup, Semaphore};
use trefoil::time::sleep;
use trefoil::yield_now;

#[trefoil::test(virtual_time)]
fn wait_returns_the_first_error_of_the_group() {
    let group = ErrGroup::new();
    group.go(|| Ok(()));
    assert_eq!(group.wait(), Ok(()));
    for errors in [[(MS, "first"), (2 * MS, "second")], [(2 * MS, "second"), (MS, "first")]] {
        let start = Instant::now();
        for (after, error) in errors {
            group.go(move || {
                sleep(after);
                Err(error)
            });
        }
        assert_eq!(group.wait(), Err("first"));
        assert_eq!(start.elapsed(), 2 * MS, "it waits for all");
    }
    // `wait` takes the error, and the group can be used again; a clone is the same group.
    assert_eq!(group.wait(), Ok(()));
    group.clone().go(|| Err("again"));
    assert_eq!(group.wait(), Err("again"));
}

#[test]
fn set_limit_bounds_the_goroutines_of_a_group() {
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
fn wait_panics_if_a_goroutine_of_the_group_panicked() {
    let _w = watchdog();
    on_every(|| {
        let group = ErrGroup::<()>::new();
        group.set_limit(1);
        group.go(|| panic!("on purpose"));
        group.go(|| Ok(()));
        assert!(
            panic_text(|| assert!(group.wait().is_ok()))
                .contains("a goroutine of the group panicked")
        );
        assert_eq!(group.wait(), Ok(()));
    });
}

/// Go: errgroup's WithContext.
#[test]
fn the_first_error_and_the_end_of_wait_cancel_the_groups_context() {
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

/// An error of a group, which is also a cause.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Failed(u32);

impl Display for Failed {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "number {} failed", self.0)
    }
}

impl Error for Failed {}

/// Returns the group's error that is the cause of the context's end; None if it has no such cause.
fn failed(ctx: &Context) -> Option<Failed> {
    let cause = ctx.cause().expect("the context is done");
    assert_eq!(ctx.err(), Some(ContextError::Canceled));
    let failed = cause.downcast_ref::<Failed>().cloned();
    if failed.is_none() {
        assert_eq!(cause.downcast_ref(), Some(&ContextError::Canceled));
    }
    failed
}

#[test]
fn the_first_error_is_the_cause_of_the_groups_context_and_those_below() {
    let _w = watchdog();
    on_every(|| {
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = calls.clone();
        let clone = move |e: &Failed| {
            counted.fetch_add(1, SeqCst);
            e.clone()
        };
        let root = Context::background();
        let (group, ctx) = ErrGroup::with_context_cause(&root, clone);
        let (below, _cancel) = ctx.with_cancel();
        let beside = below.without_cancel();
        for i in 0..4 {
            let below = below.clone();
            group.go(move || {
                if i != 2 {
                    assert!(below.done().recv().is_err());
                    assert_eq!(failed(&below), Some(Failed(2)));
                }
                Err(Failed(i))
            });
        }
        assert_eq!(group.wait(), Err(Failed(2)));
        assert_eq!(failed(&ctx), Some(Failed(2)));
        assert!(root.cause().is_none() && beside.cause().is_none());
        // The first cause stays when the group is used again.
        group.go(|| Err(Failed(7)));
        assert_eq!(group.wait(), Err(Failed(7)));
        assert_eq!(failed(&ctx), Some(Failed(2)));
        assert_eq!(calls.load(SeqCst), 1);
    });
}

#[test]
fn goroutines_that_fail_at_the_same_time_have_one_cause() {
    let _w = watchdog();
    on_every(|| {
        for _ in 0..50 {
            let (group, ctx) = ErrGroup::with_context_cause(&Context::background(), Failed::clone);
            for i in 0..8 {
                group.go(move || Err(Failed(i)));
            }
            let first = group.wait().err();
            assert!(first.is_some());
            assert_eq!(failed(&ctx), first);
        }
    });
}

#[test]
fn without_an_error_the_groups_context_has_no_cause() {
    let _w = watchdog();
    on_every(|| {
        let never = |_: &Failed| -> Failed { unreachable!() };
        // No failure, also if the group is used again.
        let (group, ctx) = ErrGroup::with_context_cause(&Context::background(), never);
        group.go(|| Ok(()));
        assert_eq!(ctx.err(), None);
        assert_eq!(group.wait(), Ok(()));
        assert_eq!(failed(&ctx), None);
        group.go(|| Err(Failed(1)));
        assert_eq!(group.wait(), Err(Failed(1)));
        assert_eq!(failed(&ctx), None);

        // A panic is the first failure.
        let (group, ctx) = ErrGroup::with_context_cause(&Context::background(), never);
        let done = ctx.clone();
        group.go(|| panic!("on purpose"));
        group.go(move || {
            assert!(done.done().recv().is_err());
            Err(Failed(1))
        });
        let text = panic_text(|| assert!(group.wait().is_ok()));
        assert!(text.contains("a goroutine of the group panicked"), "{text}");
        assert_eq!(failed(&ctx), None);

        // The context above has a cause already.
        let (above, cancel) = Context::background().with_cancel_cause();
        let (group, ctx) = ErrGroup::with_context_cause(&above, Failed::clone);
        cancel.cancel("closed");
        group.go(|| Err(Failed(1)));
        assert_eq!(group.wait(), Err(Failed(1)));
        assert_eq!(ctx.cause().unwrap().to_string(), "closed");
    });
}

#[test]
fn a_panic_while_the_cause_is_made_is_a_panic_of_the_goroutine() {
    let _w = watchdog();
    on_every(|| {
        let broken = |e: &Failed| -> Failed { panic!("on purpose: {e}") };
        let (group, ctx) = ErrGroup::with_context_cause(&Context::background(), broken);
        let done = ctx.clone();
        group.go(|| Err(Failed(1)));
        group.go(move || {
            assert!(done.done().recv().is_err(), "it is cancelled all the same");
            Err(Failed(2))
        });
        let text = panic_text(|| assert!(group.wait().is_ok()));
        assert!(text.contains("a goroutine of the group panicked"), "{text}");
        assert_eq!(failed(&ctx), None);
        assert_eq!(group.wait(), Ok(()));
    });
}

#[test]
fn the_cause_may_be_made_by_code_that_uses_the_group() {
    let _w = watchdog();
    on_every(|| {
        // No lock of the group is held while the function runs.
        let (tx, rx) = bounded(1);
        let cause = move |e: &Failed| {
            let group: ErrGroup<Failed> = rx.recv().unwrap();
            let (started, has_failed) = bounded(0);
            group.go(move || {
                started.send(()).unwrap();
                Err(Failed(2))
            });
            has_failed.recv().unwrap();
            e.clone()
        };
        let (group, ctx) = ErrGroup::with_context_cause(&Context::background(), cause);
        tx.send(group.clone()).unwrap();
        group.go(|| Err(Failed(1)));
        assert_eq!(group.wait(), Err(Failed(1)));
        assert_eq!(failed(&ctx), Some(Failed(1)));
    });
}
