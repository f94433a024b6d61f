//! The lists of Ps and Ms that do not run a goroutine. All are stacks, guarded by the scheduler's
//! lock.
//!
//! | list | members |
//! |---|---|
//! | idle Ps | no M owns the P, and its queue is empty |
//! | idle Ms | no P, no goroutine: the M's thread sleeps in its parker |
//! | Ps wanting an M | the P needs an M, and none is idle: the helper thread starts one |
//! | locked Ms | the M's thread sleeps until the goroutine that is locked to it is runnable |
//!
//! One idle M may be in none of them: the idle poller (`netpoll/idle_poller.rs`).
//!
//! Because the lists are stacks, the M and the P that were used last are used next: their caches
//! are warm. Ms that are not needed stay at the bottom until their threads end
//! (`search/wait_for_p.rs`).

use crate::sched::Sched;
use crate::sched::g::G;
use crate::sched::m::M;
use crate::sched::p::{P, PStatus};
use crate::sched::queues::assign::Claim;
use crate::sched::queues::central::Central;
use crate::shim::fence_after_rmw;
use std::sync::atomic::Ordering;

impl Central {
    pub(crate) fn push_idle_m(&mut self, m: &'static M) {
        m.listed.set(true);
        m.idle_link.set(self.idle_ms.replace(m));
        self.idle_m_count += 1;
    }

    pub(super) fn pop_idle_m(&mut self) -> Option<&'static M> {
        let m = self.idle_ms?;
        m.listed.set(false);
        self.idle_ms = m.idle_link.take();
        self.idle_m_count -= 1;
        Some(m)
    }

    /// Takes `m` out of the list of idle Ms. Returns false if it was not in the list: maybe a waker
    /// has taken it out and handed it a P.
    pub(crate) fn remove_idle_m(&mut self, m: &'static M) -> bool {
        let listed = unlink(&mut self.idle_ms, m);
        self.idle_m_count -= u32::from(listed);
        listed
    }

    /// Returns the length of the list of idle Ms. The idle poller is not in it.
    pub(crate) fn idle_m_count(&self) -> u32 {
        self.idle_m_count
    }

    /// Adds `m`, which waits for the goroutine that is locked to it.
    pub(crate) fn push_locked_m(&mut self, m: &'static M) {
        m.listed.set(true);
        m.idle_link.set(self.locked_ms.replace(m));
    }

    /// Takes `m` out of the list of locked Ms, if it is in the list.
    pub(crate) fn remove_locked_m(&mut self, m: &'static M) {
        unlink(&mut self.locked_ms, m);
    }

    /// Hands `g`, which is locked to `m`, and `p` to `m`. The caller wakes `m` after unlocking.
    pub(crate) fn hand_to_locked_m(&mut self, m: &'static M, g: &'static G, p: &'static P) {
        self.remove_locked_m(m);
        m.chosen.set(Some(g));
        m.handed.set(Some(p));
        // In a shutdown the goroutine gets a new grace.
        m.grace_until.set(0);
    }

    /// Takes out an M that waits for a P: an idle one, the idle poller, or a locked one. Returns
    /// None if no M is left.
    pub(crate) fn pop_any_m(&mut self) -> Option<&'static M> {
        self.pop_idle_m().or_else(|| self.idle_poller.take()).or_else(|| {
            let m = self.locked_ms?;
            self.remove_locked_m(m);
            Some(m)
        })
    }

    /// Adds `p` to the Ps wanting an M. `claim` goes with it.
    pub(super) fn push_p_wanting_m(&mut self, p: &'static P, claim: Claim) {
        p.wants_spinning_m.set(claim == Claim::Spinning);
        p.idle_link.set(self.ps_wanting_m.replace(p));
        self.ps_wanting_m_count += 1;
    }

    /// Takes out a P that wants an M. The boolean is true if a claim on spinning goes with the P.
    pub(crate) fn pop_p_wanting_m(&mut self) -> Option<(&'static P, bool)> {
        let p = self.ps_wanting_m?;
        self.ps_wanting_m = p.idle_link.take();
        self.ps_wanting_m_count -= 1;
        Some((p, p.wants_spinning_m.get()))
    }

    /// Returns the number of spare Ms: the idle ones and the idle poller. They can take a P at
    /// once.
    pub(crate) fn spares(&self) -> u32 {
        self.idle_m_count + u32::from(self.idle_poller.is_some())
    }
}

