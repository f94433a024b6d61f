//! Simulation: a runtime whose clock and whose schedule belong to a test.
//!
//! A simulated runtime has one P. Its M takes every scheduling decision here instead of in
//! `search/find.rs`, by a [`Schedule`]; and its clock ([`virtual_now`]) stands still while any
//! goroutine can run, and jumps to the next timer when all of them wait. So an hour of sleeps takes
//! as long as the switches, and a seed repeats a whole run.
//!
//! | file | content |
//! |---|---|
//! | `schedule.rs` | the decisions, as a function of a seed or of a list |
//! | `mod.rs` | the state, the clock, and which goroutine runs next |
//! | `run.rs` | the phases of a run, its beginning and its end: what the driver calls |
//! | `points.rs` | the calls at which the running goroutine may be preempted |
//! | `outside.rs` | the world around the goroutines, and waits that lead outside |
//! | `incarnations.rs` | the lives of hosts, and which goroutines belong to them |
//! | `panics.rs` | the messages of panics |
//!
//! # How the scheduler gets here
//! The flags [`flag::SIMULATED`] and [`flag::PREEMPT`] of the P are always set. The first makes
//! every goroutine that stops switch to the M's own context, which calls [`next`]. The second makes
//! every goroutine that leaves the runtime call [`preempt_at_call`]. Other runtimes pay nothing for
//! that: both are checks that they make anyway. sysmon neither preempts nor retakes the P.
//!
//! Invariants:
//! 1. Only the M that owns the P changes `State`; the lock is for `Sync`. Under it nothing is
//!    allocated from malloc, and no goroutine is switched to.
//! 2. A runnable goroutine of the runtime is in a queue of the scheduler or in `runnable`.
//! 3. During a run the clock changes only in [`next`], and only if no goroutine can run.
//!
//! # Rejected
//! - Letting the clock advance by a little with every step, so that loops which poll the clock end:
//!   `sleep(d)` would no longer take exactly `d`. Such a loop ends by the limit of steps.

mod incarnations;
mod outside;
mod panics;
mod points;
mod run;
pub(crate) mod schedule;

use crate::mem::MmapVec;
use crate::sched::g::G;
use crate::sched::m::Rt;
use crate::sched::p::flag;
use crate::sched::record;
use crate::sched::runnable::{Runnable, Unpacked};
use crate::sched::wait::timers;
use crate::sched::{Sched, current_g, switch};
use crate::sys::clock::{self, LATEST, Nanos, SIMULATION_START};
use crate::sys::lock::Lock;
use crate::sys::raw::syscall;
use incarnations::Incarnation;
use outside::WorldTurn;
use panics::NotedPanics;
use run::Phase;
use schedule::{Deviation, Schedule, scramble};
use std::cell::Cell;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[cfg(feature = "std")]
pub(crate) use incarnations::{
    begin_incarnation, incarnation, is_of_test, kill, move_to, move_to_test_threads,
    simulates_threads, stop_if_dead,
};
pub(crate) use incarnations::{note_end, note_start};
pub(crate) use outside::{Outside, WaitOutside, World};
pub(crate) use points::{Undecided, point, preempt_at_call};
pub(crate) use run::{Counts, End, Plan, begin, finish, root_ended, settle, wait_for_end};

/// The test's threads may run for this many steps after the root goroutine has returned.
const MAX_STEPS_AFTER_ROOT: u64 = 10_000;

/// See the head of the file.
pub(crate) struct Simulation {
    clock: AtomicU64,
    pub(crate) outside: Outside,
    /// The number of goroutines that wait for a descriptor outside the simulation, or for a lock
    /// that threads outside share.
    waits_outside: AtomicU32,
    /// The seed of the run, for random numbers of user code.
    seed: AtomicU64,
    panics: AtomicU32,
    /// Panic messages are not printed.
    is_silent: AtomicBool,
    panics_noted: Mutex<NotedPanics>,
    world: Mutex<Option<Arc<dyn World>>>,
    /// Something in the world may move.
    world_may_move: AtomicBool,
    /// It counts as a simulation ([`clock::has_simulations`]).
    is_counted: AtomicBool,
    state: Lock<State>,
}

