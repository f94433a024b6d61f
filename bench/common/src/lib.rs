//! What every Rust worker shares: its arguments, the meter, memory readings, the arithmetic of
//! `forkjoin`, and the one JSON line at the end; in modules, what belongs to allocation,
//! ticks, echoes, idle connections and HTTP.
//! `go/*.go` hold the same in Go.
//!
//! A worker is called as `worker WORKLOAD [KEY=VALUE …]` and prints one JSON object.

pub mod alloc;
pub mod clock;
pub mod conns;
pub mod echo;
pub mod http;

use std::fs;
use std::process::exit;
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, UsageWho, getrlimit, getrusage, setrlimit};
use nix::sys::time::TimeValLike;
use serde_json::{Map, Value};

/// `worker WORKLOAD [KEY=VALUE …]`.
#[derive(Clone)]
pub struct Args {
    pub workload: String,
    pairs: Vec<(String, String)>,
}

impl Args {
    /// Does not return in a process that is the client of idle connections.
    pub fn parse() -> Args {
        conns::run_client_if_asked();
        let mut words = std::env::args().skip(1);
        let workload = words.next().unwrap_or_else(|| fail("usage: worker WORKLOAD [KEY=VALUE …]"));
        Args::of(workload, words)
    }

    fn of(workload: String, words: impl Iterator<Item = String>) -> Args {
        let pairs = words
            .map(|word| match word.split_once('=') {
                Some((key, value)) => (key.to_owned(), value.to_owned()),
                None => fail(&format!("not KEY=VALUE: {word}")),
            })
            .collect();
        Args { workload, pairs }
    }

    /// The number given for `key`, or `default`.
    pub fn number(&self, key: &str, default: usize) -> usize {
        match self.pairs.iter().find(|(k, _)| k == key) {
            Some((_, value)) => {
                value.parse().unwrap_or_else(|_| fail(&format!("not a number: {key}={value}")))
            }
            None => default,
        }
    }

    /// The time to measure for (`ms=`), or `default`.
    pub fn time(&self, default: Duration) -> Duration {
        Duration::from_millis(self.number("ms", default.as_millis() as usize) as u64)
    }

    pub fn procs(&self) -> usize {
        self.number("procs", 2)
    }

    /// Ends the program: this worker has no such workload.
    pub fn unknown(&self) -> ! {
        fail(&format!("this worker has no workload named {}", self.workload))
    }
}

fn fail(why: &str) -> ! {
    eprintln!("{why}");
    exit(2)
}

/// Counts rounds of `ops` operations: warms up for a quarter of the budget (`ms=`, default 500), then measures for the budget; at least one round of each.
///
/// ```ignore
/// let mut meter = Meter::new(&args, 1000);
/// while meter.another_round() {
///     one_round();
/// }
/// meter.report().print();
/// ```
pub struct Meter {
    budget: Duration,
    ops: usize,
    phase: Phase,
    rounds: u32,
    wall: Instant,
    cpu: Duration,
}

enum Phase {
    Fresh,
    WarmUp,
    Measure,
}

impl Meter {
    pub fn new(args: &Args, ops: usize) -> Meter {
        Meter {
            budget: Duration::from_millis(args.number("ms", 500) as u64),
            ops,
            phase: Phase::Fresh,
            rounds: 0,
            wall: Instant::now(),
            cpu: cpu_time(),
        }
    }

    pub fn another_round(&mut self) -> bool {
        match self.phase {
            Phase::Fresh => self.enter(Phase::WarmUp),
            Phase::WarmUp if self.wall.elapsed() >= self.budget / 4 => self.enter(Phase::Measure),
            Phase::WarmUp => {}
            Phase::Measure => {
                self.rounds += 1;
                return self.wall.elapsed() < self.budget;
            }
        }
        true
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.cpu = cpu_time();
        self.wall = Instant::now();
    }

    /// Call this right after [`Meter::another_round`] returned false.
    pub fn report(self) -> Report {
        let wall = self.wall.elapsed().as_secs_f64();
        let cpu = (cpu_time() - self.cpu).as_secs_f64();
        let ops = self.rounds as f64 * self.ops as f64;
        Report::new()
            .with("ns_per_op", wall * 1e9 / ops)
            .with("per_s", ops / wall)
            .with("ms_per_round", wall * 1e3 / self.rounds as f64)
            .with("cores", cpu / wall)
            .with("rounds", self.rounds as f64)
    }
}

/// CPU time that this process has used, user and system.
pub fn cpu_time() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_SELF).expect("getrusage of this process");
    let micros = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    Duration::from_micros(micros as u64)
}

/// The metrics of one sample.
pub struct Report(Map<String, Value>);

impl Report {
    #[expect(clippy::new_without_default, reason = "an empty report has no meaning of its own")]
    pub fn new() -> Report {
        Report(Map::new())
    }

