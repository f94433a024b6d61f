//! The threads without a P that watch the others: sysmon and the helper thread.

pub(crate) mod handoff;
pub(crate) mod helper;
pub(crate) mod preempt;
pub(crate) mod sysmon;
