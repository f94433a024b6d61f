//! The global queues: runnable goroutines that belong to no P.
//!
//! There are three, each first in, first out:
//!
//! | queue | goroutines | taken |
//! |---|---|---|
//! | `woken` | woken from outside, or back from a call that blocked | in turns with `fresh` |
//! | `fresh` | started outside | in turns with `woken` |
//! | `expired` | used up their time slice | when the other two are empty, and for fairness |
//!
//! What overflows or is spilled from a P's rings goes to the queue of the same name.
//!
//! `woken` and `fresh` are separate because there may be thousands of fresh goroutines, and a woken
//! one must not wait behind all of them. `expired` is separate so that a goroutine that was woken,
//! or whose descriptor became ready, never waits behind goroutines that compute. Expired goroutines
//! rotate among themselves. They do not starve: a P that takes a goroutine for fairness
//! (`search/find.rs`) takes from `expired` first.
//!
//! Invariant 1: `Sched::global_len` is the length of all three together, written under the lock.

use crate::sched::Sched;
use crate::sched::g::G;
use crate::sched::m::M;
use crate::sched::p::P;
use crate::sched::queues::central::Central;
use crate::sched::queues::runq::Overflow;
use crate::sched::runnable::{RunHead, RunList, Runnable};
use crate::shim::full_fence;
use std::sync::atomic::Ordering;

/// The most goroutines that one take moves to a P: half a ring, so that they always fit. Go's
/// number.
const GLOBAL_BATCH: usize = crate::shim::RING / 2;

/// See the head of the file.
pub(crate) struct GlobalQueues {
    pub(crate) fresh: RunList,
    woken: RunList,
    expired: RunList,
}

/// Which of the two queues that take turns is tried first.
#[derive(Clone, Copy)]
enum Turn {
    Woken,
    Fresh,
}

impl GlobalQueues {
    pub(super) const fn new() -> Self {
        GlobalQueues { fresh: RunList::new(), woken: RunList::new(), expired: RunList::new() }
    }

    pub(crate) fn lists(&self) -> [&RunList; 3] {
        [&self.fresh, &self.woken, &self.expired]
    }

    /// Takes a goroutine from the queue whose turn it is, or else from the other one.
    fn pop_turn(&mut self, turn: Turn) -> Option<Runnable> {
        let (first, then) = match turn {
            Turn::Woken => (&mut self.woken, &mut self.fresh),
            Turn::Fresh => (&mut self.fresh, &mut self.woken),
        };
        first.pop_front().or_else(|| then.pop_front())
    }
}

/// Returns whether a goroutine is locked to an M.
fn is_locked(item: Runnable) -> bool {
    item.goroutine().is_some_and(|g| g.locked.get().is_some())
}

impl Sched {
    fn publish_global_len(&self, central: &Central) {
        let global = &central.global;
        let len = global.fresh.len() + global.woken.len() + global.expired.len();
        // Release: a thread that reads 0 also sees where the goroutines went.
        self.global_len.store(len as u32, Ordering::Release);
    }

    /// Returns how many goroutines wait in the global queues. Reads without the lock.
    #[inline]
    pub(crate) fn global_len(&self) -> u32 {
        self.global_len.load(Ordering::Acquire)
    }

    /// Returns whether a goroutine waits in a global queue. Reads without the lock.
    #[inline]
    pub(crate) fn has_global(&self) -> bool {
        self.global_len() != 0
    }

    /// Appends to the queue of fresh goroutines. The caller then wakes an M.
    pub(crate) fn push_global(&self, g: impl Into<Runnable>) {
        let mut central = self.central.lock();
        central.global.fresh.push_back(g);
        self.publish_global_len(&central);
    }

    /// Appends to the queue of woken goroutines. The caller runs another one on this P.
    pub(crate) fn push_woken(&self, item: impl Into<Runnable>) {
        self.push_woken_locked(&mut self.central.lock(), item);
    }

