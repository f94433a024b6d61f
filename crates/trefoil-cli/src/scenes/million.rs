//! A million goroutines, twice: started and joined, and alive at once.
//!
//! Each part is a `trefoil::run` of its own. The sums would show a goroutine that was lost or ran
//! twice.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use trefoil::JoinHandle;

use super::{join, promise_few_threads};
use crate::proc::{self, Status};
use crate::report::{Progress, Report, each, grouped};

/// Goroutines that a spawner starts before it joins them: as many as a P's local queue holds.
const BATCH: u64 = 256;

/// The most memory per live goroutine: two pages and a reserve; frames of a debug build need one
/// page more.
const BYTES_EACH: u64 = if cfg!(debug_assertions) { 14 << 10 } else { 10 << 10 };

/// Memory that does not depend on their number: a stack cache per P, tables.
const BYTES_ONCE: u64 = 8 << 20;

pub(crate) fn play(report: &Report) -> Result<(), String> {
    report.fact(
        "CPUs, Ps",
        trefoil::run(|| format!("{}, {}", trefoil::num_cpus(), trefoil::procs())),
    );
    start_and_join(report, report.goroutines());
    alive_at_once(report, report.goroutines());
    Ok(())
}

/// Splits `n` evenly over one spawner per P.
fn shares(n: u64) -> impl Iterator<Item = u64> {
    let spawners = trefoil::procs() as u64;
    (0..spawners).map(move |i| n / spawners + u64::from(i < n % spawners))
}

// --- Part one: start and join ------------------------------------------------------------------

fn start_and_join(report: &Report, n: u64) {
    report.part(format_args!("{} started and joined, {BATCH} at a time", grouped(n)));
    let progress = Progress::default();
    let counter = progress.clone();
    let (sum, time) = report.watch(&progress, n, || {
        trefoil::run(move || {
            let start = Instant::now();
            let spawners: Vec<_> = shares(n)
                .map(|share| {
                    let counter = counter.clone();
                    trefoil::go(move || spawn_batches(share, &counter))
                })
                .collect();
            let sum: u64 = spawners.into_iter().map(join).sum();
            (sum, start.elapsed())
        })
    });
    report.fact("time", format_args!("{time:.2?}, {}", each(time, n)));
    report.promise("ran", grouped(sum), grouped(n), sum == n);
}

/// Starts and joins `n` goroutines; returns how many ran.
fn spawn_batches(n: u64, progress: &Progress) -> u64 {
    let mut ran = 0;
    let mut left = n;
    let mut batch = Vec::with_capacity(BATCH as usize);
    while left > 0 {
        let size = left.min(BATCH);
        batch.extend((0..size).map(|_| trefoil::go(|| 1)));
        ran += batch.drain(..).map(join).sum::<u64>();
        left -= size;
        progress.add(size);
    }
    ran
}

// --- Part two: alive at once -------------------------------------------------------------------

fn alive_at_once(report: &Report, asked: u64) {
    // Leave memory for other processes.
    let n = asked.min(proc::memory_available() / 4 * 3 / BYTES_EACH).max(1);
    report.part(format_args!("{} alive at once, each waiting for its predecessor", grouped(n)));
    if n < asked {
        report.fact("memory is short", format_args!("{} were asked for", grouped(asked)));
    }
    let progress = Progress::default();
    let counter = progress.clone();
    let alive = report.watch(&progress, n, || trefoil::run(move || chains(n, &counter)));

    report.fact("start until all wait", format_args!("{:.2?}, {}", alive.up, each(alive.up, n)));
    report.fact(
        "release until all ended",
        format_args!("{:.2?}, {}", alive.down, each(alive.down, n)),
    );
    // The main goroutine is one more.
    let others = alive.goroutines.saturating_sub(1);
    report.promise("alive at once", grouped(others), grouped(n), others >= n);
    report.promise("ran", grouped(alive.sum), grouped(n), alive.sum == n);
    let grown = alive.after.memory.saturating_sub(alive.before.memory);
    report.promise(
        "memory",
        format_args!("{} MiB, {} bytes each", grouped(grown >> 20), grouped(grown / n)),
        format_args!("at most {} KiB each, and {} MiB", BYTES_EACH >> 10, BYTES_ONCE >> 20),
        grown <= n * BYTES_EACH + BYTES_ONCE,
    );
    promise_few_threads(report, alive.after.threads, alive.procs);
}

/// The measurements of part two.
struct Alive {
    sum: u64,
    goroutines: u64,
    procs: usize,
    up: Duration,
    down: Duration,
    before: Status,
    after: Status,
}

/// One chain for each P: the first goroutine waits for a flag, each other joins its predecessor.
fn chains(n: u64, running: &Progress) -> Alive {
    let release = Arc::new(AtomicBool::new(false));
    let before = proc::status();
    let start = Instant::now();
    let spawners: Vec<_> = shares(n)
        .filter(|&share| share > 0)
        .map(|share| {
            let (release, running) = (release.clone(), running.clone());
            trefoil::go(move || chain(share, release, running))
        })
        .collect();
    let ends: Vec<_> = spawners.into_iter().map(join).collect();
    // Started is not enough: a goroutine has its stack only once it runs.
    while running.get() < n {
        trefoil::yield_now();
    }
    let up = start.elapsed();
    let goroutines = trefoil::num_goroutines() as u64;
    let after = proc::status();

    let start = Instant::now();
    release.store(true, Ordering::Relaxed);
    let sum = ends.into_iter().map(join).sum();
    Alive { sum, goroutines, procs: trefoil::procs(), up, down: start.elapsed(), before, after }
}

/// Starts a chain of `n`; its last goroutine returns how long the chain was.
fn chain(n: u64, release: Arc<AtomicBool>, running: Progress) -> JoinHandle<u64> {
    let first = running.clone();
    let mut last = trefoil::go(move || {
        first.add(1);
        while !release.load(Ordering::Relaxed) {
            trefoil::yield_now();
        }
        1
    });
    for _ in 1..n {
        let (previous, running) = (last, running.clone());
        last = trefoil::go(move || {
            running.add(1);
            join(previous) + 1
        });
    }
    last
}
