//! What surrounds the goroutines of a run: its world, and what is outside of the simulation.
//!
//! A run may have a [`World`]: a network whose segments are on their way (`simnet/`). When all
//! goroutines wait, [`next`](super::next) wakes the driver, which lets the world move and says when
//! it moves again ([`WorldTurn`]). Then the time jumps to that, or to the next timer.
//!
//! A descriptor that is not in the world leads outside, to the kernel and other processes. A
//! goroutine that is about to wait makes a [`WaitOutside`], which finds out which of the two it is:
//!
//! | wait for | [`Outside::Refuse`] | [`Outside::Wait`] |
//! |---|---|---|
//! | a descriptor of the world | allowed; the time goes on | the same |
//! | another descriptor | an error | counted; the time stands still |
//! | a lock that the whole process shares | counted; the time stands still | the same |

use super::incarnations::TEST_THREADS;
use super::{Simulation, State, here};
use crate::sched::current_g;
use crate::sched::g::G;
use crate::sched::record;
use crate::sys::clock::{self, LATEST, Nanos};
#[cfg(feature = "std")]
use std::any::Any;
use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

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
pub(super) enum WorldTurn {
    /// It must move before the time jumps.
    Due,
    /// The driver lets it move.
    Moving,
    /// It has moved, and moves again at this time. The kernel may have woken goroutines.
    Moved(Nanos),
    /// It moves again at this time, and no goroutine can run before.
    Until(Nanos),
}

impl Simulation {
    /// Sets what surrounds the goroutines of the next run.
    pub(crate) fn set_world(&self, world: Option<Arc<dyn World>>) {
        self.world_may_move.store(false, Ordering::Relaxed);
        let before = {
            let mut place = self.world.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *place, world)
        };
        drop(before);
    }

    /// Says that something in the world may move from now on.
    #[cfg(feature = "std")]
    pub(crate) fn set_world_in_motion(&self) {
        self.world_may_move.store(true, Ordering::Relaxed);
    }

    /// Returns what surrounds the goroutines of this run.
    pub(crate) fn world(&self) -> Option<Arc<dyn World>> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the descriptors of the world that threads of the test wait for.
    #[cfg(feature = "std")]
    pub(crate) fn waited_by_threads(&self) -> Vec<RawFd> {
        // Allocated before the lock is taken.
        let mut all = Vec::with_capacity(self.state.lock().waited_by_threads.len());
        all.extend_from_slice(&self.state.lock().waited_by_threads);
        all
    }
}

impl State {
    /// Returns when the world moves again.
    pub(super) fn world_moves_at(&self) -> Nanos {
        match self.world_turn {
            WorldTurn::Until(when) => when,
            _ => LATEST,
        }
    }
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

    /// The running goroutine may wait for a lock that the whole process shares, if `is_shared`
    /// returns true: a thread outside may hold it.
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
            simulation.world_may_move.store(true, Ordering::Relaxed);
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
