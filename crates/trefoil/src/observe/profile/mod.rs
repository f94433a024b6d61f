//! Taking profiles.
//!
//! Goroutines, and waits that last, are read as they are: the goroutines are visited as for a dump
//! (`snapshot.rs`) and grouped twice: first by addresses, so that the stack of a million equal
//! goroutines is resolved once; then by the frames that are shown. CPU time, and waits that have
//! ended, come from samples: `collector.rs` gathers them, and `cpu.rs` runs the CPU timers.
//!
//! Invariant 1: every goroutine and task that was visited counts once. A task that waits has no
//! stack, and counts at its future. A goroutine whose stack cannot be read (it runs on another
//! thread, has not begun, or was resumed meanwhile) counts at the function that it was started
//! with.
//!
//! Rejected: stopping running goroutines, as Go does, because this module never changes what the
//! scheduler does.

pub(crate) mod collector;
pub(crate) mod cpu;

use super::pprof::{Group, GroupsByFrames, Profile, ProfileKind, SampleKey, Values};
use super::snapshot::{self, Snapshot, StackSnapshot};
use super::symbols::SymbolCache;
use super::waits;
use crate::sched::Sched;
use crate::sched::g::Status;
use crate::sched::labels::LabelSet;
use crate::sys::map::{Map, Set};
use std::panic::Location;
use std::sync::Arc;
use std::time::SystemTime;
use trefoil_base::symbols::Frame;

/// A stack before its addresses are resolved.
#[derive(PartialEq, Eq, Hash)]
struct RawStack {
    /// Empty if the stack could not be read.
    addresses: Vec<u64>,
    /// The closure that the goroutine was started with, and where.
    origin: (&'static str, &'static Location<'static>),
}

impl RawStack {
    fn of(snapshot: Snapshot) -> RawStack {
        let addresses = match snapshot.stack {
            StackSnapshot::Addresses(addresses) => addresses,
            StackSnapshot::Running | StackSnapshot::Unknown | StackSnapshot::None => Vec::new(),
        };
        RawStack { addresses, origin: snapshot.subject.origin() }
    }

    fn frames(&self, symbols: &mut SymbolCache) -> Vec<Arc<Frame>> {
        let mut frames = symbols.frames(&self.addresses);
        if frames.is_empty() {
            let (closure, place) = self.origin;
            let (name, file) = (closure.to_owned(), place.file().to_owned());
            frames.push(Arc::new(Frame { name, file, line: place.line() }));
        }
        frames
    }
}

/// What goroutines are grouped by at first.
type RawKey = (RawStack, &'static str, Option<Arc<LabelSet>>);

/// Takes the profile of the goroutines of `sched`.
pub(crate) fn goroutines(sched: &Sched) -> Profile {
    take(sched, ProfileKind::Goroutines, &|_| Some([1, 0, 0]))
}

/// Takes the profile of the goroutines of `sched` that wait.
pub(crate) fn waits(sched: &Sched) -> Profile {
    take(sched, ProfileKind::Waits, &|snapshot| age(sched, snapshot))
}

/// Takes the profile of the goroutines of `sched` that wait for ever, as far as is known.
pub(crate) fn leaks(sched: &Sched) -> Profile {
    let deadlocks = waits::deadlocks(sched);
    let members = deadlocks.iter().flat_map(|deadlock| &deadlock.members);
    // A deadlock may have members of other runtimes.
    let own = members.filter(|member| member.runtime == std::ptr::from_ref(sched).addr());
    let ids: Set<u64> = own.map(|member| member.goroutine.who.id).collect();
    take(sched, ProfileKind::Leaks, &|snapshot| {
        ids.contains(&snapshot.subject.id()).then(|| age(sched, snapshot)).flatten()
    })
}

/// Returns one goroutine and how long it has waited, if it waits: the values of a profile of waits.
fn age(sched: &Sched, snapshot: &Snapshot) -> Option<Values> {
    match snapshot.status {
        Status::Waiting(_) => {
            let age = u64::from(sched.millis_waited(snapshot.subject.head())) * 1_000_000;
            Some([1, age, age])
        }
        Status::Dead | Status::Runnable | Status::Running => None,
    }
}

/// Takes a profile of the goroutines for which `values` returns values.
fn take(sched: &Sched, kind: ProfileKind, values: &dyn Fn(&Snapshot) -> Option<Values>) -> Profile {
    let taken = SystemTime::now();
    let mut by_address: Map<RawKey, Group> = Map::new();
    snapshot::for_each(sched, |snapshot| {
        let Some(values) = values(&snapshot) else { return };
        let one = Group { values, id: Some(snapshot.subject.id()) };
        let (state, labels) = (snapshot.state(), snapshot.subject.labels());
        let key = (RawStack::of(snapshot), state, labels);
        by_address.get_or_default(key).add(kind, one);
    });
    let mut symbols = SymbolCache::default();
    let mut by_frames = GroupsByFrames::new();
    for ((stack, state, labels), group) in by_address {
        let stack = stack.frames(&mut symbols);
        let key = SampleKey { stack, state: Some(state), labels };
        by_frames.get_or_default((key, None)).add(kind, group);
    }
    Profile::new(kind, taken, 1, 0, by_frames)
}
