//! The floor nearest the machine: how one execution context becomes another.
//!
//! One file an architecture, each with the same names: `switch`, `prepare`, `call_on`, the thread
//! pointer (FS on x86_64) that selects the thread-local storage, and the M register (GS).

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;
