//! `sched/timers.rs` as seen from outside: settings that may fire at any time after they were made.

use super::Rt;
use crate::sys::clock::{Nanos, now};
use loom::sync::Mutex;
use std::time::Instant;

/// As in `trefoil`.
pub(crate) trait Alarm: Sync {
    fn fire(&'static self, rt: Rt, seq: u64, now: Nanos);
    fn is_current(&self, seq: u64) -> bool;
}

/// A setting in the heap.
pub(crate) type Setting = (&'static dyn Alarm, u64);

loom::lazy_static! {
    static ref HEAP: Mutex<Vec<Setting>> = Mutex::new(Vec::new());
}

pub(crate) struct Sched;

impl Sched {
    pub(crate) fn instant(&self, _: Nanos) -> Instant {
        Instant::now()
    }

    pub(crate) fn set_alarm(&self, _: Option<Rt>, _: Nanos, alarm: &'static dyn Alarm, seq: u64) {
        HEAP.lock().expect("a panic ends the model").push((alarm, seq));
    }
}

/// Takes what is in the heap.
pub(crate) fn take_settings() -> Vec<Setting> {
    std::mem::take(&mut *HEAP.lock().expect("a panic ends the model"))
}

/// The time of all of these has come.
pub(crate) fn fire(settings: Vec<Setting>) {
    let rt = Rt::enter().expect("goroutines only");
    for (alarm, seq) in settings {
        alarm.fire(rt, seq, now());
    }
}
