//! The life of a goroutine: spawned, run, ended, joined.
//!
//! | file | job |
//! |---|---|
//! | `spawn.rs` | turns a closure into a runnable goroutine |
//! | `body.rs` | stores the closure, and later its result, in the G |
//! | `state.rs` | the state word; a park meets its wake-up |
//! | `join.rs` | the join word; a goroutine's end meets its handle |
//! | `scope.rs` | counts the goroutines that a `scope` waits for |
//! | `locked.rs` | `lock_os_thread`: a goroutine bound to one M |
//!
//! Parking and waking are in `wait/`; switching from one goroutine to the next is in `switch.rs`.

pub(crate) mod body;
pub(crate) mod join;
pub(crate) mod locked;
pub(crate) mod scope;
pub(crate) mod spawn;
pub(crate) mod state;
