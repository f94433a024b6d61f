//! Waiting for descriptors.

pub(crate) mod idle_poller;
pub(crate) mod pollable;
