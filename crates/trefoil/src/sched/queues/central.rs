//! What all Ms share, behind one lock: the global run queue, and the lists of idle Ps and Ms.
//!
//! The lock is taken rarely: a P's own queue serves it 60 times of 61.
//!
//! # The idle poller
//! An M without a P is in the list of idle Ms, or it is the **idle poller**: the one that sleeps only until
//! the earliest timer of all Ps, then takes an idle P and runs what is due. If goroutines wait for
//! descriptors, it sleeps in the poller. There is one as soon as an M goes idle while there are timers or
//! such goroutines. If no P is idle when a timer is due, those who run look at the timers themselves
//! (`switch.rs`), and so they do for descriptors.
//!
//! Who sets a new earliest timer hurries the idle poller; the two barriers are in [`Sched::enter_idle`] and
//! `timers.rs`.
//!
//! # Three global queues
//! Goroutines that were woken (`woken`) take turns with those that were started or spilled (`global`): there may be
//! thousands of the latter. Goroutines that used up their slice (`expired`) queue apart and rotate among themselves: one that was woken
//! does not stand behind them, nor does one whose descriptor became ready. So that nobody starves there, a look
//! for fairness (`find.rs`) begins with `expired`.
//!
//! # Waking
//! Under the lock it is decided who is woken, and he gets what he needs ([`Wake`]); the system call comes
//! after the lock. A P for which there is no idle thread is an *orphan* until the helper thread has started one.

use crate::sched::g::{G, GList};
use crate::sched::m::M;
use crate::sched::monitor::handoff::MsWithoutP;
use crate::sched::monitor::helper::Helper;
use crate::sched::monitor::sysmon::Sysmon;
use crate::sched::p::{P, PStatus};
use crate::sched::queues::runq::{Overflow, RunQueue};
use crate::sched::{Sched, p};
use crate::shim::full_fence;
use crate::sys::clock::{NEVER, Nanos};
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

/// The most one take from the global queue moves: half a ring, so that it always fits. Go's number.
const GLOBAL_BATCH: usize = crate::shim::RING / 2;

/// See the head of the file.
pub(crate) struct Central {
    pub(crate) global: GList,
    /// Woken from outside, or back from a call that blocked: before those in `global`, turn and turn about.
    woken: GList,
    pub(crate) expired: GList,
    pub(crate) without_p: MsWithoutP,
    /// Ps that wait for a new thread; those with a claim on spinning are marked.
    ps_wanting_m: Option<&'static P>,
    ps_wanting_m_count: u32,
    /// Ms that wait for their locked goroutine.
    locked_ms: Option<&'static M>,
    idle_ps: Option<&'static P>,
    idle_ms: Option<&'static M>,
    pub(crate) idle_m_count: u32,
    /// Threads that the helper thread has started and that are not here yet.
    pub(crate) starting: u32,
    idle_poller: Option<&'static M>,
}

impl Central {
    pub(crate) const fn new() -> Self {
        Central {
            global: GList::new(),
            woken: GList::new(),
            expired: GList::new(),
            without_p: MsWithoutP::new(),
            ps_wanting_m: None,
            ps_wanting_m_count: 0,
            locked_ms: None,
            idle_ps: None,
            idle_ms: None,
            idle_m_count: 0,
            starting: 0,
            idle_poller: None,
        }
    }

    /// The next of those that were woken, or else of the others.
    fn pop_next(&mut self, woken_first: bool) -> Option<&'static G> {
        let (first, then) = if woken_first {
            (&mut self.woken, &mut self.global)
        } else {
            (&mut self.global, &mut self.woken)
        };
        first.pop_front().or_else(|| then.pop_front())
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

    /// Whether `m` is the idle poller.
    pub(crate) fn is_idle_poller(&self, m: &M) -> bool {
        self.idle_poller.is_some_and(|keeper| std::ptr::eq(keeper, m))
    }

