//! The trefoil worker. `worker WORKLOAD [KEY=VALUE …]`, one JSON line; see bench/README.md.

mod alloc;
mod block;
mod chan;
mod clock;
mod gobench;
mod http;
mod net;
mod observe;
mod task;

use std::time::Instant;

use bench_common::{Args, CHUNKS_RESULT, Memory, Meter, Report, SETTLE, chunk, live_report, size};
use trefoil::chan::bounded;
use trefoil::sync::WaitGroup;
use trefoil::time::sleep;
use trefoil::{Runtime, go, yield_now};

fn main() {
    let args = Args::parse();
    let builder = Runtime::builder().procs(args.procs());
    #[cfg(feature = "reserve")]
    let builder = match args.workload.as_str() {
        "live1m_reserve" => builder.dlopen_reserve(true),
        _ => builder,
    };
    let runtime = builder.build().expect("a trefoil runtime");
    runtime.run(move || workload(&args)).print();
}

fn workload(args: &Args) -> Report {
    match args.workload.as_str() {
        "spawn_join" => spawn_join(args),
        "yield" => yields(args, size::YIELDERS),
        "switch" => yields(args, 2),
        "fib" => fib_join(args),
        "skynet" => skynet(args),
        "forkjoin" => fork_join(args),
        "live1m" => live(args),
        #[cfg(feature = "reserve")]
        "live1m_reserve" => live(args),
        "pingpong_1p" | "pingpong_2p" => chan::ping_pong(args),
        "spsc_128" => chan::spsc(args),
        "mpmc_4x4_128" => chan::mpmc(args),
        "select_unbuf" => chan::selects(args, 0),
        "select_128" => chan::selects(args, size::SLOTS),
        "skynet_chan" => chan::skynet(args),
        "ring_1000" => chan::ring(args),
        "sieve_2000" => chan::sieve(args),
        "mutex_8" => chan::mutexes(args),
        "std_mutex_8" => chan::std_mutexes(args),
        "mpsc_pingpong" => chan::mpsc_ping_pong(args),
        "alloc_small" => alloc::small(args),
        "alloc_mixed" => alloc::mixed(args),
        "alloc_handoff" => alloc::handoff(args),
        "sleep_1000" => clock::sleep_1000(args),
        "sleep_100k" => clock::sleep_100k(args),
        "sleep_burst" => clock::sleep_burst(args),
        "sleep_short" => clock::sleep_short(args),
        "tickers_1000" => clock::tickers(args),
        "ticker_hogs" => clock::ticker_hogs(args),
        "wake_idle" => clock::wake_idle(args),
        "block_std" => block::block_std(args),
        "block_raw" => block::block_raw(args),
        "echo_64" => net::echo(args, 64),
        "echo_1000" => net::echo(args, 1_000),
        "echo_1000_std" => net::echo_std(args, 1_000),
        "echo_64_pairs" => net::echo_pairs(args, 64),
        "echo_1000_pairs" => net::echo_pairs(args, 1_000),
        "conns_idle_10k" => net::mostly_idle(args),
        "idle_conns" => net::idle(args),
        "http_64" => http::hello(args, 64),
        "http_512" => http::hello(args, 512),
        "http_64_hogs" => http::hello_hogs(args, 64),
        "recorder_yield" => observe::recorder(args, || yield_round(size::YIELDERS)),
        "recorder_spawn" => observe::recorder(args, spawn_round),
        "recorder_pingpong" => chan::with_echo(|trips| observe::recorder(args, trips)),
        "recorder_echo" => {
            net::with_pairs(64, size::SHORT_TRIPS, |trips| observe::recorder(args, trips))
        }
        "recorder_http" => http::with_wrk(args, 64, |ask| observe::recorder(args, ask)),
        "profile_hogs" => observe::profile(args, hog_round),
        "profile_pingpong" => chan::with_echo(|trips| observe::profile(args, trips)),
        "task_spawn_join" => task::spawn_join(args),
        "task_yield" => task::yields(args),
        "task_fib" => task::fib(args),
        "task_live1m" => task::live(args),
        "task_pingpong" => task::ping_pong(args),
        "task_ticker_hogs" => task::ticker_hogs(args),
        "task_http_64" => task::hyper(args, 64),
        "task_http_512" => task::hyper(args, 512),
        "task_block_std" => task::block_std(args),
        "gobench" => gobench::all(args),
        _ => args.unknown(),
    }
}

