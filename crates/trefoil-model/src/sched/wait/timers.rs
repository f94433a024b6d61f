//! Restates `sched/wait/timers.rs`: timers may fire at any moment after they were set.

use crate::sched::Rt;
use crate::sys::clock::Nanos;
use loom::sync::Mutex;
use std::time::Instant;

/// As in `trefoil`.
pub(crate) trait TimerCallback: Sync {
    fn fire(&'static self, rt: Rt, seq: u64, now: Nanos);
    fn forget_if_idle(&self, seq: u64) -> bool;
}

/// An entry of the heap.
#[derive(Clone, Copy)]
pub(crate) struct Entry {
    callback: &'static dyn TimerCallback,
    seq: u64,
    when: Nanos,
}

loom::lazy_static! {
    static ref HEAP: Mutex<Vec<Entry>> = Mutex::new(Vec::new());
}

/// The runtime.
pub(crate) struct Sched;

/// There is one runtime.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct RuntimeId;

impl Sched {
    pub(crate) fn runtime_id(&self) -> RuntimeId {
        RuntimeId
    }

    pub(crate) fn instant(&self, _: Nanos) -> Instant {
        Instant::now()
    }

    pub(crate) fn set_callback_timer(
        &self,
        _: Option<Rt>,
        when: Nanos,
        callback: &'static dyn TimerCallback,
        seq: u64,
    ) {
        HEAP.lock().expect("a panic ends the model").push(Entry { callback, seq, when });
    }
}

/// Takes all entries of the heap.
pub(crate) fn take_entries() -> Vec<Entry> {
    std::mem::take(&mut *HEAP.lock().expect("a panic ends the model"))
}

/// Fires these entries one after the other. Each finds a clock that shows the entry's own time plus
/// `clock_error`.
pub(crate) fn fire(entries: Vec<Entry>, clock_error: Nanos) {
    let rt = Rt::enter().expect("goroutines only");
    for Entry { callback, seq, when } in entries {
        callback.fire(rt, seq, when + clock_error);
    }
}

/// How a sweep drops entries.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sweep {
    /// As in `trefoil`: the entries whose timers agree.
    AsksTimers,
    /// Broken: every entry, and no timer is asked.
    AsksNoTimer,
}

/// Drops the entries of stopped timers, with the heap's lock held.
pub(crate) fn sweep(how: Sweep) {
    let mut heap = HEAP.lock().expect("a panic ends the model");
    heap.retain(|entry| how == Sweep::AsksTimers && !entry.callback.forget_if_idle(entry.seq));
}
