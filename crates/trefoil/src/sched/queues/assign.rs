//! Which M is woken with which P.
//!
//! A thread that publishes work calls [`Sched::wake`]. If a P is idle and no M spins, it makes a
//! *claim on spinning* (`search/idle.rs`), takes the lock, and assigns an idle P to an idle M. The
//! claim goes with the P, so the woken M starts out spinning.
//!
//! ```text
//!   wake ── claim ──▶ take_idle_p ──▶ an idle M ──────▶ m.handed = p, m.spinning = claim
//!                                 ├─▶ the idle poller   (as above)
//!                                 └─▶ no idle M: `ps_wanting_m`; the helper thread starts a thread
//! ```
//!
//! The M to wake and its P are chosen under the lock. The system calls follow after unlocking, when
//! the caller delivers the [`PendingWakes`].
//!
//! Invariants:
//! 1. A claim on spinning ends up with an M (`m.spinning`), with a P that wants an M
//!    (`p.wants_spinning_m`), or is returned (`Idle::stop_spinning`).
//! 2. A P that is handed over (`m.handed`, `ps_wanting_m`) has the status `Running`, and no thread
//!    owns it until the M takes it.

use crate::sched::Sched;
use crate::sched::m::M;
use crate::sched::monitor::helper::Helper;
use crate::sched::monitor::sysmon::Sysmon;
use crate::sched::p::{P, flag};
use crate::sched::queues::central::Central;
use crate::sched::search::idle::SPIN_NANOS;
use crate::shim::full_fence;
use crate::sys::clock::now;
use std::sync::atomic::Ordering;

/// The threads to wake after the lock is released: one system call each, in the order of the
/// fields. The M comes first, because work waits for it. The memory of all three is never freed, so
/// they may be woken when the runtime is gone.
#[must_use = "the chosen threads sleep until this is delivered"]
pub(crate) struct PendingWakes {
    m: Option<&'static M>,
    /// Set if the helper thread should start a thread: with the chosen M the spare Ms become too
    /// few, or no M was spare.
    helper: Option<&'static Helper>,
    /// Set if an idle P was taken: sysmon must watch it, and is woken if it sleeps.
    sysmon: Option<&'static Sysmon>,
}

impl PendingWakes {
    pub(crate) const NONE: PendingWakes = PendingWakes { m: None, helper: None, sysmon: None };

    /// Wakes the threads. The caller has released the lock (`central.rs`, invariant 2).
    pub(crate) fn deliver(self) {
        if let Some(m) = self.m {
            m.wake();
        }
        if let Some(helper) = self.helper {
            helper.wake();
        }
        if let Some(sysmon) = self.sysmon {
            sysmon.wake_if_asleep();
        }
    }
}

/// Whether a claim on spinning goes with a P to its M.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claim {
    Spinning,
    None,
}

impl Claim {
    fn from_flag(spinning: bool) -> Claim {
        if spinning { Claim::Spinning } else { Claim::None }
    }

    fn is_spinning(self) -> bool {
        self == Claim::Spinning
    }
}

impl Sched {
    /// Wakes an M if a P is idle and no M spins. The caller has published work, and a full barrier
    /// has followed.
    #[inline]
    pub(crate) fn wake(&self) {
        if self.idle.claim_wake() {
            self.wake_slow();
        }
    }

    /// As [`Sched::wake`], for a caller whose publication was not a full barrier.
    #[inline]
    pub(crate) fn wake_after_push(&self) {
        full_fence();
        self.wake();
    }

    #[cold]
    fn wake_slow(&self) {
        let mut central = self.central.lock();
        let wakes = self.use_claim(&mut central);
        drop(central);
        wakes.deliver();
    }

    /// As [`Sched::wake`], under the lock.
    pub(crate) fn wake_locked(&self, central: &mut Central) -> PendingWakes {
        if self.idle.claim_wake() { self.use_claim(central) } else { PendingWakes::NONE }
    }

    /// Under the lock: assigns an idle P, with the claim that the caller has made.
    fn use_claim(&self, central: &mut Central) -> PendingWakes {
        if !self.is_drained()
            && let Some(p) = self.take_idle_p_unwatched(central)
        {
            let sysmon = Some(self.sysmon);
            return PendingWakes { sysmon, ..self.assign_spinning(central, p) };
        }
        self.idle.stop_spinning();
        PendingWakes::NONE
    }

    /// Under the lock: hands `p`, which no M owns, to an idle M, or else lists it as wanting an M.
    pub(crate) fn assign(&self, central: &mut Central, p: &'static P) -> PendingWakes {
        self.assign_with(central, p, Claim::None)
    }

