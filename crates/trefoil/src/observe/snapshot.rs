//! `Snapshot`: the state and the stack of a goroutine or task. Dumps and profiles are made of them.
//!
//! No goroutine is stopped for it. Goroutines and tasks start, move and end meanwhile, and one that
//! ends before its snapshot is left out. The stack of a running goroutine is not read, except the
//! caller's own.
//!
//! A task that waits has no stack. A task that is being polled has the stack of its carrier, and
//! the carrier is not listed as a goroutine.

use super::unwind::{OwnAddress, Tables, own_stack};
use crate::sched::g::{self, G, Status};
use crate::sched::labels::LabelSet;
use crate::sched::runnable::RunHead;
use crate::sched::task::state::{Generation, TaskSnapshot};
use crate::sched::task::{Task, block};
use crate::sched::{Sched, current_g};
use crate::sys::map::Set;
use crate::sys::sort::sort_by_key;
use std::panic::Location;
use std::sync::Arc;

/// Frames of the caller's own stack that are read at most, those of the dump itself included.
const OWN_FRAMES_MAX: usize = 128;

/// Bytes of a name that [`for_each_name`] reads at most.
const NAME_BYTES_MAX: usize = 256;

/// One goroutine or task at one moment.
pub(super) struct Snapshot {
    pub(super) subject: Subject,
    pub(super) status: Status,
    pub(super) stack: StackSnapshot,
}

/// What a [`Snapshot`] shows.
#[derive(Clone, Copy)]
pub(super) enum Subject {
    Goroutine(&'static G),
    Task {
        task: &'static Task,
        generation: Generation,
        /// The goroutine that polls it.
        carrier: Option<&'static G>,
    },
}

/// The stack of a goroutine, as far as it can be read.
pub(super) enum StackSnapshot {
    /// Code addresses, innermost first.
    Addresses(Vec<u64>),
    /// The goroutine runs on another thread.
    Running,
    /// The goroutine has not begun, or it was resumed while its stack was read.
    Unknown,
    /// It is a task that is not being polled.
    None,
}

impl Snapshot {
    /// Returns the state in Go's words.
    pub(super) fn state(&self) -> &'static str {
        text_of(self.status)
    }
}

/// Returns a state in Go's words.
pub(super) fn text_of(status: Status) -> &'static str {
    match status {
        Status::Dead => "dead",
        Status::Runnable => "runnable",
        Status::Running => "running",
        Status::Waiting(reason) => reason.text(),
    }
}

impl Subject {
    pub(super) fn id(self) -> u64 {
        match self {
            Subject::Goroutine(g) => g.id(),
            Subject::Task { task, .. } => task.id(),
        }
    }

    /// Returns what has stored since when it waits.
    pub(super) fn head(self) -> &'static RunHead {
        match self {
            Subject::Goroutine(g) => &g.head,
            Subject::Task { carrier: Some(g), .. } => &g.head,
            Subject::Task { task, .. } => &task.head,
        }
    }

    /// Copies its name into `buffer`, as far as it fits. Returns the number of bytes copied, or
    /// None if it has no name.
    pub(super) fn copy_name(self, buffer: &mut [u8]) -> Option<usize> {
        match self {
            Subject::Goroutine(g) => g.copy_name(buffer),
            Subject::Task { task, generation, .. } => task.copy_name(generation, buffer),
        }
    }

    /// Returns its labels.
    pub(super) fn labels(self) -> Option<Arc<LabelSet>> {
        let labels = match self {
            Subject::Goroutine(g) => g.labels.read(),
            Subject::Task { task, .. } => task.origin.labels(),
        };
        labels.map(|labels| labels.set().clone())
    }

    /// Returns the name of its closure's or future's type, and where it was started.
    pub(super) fn origin(self) -> (&'static str, &'static Location<'static>) {
        match self {
            Subject::Goroutine(g) => g.origin(),
            Subject::Task { task, .. } => task.origin(),
        }
    }

    /// Returns the goroutine whose stack it uses.
    pub(super) fn g(self) -> Option<&'static G> {
        match self {
            Subject::Goroutine(g) => Some(g),
            Subject::Task { carrier, .. } => carrier,
        }
    }

    pub(super) fn is_caller(self) -> bool {
        self.g().is_some_and(is_caller)
    }

    /// Returns whether it is still a goroutine or task of `sched`, and the same as before.
    pub(super) fn is_still(self, id: u64, sched: &Sched) -> bool {
        let of = match self {
            Subject::Goroutine(g) => g.sched_hint(),
            Subject::Task { task, generation, .. } => {
                if task.state.has_ended(generation) {
                    return false;
                }
                task.sched_hint()
            }
        };
        self.id() == id && std::ptr::eq(of, sched)
    }

    /// Returns whether the state and the stack of the goroutine that [`Subject::g`] returns are
    /// still its own. A carrier polls one task after the other.
    pub(super) fn has_still_carrier(self) -> bool {
        match self {
            Subject::Task { task, carrier: Some(g), .. } => {
                g.task_hint().is_some_and(|polled| std::ptr::eq(polled, task))
            }
            _ => true,
        }
    }

    pub(super) fn status(self) -> Status {
        match self {
            Subject::Goroutine(g) => g.status(),
            Subject::Task { carrier: Some(g), .. } => g.status(),
            Subject::Task { task, .. } => match task.state.snapshot().0 {
                TaskSnapshot::Free => Status::Dead,
                TaskSnapshot::Idle => Status::Waiting(task.head.reason()),
                TaskSnapshot::Scheduled => Status::Runnable,
                TaskSnapshot::Running => Status::Running,
            },
        }
    }
}

