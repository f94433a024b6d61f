//! A goroutine prints for ever, and another one only loops. `main` is not blocked by either, even
//! on one P, and the program ends when `main` returns.
//!
//! `cargo run --release --example endless_printer`

use std::time::{Duration, Instant};

#[trefoil::main(procs = 1)]
fn main() {
    trefoil::go(|| {
        loop {
            println!("still here");
            trefoil::time::sleep(Duration::from_millis(10));
        }
    });
    trefoil::go(|| {
        let mut n = 0u64;
        loop {
            n = std::hint::black_box(n.wrapping_add(1));
        }
    });
    let start = Instant::now();
    trefoil::time::sleep(Duration::from_millis(100));
    println!("main: done after {} ms", start.elapsed().as_millis());
}
