//! Handoff: an M that blocks loses its P, and goes on without one.
//!
//! # How an M loses its P
//! - **Released**: [`blocking`](fn@crate::blocking) announces that a call will take long
//!   ([`release_p_before_blocking`]).
//! - **Retaken**: without an announcement, sysmon finds that an M with a P sleeps in the kernel
//!   while there is work ([`Sched::retake_from_blocked`]). Any call of any crate may block.
//!
//! The goroutine stays on its M and continues, without a P, until its next call into the runtime
//! ([`reacquire_p`]). There it gets its old P if that is idle, or another idle P, or a P for which
//! an M is just being started. Otherwise the goroutine enters the global queue and the M parks. Go
//! does the same when a system call returns.
//!
//! # The probe
//! sysmon must be sure that the M is outside the runtime, and that it will notice the loss when it
//! enters the runtime:
//!
//! ```text
//!   sysmon, under the scheduler's lock       the M
//!   hold = PROBING                           in_runtime = 1
//!   full barrier                             hold == OWNED?
//!   asleep in the kernel?                        no → wait for the lock, read again
//!   in_runtime == 0?
//!   yes, yes → hold = RETAKEN, sysmon has the P
//! ```
//! There is no barrier between the M's two steps, so it may read `hold` before others see
//! `in_runtime`.
//! The kernel's answer is the other barrier: if the thread slept *after* `PROBING` was visible, it
//! had stored everything before, and reads `PROBING` or `RETAKEN` when it goes on. So the fast path
//! pays nothing, and no `membarrier` is needed.
//!
//! # Ms without a P
//! A goroutine that lost its P and computes again uses a CPU beyond the `procs` limit. In each of
//! its rounds sysmon checks a few *Ms without a P*. One that uses the CPU is preempted like any
//! other, and its goroutine enters the global queue. An M inside `blocking` is not in the list: it
//! released its P on purpose.
//!
//! Invariant 1: while `hold` of an M is `RETAKEN`, its `m.p` only remembers its last P. The M does
//! not own that P, and is not its `holder`.

use crate::sched::m::{EnteredRuntime, M, OWNED, OwnContext, PROBING, RETAKEN, Rt};
use crate::sched::p::{P, flag};
use crate::sched::queues::assign::PendingWakes;
use crate::sched::queues::central::Central;
use crate::sched::record;
use crate::sched::trigger::{Incident, Noticed};
use crate::sched::{Sched, switch};
use crate::shim::full_fence;
use crate::sys::clock::{NEVER, Nanos, now};
use crate::sys::probe::{self, ThreadProbe, ThreadState};
use std::cell::Cell;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Ms without a P that sysmon checks per round.
const PROBES_PER_ROUND: usize = 8;
/// How long a goroutine must have run before a brief sleep counts as blocked.
const LONG_RUN_NANOS: Nanos = 20_000_000;
/// How long an M may wait inside the allocator before its P is retaken, if another M that waits
/// there has lost its P already. (With glibc one thread may hold an arena's lock for tens of
/// milliseconds while it consolidates free blocks.)
const ALLOCATOR_WAIT_NANOS: Nanos = 100_000_000;
/// CPU time that an M without a P may use, since a check last found it blocked, before it is
/// preempted.
const CPU_WITHOUT_P_NANOS: u64 = 500_000;
/// No M was counted as spinning for a P: the flag that `Central::pop_p_wanting_m` returns.
const NOT_SPINNING: bool = false;

/// An M's links in [`MsWithoutP`]. Under the scheduler's lock.
pub(crate) struct WithoutP {
    next: Cell<Option<&'static M>>,
    prev: Cell<Option<&'static M>>,
    listed: Cell<bool>,
    /// The thread's CPU time at the last check that found it blocked. For sysmon, without the lock.
    cpu: AtomicU64,
    /// When the M lost its P.
    since: Cell<Nanos>,
    /// It blocks unannounced, and nobody has noticed that it does so for long.
    is_unnoticed: Cell<bool>,
    /// sysmon has asked the goroutine to stop since the M lost its P. The signal handler reads it
    /// without the lock.
    asked_to_preempt: AtomicBool,
}

impl WithoutP {
    pub(crate) const fn new() -> WithoutP {
        WithoutP {
            next: Cell::new(None),
            prev: Cell::new(None),
            listed: Cell::new(false),
            cpu: AtomicU64::new(0),
            since: Cell::new(0),
            is_unnoticed: Cell::new(false),
            asked_to_preempt: AtomicBool::new(false),
        }
    }

