//! A program to look at: workers that wait for jobs, a leak, timers, goroutines that compute, and
//! two that wait for each other.
//!
//! ```text
//! cargo run -p trefoil-observe --example observed            # http://127.0.0.1:6060/
//! TREFOIL_OBSERVE=unix cargo run -p trefoil-observe --example observed -- env
//! cargo run --release -p trefoil-observe --example observed -- 127.0.0.1:6060 1000000
//! ```
//!
//! The first argument is the address, or `env` to leave it to the environment. The second is the
//! number of idle goroutines, and the third for how many seconds the program runs.

use std::sync::Arc;
use std::time::{Duration, Instant};
use trefoil::chan::{Receiver, bounded};
use trefoil::sync::{Barrier, Mutex};
use trefoil::time::sleep;

static TOTAL: Mutex<u64> = Mutex::new(0);
static ONE: Mutex<()> = Mutex::new(());
static OTHER: Mutex<()> = Mutex::new(());

fn main() {
    let mut args = std::env::args().skip(1);
    let address = args.next().unwrap_or_else(|| "127.0.0.1:6060".to_owned());
    let number = |arg: Option<String>| arg.and_then(|text| text.parse::<u64>().ok());
    let (idle, seconds) = (number(args.next()).unwrap_or(1000), number(args.next()));
    trefoil::run(|| {
        if address != "env" {
            let server = trefoil_observe::start(&address).expect("the server starts");
            eprintln!("observe at {}", server.url());
        }
        let (jobs, queue) = bounded::<u64>(16);
        for _ in 0..8 {
            let queue = queue.clone();
            trefoil::go(move || worker(&queue));
        }
        let (keep_open, never) = bounded::<()>(0);
        for _ in 0..idle {
            let never = never.clone();
            trefoil::go(move || never.recv());
        }
        trefoil::go(leak);
        let both_hold_one = Arc::new(Barrier::new(2));
        for (first, second) in [(&ONE, &OTHER), (&OTHER, &ONE)] {
            let both_hold_one = both_hold_one.clone();
            trefoil::go(move || lock_both(first, second, &both_hold_one));
        }
        let start = Instant::now();
        for job in 0.. {
            if seconds.is_some_and(|seconds| start.elapsed() > Duration::from_secs(seconds)) {
                break;
            }
            _ = jobs.send(job);
            if job % 100 == 0 {
                sleep(Duration::from_millis(5));
            }
        }
        drop(keep_open);
    });
}

/// Computes a little for each job.
fn worker(queue: &Receiver<u64>) {
    for job in queue.iter() {
        let sum = (0..job % 10_000).fold(0_u64, |sum, n| sum.wrapping_mul(31).wrapping_add(n));
        let mut total = TOTAL.lock();
        *total = total.wrapping_add(sum);
    }
}

/// Starts a goroutine every 100 ms that never ends.
fn leak() {
    loop {
        let (tx, rx) = bounded::<()>(0);
        trefoil::go(move || {
            _ = rx.recv();
        });
        std::mem::forget(tx);
        sleep(Duration::from_millis(100));
    }
}

/// Two goroutines that do it in a different order wait for each other.
fn lock_both(first: &Mutex<()>, second: &Mutex<()>, both_hold_one: &Barrier) {
    let _first = first.lock();
    both_hold_one.wait();
    let _second = second.lock();
}
