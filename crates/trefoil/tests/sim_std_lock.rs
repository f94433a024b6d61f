//! Threads of a simulation start and end while another thread holds std's lock of the information
//! about threads: one outside, or one of the same simulation. A program of its own, because a program
//! has one allocator.
#![cfg(feature = "std")]

mod common;

use common::watchdog;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};
use trefoil::{go, sim, time};

/// The name of the threads outside. std frees a copy of it under its lock.
const NAME: &str = "outside the simulation";
/// The name of simulated threads that let others run while they hold the lock.
const NAME_THAT_YIELDS: &str = "yields under the lock";
const SECOND: Duration = Duration::from_secs(1);
const MILLI: Duration = Duration::from_millis(1);

/// How many threads outside are to end, and how many have held the lock.
static WANTED: AtomicUsize = AtomicUsize::new(0);
static HELD: AtomicUsize = AtomicUsize::new(0);

/// The threads outside end only after the test has said so.
static TESTS: Mutex<()> = Mutex::new(());

/// A thread outside holds the lock for 30 ms, and one of a simulation while others run.
struct HoldsTheLock;

// SAFETY: passes everything to the system's allocator.
unsafe impl GlobalAlloc for HoldsTheLock {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // Only copies of a name have its size and begin like it.
        let is = |name: &str| {
            layout.size() == name.len()
                // SAFETY: the caller's block; bytes that were never written may have any value.
                && (0..name.len()).all(|i| unsafe { block.add(i).read_volatile() } == name.as_bytes()[i])
        };
        if is(NAME) && HELD.load(SeqCst) < WANTED.load(SeqCst) {
            HELD.fetch_add(1, SeqCst);
            thread::sleep(30 * MILLI);
        }
        if is(NAME_THAT_YIELDS) {
            thread::yield_now();
        }
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: HoldsTheLock = HoldsTheLock;

/// Starts threads outside, which end one after the other when [`begin_to_hold`] is called.
fn start_outside(count: usize) -> Vec<thread::JoinHandle<()>> {
    let first = WANTED.load(SeqCst);
    let start = |i| {
        let wait = move || {
            while WANTED.load(SeqCst) <= first + i {
                thread::sleep(MILLI);
            }
        };
        thread::Builder::new().name(NAME.into()).spawn(wait).unwrap()
    };
    (0..count).map(start).collect()
}

/// Lets one more thread outside take the lock, and waits until it holds that.
fn begin_to_hold() {
    let wanted = WANTED.fetch_add(1, SeqCst) + 1;
    while HELD.load(SeqCst) < wanted {
        std::hint::spin_loop();
    }
}

#[test]
fn a_simulated_thread_waits_for_the_lock_of_a_thread_outside() {
    const ROUNDS: usize = 5;
    let _w = watchdog();
    let _turn = TESTS.lock().unwrap();
    let outside = start_outside(2 * ROUNDS);
    for _ in 0..ROUNDS {
        let waited = sim::run(|| {
            let begin = Instant::now();
            // If a thread parked, the time would jump to the end of this sleep.
            let sleeper = go(|| time::sleep(SECOND));
            begin_to_hold();
            // One waits at its start, the other one at its end.
            assert_eq!(thread::spawn(|| 1).join().unwrap(), 1);
            thread::spawn(begin_to_hold).join().unwrap();
            let waited = begin.elapsed();
            sleeper.join().unwrap();
            waited
        });
        assert_eq!(waited, Duration::ZERO);
    }
    outside.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(HELD.load(SeqCst), WANTED.load(SeqCst));
}

#[test]
fn a_seed_is_repeated_while_threads_outside_hold_the_lock() {
    const RUNS: usize = 3;
    let _w = watchdog();
    let _turn = TESTS.lock().unwrap();
    let outside = start_outside(RUNS);
    let steps = |is_held: bool| {
        let program = move || {
            if is_held {
                begin_to_hold();
            }
            let other = thread::spawn(|| 2);
            assert_eq!(thread::spawn(|| 1).join().unwrap(), 1);
            assert_eq!(other.join().unwrap(), 2);
        };
        let seed: sim::Seed = "ordinary:2a".parse().unwrap();
        sim::builder().replay(&seed, program).unwrap().steps
    };
    // A first run makes what later ones only use.
    steps(false);
    let free = steps(false);
    for _ in 0..RUNS {
        assert_eq!(steps(true), free);
    }
    outside.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn a_simulated_thread_may_yield_while_it_holds_the_lock() {
    let _w = watchdog();
    let _turn = TESTS.lock().unwrap();
    let program = || {
        let named = || thread::Builder::new().name(NAME_THAT_YIELDS.into());
        let threads: Vec<_> = (0..3).map(|i| named().spawn(move || i).unwrap()).collect();
        for (i, thread) in threads.into_iter().enumerate() {
            assert_eq!(thread.join().unwrap(), i);
        }
    };
    sim::builder().explore(20, program).unwrap();
}
