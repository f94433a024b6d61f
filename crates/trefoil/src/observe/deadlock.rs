//! `fatal error: all goroutines are asleep - deadlock!`
//!
//! The helper thread makes Go's check when its runtime has been asleep for a while. It reports a
//! deadlock if no goroutine runs or can run and no timer is set in *any* runtime of the process,
//! and no other thread could wake a goroutine: every thread belongs to a runtime, or is a plain
//! thread that itself waits for a goroutine. In doubt it reports nothing, because a false report
//! would end a healthy program.

use crate::sched::{Sched, monitor::helper, wait};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Every runtime of the process.
static RUNTIMES: Mutex<Vec<Weak<Sched>>> = Mutex::new(Vec::new());

/// How many callers wait for a goroutine of a system runtime ([`SystemRuntimeWait`]).
static SYSTEM_RUNTIME_WAITS: AtomicUsize = AtomicUsize::new(0);

/// Held by a goroutine or thread of the program while it waits for a goroutine of a system runtime:
/// that goroutine will wake it, so there is no deadlock meanwhile.
///
/// If the caller's own runtime is dropped while it waits, this is never dropped. Then no deadlock
/// is reported any more.
pub(crate) struct SystemRuntimeWait(());

impl SystemRuntimeWait {
    pub(crate) fn new() -> SystemRuntimeWait {
        SYSTEM_RUNTIME_WAITS.fetch_add(1, Ordering::SeqCst);
        SystemRuntimeWait(())
    }
}

impl Drop for SystemRuntimeWait {
    fn drop(&mut self) {
        SYSTEM_RUNTIME_WAITS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Adds a runtime that has started.
pub(crate) fn register(sched: &Arc<Sched>) {
    let mut all = RUNTIMES.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|weak| weak.strong_count() > 0);
    all.push(Arc::downgrade(sched));
}

/// Returns the program's runtimes that are alive, oldest first.
pub(crate) fn runtimes() -> Vec<Arc<Sched>> {
    let mut all = all_runtimes();
    all.retain(|sched| !sched.config.is_system);
    all
}

/// As [`runtimes`], with those of the runtime library itself.
fn all_runtimes() -> Vec<Arc<Sched>> {
    let all = RUNTIMES.lock().unwrap_or_else(PoisonError::into_inner);
    all.iter().filter_map(Weak::upgrade).collect()
}

/// Ends the process if there is a deadlock. The helper thread of any runtime calls it; all runtimes
/// are checked.
///
/// The parts are read one after the other while they may change. So all of them except the number
/// of threads and of waits for a system runtime are read twice. If both readings are equal, every
/// part had that value at the moment when the threads were counted. A wait for a system runtime
/// counts from before the caller parks until after it was woken, so it counts between two equal
/// readings if the caller is parked there.
pub(crate) fn check(_: &Sched) {
    let every = all_runtimes();
    let threads_of_all = || every.iter().map(|sched| sched.threads() as usize).sum::<usize>();
    // A dropped runtime counts only until its threads have ended. The goroutines of a system
    // runtime wait for requests from outside the process, and wake no goroutine of the program
    // except the callers that `SYSTEM_RUNTIME_WAITS` counts.
    let counts = |sched: &&Arc<Sched>| {
        let has_ended = sched.stopping.load(Ordering::Relaxed) && sched.threads() == 0;
        !has_ended && !sched.config.is_system
    };
    let all: Vec<Arc<Sched>> = every.iter().filter(counts).cloned().collect();
    if all.is_empty() {
        return;
    }
    let Some(runs) = runs_if_asleep(&all) else { return };
    let blocked = wait::thread_waiter::blocked_threads();
    let ms = threads_of_all();
    let threads = crate::sys::cpus::num_threads();
    let system_runtime_waits = SYSTEM_RUNTIME_WAITS.load(Ordering::SeqCst);
    if system_runtime_waits > 0
        || threads > ms + helper::service_threads() + blocked.count
        || threads_of_all() != ms
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

/// Returns how often all Ps together have begun to run a goroutine, or `None` if a goroutine runs
/// or can run.
fn runs_if_asleep(all: &[Arc<Sched>]) -> Option<u64> {
    let runs = |sched: &Arc<Sched>| {
        if sched.stopping.load(Ordering::Relaxed) { None } else { sched.runs_if_asleep() }
    };
    all.iter().map(runs).sum()
}
