//! A simulation in a program whose allocator holds a lock of std while it frees. A program of its own,
//! because a program has one allocator.
#![cfg(feature = "std")]

mod common;

use common::watchdog;
use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::thread;
use std::time::Duration;
use trefoil::{go, sim};

const MILLI: Duration = Duration::from_millis(1);

/// How many blocks there are.
static BLOCKS: Mutex<usize> = Mutex::new(0);

struct Counts;

// SAFETY: passes everything to the system's allocator.
unsafe impl GlobalAlloc for Counts {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let mut blocks = BLOCKS.lock().unwrap();
        *blocks += 1;
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        let mut blocks = BLOCKS.lock().unwrap();
        *blocks -= 1;
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counts = Counts;

/// A simulated goroutine allocates while a thread outside holds the allocator's lock. Returns how often
/// another one of the simulation ran meanwhile.
fn allocate_while_held() -> u32 {
    static IS_WANTED: AtomicBool = AtomicBool::new(false);
    static IS_HELD: AtomicBool = AtomicBool::new(false);
    static TURNS: AtomicU32 = AtomicU32::new(0);
    IS_WANTED.store(false, SeqCst);
    let outside = thread::spawn(|| {
        while !IS_WANTED.load(SeqCst) {
            thread::sleep(MILLI);
        }
        let blocks = BLOCKS.lock().unwrap();
        IS_HELD.store(true, SeqCst);
        // Less than a goroutine waits for std's lock before it parks.
        thread::sleep(100 * MILLI);
        IS_HELD.store(false, SeqCst);
        drop(blocks);
    });
    let turns = sim::run(|| {
        IS_WANTED.store(true, SeqCst);
        while !IS_HELD.load(SeqCst) {
            std::hint::spin_loop();
        }
        let other = go(|| {
            while IS_HELD.load(SeqCst) {
                TURNS.fetch_add(1, SeqCst);
                trefoil::yield_now();
            }
        });
        let before = TURNS.load(SeqCst);
        drop(black_box(Box::new(1)));
        let turns = TURNS.load(SeqCst) - before;
        other.join().unwrap();
        turns
    });
    outside.join().unwrap();
    turns
}

#[test]
fn the_lock_of_an_allocator_is_not_taken_for_the_one_of_std() {
    let _w = watchdog();
    // As for every lock of the program, the goroutine parks for it. On a busy machine it may come too
    // late.
    assert!((0..5).any(|_| allocate_while_held() > 100));
}

#[test]
fn threads_start_and_end_in_a_simulation() {
    let _w = watchdog();
    let program = || {
        let named = || thread::Builder::new().name("named".into());
        let threads: Vec<_> = (0..6).map(|i| named().spawn(move || i).unwrap()).collect();
        for (i, thread) in threads.into_iter().enumerate() {
            assert_eq!(thread.join().unwrap(), i);
        }
    };
    sim::builder().explore(100, program).unwrap();
}