    /// Whether nobody is.
    pub(crate) fn has_no_idle_poller(&self) -> bool {
        self.idle_poller.is_none()
    }

    /// Every M that waits for a P, one after the other.
    pub(crate) fn pop_any_m(&mut self) -> Option<&'static M> {
        self.pop_idle_m().or_else(|| self.idle_poller.take()).or_else(|| {
            let m = self.locked_ms?;
            self.remove_locked_m(m);
            Some(m)
        })
    }

    /// `m` is expired of waiting: takes it out of the idle list. False: somebody has woken it.
    pub(crate) fn remove_idle_m(&mut self, m: &'static M) -> bool {
        let listed = unlink(&mut self.idle_ms, m);
        self.idle_m_count -= u32::from(listed);
        listed
    }

    /// `m` waits for its locked goroutine.
    pub(crate) fn push_locked_m(&mut self, m: &'static M) {
        m.listed.set(true);
        m.idle_link.set(self.locked_ms.replace(m));
    }

    /// It waits no longer, if it did.
    pub(crate) fn remove_locked_m(&mut self, m: &'static M) {
        unlink(&mut self.locked_ms, m);
    }

    /// `p` waits for a thread; a claim on spinning may go with it.
    fn push_p_wanting_m(&mut self, p: &'static P, spinning: bool) {
        p.wanted_m_spins.set(spinning);
        p.idle_link.set(self.ps_wanting_m.replace(p));
        self.ps_wanting_m_count += 1;
    }

    /// A P that waits for a thread, and whether a claim on spinning goes with it.
    pub(crate) fn pop_p_wanting_m(&mut self) -> Option<(&'static P, bool)> {
        let p = self.ps_wanting_m?;
        self.ps_wanting_m = p.idle_link.take();
        self.ps_wanting_m_count -= 1;
        Some((p, p.wanted_m_spins.get()))
    }

    pub(crate) fn has_ps_wanting_m(&self) -> bool {
        self.ps_wanting_m.is_some()
    }

    /// Threads that would take a P at once.
    pub(crate) fn spares(&self) -> u32 {
        self.idle_m_count + u32::from(self.idle_poller.is_some())
    }
}

