//! `GoroutineSnapshot`: the state and the stack of a goroutine. Dumps and profiles are made of
//! them.
//!
//! No goroutine is stopped for it. Goroutines start, move and end meanwhile, and a goroutine that
//! ends before its snapshot is left out. The stack of a running goroutine is not read, except the
//! caller's own.

use super::unwind::Tables;
use crate::sched::g::{self, G, Status};
use crate::sched::{Sched, current_g};

/// Frames of the caller's own stack that are read at most, those of the dump itself included.
const OWN_FRAMES_MAX: usize = 128;

/// One goroutine at one moment.
pub(super) struct GoroutineSnapshot {
    pub(super) g: &'static G,
    pub(super) status: Status,
    pub(super) stack: StackSnapshot,
}

/// The stack of a goroutine, as far as it can be read.
pub(super) enum StackSnapshot {
    /// Code addresses, innermost first.
    Addresses(Vec<u64>),
    /// The goroutine runs on another thread.
    Running,
    /// The goroutine has not begun, or it was resumed while its stack was read.
    Unknown,
}

impl GoroutineSnapshot {
    /// Returns the state in Go's words.
    pub(super) fn state(&self) -> &'static str {
        match self.status {
            Status::Dead => "dead",
            Status::Runnable => "runnable",
            Status::Running => "running",
            Status::Waiting(reason) => reason.text(),
        }
    }
}

/// Calls `f` with a snapshot of every goroutine of `sched`, the caller first, then by id.
pub(super) fn for_each(sched: &Sched, mut f: impl FnMut(GoroutineSnapshot)) {
    let goroutines = goroutines(sched);
    let mut tables = Tables::load();
    for (id, g) in goroutines {
        let status = g.status();
        let stack = match status {
            Status::Dead => continue, // It has ended since.
            Status::Running if is_caller(g) => StackSnapshot::Addresses(own_stack()),
            Status::Running => StackSnapshot::Running,
            _ => tables.frames(g).map_or(StackSnapshot::Unknown, StackSnapshot::Addresses),
        };
        // The G may have been reused for another goroutine.
        if g.id() == id && std::ptr::eq(g.sched_hint(), sched) {
            f(GoroutineSnapshot { g, status, stack });
        }
    }
}

/// Returns the goroutines of `sched` with their ids, the caller first, then by id.
fn goroutines(sched: &Sched) -> Vec<(u64, &'static G)> {
    let mut all = Vec::new();
    g::for_each(&mut |g| {
        if g.status() != Status::Dead && std::ptr::eq(g.sched_hint(), sched) {
            all.push((g.id(), g));
        }
    });
    all.sort_unstable_by_key(|&(id, g)| (!is_caller(g), id));
    all
}

fn is_caller(g: &G) -> bool {
    current_g().is_some_and(|current| std::ptr::eq(current, g))
}

/// Returns the code addresses on the caller's own stack, innermost first.
fn own_stack() -> Vec<u64> {
    let mut addresses = Vec::new();
    backtrace::trace(|frame| {
        // A return address is behind the call: the byte before it belongs to the call.
        addresses.push((frame.ip() as u64).saturating_sub(1));
        addresses.len() < OWN_FRAMES_MAX
    });
    addresses
}
