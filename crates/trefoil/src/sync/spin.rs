//! Whether to look again before going to sleep.
//!
//! A plain thread does: its sleep and wake-up cost 6 µs and two system calls, a critical section is
//! often shorter. But only with several CPUs: on one, the holder cannot go on while we look.
//!
//! A goroutine does not. Its sleep and wake-up cost about 100 ns, and meanwhile its P runs others,
//! or its thread searches (`find.rs`), which is spinning enough. Each look takes the mutex's cache
//! line from the holder. Measured, 8 goroutines on 2 Ps, ns for a lock and unlock, as Go spins (4
//! looks of 30 pauses) and as we do: empty section 25.7 and 20.0, 100 ns section 204 and 220, 500
//! ns section 740 and 774. (November 2026; Go itself 57 for the empty one.)

use crate::sched::current_g;
use crate::sys::cpus;
use std::sync::atomic::{AtomicU8, Ordering};

/// Looks before the sleep. Go's number.
const LOOKS: u32 = 4;
/// Pauses between two looks; about 40 ns each. Go's number.
const PAUSES: u32 = 30;

/// The looks of one wait.
pub(crate) struct Spin(u32);

impl Spin {
    pub(crate) const fn new() -> Spin {
        Spin(0)
    }

    /// Begins anew.
    pub(crate) fn reset(&mut self) {
        self.0 = 0;
    }

    /// Whether another look makes sense.
    pub(crate) fn possible(&self) -> bool {
        self.0 < LOOKS && current_g().is_none() && several_cpus()
    }

    /// Lets a moment pass.
    pub(crate) fn pause(&mut self) {
        self.0 += 1;
        for _ in 0..PAUSES {
            std::hint::spin_loop();
        }
    }
}

fn several_cpus() -> bool {
    /// 0: not asked yet.
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
