//! How an M finds its next goroutine, and when it gives up.

pub(crate) mod find;
pub(crate) mod idle;
