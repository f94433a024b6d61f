//! Thread-local variables: initial values, values across yields and parks.

use crate::common::crowd::{crowd, joined, yields};
use crate::{Gate, MANY, counters, on_goroutines, tid};
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::HashSet;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::thread::{self, ThreadId};
use trefoil::{go, yield_now};

/// Counts its drop in its owner's counter and checks that it runs among its owner's thread-locals.
pub(crate) struct Dropped {
    pub(crate) owner: usize,
    pub(crate) drops: Arc<[AtomicU32]>,
}

/// Destructors that ran among the thread-locals of another goroutine. (They must not panic.)
static FOREIGN: AtomicUsize = AtomicUsize::new(0);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.drops[self.owner].fetch_add(1, SeqCst);
        if CELL.get() != self.owner + 1 {
            FOREIGN.fetch_add(1, SeqCst);
        }
    }
}

static LAZY_MADE: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    pub(crate) static CELL: Cell<usize> = const { Cell::new(0) };
    static BORROWED: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    pub(crate) static CONST_DROP: RefCell<Option<Dropped>> = const { RefCell::new(None) };
    static LAZY_DROP: OnceCell<Dropped> = {
        LAZY_MADE.fetch_add(1, SeqCst);
        OnceCell::new()
    };
    static LAZY: RefCell<String> = RefCell::new(format!("fresh {}", CELL.get()));
}

/// Sets every thread-local, yields in between, and checks that all values are still its own.
fn use_thread_locals(i: usize, gate: &Gate, drops: &Arc<[AtomicU32]>) -> ThreadId {
    assert_eq!(CELL.get(), 0, "a new goroutine must not see the value of another");
    assert!(BORROWED.with_borrow(Vec::is_empty));
    assert!(CONST_DROP.with_borrow(Option::is_none));
    assert!(LAZY_DROP.with(|d| d.get().is_none()));

    let id = thread::current().id();
    CELL.set(i + 1);
    CONST_DROP.set(Some(Dropped { owner: i, drops: drops.clone() }));
    LAZY_DROP.with(|d| assert!(d.set(Dropped { owner: i, drops: drops.clone() }).is_ok()));
    assert_eq!(LAZY.with_borrow(String::clone), format!("fresh {}", i + 1));
    gate.pass();

    BORROWED.with(|list| {
        // Borrowed across yields: another goroutine that used this RefCell would panic.
        let mut list = list.borrow_mut();
        for k in 0..8 {
            list.push(i + k);
            yield_now();
            assert_eq!(list.len(), k + 1);
            assert_eq!(list[k], i + k);
            assert_eq!(CELL.get(), i + 1);
            assert_eq!(thread::current().id(), id);
        }
    });
    LAZY.with_borrow_mut(|s| {
        yields(2);
        s.push_str(" used");
    });
    yield_now();
    assert_eq!(LAZY.take(), format!("fresh {} used", i + 1));
    assert_eq!(CONST_DROP.with_borrow(|d| d.as_ref().map(|d| d.owner)), Some(i));
    assert_eq!(LAZY_DROP.with(|d| d.get().map(|d| d.owner)), Some(i));
    id
}

#[test]
fn ten_thousand_goroutines_have_their_own_thread_locals() {
    let drops = counters(MANY);
    let all = drops.clone();
    let made = LAZY_MADE.load(SeqCst);
    CELL.set(usize::MAX);
    on_goroutines(move || {
        let gate = Gate::new(MANY);
        let d = drops.clone();
        let handles = crowd(MANY, move |i| use_thread_locals(i, &gate, &d));
        let mut ids = HashSet::new();
        for (i, handle) in handles.into_iter().enumerate() {
            assert!(ids.insert(joined(handle)), "two goroutines have the same ThreadId");
            assert_eq!(drops[i].load(SeqCst), 2, "goroutine {i}: drops before join returned");
        }
        assert!(!ids.contains(&thread::current().id()));
        assert_eq!(CELL.get(), 0, "the main goroutine's own value");
    });
    assert_eq!(CELL.get(), usize::MAX, "the plain thread's own value");
    assert!(all.iter().all(|d| d.load(SeqCst) == 2), "a destructor ran twice");
    assert_eq!(
        FOREIGN.load(SeqCst),
        0,
        "destructors that ran among another goroutine's thread-locals"
    );
    assert_eq!(LAZY_MADE.load(SeqCst) - made, MANY);
}