    pub fn with(mut self, key: &str, value: f64) -> Report {
        self.0.insert(key.to_owned(), value.into());
        self
    }

    /// Adds quantiles of lateness or duration.
    pub fn with_lateness(self, mut late: Vec<Duration>) -> Report {
        late.sort_unstable();
        let last = late.len().checked_sub(1).expect("something was measured");
        let us = |quantile: f64| late[(last as f64 * quantile) as usize].as_secs_f64() * 1e6;
        self.with("p50_us", us(0.5))
            .with("p99_us", us(0.99))
            .with("max_us", us(1.0))
            .with("p99_ms", us(0.99) / 1e3)
    }

    /// Returns a metric that is there.
    fn get(&self, key: &str) -> f64 {
        self.0[key].as_f64().expect("a number")
    }

    /// Adds the metrics of another report.
    pub fn with_all(mut self, other: Report) -> Report {
        self.0.extend(other.0);
        self
    }

    /// Adds the memory per goroutine.
    pub fn with_memory(self, n: usize, before: Memory, full: Memory) -> Report {
        self.with("rss_bytes", (full.rss - before.rss) / n as f64)
            .with("pte_bytes", (full.pte - before.pte) / n as f64)
    }

    pub fn print(self) {
        println!("{}", Value::Object(self.0));
    }
}

/// Lets this process have as many open files as it may; Go does so by itself.
pub fn allow_many_files() {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).expect("the limit of open files");
    setrlimit(Resource::RLIMIT_NOFILE, most, most).expect("a higher limit of open files");
}

/// Resident memory and page tables of this process, in bytes.
#[derive(Clone, Copy)]
pub struct Memory {
    rss: f64,
    pte: f64,
}

impl Memory {
    pub fn now() -> Memory {
        let status = fs::read_to_string("/proc/self/status").expect("/proc/self/status");
        let bytes = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).expect(name);
            let kib = line.trim().trim_end_matches(" kB");
            kib.parse::<f64>().expect(name) * 1024.0
        };
        Memory { rss: bytes("VmRSS:"), pte: bytes("VmPTE:") }
    }
}

/// The report of `live1m`: `n` goroutines, or what the runtime calls them, were made, sat there,
/// and ended.
pub fn live_report(
    n: usize,
    create: Duration,
    end: Duration,
    before: Memory,
    full: Memory,
) -> Report {
    let each_us = |time: Duration| time.as_secs_f64() * 1e6 / n as f64;
    Report::new()
        .with("total_us", each_us(create + end))
        .with("create_us", each_us(create))
        .with("end_us", each_us(end))
        .with_memory(n, before, full)
}

/// How long everything is left alone between "all are there" and the reading of the memory, so
/// that the last few are parked as well.
pub const SETTLE: Duration = Duration::from_millis(50);

/// Sizes that all workers, Go's included, agree on.
pub mod size {
    use std::ops::RangeInclusive;
    use std::time::Duration;

    pub const SPAWN_BATCH: usize = 1000;
    pub const YIELDERS: usize = 4;
    pub const YIELDS_EACH: usize = 20_000;
    pub const FIB_N: u64 = 27;
    /// Calls of fib(27) with n ≥ 2: F(28) − 1. Each spawns once.
    pub const FIB_SPAWNS: usize = 317_810;
    pub const FIB_RESULT: u64 = 196_418;
    pub const SKYNET_LEAVES: u64 = 1_000_000;
    pub const SKYNET_RESULT: u64 = SKYNET_LEAVES * (SKYNET_LEAVES - 1) / 2;
    pub const CHUNKS: u64 = 10_000;
    pub const LIVE: usize = 1_000_000;

    /// Round trips per round.
    pub const TRIPS: u64 = 10_000;
    pub const ITEMS: u64 = 100_000;
    pub const ITEMS_SUM: u64 = ITEMS * (ITEMS - 1) / 2;
    pub const SLOTS: usize = 128;
    /// Senders, receivers, channels of a select; producers with a consumer each.
    pub const PARTIES: usize = 4;
    pub const RING_NODES: usize = 1_000;
    /// Of a round, at least; whole laps.
    pub const RING_HOPS: usize = 20_000;
    pub const PRIMES: usize = 2_000;
    pub const LAST_PRIME: u32 = 17_389;
    pub const LOCKERS: usize = 8;
    pub const LOCKS_EACH: usize = 20_000;

    /// Goroutines that allocate: one per proc, so that threads get no more of the machine.
    pub const ALLOCATORS: usize = 2;
    pub const SMALL_BYTES: usize = 48;
    pub const PAIRS_EACH: usize = 500_000;
    pub const KEPT_BLOCKS: usize = 64;
    pub const MIXED_BYTES: RangeInclusive<usize> = 8..=2_000;
    pub const REPLACEMENTS_EACH: usize = 100_000;
    pub const HANDOFF_BYTES: RangeInclusive<usize> = 64..=512;
    pub const BATCH_BLOCKS: usize = 64;
    pub const BATCH_SLOTS: usize = 16;
    pub const BATCHES_EACH: usize = 500;
    pub const HANDOFF_BLOCKS: usize = PARTIES * BATCHES_EACH * BATCH_BLOCKS;

