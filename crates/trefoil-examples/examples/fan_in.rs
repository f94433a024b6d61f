//! Fan-in: one `select!` receives from several sources, whichever is ready first, until all have
//! ended.
//!
//! `cargo run --release --example fan_in`

use std::time::Duration;
use trefoil::chan::{self, Receiver};

fn source(name: &'static str, every: Duration, count: usize) -> Receiver<String> {
    let (tx, rx) = chan::bounded(1);
    trefoil::go(move || {
        for i in 1..=count {
            trefoil::time::sleep(every);
            if tx.send(format!("{name} {i}")).is_err() {
                return;
            }
        }
    });
    rx
}

#[trefoil::main]
fn main() {
    let mut quick = source("quick", Duration::from_millis(5), 6);
    let mut slow = source("slow", Duration::from_millis(12), 3);
    let (mut ended, mut received) = (0, 0);
    while ended < 2 {
        // A source that has ended is replaced by one that never sends, as Go does with nil.
        let message = trefoil::select! {
            recv(quick) -> m => { if m.is_err() { quick = chan::never(); } m },
            recv(slow) -> m => { if m.is_err() { slow = chan::never(); } m },
        };
        match message {
            Ok(text) => {
                received += 1;
                println!("{text}");
            }
            Err(_) => ended += 1,
        }
    }
    println!("{received} messages from 2 sources");
}
