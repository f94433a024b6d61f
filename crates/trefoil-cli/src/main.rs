//! The trefoil command.
fn main() {}