/// Takes `m` out of a list that is linked through `idle_link`. Returns whether it was in the list.
fn unlink(list: &mut Option<&'static M>, m: &'static M) -> bool {
    let mut rest = list.take();
    let (mut kept, mut found): (Option<&'static M>, bool) = (None, false);
    while let Some(other) = rest {
        rest = other.idle_link.take();
        if std::ptr::eq(other, m) {
            m.listed.set(false);
            found = true;
        } else {
            other.idle_link.set(kept.replace(other));
        }
    }
    // `kept` is in reverse order; this reverses it again.
    while let Some(other) = kept {
        kept = other.idle_link.take();
        other.idle_link.set(list.replace(other));
    }
    found
}

impl Sched {
    /// Under the lock: adds `p`, which no M owns and whose queue is empty, to the idle Ps.
    pub(crate) fn put_idle_p(&self, central: &mut Central, p: &'static P) {
        debug_assert!(p.is_empty());
        self.collect_carriers(central, p);
        p.set_status(PStatus::Idle);
        p.idle_link.set(central.idle_ps.replace(p));
        self.idle.p_idle();
    }

    /// Under the lock: takes the idle P that was used last, and wakes sysmon if it sleeps.
    pub(crate) fn take_idle_p(&self, central: &mut Central) -> Option<&'static P> {
        let p = self.take_idle_p_unwatched(central)?;
        self.sysmon.wake_if_asleep();
        Some(p)
    }

    /// As [`Sched::take_idle_p`], but the caller must wake sysmon if it sleeps.
    pub(super) fn take_idle_p_unwatched(&self, central: &mut Central) -> Option<&'static P> {
        let p = central.idle_ps?;
        central.idle_ps = p.idle_link.take();
        // A full barrier: sysmon sees that not all Ps are idle, or this thread sees that sysmon
        // sleeps.
        self.idle.p_taken();
        fence_after_rmw();
        p.set_status(PStatus::Running);
        if self.sysmon.is_asleep() {
            // sysmon does not refresh it while it sleeps.
            self.refresh_coarse();
        }
        Some(p)
    }

    /// Under the lock: takes `wanted` if it is idle, or else any idle P.
    pub(crate) fn take_idle_p_or(
        &self,
        central: &mut Central,
        wanted: Option<&'static P>,
    ) -> Option<&'static P> {
        if let Some(p) = wanted.filter(|p| p.status() == PStatus::Idle) {
            self.move_to_front(central, p);
        }
        self.take_idle_p(central)
    }

    /// Makes `wanted` the first in the list of idle Ps, if it is in the list.
    fn move_to_front(&self, central: &mut Central, wanted: &'static P) {
        let mut found = false;
        self.filter_idle_ps(central, |p| {
            let is_wanted = std::ptr::eq(p, wanted);
            found |= is_wanted;
            !is_wanted
        });
        if found {
            wanted.idle_link.set(central.idle_ps.replace(wanted));
            self.idle.p_idle();
        }
    }

    /// Under the lock: takes every P out of the list of idle Ps for which `keep` returns false. The
    /// Ps that stay are in reverse order afterwards.
    pub(crate) fn filter_idle_ps(
        &self,
        central: &mut Central,
        mut keep: impl FnMut(&'static P) -> bool,
    ) {
        let mut rest = central.idle_ps.take();
        while let Some(p) = rest {
            rest = p.idle_link.take();
            if keep(p) {
                p.idle_link.set(central.idle_ps.replace(p));
            } else {
                self.idle.p_taken();
            }
        }
    }

    /// Under the lock: publishes the number of spare Ms after it has changed.
    pub(crate) fn publish_spares(&self, central: &Central) {
        self.spares.store(central.spares(), Ordering::Relaxed);
    }

    /// Returns whether no M is spare: then a P whose thread blocks must wait for a new thread.
    /// Reads without the lock.
    pub(crate) fn has_no_spare(&self) -> bool {
        self.spares.load(Ordering::Relaxed) == 0
    }

    /// Under the lock: returns whether the helper thread should start another thread. There should
    /// be one spare M for each P that wants an M, one for each goroutine that was stopped inside
    /// libc (up to a limit, `Sched::reserve`), and one more.
    pub(crate) fn wants_thread(&self, central: &Central) -> bool {
        central.spares() + central.starting <= central.ps_wanting_m_count + self.reserve()
    }

    /// Takes `m`, which has been idle for a long time, out of the list of idle Ms if there are more
    /// than needed: an M for each P, and a spare one. Returns true if it did so: then the thread of
    /// `m` ends.
    ///
    /// The spare one stays although the helper thread would start another when all Ps are in use:
    /// the kernel may refuse it then, and without a spare M goroutines in libc are hardly preempted.
    pub(crate) fn retire_spare(&self, m: &'static M) -> bool {
        let mut central = self.central.lock();
        let kept = self.procs() + 1;
        let enough = central.idle_m_count > kept && central.spares() > self.reserve() + 1;
        let removed = enough && central.remove_idle_m(m);
        self.publish_spares(&central);
        removed
    }
}
