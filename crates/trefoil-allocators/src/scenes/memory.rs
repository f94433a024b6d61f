//! Resident memory that a goroutine costs because it has allocated, and how much of it returns to
//! the kernel when the goroutine has ended.

use super::report;
use crate::block::Block;
use crate::{Limits, watchdog};
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};
use trefoil::Runtime;
use trefoil::sync::WaitGroup;

/// A goroutine allocates and frees `BLOCKS` blocks of each size.
const SIZES: [usize; 8] = [16, 32, 48, 64, 128, 256, 512, 1024];
const BLOCKS: usize = 7;
/// Parked goroutines whose memory is compared.
const PARKED: usize = 10_000;
/// Goroutines that end, after which memory must return to the kernel.
const ENDING: usize = 100_000;
/// Goroutines for a first estimate of the cost.
const FEW: usize = 500;
/// The memory that the scene may use. With an expensive allocator it starts fewer goroutines.
const MAX_BYTES: f64 = 2e9;
/// A rough estimate of a goroutine's own stack and thread-local storage.
const GOROUTINE_BYTES: f64 = 10e3;
/// How long the allocator has to return memory to the kernel.
const RETURN_TIME: Duration = Duration::from_secs(3);

pub(super) fn per_goroutine(limits: &Limits) {
    let runtime = Runtime::builder().procs(2).build().expect("a runtime");
    let (cost, given_back) = runtime.run(|| {
        let start = resident();
        let estimate = cost_of(FEW).max(0.0);
        let affordable = (MAX_BYTES / (GOROUTINE_BYTES + estimate)) as usize;
        let parked = PARKED.min(affordable);
        let cost = cost_of(parked);
        report!("{cost:.0} bytes per goroutine that has allocated ({parked} goroutines)");
        (cost, given_back_by(ENDING.min(affordable), start))
    });
    if let Some(limit) = limits.bytes_per_goroutine {
        assert!(cost <= limit, "{cost:.0} bytes per goroutine, limit {limit}");
    }
    if let Some(limit) = limits.percent_given_back {
        assert!(given_back >= limit, "only {given_back:.1} % given back, limit {limit} %");
    }
}

/// Returns the resident bytes that each of `n` parked goroutines costs because it has allocated and
/// freed.
fn cost_of(n: usize) -> f64 {
    let start = resident();
    let goroutines = Parked::start(n);
    let before = resident();
    goroutines.allocate();
    let after = resident();
    goroutines.end();
    // So that the next goroutines do not reuse their memory.
    wait_until_given_back(start, after - start);
    (after - before) / n as f64
}

/// Returns the percentage of the memory of `n` goroutines that is given back in time after they
/// have ended. `before` is the memory before the first goroutine, so that memory that the allocator
/// kept for earlier goroutines counts, too.
fn given_back_by(n: usize, before: f64) -> f64 {
    let goroutines = Parked::start(n);
    goroutines.allocate();
    let taken = resident() - before;
    goroutines.end();
    let start = Instant::now();
    let kept = wait_until_given_back(before, taken);
    let given_back = 100.0 * (1.0 - kept / taken);
    let (taken, time) = (taken / 1e6, start.elapsed());
    report!("{given_back:.1} % of {taken:.0} MB given back {time:.1?} after {n} goroutines ended");
    given_back
}

/// Waits until at least 95 % of the `taken` bytes above `before` are given back, at most
/// [`RETURN_TIME`]. Returns the bytes that are still resident.
fn wait_until_given_back(before: f64, taken: f64) -> f64 {
    let start = Instant::now();
    loop {
        std::thread::sleep(Duration::from_millis(100));
        let kept = resident() - before;
        if kept <= taken / 20.0 || start.elapsed() > RETURN_TIME {
            return kept;
        }
    }
}

/// Goroutines that wait, allocate on demand, wait again, and end on demand.
struct Parked(Arc<Gates>);

#[derive(Default)]
struct Gates {
    /// Goroutines that have not reached the first gate yet.
    starting: WaitGroup,
    may_allocate: WaitGroup,
    allocating: WaitGroup,
    may_end: WaitGroup,
    ending: WaitGroup,
}

impl Parked {
    /// Starts `n` goroutines. Returns when all of them wait and none has allocated.
    fn start(n: usize) -> Parked {
        let gates = Arc::new(Gates::default());
        gates.starting.add(n);
        gates.may_allocate.add(1);
        gates.allocating.add(n);
        gates.may_end.add(1);
        gates.ending.add(n);
        for _ in 0..n {
            let gates = gates.clone();
            trefoil::go(move || {
                touch_stack();
                watchdog::progress();
                gates.starting.done();
                gates.may_allocate.wait();
                allocate();
                watchdog::progress();
                gates.allocating.done();
                gates.may_end.wait();
                gates.ending.done();
            });
        }
        gates.starting.wait();
        Parked(gates)
    }

    /// Makes all goroutines allocate and free. Returns when they wait again.
    fn allocate(&self) {
        self.0.may_allocate.done();
        self.0.allocating.wait();
    }

    fn end(self) {
        self.0.may_end.done();
        self.0.ending.wait();
        watchdog::progress();
    }
}

/// Touches the pages of the stack that `allocate` will need, so that they do not count as a cost of
/// the allocator.
#[inline(never)]
fn touch_stack() {
    black_box([0u8; 8192]);
}

#[inline(never)]
fn allocate() {
    for size in SIZES {
        let blocks: [Block; BLOCKS] = std::array::from_fn(|_| Block::new(size, 8));
        drop(black_box(blocks));
    }
}

/// Returns the resident bytes of this process, exactly: the kernel sums them over the page tables.
fn resident() -> f64 {
    // Goroutines that have passed a gate may not have parked yet.
    std::thread::sleep(Duration::from_millis(20));
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").expect("Linux 4.14");
    let line = text.lines().find_map(|line| line.strip_prefix("Rss:")).expect("a line Rss");
    let kib = line.split_whitespace().next().expect("a number");
    kib.parse::<f64>().expect("a number") * 1024.0
}
