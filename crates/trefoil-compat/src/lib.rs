//! This crate contains only tests and examples: see `tests/` and `examples/`.