thread_local! {
    static HITS: Cell<u32> = const { Cell::new(0) };
    static LAZY_HITS: Cell<u32> = Cell::default(); // not const: initialised at first use
}

/// Accesses thread-locals before and after `park`. Returns whether the goroutine moved to another
/// thread meanwhile. The compiler may keep the address of the first access for the second, which
/// would be wrong if thread-locals belonged to threads.
fn access_twice(park: impl FnOnce()) -> bool {
    HITS.with(|hits| hits.set(hits.get() + 1));
    LAZY_HITS.with(|hits| hits.set(hits.get() + 1));
    let before = tid();
    park();
    HITS.with(|hits| hits.set(hits.get() + 1));
    LAZY_HITS.with(|hits| hits.set(hits.get() + 1));
    tid() != before
}

#[inline(never)]
fn hits() -> (u32, u32) {
    (HITS.get(), LAZY_HITS.get())
}

#[test]
fn accesses_before_and_after_a_park_reach_the_same_value() {
    const ROUNDS: u32 = 20;
    on_goroutines(|| {
        let mut moved = 0;
        // Until enough goroutines have moved; with one P none can.
        while moved < 100 {
            let handles = crowd(600, |_| {
                let mut moved = 0;
                for round in 1..=ROUNDS {
                    moved += usize::from(if round % 2 == 0 {
                        access_twice(|| joined(go(|| yields(3))))
                    } else {
                        access_twice(|| yields(2))
                    });
                    assert_eq!(hits(), (2 * round, 2 * round));
                }
                moved
            });
            moved += handles.into_iter().map(joined).sum::<usize>();
            if trefoil::procs() == 1 {
                break;
            }
        }
        assert_eq!(hits(), (0, 0));
    });
}

#[test]
fn goroutines_on_recycled_stacks_see_initial_values() {
    thread_local! {
        static WORDS: Cell<[u64; 32]> = const { Cell::new([0x5555; 32]) };
        static TEXT: RefCell<String> = RefCell::new("initial".to_owned());
        static KEPT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }
    on_goroutines(|| {
        for round in 0..200u64 {
            let handles = crowd(100, move |i| {
                assert_eq!(WORDS.get(), [0x5555; 32]);
                assert_eq!(TEXT.with_borrow(String::clone), "initial");
                assert!(KEPT.with_borrow(Vec::is_empty));
                WORDS.set([round + i as u64; 32]);
                TEXT.set(format!("{round} {i}"));
                KEPT.set(vec![1; 100]);
                if i % 3 == 0 {
                    yield_now();
                }
                // Overwrites the memory where the next goroutine's frames will be.
                black_box([round as u8; 8 << 10]);
                assert_eq!(WORDS.get(), [round + i as u64; 32]);
                assert_eq!(TEXT.with_borrow(String::clone), format!("{round} {i}"));
            });
            handles.into_iter().for_each(joined);
        }
    });
}

#[test]
fn scoped_and_main_goroutines_have_their_own_thread_locals() {
    CELL.set(3);
    on_goroutines(|| {
        CELL.set(1);
        let mut sums = [0; 64];
        trefoil::scope(|s| {
            for (i, sum) in sums.iter_mut().enumerate() {
                s.go(move || {
                    assert_eq!(CELL.replace(i), 0);
                    yields(3);
                    *sum = CELL.get();
                });
            }
        });
        assert_eq!(sums, std::array::from_fn(|i| i));
        assert_eq!(CELL.get(), 1);
    });
    assert_eq!(CELL.take(), 3);
}
