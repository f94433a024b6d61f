//! Incarnations: the lives of hosts, and which goroutines and tasks belong to which one.
//!
//! A goroutine inherits its incarnation from the goroutine that starts it. Incarnation 0 is the
//! test itself. Incarnation 1 holds the threads that the test starts. The others are hosts: each
//! start of a host begins one. A host that crashes [kills](kill) its incarnation: the goroutines
//! and tasks in it never run again. They are *frozen*: what they own is leaked, so nothing that
//! refers to their stacks becomes invalid.

#[cfg(feature = "std")]
use super::here;
use super::{Phase, Simulation, State, id};
use crate::sched::current_g;
#[cfg(feature = "std")]
use crate::sched::m::Rt;
use crate::sched::record;
#[cfg(feature = "std")]
use crate::sched::switch;
#[cfg(feature = "std")]
use crate::sched::wait::reason::WaitReason;
#[cfg(feature = "std")]
use crate::sys::clock;

/// The incarnations of every run: the test itself, and its threads, which are goroutines here.
const TEST: usize = 0;
pub(super) const TEST_THREADS: usize = 1;

/// The most goroutines and tasks of a run whose incarnations are kept.
const MAX_IDS: usize = 1 << 32;

/// One life of a host.
#[derive(Clone, Copy, Debug)]
pub(super) struct Incarnation {
    is_dead: bool,
    /// Goroutines and tasks that have not ended.
    alive: u32,
}

impl State {
    /// A run begins: there are only the incarnations of the test.
    pub(super) fn begin_incarnations(&mut self) {
        self.incarnations.truncate(0);
        for _ in TEST..=TEST_THREADS {
            self.incarnations.push(Incarnation { is_dead: false, alive: 0 });
        }
        self.incarnation_of.truncate(0);
    }

    /// The root goroutine has returned: all hosts are dead.
    pub(super) fn end_hosts(&mut self) {
        let hosts = TEST_THREADS + 1;
        if self.incarnations.len() > hosts {
            self.incarnations[hosts..].iter_mut().for_each(|host| host.is_dead = true);
            self.freeze_from(0);
        }
    }

    /// Returns whether threads of the test may run.
    pub(super) fn has_threads(&self) -> bool {
        !self.incarnations[TEST_THREADS].is_dead
    }

    /// The threads of the test end, as at the end of a process.
    pub(super) fn end_threads(&mut self) {
        self.incarnations[TEST_THREADS].is_dead = true;
    }

    pub(super) fn has_dead_incarnation(&self) -> bool {
        self.incarnations.iter().any(|incarnation| incarnation.is_dead)
    }

    /// Moves the goroutines and tasks of dead incarnations, from the index `from` on, to `frozen`.
    #[cold]
    pub(super) fn freeze_from(&mut self, from: usize) {
        let mut i = from;
        while let Some(&item) = self.runnable.get(i) {
            if self.is_dead(id(item)) {
                self.runnable.remove_at(i);
                self.frozen.push(item);
            } else {
                i += 1;
            }
        }
    }

    /// Returns the incarnation of the goroutine or task `id`.
    pub(super) fn incarnation(&self, id: u64) -> u32 {
        let index = id.wrapping_sub(self.last_id) as usize;
        self.incarnation_of.get(index).copied().unwrap_or(0)
    }

    /// Returns whether the goroutine or task `id` never runs again.
    pub(super) fn is_dead(&self, id: u64) -> bool {
        let incarnation = self.incarnation(id) as usize;
        self.incarnations.get(incarnation).is_some_and(|incarnation| incarnation.is_dead)
    }

    /// Returns how many goroutines and tasks never run again.
    pub(super) fn num_frozen(&self) -> u64 {
        let dead = self.incarnations.iter().filter(|incarnation| incarnation.is_dead);
        dead.map(|incarnation| u64::from(incarnation.alive)).sum()
    }

    /// Sets the incarnation of the goroutine or task `id`.
    fn set_incarnation(&mut self, id: u64, incarnation: u32) {
        let index = id.wrapping_sub(self.last_id) as usize;
        if index >= MAX_IDS {
            return; // A carrier.
        }
        while self.incarnation_of.len() <= index {
            self.incarnation_of.push(0);
        }
        self.incarnation_of[index] = incarnation;
    }

