//! Complete programs are in `examples/`, and tests that run them in `tests/`. Here is the code that
//! a program and a test share.

pub mod raft;