    pub const SLEEPERS: usize = 1_000;
    pub const SLEEPS_EACH: usize = 5;
    pub const SLEEPERS_MANY: usize = 100_000;
    /// On top, where sleepers are many: all are there by then.
    pub const SLEEP_BASE: Duration = Duration::from_millis(500);
    /// The longest sleep of `sleep_burst`.
    pub const BURST_SLEEP: Duration = Duration::from_millis(500);
    pub const SHORT_SLEEPS_EACH: usize = 10;
    /// The longest sleep of `sleep_short`.
    pub const SHORT_SLEEP: Duration = Duration::from_millis(100);
    pub const TICKERS: usize = 1_000;
    pub const TICKER_PERIOD: Duration = Duration::from_millis(100);
    pub const TICKERS_WARM_UP: Duration = Duration::from_millis(500);
    pub const TICKERS_TIME: Duration = Duration::from_secs(6);
    pub const HOGS: usize = 4;
    pub const HOGS_TIME: Duration = Duration::from_secs(3);
    pub const TICK: Duration = Duration::from_millis(1);
    pub const IDLE: Duration = Duration::from_millis(2);
    pub const WAKES_TIME: Duration = Duration::from_millis(1_500);
    pub const BLOCKERS: usize = 64;
    pub const BLOCKS_EACH: usize = 20;
    pub const BLOCK: Duration = Duration::from_millis(5);

    pub const ECHO_BYTES: usize = 64;
    pub const ECHO_WARM_UP: Duration = Duration::from_millis(300);
    pub const ECHO_TIME: Duration = Duration::from_secs(2);
    /// Round trips of one round of `echo_*_pairs`, all clients together.
    pub const PAIRS_TRIPS: usize = 128_000;
    /// Round trips of a shorter round, some 50 ms: what changes the speed of the machine then
    /// changes it for two neighbouring rounds.
    pub const SHORT_TRIPS: usize = 8_000;
    /// What the servers of `echo_*_pairs` read into.
    pub const PAIRS_BUFFER_BYTES: usize = 4_096;
    pub const IDLE_CONNECTIONS: usize = 5_000;
    pub const MOSTLY_IDLE_CONNECTIONS: usize = 10_000;
    /// On average, from one request on any of them to the next.
    pub const REQUEST_GAP: Duration = Duration::from_millis(10);
    pub const MOSTLY_IDLE_TIME: Duration = Duration::from_secs(6);

    // Of Go's own benchmarks.
    pub const GOBENCH_TIME: Duration = Duration::from_millis(100);
    pub const BURST: usize = 100;
    pub const BATCH: usize = 1_000;
    pub const POPULAR: usize = 1_000;
    pub const WORK: usize = 30;
    pub const GARBAGE: usize = 1 << 15;
    pub const CROWD: usize = 1_000;

    /// Of wrk.
    pub const HTTP_THREADS: usize = 2;
    pub const HTTP_HOGS: usize = 2;
    pub const HTTP_WARM_UP: Duration = Duration::from_secs(1);
    /// The shortest time in which answers are counted under a steady load.
    pub const HTTP_MOMENT: Duration = Duration::from_millis(25);
    pub const HTTP_TIME: Duration = Duration::from_secs(2);
}

/// The `i`-th number of a fixed sequence that looks random, the same in every worker: splitmix64.
pub fn random(i: u64) -> u64 {
    let mut x = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// One chunk of `forkjoin`, ≈ 15 µs: a chain of dependent steps, which no compiler can shorten or
/// spread over vector lanes, and which rustc and Go turn into equally fast code (checked: a chain
/// of shifts and xors was 7 % slower in Go, and would have measured the compilers).
pub fn chunk(seed: u64) -> u64 {
    const STEPS: u32 = 7_500;
    let mut x = seed + 1;
    for _ in 0..STEPS {
        x = step(x);
    }
    x
}

#[inline]
pub fn step(x: u64) -> u64 {
    const MULTIPLIER: u64 = 0xbf58_476d_1ce4_e5b9;
    (x ^ (x >> 29)).wrapping_mul(MULTIPLIER)
}

/// What the chunks add up to (wrapping); workers check it.
pub const CHUNKS_RESULT: u64 = 11_209_390_254_633_036_983;

#[cfg(test)]
mod tests {
    use super::random;

    #[test]
    fn random_is_splitmix64_with_seed_0() {
        let first = [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4, 0x06c4_5d18_8009_454f];
        assert_eq!([random(0), random(1), random(2)], first);
    }
}
