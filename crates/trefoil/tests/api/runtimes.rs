//! Plain threads and goroutines use one or several runtimes, which are also dropped.

use crate::Drops;
use crate::common::{self, child_test, hold_until, join_all, runtime, watchdog};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;
use trefoil::{Builder, JoinHandle, Runtime};

#[test]
fn plain_threads_start_and_join_goroutines() {
    let _watchdog = watchdog();
    let sum = AtomicUsize::new(0);
    std::thread::scope(|s| {
        for _ in 0..8 {
            s.spawn(|| {
                for i in 0..200 {
                    assert_eq!(trefoil::id(), 0);
                    let h = trefoil::go(move || {
                        assert!(trefoil::id() > 1);
                        i + trefoil::go(|| 1).join().unwrap()
                    });
                    sum.fetch_add(h.join().unwrap(), SeqCst);
                }
            });
        }
    });
    assert_eq!(sum.load(SeqCst), 8 * (199 * 200 / 2 + 200));
    trefoil::yield_now();
}

#[test]
fn run_nests_inside_goroutines() {
    let _watchdog = watchdog();
    let value = trefoil::run(|| {
        let outer = trefoil::procs();
        let inner = join_all((0..4).map(|i| {
            trefoil::go(move || {
                let mine = trefoil::id();
                let inner = runtime(3).run(|| {
                    assert_eq!((trefoil::id(), trefoil::procs()), (1, 3));
                    trefoil::go(move || i * 10).join().unwrap()
                });
                assert_eq!(trefoil::id(), mine);
                inner
            })
        }));
        assert_eq!(trefoil::procs(), outer);
        inner
    });
    assert_eq!(value, [0, 10, 20, 30]);
    // Three levels, and the same runtime inside itself.
    assert_eq!(
        trefoil::run(|| trefoil::run(|| trefoil::run(|| trefoil::go(|| 3).join().unwrap()))),
        3
    );
    let rt = runtime(1);
    assert_eq!(rt.run(|| rt.run(|| rt.run(|| 4))), 4);
}

#[test]
fn run_borrows_local_variables() {
    let _watchdog = watchdog();
    let mut text = String::from("a");
    runtime(2).run(|| text.push('b'));
    trefoil::run(|| text.push('c'));
    assert_eq!(text, "abc");
}

#[test]
fn four_runtimes_work_at_once() {
    let _watchdog = watchdog();
    std::thread::scope(|s| {
        for n in 1..=4 {
            s.spawn(move || {
                let rt = runtime(n);
                for _ in 0..20 {
                    rt.run(|| {
                        assert_eq!(trefoil::procs(), n);
                        assert_eq!(trefoil::num_goroutines(), 1);
                        let all = join_all((0..100u64).map(|i| {
                            trefoil::go(move || {
                                trefoil::yield_now();
                                i
                            })
                        }));
                        assert_eq!(all.iter().sum::<u64>(), 4950);
                    });
                }
            });
        }
    });
}

/// Goroutines of two runtimes join goroutines of the other runtime.
#[test]
fn goroutines_of_two_runtimes_join_each_other() {
    let _watchdog = watchdog();
    let (a, b) = (Arc::new(runtime(2)), Arc::new(runtime(2)));
    fn ping(left: u32, here: Arc<Runtime>, there: Arc<Runtime>) -> u32 {
        if left == 0 {
            return 0;
        }
        let (h, t) = (there.clone(), here.clone());
        there.go(move || ping(left - 1, h, t)).unwrap().join().unwrap() + 1
    }
    let handles: Vec<_> = (0..10)
        .map(|_| {
            let (here, there) = (a.clone(), b.clone());
            a.go(move || ping(50, here, there)).unwrap()
        })
        .collect();
    assert_eq!(join_all(handles), [50; 10]);
}

#[test]
fn two_hundred_runtimes_leave_no_threads_files_or_memory() {
    child_test!();
    let ours = || common::tasks().iter().filter(|(_, n)| n.starts_with("trefoil")).count();
    let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let round = |i: usize| {
        let rt = runtime(1 + i % 4);
        let sum: usize = rt.run(|| join_all((0..20).map(|n| trefoil::go(move || n))).iter().sum());
        assert_eq!(sum, 190);
    };
    (0..20).for_each(round);
    hold_until("the first threads to end", || ours() == 0);
    let (files_before, rss_before) = (files(), common::rss());
    (0..200).for_each(round);
    hold_until("all threads to end", || ours() == 0);
    assert_eq!(files(), files_before);
    let grown = common::rss().saturating_sub(rss_before);
    assert!(grown < 16 << 20, "200 runtimes left {grown} bytes");
}

