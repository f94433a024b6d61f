//! `lock_os_thread`: a goroutine and a thread that belong together.
//!
//! While a goroutine is locked, its M runs nothing else, and no other M runs it. When it parks, the thread
//! gives its P away and sleeps; whoever takes it from a queue hands his P to that thread.
//!
//! ```text
//!   locked goroutine leaves ─▶ its thread's context: P away, sleep ([`wait_for_g`])
//!   another thread takes it from a queue ─▶ P and goroutine to that thread ([`hand_to_locked_m`])
//! ```
//!
//! `flag::LOCKED` on its P keeps the fast path of `switch.rs` away: a locked goroutine never switches to
//! another one directly. A goroutine that ends while it is locked takes its thread with it: who knows
//! what it has done to it.
//!
//! Invariant 1: `g.locked` and `m.locked` point at each other, are written by the goroutine itself, and
//! outlive its parks.

use crate::sched::Sched;
use crate::sched::g::G;
use crate::sched::m::{M, OwnContext, Rt};
use crate::sched::p::{P, flag};
use crate::sched::search::wait_for_p::SHUTDOWN_PARK_NANOS;
use crate::sys::clock::{NEVER, now};
use std::sync::atomic::Ordering;

/// The running goroutine and its thread belong together from now on. May nest.
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

/// `m` got `p`: if it has a locked goroutine, the P knows.
pub(crate) fn mark(m: &M, p: &P) {
    if m.locked.get().is_some() {
        p.flags.fetch_or(flag::LOCKED, Ordering::Relaxed);
    }
}

/// The locked goroutine ends. Its thread ends when it is back on its own context.
pub(crate) fn end(g: &G) {
    g.locked.set(None);
    g.lock_depth.set(0);
}

/// On the context of a thread with a locked goroutine: sleeps until that one is to run. False: it ended, or
/// the runtime stops.
pub(crate) fn wait_for_g(rt: OwnContext, g: &'static G) -> bool {
    let (m, sched) = (rt.m(), rt.sched());
    let ended = !g.locked.get().is_some_and(|home| std::ptr::eq(home, m));
    loop {
        let mut central = sched.central.lock();
        // First of all: someone may have sent the goroutine home already, with a P of his own.
        let wake = m.p.take().map(|p| sched.hand_off(&mut central, p));
        let handed = m.handed.take();
        let over = ended || sched.is_stopped_for_good(&mut central);
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
        let ends = sched.stopping.load(Ordering::Relaxed);
        m.parker.park_until(if ends { now() + SHUTDOWN_PARK_NANOS } else { NEVER });
    }
}

/// `g`, taken from a queue, belongs to another thread: that one gets it, and our P.
pub(crate) fn hand_to_locked_m(rt: Rt, g: &'static G, home: &'static M) {
    let (m, sched) = (rt.m(), rt.sched());
    let mut central = sched.central.lock();
    // Then that thread may have ended, and its M be another runtime's. Nobody is resumed any more.
    if sched.is_stopped() {
        central.global.fresh.push_back(g);
        return;
    }
    let Some(p) = m.p.take() else { return };
    p.holder.store(std::ptr::null_mut(), Ordering::Relaxed);
    central.remove_locked_m(home);
    home.chosen.set(Some(g));
    home.handed.set(Some(p));
    drop(central);
    home.wake();
}

impl Sched {
    /// Whether `g` may run on `m`, or where else.
    pub(crate) fn locked_m_of(&self, g: &G, m: &M) -> Option<&'static M> {
        g.locked.get().filter(|home| !std::ptr::eq(*home, m))
    }
}
