//! What all Ms share, behind one lock: the global run queue, and the lists of idle Ps and Ms.
//!
//! The lock is taken rarely: a P's own queue serves it 60 times of 61.
//!
//! # The keeper
//! An M without a P is in the list of idle Ms, or it is the **keeper**: the one that sleeps only until
//! the earliest timer of all Ps, then takes an idle P and runs what is due. There is one as soon as an M
//! goes idle while timers are set. If no P is idle when a timer is due, those who run look at the
//! timers themselves (`switch.rs`).
//!
//! Who sets a new earliest timer hurries the keeper; the two barriers are in [`Sched::lie_down`] and
//! `timers.rs`.

use super::g::{G, GList};
use super::m::{M, Rt};
use super::p::{P, PStatus};
use super::runq::Overflow;
use super::{Sched, p};
use crate::shim::full_fence;
use crate::sys::clock::{NEVER, Nanos};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The most one take from the global queue moves: half a ring, so that it always fits. Go's number.
const GLOBAL_BATCH: usize = crate::shim::RING / 2;

/// See the head of the file.
pub(crate) struct Central {
    pub(crate) global: GList,
    idle_ps: Option<&'static P>,
    idle_ms: Option<&'static M>,
    pub(crate) idle_m_count: u32,
    keeper: Option<&'static M>,
}

impl Central {
    pub(crate) const fn new() -> Self {
        Central {
            global: GList::new(),
            idle_ps: None,
            idle_ms: None,
            idle_m_count: 0,
            keeper: None,
        }
    }

    pub(crate) fn push_idle_m(&mut self, m: &'static M) {
        m.listed.set(true);
        m.idle_link.set(self.idle_ms.replace(m));
        self.idle_m_count += 1;
    }

    fn pop_idle_m(&mut self) -> Option<&'static M> {
        let m = self.idle_ms?;
        m.listed.set(false);
        self.idle_ms = m.idle_link.take();
        self.idle_m_count -= 1;
        Some(m)
    }

    /// Whether `m` is the keeper.
    pub(crate) fn keeps(&self, m: &M) -> bool {
        self.keeper.is_some_and(|keeper| std::ptr::eq(keeper, m))
    }

    /// Every M without a P, one after the other.
    pub(crate) fn pop_any_m(&mut self) -> Option<&'static M> {
        self.pop_idle_m().or_else(|| self.keeper.take())
    }
}

impl Sched {
    /// Under the lock: `p` runs nothing and has an empty queue.
    pub(crate) fn put_idle_p(&self, central: &mut Central, p: &'static P) {
        debug_assert!(p.runq.is_empty());
        p.set_status(PStatus::Idle);
        p.idle_link.set(central.idle_ps.replace(p));
        self.idle.p_idle();
    }

