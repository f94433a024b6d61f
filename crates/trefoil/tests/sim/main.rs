//! Simulations: the clock and the schedule belong to the test.

mod crates;
mod faults;
mod runs;
mod speed;
