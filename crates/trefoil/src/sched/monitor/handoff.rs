//! Handoff: a thread that blocks loses its P, and comes back without one.
//!
//! # How a P is lost
//! - **Given away**: [`blocking`](crate::blocking) says that a call will take long ([`give_p_away`]).
//! - **Taken**: nobody said anything, but sysmon sees that a thread with a P sleeps in the kernel while
//!   there is work ([`Sched::take_from_blocked`]). Any call of any crate may do that.
//!
//! The goroutine stays on its thread and goes on, without a P, until its next call into the runtime
//! ([`reacquire_p`]): there it gets its old P if that is idle, or another idle one, or one for which a
//! thread is just being started; else it queues globally and the thread parks. That is Go's way out of a
//! system call.
//!
//! # The look
//! The taker must be sure that the thread is outside the runtime, and will notice on its way in:
//!
//! ```text
//!   taker, under the scheduler's lock        the thread
//!   hold = PROBING                           in_runtime = 1
//!   full barrier                             hold == OWNED?   (may be read before the store is seen)
//!   asleep in the kernel?                        no → wait for the lock, look again
//!   in_runtime == 0?
//!   yes, yes → hold = RETAKEN, the P is ours
//! ```
//! The kernel's answer is the other barrier: a thread that slept *after* the mark was visible had stored
//! everything before, and reads the mark when it goes on. So nobody pays on the fast path, and no
//! `membarrier` is needed.
//!
//! # MsWithoutP
//! A goroutine that lost its P and just runs on (it computes now) is one too many on the CPUs. sysmon
//! looks after a few of these *strays* each time; one that uses the CPU is preempted like any other, and
//! queues. Those inside `blocking` are left alone: their P was given away on purpose.
//!
//! Invariant 1: `m.p` of an M whose `hold` is `RETAKEN` is only a memory of its last P; the holder's entry in
//! that P is somebody else's.

use crate::sched::m::{M, OWNED, OwnContext, PROBING, RETAKEN, Rt};
use crate::sched::p::{P, flag};
use crate::sched::queues::assign::PendingWakes;
use crate::sched::queues::central::Central;
use crate::sched::{Sched, switch};
use crate::shim::full_fence;
use crate::sys::clock::Nanos;
use crate::sys::probe::{self, Look, Probe};
use std::cell::Cell;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

/// MsWithoutP that are looked at each time.
const PROBES_PER_ROUND: usize = 8;
/// How long a goroutine must have run before a brief sleep counts as blocked.
const LONG_RUN_NANOS: Nanos = 20_000_000;
/// How long an M may wait inside the allocator before its P is retaken, if one that waits there has lost its P already.
/// (With glibc one thread may keep an arena's lock for tens of milliseconds while it consolidates free blocks.)
const ALLOCATOR_PATIENCE_NANOS: Nanos = 100_000_000;
/// CPU time that a stray may use between two looks before it is called back.
const CPU_WITHOUT_P_NANOS: u64 = 500_000;

/// A place in the list of strays. Under the scheduler's lock.
pub(crate) struct WithoutP {
    next: Cell<Option<&'static M>>,
    prev: Cell<Option<&'static M>>,
    listed: Cell<bool>,
    cpu: Cell<u64>,
}

impl WithoutP {
    pub(crate) const fn new() -> WithoutP {
        WithoutP {
            next: Cell::new(None),
            prev: Cell::new(None),
            listed: Cell::new(false),
            cpu: Cell::new(0),
        }
    }
}

/// The strays, oldest look first.
pub(crate) struct MsWithoutP {
    first: Option<&'static M>,
    last: Option<&'static M>,
}

impl MsWithoutP {
    pub(crate) const fn new() -> MsWithoutP {
        MsWithoutP { first: None, last: None }
    }

    fn push(&mut self, m: &'static M) {
        m.without_p.listed.set(true);
        m.without_p.next.set(None);
        m.without_p.prev.set(self.last);
        match self.last.replace(m) {
            Some(last) => last.without_p.next.set(Some(m)),
            None => self.first = Some(m),
        }
    }

    fn any(&self, wanted: impl Fn(&M) -> bool) -> bool {
        std::iter::successors(self.first, |m| m.without_p.next.get()).any(wanted)
    }

