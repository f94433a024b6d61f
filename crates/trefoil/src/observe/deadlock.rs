//! `fatal error: all goroutines are asleep - deadlock!`
//!
//! Go's check, made by the aide when its runtime has been asleep for a while: no goroutine runs or can run,
//! no timer is set, in *any* runtime of the process, and there is no other thread that could wake one:
//! every thread is a runtime's, or a plain one that itself waits for a goroutine. Otherwise there is no
//! alarm: better none than a false one.

use crate::sched::{Sched, aide, wait};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Every runtime of the process.
static RUNTIMES: Mutex<Vec<Weak<Sched>>> = Mutex::new(Vec::new());

/// A runtime has started.
pub(crate) fn enrol(sched: &Arc<Sched>) {
    let mut all = RUNTIMES.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|weak| weak.strong_count() > 0);
    all.push(Arc::downgrade(sched));
}

/// The runtimes that live, oldest first.
pub(crate) fn runtimes() -> Vec<Arc<Sched>> {
    let all = RUNTIMES.lock().unwrap_or_else(PoisonError::into_inner);
    all.iter().filter_map(Weak::upgrade).collect()
}

/// Hook of the aide.
pub(crate) fn check(_: &Sched) {
    let mut all = runtimes();
    // What is left of a runtime that was dropped counts only while its threads end.
    all.retain(|sched| !sched.stopping.load(Ordering::Relaxed) || sched.threads() > 0);
    let winding_down = |sched: &Arc<Sched>| sched.stopping.load(Ordering::Relaxed);
    if all.iter().any(|sched| winding_down(sched) || !sched.is_asleep()) {
        return;
    }
    let ms: usize = all.iter().map(|sched| sched.threads() as usize).sum();
    let ours = ms + aide::attendants();
    if crate::sys::cpus::num_threads() > ours + wait::blocked_threads() {
        return;
    }
    // The count took time: is it still so?
    if all.iter().all(|sched| sched.is_asleep()) {
        let mut text = String::from("fatal error: all goroutines are asleep - deadlock!\n\n");
        for sched in &all {
            text.push_str(&super::dump::dump(sched));
        }
        super::quit::die(&text);
    }
}
