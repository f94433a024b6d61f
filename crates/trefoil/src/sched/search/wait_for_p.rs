//! How an M without a P sleeps, and how it gets a P.
//!
//! An M asks for a P when its thread starts, after it has given its P back, and after sysmon has
//! retaken it. It gets a P in one of these ways:
//!
//! | the P | from |
//! |---|---|
//! | handed to it (`m.handed`) | a waker that chose this M (`queues/assign.rs`) |
//! | wants an M | a waker or a handoff that found no idle M |
//! | idle | a timer is due or a descriptor is ready, and this M is the idle poller |
//! | idle | a goroutine waits in a global queue, and the wake-up for it found no idle P or M |
//! | idle | a goroutine waits anywhere, and the wake-up for it found no M (`Central::is_check_due`) |
//!
//! Otherwise it sleeps: as the idle poller until the next timer or in `epoll_wait`
//! (`netpoll/idle_poller.rs`), or in the list of idle Ms until it is handed a P.
//!
//! Invariant 1: a wake-up is only a hint to check again. All decisions are made under the
//! scheduler's lock.

use crate::sched::m::{OwnContext, Rt};
use crate::sched::netpoll::idle_poller;
use crate::sched::p::P;
use crate::sched::queues::central::Central;
use crate::sys::clock::{NEVER, Nanos, now};
use crate::sys::lock::LockGuard;
use std::sync::atomic::Ordering;

/// How long an M sleeps before its thread ends, if there are more idle Ms than are kept
/// (`Sched::retire_spare`). Go keeps all threads.
const SPARE_M_NANOS: Nanos = 5_000_000_000;
/// How long an M without a P sleeps at a time while its runtime stops.
pub(crate) const SHUTDOWN_PARK_NANOS: Nanos = 1_000_000;

/// Blocks until the M owns a P. Returns None if its thread must end: the runtime has stopped, or
/// has more threads than it needs.
pub(super) fn wait_for_p(own: OwnContext) -> Option<Rt> {
    let (m, sched) = (own.m(), own.sched());
    loop {
        let mut central = sched.central.lock();
        // Under one hold of the lock, so that this M is always counted: as starting, idle or
        // working.
        central.starting -= u32::from(m.is_starting.replace(false));
        if let Some(p) = m.handed.take() {
            return Some(accept_handed_p(own, p, central));
        }
        if sched.commit_drained(&mut central) {
            central.remove_idle_m(m);
            sched.publish_spares(&central);
            return None;
        }
        if let Some(p) = take_p_wanting_m(own, &mut central) {
            drop(central);
            return Some(own.set_p(p));
        }
        if sched.stopping.load(Ordering::Relaxed) {
            let p = take_p_while_stopping(own, &mut central);
            drop(central);
            if let Some(p) = p {
                return Some(own.set_p(p));
            }
            m.parker.park_until(now() + SHUTDOWN_PARK_NANOS);
            continue;
        }
        let until = match enter_idle_or_take_p(own, &mut central) {
            EnterIdle::TookP(p) => {
                drop(central);
                let rt = own.set_p(p);
                own.start_spinning();
                return Some(rt);
            }
            EnterIdle::SleepUntil(until) => until,
        };
        let sleep = Sleep::choose(own, &central, until);
        drop(central);
        match sleep {
            Sleep::Polling(until) => {
                let ready = m.sleep_polling(sched.poller, until);
                if idle_poller::wake_ready(own, ready) {
                    return own.rt();
                }
            }
            Sleep::Parked(until) => _ = m.parker.park_until(until),
            Sleep::Spare => {
                let until = now() + SPARE_M_NANOS;
                // A signal ends a sleep early, too.
                if !m.parker.park_until(until) && now() >= until && sched.retire_spare(m) {
                    return None;
                }
            }
        }
    }
}

