//! What it costs to watch a program: rounds with the flight recorder, or with a CPU profile, and
//! rounds without, by turns, in one process.
//!
//! The result is the median over pairs of neighbouring rounds, so what disturbs both rounds of a
//! pair does not count: many short rounds say more than few long ones. A round is compared by its
//! CPU time, all threads of the process included. On a busy machine the least of all rounds of each
//! kind say more (`least_percent`).

use std::time::{Duration, Instant};

use bench_common::{Args, Report, cpu_time};
use trefoil::profile::Cpu;
use trefoil::time::sleep;
use trefoil::trace::Recorder;

/// Rounds of each kind, unless `pairs=` says otherwise.
const PAIRS: usize = 120;
/// How long a round takes at least, unless `ms=` says otherwise.
const ROUND: Duration = Duration::from_millis(30);
/// The rate of the CPU profile, unless `hz=` says otherwise. Go's.
const HZ: usize = 100;
/// A profile reads the unwind tables at its first samples; from then on it only counts. CPU time.
const TABLES_READ: Duration = Duration::from_millis(100);

/// Compares rounds of `work` with the flight recorder and without. Each call of `work` returns how
/// many operations it made.
pub fn recorder(args: &Args, work: impl FnMut() -> usize) -> Report {
    let bytes = args.number("bytes", 8 << 20);
    compare(args, || Recorder::builder().bytes(bytes).start().expect("a recorder"), work)
}

/// The same with a CPU profile.
pub fn profile(args: &Args, work: impl FnMut() -> usize) -> Report {
    let hz = args.number("hz", HZ) as u32;
    let start = || {
        let cpu = Cpu::start(hz).expect("a profile");
        let until = cpu_time() + TABLES_READ;
        while cpu_time() < until {
            std::hint::black_box(bench_common::chunk(1));
        }
        cpu
    };
    compare(args, start, work)
}

fn compare<W>(args: &Args, watch: impl Fn() -> W, mut work: impl FnMut() -> usize) -> Report {
    let repeats = repeats_of_a_round(args.time(ROUND), &mut work);
    let mut round = || {
        let (wall, cpu) = (Instant::now(), cpu_time());
        let operations: usize = (0..repeats).map(|_| work()).sum();
        let per_operation = |time: Duration| time.as_secs_f64() * 1e9 / operations as f64;
        [per_operation(cpu_time() - cpu), per_operation(wall.elapsed())]
    };
    let mut pairs = Vec::new();
    for i in 0..args.number("pairs", PAIRS) {
        // Which of the two is the first changes from pair to pair.
        let mut nanos = [[0.0; 2]; 2];
        for is_watched in [i % 2 == 0, i % 2 == 1] {
            let watching = is_watched.then(&watch);
            nanos[usize::from(is_watched)] = round();
            drop(watching);
            // What ends with a profile: its thread, and the names of its functions.
            sleep(Duration::from_millis(2));
        }
        pairs.push(nanos);
    }
    let percent =
        |which: usize| median(pairs.iter().map(|[off, on]| (on[which] / off[which] - 1.0) * 100.0));
    let least = |is_watched: usize| {
        pairs.iter().map(|pair| pair[is_watched][0]).fold(f64::INFINITY, f64::min)
    };
    Report::new()
        .with("percent", percent(0))
        .with("least_percent", (least(1) / least(0) - 1.0) * 100.0)
        .with("extra_ns", median(pairs.iter().map(|[off, on]| on[0] - off[0])))
        .with("cpu_ns", median(pairs.iter().map(|[off, _]| off[0])))
        .with("wall_percent", percent(1))
        .with("wall_ns", median(pairs.iter().map(|[off, _]| off[1])))
}

/// Warms up, and returns how many calls of `work` take at least `time`.
fn repeats_of_a_round(time: Duration, work: &mut impl FnMut() -> usize) -> u32 {
    let mut calls = 0u32;
    let begun = Instant::now();
    while begun.elapsed() < 2 * time {
        work();
        calls += 1;
    }
    calls.div_ceil(2)
}

fn median(numbers: impl Iterator<Item = f64>) -> f64 {
    let mut numbers: Vec<f64> = numbers.collect();
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}
