//! Channels of timers, under the names that crossbeam gives them. They are made in `time`, which is
//! above the other files here.

pub use crate::time::{after, at, tick};
