//! std's name of a goroutine: what `std::thread::current().name()` returns.
//!
//! std stores a thread's name in its handle of the thread, which only `std::thread::Builder` makes:
//! there is no function that sets it. So a goroutine that has a name *adopts* a handle of std before
//! its closure runs:
//!
//! 1. [`adopt`] marks the goroutine and lets std start a thread of that name that does nothing.
//! 2. `pthread_create` takes the mark and runs the start routine at once, as a plain call on the
//!    goroutine. std stores the handle in the goroutine's thread-locals, as in any new thread.
//! 3. Until [`adopt`] returns, the goroutine stays marked as adopting: `pthread_setname_np` does not
//!    rename the OS thread, and `pthread_detach` has nothing to detach.
//!
//! No OS thread is started, and no frame is left on the stack. But std needs 0.9 µs for it, and
//! more of the stack than is left of its first page: 100,000 named goroutines that wait take 8.1 to
//! 8.9 KB each, others 4.6 KB. So goroutines without a name do not do it.
//!
//! Rejected: to wrap the closures of goroutines that have names: dumps would show the wrapper's type
//! after `created by`. To run the goroutine's closure as the thread's closure. It would have six more frames
//! in every dump, and std would catch its panics.

use super::StartRoutine;
use crate::sched::current_g;
use crate::sched::g::G;
use libc::pthread_t;
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    /// The next `pthread_create` is not to start a thread.
    Marked,
    /// It has taken the mark.
    Adopting,
}

thread_local! {
    static STATE: Cell<State> = const { Cell::new(State::Idle) };
}

/// The program has a `pthread_create` of its own, as with rpmalloc, so ours is not called.
static IS_REPLACED: AtomicBool = AtomicBool::new(false);

/// Gives std's handle of the calling goroutine the goroutine's name. For a goroutine that has not
/// run any of the program's code: std refuses to replace a handle.
#[inline(never)]
pub(crate) fn adopt() {
    let Some(name) = current_g().and_then(G::name) else { return };
    // std's names end with a zero.
    if name.contains('\0') || IS_REPLACED.load(Ordering::Relaxed) {
        return;
    }
    STATE.set(State::Marked);
    // If there is no memory, the goroutine has no name.
    let adopted = thread::Builder::new().name(name.to_owned()).spawn(|| ());
    let is_adopted = adopted.is_ok();
    drop(adopted);
    if STATE.replace(State::Idle) == State::Marked && is_adopted {
        IS_REPLACED.store(true, Ordering::Relaxed);
    }
}

/// Returns whether the caller is inside [`adopt`], after `pthread_create`.
pub(super) fn is_adopting() -> bool {
    STATE.get() == State::Adopting
}

/// `pthread_create`: takes the mark of the calling goroutine and runs the start routine. Returns
/// None if there is no mark.
///
/// # Safety
/// `pthread_create`'s contract.
pub(super) unsafe fn create(
    created: *mut pthread_t,
    start: StartRoutine,
    argument: *mut c_void,
) -> Option<c_int> {
    if STATE.get() != State::Marked {
        return None;
    }
    STATE.set(State::Adopting);
    // SAFETY: the caller's contract; POSIX lets a thread run before its creator has its id.
    unsafe {
        created.write(libc::pthread_self());
        start(argument);
    }
    Some(0)
}
