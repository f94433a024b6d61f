//! sysmon: a thread without a P that watches the others.
//!
//! It looks at every P about once a [`LOOK`]. One that shows the same tick for a whole [`SLICE`] has
//! run one goroutine (or a pair that inherits its slice) all that time: it gets a preemption request,
//! which the goroutine notices at its next runtime call. And it prints the scheduler trace.
//!
//! When every P is idle it sleeps until one is taken.

use super::Sched;
use super::p::{PStatus, flag};
use crate::observe::schedtrace;
use crate::sys::parker::Parker;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A goroutine may run this long while others wait. Go's number.
const SLICE: Duration = Duration::from_millis(10);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(5);
/// It runs only this file; the trace's text is the largest thing on it.
const STACK_BYTES: usize = 256 << 10;

/// How others reach the sysmon thread.
pub(crate) struct Sysmon {
    asleep: AtomicBool,
    bed: Parker,
}

impl Sysmon {
    pub(crate) fn new() -> Self {
        Sysmon { asleep: AtomicBool::new(false), bed: Parker::new() }
    }

    /// An idle P was taken: there is something to watch. True: it slept.
    pub(crate) fn wake_if_asleep(&self) -> bool {
        let slept =
            self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::AcqRel);
        if slept {
            self.bed.unpark();
        }
        slept
    }

    pub(crate) fn wake(&self) {
        self.bed.unpark();
    }
}

/// What was last seen of a P.
#[derive(Clone, Copy)]
struct Seen {
    tick: u32,
    since: Instant,
}

pub(crate) fn start(sched: &Arc<Sched>) -> io::Result<()> {
    let sched = sched.clone();
    std::thread::Builder::new()
        .name("trefoil-sysmon".into())
        .stack_size(STACK_BYTES)
        .spawn(move || watch(&sched))
        .map(drop)
        .map_err(|e| io::Error::new(e.kind(), format!("cannot start the sysmon thread: {e}")))
}

fn watch(sched: &Sched) {
    let mut seen: Vec<Seen> = Vec::new();
    let mut next_trace = sched.config.schedtrace_ms.map(|ms| Duration::from_millis(ms.max(1)));
    while !sched.stopping.load(Ordering::Relaxed) {
        let now = Instant::now();
        if let (Some(at), Some(every)) = (next_trace, sched.config.schedtrace_ms)
            && sched.started.elapsed() >= at
        {
            schedtrace::print(sched);
            next_trace = Some(at + Duration::from_millis(every.max(1)));
        }
        sched.refresh_coarse();
        look(sched, &mut seen, now);
        if sched.config.schedtrace_ms.is_none() && all_idle(sched) {
            sleep_deeply(sched);
        } else {
            sched.sysmon.bed.park_timeout(LOOK);
        }
    }
}

fn look(sched: &Sched, seen: &mut Vec<Seen>, now: Instant) {
    for p in sched.all_ps() {
        let tick = p.tick.load(Ordering::Relaxed);
        let i = p.id as usize;
        if seen.len() <= i {
            seen.resize(i + 1, Seen { tick, since: now });
        }
        let last = &mut seen[i];
        if p.status() != PStatus::Running || last.tick != tick {
            *last = Seen { tick, since: now };
        } else if now - last.since >= SLICE {
            p.flags.fetch_or(flag::PREEMPT, Ordering::Relaxed);
        }
    }
}

fn all_idle(sched: &Sched) -> bool {
    sched.idle.idle_ps() >= sched.procs()
}

fn sleep_deeply(sched: &Sched) {
    let me = &sched.sysmon;
    me.asleep.store(true, Ordering::Release);
    crate::shim::full_fence();
    // A P may have been taken before the flag was seen.
    if all_idle(sched) && !sched.stopping.load(Ordering::Relaxed) {
        me.bed.park();
    }
    me.asleep.store(false, Ordering::Relaxed);
}
