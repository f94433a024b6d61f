//! Handoff: a thread that blocks loses its P, and comes back without one.
//!
//! # How a P is lost
//! - **Given away**: [`blocking`](crate::blocking) says that a call will take long ([`give_p_away`]).
//! - **Taken**: nobody said anything, but sysmon sees that a thread with a P sleeps in the kernel while
//!   there is work ([`Sched::take_from_blocked`]). Any call of any crate may do that.
//!
//! The goroutine stays on its thread and goes on, without a P, until its next call into the runtime
//! ([`come_back`]): there it gets its old P if that is idle, or another idle one, or one for which a
//! thread is just being started; else it queues globally and the thread parks. That is Go's way out of a
//! system call.
//!
//! # The look
//! The taker must be sure that the thread is outside the runtime, and will notice on its way in:
//!
//! ```text
//!   taker, under the scheduler's lock        the thread
//!   hold = DOUBTED                           in_runtime = 1
//!   full barrier                             hold == HELD?   (may be read before the store is seen)
//!   asleep in the kernel?                        no → wait for the lock, look again
//!   in_runtime == 0?
//!   yes, yes → hold = LOST, the P is ours
//! ```
//! The kernel's answer is the other barrier: a thread that slept *after* the mark was visible had stored
//! everything before, and reads the mark when it goes on. So nobody pays on the fast path, and no
//! `membarrier` is needed.
//!
//! # Strays
//! A goroutine that lost its P and just runs on (it computes now) is one too many on the CPUs. sysmon
//! looks after a few of these *strays* each time; one that uses the CPU is preempted like any other, and
//! queues. Those inside `blocking` are left alone: their P was given away on purpose.
//!
//! Invariant 1: `m.p` of an M whose `hold` is `LOST` is only a memory of its last P; the holder's entry in
//! that P is somebody else's.

use super::central::{Central, Wake};
use super::m::{DOUBTED, HELD, LOST, M, Rt};
use super::p::{P, flag};
use super::{Sched, switch};
use crate::shim::full_fence;
use crate::sys::clock::Nanos;
use crate::sys::probe::{self, ThreadProbe, ThreadState};
use std::cell::Cell;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

/// Strays that are looked at each time.
const STRAY_LOOKS: usize = 8;
/// How long a goroutine must have run before a brief sleep counts as blocked.
const LONG_RUN_NANOS: Nanos = 20_000_000;
/// How long an M may wait inside the allocator before its P is retaken, if one that waits there has lost its P already.
/// (With glibc one thread may keep an arena's lock for tens of milliseconds while it consolidates free blocks.)
const ALLOCATOR_PATIENCE_NANOS: Nanos = 100_000_000;
/// CPU time that a stray may use between two looks before it is called back.
const STRAY_CPU_NANOS: u64 = 500_000;

/// A place in the list of strays. Under the scheduler's lock.
pub(crate) struct Stray {
    next: Cell<Option<&'static M>>,
    prev: Cell<Option<&'static M>>,
    listed: Cell<bool>,
    cpu: Cell<u64>,
}

impl Stray {
    pub(crate) const fn new() -> Stray {
        Stray {
            next: Cell::new(None),
            prev: Cell::new(None),
            listed: Cell::new(false),
            cpu: Cell::new(0),
        }
    }
}

/// The strays, oldest look first.
pub(crate) struct Strays {
    first: Option<&'static M>,
    last: Option<&'static M>,
}

impl Strays {
    pub(crate) const fn new() -> Strays {
        Strays { first: None, last: None }
    }

    fn push(&mut self, m: &'static M) {
        m.stray.listed.set(true);
        m.stray.next.set(None);
        m.stray.prev.set(self.last);
        match self.last.replace(m) {
            Some(last) => last.stray.next.set(Some(m)),
            None => self.first = Some(m),
        }
    }

    fn any(&self, wanted: impl Fn(&M) -> bool) -> bool {
        std::iter::successors(self.first, |m| m.stray.next.get()).any(wanted)
    }

