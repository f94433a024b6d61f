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

use crate::stage::Stage;

/// Something that the runtime does, played in a few seconds.
pub(crate) struct Scene {
    /// What the user types.
    pub(crate) name: &'static str,
    /// What is shown, in one line.
    pub(crate) line: &'static str,
    /// Runs on a plain thread. Makes promises to the stage; an error says why it could not go on.
    pub(crate) play: fn(&Stage) -> Result<(), String>,
}

/// All scenes, in the order of the tour.
pub(crate) const SCENES: &[Scene] = &[
    Scene {
        name: "million",
        line: "a million goroutines: started and joined, alive at once",
        play: million::play,
    },
    Scene { name: "stealing", line: "work is shared out by stealing", play: stealing::play },
    Scene { name: "hogs", line: "endless loops stop nobody", play: stalls::hogs },
    Scene {
        name: "timeline",
        line: "who runs where: loops take turns of 10 ms",
        play: timeline::play,
    },
    Scene { name: "blocking", line: "blocking calls stop nobody", play: stalls::blocking },
    Scene { name: "locals", line: "thread-locals travel with their goroutine", play: locals::play },
    Scene {
        name: "std",
        line: "std's locks and sleeps park the goroutine, not the thread",
        play: std_works::play,
    },
    Scene { name: "network", line: "std::net, a goroutine a connection", play: network::network },
    Scene {
        name: "connections",
        line: "ten thousand connections, open and in use at once",
        play: network::connections,
    },
    Scene { name: "procs", line: "GOMAXPROCS, changed live", play: procs::play },
    Scene { name: "deadlock", line: "a deadlock is named, with every stack", play: deadlock::play },
];

/// The result of a goroutine that does not panic; or its panic.
fn join<T>(handle: JoinHandle<T>) -> T {
    handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Waits, on a goroutine, until it is so; for ten seconds at most.
fn wait_until(mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() && start.elapsed() < Duration::from_secs(10) {
        trefoil::time::sleep(Duration::from_millis(2));
    }
}

/// What the runtime looks like once every goroutine but the caller waits.
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

/// OS threads do not multiply with goroutines. Each P has one at work; some watch, draw, or are to spare; and one more
/// is started whenever a thread was found asleep in the kernel, which the kernel decides.
fn promise_few_threads(stage: &Stage, threads: u64, procs: usize) {
    let most = 2 * procs as u64 + 60;
    stage.promise("threads", threads, format_args!("at most {most}"), threads <= most);
}
