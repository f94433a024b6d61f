//! Restates `sched/wait/timers.rs`: timers may fire at any time after they were set.

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
    alarm: &'static dyn TimerCallback,
    seq: u64,
    when: Nanos,
}

loom::lazy_static! {
    static ref HEAP: Mutex<Vec<Entry>> = Mutex::new(Vec::new());
}

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
        alarm: &'static dyn TimerCallback,
        seq: u64,
    ) {
        HEAP.lock().expect("a panic ends the model").push(Entry { alarm, seq, when });
    }
}

/// Takes all entries of the heap.
pub(crate) fn take_entries() -> Vec<Entry> {
    std::mem::take(&mut *HEAP.lock().expect("a panic ends the model"))
}

/// Fires these entries one after the other. The clock shows each entry's time plus `mistake`.
pub(crate) fn fire(entries: Vec<Entry>, mistake: Nanos) {
    let rt = Rt::enter().expect("goroutines only");
    for Entry { alarm, seq, when } in entries {
        alarm.fire(rt, seq, when + mistake);
    }
}

/// Drops the entries of stopped timers, with the heap's lock held. With `secretly` the timers are not
/// told.
pub(crate) fn sweep(secretly: bool) {
    let mut heap = HEAP.lock().expect("a panic ends the model");
    heap.retain(|entry| !secretly && !entry.alarm.forget_if_idle(entry.seq));
}
