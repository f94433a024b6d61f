//! The may worker: stackful coroutines. `worker WORKLOAD [KEY=VALUE …]`, one JSON line; see
//! bench/README.md.
//!
//! No `live1m`: each coroutine maps its own stack, and the kernel ends that at about 32,700.

mod wait;

use bench_common::{Args, CHUNKS_RESULT, Meter, Report, chunk, size};
use may::coroutine::yield_now;
use may::go;

fn main() {
    let args = Args::parse();
    may::config().set_workers(args.procs());
    go!(move || workload(&args)).join().unwrap().print();
}

fn workload(args: &Args) -> Report {
    match args.workload.as_str() {
        "spawn_join" => spawn_join(args),
        "yield" => yields(args, size::YIELDERS),
        "switch" => yields(args, 2),
        "fib" => fib_join(args),
        "skynet" => skynet(args),
        "forkjoin" => fork_join(args),
        "pingpong_1p" | "pingpong_2p" => wait::ping_pong(args),
        "ring_1000" => wait::ring(args),
        "mutex_8" => wait::mutexes(args),
        "sleep_1000" => wait::sleep_1000(args),
        "sleep_short" => wait::sleep_short(args),
        "ticker_hogs" => wait::ticker_hogs(args),
        "wake_idle" => wait::wake_idle(args),
        "echo_64" => wait::echo(args, 64),
        "echo_1000" => wait::echo(args, 1_000),
        "echo_64_pairs" => wait::echo_pairs(args, 64),
        "echo_1000_pairs" => wait::echo_pairs(args, 1_000),
        _ => args.unknown(),
    }
}

fn spawn_join(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::SPAWN_BATCH);
    while meter.another_round() {
        let handles: Vec<_> = (0..size::SPAWN_BATCH).map(|_| go!(|| {})).collect();
        for handle in handles {
            handle.join().unwrap();
        }
    }
    meter.report()
}

/// Coroutines that yield and do nothing else: `yield` with four, `switch` with two on one thread.
fn yields(args: &Args, coroutines: usize) -> Report {
    let mut meter = Meter::new(args, coroutines * size::YIELDS_EACH);
    while meter.another_round() {
        let handles: Vec<_> = (0..coroutines)
            .map(|_| {
                go!(|| {
                    for _ in 0..size::YIELDS_EACH {
                        yield_now();
                    }
                })
            })
            .collect();
        for handle in handles {
            handle.join().unwrap();
        }
    }
    meter.report()
}

fn fib(n: u64) -> u64 {
    if n < 2 {
        return n;
    }
    let left = go!(move || fib(n - 1));
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
        go!(move || node(first, each))
    });
    children.into_iter().map(|child| child.join().unwrap()).sum()
}

fn skynet(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::SKYNET_LEAVES as usize);
    while meter.another_round() {
        let root = go!(|| node(0, size::SKYNET_LEAVES));
        assert_eq!(root.join().unwrap(), size::SKYNET_RESULT);
    }
    meter.report()
}

fn fork_join(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::CHUNKS as usize);
    while meter.another_round() {
        let handles: Vec<_> = (0..size::CHUNKS).map(|i| go!(move || chunk(i))).collect();
        let sum = handles.into_iter().map(|handle| handle.join().unwrap());
        assert_eq!(sum.fold(0, u64::wrapping_add), CHUNKS_RESULT);
    }
    meter.report()
}
