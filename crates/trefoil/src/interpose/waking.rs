//! From where an interposed function wakes a goroutine.
//!
//! A wake-up is an ordinary runtime call on a goroutine, and a call from outside on a plain thread. But the same
//! functions are called in signal handlers (`sem_post` may be, by POSIX), where neither is possible everywhere:
//!
//! | [`WakeContext`] | when | the wake-up |
//! |---|---|---|
//! | `Runtime` | on a goroutine, on its own stack | enters the runtime; may yield on its way out |
//! | `Outside` | on a plain thread; on a goroutine without a P; in a handler that interrupted user code | from outside, never switches |
//! | `Deferred` | a lock of the runtime is held, or a goroutine was interrupted inside the runtime | left to the helper thread (`sched/deferred.rs`) |
//!
//! Invariants:
//! 1. A handler never enters the runtime: `Rt::leave` may switch goroutines, and the alternate stack does not move.
//! 2. `Outside` takes locks of the runtime. It is chosen only where this thread holds none: every such lock is counted
//!    (`sys/lock.rs`), before it is taken until after it is given back.

use super::on_own_stack;
use crate::sched::{current_g, is_astray};
use crate::{arch, sys::lock};

/// See the head of the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WakeContext {
    Runtime,
    Outside,
    Deferred,
}

impl WakeContext {
    /// That of the caller.
    pub(super) fn current() -> WakeContext {
        if lock::holds_runtime_lock() {
            return WakeContext::Deferred;
        }
        if current_g().is_none() {
            return WakeContext::Outside;
        }
        // SAFETY: on a goroutine, or in a handler that interrupted one, so GS is the M.
        if unsafe { arch::is_in_runtime() } {
            return WakeContext::Deferred;
        }
        // A goroutine without a P may not come out of the runtime again, and those that it has to wake would wait.
        if is_astray() || !on_own_stack() { WakeContext::Outside } else { WakeContext::Runtime }
    }
}
