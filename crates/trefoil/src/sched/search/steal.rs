//! Taking goroutines from other Ps.
//!
//! The *thief* is the M that steals, the *victim* is the P from which it steals, and the *owner* is
//! the M that owns the victim. A *round* visits every P once. A *sweep* is [`STEAL_ROUNDS`] rounds.
//!
//! # Goroutines that wake each other stay together
//! Goroutines that communicate run for fractions of a microsecond, and on one P they find their
//! data in the CPU's cache. A thief separates them. So a thief first samples the victim twice, and
//! in between does not touch the cache lines that the owner writes. It does not steal from a ring
//! of at most [`SMALL_RING`] entries whose owner takes [`MIN_DEQUEUES`] within [`RING_GRACE`],
//! except in the last sweep of a search, so that no P stays idle for ever while goroutines wait
//! elsewhere. A select over four channels on two Ps takes 230 ns per item with this rule and 600
//! without. Goroutines that only yield spread over the Ps as before.
//!
//! Rejected: Go's check whether the same goroutine is in `runnext` after 3 µs. With it, a ping-pong
//! on two Ps is separated 25,000 times per second and takes 1.5 times as long. Here the thief
//! checks whether the owner took any goroutine from `runnext` meanwhile.

use crate::sched::m::Rt;
use crate::sched::p::{P, PStatus, bump};
use crate::sched::record;
use crate::sched::runnable::Runnable;
use crate::sched::switch::pop_local;
use crate::sched::wait::timers;
use crate::shim::spin_hint;
use std::time::{Duration, Instant};

/// Rounds per sweep. Only the last round steals `runnext` and runs timers. Go's number.
const STEAL_ROUNDS: u32 = 4;
/// How long the owner may leave a goroutine in `runnext` before a thief takes it. The owner is
/// probably about to run it: a goroutine that makes another one runnable often parks at once. Go's
/// number.
const RUNNEXT_GRACE: Duration = Duration::from_micros(3);
/// See the head of the file. The limit is for both rings of a P together.
const SMALL_RING: u32 = 4;
const MIN_DEQUEUES: u32 = 2;
const RING_GRACE: Duration = Duration::from_micros(1);

/// Which rings a sweep steals from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sweep {
    /// All rings, except small ones that their owners are draining.
    Ordinary,
    /// All rings: it is the last sweep before the M gives up.
    Last,
}

/// Where a goroutine was found.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// A timer was due, and woke it.
    Timer,
    /// It waited in a queue, or for a descriptor.
    Elsewhere,
}

/// Makes one sweep over the other Ps, in a random order per round. Returns one stolen goroutine;
/// others that were stolen with it are in the rings of `p`.
pub(super) fn steal(rt: Rt, p: &'static P, sweep: Sweep) -> Option<(Runnable, Source)> {
    let sched = rt.sched();
    for round in 1..=STEAL_ROUNDS {
        let is_last_round = round == STEAL_ROUNDS;
        for id in rt.with_local(|local| local.rng.tour(sched.ps_made())) {
            let Some(victim) = sched.p(id) else { continue };
            // Also the timers of idle Ps: no other thread runs them.
            if is_last_round
                && timers::run_due(rt, &victim.timers)
                && let Some(g) = pop_local(p)
            {
                return Some((g, Source::Timer));
            }
            // Idle and retired Ps have no goroutines.
            if victim.id == p.id || victim.status() != PStatus::Running {
                continue;
            }
            // `is_draining` takes a microsecond, so only the first round calls it. Later rounds
            // skip all small rings.
            let skip_rings = sweep == Sweep::Ordinary
                && victim.ring_len() <= SMALL_RING
                && (round > 1 || is_draining(victim));
            let found = if skip_rings { None } else { p.steal_from(victim) }
                .or_else(|| if is_last_round { steal_next(victim) } else { None });
            if let Some(g) = found {
                count_stolen(p, victim);
                return Some((g, Source::Elsewhere));
            }
        }
    }
    None
}

/// For a goroutine that yields and is alone on its P: steals goroutines that wait behind a
/// goroutine that does not stop, and puts them into the local queue. Returns whether it stole any.
/// It runs on a goroutine's stack, so it does not run timers.
#[cold]
pub(crate) fn steal_for_yield(rt: Rt) -> bool {
    let (p, sched) = (rt.p(), rt.sched());
    let tour = rt.with_local(|local| local.rng.tour(sched.ps_made()));
    let others = tour.filter_map(|id| sched.p(id)).filter(|other| other.id != p.id);
    for victim in others.filter(|other| other.status() == PStatus::Running) {
        // If the owner takes goroutines, all of them will have their turn there.
        if victim.is_empty() || dequeues_within_grace(victim) != 0 {
            continue;
        }
        let Some(g) = p.steal_from(victim).or_else(|| steal_next(victim)) else {
            continue;
        };
        count_stolen(p, victim);
        p.push_back(sched, g);
        return true;
    }
    false
}

/// Counts one steal: a goroutine to run, and all in the queues of `p`, which were empty before.
fn count_stolen(p: &P, victim: &P) {
    record::stolen(p, victim);
    bump(&p.counters.steals, 1);
    bump(&p.counters.stolen, 1 + p.queued() as u64);
}

/// Takes `runnext` of the victim, unless its owner takes a goroutine from there within
/// [`RUNNEXT_GRACE`]: then the owner will take the next one too.
fn steal_next(victim: &P) -> Option<Runnable> {
    if !victim.runq.has_next() {
        return None;
    }
    let taken = victim.runq.nexts_taken();
    spin_for(RUNNEXT_GRACE);
    if victim.runq.nexts_taken() != taken {
        return None;
    }
    // SAFETY: what the queue holds came from `as_item`.
    victim.runq.steal_next().map(|item| unsafe { Runnable::from_item(item) })
}

/// Returns whether the few goroutines in the victim's rings are about to run there: its owner takes
/// one after the other.
fn is_draining(victim: &P) -> bool {
    let len = victim.ring_len();
    if len == 0 || len > SMALL_RING {
        return false;
    }
    dequeues_within_grace(victim) >= MIN_DEQUEUES
}

/// Returns how many goroutines the victim's owner takes within [`RING_GRACE`].
fn dequeues_within_grace(victim: &P) -> u32 {
    let taken = victim.taken();
    spin_for(RING_GRACE);
    victim.taken().wrapping_sub(taken)
}

/// Waits without reading the victim's memory, to which its owner writes.
fn spin_for(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        spin_hint();
    }
}
