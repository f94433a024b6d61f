//! `PSnapshot`: the state and the counters of a P, for statistics and traces.
//!
//! Any thread may take one. The fields are read one after the other while the P may run, so they
//! may not fit together.

use super::Sched;
use super::p::{P, PStatus};
use std::sync::atomic::{AtomicU64, Ordering};

/// See the head of the file. The counters are those of [`Counters`](super::p::Counters).
pub(crate) struct PSnapshot {
    pub(crate) id: u32,
    pub(crate) status: PStatus,
    /// The id of the M that owns it.
    pub(crate) m: Option<u32>,
    /// The kernel's id of that M's thread.
    pub(crate) tid: Option<u32>,
    /// How many time slices have begun on it, modulo 2³².
    pub(crate) ticks: u32,
    /// Goroutines in its local queues.
    pub(crate) queued: usize,
    /// Timers in its heap.
    pub(crate) timers: u32,
    pub(crate) spawned: u64,
    pub(crate) ended: u64,
    pub(crate) steals: u64,
    pub(crate) stolen: u64,
    pub(crate) overflows: u64,
}

impl PSnapshot {
    fn of(p: &P) -> PSnapshot {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        PSnapshot {
            id: p.id,
            status: p.status(),
            m: p.holder().map(|m| m.id.load(Ordering::Relaxed)),
            tid: p.holder().map(|m| m.tid.load(Ordering::Relaxed)),
            ticks: p.tick.load(Ordering::Relaxed),
            queued: p.queued(),
            timers: p.timers.len(),
            spawned: read(&p.counters.spawned),
            ended: read(&p.counters.ended),
            steals: read(&p.counters.steals),
            stolen: read(&p.counters.stolen),
            overflows: read(&p.counters.overflows),
        }
    }

    /// Returns the status in one word.
    pub(crate) fn status_text(&self) -> &'static str {
        match self.status {
            PStatus::Idle => "idle",
            PStatus::Running => "running",
            PStatus::Retired => "retired",
        }
    }

    /// Returns whether the P was removed by a smaller `set_procs`.
    pub(crate) fn is_retired(&self) -> bool {
        self.status == PStatus::Retired
    }
}

impl Sched {
    /// Returns a snapshot of every P that was ever made, by id.
    pub(crate) fn p_snapshots(&self) -> Vec<PSnapshot> {
        self.all_ps().map(PSnapshot::of).collect()
    }
}
