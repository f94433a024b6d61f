//! The floor nearest the machine: how one execution context becomes another.
//!
//! One file an architecture, each with the same names: `switch`, `prepare`, the thread
//! pointer (FS on x86_64) that selects the thread-local storage, and the M register (GS). `preempt.rs`
//! stops a goroutine between any two instructions.

#[cfg(target_arch = "x86_64")]
pub(crate) mod preempt;
#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;

/// Where M keeps the byte that says "in the runtime": right after its own address (`sched::m`).
pub(crate) const M_IN_RUNTIME: usize = 8;
