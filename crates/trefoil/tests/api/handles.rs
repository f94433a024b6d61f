//! `JoinHandle`: results, ids, names, detached goroutines.

use crate::common::{join_all, runtime, watchdog, yield_until};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use trefoil::Builder;

#[test]
fn join_returns_the_result() {
    let _watchdog = watchdog();
    trefoil::run(|| {
        assert_eq!(trefoil::go(|| String::from("done")).join().unwrap(), "done");
        // Joined after its end, and long before.
        let early = trefoil::go(|| 1);
        yield_until("its end", || early.is_finished());
        assert_eq!(early.join().unwrap(), 1);
        let late = trefoil::go(|| {
            (0..50).for_each(|_| trefoil::yield_now());
            2
        });
        assert_eq!(late.join().unwrap(), 2);
    });
}

#[test]
fn is_finished_is_true_after_the_end() {
    let _watchdog = watchdog();
    trefoil::run(|| {
        let gate = Arc::new(AtomicBool::new(false));
        let open = gate.clone();
        let h = trefoil::go(move || yield_until("the gate", || open.load(SeqCst)));
        (0..20).for_each(|_| trefoil::yield_now());
        assert!(!h.is_finished());
        gate.store(true, SeqCst);
        yield_until("its end", || h.is_finished());
        assert!(h.is_finished(), "it must stay finished");
        h.join().unwrap();
    });
}

#[test]
fn id_and_name_stay_after_the_end() {
    let _watchdog = watchdog();
    assert_eq!(trefoil::id(), 0, "a plain thread");
    trefoil::run(|| {
        assert_eq!(trefoil::id(), 1, "main");
        let h = Builder::new().name("worker 9").go(trefoil::id).unwrap();
        assert_eq!(h.name(), Some("worker 9"));
        let id = h.id();
        assert!(id > 1);
        yield_until("its end", || h.is_finished());
        assert_eq!((h.id(), h.name()), (id, Some("worker 9")), "also after its end");
        assert!(format!("{h:?}").contains("worker 9"));
        assert_eq!(h.join().unwrap(), id, "id() inside is id() of the handle");

        // The next goroutine in the same memory has no name.
        let plain = trefoil::go(|| ());
        assert_eq!(plain.name(), None);
        plain.join().unwrap();
    });
}

#[test]
fn ids_of_a_hundred_thousand_goroutines_are_unique() {
    let _watchdog = watchdog();
    const SPAWNERS: usize = 10;
    const EACH: usize = 10_000;
    let ids = runtime(4).run(|| {
        join_all((0..SPAWNERS).map(|_| {
            trefoil::go(|| {
                let mut ids = Vec::with_capacity(EACH);
                for _ in 0..EACH / 100 {
                    let batch: Vec<_> = (0..100).map(|_| trefoil::go(trefoil::id)).collect();
                    for h in batch {
                        let id = h.id();
                        assert_eq!(h.join().unwrap(), id);
                        ids.push(id);
                    }
                }
                ids
            })
        }))
    });
    let unique: HashSet<u64> = ids.iter().flatten().copied().collect();
    assert_eq!(unique.len(), SPAWNERS * EACH);
    assert!(!unique.contains(&0) && !unique.contains(&1));
}

#[test]
fn goroutines_with_dropped_handles_run_to_their_end() {
    let _watchdog = watchdog();
    trefoil::run(|| {
        let ran = Arc::new(AtomicUsize::new(0));
        for _ in 0..100 {
            let ran = ran.clone();
            drop(trefoil::go(move || {
                trefoil::yield_now();
                ran.fetch_add(1, SeqCst);
            }));
        }
        yield_until("all goroutines to run", || ran.load(SeqCst) == 100);
        yield_until("all goroutines to end", || trefoil::num_goroutines() == 1);
    });
}

#[test]
fn a_handle_may_be_joined_by_any_thread_or_runtime() {
    let _watchdog = watchdog();
    let rt = runtime(2);
    // On a plain thread, on another goroutine, and in another runtime.
    let h = rt.go(|| 1).unwrap();
    assert_eq!(std::thread::spawn(move || h.join().unwrap()).join().unwrap(), 1);
    let h = rt.go(|| 2).unwrap();
    assert_eq!(rt.run(move || trefoil::go(move || h.join().unwrap()).join().unwrap()), 2);
    let h = rt.go(|| 3).unwrap();
    assert_eq!(runtime(1).run(move || h.join().unwrap()), 3);
    // Several threads read the handle.
    let h = rt.go(|| 4).unwrap();
    std::thread::scope(|s| {
        for _ in 0..3 {
            s.spawn(|| (h.id(), h.name().is_none(), h.is_finished()));
        }
    });
    assert_eq!(h.join().unwrap(), 4);
}
