//! The threads without a P that watch the others, and what they do to them.
//!
//! | file | job |
//! |---|---|
//! | `sysmon.rs` | the monitor thread: finds blocked Ms, long-running goroutines, late timers |
//! | `handoff.rs` | takes the P from a blocked M; the M gets a P again at its next runtime call |
//! | `preempt.rs` | stops a running goroutine with a signal |
//! | `helper.rs` | the helper thread: everything that allocates, reads files, or starts threads |
//!
//! sysmon waits for nothing that a goroutine could hold. The helper thread may.

pub(crate) mod handoff;
pub(crate) mod helper;
pub(crate) mod preempt;
pub(crate) mod sysmon;
