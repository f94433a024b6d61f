//! A run: its phases, its beginning and its end.
//!
//! The *driver* is a goroutine of the runtime that starts the runs, one after the other. It waits
//! in [`wait_for_end`] while the *root* goroutine of the run and those that it starts are
//! simulated:
//!
//! ```text
//!   Between ── begin ──▶ Running ── root returns ──▶ RootEnded
//!      ▲                    │ all wait, no timer         │ all have ended, or wait
//!      └── finish ─ Over ◀──┴────── too many steps ──────┘
//! ```
//! In `Over` only the driver runs. [`finish`] leads back if all goroutines have ended. If some are
//! left, the phase stays `Over` and the driver does not begin another run: their runtime stops.
//!
//! # Rejected
//! - A runtime per run: starting and stopping its threads takes longer than most runs.

use super::outside::WorldTurn;
use super::schedule::{Deviation, Strategy, scramble};
use super::{Simulation, State};
use crate::sched::g::G;
use crate::sched::m::Rt;
use crate::sched::switch;
use crate::sched::wait::reason::WaitReason;
use crate::sys::clock::{Nanos, SIMULATION_START};
use crate::sys::rng::Rng;
use std::sync::atomic::Ordering;

/// How a run has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum End {
    /// All goroutines have ended.
    Ended,
    /// All goroutines wait, no timer is set, and nothing is on its way in the network.
    Deadlock,
    /// The root goroutine has ended, and goroutines or tasks of the test itself wait.
    Outlived,
    /// The run took more steps than allowed.
    Steps,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    Between,
    Running,
    RootEnded,
    Over(End),
}

/// What was counted in a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counts {
    pub(crate) steps: u64,
    /// The questions that the schedule has answered.
    pub(crate) decisions: u64,
    /// Over all events of the run.
    pub(crate) hash: u64,
    /// The time that has passed.
    pub(crate) elapsed: Nanos,
    /// Goroutines and tasks that panicked.
    pub(crate) panics: u32,
}

impl Simulation {
    fn counts(&self) -> Counts {
        let state = self.state.lock();
        Counts {
            steps: state.steps,
            decisions: state.schedule.steps(),
            hash: state.hash,
            elapsed: self.clock.load(Ordering::Relaxed) - SIMULATION_START,
            panics: self.panics.load(Ordering::Relaxed),
        }
    }
}

impl State {
    /// Ends the run. Returns the driver, if it waits for that.
    pub(super) fn end(&mut self, end: End) -> Option<&'static G> {
        self.phase = Phase::Over(end);
        std::mem::take(&mut self.driver_waits).then_some(self.driver).flatten()
    }
}

/// What a run is to do.
pub(crate) struct Plan<'a> {
    pub(crate) seed: u64,
    pub(crate) strategy: Strategy,
    /// For `Strategy::Replay`.
    pub(crate) deviations: &'a [Deviation],
    pub(crate) max_steps: u64,
}

/// Begins a run. The caller is the driver, and the only goroutine of a simulated runtime.
pub(crate) fn begin(simulation: &Simulation, plan: &Plan<'_>) {
    let Some(rt) = Rt::enter() else { return };
    simulation.clock.store(SIMULATION_START, Ordering::Relaxed);
    rt.sched().refresh_coarse();
    simulation.seed.store(plan.seed, Ordering::Relaxed);
    simulation.panics.store(0, Ordering::Relaxed);
    rt.p().timers.clear();
    rt.with_local(|local| {
        // Another sequence than that of the schedule.
        local.rng = Rng::from_seed(scramble(!plan.seed));
        local.restart_ids();
    });
    let driver = rt.g();
    let last_id = rt.sched().restart_ids_after(driver.id());
    let mut state = simulation.state.lock();
    state.driver = Some(driver);
    state.phase = Phase::Running;
    state.schedule.begin(plan.seed, plan.strategy);
    plan.deviations.iter().for_each(|&deviation| state.schedule.replay(deviation));
    state.max_steps = plan.max_steps;
    state.steps = 0;
    state.last_id = last_id;
    state.hash = scramble(plan.seed);
    state.has_failed = false;
    state.world_turn = WorldTurn::Due;
    state.begin_incarnations();
    state.waited_by_threads.truncate(0);
    drop(state);
    rt.leave_without_yield();
}

/// Waits until the run has ended. The caller is the driver, which has started the root goroutine.
/// Calls `advance` when the world may move; it returns when the world moves again.
pub(crate) fn wait_for_end(
    simulation: &Simulation,
    mut advance: impl FnMut() -> Nanos,
) -> (End, Counts) {
    loop {
        let Some(rt) = Rt::enter() else { return (End::Ended, simulation.counts()) };
        let mut state = simulation.state.lock();
        if let Phase::Over(end) = state.phase {
            drop(state);
            rt.leave_without_yield();
            return (end, simulation.counts());
        }
        if state.world_turn == WorldTurn::Moving {
            drop(state);
            rt.leave_without_yield();
            let when = advance();
            simulation.state.lock().world_turn = WorldTurn::Moved(when);
            continue;
        }
        state.driver_waits = true;
        drop(state);
        switch::park(rt, WaitReason::Simulation).leave_without_yield();
    }
}

/// A run has ended. Returns whether it has ended well and no goroutine is left: then another run
/// may begin, and goroutines of the runtime itself, such as carriers, may run.
pub(crate) fn finish(simulation: &Simulation) -> bool {
    let mut state = simulation.state.lock();
    let is_clean = state.phase == Phase::Over(End::Ended) && state.num_frozen() == 0;
    if is_clean {
        state.phase = Phase::Between;
    }
    is_clean
}

/// The root goroutine has returned: from now on the time stands still, and all hosts are dead.
/// Threads of the test run until they wait.
pub(crate) fn root_ended(simulation: &Simulation) {
    let mut state = simulation.state.lock();
    if state.phase == Phase::Running {
        state.phase = Phase::RootEnded;
        state.steps_at_root_end = state.steps;
    }
    state.end_hosts();
}

/// Parks the running goroutine until all others wait.
pub(crate) fn settle(simulation: &Simulation) {
    let Some(rt) = Rt::enter() else { return };
    simulation.state.lock().settling.push(rt.g());
    switch::park(rt, WaitReason::Settle).leave();
}
