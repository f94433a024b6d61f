//! `set_procs`: more or fewer Ps while everything runs.
//!
//! No stop of the world. MmapVec adds idle Ps. Shrinking takes idle Ps at once and asks the others
//! (`flag::RETIRE`); the M that holds one answers at its next scheduling step ([`Sched::retire`]): its
//! queue goes to the head of the global queue, its caches to the depots, and it takes an idle P or
//! parks. Until then the goroutine that runs there goes on.
//!
//! Invariant 1: `procs`, `made`, RETIRE flags and the status `Retired` change under the scheduler's
//! lock.
//!
//! Rejected: Go's stop of the world. It needs every thread to stop, and then all of them to be woken;
//! here only those stop that lose their P.

use crate::sched::m::Rt;
use crate::sched::p::{P, PStatus, flag};
use crate::sched::queues::central::Central;
use crate::sched::{MAX_PROCS, Sched};
use std::io;
use std::sync::atomic::Ordering;

impl Sched {
    /// Makes it `n` Ps, clamped to 1..=1024; returns how many there were. The caller then wakes
    /// threads ([`Sched::wake_after_push`]).
    pub(crate) fn resize(&self, n: usize) -> io::Result<usize> {
        let n = n.clamp(1, MAX_PROCS) as u32;
        // Memory before the lock is taken (sched/mod.rs, rule 2).
        let first = self.made();
        let mut fresh = Vec::new();
        for id in first..n {
            match P::new(id) {
                Ok(p) => fresh.push(Some(Box::new(p))),
                Err(e) => {
                    discard(fresh);
                    return Err(e);
                }
            }
        }
        let mut central = self.central.lock();
        // Another call may have made some meanwhile: then ours with these ids are left over.
        for id in self.made()..n {
            let p = fresh[(id - first) as usize].take().expect("made above");
            self.ps[id as usize].store(Box::into_raw(p), Ordering::Release);
            self.made.store(id + 1, Ordering::Release);
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
        Ok(before as usize)
    }

    fn retire_idle_ps(&self, central: &mut Central, from: u32) {
        self.filter_idle_ps(central, |p| {
            let keep = p.id < from;
            if !keep {
                self.retire_unused(p);
            }
            keep
        });
    }

    /// Under the lock: retires a P that no M holds.
    pub(crate) fn retire_unused(&self, p: &'static P) {
        p.flags.fetch_and(!flag::RETIRE, Ordering::Relaxed);
        // SAFETY: nobody holds it, and nobody can take it: we have the lock.
        unsafe { p.local() }.give_all_back();
        self.move_timers(p);
        p.set_status(PStatus::Retired);
    }

    /// To a P that stays: number 0 never retires.
    fn move_timers(&self, p: &P) {
        if let Some(first) = self.p(0) {
            p.timers.move_to(&first.timers);
        }
    }

    /// The holder of `p` gives it up. False: it may keep it after all.
    #[cold]
    pub(crate) fn retire(&self, rt: Rt, p: &'static P) -> bool {
        let m = rt.m();
        let mut central = self.central.lock();
        self.spill(&mut central, p);
        if p.flags.fetch_and(!flag::RETIRE, Ordering::Relaxed) & flag::RETIRE == 0 {
            // `set_procs` changed its mind; what we moved comes back by itself.
            return false;
        }
        // SAFETY: we own the P, and hold no other borrow of its local state.
        unsafe { p.local() }.give_all_back();
        self.move_timers(p);
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

/// Ps that were made and never used still hold their credits.
fn discard(unused: Vec<Option<Box<P>>>) {
    for p in unused.into_iter().flatten() {
        // SAFETY: never shared.
        unsafe { p.local() }.give_all_back();
    }
}

/// Completes a [`Sched::resize`] on a goroutine of the same runtime: wakes Ms for new Ps, and gives
/// up the caller's P if it was asked to.
pub(crate) fn after_resize(rt: Rt) {
    rt.sched().wake_after_push();
    let is_asked = rt.p().flags.load(Ordering::Relaxed) != 0;
    if is_asked { super::switch::yield_now(rt).leave() } else { rt.leave() }
}
