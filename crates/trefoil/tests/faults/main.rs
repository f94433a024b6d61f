//! What happens when resources run out, or memory is locked. The tests set limits in children only.

mod case;
#[path = "../common/mod.rs"]
mod common;
mod exhaustion;
mod mlock;
mod threads;
