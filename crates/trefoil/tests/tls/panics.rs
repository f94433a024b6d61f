//! Panics and unwinding, whose state is thread-local.

use crate::common::crowd::{crowd, joined, yields};
use crate::{EXPECTED, on_goroutines, text};
use std::backtrace::Backtrace;
use std::hint::black_box;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread::{self};
use trefoil::{go, yield_now};

/// Parks and yields while its goroutine unwinds.
struct ParksWhileUnwinding(Arc<AtomicUsize>);

impl Drop for ParksWhileUnwinding {
    fn drop(&mut self) {
        let before = thread::panicking();
        // Another goroutine, possibly on this thread, is not panicking.
        let other = go(|| {
            yields(2);
            thread::panicking()
        });
        yield_now();
        let other = other.join().unwrap_or(true);
        if before && thread::panicking() && !other {
            self.0.fetch_add(1, SeqCst);
        }
    }
}

#[test]
fn panics_unwind_across_yields_and_parks() {
    const N: usize = 2000;
    on_goroutines(|| {
        let parked = Arc::new(AtomicUsize::new(0));
        let p = parked.clone();
        let handles = crowd(N, move |i| {
            for k in 0..3 {
                let caught = catch_unwind(AssertUnwindSafe(|| {
                    yield_now();
                    let _guard = ParksWhileUnwinding(p.clone());
                    if i % 2 == 0 {
                        panic!("{EXPECTED} {i} {k}");
                    }
                    std::mem::forget(_guard);
                    yield_now();
                    i
                }));
                assert!(!thread::panicking());
                yield_now();
                assert!(!thread::panicking());
                match caught {
                    Ok(value) => assert!(i % 2 == 1 && value == i),
                    Err(e) => assert_eq!(text(&*e), format!("{EXPECTED} {i} {k}")),
                }
            }
            // The last panic ends the goroutine.
            let _guard = ParksWhileUnwinding(p.clone());
            panic!("{EXPECTED} {i} end");
        });
        for (i, handle) in handles.into_iter().enumerate() {
            let payload = handle.join().unwrap_err();
            assert_eq!(text(&*payload), format!("{EXPECTED} {i} end"));
        }
        assert_eq!(parked.load(SeqCst), N / 2 * 3 + N);
        assert!(!thread::panicking());
    });
}

#[test]
fn a_panic_inside_a_destructor_while_unwinding_is_caught_there() {
    struct Nested;
    impl Drop for Nested {
        fn drop(&mut self) {
            assert!(thread::panicking());
            let inner = catch_unwind(|| {
                yield_now();
                panic!("{EXPECTED} inner")
            });
            yield_now();
            assert_eq!(text(&*inner.unwrap_err()), "expected inner");
            assert!(thread::panicking());
        }
    }
    on_goroutines(|| {
        let handles = crowd(500, |i| {
            let _nested = Nested;
            yield_now();
            panic!("{EXPECTED} outer {i}");
        });
        for (i, handle) in handles.into_iter().enumerate() {
            let payload = handle.join().map(|never: ()| never).unwrap_err();
            assert_eq!(text(&*payload), format!("expected outer {i}"));
        }
    });
}

#[test]
fn a_backtrace_ends_at_the_goroutines_entry() {
    #[inline(never)]
    fn named_frame(depth: usize) -> String {
        if depth > 0 {
            let trace = named_frame(black_box(depth - 1));
            return black_box(trace);
        }
        yield_now();
        Backtrace::force_capture().to_string()
    }
    let trace = on_goroutines(|| {
        let traces: Vec<String> = crowd(20, |_| named_frame(3)).into_iter().map(joined).collect();
        traces.into_iter().next_back().unwrap()
    });
    assert_eq!(trace.matches("named_frame").count(), 4, "{trace}");
    assert!(trace.contains("a_backtrace_ends_at_the_goroutines_entry"), "{trace}");
    // The frames of the M must not appear below the goroutine's.
    for foreign in ["start_thread", "clone3", "thread_loop", "thread_main", "lang_start"] {
        assert!(!trace.contains(foreign), "{foreign} in\n{trace}");
    }
    let frames: Vec<&str> = trace.lines().filter(|l| !l.trim_start().starts_with("at ")).collect();
    assert!(frames.len() < 60, "{trace}");
    let last = frames.last().copied().unwrap_or("");
    assert!(
        last.contains("trefoil") || last.contains("goroutine"),
        "last frame {last} of\n{trace}"
    );
}
