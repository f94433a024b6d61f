//! The panics of a run: how many there were, and the message of the first one that was not caught.
//!
//! The hook for panics notes every message before it is known whether the panic is caught
//! ([`Simulation::note_panic`]). A goroutine or task that ends by a panic is counted
//! ([`Simulation::count_panic`]); only then its last message can become the first one of the run.

use super::Simulation;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

/// The messages of panics in a run.
#[derive(Default)]
pub(super) struct NotedPanics {
    /// Of the first panic that was not caught.
    first: Option<String>,
    /// With the ids of the goroutines or tasks.
    all: Vec<(u64, String)>,
}

impl Simulation {
    /// Counts a goroutine or task that has panicked.
    pub(crate) fn count_panic(&self, id: u64) {
        self.panics.fetch_add(1, Ordering::Relaxed);
        let mut noted = self.panics_noted.lock().unwrap_or_else(PoisonError::into_inner);
        let NotedPanics { first, all } = &mut *noted;
        if first.is_none() {
            *first = all.iter().rposition(|(of, _)| *of == id).map(|i| all.swap_remove(i).1);
        }
    }

    /// Sets whether panic messages are kept from being printed.
    pub(crate) fn silence(&self, silent: bool) {
        self.is_silent.store(silent, Ordering::Relaxed);
    }

    /// Keeps the message of a panic of the goroutine or task `id`. Returns whether it is to be
    /// printed, too.
    pub(crate) fn note_panic(&self, id: u64, message: String) -> bool {
        self.state.lock().has_failed = true;
        let mut noted = self.panics_noted.lock().unwrap_or_else(PoisonError::into_inner);
        noted.all.push((id, message));
        !self.is_silent.load(Ordering::Relaxed)
    }

    /// Takes the message of the first panic that was not caught, and forgets the others.
    pub(crate) fn take_panic_message(&self) -> Option<String> {
        let mut noted = self.panics_noted.lock().unwrap_or_else(PoisonError::into_inner);
        noted.all.clear();
        noted.first.take()
    }
}
