//! The random numbers of the runtime: SplitMix64, and random visiting orders.
//!
//! Not for cryptography: it spreads steal attempts and select arms.

use super::clock::now;

/// The increment of SplitMix64: 2⁶⁴ divided by the golden ratio, made odd.
const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

/// A generator with one owner.
pub struct Rng(u64);

impl Rng {
    /// Makes a generator that differs from those of other owners (by `id`) and of other runs (by
    /// the clock and the address of a local variable).
    #[inline]
    pub fn new(id: u64) -> Rng {
        let local = 0u8;
        let address = &raw const local as u64;
        Rng::from_seed(id.wrapping_mul(INCREMENT) ^ address ^ now().rotate_left(20))
    }

    /// Makes a generator that repeats its sequence: for tests.
    #[inline]
    pub const fn from_seed(seed: u64) -> Rng {
        Rng(seed)
    }

    /// Returns the next 64 random bits.
    #[inline]
    #[allow(clippy::should_implement_trait)] // It never ends.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(INCREMENT);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Visits each of `0..n` once: from a random start, with a random step that is coprime to `n`.
    #[inline]
    pub fn tour(&mut self, n: u32) -> Tour {
        let n = n.max(1);
        let random = self.next();
        let mut step = (random >> 32) as u32 % n + 1;
        while gcd(step, n) != 1 {
            step += 1;
        }
        Tour { at: random as u32 % n, step: step % n, n, left: n }
    }
}

fn gcd(mut a: u32, mut b: u32) -> u32 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// See [`Rng::tour`].
pub struct Tour {
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
    fn tour_visits_each_place_exactly_once() {
        let mut rng = Rng::from_seed(1);
        for n in 1..=64 {
            for _ in 0..50 {
                let mut seen = vec![0; n as usize];
                rng.tour(n).for_each(|i| seen[i as usize] += 1);
                assert!(seen.iter().all(|&c| c == 1), "{n}: {seen:?}");
            }
        }
    }

    #[test]
    fn tours_start_everywhere_equally_often() {
        let mut rng = Rng::from_seed(2);
        let mut starts = [0; 8];
        for _ in 0..8000 {
            starts[rng.tour(8).next().unwrap() as usize] += 1;
        }
        assert!(starts.iter().all(|&c| (600..1400).contains(&c)), "{starts:?}");
    }
}