/// Takes the P that a waker has handed over.
fn accept_handed_p(own: OwnContext, p: &'static P, central: LockGuard<'_, Central>) -> Rt {
    let (m, sched) = (own.m(), own.sched());
    // This M may have been the idle poller, so another M must become that. If this M spins, the end
    // of its search sees to that (`find::finish_search`).
    let wake_poller =
        !central.idle_poller.is_some() && !m.spinning.get() && sched.needs_idle_poller();
    drop(central);
    let rt = own.set_p(p);
    if wake_poller {
        sched.wake();
    }
    rt
}

/// Takes a P that wants an M. There is none while this M is in the list of idle Ms: such a P would
/// have been handed to this M.
fn take_p_wanting_m(own: OwnContext, central: &mut Central) -> Option<&'static P> {
    let (m, sched) = (own.m(), own.sched());
    if m.listed.get() {
        return None;
    }
    let p = sched.take_p_wanting_m(central, m)?;
    if central.idle_poller.is(m) {
        sched.clear_idle_poller(central);
    }
    Some(p)
}

/// While the runtime stops: takes an idle P if a goroutine that may have to run once more waits in
/// a global queue; the thread that was to run it may never have been started. Otherwise lists the M
/// as idle: a spare M may be needed as long as a goroutine may wait for one of libc's locks.
fn take_p_while_stopping(own: OwnContext, central: &mut Central) -> Option<&'static P> {
    let (m, sched) = (own.m(), own.sched());
    if sched.has_global()
        && let Some(p) = sched.take_idle_p(central)
    {
        central.remove_idle_m(m);
        sched.publish_spares(central);
        return Some(p);
    }
    if !m.listed.get() {
        central.push_idle_m(m);
        sched.publish_spares(central);
    }
    None
}

/// What [`enter_idle_or_take_p`] did.
enum EnterIdle {
    /// There is work for this M at once: it took this P.
    TookP(&'static P),
    /// The M is idle, and is to sleep until this time.
    SleepUntil(Nanos),
}

/// Makes the M idle. If a timer is due, or a goroutine waits for which no M could be woken, takes an
/// idle P instead.
fn enter_idle_or_take_p(own: OwnContext, central: &mut Central) -> EnterIdle {
    let (m, sched) = (own.m(), own.sched());
    let was_idle = m.listed.get() || central.idle_poller.is(m);
    let is_needed = !was_idle && (sched.has_global() || has_missed_work(own, central));
    let until = if is_needed { 0 } else { sched.enter_idle(central, m) };
    let now = now();
    if !was_idle {
        m.idle_since.set(now);
    }
    if until <= now {
        if central.idle_poller.is(m) {
            sched.clear_idle_poller(central);
        }
        if let Some(p) = sched.take_idle_p(central) {
            return EnterIdle::TookP(p);
        }
        // No P is idle: the Ms that run serve timers and queues.
        central.push_idle_m(m);
        sched.publish_spares(central);
    }
    EnterIdle::SleepUntil(if m.listed.get() { NEVER } else { until })
}

/// Returns whether a queue holds work for which no M was woken, because none was idle.
fn has_missed_work(own: OwnContext, central: &mut Central) -> bool {
    if !std::mem::take(&mut central.is_check_due) {
        return false;
    }
    // Pairs with the barrier of a submitter that has seen the claim (`idle.rs`).
    own.sched().idle.before_recheck();
    own.sched().has_work()
}

/// How an idle M sleeps.
enum Sleep {
    /// As the idle poller, in `epoll_wait`.
    Polling(Nanos),
    /// In its parker.
    Parked(Nanos),
    /// In its parker; if it is not woken for a long time, its thread ends.
    Spare,
}

impl Sleep {
    /// Returns how the M, which is idle, sleeps until `until`.
    fn choose(own: OwnContext, central: &Central, until: Nanos) -> Sleep {
        let (m, sched) = (own.m(), own.sched());
        if central.idle_poller.is(m) && sched.poller.has_waiters() {
            Sleep::Polling(until)
        } else if m.listed.get() && central.idle_m_count() > sched.procs() {
            Sleep::Spare
        } else {
            Sleep::Parked(until)
        }
    }
}
