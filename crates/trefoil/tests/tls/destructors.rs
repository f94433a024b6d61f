//! Destructors of thread-local variables.

use crate::common::crowd::{crowd, joined, yields};
use crate::values::{CELL, CONST_DROP, Dropped};
use crate::{EXPECTED, counters, on_goroutines, text};
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::thread::{self};
use trefoil::{go, yield_now};

/// For each goroutine, the sum of the numbers that its destructors added.
type Records = Arc<[AtomicU32]>;

struct First(usize, Records);

struct Second(usize, Records);

struct Late(Records, usize);

thread_local! {
    static FIRST: RefCell<Option<First>> = const { RefCell::new(None) };
    static SECOND: RefCell<Option<Second>> = const { RefCell::new(None) };
    static LATE: RefCell<Option<Late>> = RefCell::default();
    static OWNER: Cell<usize> = const { Cell::new(usize::MAX) };
}

impl First {
    /// What the destructor does, by kind of goroutine. Afterwards it is still the same goroutine.
    fn act(&self) {
        match self.0 % 6 {
            0 => yields(3),
            1 => assert_eq!(go(|| 5).join().ok(), Some(5)),
            2 => {
                let records = self.1.clone();
                let me = self.0;
                // Another goroutine, which outlives this one and has its own thread-locals.
                drop(go(move || {
                    assert_eq!(OWNER.get(), usize::MAX);
                    records[me].fetch_add(100, SeqCst);
                }));
            }
            3 => assert_eq!(thread::spawn(|| 6).join().ok(), Some(6)),
            4 => {
                // Destroyed before this one or not: no panic, and never another goroutine's value.
                let seen = SECOND.try_with(|s| s.borrow().as_ref().map(|s| s.0));
                assert!(matches!(seen, Err(_) | Ok(None)) || seen == Ok(Some(self.0)));
            }
            _ => {
                // Created in a destructor: it must be destroyed as well, after another park.
                let late = Late(self.1.clone(), self.0);
                let _ = LATE.try_with(|l| l.replace(Some(late)));
                joined(go(|| yields(2)));
            }
        }
    }
}

impl Drop for First {
    fn drop(&mut self) {
        let ok = catch_unwind(AssertUnwindSafe(|| self.act())).is_ok();
        let same = OWNER.get() == self.0 && !thread::panicking();
        self.1[self.0].fetch_add(if ok && same { 1 } else { 10_000 }, SeqCst);
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        yield_now();
        let same = OWNER.get() == self.0;
        self.1[self.0].fetch_add(if same { 10 } else { 10_000 }, SeqCst);
    }
}

impl Drop for Late {
    fn drop(&mut self) {
        yields(2);
        let same = OWNER.get() == self.1;
        self.0[self.1].fetch_add(if same { 1000 } else { 10_000 }, SeqCst);
    }
}

#[test]
fn destructors_may_yield_park_and_start_goroutines() {
    const N: usize = 3000;
    on_goroutines(|| {
        let records: Records = counters(N);
        let d = records.clone();
        let handles = crowd(N, move |i| {
            assert_eq!(OWNER.replace(i), usize::MAX);
            // Destructors run in the reverse order of first use: try both orders.
            if i % 2 == 0 {
                FIRST.set(Some(First(i, d.clone())));
                SECOND.set(Some(Second(i, d.clone())));
            } else {
                SECOND.set(Some(Second(i, d.clone())));
                FIRST.set(Some(First(i, d.clone())));
            }
            yield_now();
        });
        for (i, handle) in handles.into_iter().enumerate() {
            joined(handle);
            let added = records[i].load(SeqCst);
            match i % 6 {
                2 => assert!(added == 11 || added == 111, "goroutine {i} added {added}"),
                5 => assert_eq!(added, 1011, "goroutine {i}: first, second and late, once each"),
                _ => assert_eq!(added, 11, "goroutine {i}: first and second, once each"),
            }
        }
        while (2..N).step_by(6).any(|i| records[i].load(SeqCst) != 111) {
            yield_now();
        }
    });
}

#[test]
fn destructors_run_after_a_panic_and_without_a_join() {
    const N: usize = 1000;
    on_goroutines(|| {
        let drops = counters(N);
        let d = drops.clone();
        let handles = crowd(N, move |i| {
            CELL.set(i + 1);
            CONST_DROP.set(Some(Dropped { owner: i, drops: d.clone() }));
            yield_now();
            if i % 3 == 0 {
                panic!("{EXPECTED} {i}");
            }
        });
        for (i, handle) in handles.into_iter().enumerate() {
            match i % 3 {
                0 => {
                    let payload = handle.join().unwrap_err();
                    assert_eq!(text(&*payload), format!("{EXPECTED} {i}"));
                    assert_eq!(drops[i].load(SeqCst), 1);
                }
                1 => {
                    joined(handle);
                    assert_eq!(drops[i].load(SeqCst), 1);
                }
                _ => drop(handle),
            }
        }
        while drops.iter().any(|d| d.load(SeqCst) == 0) {
            yield_now();
        }
        yields(100);
        assert!(drops.iter().all(|d| d.load(SeqCst) == 1));
    });
}
