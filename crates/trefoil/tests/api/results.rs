//! Closures and results: when they are dropped, and of which sizes they may be.

use crate::Drops;
use crate::common::{child_test, runtime, watchdog, yield_until};
use std::cell::RefCell;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use trefoil::Builder;

#[test]
fn each_result_is_dropped_once() {
    let _watchdog = watchdog();
    for procs in [1, 3] {
        runtime(procs).run(|| {
            // Joined.
            let drops = Drops::default();
            let one = drops.one();
            let result = trefoil::go(move || one).join().unwrap();
            assert_eq!(drops.get(), 0);
            drop(result);
            assert_eq!(drops.get(), 1);

            // Detached before the end: the goroutine drops it and what its closure owns.
            let drops = Drops::default();
            let (one, captured) = (drops.one(), drops.one());
            drop(trefoil::go(move || {
                let _captured = captured;
                trefoil::yield_now();
                one
            }));
            yield_until("both drops", || drops.get() == 2);
            yield_until("the end", || trefoil::num_goroutines() == 1);
            assert_eq!(drops.get(), 2);

            // Detached after the end: the handle drops it.
            let drops = Drops::default();
            let one = drops.one();
            let h = trefoil::go(move || one);
            yield_until("the end", || h.is_finished());
            assert_eq!(drops.get(), 0);
            drop(h);
            assert_eq!(drops.get(), 1);

            // A leaked handle leaks the result; the goroutine ends.
            let drops = Drops::default();
            let (one, captured) = (drops.one(), drops.one());
            std::mem::forget(trefoil::go(move || {
                drop(captured);
                one
            }));
            yield_until("the end", || trefoil::num_goroutines() == 1);
            assert_eq!(drops.get(), 1);

            // Panicked: the payload is the result, joined or not.
            let drops = Drops::default();
            let (one, captured) = (drops.one(), drops.one());
            let payload = trefoil::go(move || {
                let _captured = captured;
                resume_unwind(Box::new(one));
            })
            .join()
            .unwrap_err();
            assert_eq!(drops.get(), 1);
            drop(payload);
            assert_eq!(drops.get(), 2);
            let one = drops.one();
            drop(trefoil::go(move || resume_unwind(Box::new(one))));
            yield_until("the payload's drop", || drops.get() == 3);
            yield_until("the end", || trefoil::num_goroutines() == 1);
        });
    }
}

/// The handle is dropped at any moment of the goroutine's end.
#[test]
fn each_result_is_dropped_once_if_its_handle_is_dropped_at_the_end() {
    let _watchdog = watchdog();
    const N: usize = 5_000;
    runtime(2).run(|| {
        let drops = Drops::default();
        for i in 0..N {
            let one = drops.one();
            let h = trefoil::go(move || one);
            for _ in 0..i % 64 {
                std::hint::spin_loop();
            }
            drop(h);
        }
        yield_until("all drops", || drops.get() == N);
        yield_until("all ends", || trefoil::num_goroutines() == 1);
        assert_eq!(drops.get(), N);
    });
}