/// Calls `f` with a snapshot of every goroutine and task of `sched`, the caller first, then by id.
pub(super) fn for_each(sched: &Sched, mut f: impl FnMut(Snapshot)) {
    let subjects = subjects(sched);
    let mut tables = Tables::load();
    // No closures of iterators: their frames, which are std's, would be in the caller's own stack.
    for (id, subject) in subjects {
        if let Some(snapshot) = take(sched, id, subject, &mut tables) {
            f(snapshot);
        }
    }
}

/// Returns a snapshot of the goroutine or task of `sched` with this id.
pub(super) fn one(sched: &Sched, id: u64) -> Option<Snapshot> {
    let mut found = None;
    for_each_subject(sched, &mut |other, subject| {
        if other == id {
            found = Some(subject);
        }
    });
    take(sched, id, found?, &mut Tables::load())
}

/// Takes the snapshot of `subject`. None if it has ended since it was listed.
fn take(sched: &Sched, id: u64, subject: Subject, tables: &mut Tables) -> Option<Snapshot> {
    let status = subject.status();
    let stack = match (status, subject.g()) {
        (Status::Dead, _) => return None,
        (_, None) => StackSnapshot::None,
        (Status::Running, Some(g)) if is_caller(g) => StackSnapshot::Addresses(own_addresses()),
        (Status::Running, _) => StackSnapshot::Running,
        (_, Some(g)) => tables.frames(g).map_or(StackSnapshot::Unknown, StackSnapshot::Addresses),
    };
    if let Subject::Task { task, generation, .. } = subject
        && !subject.has_still_carrier()
    {
        // What was read is of the task that the carrier polls now.
        let subject = Subject::Task { task, generation, carrier: None };
        return take(sched, id, subject, tables);
    }
    // The memory may have been reused for another goroutine or task.
    subject.is_still(id, sched).then_some(Snapshot { subject, status, stack })
}

/// Calls `f` with the id and the name of every goroutine and task of `sched` that has a name.
pub(super) fn for_each_name(sched: &Sched, mut f: impl FnMut(u64, &str)) {
    let mut buffer = [0; NAME_BYTES_MAX];
    for (id, subject) in subjects(sched) {
        if let Some(len) = subject.copy_name(&mut buffer)
            && subject.is_still(id, sched)
        {
            f(id, &String::from_utf8_lossy(&buffer[..len]));
        }
    }
}

/// Returns the goroutines and tasks of `sched` with their ids, the caller first, then by id.
pub(super) fn subjects(sched: &Sched) -> Vec<(u64, Subject)> {
    let mut all = Vec::new();
    for_each_subject(sched, &mut |id, subject| all.push((id, subject)));
    sort_by_key(&mut all, |&(id, subject)| (!subject.is_caller(), id));
    all
}

/// Calls `f` with the id of every goroutine and task of `sched`, in no order. One that ends
/// meanwhile may be left out, or be another one by the time `f` sees it
/// ([`Subject::is_still`]).
pub(super) fn for_each_subject(sched: &Sched, f: &mut dyn FnMut(u64, Subject)) {
    // Tasks that a carrier polls: they are not listed a second time.
    let mut polled: Set<*const Task> = Set::new();
    g::for_each(&mut |g| {
        if g.status() == Status::Dead || !std::ptr::eq(g.sched_hint(), sched) {
            return;
        }
        if !g.is_carrier_hint() {
            f(g.id(), Subject::Goroutine(g));
        } else if let Some(task) = g.task_hint() {
            let (state, generation) = task.state.snapshot();
            if state != TaskSnapshot::Free && polled.insert(task) {
                f(task.id(), Subject::Task { task, generation, carrier: Some(g) });
            }
        }
    });
    block::for_each(&mut |task| {
        let (state, generation) = task.state.snapshot();
        if state != TaskSnapshot::Free
            && std::ptr::eq(task.sched_hint(), sched)
            && !polled.contains(&std::ptr::from_ref(task))
        {
            f(task.id(), Subject::Task { task, generation, carrier: None });
        }
    });
}

fn is_caller(g: &G) -> bool {
    current_g().is_some_and(|current| std::ptr::eq(current, g))
}

/// Returns the code addresses on the caller's own stack, innermost first.
fn own_addresses() -> Vec<u64> {
    let mut addresses = [OwnAddress::Call(0); OWN_FRAMES_MAX];
    let len = own_stack(&mut addresses);
    addresses[..len].iter().map(|address| address.address()).collect()
}
