//! Simulations: the clock and the schedule belong to the test.

#[path = "../common/mod.rs"]
mod common;
mod crates;
mod faults;
mod runs;
mod speed;