    /// Returns whether sysmon has asked the goroutine, which runs without a P, to stop.
    /// Async-signal-safe.
    pub(crate) fn is_asked_to_preempt(&self) -> bool {
        self.asked_to_preempt.load(Ordering::Relaxed)
    }
}

/// The Ms that lost their P to sysmon. The M whose last check is longest ago is first.
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

    /// Returns whether `wanted` is true of any of them.
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

/// Hands off the P of a goroutine that is about to call a function that blocks, and leaves the
/// runtime.
pub(crate) fn release_p_before_blocking(rt: Rt) {
    let (m, sched, p) = (rt.m(), rt.sched(), rt.p());
    record::released(rt);
    let mut central = sched.central.lock();
    let wake = sched.release_p(&mut central, m, p);
    drop(central);
    wake.deliver();
    rt.leave_without_yield();
}

/// Enters the runtime on an M whose `hold` is not `OWNED`: waits for the end of the probe, and gets
/// a P if the M has lost its own. If no P is available, the goroutine queues and goes on later,
/// maybe on another M.
#[cold]
pub(crate) fn reacquire_p(entered: EnteredRuntime) -> Rt {
    try_reacquire_p(entered).unwrap_or_else(|| switch::requeue_without_p(entered))
}

/// Queues a goroutine that was preempted while `hold` of its M was not `OWNED`. If the M gets a P,
/// other goroutines run there first: the M may be the only one that is free for them.
pub(crate) fn preempt_without_p(entered: EnteredRuntime) -> Rt {
    match try_reacquire_p(entered) {
        Some(rt) => {
            // Otherwise the next search might begin with this goroutine, as stopped in libc.
            rt.p().last_was_out_of_turn.set(true);
            switch::preempt(rt)
        }
        None => switch::requeue_without_p(entered),
    }
}

/// As [`reacquire_p`], but returns None if no P is available.
fn try_reacquire_p(entered: EnteredRuntime) -> Option<Rt> {
    let (m, sched) = (entered.m(), entered.sched());
    let mut central = sched.central.lock();
    if !sched.clear_retaken(&mut central, m) {
        return Some(entered.into_rt());
    }
    let last = m.p.take();
    let p = if sched.stopping.load(Ordering::Relaxed) {
        drop(central);
        sched.p_for_lock_holder().map(|p| (p, NOT_SPINNING))
    } else {
        let idle = sched.take_idle_p_or(&mut central, last).map(|p| (p, NOT_SPINNING));
        let p = idle.or_else(|| central.pop_p_wanting_m());
        drop(central);
        p
    };
    let (p, counted_as_spinning) = p?;
    m.set_p(Some(p));
    // The time that the P ran before does not count for this goroutine's slice.
    p.begin_slice();
    crate::sched::goroutine::locked::mark(m, p);
    // An M that was to take the P and search was counted as spinning. This M does not search.
    if counted_as_spinning && sched.idle.stop_spinning() {
        sched.wake_after_push();
    }
    let rt = entered.into_rt();
    record::runs_here(rt);
    Some(rt)
}

/// As [`reacquire_p`], on the M's own context: the M then searches for a P itself.
#[cold]
pub(crate) fn ack_retake(rt: OwnContext) {
    let (m, sched) = (rt.m(), rt.sched());
    let mut central = sched.central.lock();
    if sched.clear_retaken(&mut central, m) {
        m.p.set(None);
    }
}

impl Sched {
    /// Sets `hold` of `m`, which is back in the runtime, to `OWNED`, under the lock. Returns
    /// whether the M had lost its P; false if it was only probed.
    fn clear_retaken(&self, central: &mut Central, m: &'static M) -> bool {
        let retaken = m.hold.load(Ordering::Relaxed) == RETAKEN;
        m.hold.store(OWNED, Ordering::Relaxed);
        if retaken {
            m.preempt_deferrals.store(0, Ordering::Relaxed);
            self.notice_if_blocked_long(m);
            central.without_p.remove(m);
            self.ms_without_p.fetch_sub(1, Ordering::Relaxed);
            self.time_without_p.add(now().saturating_sub(m.without_p.since.get()));
        }
        retaken
    }

