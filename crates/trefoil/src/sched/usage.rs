//! The CPU time of goroutines and tasks, and the time for which they are runnable: an estimate that
//! sysmon makes.
//!
//! At least [`SAMPLE_NANOS`] apart, sysmon inspects each running P. The goroutine or task that runs
//! there is credited with the CPU time that the P's M has used since its last sample: in the long
//! run each of them is met there for its share of the time. The first one of each queue is credited
//! with that time for all that wait there, for the same reason. So the fast paths do nothing for it.
//!
//! Rejected: the time since the last sample instead of CPU time. sysmon sleeps while all Ps are
//! idle, and wakes because a goroutine runs: a goroutine that computed for 1 ms in 21 was credited
//! with 4.5 times its CPU time.
//!
//! The memory is fixed: a table of [`SETS`] × [`WAYS`] entries. An id belongs to one set, and a new
//! id replaces the one in its set with the least time. So those that matter stay, also after they
//! have ended.
//!
//! Only sysmon writes. A reader may find the sums of one sample apart.

use crate::sched::Sched;
use crate::sched::g::G;
use crate::sched::p::PStatus;
use crate::sched::runnable::{RunHead, Runnable, Unpacked};
use crate::sys::clock::Nanos;
use crate::sys::probe::cpu_time;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// The shortest time between two samples.
const SAMPLE_NANOS: Nanos = 1_000_000;
/// The most CPU time that one sample stands for: an M may also have computed without a P.
const MAX_SAMPLE_NANOS: Nanos = 20_000_000;
const SETS: usize = 256;
const WAYS: usize = 8;

/// What is known of one goroutine or task.
#[derive(Default)]
struct Entry {
    /// 0: unused.
    id: AtomicU64,
    running: AtomicU64,
    runnable: AtomicU64,
}

/// The estimate for one goroutine or task, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Used {
    pub(crate) running: Nanos,
    pub(crate) runnable: Nanos,
}

/// A runtime's table; see the head of the file.
pub(crate) struct Usage {
    entries: Box<[Entry]>,
    /// When sysmon made the last sample.
    last: AtomicU64,
}

impl Usage {
    pub(crate) fn new() -> Usage {
        let entries = std::iter::repeat_with(Entry::default).take(SETS * WAYS).collect();
        Usage { entries, last: AtomicU64::new(0) }
    }

    fn set(&self, id: u64) -> &[Entry] {
        let set = id as usize % SETS;
        &self.entries[set * WAYS..(set + 1) * WAYS]
    }

    /// Returns the estimate for a goroutine or task. Zero if it has used little.
    pub(crate) fn of(&self, id: u64) -> Used {
        let entry = self.set(id).iter().find(|entry| entry.id.load(Ordering::Acquire) == id);
        entry.map_or_else(Used::default, |entry| Used {
            running: entry.running.load(Ordering::Relaxed),
            runnable: entry.runnable.load(Ordering::Relaxed),
        })
    }

    /// Returns all estimates, with the ids, in no order.
    pub(crate) fn all(&self) -> Vec<(u64, Used)> {
        let ids = self.entries.iter().map(|entry| entry.id.load(Ordering::Relaxed));
        ids.filter(|&id| id != 0).map(|id| (id, self.of(id))).collect()
    }

    /// sysmon: adds to the sums of `id`.
    fn credit(&self, id: u64, running: Nanos, runnable: Nanos) {
        let set = self.set(id);
        let total = |entry: &Entry| {
            entry.running.load(Ordering::Relaxed) + entry.runnable.load(Ordering::Relaxed)
        };
        let known = set.iter().find(|entry| entry.id.load(Ordering::Relaxed) == id);
        let Some(entry) = known.or_else(|| set.iter().min_by_key(|entry| total(entry))) else {
            return;
        };
        if known.is_none() {
            entry.id.store(0, Ordering::Relaxed);
            entry.running.store(0, Ordering::Relaxed);
            entry.runnable.store(0, Ordering::Relaxed);
            // Release: pairs with the Acquire in `of`, so that the sums are not those of another.
            entry.id.store(id, Ordering::Release);
        }
        entry.running.fetch_add(running, Ordering::Relaxed);
        entry.runnable.fetch_add(runnable, Ordering::Relaxed);
    }
}

/// Returns the id of what was in a queue when its address was read.
fn id_hint(item: NonNull<RunHead>) -> u64 {
    // SAFETY: it came from a queue, and is never freed. It may be another one by now.
    match unsafe { Runnable::from_item(item) }.unpack() {
        Unpacked::Goroutine(g) => running_id(g),
        Unpacked::Task(task) => task.id(),
    }
}

/// Returns the id of `g`, or of the task that it polls.
fn running_id(g: &'static G) -> u64 {
    match g.task_hint() {
        Some(task) if g.is_carrier_hint() => task.id(),
        _ => g.id(),
    }
}

impl Sched {
    /// Makes a sample, if it is time for one. For sysmon.
    pub(crate) fn sample_usage(&self, now: Nanos) {
        let last = self.usage.last.load(Ordering::Relaxed);
        if now.saturating_sub(last) < SAMPLE_NANOS {
            return;
        }
        self.usage.last.store(now, Ordering::Relaxed);
        let waited = |first: Option<NonNull<RunHead>>, len: usize, used: Nanos| {
            if let Some(first) = first.filter(|_| len != 0) {
                self.usage.credit(id_hint(first), 0, used * len as u64);
            }
        };
        let mut most_used = 0;
        for p in self.all_ps().filter(|p| p.status() == PStatus::Running) {
            let Some(m) = p.holder() else { continue };
            let tid = m.tid.load(Ordering::Relaxed);
            let cpu = if tid == 0 { 0 } else { cpu_time(tid) };
            if cpu == 0 {
                continue; // The thread has just ended.
            }
            let before = m.sampled_cpu.swap(cpu, Ordering::Relaxed);
            let used = cpu.saturating_sub(before).min(MAX_SAMPLE_NANOS);
            most_used = most_used.max(used);
            if let Some(g) = m.current_hint() {
                self.usage.credit(running_id(g), used, 0);
            }
            waited(p.runq.first_hint(), p.runq.ring_len() as usize, used);
            waited(p.woken.first_hint(), p.woken.ring_len() as usize, used);
        }
        if self.has_global() {
            let central = self.central.lock();
            for list in central.global.lists() {
                waited(list.first().map(Runnable::as_item), list.len(), most_used);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_kept_for_those_that_use_much() {
        let usage = Usage::new();
        let same_set = |i: u64| 1 + i * SETS as u64;
        for _ in 0..100 {
            usage.credit(same_set(0), 10, 0);
        }
        // Many that use little do not displace it.
        for i in 1..1000 {
            usage.credit(same_set(i), 1, 2);
        }
        assert_eq!(usage.of(same_set(0)), Used { running: 1000, runnable: 0 });
        assert_eq!(usage.of(same_set(999)), Used { running: 1, runnable: 2 });
        assert_eq!(usage.of(same_set(500)), Used::default());
        assert_eq!(usage.of(12345), Used::default());
    }
}
