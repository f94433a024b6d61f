//! An unbalanced load: one goroutine starts all the work on its own P; the other Ps have to steal.

use std::time::{Duration, Instant};

use super::join;
use crate::proc::{self, ThreadTime};
use crate::report::{Progress, Report, grouped};

/// Primes below this are counted, which takes about a second of CPU time.
const PRIMES_BELOW: u32 = 4_000_000;

/// The number of primes below `PRIMES_BELOW`.
const PRIMES: u32 = 283_146;

/// Numbers that one goroutine tests. So large that all goroutines fit into one P's queue: the
/// overflow would go to the global queue and could be taken without stealing.
const CHUNK: u32 = 20_000;

/// How busy each P must be, from the start of the first goroutine to the end of the last.
const BUSY: f64 = 0.7;

pub(crate) fn play(report: &Report) -> Result<(), String> {
    // With one P there is no other P to steal from.
    let procs = trefoil::run(trefoil::procs).max(2);
    let chunks = PRIMES_BELOW.div_ceil(CHUNK);
    report.part(format_args!(
        "{} goroutines of work, all started by one: the other of {procs} Ps steal",
        grouped(chunks.into())
    ));
    let runtime = trefoil::Runtime::builder().procs(procs).build().map_err(|e| e.to_string())?;
    let progress = Progress::default();
    let counter = progress.clone();
    let load = report.watch(&progress, chunks.into(), || runtime.run(move || balance(&counter)));

    report.fact("time", format_args!("{:.2?}", load.time));
    let of_wall = |time: Duration| time.as_secs_f64() / load.time.as_secs_f64();
    report.fact("CPU time", format_args!("{:.2?}: {:.2} CPUs", load.cpu, of_wall(load.cpu)));
    // The drawing thread, sysmon and the helper thread use almost no CPU: no row for them.
    let busy = load.threads.iter().filter(|thread| of_wall(thread.cpu) >= 0.01);
    for (i, thread) in busy.enumerate() {
        report.bar(&format!("thread {i}"), of_wall(thread.cpu), format_args!("{:.2?}", thread.cpu));
    }
    let found = load.primes;
    report.promise("primes", grouped(found.into()), grouped(PRIMES.into()), found == PRIMES);
    report.promise("stolen", grouped(load.stolen), "some", load.stolen > 0);
    // On a CPU or waiting for one: other processes must not count against the scheduler.
    let at_work: Duration = load.threads.iter().map(|thread| thread.cpu + thread.queued).sum();
    let (at_work, least) = (of_wall(at_work), BUSY * procs as f64);
    report.promise(
        "threads at work",
        format_args!("{at_work:.2} on average"),
        format_args!("{least:.1} of {procs} at least"),
        at_work >= least,
    );
    Ok(())
}

/// The measurements.
struct Load {
    primes: u32,
    stolen: u64,
    time: Duration,
    cpu: Duration,
    threads: Vec<ThreadTime>,
}

fn balance(progress: &Progress) -> Load {
    let (before, cpu_before) = (proc::thread_times(), proc::cpu_time());
    let start = Instant::now();
    let progress = progress.clone();
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
    Load {
        primes,
        stolen: trefoil::debug::stats().procs.iter().map(|p| p.stolen).sum(),
        time: start.elapsed(),
        cpu: proc::cpu_time().saturating_sub(cpu_before),
        threads: proc::used_since(&before, proc::thread_times()),
    }
}

/// Trial division in a plain loop: it has to be slow, also in a debug build.
fn is_prime(n: u32) -> bool {
    let mut d = 2;
    while d * d <= n {
        if n.is_multiple_of(d) {
            return false;
        }
        d += 1;
    }
    n >= 2
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