    fn remove(&mut self, m: &'static M) {
        if !m.without_p.listed.replace(false) {
            return;
        }
        let (prev, next) = (m.without_p.prev.take(), m.without_p.next.take());
        match prev {
            Some(prev) => prev.without_p.next.set(next),
            None => self.first = next,
        }
        match next {
            Some(next) => next.without_p.prev.set(prev),
            None => self.last = prev,
        }
    }
}

/// On a goroutine that leaves the runtime for a call that will block: another thread gets its P.
pub(crate) fn give_p_away(rt: Rt) {
    let (m, sched, p) = (rt.m(), rt.sched(), rt.p());
    let mut central = sched.central.lock();
    let wake = sched.release_p(&mut central, m, p);
    drop(central);
    wake.deliver();
    rt.leave_without_yield();
}

/// The way back into the runtime for a thread whose P is doubted or lost.
#[cold]
pub(crate) fn reacquire_p(rt: Rt) -> Rt {
    let (m, sched) = (rt.m(), rt.sched());
    let mut central = sched.central.lock();
    if !sched.clear_retaken(&mut central, m) {
        return rt;
    }
    let last = m.p.take();
    let p = if sched.stopping.load(Ordering::Relaxed) {
        drop(central);
        sched.p_for_holder().map(|p| (p, false))
    } else {
        let idle = sched.take_idle_p_or(&mut central, last).map(|p| (p, false));
        let p = idle.or_else(|| central.pop_p_wanting_m());
        drop(central);
        p
    };
    if let Some((p, claim)) = p {
        m.set_p(Some(p));
        // What the P ran before is not this goroutine's slice.
        p.begin_slice();
        crate::sched::goroutine::locked::mark(m, p);
        // An orphan's claim was for someone who searches.
        if claim && sched.idle.stop_spinning() {
            sched.wake_after_push();
        }
        return rt;
    }
    switch::requeue_without_p(rt)
}

/// On the thread's own context: as [`reacquire_p`], but the thread goes and looks for a P itself.
#[cold]
pub(crate) fn ack_retake(rt: OwnContext) {
    let (m, sched) = (rt.m(), rt.sched());
    let mut central = sched.central.lock();
    if sched.clear_retaken(&mut central, m) {
        m.p.set(None);
    }
}

impl Sched {
    /// Under the lock: `m` is back in the runtime. False: its P was only doubted.
    fn clear_retaken(&self, central: &mut Central, m: &'static M) -> bool {
        let lost = m.hold.load(Ordering::Relaxed) == RETAKEN;
        m.hold.store(OWNED, Ordering::Relaxed);
        if lost {
            central.without_p.remove(m);
            self.ms_without_p.fetch_sub(1, Ordering::Relaxed);
        }
        lost
    }

    /// Under the lock: `m`, outside the runtime or on its way out, no longer has `p`.
    fn release_p(&self, central: &mut Central, m: &'static M, p: &'static P) -> PendingWakes {
        m.hold.store(RETAKEN, Ordering::Relaxed);
        self.ms_without_p.fetch_add(1, Ordering::Relaxed);
        self.hand_off(central, p)
    }

    /// sysmon: takes `p` from the thread that holds it, if that sleeps in the kernel, outside the runtime.
    /// Returns what was seen. The goroutine there has run for `run_nanos`.
    pub(crate) fn take_from_blocked(
        &self,
        p: &'static P,
        probe: &mut Probe,
        run_nanos: Nanos,
    ) -> Look {
        let mut central = self.central.lock();
        // Acquire: pairs with `set_p`.
        // SAFETY: null or an M; they are never freed.
        let Some(m) = (unsafe { p.holder.load(Ordering::Acquire).as_ref() }) else {
            return Look::Unknown;
        };
        if m.in_runtime.load(Ordering::Relaxed) != 0 || m.hold.load(Ordering::Relaxed) != OWNED {
            return Look::Unknown;
        }
        m.hold.store(PROBING, Ordering::Relaxed);
        full_fence();
        let look = match probe.look(m.tid.load(Ordering::Relaxed)) {
            // A goroutine that sleeps briefly again and again is neither blocked nor found on a CPU.
            Look::Briefly(_) if run_nanos >= LONG_RUN_NANOS => Look::Blocked,
            // Another M would wait for the allocator's lock as well.
            Look::Blocked
                if m.in_allocator.load(Ordering::Relaxed)
                    && run_nanos < ALLOCATOR_PATIENCE_NANOS
                    && central.without_p.any(|m| m.in_allocator.load(Ordering::Relaxed)) =>
            {
                Look::Briefly(LONG_RUN_NANOS)
            }
            look => look,
        };
        // Acquire: what it did inside the runtime is ours to see, if we take its P.
        if look != Look::Blocked || m.in_runtime.load(Ordering::Acquire) != 0 {
            m.hold.store(OWNED, Ordering::Relaxed);
            return if look == Look::Blocked { Look::Unknown } else { look };
        }
        // It may wait for something that a goroutine holds which was stopped: whoever gets the P begins with those.
        p.flags.fetch_or(flag::FAIR, Ordering::Relaxed);
        m.without_p.cpu.set(probe::cpu_time(m.tid.load(Ordering::Relaxed)));
        central.without_p.push(m);
        let wake = self.release_p(&mut central, m, p);
        self.retakes.fetch_add(1, Ordering::Relaxed);
        drop(central);
        wake.deliver();
        Look::Blocked
    }