    fn remove(&mut self, m: &'static M) {
        if !m.stray.listed.replace(false) {
            return;
        }
        let (prev, next) = (m.stray.prev.take(), m.stray.next.take());
        match prev {
            Some(prev) => prev.stray.next.set(next),
            None => self.first = next,
        }
        match next {
            Some(next) => next.stray.prev.set(prev),
            None => self.last = prev,
        }
    }
}

/// On a goroutine that leaves the runtime for a call that will block: another thread gets its P.
pub(crate) fn give_p_away(rt: Rt) {
    let (m, sched, p) = (rt.m(), rt.sched(), rt.p());
    let mut central = sched.central.lock();
    let wake = sched.lose(&mut central, m, p);
    drop(central);
    wake.deliver();
    rt.leave_now();
}

/// The way back into the runtime for a thread whose P is doubted or lost.
#[cold]
pub(crate) fn come_back(rt: Rt) -> Rt {
    let (m, sched) = (rt.m(), rt.sched());
    let mut central = sched.central.lock();
    if !sched.found_again(&mut central, m) {
        return rt;
    }
    let last = m.p.take();
    let p = if sched.stopping.load(Ordering::Relaxed) {
        drop(central);
        sched.p_for_holder().map(|p| (p, false))
    } else {
        let idle = sched.take_idle_p_or(&mut central, last).map(|p| (p, false));
        let p = idle.or_else(|| central.pop_orphan());
        drop(central);
        p
    };
    if let Some((p, claim)) = p {
        m.set_p(Some(p));
        // What the P ran before is not this goroutine's slice.
        p.next_tick();
        super::locked::mark(m, p);
        // An orphan's claim was for someone who searches.
        if claim && sched.idle.stop_spinning() {
            sched.wake_after_push();
        }
        return rt;
    }
    switch::strand(rt)
}

/// On the thread's own context: as [`come_back`], but the thread goes and looks for a P itself.
#[cold]
pub(crate) fn note_loss(rt: Rt) {
    let (m, sched) = (rt.m(), rt.sched());
    let mut central = sched.central.lock();
    if sched.found_again(&mut central, m) {
        m.p.set(None);
    }
}

impl Sched {
    /// Under the lock: `m` is back in the runtime. False: its P was only doubted.
    fn found_again(&self, central: &mut Central, m: &'static M) -> bool {
        let lost = m.hold.load(Ordering::Relaxed) == LOST;
        m.hold.store(HELD, Ordering::Relaxed);
        if lost {
            central.strays.remove(m);
            self.astray.fetch_sub(1, Ordering::Relaxed);
        }
        lost
    }

    /// Under the lock: `m`, outside the runtime or on its way out, no longer has `p`.
    fn lose(&self, central: &mut Central, m: &'static M, p: &'static P) -> Wake {
        m.hold.store(LOST, Ordering::Relaxed);
        self.astray.fetch_add(1, Ordering::Relaxed);
        self.hand_off(central, p)
    }

    /// sysmon: takes `p` from the thread that holds it, if that sleeps in the kernel, outside the runtime.
    /// Returns what was seen. The goroutine there has run for `run_nanos`.
    pub(crate) fn take_from_blocked(
        &self,
        p: &'static P,
        probe: &mut ThreadProbe,
        run_nanos: Nanos,
    ) -> ThreadState {
        let mut central = self.central.lock();
        // Acquire: pairs with `set_p`.
        // SAFETY: null or an M; they are never freed.
        let Some(m) = (unsafe { p.holder.load(Ordering::Acquire).as_ref() }) else {
            return ThreadState::Unknown;
        };
        if m.in_runtime.load(Ordering::Relaxed) != 0 || m.hold.load(Ordering::Relaxed) != HELD {
            return ThreadState::Unknown;
        }
        m.hold.store(DOUBTED, Ordering::Relaxed);
        full_fence();
        let look = match probe.check(m.tid.load(Ordering::Relaxed)) {
            // A goroutine that sleeps briefly again and again is neither blocked nor found on a CPU.
            ThreadState::BrieflyBlocked(_) if run_nanos >= LONG_RUN_NANOS => ThreadState::Blocked,
            // Another M would wait for the allocator's lock as well.
            ThreadState::Blocked
                if m.in_allocator.load(Ordering::Relaxed)
                    && run_nanos < ALLOCATOR_PATIENCE_NANOS
                    && central.strays.any(|m| m.in_allocator.load(Ordering::Relaxed)) =>
            {
                ThreadState::BrieflyBlocked(LONG_RUN_NANOS)
            }
            look => look,
        };
        // Acquire: what it did inside the runtime is ours to see, if we take its P.
        if look != ThreadState::Blocked || m.in_runtime.load(Ordering::Acquire) != 0 {
            m.hold.store(HELD, Ordering::Relaxed);
            return if look == ThreadState::Blocked { ThreadState::Unknown } else { look };
        }
        // It may wait for something that a goroutine holds which was stopped: whoever gets the P begins with those.
        p.flags.fetch_or(flag::FAIR, Ordering::Relaxed);
        m.stray.cpu.set(probe::cpu_time(m.tid.load(Ordering::Relaxed)));
        central.strays.push(m);
        let wake = self.lose(&mut central, m, p);
        self.retakes.fetch_add(1, Ordering::Relaxed);
        drop(central);
        wake.deliver();
        ThreadState::Blocked
    }

