//! Waiting for descriptors.

pub(crate) mod pollable;
