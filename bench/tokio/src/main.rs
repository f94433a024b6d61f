//! The tokio worker: a task where Go has a goroutine. `worker WORKLOAD [KEY=VALUE …]`, one JSON
//! line; see bench/README.md.
//!
//! The workload itself runs as a task too, so that it spawns from inside a worker thread: tokio's
//! fast path.

mod alloc;
mod chan;
mod clock;
mod http;
mod net;

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use bench_common::{Args, CHUNKS_RESULT, Memory, Meter, Report, SETTLE, chunk, live_report, size};
use tokio::runtime::Builder;
use tokio::sync::Notify;
use tokio::task::{spawn, yield_now};

fn main() {
    let args = Args::parse();
    let mut builder = match args.procs() {
        1 => Builder::new_current_thread(),
        _ => Builder::new_multi_thread(),
    };
    // With its clock and its network, as `#[tokio::main]` has it.
    let builder = builder.worker_threads(args.procs()).enable_all();
    let runtime = builder.build().expect("a tokio runtime");
    runtime.block_on(async { spawn(workload(args)).await }).unwrap().print();
}

async fn workload(args: Args) -> Report {
    match args.workload.as_str() {
        "spawn_join" | "task_spawn_join" => spawn_join(&args).await,
        "yield" | "task_yield" => yields(&args, size::YIELDERS).await,
        "switch" => yields(&args, 2).await,
        "fib" | "task_fib" => fib_join(&args).await,
        "skynet" => skynet(&args).await,
        "forkjoin" => fork_join(&args).await,
        "live1m" | "task_live1m" => live(&args).await,
        "pingpong_1p" | "pingpong_2p" | "task_pingpong" => chan::ping_pong(&args).await,
        "spsc_128" => chan::spsc(&args).await,
        "select_128" => chan::selects(&args).await,
        "ring_1000" => chan::ring(&args).await,
        "mutex_8" => chan::mutexes(&args).await,
        "alloc_small" => alloc::small(&args).await,
        "alloc_mixed" => alloc::mixed(&args).await,
        "alloc_handoff" => alloc::handoff(&args).await,
        "sleep_1000" => clock::sleep_1000(&args).await,
        "sleep_100k" => clock::sleep_100k(&args).await,
        "sleep_burst" => clock::sleep_burst(&args).await,
        "sleep_short" => clock::sleep_short(&args).await,
        "tickers_1000" => clock::tickers(&args).await,
        "ticker_hogs" => clock::ticker_hogs(&args).await,
        "wake_idle" => clock::wake_idle(&args).await,
        "block_std" => clock::block_std(&args).await,
        "echo_64" => net::echo(&args, 64).await,
        "echo_1000" => net::echo(&args, 1_000).await,
        "echo_64_pairs" => net::echo_pairs(&args, 64).await,
        "echo_1000_pairs" => net::echo_pairs(&args, 1_000).await,
        "conns_idle_10k" => net::mostly_idle(&args).await,
        "idle_conns" => net::idle(&args).await,
        "http_64" | "task_http_64" => http::hello(&args, 64).await,
        "http_512" | "task_http_512" => http::hello(&args, 512).await,
        _ => args.unknown(),
    }
}

async fn spawn_join(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::SPAWN_BATCH);
    while meter.another_round() {
        let handles: Vec<_> = (0..size::SPAWN_BATCH).map(|_| spawn(async {})).collect();
        for handle in handles {
            handle.await.unwrap();
        }
    }
    meter.report()
}

/// Tasks that yield and do nothing else: `yield` with four, `switch` with two on one thread.
async fn yields(args: &Args, tasks: usize) -> Report {
    let mut meter = Meter::new(args, tasks * size::YIELDS_EACH);
    while meter.another_round() {
        let handles: Vec<_> = (0..tasks)
            .map(|_| {
                spawn(async {
                    for _ in 0..size::YIELDS_EACH {
                        yield_now().await;
                    }
                })
            })
            .collect();
        for handle in handles {
            handle.await.unwrap();
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
        left.await.unwrap() + right
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
            sum += child.await.unwrap();
        }
        sum
    })
}

async fn skynet(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::SKYNET_LEAVES as usize);
    while meter.another_round() {
        let root = spawn(node(0, size::SKYNET_LEAVES));
        assert_eq!(root.await.unwrap(), size::SKYNET_RESULT);
    }
    meter.report()
}

async fn fork_join(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::CHUNKS as usize);
    while meter.another_round() {
        let handles: Vec<_> = (0..size::CHUNKS).map(|i| spawn(async move { chunk(i) })).collect();
        let mut sum = 0u64;
        for handle in handles {
            sum = sum.wrapping_add(handle.await.unwrap());
        }
        assert_eq!(sum, CHUNKS_RESULT);
    }
    meter.report()
}

async fn live(args: &Args) -> Report {
    static READY: AtomicUsize = AtomicUsize::new(0);
    let n = args.number("n", size::LIVE);
    let release = Arc::new(Notify::new());

    let before = Memory::now();
    let start = Instant::now();
    let handles: Vec<_> = (0..n)
        .map(|_| {
            let release = release.clone();
            spawn(async move {
                let released = release.notified();
                READY.fetch_add(1, Ordering::Relaxed);
                released.await;
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
    release.notify_waiters();
    for handle in handles {
        handle.await.unwrap();
    }
    let end = start.elapsed();

    live_report(n, create, end, before, full)
}