    /// Separates `p` from `m`, which is outside the runtime or on its way out, and hands it off,
    /// under the lock.
    fn release_p(&self, central: &mut Central, m: &'static M, p: &'static P) -> PendingWakes {
        m.without_p.asked_to_preempt.store(false, Ordering::Relaxed);
        // Release: pairs with the Acquire in `preempt::check_request`, which then reads the above.
        m.hold.store(RETAKEN, Ordering::Release);
        m.without_p.since.set(now());
        m.without_p.is_unnoticed.set(false);
        // They were counted in a slice that ends here.
        m.preempt_deferrals.store(0, Ordering::Relaxed);
        self.ms_without_p.fetch_add(1, Ordering::Relaxed);
        self.hand_off(central, p)
    }

    /// Retakes `p` from its M, if that sleeps in the kernel outside the runtime. Returns what the
    /// probe found. The goroutine there has run for `run_nanos`. Only for sysmon.
    pub(crate) fn retake_from_blocked(
        &self,
        p: &'static P,
        probe: &mut ThreadProbe,
        run_nanos: Nanos,
    ) -> ThreadState {
        let mut central = self.central.lock();
        // Acquire: pairs with `set_p`.
        // SAFETY: null or an M; Ms are never freed.
        let Some(m) = (unsafe { p.holder.load(Ordering::Acquire).as_ref() }) else {
            return ThreadState::Unknown;
        };
        if m.in_runtime.load(Ordering::Relaxed) != 0 || m.hold.load(Ordering::Relaxed) != OWNED {
            return ThreadState::Unknown;
        }
        m.hold.store(PROBING, Ordering::Relaxed);
        full_fence();
        let found = judge(probe.check(m.tid.load(Ordering::Relaxed)), m, run_nanos, &central);
        // Acquire: if sysmon retakes the P, it sees what the M did inside the runtime.
        if found != ThreadState::Blocked || m.in_runtime.load(Ordering::Acquire) != 0 {
            m.hold.store(OWNED, Ordering::Relaxed);
            return if found == ThreadState::Blocked { ThreadState::Unknown } else { found };
        }
        // The M may wait for a lock that a preempted goroutine holds: the next M with this P begins
        // with the expired queue.
        p.flags.fetch_or(flag::FAIR, Ordering::Relaxed);
        m.without_p.cpu.store(probe::cpu_time(m.tid.load(Ordering::Relaxed)), Ordering::Relaxed);
        central.without_p.push(m);
        record::retaken(p, probe.blocking_call());
        let wake = self.release_p(&mut central, m, p);
        m.without_p.is_unnoticed.set(true);
        self.retakes.fetch_add(1, Ordering::Relaxed);
        drop(central);
        wake.deliver();
        ThreadState::Blocked
    }

    /// Notices, once, that `m` has been without its P for longer than a watch allows. Under the
    /// lock, while `hold` is `RETAKEN`.
    fn notice_if_blocked_long(&self, m: &'static M) {
        let limit = self.triggers.limit(Incident::Blocked);
        if limit == NEVER || !m.without_p.is_unnoticed.get() {
            return;
        }
        let nanos = now().saturating_sub(m.without_p.since.get());
        if nanos >= limit {
            m.without_p.is_unnoticed.set(false);
            // It does not switch while `hold` is `RETAKEN`.
            let id = m.current.get().map_or(0, record::id_of);
            self.notice(Incident::Blocked, Noticed { id, nanos });
        }
    }

    /// Passes on `p`, which no M has any more, under the lock. If there is work, or if no other M
    /// would notice new work, an M gets it. Otherwise it becomes idle.
    pub(crate) fn hand_off(&self, central: &mut Central, p: &'static P) -> PendingWakes {
        p.holder.store(null_mut(), Ordering::Relaxed);
        p.flags.fetch_and(!(flag::PREEMPT | flag::LOCKED), Ordering::Relaxed);
        if self.stopping.load(Ordering::Relaxed) {
            self.spill(central, p);
            if !self.is_drained() && self.has_global() {
                return self.assign(central, p);
            }
            self.put_idle_p(central, p);
            return PendingWakes::NONE;
        }
        if p.flags.load(Ordering::Relaxed) & flag::RETIRE != 0 {
            self.spill(central, p);
            self.collect_carriers(central, p);
            self.retire_unused(p);
            return self.wake_locked(central);
        }
        if !p.is_empty() || self.has_global() {
            return self.assign(central, p);
        }
        // Without an idle P and a spinning M, a goroutine that is about to make work would wake no
        // M.
        let unnoticed = self.idle.idle_ps() == 0 && self.idle.spinning() == 0;
        // No M would be awake in time for this P's timers, or no M polls a shard with waiters.
        if unnoticed
            || p.timers.next() < self.idle_poller_until.load(Ordering::Relaxed)
            || self.poller.has_unwatched_shard()
        {
            self.idle.start_spinning();
            return self.assign_spinning(central, p);
        }
        self.put_idle_p(central, p);
        // As at the end of a search: the last M that spun may have stopped since, and a thread with
        // new work or a new timer seen no idle P.
        self.idle.before_recheck();
        if self.has_work() || !self.is_idle_poller_current() {
            return self.wake_locked(central);
        }
        PendingWakes::NONE
    }

