//! The smol worker: a task where Go has a goroutine. `worker WORKLOAD [KEY=VALUE …]`, one JSON
//! line; see bench/README.md. The number of threads comes from SMOL_THREADS.

mod wait;

use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use bench_common::{Args, CHUNKS_RESULT, Memory, Meter, Report, SETTLE, chunk, live_report, size};
use smol::channel;
use smol::future::yield_now;
use smol::spawn;

fn main() {
    let args = Args::parse();
    // As a task, the workload runs on the executor's threads and not on this one.
    smol::block_on(spawn(workload(args))).print();
}

async fn workload(args: Args) -> Report {
    match args.workload.as_str() {
        "spawn_join" => spawn_join(&args).await,
        "yield" => yields(&args, size::YIELDERS).await,
        "switch" => yields(&args, 2).await,
        "fib" => fib_join(&args).await,
        "skynet" => skynet(&args).await,
        "forkjoin" => fork_join(&args).await,
        "live1m" => live(&args).await,
        "pingpong_1p" | "pingpong_2p" => wait::ping_pong(&args).await,
        "spsc_128" => wait::spsc(&args).await,
        "mpmc_4x4_128" => wait::mpmc(&args).await,
        "ring_1000" => wait::ring(&args).await,
        "mutex_8" => wait::mutexes(&args).await,
        "sleep_1000" => wait::sleep_1000(&args).await,
        "sleep_100k" => wait::sleep_100k(&args).await,
        "sleep_burst" => wait::sleep_burst(&args).await,
        "sleep_short" => wait::sleep_short(&args).await,
        "ticker_hogs" => wait::ticker_hogs(&args).await,
        "wake_idle" => wait::wake_idle(&args).await,
        "block_std" => wait::block_std(&args).await,
        "echo_64" => wait::echo(&args, 64).await,
        "echo_1000" => wait::echo(&args, 1_000).await,
        "echo_64_pairs" => wait::echo_pairs(&args, 64).await,
        "echo_1000_pairs" => wait::echo_pairs(&args, 1_000).await,
        _ => args.unknown(),
    }
}

async fn spawn_join(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::SPAWN_BATCH);
    while meter.another_round() {
        let tasks: Vec<_> = (0..size::SPAWN_BATCH).map(|_| spawn(async {})).collect();
        for task in tasks {
            task.await;
        }
    }
    meter.report()
}

/// Tasks that yield and do nothing else: `yield` with four, `switch` with two on one thread.
async fn yields(args: &Args, tasks: usize) -> Report {
    let mut meter = Meter::new(args, tasks * size::YIELDS_EACH);
    while meter.another_round() {
        let tasks: Vec<_> = (0..tasks)
            .map(|_| {
                spawn(async {
                    for _ in 0..size::YIELDS_EACH {
                        yield_now().await;
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await;
        }
    }
    meter.report()
}

/// A future that awaits itself has to be boxed.
type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

fn fib(n: u64) -> Boxed<u64> {
    Box::pin(async move {
        if n < 2 {
            return n;
        }
        let left = spawn(fib(n - 1));
        let right = fib(n - 2).await;
        left.await + right
    })
}

async fn fib_join(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::FIB_SPAWNS);
    while meter.another_round() {
        assert_eq!(fib(size::FIB_N).await, size::FIB_RESULT);
    }
    meter.report()
}

/// One node of the skynet: the sum of its leaves, counted from `first`.
fn node(first: u64, leaves: u64) -> Boxed<u64> {
    Box::pin(async move {
        if leaves == 1 {
            return first;
        }
        let each = leaves / 10;
        let children: [_; 10] = std::array::from_fn(|i| spawn(node(first + i as u64 * each, each)));
        let mut sum = 0;
        for child in children {
            sum += child.await;
        }
        sum
    })
}

async fn skynet(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::SKYNET_LEAVES as usize);
    while meter.another_round() {
        assert_eq!(spawn(node(0, size::SKYNET_LEAVES)).await, size::SKYNET_RESULT);
    }
    meter.report()
}

async fn fork_join(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::CHUNKS as usize);
    while meter.another_round() {
        let tasks: Vec<_> = (0..size::CHUNKS).map(|i| spawn(async move { chunk(i) })).collect();
        let mut sum = 0u64;
        for task in tasks {
            sum = sum.wrapping_add(task.await);
        }
        assert_eq!(sum, CHUNKS_RESULT);
    }
    meter.report()
}

async fn live(args: &Args) -> Report {
    static READY: AtomicUsize = AtomicUsize::new(0);
    let n = args.number("n", size::LIVE);
    let (release, released) = channel::bounded::<()>(1);

    let before = Memory::now();
    let start = Instant::now();
    let tasks: Vec<_> = (0..n)
        .map(|_| {
            let released = released.clone();
            spawn(async move {
                READY.fetch_add(1, Ordering::Relaxed);
                // Closed, not received: the channel never carries a value.
                released.recv().await.unwrap_err();
            })
        })
        .collect();
    while READY.load(Ordering::Relaxed) < n {
        yield_now().await;
    }
    let create = start.elapsed();

    let settling = Instant::now();
    while settling.elapsed() < SETTLE {
        yield_now().await;
    }
    let full = Memory::now();

    let start = Instant::now();
    release.close();
    for task in tasks {
        task.await;
    }
    let end = start.elapsed();

    live_report(n, create, end, before, full)
}
