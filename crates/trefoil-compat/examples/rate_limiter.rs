//! A rate limiter: requests go out at most one every 10 ms, after a burst of three.
//!
//! `cargo run --release --example rate_limiter`

use std::time::{Duration, Instant};
use trefoil::chan::{self, Receiver};
use trefoil::time::Ticker;

/// Permissions: `burst` at once, then one every `every`. They do not pile up beyond a burst.
fn limiter(every: Duration, burst: usize) -> Receiver<()> {
    let (tx, rx) = chan::bounded(burst);
    for _ in 0..burst {
        tx.send(()).unwrap();
    }
    trefoil::go(move || {
        let ticker = Ticker::new(every);
        for _ in ticker.chan() {
            match tx.try_send(()) {
                Err(chan::TrySendError::Closed(())) => return,
                // Full: nobody wanted it, so it is lost.
                Ok(()) | Err(chan::TrySendError::Full(())) => {}
            }
        }
    });
    rx
}

#[trefoil::main]
fn main() {
    let permits = limiter(Duration::from_millis(10), 3);
    let start = Instant::now();
    for request in 1..=8 {
        permits.recv().unwrap();
        println!("request {request} at {} ms", start.elapsed().as_millis());
    }
}
