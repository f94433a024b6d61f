//! A worker pool: workers receive jobs from one channel and send results to another. At most four
//! jobs run at once.
//!
//! `cargo run --release --example worker_pool`

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use trefoil::chan;

const WORKERS: usize = 4;
const JOBS: u64 = 40;

static RUNNING: AtomicUsize = AtomicUsize::new(0);
static MAX_RUNNING: AtomicUsize = AtomicUsize::new(0);

fn work(n: u64) -> u64 {
    let running = RUNNING.fetch_add(1, Ordering::Relaxed) + 1;
    MAX_RUNNING.fetch_max(running, Ordering::Relaxed);
    trefoil::time::sleep(Duration::from_millis(5));
    RUNNING.fetch_sub(1, Ordering::Relaxed);
    n * n
}

#[trefoil::main]
fn main() {
    let (jobs, inbox) = chan::bounded::<u64>(8);
    let (out, results) = chan::bounded(8);
    for _ in 0..WORKERS {
        let (inbox, out) = (inbox.clone(), out.clone());
        trefoil::go(move || {
            // Ends when `jobs` is dropped and the channel is empty.
            for n in inbox {
                if out.send(work(n)).is_err() {
                    return;
                }
            }
        });
    }
    // Without this sender the results end when the last worker drops its own.
    drop(out);
    trefoil::go(move || {
        for n in 1..=JOBS {
            jobs.send(n).unwrap();
        }
    });
    let (count, sum) = results.iter().fold((0, 0), |(count, sum), n| (count + 1, sum + n));
    println!("{count} results, sum {sum}, at most {} at once", MAX_RUNNING.load(Ordering::Relaxed));
}
