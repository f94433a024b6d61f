//! Traces, dumps, profiles, and the reports of faults, panics and deadlocks. Except for
//! `trace/`, which starts recordings and watches, this module only reads the scheduler's state.
//!
//! `snapshot.rs` visits all goroutines, `unwind.rs` finds the code addresses on a suspended stack,
//! and `symbols/` finds their names. `dump.rs` and `pprof.rs` write the result in two formats.
//! `metrics.rs` counts them by place and state, without their stacks. `trace/` reads what the
//! flight recorder has recorded, and `waits/` is the wait-for graph. `layout.rs` tells debuggers
//! where everything is. `signals.rs` has the signal handler that channels and watches share, and
//! `previous_action.rs` what such handlers have replaced. `profile/` takes profiles, of goroutines
//! as they are and of samples (`sched/sample.rs`).

pub(crate) mod deadlock;
pub(crate) mod dump;
pub(crate) mod fault;
pub(crate) mod layout;
pub(crate) mod metrics;
pub(crate) mod panics;
pub(crate) mod pprof;
mod previous_action;
mod process_lock;
pub(crate) mod profile;
mod protobuf;
pub(crate) mod quit;
pub(crate) mod schedtrace;
pub(crate) mod signals;
mod snapshot;
pub(crate) mod symbols;
pub(crate) mod trace;
mod unwind;
pub(crate) mod waits;
