//! Two goroutines print numbers on two Ps: their lines interleave, and neither waits for the other.
//!
//! `cargo run --release --example two_printers`

use std::time::Duration;

#[trefoil::main]
fn main() {
    trefoil::set_procs(2);
    let printers = ["first", "second"].map(|name| {
        trefoil::go(move || {
            for i in 1..=5 {
                println!("{name}: {i}");
                trefoil::time::sleep(Duration::from_millis(20));
            }
        })
    });
    for printer in printers {
        printer.join().unwrap();
    }
}
