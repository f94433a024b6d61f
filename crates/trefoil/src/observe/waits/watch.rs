//! Reports certain deadlocks of a part of the program, without being asked.
//!
//! A cycle is complete when its last member begins to wait. Every such wait is noted in its runtime
//! (`sched/wait/holder.rs`). When the helper thread sees the note, it takes it, and checks a few
//! seconds later, when the goroutine has parked. Waits that are noted meanwhile are checked then,
//! and once more the same time later. So a program in which nothing waits for locks is never
//! checked, and a program in which goroutines do is checked every few seconds. A cycle that is found
//! is checked again after [`CONFIRM_NANOS`], and then reported once.

use super::report::Places;
use super::{Cycle, Graph};
use crate::sched::Sched;
use crate::sys::clock::{NEVER, Nanos, now};
use crate::sys::stderr::write_all_stderr;
use crate::sys::thread;
use std::fmt::Write;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::PoisonError;

/// The time between the first check of a cycle and the second.
const CONFIRM_NANOS: Nanos = 1_000_000_000;

/// Cycles that are remembered at most. When so many were reported, no more are.
const REPORTED_MAX: usize = 256;

/// Symbols are found on it.
const STACK_BYTES: usize = 1 << 20;

/// Checks for cycles in which a goroutine of `sched` is the first. Returns when to check again, or
/// `NEVER`. The helper thread calls it.
pub(crate) fn check(sched: &Sched) -> Nanos {
    let check = &sched.wait_check;
    let graph = Graph::read();
    let mut memory = check.memory.lock().unwrap_or_else(PoisonError::into_inner);
    let mut found = Vec::new();
    let mut confirmed = Vec::new();
    for cycle in graph.cycles() {
        if !is_of(&graph, &cycle, sched) || !graph.is_certain(&cycle) {
            continue;
        }
        let mark = graph.mark(&cycle);
        if memory.reported.contains(&mark) || memory.reported.len() >= REPORTED_MAX {
            continue;
        }
        if memory.found.contains(&mark) {
            memory.reported.push(mark);
            confirmed.push(cycle);
        } else {
            found.push(mark);
        }
    }
    let next = if found.is_empty() { NEVER } else { now() + CONFIRM_NANOS };
    memory.found = found;
    drop(memory);
    if !confirmed.is_empty() {
        // On a thread of its own: to read the debug information may take seconds, and the helper
        // thread is needed.
        let report = move || report(&graph, &confirmed);
        let _ =
            thread::spawn(thread::Name::new(format_args!("trefoil-report")), STACK_BYTES, report);
    }
    next
}

/// Returns whether the check of `sched` is to report the cycle, which may have members of several
/// runtimes.
fn is_of(graph: &Graph, cycle: &Cycle, sched: &Sched) -> bool {
    let first = cycle.iter().map(|&i| graph.waits[i].party.runtime).min();
    first.is_some_and(|runtime| std::ptr::eq(&raw const *graph.runtimes[runtime], sched))
}

impl Graph {
    /// Returns a number that stands for these waits of these goroutines.
    fn mark(&self, cycle: &Cycle) -> u64 {
        let mut members: Vec<_> =
            cycle.iter().map(|&i| (self.waits[i].party.id, self.waits[i].word)).collect();
        members.sort_unstable();
        let mut hasher = DefaultHasher::new();
        members.hash(&mut hasher);
        hasher.finish()
    }
}

fn report(graph: &Graph, cycles: &[Cycle]) {
    let mut places = Places::new();
    let mut text = String::new();
    for deadlock in cycles.iter().filter_map(|cycle| graph.deadlock(cycle, &mut places)) {
        let _ = write!(text, "trefoil: {deadlock}");
    }
    text.push_str("  (TREFOIL_DEBUG=deadlockreport=0 turns this report off)\n");
    write_all_stderr(text.as_bytes());
}
