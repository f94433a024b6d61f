//! `trefoil::sync`: what Go's own tests assert, with the same numbers, and what this library adds:
//! plain threads beside goroutines, deadlines, statics, panics.

#[path = "../common/mod.rs"]
mod common;
mod condvar;
mod errgroup;
mod mutex;
mod once;
mod pool;
mod runtimes;
mod rwlock;
mod semaphore;
mod waitgroup;

use common::join_all;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;
use trefoil::time::sleep;
use trefoil::{Runtime, go};

const PROCS: [usize; 4] = [1, 2, 4, 16];

/// Runs `f` as the main goroutine of runtimes with 1, 2, 4 and 16 Ps.
fn on_every(f: impl Fn() + Sync) {
    for procs in PROCS {
        on(procs, &f);
    }
}

fn on<T: Send>(procs: usize, f: impl FnOnce() -> T + Send) -> T {
    Runtime::builder().procs(procs).build().unwrap().run(f)
}

/// What runs the parts of a test.
#[derive(Clone, Copy, PartialEq)]
enum Workers {
    Goroutines,
    /// Even numbers are goroutines, odd ones plain threads.
    GoroutinesAndThreads,
}

impl Workers {
    /// Runs `f(0)`, … `f(n - 1)` at once, and waits for all of them.
    fn run(self, n: usize, f: impl Fn(usize) + Send + Sync + 'static) {
        let f = Arc::new(f);
        let (mut threads, mut goroutines) = (Vec::new(), Vec::new());
        for i in 0..n {
            let f = f.clone();
            if self == Workers::Goroutines || i % 2 == 0 {
                goroutines.push(go(move || f(i)));
            } else {
                threads.push(std::thread::spawn(move || f(i)));
            }
        }
        join_all(goroutines);
        threads.into_iter().for_each(join_thread);
    }
}

/// Runs `f(0)`, … `f(n - 1)` at once: even numbers as goroutines, odd ones as plain threads.
fn mixed(n: usize, f: impl Fn(usize) + Send + Sync + 'static) {
    Workers::GoroutinesAndThreads.run(n, f);
}

/// Joins a thread without keeping the P, which the goroutines that it waits for may need.
fn join_thread<T>(thread: std::thread::JoinHandle<T>) -> T {
    while !thread.is_finished() {
        sleep(Duration::from_micros(50));
    }
    thread.join().unwrap()
}

/// Returns the message of the panic that `f` must raise.
fn panic_text(f: impl FnOnce()) -> String {
    let payload = catch_unwind(AssertUnwindSafe(f)).expect_err("the call must panic");
    let text = payload.downcast_ref::<String>().cloned();
    text.or_else(|| payload.downcast_ref::<&str>().map(|s| (*s).to_owned())).unwrap()
}

/// Returns the next pseudo-random number (xorshift).
fn next(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}
