//! Threads of a simulation start and end while a thread outside holds std's lock of the information
//! about threads. A program of its own, because a program has one allocator.
#![cfg(feature = "std")]

mod common;

use common::watchdog;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};
use trefoil::{go, sim, time};

/// The name of the threads outside. std frees a copy of it under its lock.
const NAME: &str = "outside the simulation";
const SECOND: Duration = Duration::from_secs(1);
const MILLI: Duration = Duration::from_millis(1);

/// How many threads outside are to end, and how many have held the lock.
static WANTED: AtomicUsize = AtomicUsize::new(0);
static HELD: AtomicUsize = AtomicUsize::new(0);

/// A thread outside holds the lock for 30 ms.
struct HoldsTheLock;

// SAFETY: passes everything to the system's allocator.
unsafe impl GlobalAlloc for HoldsTheLock {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // Only copies of the name have this size and begin like this.
        if layout.size() == NAME.len()
            // SAFETY: the caller's block; bytes that were never written may have any value.
            && (0..NAME.len()).all(|i| unsafe { block.add(i).read_volatile() } == NAME.as_bytes()[i])
            && HELD.load(SeqCst) < WANTED.load(SeqCst)
        {
            HELD.fetch_add(1, SeqCst);
            thread::sleep(30 * MILLI);
        }
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: HoldsTheLock = HoldsTheLock;

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
    let outside: Vec<_> = (0..2 * ROUNDS)
        .map(|i| {
            let wait = move || {
                while WANTED.load(SeqCst) <= i {
                    thread::sleep(MILLI);
                }
            };
            thread::Builder::new().name(NAME.into()).spawn(wait).unwrap()
        })
        .collect();
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
    assert_eq!(HELD.load(SeqCst), 2 * ROUNDS);
}
