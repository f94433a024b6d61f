//! This crate contains only examples, and tests that run them: see `examples/` and `tests/`.