    /// As [`Sched::push_woken`], under the lock.
    pub(crate) fn push_woken_locked(&self, central: &mut Central, item: impl Into<Runnable>) {
        central.global.woken.push_back(item);
        self.publish_global_len(central);
    }

    /// Takes the first carrier that used up its slice inside a poll.
    pub(crate) fn pop_preempted_carrier(&self) -> Option<&'static G> {
        let is_carrier = |item: Runnable| item.head().is_carrier();
        self.pop(|global| global.expired.remove_first(is_carrier))?.goroutine()
    }

    /// Appends to the queue of expired goroutines. The caller then wakes an M.
    pub(crate) fn push_expired(&self, g: impl Into<Runnable>) {
        let mut central = self.central.lock();
        central.global.expired.push_back(g);
        self.publish_global_len(&central);
    }

    /// Queues a goroutine that a plain thread or another runtime has woken, and wakes an M for it.
    pub(crate) fn push_woken_from_outside(&self, g: impl Into<Runnable>) {
        self.push_from_outside(|central| central.global.woken.push_back(g));
    }

    /// Queues a goroutine that a plain thread or another runtime has started, and wakes an M for
    /// it.
    pub(crate) fn push_fresh_from_outside(&self, g: impl Into<Runnable>) {
        self.push_from_outside(|central| central.global.fresh.push_back(g));
    }

    /// Calls `push`, which queues one goroutine, and wakes an M for it.
    ///
    /// As soon as the lock is released the goroutine may run and end, and the runtime may be
    /// dropped. So after that nothing of `self` is read; sysmon and the threads to wake are never
    /// freed.
    fn push_from_outside(&self, push: impl FnOnce(&mut Central)) {
        let sysmon = self.sysmon;
        let mut central = self.central.lock();
        push(&mut central);
        self.publish_global_len(&central);
        full_fence();
        let wakes = self.wake_locked(&mut central);
        let all_busy = self.idle.idle_ps() == 0;
        drop(central);
        wakes.deliver();
        if all_busy {
            sysmon.preempt_for_wakeup();
        }
    }

    /// Takes the goroutine that `choose` takes from the queues.
    fn pop(&self, choose: impl FnOnce(&mut GlobalQueues) -> Option<Runnable>) -> Option<Runnable> {
        let mut central = self.central.lock();
        let g = choose(&mut central.global);
        self.publish_global_len(&central);
        g
    }

    /// Takes one goroutine: a woken one, or else a fresh one.
    pub(crate) fn pop_global(&self) -> Option<Runnable> {
        self.pop(|global| global.pop_turn(Turn::Woken))
    }

    /// Takes one woken goroutine. For a P on which sysmon has preempted a goroutine to make room
    /// (`flag::WOKEN`).
    pub(crate) fn pop_woken(&self) -> Option<Runnable> {
        self.pop(|global| global.woken.pop_front())
    }

    /// Takes one expired goroutine, never more: each of them will probably run for a whole slice.
    pub(crate) fn pop_expired(&self) -> Option<Runnable> {
        self.pop(|global| global.expired.pop_front())
    }

    /// Takes one expired goroutine, or else a fresh one, or else a woken one.
    pub(crate) fn pop_expired_or_any(&self) -> Option<Runnable> {
        self.pop(|global| global.expired.pop_front().or_else(|| global.pop_turn(Turn::Fresh)))
    }

    /// Takes the first goroutine that was stopped inside libc or the loader.
    pub(crate) fn pop_stopped_in_libc(&self) -> Option<Runnable> {
        self.pop(|global| {
            global
                .expired
                .remove_first(|item| item.goroutine().is_some_and(|g| g.stopped_in_libc.get()))
        })
    }

    /// Under the lock: takes the first goroutine that is locked to an M; in a shutdown, the first one
    /// that must go on. Returns that M too.
    pub(super) fn pop_locked_goroutine(
        &self,
        central: &mut Central,
    ) -> Option<(&'static G, &'static M)> {
        let is_none_locked = self.locked_goroutines.load(Ordering::Relaxed) == 0;
        // A simulation decides by itself what runs.
        if is_none_locked || self.simulation.is_some() || self.is_drained() {
            return None;
        }
        let stopping = self.stopping.load(Ordering::Relaxed);
        let may_run = |item: Runnable| {
            is_locked(item) && (!stopping || item.goroutine().is_some_and(G::must_be_drained))
        };
        let GlobalQueues { fresh, woken, expired } = &mut central.global;
        let item =
            [woken, fresh, expired].into_iter().find_map(|list| list.remove_first(may_run))?;
        self.publish_global_len(central);
        let g = item.goroutine()?;
        Some((g, g.locked.get()?))
    }

    /// Returns whether a goroutine that is locked to an M waits in a global queue.
    pub(crate) fn has_locked_global(&self) -> bool {
        self.has_global()
            && self.central.lock().global.lists().into_iter().any(|list| list.any(is_locked))
    }

    /// Takes a fair share of the woken and fresh goroutines for `p`, whose queue is empty. Returns
    /// the first of them; the others are in the rings of `p`.
    pub(crate) fn take_global_share(
        &self,
        central: &mut Central,
        p: &'static P,
    ) -> Option<Runnable> {
        let global = &mut central.global;
        let n = fair_share(global.fresh.len() + global.woken.len(), self.procs() as usize);
        let first = global.pop_turn(Turn::Woken);
        for i in 1..n {
            let turn = if i.is_multiple_of(2) { Turn::Woken } else { Turn::Fresh };
            let Some(g) = global.pop_turn(turn) else { break };
            let pushed = p.ring_for(g).push_back(g.as_item()).is_ok();
            debug_assert!(pushed, "half a ring must fit into an empty one");
        }
        self.publish_global_len(central);
        first
    }

    /// Under the lock: moves everything in the queues of `p` to the heads of the global queues. The
    /// caller owns `p`, or no M does.
    pub(crate) fn spill(&self, central: &mut Central, p: &'static P) {
        let global = &mut central.global;
        for (queue, to) in [(&p.woken, &mut global.woken), (&p.runq, &mut global.fresh)] {
            let mut moved = RunList::new();
            while let Some(g) = queue.pop() {
                // SAFETY: what the queue holds came from `as_item`.
                moved.push_back(unsafe { Runnable::from_item(g) });
            }
            to.prepend(&mut moved);
        }
        self.publish_global_len(central);
    }

    /// Appends a full ring's older half, and `item`, which did not fit, to the global queue for
    /// goroutines like `item`, as one batch.
    #[cold]
    pub(crate) fn overflow_slow(&self, overflow: Overflow<'_, RunHead>, item: Runnable) {
        let mut batch = RunList::new();
        for g in overflow.chain([item.as_item()]) {
            // SAFETY: what the ring holds came from `as_item`.
            batch.push_back(unsafe { Runnable::from_item(g) });
        }
        let mut central = self.central.lock();
        let global = &mut central.global;
        let queue = if item.head().woken.get() { &mut global.woken } else { &mut global.fresh };
        queue.append(&mut batch);
        self.publish_global_len(&central);
    }
}

/// Returns `size / procs`, rounded up, at most a batch. Go takes one more if the division leaves no
/// remainder; here six goroutines on three Ps are two each.
fn fair_share(size: usize, procs: usize) -> usize {
    size.div_ceil(procs.max(1)).min(GLOBAL_BATCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn global_take_is_a_fair_share() {
        assert_eq!(fair_share(6, 3), 2);
        assert_eq!(fair_share(7, 3), 3);
        assert_eq!(fair_share(1, 16), 1);
        assert_eq!(fair_share(0, 2), 0);
        assert_eq!(fair_share(100_000, 1), GLOBAL_BATCH);
    }
}