    /// Under the lock: an idle P, the most recently used.
    pub(crate) fn take_idle_p(&self, central: &mut Central) -> Option<&'static P> {
        let p = central.idle_ps?;
        central.idle_ps = p.idle_link.take();
        // A full barrier: sysmon sees that not all are idle, or we see that it sleeps.
        self.idle.p_taken();
        p.set_status(PStatus::Running);
        if self.sysmon.wake_if_asleep() {
            self.refresh_coarse();
        }
        Some(p)
    }

    /// Under the lock: takes out of the list every idle P that `keep` does not want.
    pub(crate) fn filter_idle_ps(&self, central: &mut Central, keep: impl Fn(&'static P) -> bool) {
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

    /// Under the lock: `m`, without a P, becomes idle, or the keeper. Returns until when it sleeps.
    pub(crate) fn lie_down(&self, central: &mut Central, m: &'static M) -> Nanos {
        let keeps = (central.keeper.is_none() || central.keeps(m)) && !m.listed.get();
        let first = self.next_timer();
        if keeps && first != NEVER {
            central.keeper = Some(m);
            self.keeper_until.store(first, Ordering::Relaxed);
            // Pairs with the barrier in `see_to_timer`: a timer that is set now is seen here, or who
            // sets it sees the time above.
            full_fence();
            let first = self.next_timer();
            self.keeper_until.store(first, Ordering::Relaxed);
            return first;
        }
        if keeps {
            self.dismiss_keeper(central);
        }
        if !m.listed.get() {
            central.push_idle_m(m);
        }
        if let Some(keeper) = central.keeper
            && first < self.keeper_until.load(Ordering::Relaxed)
        {
            keeper.parker.unpark();
        }
        NEVER
    }

    /// Under the lock: nobody keeps the timers for now.
    pub(crate) fn dismiss_keeper(&self, central: &mut Central) -> Option<&'static M> {
        self.keeper_until.store(NEVER, Ordering::Relaxed);
        central.keeper.take()
    }

    /// There is a timer earlier than the keeper knows: it, or somebody, must see to it.
    #[cold]
    pub(crate) fn hurry_keeper(&self, here: Option<Rt>) {
        let keeper = self.central.lock().keeper;
        match keeper {
            // Never freed, and a note too many does no harm.
            Some(keeper) => keeper.parker.unpark(),
            None => self.wake(here),
        }
    }

    fn publish_global_len(&self, central: &Central) {
        // Release: who sees the queue empty sees where its goroutines went.
        self.global_len.store(central.global.len() as u32, Ordering::Release);
    }

    pub(crate) fn has_global(&self) -> bool {
        self.global_len.load(Ordering::Acquire) != 0
    }

    /// Appends to the global queue. The caller then wakes someone.
    pub(crate) fn push_global(&self, g: &'static G) {
        let mut central = self.central.lock();
        central.global.push_back(g);
        self.publish_global_len(&central);
    }

    /// Appends a list to the global queue; `front`: before everything else.
    pub(crate) fn push_global_list(&self, central: &mut Central, list: &mut GList, front: bool) {
        if front {
            central.global.prepend(list);
        } else {
            central.global.append(list);
        }
        self.publish_global_len(central);
    }

    /// Exactly one: the fairness look of every 61st tick.
    pub(crate) fn pop_global(&self) -> Option<&'static G> {
        let mut central = self.central.lock();
        let g = central.global.pop_front();
        self.publish_global_len(&central);
        g
    }

    /// A fair share of the global queue for `p`, whose queue is empty: one to run, the rest behind.
    pub(crate) fn take_global_share(
        &self,
        central: &mut Central,
        p: &'static P,
    ) -> Option<&'static G> {
        let n = fair_share(central.global.len(), self.procs() as usize);
        let first = central.global.pop_front()?;
        for _ in 1..n {
            let Some(g) = central.global.pop_front() else { break };
            let pushed = p.runq.push_back(NonNull::from(g)).is_ok();
            debug_assert!(pushed, "half a ring fits an empty one");
        }
        self.publish_global_len(central);
        Some(first)
    }

    /// A full ring's older half and the one that did not fit: to the global tail, as one batch.
    #[cold]
    pub(crate) fn overflow_slow(&self, overflow: Overflow<'_, G>, item: NonNull<G>) {
        let mut batch = GList::new();
        for g in overflow.chain([item]) {
            // SAFETY: consumed from the ring, so ours; Gs are never freed.
            batch.push_back(unsafe { &*g.as_ptr() });
        }
        self.push_global_list(&mut self.central.lock(), &mut batch, false);
    }

    /// Work was published (with a full barrier): if a P is idle and nobody looks, get one going.
    #[inline]
    pub(crate) fn wake(&self, rt: Option<Rt>) {
        if self.idle.claim_wake() {
            self.wake_slow(rt);
        }
    }

    /// For a caller whose publication was no full barrier.
    #[inline]
    pub(crate) fn wake_after_push(&self, rt: Option<Rt>) {
        full_fence();
        self.wake(rt);
    }

    #[cold]
    fn wake_slow(&self, rt: Option<Rt>) {
        let mut central = self.central.lock();
        if self.stopping.load(Ordering::Relaxed) {
            self.idle.stop_spinning();
            return;
        }
        let Some(p) = self.take_idle_p(&mut central) else {
            self.idle.stop_spinning();
            return;
        };
        let m = central.pop_idle_m().or_else(|| self.dismiss_keeper(&mut central));
        if let Some(m) = m {
            m.spinning.set(true);
            m.handed.set(Some(p));
            drop(central);
            m.parker.unpark();
            return;
        }
        match self.admit_thread() {
            Ok(id) => {
                drop(central);
                self.start_thread_slow(rt, id, p);
            }
            Err(_) => self.return_p(&mut central, p),
        }
    }

    fn start_thread_slow(&self, rt: Option<Rt>, id: u32, p: &'static P) {
        // SAFETY: every Sched lives in an Arc, made in `start`; the caller keeps it alive.
        let this = unsafe {
            Arc::increment_strong_count(std::ptr::from_ref(self));
            Arc::from_raw(std::ptr::from_ref(self))
        };
        let start = || {
            if super::m::M::start(&this, id, p, true).is_err() {
                this.return_p(&mut this.central.lock(), p);
            }
            drop(this);
        };
        match rt {
            Some(rt) => rt.on_thread_stack(start),
            None => start(),
        }
    }

    /// Under the lock: no thread could be started for `p` and the claim that goes with it. Someone who
    /// went idle meanwhile gets both; or those that run will do the work.
    #[cold]
    fn return_p(&self, central: &mut Central, p: &'static P) {
        if p.flags.load(Ordering::Relaxed) & p::flag::RETIRE != 0 {
            self.retire_unused(p);
        } else if let Some(m) = central.pop_idle_m().or_else(|| self.dismiss_keeper(central)) {
            m.spinning.set(true);
            m.handed.set(Some(p));
            m.parker.unpark();
            return;
        } else {
            self.put_idle_p(central, p);
        }
        self.idle.stop_spinning();
    }
}

/// `size / procs`, rounded up, at most a batch. Go takes one more when it divides evenly; with six
/// waiting and three Ps this is two.
fn fair_share(size: usize, procs: usize) -> usize {
    size.div_ceil(procs.max(1)).min(GLOBAL_BATCH)
}

impl p::P {
    /// Owner: appends to the local queue; a full one spills half to the global queue.
    #[inline]
    pub(crate) fn push_back(&self, sched: &Sched, g: &'static G) {
        if let Err(overflow) = self.runq.push_back(NonNull::from(g)) {
            p::bump(&self.counters.overflows, 1);
            sched.overflow_slow(overflow, NonNull::from(g));
        }
    }

    /// Owner: to run next; who was next goes to the tail. A full barrier.
    #[inline]
    pub(crate) fn push_next(&self, sched: &Sched, g: &'static G) {
        if let Some(displaced) = self.runq.push_next(NonNull::from(g)) {
            // SAFETY: taken out of the queue, so ours; Gs are never freed.
            self.push_back(sched, unsafe { &*displaced.as_ptr() });
            // The swap was a barrier only for the new one: a thief may take that, be not the last
            // spinner, and the last one overlook the displaced.
            full_fence();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn m13_global_take_is_a_fair_share() {
        assert_eq!(fair_share(6, 3), 2);
        assert_eq!(fair_share(7, 3), 3);
        assert_eq!(fair_share(1, 16), 1);
        assert_eq!(fair_share(0, 2), 0);
        assert_eq!(fair_share(100_000, 1), GLOBAL_BATCH);
    }
}
