//! Where runnable goroutines wait, and which idle M is woken to run them.
//!
//! | file | content |
//! |---|---|
//! | `runq.rs` | a P's local run queue: a lock-free ring and `runnext` |
//! | `central.rs` | `Central`: what the scheduler's lock guards |
//! | `global.rs` | the global queues: woken, fresh and expired goroutines |
//! | `idle_lists.rs` | idle Ps, idle Ms, Ps wanting an M, locked Ms |
//! | `assign.rs` | which M is woken with which P |
//!
//! The idle poller, the one idle M that sleeps only until the next timer, is in
//! `netpoll/idle_poller.rs`.

pub(crate) mod assign;
pub(crate) mod central;
pub(crate) mod global;
pub(crate) mod idle_lists;
pub(crate) mod runq;