thread_local! {
    /// `with` panics once the goroutine's thread-locals are dropped.
    static LOG: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// As with threads, the goroutine drops an unjoined result while its thread-locals still live.
#[test]
fn the_drop_of_an_unjoined_result_may_use_thread_locals() {
    child_test!();
    struct Logs(Arc<AtomicUsize>);
    impl Drop for Logs {
        fn drop(&mut self) {
            LOG.with_borrow_mut(|log| log.push(1));
            self.0.fetch_add(1, SeqCst);
        }
    }
    runtime(1).run(|| {
        let logged = Arc::new(AtomicUsize::new(0));
        let (first, second) = (Logs(logged.clone()), Logs(logged.clone()));
        drop(trefoil::go(move || {
            LOG.with_borrow_mut(|log| log.push(0));
            first
        }));
        yield_until("the result's drop", || logged.load(SeqCst) == 1);
        // A drop that is the first to use them.
        drop(trefoil::go(move || second));
        yield_until("the result's drop", || logged.load(SeqCst) == 2);
    });
}

/// Thread-locals that the drop of an unjoined result creates are themselves dropped.
#[test]
fn thread_locals_made_by_the_drop_of_a_result_are_dropped() {
    let _watchdog = watchdog();
    static DROPPED: AtomicUsize = AtomicUsize::new(0);
    struct Local;
    impl Drop for Local {
        fn drop(&mut self) {
            DROPPED.fetch_add(1, SeqCst);
        }
    }
    thread_local!(static LOCAL: Local = const { Local });
    struct Touches;
    impl Drop for Touches {
        fn drop(&mut self) {
            LOCAL.with(|_| ());
        }
    }
    runtime(1).run(|| {
        for n in 1..=10 {
            drop(trefoil::go(|| Touches));
            yield_until("the end", || trefoil::num_goroutines() == 1);
            trefoil::yield_now();
            assert_eq!(DROPPED.load(SeqCst), n);
        }
    });
}

#[repr(align(64))]
#[derive(Clone, Copy, PartialEq, Debug)]
struct Aligned([u8; 64]);

#[repr(align(4096))]
#[derive(Clone, Copy, PartialEq, Debug)]
struct Page([u8; 4096]);

#[test]
fn closures_and_results_may_have_any_size_and_alignment() {
    let _watchdog = watchdog();
    fn aligned<T>(value: &T) -> bool {
        (std::ptr::from_ref(value) as usize).is_multiple_of(align_of::<T>())
    }
    trefoil::run(|| {
        for n in 0..50u8 {
            // Around the largest size that fits into the goroutine itself.
            assert_eq!(trefoil::go(move || [n; 55]).join().unwrap(), [n; 55]);
            assert_eq!(trefoil::go(move || [n; 56]).join().unwrap(), [n; 56]);
            assert_eq!(trefoil::go(move || [n; 64]).join().unwrap(), [n; 64]);
            assert_eq!(trefoil::go(move || [n; 65]).join().unwrap(), [n; 65]);
            let large = [n; 4096];
            assert_eq!(trefoil::go(move || large.map(|b| b ^ 1)).join().unwrap(), [n ^ 1; 4096]);
            assert_eq!(trefoil::go(move || large[4095]).join().unwrap(), n);
            let (line, page) = (Aligned([n; 64]), Page([n; 4096]));
            let h = trefoil::go(move || {
                assert!(aligned(&line) && aligned(&page));
                (line, page)
            });
            assert_eq!(h.join().unwrap(), (line, page));
            trefoil::go(|| ()).join().unwrap();
            let fits_exactly = [u64::from(n); 8];
            let sum = trefoil::go(move || fits_exactly.iter().sum::<u64>()).join().unwrap();
            assert_eq!(sum, 8 * u64::from(n));
        }
        // Large results that are not joined.
        let drops = Drops::default();
        for i in 0..100 {
            let (one, ballast) = (drops.one(), [i; 100]);
            let h = trefoil::go(move || (one, ballast));
            if i % 2 == 0 {
                yield_until("the end", || h.is_finished());
            }
        }
        yield_until("all drops", || drops.get() == 100);
    });
}

#[test]
fn builder_rejects_an_impossible_stack_size() {
    let _watchdog = watchdog();
    trefoil::run(|| {
        for bytes in [1, 32 << 10, 100_000, 1 << 20, 64 << 20] {
            let h = Builder::new().stack_size(bytes).go(move || bytes).unwrap();
            assert_eq!(h.join().unwrap(), bytes);
        }
        let drops = Drops::default();
        let one = drops.one();
        let error = Builder::new().stack_size(usize::MAX).go(move || drop(one)).unwrap_err();
        assert!(!error.to_string().is_empty());
        assert_eq!(drops.get(), 1, "the closure that never ran was dropped");
        assert_eq!(trefoil::num_goroutines(), 1);
    });
}
