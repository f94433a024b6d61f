//! Two tasks take turns on one P, and a `WaitGroup` waits for both.
//!
//! `cargo run --release --example wait_group`

use trefoil::sync::WaitGroup;

#[trefoil::main(procs = 1)]
fn main() {
    let group = WaitGroup::new();
    for name in ["A", "B"] {
        group.go(move || {
            for step in 1..=3 {
                println!("task {name}, step {step}");
                trefoil::yield_now();
            }
        });
    }
    group.wait();
    println!("both tasks are done");
}
