//! A million goroutines, three times: started and joined, alive at once, and as a load to balance.
//!
//! Each part is a `trefoil::run` of its own, and checks its result: goroutines that were lost or
//! ran twice would show in the sums.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::proc::{self, Status, ThreadTime};
use crate::stage::{Progress, Stage, each, grouped};
use trefoil::JoinHandle;

/// Goroutines that a spawner starts before it joins them: as many as a P's local queue holds.
const BATCH: u64 = 256;

/// Memory to have at hand for each goroutine that is alive: two pages, and some for the rest.
const BYTES_EACH: u64 = 10 << 10;

/// Primes below this are counted in part three, about a second of CPU time …
const PRIMES_BELOW: u32 = 4_000_000;

/// … and this is how many there are.
const PRIMES: u32 = 283_146;

/// Numbers that one goroutine of part three looks at.
const CHUNK: u32 = 1_000;

pub(crate) fn play(stage: &Stage) -> Result<(), String> {
    stage.fact(
        "CPUs, Ps",
        trefoil::run(|| format!("{}, {}", trefoil::num_cpus(), trefoil::procs())),
    );
    start_and_join(stage, stage.goroutines())?;
    alive_at_once(stage, stage.goroutines())?;
    lopsided(stage)
}

/// Splits `n` over one spawner for each P, as evenly as it goes.
fn shares(n: u64) -> impl Iterator<Item = u64> {
    let spawners = trefoil::procs() as u64;
    (0..spawners).map(move |i| n / spawners + u64::from(i < n % spawners))
}

fn join<T>(handle: JoinHandle<T>) -> T {
    handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn expect(what: &str, found: u64, expected: u64) -> Result<(), String> {
    if found == expected { Ok(()) } else { Err(format!("{what}: {found} instead of {expected}")) }
}

// --- Part one: start and join ------------------------------------------------------------------

fn start_and_join(stage: &Stage, n: u64) -> Result<(), String> {
    stage.part(format_args!("{} started and joined, {BATCH} at a time", grouped(n)));
    let progress = Progress::default();
    let counter = progress.clone();
    let (sum, time, status) = stage.watch(&progress, n, || {
        trefoil::run(move || {
            let start = Instant::now();
            let spawners: Vec<_> = shares(n)
                .map(|share| {
                    let counter = counter.clone();
                    trefoil::go(move || spawn_batches(share, &counter))
                })
                .collect();
            let sum = spawners.into_iter().map(join).sum();
            (sum, start.elapsed(), proc::status())
        })
    });
    stage.fact("time", format_args!("{time:.2?}, {}", each(time, n)));
    stage.fact("threads", status.threads);
    expect("goroutines that ran", sum, n)
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

fn alive_at_once(stage: &Stage, asked: u64) -> Result<(), String> {
    let n = asked.min(proc::memory_available() / BYTES_EACH).max(1);
    stage.part(format_args!("{} alive at once, each waiting for the one before it", grouped(n)));
    if n < asked {
        stage.fact("memory is short", format_args!("{} were asked for", grouped(asked)));
    }
    let progress = Progress::default();
    let counter = progress.clone();
    let alive = stage.watch(&progress, n, || trefoil::run(move || chains(n, &counter)));

    let grown = alive.after.memory.saturating_sub(alive.before.memory);
    stage.fact("goroutines", grouped(alive.goroutines));
    stage.fact("start until all wait", format_args!("{:.2?}, {}", alive.up, each(alive.up, n)));
    stage.fact(
        "release until all ended",
        format_args!("{:.2?}, {}", alive.down, each(alive.down, n)),
    );
    let each = grouped(grown / n);
    stage.fact("memory", format_args!("{} MiB, {each} bytes each", grouped(grown >> 20)));
    stage.fact("threads", alive.after.threads);
    expect("goroutines that ran", alive.sum, n)?;
    if alive.goroutines < n {
        return Err(format!("only {} goroutines were alive at once", alive.goroutines));
    }
    Ok(())
}

/// What part two saw.
struct Alive {
    sum: u64,
    goroutines: u64,
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
    Alive { sum, goroutines, up, down: start.elapsed(), before, after }
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

// --- Part three: a lopsided load ---------------------------------------------------------------

fn lopsided(stage: &Stage) -> Result<(), String> {
    let chunks = PRIMES_BELOW.div_ceil(CHUNK);
    stage.part(format_args!(
        "{} goroutines of work, all started by one: the other Ps steal",
        grouped(chunks.into())
    ));
    let progress = Progress::default();
    let counter = progress.clone();
    let load = stage.watch(&progress, chunks.into(), || trefoil::run(move || balance(&counter)));

    stage.fact("primes found", grouped(load.primes.into()));
    stage.fact("time", format_args!("{:.2?}", load.time));
    let of_wall = |cpu: Duration| cpu.as_secs_f64() / load.time.as_secs_f64();
    stage.fact(
        "CPU time",
        format_args!("{:.2?}: {:.2} CPUs for {} Ps", load.cpu, of_wall(load.cpu), load.procs),
    );
    // The drawing thread, sysmon and the like use next to nothing: no row for them.
    let busy = load.threads.iter().filter(|thread| of_wall(thread.cpu) >= 0.01);
    for (i, thread) in busy.enumerate() {
        stage.bar(&format!("thread {i}"), of_wall(thread.cpu), format_args!("{:.2?}", thread.cpu));
    }
    expect("primes", load.primes.into(), PRIMES.into())
}

/// What part three saw.
struct Load {
    primes: u32,
    time: Duration,
    procs: usize,
    cpu: Duration,
    threads: Vec<ThreadTime>,
}

fn balance(progress: &Progress) -> Load {
    let (before, cpu_before) = (proc::thread_times(), proc::cpu_time());
    let start = Instant::now();
    let progress = progress.clone();
    // One goroutine on one P starts all; without stealing that P would do everything.
    let all = trefoil::go(move || {
        let chunks = (0..PRIMES_BELOW).step_by(CHUNK as usize).map(|from| {
            let progress = progress.clone();
            trefoil::go(move || {
                let primes = (from..(from + CHUNK).min(PRIMES_BELOW)).filter(|&n| is_prime(n));
                let count = primes.count() as u32;
                progress.add(1);
                count
            })
        });
        let chunks: Vec<_> = chunks.collect();
        chunks.into_iter().map(join).sum()
    });
    let primes = join(all);
    let time = start.elapsed();
    Load {
        primes,
        time,
        procs: trefoil::procs(),
        cpu: proc::cpu_time().saturating_sub(cpu_before),
        threads: proc::used_since(&before, proc::thread_times()),
    }
}

/// By trial division: the point is to be busy.
fn is_prime(n: u32) -> bool {
    let mut divisors = (2..).take_while(|d| d * d <= n);
    n >= 2 && divisors.all(|d| !n.is_multiple_of(d))
}

#[cfg(test)]
mod tests {
    use super::is_prime;

    #[test]
    fn primes() {
        let found: Vec<u32> = (0..30).filter(|&n| is_prime(n)).collect();
        assert_eq!(found, [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]);
    }
}
