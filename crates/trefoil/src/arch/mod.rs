//! What depends on the CPU: how one execution context becomes another.
//!
//! One file per architecture, each with the same names: `switch`, `prepare`, `call_on`, the thread
//! pointer (FS on x86_64) that selects the thread-local storage, the M register (GS), and raw
//! system calls. `preempt.rs` stops a goroutine between any two instructions.

#[cfg(target_arch = "x86_64")]
pub(crate) mod preempt;
#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;

/// Offset in M of its byte "in the runtime": right after M's own address (`sched::m::M`).
pub(crate) const M_IN_RUNTIME: usize = 8;
