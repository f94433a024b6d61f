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
//! and its P ([`keep_without_spare`]), unless another locked goroutine waits. And if a P gets no M,
//! because the kernel or the program's limit refuses more threads, the M of a locked goroutine that
//! waits in a global queue gets it (`Sched::return_ps_wanting_m`). If all locked goroutines are
//! parked then, their Ms serve timers and descriptors, so that they are woken ([`wait_for_g`]).
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
use crate::sched::queues::central::Central;
use crate::sched::search::find;
use crate::sched::search::wait_for_p::SHUTDOWN_PARK_NANOS;
use crate::sched::wait::timers;
use crate::sys::clock::{NEVER, Nanos, now};
use std::sync::atomic::Ordering;

/// How long the M of a locked goroutine sleeps at least and at most if no other M is left. Go's
/// sysmon polls descriptors after 10 ms as well, if no other thread has.
const LAST_RESORT_NANOS: [Nanos; 2] = [1_000_000, 10_000_000];

/// Locks the running goroutine to its M. Calls nest.
pub(crate) fn lock(rt: Rt) {
    let (m, g) = (rt.m(), rt.g());
    g.lock_depth.set(g.lock_depth.get() + 1);
    if g.locked.replace(Some(m)).is_none() {
        rt.sched().locked_goroutines.fetch_add(1, Ordering::Relaxed);
    }
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
        rt.sched().locked_goroutines.fetch_sub(1, Ordering::Relaxed);
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
pub(crate) fn unlock_at_end(sched: &Sched, g: &G) {
    sched.locked_goroutines.fetch_sub(1, Ordering::Relaxed);
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
    if is_asked_to_end || !sched.has_no_spare() || sched.has_m_for_queues(Some(p)) {
        return None;
    }
    if sched.locked_goroutines.load(Ordering::Relaxed) > 1 {
        // No other M would take them from here.
        sched.spill(&mut sched.central.lock(), p);
    }
    if sched.has_locked_global() {
        queue_behind_others(m);
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
            timers::run_due_everywhere(rt);
            Some(g)
        }
        other => {
            m.unfinished_switch.set(other);
            None
        }
    }
}

/// The locked goroutine of `m` has yielded while another locked one waits: makes its switch end in the
/// expired queue, which is behind the queue of the other one. Otherwise that one would never run.
fn queue_behind_others(m: &M) {
    match m.unfinished_switch.replace(UnfinishedSwitch::None) {
        UnfinishedSwitch::Yielded(g) | UnfinishedSwitch::Displaced(g) => {
            m.unfinished_switch.set(UnfinishedSwitch::Preempted(g));
        }
        other => m.unfinished_switch.set(other),
    }
}

/// Sleeps, on the M's own context, until `g`, which is locked to this M, is to run. Returns false
/// if `g` has ended or the runtime is drained. If no other M is left that could wake goroutines, this
/// one does so from time to time.
pub(crate) fn wait_for_g(rt: OwnContext, g: &'static G) -> bool {
    let (m, sched) = (rt.m(), rt.sched());
    let ended = !g.locked.get().is_some_and(|locked_m| std::ptr::eq(locked_m, m));
    let mut serves_at = NEVER;
    loop {
        let mut central = sched.central.lock();
        let wake = m.p.take().map(|p| sched.hand_off(&mut central, p));
        // Another M may have handed over the goroutine and a P already.
        let handed = m.handed.take();
        let over = ended || (handed.is_none() && sched.commit_drained(&mut central));
        if over {
            central.remove_locked_m(m);
        }
        if handed.is_none() && !over && !m.listed.get() {
            central.push_locked_m(m);
        }
        let next_service = sched.last_resort_at(&central);
        let is_due = now() >= serves_at;
        let serves_now = handed.is_none() && !over && is_due && next_service != NEVER;
        let idle_p = if serves_now { sched.take_idle_p(&mut central) } else { None };
        // A wake-up before it is due must not put it off.
        let is_pending = !is_due && next_service != NEVER;
        serves_at = if is_pending { serves_at.min(next_service) } else { next_service };
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
        if let Some(p) = idle_p {
            // It is no P that serves the queues. `hand_off` clears the flag.
            p.flags.fetch_or(flag::LOCKED, Ordering::Relaxed);
            find::ready_due(rt.set_p(p));
            // Then the P is handed off: this M runs only its own goroutine.
            continue;
        }
        let stopping = sched.stopping.load(Ordering::Relaxed);
        m.parker.park_until(if stopping { now() + SHUTDOWN_PARK_NANOS } else { serves_at });
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
    central.hand_to_locked_m(locked_m, g, p);
    drop(central);
    locked_m.wake();
}

impl Sched {
    /// Returns whether an M runs goroutines that are not locked to it, on another P than `except`.
    fn has_m_for_queues(&self, except: Option<&P>) -> bool {
        self.all_ps().any(|p| {
            let is_locked = p.flags.load(Ordering::Relaxed) & flag::LOCKED != 0;
            !except.is_some_and(|except| std::ptr::eq(except, p))
                && p.holder().is_some()
                && !is_locked
        })
    }

    /// Under the lock: returns when an M that waits for its locked goroutine must serve timers and
    /// descriptors: `NEVER` if there are none, or as long as another M does. (The helper thread keeps
    /// a spare M if it can. One that is being started does not count: its start may fail.)
    fn last_resort_at(&self, central: &Central) -> Nanos {
        let may_serve = self.simulation.is_none() && !self.stopping.load(Ordering::Relaxed);
        // The usual case; what follows reads all Ps.
        if central.spares() > 0 || !may_serve || self.has_m_for_queues(None) {
            return NEVER;
        }
        let next_timer = self.next_timer();
        if next_timer == NEVER && !self.poller.has_waiters() && !self.has_global() {
            return NEVER;
        }
        let [earliest, latest] = LAST_RESORT_NANOS.map(|nanos| now() + nanos);
        next_timer.clamp(earliest, latest)
    }

    /// Returns the M on which `g` must run, or None if it may run on `m`.
    pub(crate) fn locked_m_of(&self, g: &G, m: &M) -> Option<&'static M> {
        g.locked.get().filter(|locked_m| !std::ptr::eq(*locked_m, m))
    }
}
