//! Profiles of goroutines, waits and locks. (CPU profiles: `profile_cpu.rs`.)

#[path = "../common/mod.rs"]
mod common;
mod goroutines;
#[path = "../common/pprof.rs"]
mod pprof;
mod waits;
