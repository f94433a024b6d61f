//! Writes every goroutine and task as text, in Go's form.

use super::snapshot::{self, Snapshot, StackSnapshot, Subject};
use super::symbols::SymbolCache;
use super::waits::Graph;
use super::waits::report::{Places, waits_for};
use crate::sched::Sched;
use crate::sched::g::Status;
use crate::sched::labels::LabelSet;
use std::fmt::Write;

/// Bytes of a goroutine's name that are shown.
const NAME_MAX_BYTES: usize = 80;

/// Returns the text for every goroutine and task of `sched`, the caller first, then by id.
pub(crate) fn dump(sched: &Sched) -> String {
    let mut out = String::new();
    let mut symbols = SymbolCache::default();
    let graph = Graph::read_for(sched);
    write_deadlocks(&mut out, &graph, sched);
    snapshot::for_each(sched, |snapshot| {
        let _ = write_snapshot(&mut out, &mut symbols, &snapshot, &graph, sched);
    });
    out
}

/// Writes the cycles of waits that goroutines of `sched` are in.
fn write_deadlocks(out: &mut String, graph: &Graph, sched: &Sched) {
    let mut cycles = graph.cycles();
    cycles.retain(|cycle| graph.has_member_of(cycle, sched));
    if cycles.is_empty() {
        return;
    }
    let mut places = Places::new();
    for deadlock in cycles.iter().filter_map(|cycle| graph.deadlock(cycle, &mut places)) {
        let _ = writeln!(out, "{deadlock}");
    }
}

/// Writes labels as Go does: `{"key":"value", "key":"value"}`.
pub(super) fn write_labels(out: &mut String, labels: &LabelSet) -> std::fmt::Result {
    for (i, (key, value)) in labels.iter().enumerate() {
        let before = if i == 0 { "{" } else { ", " };
        write!(out, "{before}{key:?}:{value:?}")?;
    }
    out.push('}');
    Ok(())
}

fn write_snapshot(
    out: &mut String,
    symbols: &mut SymbolCache,
    snapshot: &Snapshot,
    graph: &Graph,
    sched: &Sched,
) -> std::fmt::Result {
    let subject = snapshot.subject;
    let kind = match subject {
        Subject::Goroutine(_) => "goroutine",
        Subject::Task { .. } => "task",
    };
    write!(out, "{kind} {}", subject.id())?;
    let mut name = [0; NAME_MAX_BYTES];
    if let Some(len) = subject.copy_name(&mut name) {
        write!(out, " {:?}", String::from_utf8_lossy(&name[..len]))?;
    }
    write!(out, " [{}", snapshot.state())?;
    if let Subject::Task { carrier: Some(g), .. } = subject {
        write!(out, ", polled by goroutine {}", g.id())?;
    }
    if let Status::Waiting(_) = snapshot.status {
        let minutes = sched.minutes_waited(subject.head());
        if minutes > 0 {
            write!(out, ", {minutes} minutes")?;
        }
    }
    if let Some(labels) = subject.labels() {
        out.push_str(", labels: ");
        write_labels(out, &labels)?;
    }
    writeln!(out, "]:")?;
    if let Status::Waiting(reason) = snapshot.status
        && let Some(wait) = graph.wait_of_id(sched, subject.id())
        && wait.parked_for == reason
    {
        writeln!(out, "\t{}, for {:.1} s", waits_for(wait), wait.waited.as_secs_f64())?;
    }
    match &snapshot.stack {
        StackSnapshot::Addresses(addresses) => {
            for frame in symbols.frames(addresses) {
                writeln!(out, "{}", frame.name)?;
                if frame.line != 0 {
                    writeln!(out, "\t{}:{}", frame.file, frame.line)?;
                }
            }
        }
        StackSnapshot::Running => {
            writeln!(out, "\tgoroutine running on other thread; stack unavailable")?
        }
        StackSnapshot::None => writeln!(out, "\ta task that waits has no stack")?,
        StackSnapshot::Unknown => writeln!(out, "\tno stack yet, or it was resumed meanwhile")?,
    }
    let (function, place) = subject.origin();
    // The type name of a closure is the path of its function, then `{{closure}}`.
    let function = function.strip_suffix("::{{closure}}").unwrap_or(function);
    write!(out, "created by {function}")?;
    if let Subject::Goroutine(g) = subject
        && g.parent() != 0
    {
        write!(out, " in goroutine {}", g.parent())?;
    }
    writeln!(out, "\n\t{}:{}\n", place.file(), place.line())
}
