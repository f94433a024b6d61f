//! The pages say what the code says.

mod architecture;
mod examples;
