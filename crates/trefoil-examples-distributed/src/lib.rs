//! What the tests of the examples share: servers of the distribution, and processes that run an
//! example. The examples themselves are complete programs: see `examples/`.

mod program;
mod servers;

pub use program::{Output, Program, wait_until};
pub use servers::{Server, postgres, redis};
