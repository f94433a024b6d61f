//! The scenes: a function each, and a row in the table.

pub(crate) mod deadlock;
mod locals;
mod million;
mod network;
mod procs;
mod stalls;
mod std_works;
mod stealing;
mod timeline;

use std::time::{Duration, Instant};

use trefoil::JoinHandle;
use trefoil::debug::{Stats, stats};

use crate::report::Report;

/// Something that the runtime does, played in a few seconds.
pub(crate) struct Scene {
    /// What the user types.
    pub(crate) name: &'static str,
    /// What is shown, in one line.
    pub(crate) line: &'static str,
    /// Runs on a plain thread and reports promises; an error says why it could not continue.
    pub(crate) play: fn(&Report) -> Result<(), String>,
}

/// All scenes, in the order of the tour.
pub(crate) const SCENES: &[Scene] = &[
    Scene {
        name: "million",
        line: "a million goroutines: started and joined, alive at once",
        play: million::play,
    },
    Scene { name: "stealing", line: "work is shared out by stealing", play: stealing::play },
    Scene { name: "hogs", line: "endless loops do not stall other goroutines", play: stalls::hogs },
    Scene {
        name: "timeline",
        line: "which goroutine runs where: loops take turns of 10 ms",
        play: timeline::play,
    },
    Scene {
        name: "blocking",
        line: "blocking calls do not stall other goroutines",
        play: stalls::blocking,
    },
    Scene { name: "locals", line: "thread-locals travel with their goroutine", play: locals::play },
    Scene {
        name: "std",
        line: "std's locks and sleeps park the goroutine, not the thread",
        play: std_works::play,
    },
    Scene {
        name: "network",
        line: "std::net, one goroutine per connection",
        play: network::network,
    },
    Scene {
        name: "connections",
        line: "ten thousand connections, open and in use at once",
        play: network::connections,
    },
    Scene { name: "procs", line: "GOMAXPROCS, changed live", play: procs::play },
    Scene { name: "deadlock", line: "a deadlock is named, with every stack", play: deadlock::play },
];

/// Returns the goroutine's result, or resumes its panic.
fn join<T>(handle: JoinHandle<T>) -> T {
    handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Waits on a goroutine until the condition holds, for at most ten seconds.
fn wait_until(mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() && start.elapsed() < Duration::from_secs(10) {
        trefoil::time::sleep(Duration::from_millis(2));
    }
}

/// Returns the stats once every goroutine except the caller waits.
fn at_rest() -> Stats {
    let mut now = stats();
    wait_until(|| {
        now = stats();
        let running = now.procs.iter().filter(|p| p.status == "running").count();
        let queued = now.global_queue + now.procs.iter().map(|p| p.queue).sum::<usize>();
        running <= 1 && queued == 0
    });
    now
}

/// The number of OS threads does not grow with the goroutines. Each P has one; some monitor, draw,
/// or are spare; and the runtime starts another when a thread was found asleep in the kernel.
fn promise_few_threads(report: &Report, threads: u64, procs: usize) {
    let most = 2 * procs as u64 + 60;
    report.promise("threads", threads, format_args!("at most {most}"), threads <= most);
}