struct State {
    phase: Phase,
    schedule: Schedule,
    /// In the order in which they became runnable.
    runnable: MmapVec<Runnable>,
    /// Goroutines that wait until all others do.
    settling: MmapVec<&'static G>,
    driver: Option<&'static G>,
    /// The driver is parked in [`wait_for_end`].
    driver_waits: bool,
    max_steps: u64,
    /// Goroutines that were chosen, and calls at which the running one could be preempted. Unlike
    /// the questions of the schedule they are counted also if there is only one possibility.
    steps: u64,
    /// The steps when the root goroutine returned.
    steps_at_root_end: u64,
    /// The id of the last goroutine before the run.
    last_id: u64,
    hash: u64,
    /// A goroutine has panicked: what follows depends on locks of the process, such as that of
    /// standard error, so it is not part of the hash.
    has_failed: bool,
    world_turn: WorldTurn,
    incarnations: MmapVec<Incarnation>,
    /// The incarnations of goroutines and tasks, by their ids after `last_id`.
    incarnation_of: MmapVec<u32>,
    /// Runnable goroutines and tasks of dead incarnations.
    frozen: MmapVec<Runnable>,
    /// The descriptors of the world that threads of the test wait for.
    waited_by_threads: MmapVec<RawFd>,
}

// SAFETY: a runnable goroutine belongs to the list that it is in (`runnable.rs`, invariant 3).
unsafe impl Send for State {}

thread_local! {
    /// The simulated runtime whose M runs on this thread, for the thread's own context.
    static OWN: Cell<Option<&'static Sched>> = const { Cell::new(None) };
}

impl Simulation {
    pub(crate) fn new(outside: Outside) -> Simulation {
        clock::add_simulation(virtual_now);
        Simulation {
            clock: AtomicU64::new(SIMULATION_START),
            outside,
            waits_outside: AtomicU32::new(0),
            seed: AtomicU64::new(0),
            panics: AtomicU32::new(0),
            is_silent: AtomicBool::new(false),
            panics_noted: Mutex::new(NotedPanics::default()),
            state: Lock::new(State {
                phase: Phase::Between,
                schedule: Schedule::new(),
                runnable: MmapVec::new(),
                settling: MmapVec::new(),
                driver: None,
                driver_waits: false,
                max_steps: u64::MAX,
                steps: 0,
                steps_at_root_end: 0,
                last_id: 0,
                hash: 0,
                has_failed: false,
                world_turn: WorldTurn::Due,
                incarnations: MmapVec::new(),
                incarnation_of: MmapVec::new(),
                frozen: MmapVec::new(),
                waited_by_threads: MmapVec::new(),
            }),
            world: Mutex::new(None),
            world_may_move: AtomicBool::new(false),
            is_counted: AtomicBool::new(true),
        }
    }
    /// Returns for how many milliseconds the M waits for threads outside the simulation before it
    /// reports that all goroutines wait.
    fn pauses_before_failure(&self) -> u32 {
        if self.is_silent.load(Ordering::Relaxed) { 2 } else { 50 }
    }

    pub(crate) fn deviations(&self) -> Vec<Deviation> {
        // Allocated before the lock is taken.
        let n = self.state.lock().schedule.deviations().len();
        let mut all = Vec::with_capacity(n);
        all.extend_from_slice(self.state.lock().schedule.deviations());
        all
    }

    /// Returns the simulated time since the run began.
    pub(crate) fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.clock.load(Ordering::Relaxed) - SIMULATION_START)
    }
}

impl Simulation {
    /// Its runtime has ended: no code is simulated any more.
    pub(crate) fn uncount(&self) {
        if self.is_counted.swap(false, Ordering::Relaxed) {
            clock::remove_simulation();
        }
    }
}

impl Drop for Simulation {
    fn drop(&mut self) {
        self.uncount();
    }
}

/// Says that this thread is an M of `sched`.
pub(crate) fn attach_thread(sched: &'static Sched) {
    if sched.simulation.is_some() {
        OWN.set(Some(sched));
    }
}

/// Says that this thread ends, before it gives up its reference to the runtime.
pub(crate) fn detach_thread() {
    OWN.set(None);
}

