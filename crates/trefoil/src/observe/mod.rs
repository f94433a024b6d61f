//! Looking in: traces, faults, panics. Reads; never steers.

pub(crate) mod deadlock;
pub(crate) mod dump;
pub(crate) mod fault;
pub(crate) mod panics;
pub(crate) mod quit;
pub(crate) mod schedtrace;
mod unwind;
