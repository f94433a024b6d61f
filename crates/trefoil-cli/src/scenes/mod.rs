//! The scenes: one file each, and a row in the table.

pub(crate) mod live;
mod million;
mod stalls;
mod std_works;
mod timeline;

use crate::stage::Stage;

/// Something that the runtime does, played in a few seconds.
pub(crate) struct Scene {
    /// What the user types.
    pub(crate) name: &'static str,
    /// What is shown, in one line.
    pub(crate) line: &'static str,
    /// Runs on a plain thread. An error says which promise did not hold.
    pub(crate) play: fn(&Stage) -> Result<(), String>,
}

/// All scenes, in the order of the tour.
pub(crate) const SCENES: &[Scene] = &[
    Scene {
        name: "million",
        line: "a million goroutines: started, alive at once, shared out by stealing",
        play: million::play,
    },
    Scene { name: "hogs", line: "endless loops stop nobody", play: stalls::hogs },
    Scene {
        name: "timeline",
        line: "who runs where: loops take turns of 10 ms",
        play: timeline::play,
    },
    Scene { name: "blocking", line: "blocking calls stop nobody", play: stalls::blocking },
    Scene {
        name: "locals",
        line: "thread-locals travel with their goroutine",
        play: std_works::locals,
    },
    Scene {
        name: "std",
        line: "std's locks and sleeps park the goroutine, not the thread",
        play: std_works::locks,
    },
    Scene { name: "network", line: "std::net, a goroutine a connection", play: std_works::network },
    Scene {
        name: "connections",
        line: "ten thousand connections, open and in use at once",
        play: std_works::connections,
    },
    Scene { name: "procs", line: "GOMAXPROCS, changed live", play: live::procs },
    Scene { name: "deadlock", line: "a deadlock is named, with every stack", play: live::deadlock },
];
