//! A pipeline: each stage is a goroutine, connected by channels. When the last receiver is dropped,
//! all stages end.
//!
//! `cargo run --release --example pipeline`

use trefoil::chan::{self, Receiver};

fn numbers() -> Receiver<u64> {
    let (tx, rx) = chan::bounded(16);
    trefoil::go(move || {
        // An error means that the receiver was dropped.
        for n in 1.. {
            if tx.send(n).is_err() {
                return;
            }
        }
    });
    rx
}

fn squares(input: Receiver<u64>) -> Receiver<u64> {
    let (tx, rx) = chan::bounded(16);
    trefoil::go(move || input.iter().map(|n| n * n).try_for_each(|n| tx.send(n)));
    rx
}

fn odd(input: Receiver<u64>) -> Receiver<u64> {
    let (tx, rx) = chan::bounded(16);
    trefoil::go(move || input.iter().filter(|n| n % 2 == 1).try_for_each(|n| tx.send(n)));
    rx
}

#[trefoil::main]
fn main() {
    let output = odd(squares(numbers()));
    let first: Vec<u64> = output.iter().take(8).collect();
    println!("{first:?}");
    drop(output);
    // The stages end one after the other.
    while trefoil::num_goroutines() > 1 {
        trefoil::yield_now();
    }
    println!("every stage has ended");
}
