//! Async code: tasks, `block_on` and other executors wait for channels, futures, sockets, locks and
//! time.

mod chan;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/executor.rs"]
mod executor;
#[path = "../common/executors.rs"]
mod executors;
mod future;
mod net;
mod select;
mod sync;
mod time;
