//! Runtimes that are dropped while their goroutines allocate.
//!
//! Such goroutines are never resumed. None of them may be stopped inside the allocator, which the
//! process still needs.

use super::report;
use crate::watchdog;
use crate::work::{Exchange, Worker};
use std::sync::Arc;
use std::time::{Duration, Instant};
use trefoil::Runtime;

const ROUNDS: u64 = 24;
const GOROUTINES: usize = 24;
/// Each orphaned goroutine leaks at most this much.
const BUDGET_BYTES: usize = 16 << 10;
/// Allocations after each runtime, on each of three plain threads.
const ALLOCATIONS_AFTER: usize = 300;

pub(super) fn end_in_the_middle(procs: usize) {
    let mut slowest = Duration::ZERO;
    for round in 0..ROUNDS {
        let runtime = Runtime::builder().procs(procs).build().expect("a runtime");
        let exchange = Arc::new(Exchange::among_goroutines());
        for i in 0..GOROUTINES {
            let exchange = exchange.clone();
            let work = move || {
                let mut worker = Worker::new(BUDGET_BYTES);
                loop {
                    // Half of them only allocate: they are in the allocator most of the time.
                    if i % 2 == 0 { worker.allocate() } else { worker.round(&exchange) }
                }
            };
            runtime.go(work).expect("a goroutine");
        }
        std::thread::sleep(Duration::from_millis(2 + 7 * round % 12));
        let start = Instant::now();
        drop(runtime);
        slowest = slowest.max(start.elapsed());
        let after = || {
            let mut worker = Worker::new(BUDGET_BYTES);
            (0..ALLOCATIONS_AFTER).for_each(|_| worker.allocate());
        };
        let threads = [std::thread::spawn(after), std::thread::spawn(after)];
        after();
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        // A goroutine may have been stopped while it held the lock of a channel: do not use them
        // again.
        std::mem::forget(exchange);
        watchdog::progress();
    }
    report!("{ROUNDS} runtimes; slowest drop {slowest:.1?}");
}
