//! Random numbers for callers inside and outside the runtime.

use crate::sched::m::Rt;
use crate::sys::rng::Rng;
use std::cell::Cell;

/// Returns a pseudo-random number. Inside the runtime (`rt` is `Some`) the P's generator makes it,
/// outside a generator in the thread-local storage of the thread or goroutine.
#[inline]
pub(crate) fn random(rt: Option<Rt>) -> u64 {
    match rt {
        Some(rt) => rt.random(),
        None => random_on_thread(),
    }
}

fn random_on_thread() -> u64 {
    thread_local! {
        static RNG: Cell<Option<Rng>> = const { Cell::new(None) };
    }
    RNG.with(|rng| {
        let mut own = rng.take().unwrap_or_else(|| Rng::new(std::ptr::from_ref(rng) as u64));
        let number = own.next();
        rng.set(Some(own));
        number
    })
}
