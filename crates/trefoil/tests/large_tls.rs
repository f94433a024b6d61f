//! A program whose thread-local storage is larger than a default stack: 1 MiB of zeroes, and half
//! as much with initial values. Plain threads work with it; so must goroutines and the Ms.

mod common;

use common::{child_test, join_all, rss};
use std::cell::RefCell;
use trefoil::{Builder, Runtime, go, yield_now};

const ZEROES: usize = 1 << 20;
const SEVENS: usize = 512 << 10;

thread_local! {
    static ZEROED: RefCell<[u8; ZEROES]> = const { RefCell::new([0; ZEROES]) };
    static FILLED: RefCell<[u8; SEVENS]> = const { RefCell::new([7; SEVENS]) };
}

/// Checks that both have their initial values, changes them, and finds the changes after a yield.
fn use_both(mark: u8) {
    let places = [0, 1, 4095, 100_000, 400_000, SEVENS - 1];
    let check = |zero: u8, seven: u8| {
        ZEROED.with_borrow(|all| {
            assert!(places.iter().all(|&i| all[i] == zero));
            assert_eq!((all[ZEROES - 1], all[ZEROES / 2 + 77]), (zero, 0));
        });
        FILLED.with_borrow(|all| {
            assert!(places.iter().all(|&i| all[i] == seven));
            assert_eq!(all[SEVENS / 2 + 77], 7);
        });
    };
    check(0, 7);
    ZEROED.with_borrow_mut(|all| {
        places.iter().for_each(|&i| all[i] = mark);
        all[ZEROES - 1] = mark;
    });
    FILLED.with_borrow_mut(|all| places.iter().for_each(|&i| all[i] = mark));
    yield_now();
    check(mark, mark);
}

#[inline(never)]
fn recurse(depth: usize) -> usize {
    let frame = std::hint::black_box([depth; 64]);
    if depth == 0 { frame[0] } else { recurse(depth - 1) + frame[63] }
}

#[test]
fn goroutines_run_with_more_thread_local_storage_than_a_stack() {
    child_test!(|child| {
        child.succeed();
        child.env("TREFOIL_DEBUG", "tls=pthread").succeed();
        child.env("TREFOIL_DEBUG", "guards=mprotect").succeed();
    });
    std::thread::spawn(|| use_both(3)).join().unwrap();
    let rt = Runtime::builder().procs(2).build().unwrap();
    rt.run(|| {
        use_both(1);
        for round in 0..3 {
            join_all((0..50).map(|i| go(move || use_both(i + round))));
        }
        for kib in [64, 256, 1024, 4096] {
            let small = Builder::new().stack_size(kib << 10);
            let used = small.go(move || {
                use_both(9);
                // The thread-locals leave at least 30 KiB of stack.
                recurse(20)
            });
            assert_eq!(used.unwrap().join().unwrap(), 210);
        }
        // Threads of the runtime that block, so that it starts more of them.
        join_all((0..4).map(|_| {
            go(|| trefoil::blocking(|| std::thread::sleep(std::time::Duration::from_millis(5))))
        }));
    });
}

/// As in a thread: neither while the goroutines live nor in the stacks that the runtime keeps for
/// reuse.
#[test]
fn zeroed_thread_locals_take_no_memory_until_they_are_used() {
    child_test!();
    let rt = Runtime::builder().procs(2).build().unwrap();
    rt.run(|| {
        let before = rss();
        let (open, gate) = trefoil::chan::bounded::<()>(0);
        let all: Vec<_> = (0..100)
            .map(|_| {
                let gate = gate.clone();
                go(move || gate.recv().is_err())
            })
            .collect();
        (0..100).for_each(|_| yield_now());
        let each = || rss().saturating_sub(before) / 100;
        let parked = each();
        drop(open);
        assert!(join_all(all).into_iter().all(|closed| closed));
        let ended = each();
        let most = (SEVENS + ZEROES / 2) as u64;
        assert!(parked < most, "{parked} bytes of memory for each parked goroutine");
        assert!(ended < most, "{ended} bytes of memory for each goroutine that has ended");
    });
}
