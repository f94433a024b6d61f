//! What the runtime tells of its goroutines: dumps, groups, labels, leaks, metrics, waits.

#[path = "../common/mod.rs"]
mod common;
mod dump;
mod groups;
mod labels;
mod leaks;
mod metrics;
mod waits;
