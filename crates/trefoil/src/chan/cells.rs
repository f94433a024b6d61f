//! The cells and atomics that the files of a channel's protocol are written with: `core.rs`,
//! `queue.rs`, `buffer.rs`, `handle.rs`, `select/passes.rs`, and `time/slot.rs`.
//!
//! As with `shim.rs`, `crates/trefoil-model` compiles the same files against its own version of this one,
//! where every access is loom's: a cell that is touched outside of its lock is found too.

pub(crate) use std::cell::Cell;
pub(crate) use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering,
};
