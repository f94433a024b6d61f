//! Time per pair of allocation and release, on a goroutine and on a plain thread.

use super::report;
use crate::{Limits, watchdog};
use std::alloc::{Layout, alloc, dealloc};
use std::hint::black_box;
use std::time::Instant;
use trefoil::Runtime;

const SIZES: [usize; 3] = [16, 128, 1024];
/// Pairs per sample, so that a sample is shorter than a time slice.
const PAIRS: u32 = 50_000;
/// Samples of each kind; the fastest counts.
const SAMPLES: usize = 15;
/// Other load may disturb one attempt, but not all of them.
const ATTEMPTS: usize = 5;

pub(super) fn per_allocation(limits: &Limits) {
    let strict = std::env::var("TREFOIL_ALLOC_STRICT").is_ok_and(|value| value == "1");
    let runtime = Runtime::builder().procs(2).build().expect("a runtime");
    for size in SIZES {
        let mut best = f64::INFINITY;
        for _ in 0..ATTEMPTS {
            let (goroutine, thread) = fastest(&runtime, size);
            let ratio = goroutine / thread;
            report!("{size} bytes: goroutine {goroutine:.1} ns, thread {thread:.1} ns, {ratio:.2}");
            best = best.min(ratio);
            if limits.time_ratio.is_none_or(|limit| ratio <= limit) {
                break;
            }
        }
        if let Some(limit) = limits.time_ratio
            && strict
        {
            assert!(best <= limit, "{best:.2} times as long as on a thread, limit {limit}");
        }
    }
}

/// Returns the nanoseconds per pair on a goroutine and on a plain thread, which run by turns.
fn fastest(runtime: &Runtime, size: usize) -> (f64, f64) {
    let (mut goroutine, mut thread) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..SAMPLES {
        let sample = runtime.go(move || sample(size)).expect("a goroutine");
        goroutine = goroutine.min(sample.join().expect("no panic"));
        let sample = std::thread::spawn(move || self::sample(size));
        thread = thread.min(sample.join().expect("no panic"));
        watchdog::progress();
    }
    (goroutine, thread)
}

/// Returns the nanoseconds per pair on the calling goroutine or thread.
fn sample(size: usize) -> f64 {
    const WARM_UP: u32 = 1_000;
    pairs(size, WARM_UP);
    let start = Instant::now();
    pairs(size, PAIRS);
    start.elapsed().as_nanos() as f64 / f64::from(PAIRS)
}

fn pairs(size: usize, n: u32) {
    let layout = Layout::from_size_align(size, 8).expect("a valid layout");
    for _ in 0..n {
        // SAFETY: the size is not zero; the block is freed at once, with the same layout.
        unsafe { dealloc(black_box(alloc(layout)), layout) };
    }
}
