//! The cells and atomics of a channel's protocol files: `core.rs`, `queue.rs`, `buffer.rs`,
//! `handle.rs`, `select/passes.rs`, and `time/slot.rs`.
//!
//! As with `shim.rs`, `crates/trefoil-model` compiles the same files against its own version of
//! this one, where every access goes through loom. So it also finds a cell that is touched without
//! its lock.

pub(crate) use std::cell::Cell;
pub(crate) use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering,
};
