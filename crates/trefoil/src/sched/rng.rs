//! Cheap randomness for steal orders: SplitMix64, and random tours over n places.

use super::m::Rt;
use std::cell::Cell;

/// Returns a random number: from the generator of the P inside the runtime, else from that of the
/// thread.
#[inline]
pub(crate) fn random(here: Option<Rt>) -> u64 {
    match here {
        // SAFETY: inside the runtime the P belongs to the caller, and no other borrow of its local
        // state exists.
        Some(rt) => unsafe { rt.p().local() }.rng.next(),
        None => random_on_thread(),
    }
}

fn random_on_thread() -> u64 {
    thread_local! {
        /// The state of the generator; 0 before its first use.
        static STATE: Cell<u64> = const { Cell::new(0) };
    }
    STATE.with(|state| {
        let mut rng = match state.get() {
            0 => Rng::new(std::ptr::from_ref(state) as u64),
            state => Rng(state),
        };
        let number = rng.next();
        state.set(rng.0);
        number
    })
}

/// A generator owned by one P.
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Rng {
        let clock = std::time::Instant::now();
        // The address of a local differs from run to run; the clock from P to P.
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (&raw const clock as u64) ^ now_bits())
    }

    #[inline]
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// All of `0..n` once each, from a random start with a random step coprime to n.
    pub(crate) fn tour(&mut self, n: u32) -> Tour {
        let n = n.max(1);
        let random = self.next();
        let mut step = (random >> 32) as u32 % n + 1;
        while gcd(step, n) != 1 {
            step += 1;
        }
        Tour { at: random as u32 % n, step: step % n, n, left: n }
    }
}

fn now_bits() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (t.tv_nsec as u64) << 20 ^ t.tv_sec as u64
}

fn gcd(mut a: u32, mut b: u32) -> u32 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// See [`Rng::tour`].
pub(crate) struct Tour {
    at: u32,
    step: u32,
    n: u32,
    left: u32,
}

impl Iterator for Tour {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        self.left = self.left.checked_sub(1)?;
        let here = self.at;
        self.at = ((u64::from(self.at) + u64::from(self.step)) % u64::from(self.n)) as u32;
        Some(here)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steal_order_visits_each_p_exactly_once() {
        let mut rng = Rng::new(1);
        for n in 1..=64 {
            for _ in 0..50 {
                let mut seen = vec![0; n as usize];
                rng.tour(n).for_each(|i| seen[i as usize] += 1);
                assert!(seen.iter().all(|&c| c == 1), "{n}: {seen:?}");
            }
        }
    }

    #[test]
    fn starts_are_spread() {
        let mut rng = Rng::new(2);
        let mut starts = [0; 8];
        for _ in 0..8000 {
            starts[rng.tour(8).next().unwrap() as usize] += 1;
        }
        assert!(starts.iter().all(|&c| (600..1400).contains(&c)), "{starts:?}");
    }
}
