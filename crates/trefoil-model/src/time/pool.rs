//! Slots that live until the end of a run of the model.

use super::slot::TimerSlot;
use crate::sched::Rt;
use loom::sync::Mutex;

/// A slot in [`ALL`]. Boxed, because goroutines refer to it while the list grows.
struct Kept(#[allow(dead_code)] Box<TimerSlot>);

loom::lazy_static! {
    static ref ALL: Mutex<Vec<Kept>> = Mutex::new(Vec::new());
}

pub(super) fn take() -> &'static TimerSlot {
    let slot = Box::new(TimerSlot::new());
    // SAFETY: `ALL` owns the slot and frees it when all goroutines of the model have ended.
    let reference: &'static TimerSlot = unsafe { &*std::ptr::from_ref(&*slot) };
    ALL.lock().expect("a panic ends the model").push(Kept(slot));
    reference
}

pub(super) fn put(_: Option<Rt>, _: &'static TimerSlot) {}

pub(super) fn put_fired(_: Rt, _: &'static TimerSlot) {}
