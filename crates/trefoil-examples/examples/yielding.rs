//! `yield_now` lets other goroutines run first: on one P the goroutine prints before `main`
//! continues.
//!
//! `cargo run --release --example yielding`

#[trefoil::main(procs = 1)]
fn main() {
    let other = trefoil::go(|| {
        for i in 1..=3 {
            println!("goroutine: {i}");
            trefoil::yield_now();
        }
    });
    for i in 1..=3 {
        trefoil::yield_now();
        println!("main: {i}");
    }
    other.join().unwrap();
}