    /// Under the lock: nobody holds `p` any more. If there is work, or nobody would notice new work, a
    /// thread gets it; else it is idle.
    pub(crate) fn hand_off(&self, central: &mut Central, p: &'static P) -> PendingWakes {
        p.holder.store(null_mut(), Ordering::Relaxed);
        p.flags.fetch_and(!(flag::PREEMPT | flag::LOCKED), Ordering::Relaxed);
        if self.stopping.load(Ordering::Relaxed) {
            self.spill(central, p);
            if !self.is_stopped() && self.has_global() {
                return self.assign(central, p);
            }
            self.put_idle_p(central, p);
            return PendingWakes::NONE;
        }
        if p.flags.load(Ordering::Relaxed) & flag::RETIRE != 0 {
            self.spill(central, p);
            self.retire_unused(p);
            return self.wake_locked(central);
        }
        let work = !p.is_empty() || self.has_global();
        if work {
            return self.assign(central, p);
        }
        // Nobody looks for work: someone may just be about to make some. Or nobody is awake for its timers, or
        // for somebody's descriptors.
        if (self.idle.idle_ps() == 0 && self.idle.spinning() == 0)
            || p.timers.next() < self.idle_poller_until.load(Ordering::Relaxed)
            || self.poller.has_unwatched_shard()
        {
            self.idle.start_spinning();
            return self.assign_spinning(central, p);
        }
        self.put_idle_p(central, p);
        PendingWakes::NONE
    }

    /// Returns whether an M without a P is on a CPU.
    pub(crate) fn has_computing_m_without_p(&self) -> bool {
        if self.ms_without_p.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let central = self.central.lock();
        let runs = |m: &M| Probe::new().look(m.tid.load(Ordering::Relaxed)) == Look::Running;
        central.without_p.any(runs)
    }

    /// sysmon: calls back those strays that compute. True: it should look again soon whether they came.
    /// In a runtime that ends they are stopped for ever (`stop.rs`).
    pub(crate) fn preempt_ms_without_p(&self, mut signal: impl FnMut(&M)) -> bool {
        if self.ms_without_p.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let mut called = false;
        let mut central = self.central.lock();
        let mut first_seen: Option<&'static M> = None;
        for _ in 0..PROBES_PER_ROUND {
            let Some(m) = central.without_p.first else { break };
            if first_seen.is_some_and(|first| std::ptr::eq(first, m)) {
                break;
            }
            first_seen.get_or_insert(m);
            central.without_p.remove(m);
            central.without_p.push(m);
            let tid = m.tid.load(Ordering::Relaxed);
            let cpu = probe::cpu_time(tid);
            let used = cpu.saturating_sub(m.without_p.cpu.get());
            if used <= CPU_WITHOUT_P_NANOS / 4 || m.in_runtime.load(Ordering::Relaxed) != 0 {
                continue;
            }
            // It may block again: then it is not disturbed, and begins anew.
            if matches!(Probe::new().look(tid), Look::Blocked | Look::Briefly(_)) {
                m.without_p.cpu.set(cpu);
            } else if used > CPU_WITHOUT_P_NANOS {
                signal(m);
                called = true;
            }
        }
        called
    }
}
