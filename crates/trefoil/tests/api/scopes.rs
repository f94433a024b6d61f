//! `scope`: goroutines that borrow.

use crate::Drops;
use crate::common::{runtime, watchdog, yield_until};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use trefoil::Builder;

#[test]
fn scoped_goroutines_borrow_local_variables() {
    let _watchdog = watchdog();
    trefoil::run(|| {
        let mut numbers: Vec<u64> = (0..1000).collect();
        let total = AtomicUsize::new(0);
        trefoil::scope(|s| {
            for part in numbers.chunks_mut(100) {
                s.go(|| {
                    trefoil::yield_now();
                    part.iter_mut().for_each(|n| *n += 1);
                    total.fetch_add(part.len(), SeqCst);
                });
            }
        });
        assert_eq!(total.load(SeqCst), 1000);
        assert_eq!(numbers.iter().sum::<u64>(), 500_500);
    });
}

#[test]
fn scoped_handles_return_borrowed_results_and_panics() {
    let _watchdog = watchdog();
    trefoil::run(|| {
        let text = String::from("borrowed");
        let lens = trefoil::scope(|s| {
            let a = s.go(|| text.len());
            let b = Builder::new().name("b").go_scoped(s, || &text[..3]).unwrap();
            assert_eq!(b.name(), Some("b"));
            assert_ne!(a.id(), b.id());
            yield_until("b", || b.is_finished());
            (a.join().unwrap(), b.join().unwrap())
        });
        assert_eq!(lens, (8, "bor"));
        let caught = trefoil::scope(|s| s.go(|| resume_unwind(Box::new(3u8))).join());
        let caught: std::thread::Result<()> = caught;
        assert_eq!(
            caught.unwrap_err().downcast_ref(),
            Some(&3u8),
            "scope must not panic for a joined goroutine"
        );
    });
}

#[test]
fn scope_waits_for_all_its_goroutines() {
    let _watchdog = watchdog();
    // On a goroutine and on a plain thread.
    let body = || {
        for _ in 0..50 {
            let ended = AtomicUsize::new(0);
            let ended = &ended;
            trefoil::scope(|s| {
                for i in 0..10 {
                    s.go(move || {
                        (0..i).for_each(|_| trefoil::yield_now());
                        ended.fetch_add(1, SeqCst);
                    });
                }
            });
            assert_eq!(ended.load(SeqCst), 10);
        }
    };
    trefoil::run(body);
    body();
}

#[test]
fn scopes_nest_and_their_goroutines_start_others() {
    let _watchdog = watchdog();
    fn tree(depth: u32) -> u32 {
        if depth == 0 {
            return 1;
        }
        trefoil::scope(|s| {
            let left = s.go(move || tree(depth - 1));
            let right = s.go(move || tree(depth - 1));
            left.join().unwrap() + right.join().unwrap()
        })
    }
    assert_eq!(trefoil::run(|| tree(8)), 256);
    assert_eq!(tree(6), 64, "from a plain thread");
    trefoil::run(|| {
        // A goroutine of the scope starts others in the same scope.
        let count = AtomicUsize::new(0);
        let count = &count;
        trefoil::scope(|s| {
            s.go(move || {
                for _ in 0..10 {
                    s.go(move || {
                        trefoil::yield_now();
                        s.go(move || count.fetch_add(1, SeqCst));
                    });
                }
            });
        });
        assert_eq!(count.load(SeqCst), 10);
    });
}

#[test]
fn scope_waits_when_its_closure_panics() {
    let _watchdog = watchdog();
    let body = || {
        let ended = AtomicUsize::new(0);
        let caught = catch_unwind(AssertUnwindSafe(|| {
            trefoil::scope(|s| {
                for i in 0..10 {
                    let ended = &ended;
                    s.go(move || {
                        (0..i).for_each(|_| trefoil::yield_now());
                        ended.fetch_add(1, SeqCst);
                    });
                }
                resume_unwind(Box::new("of the closure"));
            })
        }));
        assert_eq!(ended.load(SeqCst), 10);
        let caught: std::thread::Result<()> = caught;
        assert_eq!(caught.unwrap_err().downcast_ref(), Some(&"of the closure"));
    };
    trefoil::run(body);
    body();
}

#[test]
fn scope_panics_if_an_unjoined_goroutine_panicked() {
    let _watchdog = watchdog();
    let body = || {
        for how in 0..3 {
            let ended = AtomicUsize::new(0);
            let caught = catch_unwind(AssertUnwindSafe(|| {
                trefoil::scope(|s| {
                    let panicking = s.go(|| {
                        (0..how).for_each(|_| trefoil::yield_now());
                        resume_unwind(Box::new("unseen"))
                    });
                    if how == 2 {
                        // Dropped after its end.
                        yield_until("its end", || panicking.is_finished());
                    }
                    drop::<trefoil::ScopedJoinHandle<'_, ()>>(panicking);
                    s.go(|| {
                        (0..10).for_each(|_| trefoil::yield_now());
                        ended.fetch_add(1, SeqCst);
                    });
                })
            }));
            assert_eq!(ended.load(SeqCst), 1, "scope must wait for the other goroutines");
            let payload = caught.unwrap_err();
            assert_eq!(payload.downcast_ref(), Some(&"a scoped goroutine panicked"));
        }
    };
    trefoil::run(body);
    body();
}

#[test]
fn scoped_results_are_dropped_before_scope_returns() {
    let _watchdog = watchdog();
    runtime(3).run(|| {
        for round in 0..200 {
            let drops = Drops::default();
            let leaked = trefoil::scope(|s| {
                for i in 0..5 {
                    let one = drops.one();
                    let h = s.go(move || one);
                    if (i + round) % 3 == 0 {
                        drop(h.join().unwrap());
                    }
                }
                let one = drops.one();
                std::mem::forget(s.go(move || one));
                1
            });
            assert_eq!(drops.get(), 6 - leaked);
        }
    });
}

/// Another goroutine of the scope may join or drop a scoped handle.
#[test]
fn scoped_handles_may_move_to_other_goroutines() {
    let _watchdog = watchdog();
    runtime(2).run(|| {
        for _ in 0..200 {
            let value = 5;
            let caught = catch_unwind(|| {
                trefoil::scope(|s| {
                    let a = s.go(|| value);
                    let b = s.go(move || a.join().unwrap() + 1);
                    let panicking = s.go(|| resume_unwind(Box::new(())));
                    s.go(move || drop::<trefoil::ScopedJoinHandle<'_, ()>>(panicking));
                    assert_eq!(b.join().unwrap(), 6);
                });
            });
            let payload = caught.unwrap_err();
            assert_eq!(payload.downcast_ref(), Some(&"a scoped goroutine panicked"));
        }
    });
}
