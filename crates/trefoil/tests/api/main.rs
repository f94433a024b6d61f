//! The public interface: handles, results, panics, scopes, runtimes, settings.

#[path = "../common/mod.rs"]
mod common;
mod handles;
mod panics;
mod results;
mod runtimes;
mod scopes;
mod settings;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// Increments its counter when it is dropped.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
    }
}

/// A counter of drops.
#[derive(Default, Clone)]
struct Drops(Arc<AtomicUsize>);

impl Drops {
    fn one(&self) -> Counted {
        Counted(self.0.clone())
    }

    fn get(&self) -> usize {
        self.0.load(SeqCst)
    }
}