    /// Returns whether an M without a P is on a CPU.
    pub(crate) fn has_computing_m_without_p(&self) -> bool {
        if self.ms_without_p.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let central = self.central.lock();
        let runs =
            |m: &M| ThreadProbe::new().check(m.tid.load(Ordering::Relaxed)) == ThreadState::Running;
        central.without_p.any(runs)
    }

    /// Preempts, with `signal`, the Ms without a P that compute. Returns whether there were any:
    /// then sysmon should check again soon. In a runtime that shuts down their goroutines are
    /// stopped for ever (`shutdown.rs`). Only for sysmon.
    pub(crate) fn preempt_ms_without_p(&self, mut signal: impl FnMut(&M)) -> bool {
        if self.ms_without_p.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let mut signalled = false;
        for m in self.next_ms_without_p().into_iter().flatten() {
            // Without the lock: it takes system calls, and others need the lock.
            if !is_computing_without_p(m) {
                continue;
            }
            let central = self.central.lock();
            // It may have left the list, and another runtime may even use it by now.
            if central.without_p.any(|other| std::ptr::eq(other, m)) {
                m.without_p.asked_to_preempt.store(true, Ordering::Relaxed);
                signal(m);
                signalled = true;
            }
            drop(central);
        }
        signalled
    }

    /// Returns the Ms without a P whose last check is longest ago.
    fn next_ms_without_p(&self) -> [Option<&'static M>; PROBES_PER_ROUND] {
        let mut chosen: [Option<&'static M>; PROBES_PER_ROUND] = [None; PROBES_PER_ROUND];
        let mut central = self.central.lock();
        for i in 0..PROBES_PER_ROUND {
            let Some(m) = central.without_p.first else { break };
            if chosen[0].is_some_and(|first| std::ptr::eq(first, m)) {
                break;
            }
            chosen[i] = Some(m);
            central.without_p.remove(m);
            central.without_p.push(m);
            self.notice_if_blocked_long(m);
        }
        chosen
    }
}

/// Returns what the probe of `m`, whose goroutine has run for `run_nanos`, means for its P.
fn judge(found: ThreadState, m: &M, run_nanos: Nanos, central: &Central) -> ThreadState {
    match found {
        // A goroutine that sleeps briefly again and again would never be found blocked, nor on a
        // CPU.
        ThreadState::BrieflyBlocked(_) if run_nanos >= LONG_RUN_NANOS => ThreadState::Blocked,
        // The next M with this P would probably wait for the allocator's lock as well.
        ThreadState::Blocked
            if m.in_allocator.load(Ordering::Relaxed)
                && run_nanos < ALLOCATOR_WAIT_NANOS
                && central.without_p.any(|m| m.in_allocator.load(Ordering::Relaxed)) =>
        {
            ThreadState::BrieflyBlocked(LONG_RUN_NANOS)
        }
        _ => found,
    }
}

/// Returns whether `m`, which has no P, has used enough CPU time since its last block to be
/// preempted. Only for sysmon.
fn is_computing_without_p(m: &M) -> bool {
    let tid = m.tid.load(Ordering::Relaxed);
    let cpu = probe::cpu_time(tid);
    let used = cpu.saturating_sub(m.without_p.cpu.load(Ordering::Relaxed));
    // Most Ms have hardly run since: they are not probed.
    if used <= CPU_WITHOUT_P_NANOS / 4 || m.in_runtime.load(Ordering::Relaxed) != 0 {
        return false;
    }
    // If the M has blocked again, it is not disturbed, and its CPU time counts from now on.
    if matches!(
        ThreadProbe::new().check(tid),
        ThreadState::Blocked | ThreadState::BrieflyBlocked(_)
    ) {
        m.without_p.cpu.store(cpu, Ordering::Relaxed);
        return false;
    }
    used > CPU_WITHOUT_P_NANOS
}
