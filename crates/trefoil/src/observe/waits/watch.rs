//! Reports certain deadlocks of a part of the program, without being asked.
//!
//! A cycle is complete when its last member begins to wait. Every such wait is noted in its runtime
//! (`sched/wait/holder.rs`). When the helper thread sees the note, it takes it, and checks a few
//! seconds later, when the goroutine has parked. Waits that are noted meanwhile are checked then,
//! and once more the same time later. So a program in which nothing waits for locks is never
//! checked, and a program in which goroutines do is checked every few seconds. A cycle that is
//! found is checked again after [`CONFIRM_NANOS`], and then reported once.

use super::report::Places;
use super::{Cycle, Graph};
use crate::observe::trace;
use crate::sched::Sched;
use crate::sys::clock::{NEVER, Nanos, now};
use crate::sys::sort::sort_by;
use crate::sys::stderr::write_all_stderr;
use crate::sys::thread;
use std::fmt::Write;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};

/// The time between the first check of a cycle and the second.
const CONFIRM_NANOS: Nanos = 1_000_000_000;

/// Cycles that are reported at most.
const REPORTED_MAX: usize = 256;

/// Symbols are found on it.
const STACK_BYTES: usize = 1 << 20;

/// What the runtimes of the process have reported.
struct Reported {
    cycles: usize,
    /// The waits of all members.
    waits: Vec<WaitMark>,
}

static REPORTED: Mutex<Reported> = Mutex::new(Reported { cycles: 0, waits: Vec::new() });

/// Stands for one wait of a goroutine: the number of its runtime and its id, and its object with
/// the count of its waits.
type WaitMark = (u32, u64, usize);

/// Checks for cycles in which a goroutine of `sched` is. Returns when to check again, or `NEVER`.
/// The helper thread calls it.
pub(crate) fn check(sched: &Sched) -> Nanos {
    let check = &sched.wait_check;
    let graph = Graph::read();
    let mut memory = check.memory.lock().unwrap_or_else(PoisonError::into_inner);
    let mut found = Vec::new();
    let mut confirmed = Vec::new();
    for cycle in graph.cycles() {
        if !graph.has_member_of(&cycle, sched) || !graph.is_certain(&cycle) {
            continue;
        }
        let marks = graph.marks(&cycle);
        let mut reported = REPORTED.lock().unwrap_or_else(PoisonError::into_inner);
        // A cycle that shares a wait with one that was reported is the same deadlock.
        let is_known = marks.iter().any(|mark| reported.waits.contains(mark));
        if is_known || reported.cycles >= REPORTED_MAX {
            continue;
        }
        let mut hasher = DefaultHasher::new();
        marks.hash(&mut hasher);
        let mark = hasher.finish();
        if memory.found.contains(&mark) {
            reported.cycles += 1;
            reported.waits.extend(marks);
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
        let found = Arc::new((graph, confirmed));
        let shared = found.clone();
        let name = thread::Name::new(format_args!("trefoil-report"));
        if thread::spawn(name, STACK_BYTES, move || report(&shared.0, &shared.1)).is_err() {
            report(&found.0, &found.1);
        }
    }
    next
}

impl Graph {
    /// Returns the marks of the members of a cycle, in ascending order.
    fn marks(&self, cycle: &Cycle) -> Vec<WaitMark> {
        let mark = |&i: &usize| {
            let wait = &self.waits[i];
            (self.sched(wait.party).holder_salt(), wait.party.id, wait.word)
        };
        let mut marks: Vec<_> = cycle.iter().map(mark).collect();
        sort_by(&mut marks, Ord::cmp);
        marks
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
    write_traces(graph, cycles);
}

/// Writes what was recorded of each runtime that has a member in one of the cycles.
fn write_traces(graph: &Graph, cycles: &[Cycle]) {
    let mut written = Vec::new();
    for party in cycles.iter().flatten().map(|&i| graph.waits[i].party) {
        if !written.contains(&party.runtime) {
            written.push(party.runtime);
            trace::write_automatically(graph.sched(party), Some(party.id));
        }
    }
}
