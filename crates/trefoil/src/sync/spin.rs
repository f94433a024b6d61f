//! Whether to look once more before going to sleep.
//!
//! A sleep and a wake-up cost about 100 ns among goroutines and 6 µs among threads; a critical section is
//! often shorter. But who spins while the holder waits for this very P spins for nothing, and who has
//! other goroutines at hand does better to run them. Go's rule, then: only with several CPUs, while
//! another P runs something, and with nothing to do here.

use crate::sched::Rt;
use crate::sys::cpus;
use std::sync::atomic::{AtomicU8, Ordering};

/// Looks before the sleep. Go's number.
const LOOKS: u32 = 4;
/// Pauses between two looks; 40 ns each here.
const PAUSES: u32 = 8;
const LOOKS_G: u32 = 0;

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
        self.0 < LOOKS && several_cpus() && others_run()
    }

    /// Lets a moment pass.
    pub(crate) fn pause(&mut self) {
        self.0 += 1;
        for _ in 0..PAUSES {
            std::hint::spin_loop();
        }
    }
}

fn others_run() -> bool {
    let Some(rt) = Rt::enter() else {
        return true; // a plain thread: the OS runs the others
    };
    let (p, sched) = (rt.p(), rt.sched());
    let others = sched.procs().saturating_sub(sched.idle.idle_ps() + sched.idle.spinning());
    let alone_here = p.runq.is_empty();
    rt.leave_now();
    alone_here && others > 1 && LOOKS_G > 0
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
