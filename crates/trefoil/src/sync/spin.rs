//! Whether to spin before a wait for a lock.
//!
//! A plain thread spins: its sleep and wake-up cost 6 µs and two system calls, and a critical
//! section is often shorter. But only with several CPUs: on one, the holder cannot continue while
//! the thread spins.
//!
//! A goroutine spins if its P has no other goroutine to run and another P is busy: Go's rule. Its
//! park and wake-up cost 100 ns if other goroutines are ready, but an M that has nothing to do
//! searches (`sched/search/find.rs`), and the way back is longer. If other goroutines are ready,
//! spinning would only take the mutex's cache line from the holder. Measured on 2 Ps, ns for a lock
//! and unlock, without spinning and with it (Go in brackets): a goroutine per P that also computes,
//! 82 to 93 and 72 to 76 (62); ten of them, 79 to 99 and 77 to 88 (84); eight that only lock, 24
//! and 31 (77). Spins that begin with short pauses made the last two twice as slow.

use crate::sched::wait;
use crate::sys::cpus;
use std::sync::atomic::{AtomicU8, Ordering};

/// Spins before the wait. Go's number.
const MAX_SPINS: u32 = 4;
/// Pauses per spin, about 40 ns each. Go's number.
const PAUSES_PER_SPIN: u32 = 30;

/// Counts the spins of one wait.
pub(crate) struct Spin(u32);

impl Spin {
    pub(crate) const fn new() -> Spin {
        Spin(0)
    }

    /// Starts again.
    pub(crate) fn reset(&mut self) {
        self.0 = 0;
    }

    /// Returns whether another spin makes sense.
    pub(crate) fn possible(&self) -> bool {
        self.0 < MAX_SPINS && several_cpus() && wait::may_spin()
    }

    /// Spins once.
    pub(crate) fn pause(&mut self) {
        self.0 += 1;
        for _ in 0..PAUSES_PER_SPIN {
            std::hint::spin_loop();
        }
    }
}

fn several_cpus() -> bool {
    /// 0 before the first call.
    static CPUS: AtomicU8 = AtomicU8::new(0);
    match CPUS.load(Ordering::Relaxed) {
        0 => {
            let n = cpus::num_cpus().clamp(1, 255) as u8;
            CPUS.store(n, Ordering::Relaxed);
            n > 1
        }
        n => n > 1,
    }
}