fn spawn_join(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::SPAWN_BATCH);
    while meter.another_round() {
        spawn_round();
    }
    meter.report()
}

/// Spawns and joins a batch. Returns how many.
fn spawn_round() -> usize {
    let handles: Vec<_> = (0..size::SPAWN_BATCH).map(|_| go(|| {})).collect();
    for handle in handles {
        handle.join().unwrap();
    }
    size::SPAWN_BATCH
}

/// Goroutines that yield and do nothing else: `yield` with four, `switch` with two on one P.
fn yields(args: &Args, goroutines: usize) -> Report {
    let mut meter = Meter::new(args, goroutines * size::YIELDS_EACH);
    while meter.another_round() {
        yield_round(goroutines);
    }
    meter.report()
}

/// Lets goroutines yield, and joins them. Returns how many yields that were.
fn yield_round(goroutines: usize) -> usize {
    let handles: Vec<_> = (0..goroutines)
        .map(|_| {
            go(|| {
                for _ in 0..size::YIELDS_EACH {
                    yield_now();
                }
            })
        })
        .collect();
    for handle in handles {
        handle.join().unwrap();
    }
    goroutines * size::YIELDS_EACH
}

/// Computes on as many goroutines as there are procs. Returns how many chunks.
fn hog_round() -> usize {
    let each = size::CHUNKS / 10;
    let hogs: Vec<_> = (0..trefoil::procs())
        .map(|_| go(move || (0..each).fold(0, |sum: u64, i| sum.wrapping_add(chunk(i)))))
        .collect();
    let count = hogs.len();
    for hog in hogs {
        std::hint::black_box(hog.join().unwrap());
    }
    count * each as usize
}

fn fib(n: u64) -> u64 {
    if n < 2 {
        return n;
    }
    let left = go(move || fib(n - 1));
    let right = fib(n - 2);
    left.join().unwrap() + right
}

fn fib_join(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::FIB_SPAWNS);
    while meter.another_round() {
        assert_eq!(fib(size::FIB_N), size::FIB_RESULT);
    }
    meter.report()
}

/// One node of the skynet: the sum of its leaves, counted from `first`.
fn node(first: u64, leaves: u64) -> u64 {
    if leaves == 1 {
        return first;
    }
    let each = leaves / 10;
    let children: [_; 10] = std::array::from_fn(|i| {
        let first = first + i as u64 * each;
        go(move || node(first, each))
    });
    children.into_iter().map(|child| child.join().unwrap()).sum()
}

fn skynet(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::SKYNET_LEAVES as usize);
    while meter.another_round() {
        let root = go(|| node(0, size::SKYNET_LEAVES));
        assert_eq!(root.join().unwrap(), size::SKYNET_RESULT);
    }
    meter.report()
}

fn fork_join(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::CHUNKS as usize);
    while meter.another_round() {
        let handles: Vec<_> = (0..size::CHUNKS).map(|i| go(move || chunk(i))).collect();
        let sum = handles.into_iter().map(|handle| handle.join().unwrap());
        assert_eq!(sum.fold(0, u64::wrapping_add), CHUNKS_RESULT);
    }
    meter.report()
}

fn live(args: &Args) -> Report {
    let n = args.number("n", size::LIVE);
    let (release, released) = bounded::<()>(0);
    let [ready, ended] = [WaitGroup::new(), WaitGroup::new()];

    let before = Memory::now();
    let start = Instant::now();
    ready.add(n);
    ended.add(n);
    for _ in 0..n {
        let (released, ready, ended) = (released.clone(), ready.clone(), ended.clone());
        go(move || {
            ready.done();
            released.recv().unwrap_err();
            ended.done();
        });
    }
    ready.wait();
    let create = start.elapsed();

    // Goroutines that have counted themselves may not be parked yet.
    sleep(SETTLE);
    let full = Memory::now();

    let start = Instant::now();
    release.close();
    ended.wait();
    let end = start.elapsed();

    live_report(n, create, end, before, full)
}
