//! Unmodified crates in their blocking form, driven by goroutines.
