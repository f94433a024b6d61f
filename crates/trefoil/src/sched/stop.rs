//! The end of a runtime: what becomes of the goroutines that are left.
//!
//! They are never resumed, and what they own is leaked. But the process goes on, and two kinds of locks belong to all
//! of it: those inside libc (malloc's, the loader's), which a goroutine may hold that was stopped by a signal
//! (`preempt.rs`, 6); and those of std's standard output and error. With one of them lost, the next `free` or
//! `println!` anywhere waits for ever. So a runtime ends in three steps:
//!
//! | step | what happens |
//! |---|---|
//! | parting | the aide takes std's two locks; goroutines run as ever, and those who have the locks give them back |
//! | stopping | those who run leave at their next scheduling step; of those who are queued only the ones are resumed that were stopped inside a library, and only until they are outside |
//! | stopped | threads leave; std's locks are free again |
//!
//! Each step has a limit: somebody may keep standard output for ever, and a loop around `memset` is always inside
//! libc, without a lock. Without goroutines that are left there are no such steps.
//!
//! Invariants:
//! 1. Once the runtime is stopping, nobody stops inside a library and is counted (`preempt.rs`): both are decided under
//!    the scheduler's lock.
//! 2. So `is_stopped` never becomes false again. It is asked under that lock by those who rely on it: threads that
//!    leave, and those who would hand them something.
//!
//! Rejected: waiting for the threads (the runtime may be dropped on one of its own goroutines); unwinding the
//! goroutines that are left (a destructor may wait for another of them; threads are not unwound at exit either).

use super::aide::PART;
use super::g::G;
use super::p::{P, PStatus, flag};
use super::switch::pop_local;
use super::{Sched, current_g};
use crate::sys::clock::{Nanos, now};
use crate::sys::parker::Parker;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long whoever drops a runtime waits for std's locks to be free, and how long they are held.
const PARTING: Nanos = 100_000_000;
const LOOK_AGAIN: Duration = Duration::from_micros(50);
/// How long goroutines that were stopped inside a library may take to come out.
const DRAINING: Nanos = 1_000_000_000;

/// A runtime's end.
pub(crate) struct Ending {
    /// When the threads leave all the same.
    until: AtomicU64,
    /// The aide has been through the steps.
    parted: Parker,
}

impl Ending {
    pub(crate) fn new() -> Ending {
        Ending { until: AtomicU64::new(0), parted: Parker::new() }
    }
}

impl Sched {
    /// The runtime's handle is gone. Waits a moment for the first two steps, unless nobody is left, or it is one of
    /// those who are left that calls.
    pub(crate) fn part(&self) {
        let own = current_g().is_some_and(|g| std::ptr::eq(g.sched.get(), self));
        if !own && self.num_goroutines() != 0 {
            self.aide.call(PART);
            self.ending.parted.park_until(now() + PARTING);
        }
        self.stop();
    }

    /// The aide: stops the runtime at a moment when nobody has std's locks, and holds them until nobody runs who
    /// could take them. `help` is called again and again meanwhile.
    pub(super) fn part_quietly(&self, mut help: impl FnMut()) {
        (self.config.hooks.with_outputs)(&mut || {
            self.stop();
            let limit = now() + PARTING;
            while self.all_ps().any(|p| p.status() == PStatus::Running) && now() < limit {
                help();
                std::thread::sleep(LOOK_AGAIN);
            }
        });
        self.ending.parted.unpark();
    }

    /// Goroutines stop at their next scheduling step, and threads leave as soon as they may.
    pub(crate) fn stop(&self) {
        let mut central = self.central.lock();
        if self.stopping.load(Ordering::Relaxed) {
            return;
        }
        self.ending.until.store(now() + DRAINING, Ordering::Relaxed);
        // Release: who sees it sees the time.
        self.stopping.store(true, Ordering::Release);
        for p in self.all_ps() {
            p.flags.fetch_or(flag::STOP, Ordering::Relaxed);
        }
        while let Some(m) = central.pop_any_m() {
            m.rouse();
        }
        self.publish_spares(&central);
        drop(central);
        self.sysmon.wake();
        self.aide.call(0);
    }

    /// It is stopping, and nobody is resumed any more.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
            && (self.inside.load(Ordering::Relaxed) == 0
                || now() >= self.ending.until.load(Ordering::Relaxed))
    }

    /// It was dropped, and all its threads have ended.
    pub(crate) fn is_over(&self) -> bool {
        self.stopping.load(Ordering::Relaxed) && self.threads() == 0
    }

    /// While the runtime is stopping: the next goroutine that was stopped inside a library. The others are taken out
    /// of their queues on the way, and that is the last of them.
    pub(super) fn take_last(&self, p: &'static P) -> Option<&'static G> {
        if self.is_stopped() {
            return None;
        }
        let local = || pop_local(p);
        let global = || self.pop_tired().or_else(|| self.pop_global());
        let g = std::iter::from_fn(|| local().or_else(global)).find(|g| g.inside.get())?;
        p.next_tick();
        // It stops at its next call, or as soon as sysmon finds it outside.
        p.flags.fetch_or(flag::PREEMPT, Ordering::Relaxed);
        self.sysmon.wake();
        Some(g)
    }
}