/// Returns the simulated runtime in which this code runs. None in a runtime that stops: from then
/// on the real time counts.
pub(crate) fn here() -> Option<&'static Simulation> {
    let sched = match current_g() {
        // SAFETY: a goroutine that runs keeps its runtime.
        Some(g) => unsafe { &*g.sched.get() },
        None => OWN.try_with(Cell::get).ok().flatten()?,
    };
    let simulation = sched.simulation.as_deref()?;
    (!sched.stopping.load(Ordering::Relaxed)).then_some(simulation)
}

/// Returns the simulated time, if this code is simulated.
fn virtual_now() -> Option<Nanos> {
    here().map(|simulation| simulation.clock.load(Ordering::Relaxed))
}

/// Returns random numbers for user code: they depend on the seed, on the goroutine and on how many
/// numbers it has drawn.
#[cfg(feature = "std")]
pub(crate) fn random_for(simulation: &Simulation, goroutine: u64, drawn: u64) -> u64 {
    let seed = simulation.seed.load(Ordering::Relaxed);
    scramble(seed ^ scramble(goroutine ^ scramble(drawn)))
}

/// Returns the goroutine or task that the M runs next. None if the M must wait for something
/// outside the simulation.
pub(crate) fn next(rt: Rt, simulation: &Simulation) -> Option<Runnable> {
    let p = rt.p();
    // A handoff of the P clears `PREEMPT`.
    p.flags.fetch_or(flag::SIMULATED | flag::PREEMPT, Ordering::Relaxed);
    let mut pauses = 0;
    loop {
        timers::run_due(rt, &p.timers);
        let mut state = simulation.state.lock();
        state.collect(rt);
        state.limit_steps();
        if let Some(chosen) = state.take(simulation) {
            p.begin_slice();
            return Some(chosen);
        }
        if matches!(state.phase, Phase::Between | Phase::Over(_)) {
            return None;
        }
        if simulation.world_may_move.load(Ordering::Relaxed) {
            match state.world_turn {
                WorldTurn::Due if state.driver_waits => {
                    state.driver_waits = false;
                    state.world_turn = WorldTurn::Moving;
                    let driver = state.driver;
                    drop(state);
                    driver.into_iter().for_each(|driver| switch::ready(rt, driver));
                    continue;
                }
                // The driver is about to wait, or waits for a lock of the world.
                WorldTurn::Due | WorldTurn::Moving => return None,
                WorldTurn::Moved(when) => {
                    state.world_turn = WorldTurn::Until(when);
                    drop(state);
                    // Goroutines whose sockets have become ready.
                    rt.sched().poller.poll(p.id, 1, LATEST, |_| None).wake(Some(rt));
                    continue;
                }
                WorldTurn::Until(_) => {}
            }
        }
        // All goroutines wait. Goroutines that wait outside after the root has ended are left.
        if simulation.waits_outside.load(Ordering::Relaxed) != 0 && state.phase == Phase::Running {
            return None;
        }
        if let Some(g) = state.settling.first().copied() {
            state.settling.remove_at(0);
            drop(state);
            switch::ready(rt, g);
            continue;
        }
        if state.phase == Phase::RootEnded {
            state.end_threads();
        }
        let end = match state.phase {
            Phase::RootEnded if rt.sched().num_alive_in_simulation() <= state.num_frozen() => {
                End::Ended
            }
            Phase::RootEnded => End::Outlived,
            _ => match p.timers.next_live().min(state.world_moves_at()) {
                // A sleep without an end is no reason to go on.
                LATEST.. => End::Deadlock,
                when => {
                    simulation.clock.fetch_max(when, Ordering::Relaxed);
                    rt.sched().refresh_coarse();
                    state.mix(when);
                    state.world_turn = WorldTurn::Due;
                    continue;
                }
            },
        };
        // A goroutine may wait for a lock that a thread outside holds for a moment, such as that of
        // standard error.
        if end != End::Ended && pauses < simulation.pauses_before_failure() {
            pauses += 1;
            drop(state);
            pause();
            continue;
        }
        let driver = state.end(end);
        drop(state);
        if let Some(driver) = driver {
            switch::ready(rt, driver);
        }
    }
}

/// Blocks this thread for a millisecond.
#[cold]
fn pause() {
    let millisecond = [0usize, 1_000_000];
    // SAFETY: the kernel reads a timespec.
    unsafe { syscall(libc::SYS_nanosleep, [millisecond.as_ptr() as usize, 0]) };
}

