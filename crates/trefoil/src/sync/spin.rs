//! Whether to look again before going to sleep.
//!
//! A plain thread does: its sleep and wake-up cost 6 µs and two system calls, a critical section is
//! often shorter. But only with several CPUs: on one, the holder cannot go on while we look.
//!
//! A goroutine does if its P has nobody else to run, and another P is at work: Go's rule. Its sleep and wake-up cost
//! 100 ns where others wait to run, but a thread that has nothing to do searches (`find.rs`), and the way back is longer.
//! Where others do wait, each look would only take the mutex's cache line from the holder. Measured on 2 Ps, ns for a lock
//! and unlock, without looks and with them (Go beside them in brackets): a goroutine per P that also computes, 82 to 93
//! and 72 to 76 (62); ten of them, 79 to 99 and 77 to 88 (84); eight that only lock, 24 and 31 (77). Looks that begin
//! with short pauses made the last two twice as slow.

use crate::sched::wait;
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
        self.0 < LOOKS && several_cpus() && wait::may_spin()
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
