//! Looking in: traces, dumps, profiles, faults, panics. Reads; never steers.
//!
//! `unwind.rs` finds the addresses of a suspended goroutine, `symbols.rs` names them, `census.rs` goes through all
//! goroutines; `dump.rs` and `pprof.rs` are two forms of that.

mod census;
pub(crate) mod deadlock;
pub(crate) mod dump;
pub(crate) mod fault;
pub(crate) mod panics;
pub(crate) mod pprof;
pub(crate) mod quit;
pub(crate) mod schedtrace;
mod symbols;
mod unwind;
