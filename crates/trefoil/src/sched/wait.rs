//! The narrow waist: how anything waits, and how it is woken.
//!
//! [`block`] makes the caller a *waiter*, one word that fits an atomic: the goroutine, or (tagged) a
//! bed on the stack of a plain thread. The caller stores it where its waker will find it. [`wake`]
//! ends the wait, from a goroutine or a plain thread alike.
//!
//! Contract: a stored waiter is woken exactly once. It may be woken before it sleeps.

use super::g::G;
use super::m::Rt;
use super::reason::WaitReason;
use super::switch;
use crate::sys::parker::Parker;

/// Bit 0 of a waiter: a plain thread. (Gs and parkers are aligned to at least 4.)
const THREAD: usize = 1;

/// Blocks the caller as a waiter. `store` puts the waiter where it will be found and says whether to
/// sleep at all; once it has said yes, someone must [`wake`] it. `store` must not run user code.
pub(crate) fn block(reason: WaitReason, store: impl FnOnce(usize) -> bool) {
    match Rt::enter() {
        Some(rt) => {
            let waiter = std::ptr::from_ref(rt.g()) as usize;
            let rt = if store(waiter) { switch::park(rt, reason) } else { rt };
            rt.leave();
        }
        None => {
            let parker = Parker::new();
            if store(&raw const parker as usize | THREAD) {
                parker.park();
            }
        }
    }
}

/// Ends a wait.
pub(crate) fn wake(waiter: usize) {
    match Rt::enter() {
        Some(rt) => {
            wake_in(rt, waiter);
            rt.leave();
        }
        None => match decode(waiter) {
            Waiter::Goroutine(g) => switch::ready_outside(g),
            Waiter::Thread(parker) => parker.unpark(),
        },
    }
}

/// [`wake`], inside the runtime.
#[inline]
pub(crate) fn wake_in(rt: Rt, waiter: usize) {
    match decode(waiter) {
        Waiter::Goroutine(g) => switch::ready(rt, g),
        Waiter::Thread(parker) => parker.unpark(),
    }
}

enum Waiter<'a> {
    Goroutine(&'static G),
    Thread(&'a Parker),
}

#[inline]
fn decode<'a>(waiter: usize) -> Waiter<'a> {
    // SAFETY: made by `block`; the sleeper's frame lives until we have woken it, once.
    unsafe {
        if waiter & THREAD == 0 {
            Waiter::Goroutine(&*(waiter as *const G))
        } else {
            Waiter::Thread(&*((waiter & !THREAD) as *const Parker))
        }
    }
}