/// Threads begin while those of the previous runtime still end: what a thread leaves for reuse must
/// not point into memory that is freed with its runtime.
#[test]
fn a_runtime_starts_while_threads_of_the_last_one_end() {
    child_test!();
    for i in 0..300 {
        let rt = runtime(1 + i % 4);
        if i % 3 == 0 {
            rt.run(|| trefoil::go(|| ()).join().unwrap());
        }
        drop(rt);
        // The allocator would detect a write into freed memory.
        drop(std::hint::black_box(vec![vec![1u8; 700]; 20]));
    }
}

#[test]
fn dropping_a_runtime_leaks_what_its_goroutines_own() {
    let _watchdog = watchdog();
    for round in 0..20 {
        let rt = runtime(1 + round % 3);
        let drops = Drops::default();
        let alive = Arc::new(AtomicUsize::new(0));
        let mut handles = Vec::new();
        for _ in 0..3 {
            // A goroutine that yields for ever.
            let (here, one) = (alive.clone(), drops.one());
            handles.push(
                rt.go(move || {
                    let _one = one;
                    here.fetch_add(1, SeqCst);
                    loop {
                        trefoil::yield_now();
                    }
                })
                .unwrap(),
            );
            // A goroutine that is parked for ever, because it joins one that yields for ever.
            let (here, one) = (alive.clone(), drops.one());
            handles.push(
                rt.go(move || {
                    let _one = one;
                    here.fetch_add(1, SeqCst);
                    let endless = trefoil::go(|| {
                        loop {
                            trefoil::yield_now();
                        }
                    });
                    let _: std::thread::Result<()> = endless.join();
                })
                .unwrap(),
            );
        }
        hold_until("all goroutines to run", || alive.load(SeqCst) == 6);
        // Goroutines that may never start.
        for _ in 0..300 {
            let one = drops.one();
            handles.push(rt.go(move || drop(one)).unwrap());
        }
        let ended = rt.go(|| ()).unwrap();
        hold_until("the end of a goroutine", || ended.is_finished());
        drop(rt);
        // The handles still work, except that some goroutines can never be joined.
        for h in &handles[..6] {
            assert!(!h.is_finished());
            assert!(h.id() > 0);
            assert_eq!(h.name(), None);
        }
        ended.join().unwrap();
        drop(handles);
        assert!(
            drops.get() <= 300,
            "what live goroutines own must be leaked, not dropped: {} drops",
            drops.get()
        );
    }
}

#[test]
fn a_goroutine_may_drop_its_own_runtime() {
    let _watchdog = watchdog();
    for procs in [1, 2, 3] {
        let rt = Arc::new(runtime(procs));
        let gone = Arc::new(AtomicBool::new(false));
        let (own, weak, told) = (rt.clone(), Arc::downgrade(&rt), gone.clone());
        let h = rt
            .go(move || {
                hold_until("the last reference", || Arc::strong_count(&own) == 1);
                drop(own);
                // It goes on until its next scheduling point.
                told.store(weak.upgrade().is_none(), SeqCst);
            })
            .unwrap();
        drop(rt);
        hold_until("the drop", || gone.load(SeqCst));
        drop(h);
    }
}

/// Results that were not joined yet can be joined or dropped after the runtime.
#[test]
fn results_can_be_joined_after_their_runtime_is_dropped() {
    let _watchdog = watchdog();
    let drops = Drops::default();
    let rt = runtime(2);
    let handles: Vec<_> = (0..100)
        .map(|i| {
            let one = drops.one();
            let builder = Builder::new().name(format!("n{i}"));
            rt.run(move || builder.go(move || (i, one)).unwrap())
        })
        .collect();
    hold_until("their end", || handles.iter().all(JoinHandle::is_finished));
    drop(rt);
    std::thread::sleep(Duration::from_millis(5));
    for (i, h) in handles.into_iter().enumerate() {
        assert_eq!(h.name(), Some(&*format!("n{i}")));
        if i % 2 == 0 {
            assert_eq!(h.join().unwrap().0, i);
        }
    }
    assert_eq!(drops.get(), 100);
}

/// `go` on a goroutine uses that goroutine's runtime, not the default one.
#[test]
fn go_uses_the_runtime_of_the_calling_goroutine() {
    let _watchdog = watchdog();
    let rt = runtime(3);
    let h = rt.go(|| trefoil::go(|| trefoil::go(trefoil::procs))).unwrap();
    assert_eq!(h.join().unwrap().join().unwrap().join().unwrap(), 3);
    assert!(format!("{rt:?}").contains("procs: 3"), "{rt:?}");
}