    /// As [`Sched::assign`]; the caller's claim on spinning goes with `p`.
    pub(crate) fn assign_spinning(&self, central: &mut Central, p: &'static P) -> PendingWakes {
        self.assign_with(central, p, Claim::Spinning)
    }

    fn assign_with(&self, central: &mut Central, p: &'static P, claim: Claim) -> PendingWakes {
        if let Some(wakes) = self.assign_to_idle_m(central, p, claim) {
            return wakes;
        }
        central.push_p_wanting_m(p, claim);
        PendingWakes { helper: Some(self.helper), ..PendingWakes::NONE }
    }

    /// Hands `p` to an idle M, or else to the idle poller. Returns None if there is neither.
    fn assign_to_idle_m(
        &self,
        central: &mut Central,
        p: &'static P,
        claim: Claim,
    ) -> Option<PendingWakes> {
        let m = central.pop_idle_m().or_else(|| self.clear_idle_poller(central))?;
        self.note_end_of_sleep(m);
        m.spinning.set(claim.is_spinning());
        m.handed.set(Some(p));
        self.publish_spares(central);
        let helper = self.wants_thread(central).then_some(self.helper);
        Some(PendingWakes { m: Some(m), helper, sysmon: None })
    }

    /// Under the lock: there is work for `m`, which sleeps. If it has not slept for long, it should
    /// have spun instead (`search/idle.rs`).
    pub(crate) fn note_end_of_sleep(&self, m: &M) {
        if now().saturating_sub(m.idle_since.get()) < SPIN_NANOS {
            self.idle.spin_paid();
        }
    }

    /// Under the lock: takes a P that wants an M, for `m`, which has none. The claim on spinning of
    /// that P, if any, passes to `m`.
    pub(crate) fn take_p_wanting_m(
        &self,
        central: &mut Central,
        m: &'static M,
    ) -> Option<&'static P> {
        let (p, spinning) = central.pop_p_wanting_m()?;
        m.spinning.set(spinning);
        Some(p)
    }

    /// Under the lock, if no more threads can be started or the runtime stops: takes Ps out of the
    /// list of those that want an M, except `kept` of them. Returns whether there were any.
    pub(crate) fn return_ps_wanting_m(&self, central: &mut Central, kept: u32) -> bool {
        let mut returned = false;
        while central.ps_wanting_m_count > kept
            && let Some((p, spinning)) = central.pop_p_wanting_m()
        {
            self.return_p(central, p, Claim::from_flag(spinning)).deliver();
            returned = true;
        }
        returned
    }

    /// Under the lock: gives up the start of a thread for `p`. An M that became idle meanwhile gets
    /// `p` and its claim. Otherwise the goroutines of `p` go to the global queues, for the Ms that
    /// run. If one of the goroutines there is locked to an M, that M sleeps until it is handed a P,
    /// maybe because no other M is left: it gets `p`. Otherwise `p` becomes idle or retires.
    #[cold]
    fn return_p(&self, central: &mut Central, p: &'static P, claim: Claim) -> PendingWakes {
        let retires = p.flags.load(Ordering::Relaxed) & flag::RETIRE != 0;
        if !retires && let Some(wakes) = self.assign_to_idle_m(central, p, claim) {
            return wakes;
        }
        self.spill(central, p);
        let locked = if retires { None } else { self.pop_locked_goroutine(central) };
        if let Some((g, m)) = locked {
            self.begin_slice(p);
            central.hand_to_locked_m(m, g, p);
        } else if retires {
            self.collect_carriers(central, p);
            self.retire_unused(p);
        } else {
            self.put_idle_p(central, p);
        }
        // A submitter may have relied on the claim. To wake an M now would be in vain: none is idle.
        if claim.is_spinning() && self.idle.stop_spinning() {
            central.is_check_due = true;
        }
        // Without a goroutine for it, a locked M checks whether it must serve the timers.
        let m = locked.map(|(_, m)| m).or(central.locked_ms);
        PendingWakes { m, helper: None, sysmon: locked.map(|_| self.sysmon) }
    }

    /// Hands off the P of `m`, if it has one, because the thread of `m` ends or its runtime stops.
    pub(crate) fn hand_off_p_of(&self, m: &'static M) {
        let Some(p) = m.p.take() else { return };
        let mut central = self.central.lock();
        let wakes = self.hand_off(&mut central, p);
        drop(central);
        wakes.deliver();
    }
}
