//! Simulation: a runtime whose clock and whose schedule belong to a test.
//!
//! A simulated runtime has one P. Its M takes every scheduling decision here instead of in
//! `search/find.rs`, by a [`Schedule`]; and its clock ([`now`]) stands still while any goroutine can
//! run, and jumps to the next timer when all of them wait. So an hour of sleeps takes as long as
//! the switches, and a seed repeats a whole run.
//!
//! | file | content |
//! |---|---|
//! | `schedule.rs` | the decisions, as a function of a seed or of a list |
//! | `mod.rs` | the runnable goroutines, the clock, the end of a run |
//!
//! # How the scheduler gets here
//! The flags [`flag::SIMULATED`] and [`flag::PREEMPT`] of the P are always set. The first makes every
//! goroutine that stops switch to the M's own context, which calls [`next`]. The second makes every
//! goroutine that leaves the runtime call [`preempt_at_call`]. Other runtimes pay nothing for that:
//! both are checks that they make anyway. sysmon neither preempts nor retakes the P.
//!
//! # A run
//! The *driver* is a goroutine of the runtime that starts the runs, one after the other. It waits in
//! [`wait_for_end`] while the *root* goroutine of the run and those that it starts are simulated:
//!
//! ```text
//!   Between ── begin ──▶ Running ── root returns ──▶ RootEnded
//!      ▲                    │ all wait, no timer         │ all have ended, or wait
//!      └── finish ─ Over ◀──┴────── too many steps ──────┘
//! ```
//! In `Over` only the driver runs. [`finish`] leads back if all goroutines have ended. If some are
//! left, the phase stays `Over` and the driver does not begin another run: their runtime stops.
//!
//! # The world
//! A run may have a [`World`]: a network whose segments are on their way (`simnet/`). When all
//! goroutines wait, [`next`] wakes the driver, which lets the world move and says when it moves again.
//! Then the time jumps to that, or to the next timer.
//!
//! # Incarnations
//! Goroutines belong to *incarnations* of hosts, and inherit them from the goroutine that starts
//! them. Incarnation 0 is the test itself. Incarnation 1 holds the threads that the test starts. A
//! host that crashes [kills](kill) its incarnation: the goroutines and tasks in it never run again.
//! They are *frozen*: what they own is leaked, so nothing that refers to their stacks becomes invalid.
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
//! - A runtime per run: starting and stopping its threads takes longer than most runs.

pub(crate) mod schedule;

use crate::arch;
use crate::mem::{MmapVec, on_own_stack};
use crate::sched::g::G;
use crate::sched::m::Rt;
use crate::sched::p::flag;
use crate::sched::record;
use crate::sched::runnable::{Runnable, Unpacked};
use crate::sched::wait::reason::WaitReason;
use crate::sched::wait::timers;
use crate::sched::{Sched, current_g, switch};
use crate::sys::clock::{self, LATEST, Nanos, SIMULATION_START};
use crate::sys::fork::is_forked;
use crate::sys::lock::{self, Lock};
use crate::sys::raw::syscall;
use crate::sys::rng::Rng;
use schedule::{Deviation, Schedule, Strategy, scramble};
#[cfg(feature = "std")]
use std::any::Any;
use std::cell::Cell;
use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The incarnations of every run: the test itself, and its threads, which are goroutines here.
const TEST: usize = 0;
const TEST_THREADS: usize = 1;

/// The test's threads may run for this many steps after the root goroutine has returned.
const MAX_STEPS_AFTER_ROOT: u64 = 10_000;
/// The most goroutines and tasks of a run whose incarnations are kept.
const MAX_IDS: usize = 1 << 32;

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
enum Phase {
    Between,
    Running,
    RootEnded,
    Over(End),
}

/// Whether goroutines may wait for something outside the simulation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outside {
    /// A goroutine that would wait for a descriptor gets an error.
    Refuse,
    /// The clock stands still while a goroutine waits for a descriptor.
    Wait,
}

/// What surrounds the goroutines of a run. See the head of the file.
pub(crate) trait World: Send + Sync + 'static {
    /// Returns whether a descriptor is a part of the world: a wait for it does not lead outside.
    fn contains(&self, fd: RawFd) -> bool;

    #[cfg(feature = "std")]
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync>;
}

