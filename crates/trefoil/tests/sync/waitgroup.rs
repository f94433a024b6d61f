//! `WaitGroup` and `Barrier`.

use super::common::{MS, watchdog, yield_until};
use super::{join_thread, mixed, on_every, panic_text};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use trefoil::go;
use trefoil::sync::{Barrier, WaitGroup};
use trefoil::time::sleep;

/// Go: TestWaitGroup. Two groups of 16, eight times.
#[test]
fn wait_returns_when_the_last_goroutine_is_done() {
    let _w = watchdog();
    on_every(|| {
        let (one, two) = (WaitGroup::new(), WaitGroup::new());
        for _ in 0..8 {
            let exited = Arc::new(AtomicUsize::new(0));
            one.add(16);
            two.add(16);
            for _ in 0..16 {
                let (one, two, exited) = (one.clone(), two.clone(), exited.clone());
                go(move || {
                    one.done();
                    two.wait();
                    exited.fetch_add(1, SeqCst);
                });
            }
            one.wait();
            for _ in 0..16 {
                assert_eq!(exited.load(SeqCst), 0, "a waiter was released before the last `done`");
                two.done();
            }
            yield_until("all to exit", || exited.load(SeqCst) == 16);
        }
    });
}

/// Go: TestWaitGroupRace.
#[test]
fn effects_before_done_are_visible_after_wait() {
    let _w = watchdog();
    on_every(|| {
        for _ in 0..1000 {
            let wg = WaitGroup::new();
            let n = Arc::new(AtomicUsize::new(0));
            for _ in 0..2 {
                wg.add(1);
                let (wg, n) = (wg.clone(), n.clone());
                go(move || {
                    n.fetch_add(1, SeqCst);
                    wg.done();
                });
            }
            wg.wait();
            assert_eq!(n.load(SeqCst), 2);
        }
    });
}

#[test]
fn wait_group_go_counts_goroutines_that_panic_and_works_in_a_static() {
    let _w = watchdog();
    static WG: WaitGroup = WaitGroup::new();
    static N: AtomicUsize = AtomicUsize::new(0);
    on_every(|| {
        N.store(0, SeqCst);
        for i in 0..100 {
            WG.go(move || {
                N.fetch_add(1, SeqCst);
                assert!(i % 10 != 3, "on purpose");
                i
            });
        }
        join_thread(std::thread::spawn(|| WG.wait()));
        WG.wait();
        assert_eq!(N.load(SeqCst), 100);
        // The goroutine keeps the counter alive after the handle is dropped.
        let wg = WaitGroup::new();
        wg.go(|| sleep(MS));
        drop(wg);
    });
}

/// Go: TestWaitGroupMisuse.
#[test]
fn a_wait_group_counter_below_zero_or_too_large_panics() {
    let _w = watchdog();
    let wg = WaitGroup::new();
    wg.add(1);
    wg.done();
    assert!(panic_text(|| wg.done()).contains("negative counter"));
    wg.wait();
    assert!(panic_text(|| wg.add(usize::MAX)).contains("cannot count"));
    wg.add(2);
    wg.done();
    wg.done();
    wg.wait();
}

#[test]
fn every_round_of_a_barrier_has_one_leader() {
    let _w = watchdog();
    on_every(|| {
        const N: usize = 10;
        let barrier = Arc::new(Barrier::new(N));
        let (leaders, arrived) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        mixed(N, {
            let (leaders, arrived) = (leaders.clone(), arrived.clone());
            move |_| {
                for round in 1..=20 {
                    arrived.fetch_add(1, SeqCst);
                    leaders.fetch_add(usize::from(barrier.wait().is_leader()), SeqCst);
                    assert!(arrived.load(SeqCst) >= round * N);
                    barrier.wait();
                }
            }
        });
        assert_eq!(leaders.load(SeqCst), 20);
        assert!(Barrier::new(0).wait().is_leader());
    });
}
