//! Profiles of goroutines, waits and locks. (CPU profiles: `profile_cpu.rs`.)

#[path = "../common/mod.rs"]
mod common;
mod goroutines;
mod leaks;
#[path = "../common/pprof.rs"]
mod pprof;
mod waits;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Waits until no other test of this program runs: the rates of the profiles of waits belong to the
/// process.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