/// Whether the world has moved since a goroutine last ran.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum WorldTurn {
    /// It must move before the time jumps.
    Due,
    /// The driver lets it move.
    Moving,
    /// It has moved, and moves again at this time. The kernel may have woken goroutines.
    Moved(Nanos),
    /// It moves again at this time, and no goroutine can run before.
    Until(Nanos),
}

/// One life of a host.
#[derive(Clone, Copy, Debug)]
struct Incarnation {
    is_dead: bool,
    /// Goroutines and tasks that have not ended.
    alive: u32,
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
    has_world: AtomicBool,
    /// It counts as a simulation ([`clock::has_simulations`]).
    is_counted: AtomicBool,
    state: Lock<State>,
}

/// The messages of panics in a run.
struct NotedPanics {
    /// Of the first panic that was not caught.
    first: Option<String>,
    /// With the ids of the goroutines or tasks.
    all: Vec<(u64, String)>,
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
    /// Goroutines that were chosen, and calls at which the running one could be preempted. Unlike the
    /// questions of the schedule they are counted also if there is only one possibility.
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
            panics_noted: Mutex::new(NotedPanics { first: None, all: Vec::new() }),
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
            has_world: AtomicBool::new(false),
            is_counted: AtomicBool::new(true),
        }
    }

    /// Sets what surrounds the goroutines of the next run.
    pub(crate) fn set_world(&self, world: Option<Arc<dyn World>>) {
        self.has_world.store(false, Ordering::Relaxed);
        let before = {
            let mut place = self.world.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *place, world)
        };
        drop(before);
    }

    /// Says that something in the world may move from now on.
    #[cfg(feature = "std")]
    pub(crate) fn set_world_in_motion(&self) {
        self.has_world.store(true, Ordering::Relaxed);
    }

    /// Returns what surrounds the goroutines of this run.
    pub(crate) fn world(&self) -> Option<Arc<dyn World>> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

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

    /// Keeps the message of a panic of the goroutine or task `id`. Returns whether it is to be printed,
    /// too.
    pub(crate) fn note_panic(&self, id: u64, message: String) -> bool {
        self.state.lock().has_failed = true;
        let mut noted = self.panics_noted.lock().unwrap_or_else(PoisonError::into_inner);
        noted.all.push((id, message));
        !self.is_silent.load(Ordering::Relaxed)
    }

    /// Returns for how many milliseconds the M waits for threads outside the simulation before it
    /// reports that all goroutines wait.
    fn pauses_before_failure(&self) -> u32 {
        if self.is_silent.load(Ordering::Relaxed) { 2 } else { 50 }
    }

    /// Takes the message of the first panic that was not caught, and forgets the others.
    pub(crate) fn take_panic_message(&self) -> Option<String> {
        let mut noted = self.panics_noted.lock().unwrap_or_else(PoisonError::into_inner);
        noted.all.clear();
        noted.first.take()
    }

    pub(crate) fn deviations(&self) -> Vec<Deviation> {
        // Allocated before the lock is taken.
        let n = self.state.lock().schedule.deviations().len();
        let mut all = Vec::with_capacity(n);
        all.extend_from_slice(self.state.lock().schedule.deviations());
        all
    }

    /// Returns the descriptors of the world that threads of the test wait for.
    #[cfg(feature = "std")]
    pub(crate) fn waited_by_threads(&self) -> Vec<RawFd> {
        // Allocated before the lock is taken.
        let mut all = Vec::with_capacity(self.state.lock().waited_by_threads.len());
        all.extend_from_slice(&self.state.lock().waited_by_threads);
        all
    }

    /// Returns the simulated time since the run began.
    pub(crate) fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.clock.load(Ordering::Relaxed) - SIMULATION_START)
    }

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

/// A call at which the running goroutine may be preempted, if it is simulated and may park. It may be
/// anywhere: in a signal handler, in a child of `fork`, inside the runtime. Otherwise it costs one load.
#[inline(always)]
pub(crate) fn point() {
    if clock::has_simulations() {
        point_slow();
    }
}

