//! How an interposed function wakes a goroutine, depending on its caller.
//!
//! On a goroutine a wake-up is an ordinary runtime call, and on a plain thread a call from outside
//! the runtime. Signal handlers call the same functions (POSIX allows it for `sem_post`), and there
//! neither is always possible:
//!
//! | the caller | [`WakeContext`] | the wake-up |
//! |---|---|---|
//! | a goroutine, on its own stack | `Runtime` | enters the runtime; may yield at its end |
//! | a goroutine without a P | `Outside` | is made from outside; never switches |
//! | a plain thread | `Outside` | the same |
//! | a handler that interrupted user code | `Outside` | the same |
//! | a handler that interrupted the runtime | `Deferred` | is left to the helper thread |
//! | a holder of a lock of the runtime | `Deferred` | the same (`sched/wait/deferred.rs`) |
//!
//! Invariants:
//! 1. A handler never enters the runtime: `Rt::leave` may switch goroutines, and the alternate
//!    stack stays with the thread.
//! 2. `Outside` takes locks of the runtime. It is chosen only if this thread holds none: every such
//!    lock is counted (`sys/lock.rs`), from before it is taken until after it is released.

use crate::mem::on_own_stack;
use crate::sched::{current_g, is_without_p};
use crate::{arch, sys::lock};

/// See the head of the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WakeContext {
    Runtime,
    Outside,
    Deferred,
}

impl WakeContext {
    /// Returns the caller's context.
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
        // A goroutine without a P might never return from the runtime, and the goroutines that it
        // has to wake would wait for ever.
        if is_without_p() || !on_own_stack() { WakeContext::Outside } else { WakeContext::Runtime }
    }
}
