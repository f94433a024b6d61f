//! Where runnable goroutines wait.

pub(crate) mod central;
pub(crate) mod runq;
