//! Whole runtime calls: each function enters the runtime, acts, and leaves it.
//!
//! The public functions of the crate and the interposed functions of libc (`interpose/`) share
//! them.

use crate::sched::m::Rt;
use crate::sched::monitor::handoff;
use crate::sched::own_context::with_m;
use crate::sched::wait::{self, reason::WaitReason};
use crate::sched::{Sched, current_g, switch};
use crate::sys::clock::{LATEST, Nanos};

/// Calls `f`, which blocks its thread. On a goroutine another thread gets the P before the call,
/// and the goroutine acquires a P again when `f` returns or panics.
pub(crate) fn blocking<T>(f: impl FnOnce() -> T) -> T {
    /// Acquires a P, also when `f` panics.
    struct ReacquireP;
    impl Drop for ReacquireP {
        fn drop(&mut self) {
            // Entering the runtime acquires a P, because the M has none.
            if let Some(rt) = Rt::enter() {
                rt.leave();
            }
        }
    }
    match Rt::enter() {
        // A simulation waits for it: what other goroutines do meanwhile would not be repeatable.
        Some(rt) if rt.sched().simulation.is_some() => {
            rt.leave_without_yield();
            f()
        }
        Some(rt) => {
            handoff::release_p_before_blocking(rt);
            let _reacquire = ReacquireP;
            f()
        }
        None => f(),
    }
}

/// Returns the runtime of the calling goroutine; None on a plain thread.
#[inline]
pub(crate) fn current_sched() -> Option<&'static Sched> {
    // SAFETY: a goroutine that runs keeps its runtime alive.
    current_g().map(|g| unsafe { &*g.sched.get() })
}

/// Returns the number of the P that runs the calling goroutine: a hint, because the goroutine may
/// move right after. None on a plain thread, and if the M has lost its P.
#[inline]
pub(crate) fn current_p_id() -> Option<u32> {
    with_m(|m| m.p.get().map(|p| p.id))?
}

/// Parks the goroutine, or blocks the plain thread, until `deadline`, or until [`LATEST`] if that
/// is earlier. So every sleep has a timer, and the deadlock check does not report an endless sleep:
/// the program may wait for a signal.
pub(crate) fn sleep_until(deadline: Nanos) {
    // The wait is in no waker's list: only its deadline ends it.
    wait::wait(WaitReason::Sleep, deadline.min(LATEST), |_| true);
}

/// Lets other goroutines run. Returns false on a plain thread, where it does nothing.
#[inline]
pub(crate) fn yield_now() -> bool {
    let Some(rt) = Rt::enter() else { return false };
    switch::yield_now(rt).leave();
    true
}

/// What a goroutine has yielded to.
#[cfg(feature = "std")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Yielded {
    /// To goroutines; in a simulation always, because nothing in it waits for another thread.
    ToGoroutines,
    /// Neither the local queues of its P nor the global queues held a goroutine.
    ToNone,
}

/// As [`yield_now`]; returns what it has yielded to. None on a plain thread.
#[cfg(feature = "std")]
pub(crate) fn yield_and_report() -> Option<Yielded> {
    let rt = Rt::enter()?;
    let to_none = rt.is_alone() && rt.sched().simulation.is_none();
    switch::yield_now(rt).leave();
    Some(if to_none { Yielded::ToNone } else { Yielded::ToGoroutines })
}
