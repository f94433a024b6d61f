//! Whether an interposed function may park the goroutine that calls it.
//!
//! | the caller | [`begin_wait`] | [`begin_c_lock_wait`] |
//! |---|---|---|
//! | is a plain thread, or a child of `fork` | no | no |
//! | is a signal handler, on the thread's alternate stack | no | no |
//! | holds a lock of the process (`sched/shutdown.rs`), and its runtime has ended | no | no |
//! | holds a lock of the runtime, or is inside the runtime | not checked | no |
//!
//! The last line is checked for C locks alone: the runtime never waits by the other functions there
//! (`sys/lock.rs`, rule 2), but C code that it calls may lock a mutex. A caller that may not park
//! waits in the kernel.

#[cfg(feature = "std")]
use crate::mem::on_own_stack;
#[cfg(feature = "std")]
use crate::sched::{WaitingHolder, current_g, holds_lock, holds_lock_of_std, is_runtime_drained};
#[cfg(feature = "std")]
use crate::sys::{fork::is_forked, lock};

/// Returns whether the caller is a goroutine, and this process is not a child of `fork`.
#[cfg(feature = "std")]
#[inline(always)]
pub(super) fn on_goroutine() -> bool {
    current_g().is_some() && !is_forked()
}

/// Returns whether the caller is a goroutine on its own stack, so that it can park.
#[cfg(feature = "std")]
pub(super) fn may_park() -> bool {
    on_goroutine() && on_own_stack()
}

/// Returns whether the caller may park for a lock of C code.
#[cfg(feature = "std")]
pub(super) fn may_park_for_c_lock() -> bool {
    // In a runtime that has ended, a holder that parks would keep its locks for good.
    let would_leak = lock::c_locks_held() > 1 && is_runtime_drained();
    // SAFETY: `is_in_runtime` is called only on a goroutine, and there GS is the M.
    !would_leak
        && may_park()
        && !lock::holds_runtime_lock()
        && !unsafe { crate::arch::is_in_runtime() }
}

/// The right of a goroutine to park, or to yield; kept until it runs again.
#[cfg(feature = "std")]
pub(super) struct Wait {
    _holder: Option<WaitingHolder>,
}

/// Begins a wait. Returns None if the caller must wait in the kernel.
#[cfg(feature = "std")]
pub(super) fn begin_wait() -> Option<Wait> {
    if may_park() { Wait::new(holds_lock()) } else { None }
}

/// As [`begin_wait`], for a lock of C code. `own_locks` of the C locks that the caller holds are
/// not counted: the lock that it waits for, which is counted before it is taken, or the mutex that
/// it releases during the wait.
#[cfg(feature = "std")]
pub(super) fn begin_c_lock_wait(own_locks: u32) -> Option<Wait> {
    if !may_park_for_c_lock() {
        return None;
    }
    Wait::new(lock::c_locks_held() > own_locks || holds_lock_of_std())
}

#[cfg(feature = "std")]
impl Wait {
    /// Returns None if the goroutine's runtime has ended and would abandon it with its lock.
    fn new(holds_lock: bool) -> Option<Wait> {
        let holder = if holds_lock { Some(WaitingHolder::new()?) } else { None };
        Some(Wait { _holder: holder })
    }
}
