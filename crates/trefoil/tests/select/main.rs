//! `select!` and `Select`: what Go's own tests assert (`chan_test.go`, `test/chan/select*.go`,
//! `doubleselect.go`), and what the macro promises.

mod biased;
#[path = "../common/mod.rs"]
mod common;
mod dynamic;
mod fairness;
mod queues;
mod readiness;
mod ready;
mod syntax;

use trefoil::chan::{Receiver, bounded};
use trefoil::go;

/// Runs `f` as the main goroutine of runtimes with 1, 2, 4 and 16 Ps.
fn at_all_procs(f: fn()) {
    for procs in [1, 2, 4, 16] {
        let runtime = trefoil::Runtime::builder().procs(procs).build().expect("a runtime");
        runtime.run(f);
    }
}

/// Runs `f` in a simulation, and then in real time as [`at_all_procs`] does.
fn simulated_and_at_all_procs(f: fn()) {
    trefoil::sim::run(f);
    at_all_procs(f);
}

/// Starts `f` on a plain thread if `on_thread` is true, else as a goroutine. The channel gets a
/// value when `f` has returned.
fn start_on_thread_if(on_thread: bool, f: impl FnOnce() + Send + 'static) -> Receiver<()> {
    let (done, ended) = bounded(1);
    let run = move || {
        f();
        let _ = done.send(());
    };
    if on_thread {
        std::thread::spawn(run);
    } else {
        go(run);
    }
    ended
}