#[cold]
fn point_slow() {
    // SAFETY: called only on a goroutine.
    let in_runtime = || unsafe { arch::is_in_runtime() };
    if here().is_some()
        && current_g().is_some()
        && !is_forked()
        && on_own_stack()
        && !lock::holds_runtime_lock()
        && !in_runtime()
        && let Some(rt) = Rt::enter()
    {
        rt.leave();
    }
}

/// Until it is dropped, the running goroutine is not preempted at calls. Use it around code whose
/// number of calls depends on earlier runs, for example on what `interpose/fds.rs` knows about a
/// descriptor.
pub(crate) struct Undecided(Option<&'static G>);

impl Undecided {
    #[inline]
    pub(crate) fn begin() -> Undecided {
        let g = if clock::has_simulations() { current_g() } else { None };
        if let Some(g) = g {
            g.no_preempt.set(g.no_preempt.get() + 1);
        }
        Undecided(g)
    }
}

impl Drop for Undecided {
    #[inline]
    fn drop(&mut self) {
        if let Some(g) = self.0 {
            g.no_preempt.set(g.no_preempt.get() - 1);
        }
    }
}

/// The running goroutine leaves the runtime: asks the schedule whether it is preempted.
#[cold]
pub(crate) fn preempt_at_call(rt: Rt, simulation: &Simulation) {
    let g = rt.g();
    let sched = rt.sched();
    if g.no_preempt.get() != 0 || sched.must_go_on() || sched.stopping.load(Ordering::Relaxed) {
        return rt.leave_without_yield();
    }
    let preempts = {
        let mut state = simulation.state.lock();
        match state.phase {
            Phase::Between => false,
            _ if state.is_driver(g) => false,
            Phase::Over(_) => true,
            Phase::Running | Phase::RootEnded => {
                state.collect(rt);
                state.preempts(simulation, g)
            }
        }
    };
    let rt = if preempts { switch::preempt_in_simulation(rt) } else { rt };
    rt.leave_without_yield();
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
        if simulation.has_world.load(Ordering::Relaxed) {
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

    fn has_dead_incarnation(&self) -> bool {
        self.incarnations.iter().any(|incarnation| incarnation.is_dead)
    }

    /// Moves the goroutines and tasks of dead incarnations, from the index `from` on, to `frozen`.
    #[cold]
    fn freeze_from(&mut self, from: usize) {
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
    fn incarnation(&self, id: u64) -> u32 {
        let index = id.wrapping_sub(self.last_id) as usize;
        self.incarnation_of.get(index).copied().unwrap_or(0)
    }

    /// Returns whether the goroutine or task `id` never runs again.
    fn is_dead(&self, id: u64) -> bool {
        let incarnation = self.incarnation(id) as usize;
        self.incarnations.get(incarnation).is_some_and(|incarnation| incarnation.is_dead)
    }

    /// Returns how many goroutines and tasks never run again.
    fn num_frozen(&self) -> u64 {
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

    /// Returns when the world moves again.
    fn world_moves_at(&self) -> Nanos {
        match self.world_turn {
            WorldTurn::Until(when) => when,
            _ => LATEST,
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
        if self.phase == Phase::RootEnded && !self.incarnations[TEST_THREADS].is_dead && is_late() {
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

    /// The threads of the test end, as at the end of a process.
    fn end_threads(&mut self) {
        self.incarnations[TEST_THREADS].is_dead = true;
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

    /// Ends the run. Returns the driver, if it waits for that.
    fn end(&mut self, end: End) -> Option<&'static G> {
        self.phase = Phase::Over(end);
        std::mem::take(&mut self.driver_waits).then_some(self.driver).flatten()
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
    state.incarnations.truncate(0);
    for _ in TEST..=TEST_THREADS {
        state.incarnations.push(Incarnation { is_dead: false, alive: 0 });
    }
    state.incarnation_of.truncate(0);
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

/// A run has ended. Returns whether it has ended well and no goroutine is left: then another run may
/// begin, and goroutines of the runtime itself, such as carriers, may run.
pub(crate) fn finish(simulation: &Simulation) -> bool {
    let mut state = simulation.state.lock();
    let is_clean = state.phase == Phase::Over(End::Ended) && state.num_frozen() == 0;
    if is_clean {
        state.phase = Phase::Between;
    }
    is_clean
}

/// The root goroutine has returned: from now on the time stands still, and all hosts except the
/// test's own are dead. Threads of the test run until they wait.
pub(crate) fn root_ended(simulation: &Simulation) {
    let mut state = simulation.state.lock();
    if state.phase == Phase::Running {
        state.phase = Phase::RootEnded;
        state.steps_at_root_end = state.steps;
    }
    let hosts = TEST_THREADS + 1;
    if state.incarnations.len() > hosts {
        state.incarnations[hosts..].iter_mut().for_each(|incarnation| incarnation.is_dead = true);
        state.freeze_from(0);
    }
}

/// Parks the running goroutine until all others wait.
pub(crate) fn settle(simulation: &Simulation) {
    let Some(rt) = Rt::enter() else { return };
    simulation.state.lock().settling.push(rt.g());
    switch::park(rt, WaitReason::Settle).leave();
}

/// Registers a wait until it is dropped: a wait for something outside the simulation is counted; a
/// wait of a test's thread for a descriptor of the world is listed in `waited_by_threads`.
pub(crate) struct WaitOutside {
    simulation: Option<&'static Simulation>,
    /// A thread of the test waits for this descriptor of the world, which is not outside.
    waited: Option<RawFd>,
}

impl WaitOutside {
    const NONE: WaitOutside = WaitOutside { simulation: None, waited: None };

    /// The running goroutine is about to wait for the descriptor `fd`.
    ///
    /// # Errors
    /// `Unsupported` in a simulation that does not allow it.
    #[inline]
    pub(crate) fn begin(fd: RawFd) -> io::Result<WaitOutside> {
        if clock::has_simulations() { WaitOutside::begin_slow(fd) } else { Ok(WaitOutside::NONE) }
    }

    /// The running goroutine may wait for a lock that the whole process shares, if `is_shared` returns
    /// true: a thread outside may hold it.
    #[inline]
    pub(crate) fn for_shared_lock(is_shared: impl FnOnce() -> bool) -> WaitOutside {
        let simulation = if clock::has_simulations() && is_shared() { here() } else { None };
        if let Some(simulation) = simulation {
            simulation.waits_outside.fetch_add(1, Ordering::Relaxed);
        }
        WaitOutside { simulation, waited: None }
    }

    fn of_world(simulation: &'static Simulation, fd: RawFd) -> WaitOutside {
        let Some(g) = current_g() else { return WaitOutside::NONE };
        let mut state = simulation.state.lock();
        if state.incarnation(record::id_of(g)) as usize != TEST_THREADS {
            return WaitOutside::NONE;
        }
        state.waited_by_threads.push(fd);
        WaitOutside { simulation: Some(simulation), waited: Some(fd) }
    }

    #[cold]
    fn begin_slow(fd: RawFd) -> io::Result<WaitOutside> {
        let simulation = here();
        if let Some(simulation) = simulation
            && simulation.world().is_some_and(|world| world.contains(fd))
        {
            // `next` polls the kernel for descriptors of the world only if this is set.
            simulation.has_world.store(true, Ordering::Relaxed);
            return Ok(WaitOutside::of_world(simulation, fd));
        }
        match simulation {
            Some(Simulation { outside: Outside::Refuse, .. }) => {
                let id = current_g().map_or(0, G::id);
                let text = format!(
                    "goroutine {id} would wait for descriptor {fd}, which is outside the \
                     simulation; sim::Builder::wait_outside lets the time stand still meanwhile"
                );
                return Err(io::Error::new(io::ErrorKind::Unsupported, text));
            }
            Some(simulation) => _ = simulation.waits_outside.fetch_add(1, Ordering::Relaxed),
            None => {}
        }
        Ok(WaitOutside { simulation, waited: None })
    }
}

impl Drop for WaitOutside {
    #[inline]
    fn drop(&mut self) {
        match (self.simulation, self.waited) {
            (Some(simulation), None) => {
                simulation.waits_outside.fetch_sub(1, Ordering::Relaxed);
            }
            (Some(simulation), Some(fd)) => {
                let mut state = simulation.state.lock();
                let place = state.waited_by_threads.iter().position(|&other| other == fd);
                if let Some(place) = place {
                    state.waited_by_threads.remove_at(place);
                }
            }
            (None, _) => {}
        }
    }
}
