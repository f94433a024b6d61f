//! `set_procs`: more or fewer Ps while goroutines run.
//!
//! The world does not stop. Growing adds idle Ps. Shrinking retires idle Ps at once and sets
//! `flag::RETIRE` on Ps that are in use. The M that owns such a P retires it at its next scheduling
//! step ([`Sched::retire`]): the P's queues go to the heads of the global queues, its caches to the
//! central pools, its timers to P 0, and the M takes an idle P or parks. Until then the goroutine
//! on that M continues.
//!
//! Invariants:
//! 1. `procs`, `ps_made`, RETIRE flags and the status `Retired` change under the scheduler's lock.
//! 2. P 0 never retires.
//!
//! Rejected: Go's stop of the world, which stops every thread and then wakes all of them. Here only
//! Ms that lose their P stop.

use crate::sched::m::Rt;
use crate::sched::p::{P, PStatus, flag};
use crate::sched::queues::central::Central;
use crate::sched::record;
use crate::sched::{MAX_PROCS, Sched};
use std::io;
use std::sync::atomic::Ordering;

impl Sched {
    /// Sets the number of Ps to `n`, clamped to 1..=1024. Returns the previous number. The caller
    /// then wakes Ms ([`Sched::wake_after_push`]).
    pub(crate) fn resize(&self, n: usize) -> io::Result<usize> {
        // A simulation has one P.
        let most = if self.simulation.is_some() { 1 } else { MAX_PROCS };
        let n = n.clamp(1, most) as u32;
        // Memory is allocated before the lock is taken (sched/mod.rs, rule 2).
        let first = self.ps_made();
        let mut fresh = make_ps(first..n)?;
        let mut central = self.central.lock();
        // Another call may have added some of these Ps meanwhile: then their duplicates stay in
        // `fresh`.
        for id in self.ps_made()..n {
            let p = fresh[(id - first) as usize].take().expect("made above");
            // Release: pairs with the Acquire in `Sched::p`.
            self.ps[id as usize].store(Box::into_raw(p), Ordering::Release);
            self.ps_made.store(id + 1, Ordering::Release);
        }
        let before = self.procs.swap(n, Ordering::Relaxed);
        let stop = if self.stopping.load(Ordering::Relaxed) { flag::STOP } else { 0 };
        for p in self.all_ps() {
            if p.id >= n {
                if p.status() == PStatus::Running {
                    p.flags.fetch_or(flag::RETIRE, Ordering::Relaxed);
                }
            } else {
                p.flags.fetch_and(!flag::RETIRE, Ordering::Relaxed);
                p.flags.fetch_or(stop, Ordering::Relaxed);
                if p.status() == PStatus::Retired {
                    self.put_idle_p(&mut central, p);
                }
            }
        }
        self.retire_idle_ps(&mut central, n);
        drop(central);
        discard(fresh);
        self.record_new_ps();
        Ok(before as usize)
    }

    /// Retires the idle Ps with an id of at least `n`.
    fn retire_idle_ps(&self, central: &mut Central, n: u32) {
        self.filter_idle_ps(central, |p| {
            let keep = p.id < n;
            if !keep {
                self.retire_unused(p);
            }
            keep
        });
    }

    /// Under the lock: retires a P that no M owns, and whose carriers were collected.
    pub(crate) fn retire_unused(&self, p: &'static P) {
        p.flags.fetch_and(!flag::RETIRE, Ordering::Relaxed);
        // SAFETY: no M owns the P, and no M can take it, because the caller holds the lock.
        unsafe { p.local() }.drain();
        self.move_timers_to_p0(p);
        p.set_status(PStatus::Retired);
    }

    fn move_timers_to_p0(&self, p: &P) {
        if let Some(p0) = self.p(0) {
            p.timers.move_to(&p0.timers);
        }
    }

    /// By the owner of `p`, which was asked to retire it: retires `p` and takes an idle P, if there
    /// is one. Returns false if the owner keeps `p`, because `set_procs` was called again.
    #[cold]
    pub(crate) fn retire(&self, rt: Rt, p: &'static P) -> bool {
        let m = rt.m();
        let mut central = self.central.lock();
        self.spill(&mut central, p);
        if p.flags.fetch_and(!flag::RETIRE, Ordering::Relaxed) & flag::RETIRE == 0 {
            // The search takes the spilled goroutines back from the global queues.
            return false;
        }
        rt.with_local(|local| {
            local.drain();
            central.carriers.append(&mut local.carriers);
        });
        self.move_timers_to_p0(p);
        record::becomes_idle(p);
        p.set_status(PStatus::Retired);
        m.set_p(self.take_idle_p(&mut central));
        drop(central);
        if m.p.get().is_none() && m.spinning.replace(false) {
            self.idle.stop_spinning();
        }
        self.wake_after_push();
        true
    }
}

/// Makes Ps with these ids. They are `Some` until `resize` takes them out.
fn make_ps(ids: std::ops::Range<u32>) -> io::Result<Vec<Option<Box<P>>>> {
    let mut ps = Vec::new();
    for id in ids {
        match P::new(id) {
            Ok(p) => ps.push(Some(Box::new(p))),
            Err(e) => {
                discard(ps);
                return Err(e);
            }
        }
    }
    Ok(ps)
}

/// Frees Ps that were made and never used. They have credits for stacks, which are returned.
fn discard(unused: Vec<Option<Box<P>>>) {
    for p in unused.into_iter().flatten() {
        // SAFETY: this function owns the P, which was never shared.
        unsafe { p.local() }.drain();
    }
}

/// Completes a [`Sched::resize`] on a goroutine of the same runtime: wakes Ms for new Ps, and gives
/// up the caller's P if it was asked to and holds no `no_preempt` guard.
pub(crate) fn after_resize(rt: Rt) {
    rt.sched().wake_after_push();
    let may_stop = rt.g().no_preempt.get() == 0;
    if may_stop && rt.has_request() {
        crate::sched::switch::yield_now(rt).leave()
    } else {
        rt.leave()
    }
}