    fn count_alive(&mut self, incarnation: u32, more: i32) {
        if let Some(one) = self.incarnations.get_mut(incarnation as usize) {
            one.alive = one.alive.wrapping_add_signed(more);
        }
    }
}

/// Returns whether a thread that the caller starts is a goroutine of this run.
#[cfg(feature = "std")]
pub(crate) fn simulates_threads() -> bool {
    if !clock::has_simulations() {
        return false;
    }
    let (Some(simulation), Some(g)) = (here(), current_g()) else { return false };
    let state = simulation.state.lock();
    matches!(state.phase, Phase::Running | Phase::RootEnded) && !state.is_driver(g)
}

/// Moves the running goroutine, a thread of the program, from incarnation 0 to the test's threads.
/// Such a goroutine may still wait when the root goroutine has returned. Does nothing on a host.
#[cfg(feature = "std")]
pub(crate) fn move_to_test_threads() {
    let (Some(simulation), TEST) = (here(), incarnation() as usize) else { return };
    move_to(simulation, TEST_THREADS as u32);
}

/// Returns the incarnation of the caller; 0 if it is the test itself.
#[cfg(feature = "std")]
pub(crate) fn incarnation() -> u32 {
    let (Some(simulation), Some(g)) = (here(), current_g()) else { return 0 };
    simulation.state.lock().incarnation(record::id_of(g))
}

/// Notes that the running goroutine starts the goroutine or task `id`.
#[cold]
pub(crate) fn note_start(simulation: &Simulation, id: u64) {
    let parent = current_g().map(record::id_of);
    let mut state = simulation.state.lock();
    if !matches!(state.phase, Phase::Running | Phase::RootEnded) {
        return;
    }
    let incarnation = parent.map_or(0, |parent| state.incarnation(parent));
    state.set_incarnation(id, incarnation);
    state.count_alive(incarnation, 1);
}

/// Notes that the goroutine or task `id` has ended.
#[cold]
pub(crate) fn note_end(simulation: &Simulation, id: u64) {
    let mut state = simulation.state.lock();
    let incarnation = state.incarnation(id);
    state.count_alive(incarnation, -1);
}

/// Returns whether an incarnation is the test itself or its threads, not a host.
#[cfg(feature = "std")]
pub(crate) fn is_of_test(incarnation: u32) -> bool {
    incarnation as usize <= TEST_THREADS
}

/// Begins another incarnation, without goroutines.
#[cfg(feature = "std")]
pub(crate) fn begin_incarnation(simulation: &Simulation) -> u32 {
    let mut state = simulation.state.lock();
    state.incarnations.push(Incarnation { is_dead: false, alive: 0 });
    state.incarnations.len() as u32 - 1
}

/// Moves the running goroutine to an incarnation. Does not return if that is dead.
#[cfg(feature = "std")]
pub(crate) fn move_to(simulation: &Simulation, incarnation: u32) {
    let Some(g) = current_g() else { return };
    {
        let mut state = simulation.state.lock();
        let id = record::id_of(g);
        let before = state.incarnation(id);
        state.count_alive(before, -1);
        state.set_incarnation(id, incarnation);
        state.count_alive(incarnation, 1);
    }
    stop_if_dead(simulation);
}

/// Ends an incarnation: its goroutines and tasks never run again. If the caller is one of them, it
/// calls [`stop_if_dead`] next.
#[cfg(feature = "std")]
pub(crate) fn kill(simulation: &Simulation, incarnation: u32) {
    let mut state = simulation.state.lock();
    if let Some(one) = state.incarnations.get_mut(incarnation as usize) {
        one.is_dead = true;
    }
    state.freeze_from(0);
}

/// Parks the running goroutine for ever if its incarnation is dead.
#[cfg(feature = "std")]
pub(crate) fn stop_if_dead(simulation: &Simulation) {
    let Some(g) = current_g() else { return };
    while simulation.state.lock().is_dead(record::id_of(g)) {
        let Some(rt) = Rt::enter() else { return };
        switch::park(rt, WaitReason::Simulation).leave_without_yield();
    }
}
