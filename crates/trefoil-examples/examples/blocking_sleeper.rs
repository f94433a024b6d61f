//! A goroutine blocks its thread in a system call that the runtime does not know of. The thread
//! loses its P, so `main` computes meanwhile, on the only P, and finishes first.
//!
//! `cargo run --release --example blocking_sleeper`

use std::time::{Duration, Instant};

#[trefoil::main(procs = 1)]
fn main() {
    let start = Instant::now();
    let sleeper = trefoil::go(move || {
        // `std::thread::sleep` would only park the goroutine.
        // SAFETY: reads one timespec, and writes nothing.
        unsafe {
            let time = libc::timespec { tv_sec: 0, tv_nsec: 300_000_000 };
            libc::syscall(libc::SYS_nanosleep, &raw const time, 0);
        }
        println!("sleeper: woke up after {} ms", start.elapsed().as_millis());
    });
    trefoil::yield_now();
    let sum: u64 = (1..=1_000_000u64).sum();
    println!("main: sum {sum} after {} ms", start.elapsed().as_millis());
    trefoil::time::sleep(Duration::from_millis(1));
    println!("main: {} threads", trefoil::debug::stats().threads);
    sleeper.join().unwrap();
}