    /// Under the lock: nobody holds `p` any more. If there is work, or nobody would notice new work, a
    /// thread gets it; else it is idle.
    pub(crate) fn hand_off(&self, central: &mut Central, p: &'static P) -> Wake {
        p.holder.store(null_mut(), Ordering::Relaxed);
        p.flags.fetch_and(!(flag::PREEMPT | flag::LOCKED), Ordering::Relaxed);
        if self.stopping.load(Ordering::Relaxed) {
            self.spill(central, p);
            if !self.is_stopped() && self.has_global() {
                return self.assign(central, p, false);
            }
            self.put_idle_p(central, p);
            return Wake::NOBODY;
        }
        if p.flags.load(Ordering::Relaxed) & flag::RETIRE != 0 {
            self.spill(central, p);
            self.retire_unused(p);
            return self.wake_locked(central);
        }
        let work = !p.is_empty() || self.has_global();
        if work {
            return self.assign(central, p, false);
        }
        // Nobody looks for work: someone may just be about to make some. Or nobody is awake for its timers, or
        // for somebody's descriptors.
        if (self.idle.idle_ps() == 0 && self.idle.spinning() == 0)
            || p.timers.next() < self.keeper_until.load(Ordering::Relaxed)
            || self.poller.has_unkept()
        {
            self.idle.start_spinning();
            return self.assign(central, p, true);
        }
        self.put_idle_p(central, p);
        Wake::NOBODY
    }

    /// Returns whether an M without a P is on a CPU.
    pub(crate) fn has_busy_strays(&self) -> bool {
        if self.astray.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let central = self.central.lock();
        let runs =
            |m: &M| ThreadProbe::new().check(m.tid.load(Ordering::Relaxed)) == ThreadState::Running;
        central.strays.any(runs)
    }

    /// sysmon: calls back those strays that compute. True: it should look again soon whether they came.
    /// In a runtime that ends they are stopped for ever (`stop.rs`).
    pub(crate) fn look_after_strays(&self, mut signal: impl FnMut(&M)) -> bool {
        if self.astray.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let mut called = false;
        let mut central = self.central.lock();
        let mut first_seen: Option<&'static M> = None;
        for _ in 0..STRAY_LOOKS {
            let Some(m) = central.strays.first else { break };
            if first_seen.is_some_and(|first| std::ptr::eq(first, m)) {
                break;
            }
            first_seen.get_or_insert(m);
            central.strays.remove(m);
            central.strays.push(m);
            let tid = m.tid.load(Ordering::Relaxed);
            let cpu = probe::cpu_time(tid);
            let used = cpu.saturating_sub(m.stray.cpu.get());
            if used <= STRAY_CPU_NANOS / 4 || m.in_runtime.load(Ordering::Relaxed) != 0 {
                continue;
            }
            // It may block again: then it is not disturbed, and begins anew.
            if matches!(
                ThreadProbe::new().check(tid),
                ThreadState::Blocked | ThreadState::BrieflyBlocked(_)
            ) {
                m.stray.cpu.set(cpu);
            } else if used > STRAY_CPU_NANOS {
                signal(m);
                called = true;
            }
        }
        called
    }
}
