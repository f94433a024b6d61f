//! Random numbers for callers inside and outside the runtime.

use crate::sched::m::Rt;
use crate::sys::rng::Rng;
use std::cell::Cell;

/// Returns a random number: from the generator of the P inside the runtime, else from that of the
/// thread.
#[inline]
pub(crate) fn random(here: Option<Rt>) -> u64 {
    match here {
        Some(rt) => rt.random(),
        None => random_on_thread(),
    }
}

fn random_on_thread() -> u64 {
    thread_local! {
        static RNG: Cell<Option<Rng>> = const { Cell::new(None) };
    }
    RNG.with(|rng| {
        let mut here = rng.take().unwrap_or_else(|| Rng::new(std::ptr::from_ref(rng) as u64));
        let number = here.next();
        rng.set(Some(here));
        number
    })
}
