//! `ErrGroup`.

use super::common::{MS, watchdog};
use super::{on_every, panic_text};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};
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
