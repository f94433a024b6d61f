//! sysmon: a thread without a P that watches the others.
//!
//! It looks at every P about once a [`LOOK`]. One that shows the same tick for a whole [`SLICE`] has
//! run one goroutine (or a pair that inherits its slice) all that time: it gets a preemption request,
//! which the goroutine notices at its next runtime call. Traces, deadlock reports and
//! SIGQUIT's dump are printed from here, by hooks.
//!
//! When every P is idle it sleeps until one is taken.

use super::Sched;
use super::p::{PStatus, flag};
use crate::sys::parker::Parker;
use crate::sys::thread;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A goroutine may run this long while others wait. Go's number.
const SLICE: Duration = Duration::from_millis(10);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(5);
/// How long everything must be asleep before that is reported, and when that is given up.
const FIRST_DOUBT: Duration = Duration::from_millis(2);
const LAST_DOUBT: Duration = Duration::from_secs(10);
/// It runs only this file; the trace's text is the largest thing on it.
const STACK_BYTES: usize = 256 << 10;

/// How others reach the sysmon thread.
pub(crate) struct Sysmon {
    asleep: AtomicBool,
    bed: Parker,
}

impl Sysmon {
    /// A few bytes for each runtime, for ever.
    pub(crate) fn leak() -> &'static Self {
        Box::leak(Box::new(Sysmon { asleep: AtomicBool::new(false), bed: Parker::new() }))
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

    /// Whatever it is doing, it is to look again. Safe in a signal handler.
    pub(crate) fn wake(&self) {
        self.bed.unpark();
    }
}

/// Threads of this file in the process.
static ALIVE: AtomicUsize = AtomicUsize::new(0);

/// How many threads watch.
pub(crate) fn alive() -> usize {
    ALIVE.load(Ordering::Relaxed)
}

/// What was last seen of a P.
#[derive(Clone, Copy)]
struct Seen {
    tick: u32,
    since: Instant,
}

pub(crate) fn start(sched: &Arc<Sched>) -> io::Result<()> {
    let sched = sched.clone();
    ALIVE.fetch_add(1, Ordering::Relaxed);
    let watching = move || {
        watch(&sched);
        ALIVE.fetch_sub(1, Ordering::Relaxed);
    };
    thread::spawn("trefoil-sysmon".into(), STACK_BYTES, watching)
        .inspect_err(|_| {
            ALIVE.fetch_sub(1, Ordering::Relaxed);
        })
        .map_err(|e| io::Error::new(e.kind(), format!("cannot start the sysmon thread: {e}")))
}

fn watch(sched: &Sched) {
    let mut seen: Vec<Seen> = Vec::new();
    let hooks = sched.config.hooks;
    let every = sched.config.schedtrace_ms.map(|ms| Duration::from_millis(ms.max(1)));
    let mut next_trace = every;
    while !sched.stopping.load(Ordering::Relaxed) {
        (hooks.asked)();
        if let (Some(at), Some(every)) = (next_trace, every)
            && sched.started.elapsed() >= at
        {
            (hooks.trace)(sched);
            next_trace = Some(at + every);
        }
        sched.refresh_coarse();
        look(sched, &mut seen, Instant::now());
        if every.is_none() && all_idle(sched) {
            sleep_deeply(sched);
        } else {
            sched.sysmon.bed.park_timeout(LOOK);
        }
    }
}

fn look(sched: &Sched, seen: &mut Vec<Seen>, now: Instant) {
    let someone_waits = sched.has_global();
    for p in sched.all_ps() {
        if someone_waits && p.status() == PStatus::Running {
            p.flags.fetch_or(flag::FAIR, Ordering::Relaxed);
        }
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

/// Sleeps while every P is idle. If nothing will ever change that by itself, says so to the hook: at once
/// it may be too early (a thread may be about to end), so again after a while, ever more rarely.
fn sleep_deeply(sched: &Sched) {
    let me = sched.sysmon;
    let mut patience = FIRST_DOUBT;
    loop {
        me.asleep.store(true, Ordering::Release);
        crate::shim::full_fence();
        // A P may have been taken before the flag was seen.
        if !all_idle(sched) || sched.stopping.load(Ordering::Relaxed) {
            break;
        }
        let doubtful = patience <= LAST_DOUBT && sched.is_asleep() && sched.num_goroutines() > 0;
        let woken = if doubtful {
            me.bed.park_timeout(patience)
        } else {
            me.bed.park();
            true
        };
        if woken {
            break;
        }
        if sched.is_asleep() {
            (sched.config.hooks.all_asleep)(sched);
        }
        patience *= 8;
    }
    me.asleep.store(false, Ordering::Relaxed);
}
