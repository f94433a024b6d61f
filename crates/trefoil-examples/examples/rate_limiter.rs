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

#[cfg(test)]
mod tests {
    use super::*;

    /// In virtual time the permits come at exact times, and the test waits for none of them.
    #[trefoil::test(virtual_time)]
    fn permits_come_in_a_burst_and_then_one_per_interval() {
        let every = Duration::from_secs(10);
        let permits = limiter(every, 3);
        let start = Instant::now();
        for expected in [0, 0, 0, 1, 2, 3] {
            permits.recv().unwrap();
            assert_eq!(start.elapsed(), expected * every);
        }
        // At most a burst accumulates.
        trefoil::time::sleep(100 * every);
        assert_eq!(permits.try_iter().count(), 3);
        // Without a receiver the goroutine ends at the next tick. A goroutine that is left fails
        // the test.
        drop(permits);
        trefoil::time::sleep(every);
    }
}
