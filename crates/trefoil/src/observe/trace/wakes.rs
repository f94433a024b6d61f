//! Where in the program goroutines were when they woke others that had waited for long.
//!
//! An event of the recording says which goroutine woke which. The sample that the waker took
//! (`sched/record/mod.rs`) says where it was. Both belong together if they name the same two and have
//! the same time, which both know exactly.

use super::decode::When;
use crate::observe::profile::collector::{self, Wake};
use crate::observe::symbols::SymbolCache;
use crate::sched::monitor::helper;
use crate::sys::clock::{Nanos, now};
use crate::sys::sort::sort_by_key;
use std::num::NonZeroU16;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Characters of a place at most: a file with a longer text is refused.
const PLACE_CHARS_MAX: usize = 1024;
/// The stack of the thread that finds places. The reader of debug information needs much.
const STACK_BYTES: usize = 1 << 20;
/// How long [`Wakes::place_elsewhere`] sleeps before it looks again.
const PAUSE: Duration = Duration::from_millis(1);

/// A wake-up whose place in the program is known.
pub(super) struct PlacedWake {
    pub(super) woken: u64,
    /// Since the recording began.
    pub(super) at: Nanos,
    pub(super) waker: u64,
    /// The file and the line, or the name of a function.
    pub(super) place: Arc<str>,
}

/// The wake-ups of a snapshot whose places are known.
pub(super) struct Wakes {
    /// Names are found when they are first asked for.
    sampled: Arc<[Wake]>,
    /// By `woken`, then by `at`.
    placed: Arc<OnceLock<Vec<PlacedWake>>>,
}

impl Wakes {
    /// Returns the wake-ups of a recording of this process: not all of them, or none, if the samples
    /// are not available at `deadline`.
    pub(super) fn of(recording: Option<NonZeroU16>, deadline: Nanos) -> Wakes {
        let sampled = recording.map(|recording| collector::wakes(recording, deadline));
        Wakes { sampled: sampled.unwrap_or_default().into(), placed: Arc::default() }
    }

    /// Returns the wake-ups that were read from a file.
    pub(super) fn read(mut placed: Vec<PlacedWake>) -> Wakes {
        sort_by_key(&mut placed, |wake| (wake.woken, wake.at));
        Wakes { sampled: Arc::default(), placed: Arc::new(placed.into()) }
    }

    pub(super) fn all(&self) -> &[PlacedWake] {
        self.placed.get_or_init(|| place(&self.sampled))
    }

    /// Finds the places on another thread. If that is not done at `deadline`, no place is known from
    /// then on.
    ///
    /// For a goroutine that panics. To find names may take seconds and much stack, and takes a lock that
    /// the goroutine itself may hold.
    pub(super) fn place_elsewhere(&self, deadline: Nanos) {
        if self.sampled.is_empty() {
            return;
        }
        let (sampled, placed) = (self.sampled.clone(), self.placed.clone());
        let find = move || _ = placed.set(place(&sampled));
        let started = helper::start_process_thread("places", STACK_BYTES, find);
        while self.placed.get().is_none() {
            if started.is_err() || now() >= deadline {
                let _ = self.placed.set(Vec::new());
            } else {
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// Returns where `waker` was when it woke `woken`.
    pub(super) fn place(&self, woken: u64, waker: u64, when: When) -> Option<&str> {
        // Other events have only an interval, in which there may be the sample of an earlier one.
        let at = when.exact()?;
        let all = self.all();
        let first = all.partition_point(|wake| (wake.woken, wake.at) < (woken, at));
        let mut same = all[first..].iter().take_while(|wake| (wake.woken, wake.at) == (woken, at));
        same.find(|wake| wake.waker == waker).map(|wake| &*wake.place)
    }
}

fn place(sampled: &[Wake]) -> Vec<PlacedWake> {
    let mut symbols = SymbolCache::default();
    let mut placed: Vec<PlacedWake> = Vec::new();
    for wake in sampled {
        let Some(frame) = symbols.frame_of_program(&wake.addresses) else { continue };
        let place = match &*frame.file {
            "" => frame.name.clone(),
            file => format!("{file}:{}", frame.line),
        };
        let place = place.chars().take(PLACE_CHARS_MAX).collect::<String>().into();
        let Wake { woken, at, waker, .. } = *wake;
        placed.push(PlacedWake { woken, at, waker, place });
    }
    sort_by_key(&mut placed, |wake| (wake.woken, wake.at));
    placed
}