/// The runtime stops: returns the runnable goroutines to the scheduler's queues.
pub(crate) fn give_back(rt: Rt, simulation: &Simulation) {
    loop {
        let item = {
            let mut state = simulation.state.lock();
            state.runnable.pop().or_else(|| state.frozen.pop())
        };
        match item {
            Some(item) => rt.sched().push_woken(item),
            None => return,
        }
    }
}

impl State {
    fn is_driver(&self, g: &G) -> bool {
        self.driver.is_some_and(|driver| std::ptr::eq(driver, g))
    }

    /// Moves what the scheduler's queues hold to `runnable`, or to `frozen`.
    fn collect(&mut self, rt: Rt) {
        let known = self.runnable.len();
        self.collect_all(rt);
        if self.has_dead_incarnation() {
            self.freeze_from(known);
        }
    }

    fn collect_all(&mut self, rt: Rt) {
        let (p, sched) = (rt.p(), rt.sched());
        let rings = [&p.woken, &p.runq];
        for item in rings.into_iter().flat_map(|ring| std::iter::from_fn(|| ring.pop_ring())) {
            // SAFETY: what the queue holds came from `as_item`.
            self.runnable.push(unsafe { Runnable::from_item(item) });
        }
        if let Some(item) = p.runq.pop_next() {
            // SAFETY: as above.
            self.runnable.push(unsafe { Runnable::from_item(item) });
        }
        while sched.has_global() {
            match sched.pop_expired_or_any() {
                Some(item) => self.runnable.push(item),
                None => break,
            }
        }
    }

    /// Takes the goroutine or task that runs next out of `runnable`.
    fn take(&mut self, simulation: &Simulation) -> Option<Runnable> {
        let index = match self.phase {
            Phase::Running | Phase::RootEnded => {
                let last_id = self.last_id;
                let ids = self.runnable.iter().map(|&item| id(item).wrapping_sub(last_id));
                self.schedule.choose(ids)
            }
            Phase::Between => 0,
            Phase::Over(_) => {
                let is_driver =
                    |item: &Runnable| item.goroutine().is_some_and(|g| self.is_driver(g));
                self.runnable.iter().position(is_driver)?
            }
        };
        let chosen = *self.runnable.get(index)?;
        self.runnable.remove_at(index);
        if !chosen.goroutine().is_some_and(|g| self.is_driver(g)) {
            self.world_turn = WorldTurn::Due;
        }
        self.mix(id(chosen).wrapping_sub(self.last_id));
        self.mix(simulation.clock.load(Ordering::Relaxed));
        Some(chosen)
    }

    /// Counts a step, and ends the run if it was the last one.
    fn limit_steps(&mut self) {
        if !matches!(self.phase, Phase::Running | Phase::RootEnded) {
            return;
        }
        self.steps += 1;
        let is_late = || self.steps > self.steps_at_root_end + MAX_STEPS_AFTER_ROOT;
        if self.phase == Phase::RootEnded && self.has_threads() && is_late() {
            self.end_threads();
            self.freeze_from(0);
        }
        if self.steps > self.max_steps
            && let Some(driver) = self.end(End::Steps)
            && driver.notify()
        {
            self.runnable.push(driver.into());
        }
    }

    fn preempts(&mut self, simulation: &Simulation, g: &G) -> bool {
        self.limit_steps();
        if self.phase == Phase::Over(End::Steps) {
            return true; // `next` finds the driver.
        }
        if self.phase == Phase::RootEnded && self.is_dead(record::id_of(g)) {
            return true; // It never runs again.
        }
        let last_id = self.last_id;
        let ids = self.runnable.iter().map(|&item| id(item).wrapping_sub(last_id));
        let running = record::id_of(g).wrapping_sub(last_id);
        let preempts = self.schedule.preempts(running, ids);
        self.mix(u64::from(preempts));
        self.mix(simulation.clock.load(Ordering::Relaxed));
        preempts
    }

    /// Adds an event to the hash of the run.
    fn mix(&mut self, event: u64) {
        if !self.has_failed {
            self.hash = scramble(self.hash ^ event);
        }
    }
}

fn id(item: Runnable) -> u64 {
    match item.unpack() {
        // A carrier that was preempted in a poll counts as its task.
        Unpacked::Goroutine(g) => record::id_of(g),
        Unpacked::Task(task) => task.id(),
    }
}
