//! `fatal error: all goroutines are asleep - deadlock!`
//!
//! Go's check, made by the helper thread when its runtime has been asleep for a while: no goroutine runs or can run,
//! no timer is set, in *any* runtime of the process, and there is no other thread that could wake one:
//! every thread is a runtime's, or a plain one that itself waits for a goroutine. Otherwise there is no
//! alarm: better none than a false one.

use crate::sched::{Sched, monitor::helper, wait};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Every runtime of the process.
static RUNTIMES: Mutex<Vec<Weak<Sched>>> = Mutex::new(Vec::new());

/// A runtime has started.
pub(crate) fn register(sched: &Arc<Sched>) {
    let mut all = RUNTIMES.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|weak| weak.strong_count() > 0);
    all.push(Arc::downgrade(sched));
}

/// The runtimes that live, oldest first.
pub(crate) fn runtimes() -> Vec<Arc<Sched>> {
    let all = RUNTIMES.lock().unwrap_or_else(PoisonError::into_inner);
    all.iter().filter_map(Weak::upgrade).collect()
}

/// Hook of the helper thread.
///
/// The parts are read one after the other while they may change, so all but the number of threads are read twice. If
/// both readings are equal there was a moment, when the threads were counted, at which every part was as it was read.
pub(crate) fn check(_: &Sched) {
    let mut all = runtimes();
    // What is left of a runtime that was dropped counts only while its threads end.
    all.retain(|sched| !sched.stopping.load(Ordering::Relaxed) || sched.threads() > 0);
    let Some(runs) = runs_if_asleep(&all) else { return };
    let blocked = wait::thread_waiter::blocked_threads();
    let ms: usize = all.iter().map(|sched| sched.threads() as usize).sum();
    let threads = crate::sys::cpus::num_threads();
    if threads > ms + helper::service_threads() + blocked.count
        || wait::thread_waiter::blocked_threads() != blocked
        || runs_if_asleep(&all) != Some(runs)
    {
        return;
    }
    let mut text = String::from("fatal error: all goroutines are asleep - deadlock!\n\n");
    for sched in &all {
        text.push_str(&super::dump::dump(sched));
    }
    super::quit::die(&text);
}

/// How often all Ps together have begun to run a goroutine, if none runs or can run; None otherwise.
fn runs_if_asleep(all: &[Arc<Sched>]) -> Option<u64> {
    let runs = |sched: &Arc<Sched>| {
        if sched.stopping.load(Ordering::Relaxed) { None } else { sched.runs_if_asleep() }
    };
    all.iter().map(runs).sum()
}
