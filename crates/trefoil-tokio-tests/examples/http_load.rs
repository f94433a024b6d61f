//! Requests per second of `axum::serve` under clients of reqwest, in one process.
//!
//! `http_load goroutines|threads [CLIENTS] [SECONDS] [none|sleep|spin]`: the threads of tokio's
//! runtime are goroutines or OS threads; 8 other clients call a handler that blocks or computes for
//! 50 ms, or none does.

use std::time::{Duration, Instant};
use trefoil_tokio_tests::{application, load, percentile, serve};

async fn measure(clients: usize, seconds: f64, beside: String) {
    let address = serve(application()).await;
    let begin = Instant::now();
    let end = begin + Duration::from_secs_f64(seconds);
    let slow = (beside != "none").then(|| {
        let path = format!("/{beside}");
        tokio::spawn(async move { load(address, &path, 8, end).await.len() })
    });
    let times = load(address, "/fast", clients, end).await;
    let slow = match slow {
        Some(slow) => slow.await.expect("no client panics"),
        None => 0,
    };
    println!(
        "{:.0} requests/s p50 {:?} p99 {:?} max {:?} slow {slow}",
        times.len() as f64 / seconds,
        percentile(&times, 50),
        percentile(&times, 99),
        percentile(&times, 100),
    );
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let arg = |n: usize, default: &str| args.get(n).map_or(default, |a| a).to_owned();
    let clients = arg(2, "64").parse().expect("a number of clients");
    let seconds = arg(3, "2").parse().expect("a number of seconds");
    let workers = arg(5, "0").parse().expect("a number of workers");
    let run = measure(clients, seconds, arg(4, "none"));
    match arg(1, "goroutines").as_str() {
        "goroutines" => trefoil::run(|| {
            let mut builder = trefoil::tokio::Runtime::builder();
            if workers > 0 {
                builder = builder.workers(workers);
            }
            builder.build().expect("tokio starts").block_on(run);
        }),
        _ => tokio::runtime::Runtime::new().expect("tokio starts").block_on(run),
    }
}
