//! Which goroutine runs next.

#[path = "../common/mod.rs"]
mod common;
mod go;
mod order;