/// Takes `m` out of a list through `idle_link`; whether it was in there.
fn unlink(list: &mut Option<&'static M>, m: &'static M) -> bool {
    let mut rest = list.take();
    let (mut kept, mut found): (Option<&'static M>, bool) = (None, false);
    while let Some(one) = rest {
        rest = one.idle_link.take();
        if std::ptr::eq(one, m) {
            m.listed.set(false);
            found = true;
        } else {
            // Reversed twice, the order is kept.
            one.idle_link.set(kept.replace(one));
        }
    }
    while let Some(one) = kept {
        kept = one.idle_link.take();
        one.idle_link.set(list.replace(one));
    }
    found
}

/// Who is to be woken, when the lock is given back, and in this order: a system call each, and the first is waited for.
/// None of them is ever freed.
#[must_use = "somebody waits for it"]
pub(crate) struct Wake {
    thread: Option<&'static M>,
    /// For another thread, if that was the last one to spare, or there was none.
    helper: Option<&'static Helper>,
    /// If it sleeps.
    sysmon: Option<&'static Sysmon>,
}

impl Wake {
    pub(crate) const NOBODY: Wake = Wake { thread: None, helper: None, sysmon: None };

    pub(crate) fn deliver(self) {
        if let Some(m) = self.thread {
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

impl Sched {
    /// Under the lock: `p` runs nothing and has an empty queue.
    pub(crate) fn put_idle_p(&self, central: &mut Central, p: &'static P) {
        debug_assert!(p.is_empty());
        p.set_status(PStatus::Idle);
        p.idle_link.set(central.idle_ps.replace(p));
        self.idle.p_idle();
    }

    /// Under the lock: an idle P, the most recently used.
    pub(crate) fn take_idle_p(&self, central: &mut Central) -> Option<&'static P> {
        let p = self.take_unwatched(central)?;
        self.sysmon.wake_if_asleep();
        Some(p)
    }

    /// The same; the caller then wakes sysmon.
    fn take_unwatched(&self, central: &mut Central) -> Option<&'static P> {
        let p = central.idle_ps?;
        central.idle_ps = p.idle_link.take();
        // A full barrier: sysmon sees that not all are idle, or we see that it sleeps.
        self.idle.p_taken();
        p.set_status(PStatus::Running);
        if self.sysmon.is_asleep() {
            self.refresh_coarse();
        }
        Some(p)
    }

    /// Under the lock: `wanted` if it is idle, else any idle P.
    pub(crate) fn take_idle_p_or(
        &self,
        central: &mut Central,
        wanted: Option<&'static P>,
    ) -> Option<&'static P> {
        if let Some(p) = wanted.filter(|p| p.status() == PStatus::Idle) {
            let mut first = None;
            self.filter_idle_ps(central, |other| {
                if std::ptr::eq(other, p) {
                    first = Some(p);
                }
                first.is_none() || !std::ptr::eq(other, p)
            });
            if let Some(p) = first {
                p.idle_link.set(central.idle_ps.replace(p));
                self.idle.p_idle();
            }
        }
        self.take_idle_p(central)
    }

    /// Under the lock: takes out of the list every idle P that `keep` does not want.
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

    /// Under the lock: `m`, without a P, becomes idle, or the idle poller. Returns until when it sleeps.
    pub(crate) fn enter_idle(&self, central: &mut Central, m: &'static M) -> Nanos {
        let until = self.enter_idle_list(central, m);
        self.publish_spares(central);
        until
    }

    fn enter_idle_list(&self, central: &mut Central, m: &'static M) -> Nanos {
        let keeps = (central.idle_poller.is_none() || central.is_idle_poller(m)) && !m.listed.get();
        let first = self.next_timer();
        let polls = self.poller.has_waiters() && self.idle.idle_ps() != 0;
        if keeps && (first != NEVER || polls) {
            central.idle_poller = Some(m);
            self.idle_poller_until.store(first, Ordering::Relaxed);
            // Pairs with the barrier in `arrange_timer_wakeup`: a timer that is set now is seen here, or who
            // sets it sees the time above.
            full_fence();
            let first = self.next_timer();
            self.idle_poller_until.store(first, Ordering::Relaxed);
            return first;
        }
        if keeps {
            self.clear_idle_poller(central);
        }
        if !m.listed.get() {
            central.push_idle_m(m);
        }
        // It may have lain down when nobody waited for a descriptor, or before this timer.
        if let Some(keeper) = central.idle_poller
            && (first < self.idle_poller_until.load(Ordering::Relaxed)
                || (polls && (!keeper.polling.is_occupied() || self.poller.has_unwatched_shard())))
        {
            keeper.wake();
        }
        NEVER
    }

    /// Whether no thread is to spare: a P whose thread blocks would have to wait for a new one. For a look without
    /// the lock.
    pub(crate) fn has_no_spare(&self) -> bool {
        self.spares.load(Ordering::Relaxed) == 0
    }

    /// Under the lock: whether there should be more threads: one for each P that waits for one, one in reserve for each
    /// goroutine that was stopped inside a library, and one to spare.
    pub(crate) fn wants_thread(&self, central: &Central) -> bool {
        central.spares() + central.starting <= central.ps_wanting_m_count + self.reserve()
    }

    /// Under the lock: idle threads came or went.
    pub(crate) fn publish_spares(&self, central: &Central) {
        self.spares.store(central.spares(), Ordering::Relaxed);
    }

    /// `m` was idle for long. True: it is out of the list, and to end.
    pub(crate) fn dismiss_spare(&self, m: &'static M) -> bool {
        let mut central = self.central.lock();
        let enough = central.idle_m_count > self.procs() && central.spares() > self.reserve() + 1;
        let out = enough && central.remove_idle_m(m);
        self.publish_spares(&central);
        out
    }

    /// Under the lock: nobody keeps the timers for now.
    pub(crate) fn clear_idle_poller(&self, central: &mut Central) -> Option<&'static M> {
        self.idle_poller_until.store(NEVER, Ordering::Relaxed);
        let keeper = central.idle_poller.take();
        self.publish_spares(central);
        keeper
    }

    /// Whether an idle poller knows of every timer, and of every shard that somebody waits in. For a look without the lock.
    pub(crate) fn is_kept(&self) -> bool {
        self.next_timer() >= self.idle_poller_until.load(Ordering::Relaxed)
            && !self.poller.has_unwatched_shard()
    }

    /// Whether there is an idle P, and something that an idle poller would wait for.
    pub(crate) fn needs_idle_poller(&self) -> bool {
        self.idle.idle_ps() != 0 && (self.poller.has_waiters() || self.next_timer() != NEVER)
    }

    /// A first goroutine waits for a descriptor: somebody should sleep in the poller.
    pub(crate) fn want_poller(&self) {
        full_fence();
        if self.idle.idle_ps() != 0 {
            self.wake_idle_poller();
        }
    }

    /// There is a timer earlier than the idle poller knows: it, or somebody, must see to it.
    #[cold]
    pub(crate) fn wake_idle_poller(&self) {
        let keeper = self.central.lock().idle_poller;
        match keeper {
            // Never freed, and a note too many does no harm.
            Some(keeper) => keeper.wake(),
            None => self.wake(),
        }
    }

    fn publish_global_len(&self, central: &Central) {
        let len = central.global.len() + central.woken.len() + central.expired.len();
        // Release: who sees the queue empty sees where its goroutines went.
        self.global_len.store(len as u32, Ordering::Release);
    }

    /// How many goroutines wait in the global queues. A look without the lock.
    #[inline]
    pub(crate) fn global_len(&self) -> u32 {
        self.global_len.load(Ordering::Acquire)
    }

    /// Whether a goroutine waits in a global queue.
    #[inline]
    pub(crate) fn has_global(&self) -> bool {
        self.global_len() != 0
    }

    /// Appends to the global queue. The caller then wakes someone.
    pub(crate) fn push_global(&self, g: &'static G) {
        let mut central = self.central.lock();
        central.global.push_back(g);
        self.publish_global_len(&central);
    }

    /// Appends to the queue of those that used up their slice. The caller then wakes someone.
    pub(crate) fn push_expired(&self, g: &'static G) {
        let mut central = self.central.lock();
        central.expired.push_back(g);
        self.publish_global_len(&central);
    }

    /// A goroutine of this runtime was made runnable by somebody else: a plain thread, another runtime; or was just
    /// started there (`fresh`). It may run, end, and the runtime be dropped as soon as the lock is given back.
    pub(crate) fn push_from_outside(&self, g: &'static G, fresh: bool) {
        let sysmon = self.sysmon;
        let mut central = self.central.lock();
        let queue = if fresh { &mut central.global } else { &mut central.woken };
        queue.push_back(g);
        self.publish_global_len(&central);
        full_fence();
        let wake = self.wake_locked(&mut central);
        let all_busy = self.idle.idle_ps() == 0;
        drop(central);
        wake.deliver();
        if all_busy {
            sysmon.preempt_for_wakeup();
        }
    }

    /// One goroutine, as `choose` says.
    fn pop(&self, choose: impl FnOnce(&mut Central) -> Option<&'static G>) -> Option<&'static G> {
        let mut central = self.central.lock();
        let g = choose(&mut central);
        self.publish_global_len(&central);
        g
    }

    /// Exactly one: the fairness look of every 61st tick.
    pub(crate) fn pop_global(&self) -> Option<&'static G> {
        self.pop(|central| central.pop_next(true))
    }

    /// One of those that were woken: somebody was stopped for it.
    pub(crate) fn pop_woken(&self) -> Option<&'static G> {
        self.pop(|central| central.woken.pop_front())
    }

    /// One of those who used up their slice: each of them is a long turn.
    pub(crate) fn pop_expired(&self) -> Option<&'static G> {
        self.pop(|central| central.expired.pop_front())
    }

    /// The first of those that were stopped inside a library.
    pub(crate) fn pop_inside(&self) -> Option<&'static G> {
        self.pop(|central| central.expired.remove_first(|g| g.stopped_in_libc.get()))
    }

    /// Exactly one: sysmon's look for fairness, which begins with those that used up their slice. `alone`: there is
    /// no local work, so the others are taken by the share.
    pub(crate) fn pop_fairly(&self, alone: bool) -> Option<&'static G> {
        self.pop(|central| {
            let expired = central.expired.pop_front();
            expired.or_else(|| if alone { None } else { central.pop_next(false) })
        })
    }

    /// A fair share of the global queue for `p`, whose queue is empty: one to run, the rest behind.
    pub(crate) fn take_global_share(
        &self,
        central: &mut Central,
        p: &'static P,
    ) -> Option<&'static G> {
        let n = fair_share(central.global.len() + central.woken.len(), self.procs() as usize);
        let first = central.pop_next(true);
        for i in 1..n {
            let Some(g) = central.pop_next(i.is_multiple_of(2)) else { break };
            let pushed = p.ring_for(g).push_back(NonNull::from(g)).is_ok();
            debug_assert!(pushed, "half a ring fits an empty one");
        }
        self.publish_global_len(central);
        first
    }

    /// Under the lock: everything in the queue of `p`, which nobody else holds, goes to the head of the
    /// global queue.
    pub(crate) fn spill(&self, central: &mut Central, p: &'static P) {
        for queue in [&p.woken, &p.runq] {
            let mut moved = GList::new();
            while let Some(g) = queue.pop() {
                // SAFETY: taken from a queue, so ours; Gs are never freed.
                moved.push_back(unsafe { &*g.as_ptr() });
            }
            if std::ptr::eq(queue, &p.woken) {
                central.woken.prepend(&mut moved);
            } else {
                central.global.prepend(&mut moved);
            }
        }
        self.publish_global_len(central);
    }

    /// A full ring's older half and `item`, which did not fit: to the tail of the global queue for goroutines like
    /// `item`, as one batch.
    #[cold]
    pub(crate) fn overflow_slow(&self, overflow: Overflow<'_, G>, item: &'static G) {
        let mut batch = GList::new();
        for g in overflow.chain([NonNull::from(item)]) {
            // SAFETY: consumed from the ring, so ours; Gs are never freed.
            batch.push_back(unsafe { &*g.as_ptr() });
        }
        let mut central = self.central.lock();
        let queue = if item.woken.get() { &mut central.woken } else { &mut central.global };
        queue.append(&mut batch);
        self.publish_global_len(&central);
    }

    /// Work was published (with a full barrier): if a P is idle and nobody looks, get one going.
    #[inline]
    pub(crate) fn wake(&self) {
        if self.idle.claim_wake() {
            self.wake_slow();
        }
    }

    /// For a caller whose publication was no full barrier.
    #[inline]
    pub(crate) fn wake_after_push(&self) {
        full_fence();
        self.wake();
    }

    #[cold]
    fn wake_slow(&self) {
        let mut central = self.central.lock();
        let wake = self.use_claim(&mut central);
        drop(central);
        wake.deliver();
    }

    /// [`Sched::wake`], under the lock.
    pub(crate) fn wake_locked(&self, central: &mut Central) -> Wake {
        if self.idle.claim_wake() { self.use_claim(central) } else { Wake::NOBODY }
    }

    /// Under the lock: an idle P for the claim that the caller holds, and a thread for the P.
    fn use_claim(&self, central: &mut Central) -> Wake {
        if !self.is_drained()
            && let Some(p) = self.take_unwatched(central)
        {
            return Wake { sysmon: Some(self.sysmon), ..self.assign(central, p, true) };
        }
        self.idle.stop_spinning();
        Wake::NOBODY
    }

    /// Under the lock: a thread for `p`, which nobody holds. `spinning`: a claim goes with it.
    pub(crate) fn assign(&self, central: &mut Central, p: &'static P, spinning: bool) -> Wake {
        if let Some(wake) = self.assign_idle(central, p, spinning) {
            return wake;
        }
        central.push_p_wanting_m(p, spinning);
        Wake { helper: Some(self.helper), ..Wake::NOBODY }
    }

    fn assign_idle(&self, central: &mut Central, p: &'static P, spinning: bool) -> Option<Wake> {
        let m = central.pop_idle_m().or_else(|| self.clear_idle_poller(central))?;
        m.spinning.set(spinning);
        m.handed.set(Some(p));
        self.publish_spares(central);
        let helper = self.wants_thread(central).then_some(self.helper);
        Some(Wake { thread: Some(m), helper, sysmon: None })
    }

    /// Under the lock: `m`, without a P, takes one that waits for a thread.
    pub(crate) fn take_p_wanting_m(
        &self,
        central: &mut Central,
        m: &'static M,
    ) -> Option<&'static P> {
        let (p, spinning) = central.pop_p_wanting_m()?;
        m.spinning.set(spinning);
        Some(p)
    }

    /// Under the lock: no thread can be had for those that wait.
    pub(crate) fn return_ps_wanting_m(&self, central: &mut Central) {
        while let Some((p, spinning)) = central.pop_p_wanting_m() {
            self.return_p(central, p, spinning).deliver();
        }
    }

    /// The thread of `m` ends: its P is nobody's.
    pub(crate) fn leave_p(&self, m: &'static M) {
        let Some(p) = m.p.take() else { return };
        let mut central = self.central.lock();
        let wake = self.hand_off(&mut central, p);
        drop(central);
        wake.deliver();
    }

    /// Under the lock: no thread could be started for `p`, and the claim that may go with it. Someone who went
    /// idle meanwhile gets both; or those that run will do the work.
    #[cold]
    pub(crate) fn return_p(&self, central: &mut Central, p: &'static P, spinning: bool) -> Wake {
        if p.flags.load(Ordering::Relaxed) & p::flag::RETIRE == 0
            && let Some(wake) = self.assign_idle(central, p, spinning)
        {
            return wake;
        }
        self.spill(central, p);
        if p.flags.load(Ordering::Relaxed) & p::flag::RETIRE != 0 {
            self.retire_unused(p);
        } else {
            self.put_idle_p(central, p);
        }
        if spinning {
            self.idle.stop_spinning();
        }
        Wake::NOBODY
    }
}

/// `size / procs`, rounded up, at most a batch. Go takes one more when it divides evenly; with six
/// waiting and three Ps this is two.
fn fair_share(size: usize, procs: usize) -> usize {
    size.div_ceil(procs.max(1)).min(GLOBAL_BATCH)
}

impl p::P {
    /// The ring for a goroutine that is neither the next one to run nor has used up its slice.
    #[inline]
    pub(crate) fn ring_for(&self, g: &G) -> &RunQueue<G> {
        if g.woken.get() { &self.woken } else { &self.runq }
    }

    /// Owner: appends to a ring; a full one spills half to the global queue.
    #[inline]
    pub(crate) fn push_back(&self, sched: &Sched, g: &'static G) {
        if let Err(overflow) = self.ring_for(g).push_back(NonNull::from(g)) {
            p::bump(&self.counters.overflows, 1);
            sched.overflow_slow(overflow, g);
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
