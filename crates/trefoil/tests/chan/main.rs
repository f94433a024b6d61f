//! Channels: what Go's own tests assert (`chan_test.go`, `test/chan`), and what Rust adds: values
//! that are dropped exactly once, plain threads at either end, errors that return the value.

#[path = "../common/mod.rs"]
mod common;
mod drops;
mod handles;
mod operations;
mod programs;
mod timeouts;

use common::yield_until;
use trefoil::{go, sim};

/// Runs `f` as the main goroutine of runtimes with 1, 2, 4 and 16 Ps.
fn at_all_procs(f: fn()) {
    for procs in [1, 2, 4, 16] {
        let runtime = trefoil::Runtime::builder().procs(procs).build().expect("a runtime");
        runtime.run(f);
    }
}

/// Runs `f` in a simulation, and then in real time as [`at_all_procs`] does.
fn simulated_and_at_all_procs(f: fn()) {
    sim::run(f);
    at_all_procs(f);
}

/// Returns the capacities of Go's tests, 0 to 199; in real time, where waits take time, some of
/// them.
fn capacities() -> impl Iterator<Item = usize> {
    (0..200).step_by(if sim::is_simulated() { 1 } else { 11 })
}

/// Returns the size of a test in this build.
fn size(long: usize, brief: usize) -> usize {
    common::rounds(brief, long)
}

/// A goroutine or a plain thread.
enum Handle {
    Goroutine(trefoil::JoinHandle<()>),
    Thread(std::thread::JoinHandle<()>),
}

/// Starts `f` on a plain thread if `on_thread` is true, else as a goroutine.
fn start_on_thread_if(on_thread: bool, f: impl FnOnce() + Send + 'static) -> Handle {
    if on_thread { Handle::Thread(std::thread::spawn(f)) } else { Handle::Goroutine(go(f)) }
}

impl Handle {
    fn join(self) {
        let result = match self {
            Handle::Goroutine(h) => h.join(),
            Handle::Thread(h) => {
                // `join` of a thread would hold the P that the thread may be waiting for.
                yield_until("the thread to end", || h.is_finished());
                h.join()
            }
        };
        if let Err(panic) = result {
            std::panic::resume_unwind(panic);
        }
    }
}
