//! Slots that live until the end of a run of the model.

use super::slot::Slot;
use crate::sched::Rt;
use loom::sync::Mutex;

/// Boxed, because references to it stay valid while the list grows.
struct Kept(#[allow(dead_code)] Box<Slot>);

loom::lazy_static! {
    static ref ALL: Mutex<Vec<Kept>> = Mutex::new(Vec::new());
}

pub(super) fn take() -> &'static Slot {
    let slot = Box::new(Slot::new());
    // SAFETY: it is freed with the list, when all goroutines of the model have ended.
    let reference: &'static Slot = unsafe { &*std::ptr::from_ref(&*slot) };
    ALL.lock().expect("a panic ends the model").push(Kept(slot));
    reference
}

pub(super) fn put(_: Option<Rt>, _: &'static Slot) {}

pub(super) fn spent(_: Rt, _: &'static Slot) {}
