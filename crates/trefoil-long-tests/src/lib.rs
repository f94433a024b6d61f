//! This crate contains only tests of trefoil: see `tests/`.
