//! A rate limiter: after a burst of three, one request every 10 ms.
//!
//! `cargo run --release --example rate_limiter`

use std::time::{Duration, Instant};
use trefoil::chan::{self, Receiver};
use trefoil::time::Ticker;

/// Returns a channel of permits: `burst` at once, then one every `every`. At most `burst` permits
/// accumulate.
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
                // The permit is dropped if the channel is full.
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
