//! `lock_os_thread`: a goroutine locked to one M.
//!
//! While a goroutine is locked, its M runs no other goroutine, and no other M runs it. When it
//! parks, its M hands off the P and sleeps. When it is ready, the M that takes it from a queue
//! hands its own P to the M of the goroutine, the *locked M*.
//!
//! ```text
//!   the locked goroutine parks ─▶ its M hands off the P and sleeps ([`wait_for_g`])
//!   another M dequeues it ─▶ that M hands its P and the goroutine to the locked M
//!                            ([`hand_to_locked_m`])
//! ```
//!
//! If no other M is free or runs unlocked goroutines, and maybe none can be started, none could take
//! the goroutine from a queue. So a locked goroutine that yields or is preempted then keeps its M
//! and its P ([`keep_without_spare`]). One that parks needs another M: the kernel, or the program's
//! limit, may refuse it, and then the goroutine goes on when one of the other Ms is free.
//!
//! `flag::LOCKED` on the P disables the fast path of `switch.rs`: a locked goroutine never switches
//! to another one directly. If a goroutine ends while it is locked, its thread ends too, because
//! the goroutine may have changed the thread's state (its signal mask, its namespaces).
//!
//! Invariant 1: `g.locked` and `m.locked` point at each other, are written by the goroutine itself,
//! and keep their values while it is parked.

use crate::sched::Sched;
use crate::sched::g::G;
use crate::sched::m::{M, OwnContext, Rt, UnfinishedSwitch};
use crate::sched::p::{P, flag};
use crate::sched::search::wait_for_p::SHUTDOWN_PARK_NANOS;
use crate::sched::wait::timers;
use crate::sys::clock::{NEVER, now};
use std::sync::atomic::Ordering;

/// Locks the running goroutine to its M. Calls nest.
pub(crate) fn lock(rt: Rt) {
    let (m, g) = (rt.m(), rt.g());
    g.lock_depth.set(g.lock_depth.get() + 1);
    g.locked.set(Some(m));
    m.locked.set(Some(g));
    mark(m, rt.p());
}

/// Undoes one [`lock`].
pub(crate) fn unlock(rt: Rt) {
    let (m, g) = (rt.m(), rt.g());
    let depth = g.lock_depth.get() - 1;
    g.lock_depth.set(depth);
    if depth == 0 {
        g.locked.set(None);
        m.locked.set(None);
        rt.p().flags.fetch_and(!flag::LOCKED, Ordering::Relaxed);
    }
}

/// Sets `flag::LOCKED` on `p`, which `m` has just got, if a goroutine is locked to `m`.
pub(crate) fn mark(m: &M, p: &P) {
    if m.locked.get().is_some() {
        p.flags.fetch_or(flag::LOCKED, Ordering::Relaxed);
    }
}

/// Unlocks a goroutine that ends. `m.locked` stays, so the M's thread ends when it is back on its
/// own context: there [`wait_for_g`] returns false.
pub(crate) fn unlock_at_end(g: &G) {
    g.locked.set(None);
    g.lock_depth.set(0);
}

/// Completes a switch on the M's own context: if the locked goroutine of this M has yielded or was
/// preempted, and no other M could take it from a queue, returns it, and it is not queued.
pub(crate) fn keep_without_spare(rt: Rt) -> Option<&'static G> {
    let (m, sched, p) = (rt.m(), rt.sched(), rt.p());
    m.locked.get()?;
    // A simulation decides by itself what runs.
    if sched.simulation.is_some() || sched.stopping.load(Ordering::Relaxed) {
        return None;
    }
    let is_asked_to_end = p.flags.load(Ordering::Relaxed) & flag::RETIRE != 0;
    let serves_queues = |other: &P| {
        let is_locked = other.flags.load(Ordering::Relaxed) & flag::LOCKED != 0;
        !std::ptr::eq(other, p) && other.holder().is_some() && !is_locked
    };
    if is_asked_to_end || !sched.has_no_spare() || sched.all_ps().any(serves_queues) {
        return None;
    }
    match m.unfinished_switch.replace(UnfinishedSwitch::None) {
        UnfinishedSwitch::Yielded(g)
        | UnfinishedSwitch::Displaced(g)
        | UnfinishedSwitch::Preempted(g) => {
            g.state.set_runnable();
            // A request to preempt it is out of date now.
            p.begin_slice();
            // No other M will run them.
            p.flags.fetch_and(!flag::TIMERS, Ordering::Relaxed);
            sched.all_ps().for_each(|p| _ = timers::run_due(rt, &p.timers));
            Some(g)
        }
        other => {
            m.unfinished_switch.set(other);
            None
        }
    }
}

/// Sleeps, on the M's own context, until `g`, which is locked to this M, is to run. Returns false
/// if `g` has ended or the runtime is drained.
pub(crate) fn wait_for_g(rt: OwnContext, g: &'static G) -> bool {
    let (m, sched) = (rt.m(), rt.sched());
    let ended = !g.locked.get().is_some_and(|locked_m| std::ptr::eq(locked_m, m));
    loop {
        let mut central = sched.central.lock();
        let wake = m.p.take().map(|p| sched.hand_off(&mut central, p));
        // Another M may have handed over the goroutine and a P already.
        let handed = m.handed.take();
        let over = ended || sched.commit_drained(&mut central);
        if over {
            central.remove_locked_m(m);
        }
        if handed.is_none() && !over && !m.listed.get() {
            central.push_locked_m(m);
        }
        drop(central);
        if let Some(wake) = wake {
            wake.deliver();
        }
        if let Some(p) = handed {
            m.set_p(Some(p));
            mark(m, p);
            return true;
        }
        if over {
            return false;
        }
        let stopping = sched.stopping.load(Ordering::Relaxed);
        m.parker.park_until(if stopping { now() + SHUTDOWN_PARK_NANOS } else { NEVER });
    }
}

/// Hands `g`, taken from a queue, and this M's P to `locked_m`, to which `g` is locked.
pub(crate) fn hand_to_locked_m(rt: Rt, g: &'static G, locked_m: &'static M) {
    let (m, sched) = (rt.m(), rt.sched());
    let mut central = sched.central.lock();
    // In a drained runtime no goroutine is resumed. The thread of `locked_m` may have ended, and
    // another runtime may use the M.
    if sched.is_drained() {
        central.global.fresh.push_back(g);
        return;
    }
    let Some(p) = m.p.take() else { return };
    p.holder.store(std::ptr::null_mut(), Ordering::Relaxed);
    central.remove_locked_m(locked_m);
    locked_m.chosen.set(Some(g));
    locked_m.handed.set(Some(p));
    drop(central);
    locked_m.wake();
}

impl Sched {
    /// Returns the M on which `g` must run, or None if it may run on `m`.
    pub(crate) fn locked_m_of(&self, g: &G, m: &M) -> Option<&'static M> {
        g.locked.get().filter(|locked_m| !std::ptr::eq(*locked_m, m))
    }
}
