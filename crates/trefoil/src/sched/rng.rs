//! Pseudo-random numbers for steal orders: SplitMix64, and random tours over n places.
//!
//! A tour starts at a random place and takes steps of a random length that is coprime to n, so it
//! visits each place exactly once without a table of the places already visited.

/// A generator that one P owns.
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Rng {
        let local = 0u8;
        // The address of a local differs from run to run, and the time from P to P.
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (&raw const local as u64) ^ now_bits())
    }

    #[inline]
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Visits all of `0..n` once each, from a random start with a random step that is coprime to n.
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

/// Returns the time in bits that differ between two calls.
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
    fn tours_start_everywhere_equally_often() {
        let mut rng = Rng::new(2);
        let mut starts = [0; 8];
        for _ in 0..8000 {
            starts[rng.tour(8).next().unwrap() as usize] += 1;
        }
        assert!(starts.iter().all(|&c| (600..1400).contains(&c)), "{starts:?}");
    }
}
