//! The network poller: waiting until descriptors are ready, with epoll.
//!
//! | file | job |
//! |---|---|
//! | `task_waiters.rs` | tasks that wait for a descriptor |
//! | `poller.rs` | a runtime's epoll instances (shards), and the threads that wait in them |
//! | `pollable.rs` | one descriptor: its edges, its waiters |
//! | `registration.rs` | in which shard a descriptor is registered |
//! | `idle_poller.rs` | the one idle M that sleeps in the poller until the next timer |
//! | `wait_any.rs` | waiting for several descriptors at once (`poll`, `select`, `epoll_wait`) |
//!
//! A goroutine tries its call without blocking first. Only if the kernel returns `EAGAIN` does it
//! wait here, and then tries again:
//!
//! ```text
//!   goroutine                            poller (an M without work, or sysmon)
//!   seen = edges                         epoll: fd is readable
//!   read → EAGAIN                        edges + 1, wake all waiters
//!   edges ≠ seen? read again
//!   else sleep in the list
//! ```

pub(crate) mod idle_poller;
pub(crate) mod pollable;
pub(crate) mod poller;
mod registration;
pub(crate) mod task_waiters;
#[cfg(feature = "std")]
pub(crate) mod wait_any;
