//! The number of Ps, CPUs and goroutines (Go's `GOMAXPROCS`, `NumCPU` and `NumGoroutine`), read and
//! changed at run time.
//!
//! `cargo run --release --example procs`

use std::time::Duration;
use trefoil::sync::WaitGroup;

#[trefoil::main]
fn main() {
    println!("CPUs: {}", trefoil::num_cpus());
    let before = trefoil::set_procs(4);
    println!("Ps: {before} before, {} now", trefoil::procs());

    let group = WaitGroup::new();
    for _ in 0..10 {
        group.go(|| trefoil::time::sleep(Duration::from_millis(50)));
    }
    println!("goroutines: {}", trefoil::num_goroutines());
    group.wait();
    // The last goroutines may not have ended yet.
    while trefoil::num_goroutines() > 1 {
        trefoil::yield_now();
    }
    println!("goroutines at the end: {}", trefoil::num_goroutines());
}
