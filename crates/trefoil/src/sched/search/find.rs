//! Where the next goroutine comes from. Runs on the thread's own context.
//!
//! An M with a P searches in this order, which is Go's with additions:
//!
//! 1. a goroutine that was stopped inside libc, if threads are short (`monitor/preempt.rs`);
//! 2. requests to this P (`p::flag`), some of which name a goroutine to run first;
//! 3. timers of this P that are due: they make goroutines runnable;
//! 4. every 61st tick, one goroutine from a global queue;
//! 5. the local queues;
//! 6. a fair share of the global queues;
//! 7. descriptors that became ready, in this P's shard and in shards that no thread has polled
//!    lately;
//! 8. expired goroutines, unless others can be stolen at once;
//! 9. the queues of other Ps, for as long as the M may spin.
//!
//! If all of that finds nothing, the M gives its P back, checks the queues once more (`idle.rs`
//! says why), and waits for a P (`wait_for_p.rs`).
//!
//! # Fairness
//! 61 slices may take long, and `yield_now` keeps a goroutine local, unlike Go's. So sysmon sets
//! `flag::FAIR` every few milliseconds while goroutines wait in global queues. Then the P's owner
//! takes one of those first, an expired one if there is one; but not twice in a row, because then
//! the local goroutines would starve.
//!
//! # Spinning
//! An M that found nothing searches on for up to [`SPIN_NANOS`] before it gives up, but only for as
//! long as that has paid lately (`idle.rs`). At most as many Ms spin as half of the Ps that are not
//! idle.
//!
//! Rejected: waking another M whenever the last spinning M finds work, as Go does. Here that M
//! first checks whether there is more work ([`finish_search`]): for one goroutine that is woken
//! while all Ps are idle, one thread wakes up instead of two.

use super::idle::SPIN_NANOS;
use super::steal::{self, Source, Sweep};
use super::wait_for_p::wait_for_p;
use crate::sched::Sched;
use crate::sched::m::{OwnContext, Rt};
use crate::sched::monitor::sysmon::MAX_PAUSE_SUPPRESSED_NANOS;
use crate::sched::p::{P, flag};
use crate::sched::record;
use crate::sched::runnable::Runnable;
use crate::sched::simulation;
use crate::sched::switch::{is_global_turn, pop_local};
use crate::sched::wait::timers;
use crate::shim::{full_fence, spin_hint};
use crate::sys::clock::{Nanos, now};
use std::sync::atomic::Ordering;

/// An M does not go to sleep if a timer is due sooner: falling asleep and waking up take longer.
const MIN_SLEEP_NANOS: Nanos = 5_000;
/// Pause instructions between two sweeps over the other Ps: a spinning M must not slow down the Ms
/// that work.
const PAUSES_BETWEEN_SWEEPS: u32 = 32;
/// A shard may be polled by any M if no thread has polled it for so long, and its P has run the
/// same goroutine all the time. It is longer than it takes to serve a hundred descriptors.
const NEGLECTED_SHARD_NANOS: Nanos = 500_000;

/// Blocks until there is a goroutine to run; then the M owns a P. Returns None if the thread must
/// end.
pub(crate) fn find_work(own: OwnContext) -> Option<Runnable> {
    let sched = own.sched();
    loop {
        let rt = match own.rt() {
            Some(rt) => rt,
            None => wait_for_p(own)?,
        };
        // The numbers are those at the head of the file.
        let p = rt.p();
        // 1
        if let Some(g) = take_stopped_in_libc(sched, p) {
            finish_search(rt);
            return Some(g);
        }
        // 2
        let flags = p.flags.load(Ordering::Relaxed);
        if let Some(simulation) = &sched.simulation
            && flags & flag::STOP == 0
        {
            match simulation::next(rt, simulation) {
                Some(g) => {
                    finish_search(rt);
                    return Some(g);
                }
                None => {
                    give_up_simulated(own, p);
                    continue;
                }
            }
        }
        if flags & flag::STOP != 0 {
            match drain_at_shutdown(rt, p) {
                Some(g) => return Some(g),
                None => continue,
            }
        }
        if flags != 0 {
            match serve_requests(rt, p, flags) {
                Served::Run(g) => {
                    finish_search(rt);
                    return Some(g);
                }
                Served::Retired => continue,
                Served::Continue => {}
            }
        }
        // 3
        timers::run_due(rt, &p.timers);
        // 4 to 9
        let next = take_local_or_global(sched, p)
            .or_else(|| poll_shards(rt, p, NEGLECTED_SHARD_NANOS))
            .or_else(|| take_expired(rt, p))
            .or_else(|| spin(rt, p));
        if let Some(g) = next {
            finish_search(rt);
            return Some(g);
        }
        give_up(own, p);
    }
}

/// Takes a goroutine that was stopped inside libc, if there are fewer spare Ms than such
/// goroutines: one of these goroutines may hold the lock that the blocked threads wait for.
fn take_stopped_in_libc(sched: &Sched, p: &P) -> Option<Runnable> {
    if !sched.is_short_of_threads() || sched.is_drained() {
        return None;
    }
    // If no more threads may be started, the shortage may last: then these goroutines take turns
    // with the others.
    let takes_turns = sched.has_all_threads();
    // `take_for_fairness` declines as well then, and clears it: the expired queue would yield the
    // same goroutines.
    if takes_turns && p.last_was_out_of_turn.get() {
        return None;
    }
    let g = sched.pop_stopped_in_libc()?;
    if takes_turns {
        p.last_was_out_of_turn.set(true);
    }
    p.begin_expired_slice();
    Some(g)
}

/// The runtime stops: takes a goroutine that must run once more (`shutdown.rs`), or else gives the
/// P away.
#[cold]
fn drain_at_shutdown(rt: Rt, p: &'static P) -> Option<Runnable> {
    let (m, sched) = (rt.m(), rt.sched());
    if m.spinning.replace(false) {
        sched.idle.stop_spinning();
    }
    if let Some(simulation) = &sched.simulation {
        simulation::give_back(rt, simulation);
    }
    let g = sched.next_to_drain(m, p);
    if g.is_none() {
        sched.hand_off_p_of(m);
    }
    g
}

/// What the M does after [`serve_requests`].
enum Served {
    /// The search continues.
    Continue,
    /// This goroutine goes first.
    Run(Runnable),
    /// The P has retired: the M has another one, or none.
    Retired,
}

/// Serves the requests in `flags`, except `STOP`, until one of them names a goroutine to run. The
/// other flags stay set.
fn serve_requests(rt: Rt, p: &'static P, flags: u32) -> Served {
    let sched = rt.sched();
    if flags & flag::PREEMPT != 0 {
        let is_meant = p.is_asked_to_end_slice();
        p.flags.fetch_and(!flag::PREEMPT, Ordering::Relaxed);
        if is_meant {
            end_slice(sched, p);
        }
    }
    if flags & flag::RETIRE != 0 && sched.retire(rt, p) {
        return Served::Retired;
    }
    if flags & flag::TIMERS != 0 {
        p.flags.fetch_and(!flag::TIMERS, Ordering::Relaxed);
        timers::run_due_everywhere(rt);
        // The goroutine that a timer has just woken goes first, in a slice of its own.
        if let Some(g) = pop_local(p) {
            p.begin_slice();
            return Served::Run(g);
        }
    }
    if flags & flag::WOKEN != 0 {
        p.flags.fetch_and(!flag::WOKEN, Ordering::Relaxed);
        if let Some(g) = sched.pop_woken() {
            p.begin_slice();
            return Served::Run(g);
        }
    }
    match take_for_fairness(sched, p) {
        Some(g) => Served::Run(g),
        None => Served::Continue,
    }
}

/// Takes a goroutine from a global queue if sysmon asks for it, but not twice in a row.
fn take_for_fairness(sched: &Sched, p: &'static P) -> Option<Runnable> {
    if p.flags.load(Ordering::Relaxed) & flag::FAIR == 0 || p.last_was_out_of_turn.replace(false) {
        return None;
    }
    p.flags.fetch_and(!flag::FAIR, Ordering::Relaxed);
    // Without local work, the search takes a share of the other global queues in a moment.
    let g = if p.is_empty() { sched.pop_expired() } else { sched.pop_expired_or_any() }?;
    p.last_was_out_of_turn.set(true);
    p.begin_expired_slice();
    Some(g)
}

/// Ends the time slice, also for the goroutine in `runnext`, which would inherit it: that goroutine
/// goes to the tail of a ring.
fn end_slice(sched: &Sched, p: &'static P) {
    // Woken goroutines have used up this slice.
    p.fresh_turn.set(!p.runs_fresh() && !p.runs_expired());
    // Not `pop_next`: that would count a run, and the goroutine does not run now.
    if let Some(next) = p.runq.steal_next() {
        // SAFETY: what the queue holds came from `as_item`.
        p.push_back(sched, unsafe { Runnable::from_item(next) });
    }
    p.begin_slice();
    if let Some(realtime) = sched.realtime {
        realtime.let_others_run();
    }
}

/// Takes a goroutine from the local or the global queues, whichever go first in this tick.
fn take_local_or_global(sched: &Sched, p: &'static P) -> Option<Runnable> {
    let tick = p.tick.load(Ordering::Relaxed);
    if is_global_turn(sched, tick)
        && let Some(g) = sched.pop_global()
    {
        p.begin_slice();
        return Some(g);
    }
    if let Some(g) = pop_local(p) {
        return Some(g);
    }
    take_share_if_any(sched, p)
}

/// As [`Sched::take_global_share`], but takes the lock only if a goroutine waits in a global queue.
fn take_share_if_any(sched: &Sched, p: &'static P) -> Option<Runnable> {
    if !sched.has_global() {
        return None;
    }
    let g = sched.take_global_share(&mut sched.central.lock(), p)?;
    p.begin_slice();
    Some(g)
}

/// Takes an expired goroutine, unless a goroutine that waits on another P can be stolen at once.
fn take_expired(rt: Rt, p: &'static P) -> Option<Runnable> {
    let sched = rt.sched();
    if !sched.has_global() {
        return None;
    }
    if let Some((g, _)) = steal::steal(rt, p, Sweep::Ordinary) {
        p.begin_slice();
        return Some(g);
    }
    let g = sched.pop_expired()?;
    p.begin_expired_slice();
    Some(g)
}

/// As [`ready_from_shards`]. Returns the first goroutine whose descriptor is ready; the others are
/// in the local queues.
fn poll_shards(rt: Rt, p: &'static P, neglected_for: Nanos) -> Option<Runnable> {
    ready_from_shards(rt, neglected_for);
    let g = pop_local(p)?;
    p.begin_slice();
    Some(g)
}

/// Makes the goroutines runnable whose timers are due or whose descriptors are ready. For an M that
/// runs none of them itself.
pub(crate) fn ready_due(rt: Rt) {
    timers::run_due_everywhere(rt);
    ready_from_shards(rt, 0);
}

/// Makes the goroutines runnable whose descriptors are ready, in the shard of this M's P and in the
/// shards that were neglected for `neglected_for`, except those that the idle poller watches.
fn ready_from_shards(rt: Rt, neglected_for: Nanos) {
    let (sched, p) = (rt.sched(), rt.p());
    let run_of = |id| sched.p(id).map(P::run_number);
    sched.poller.poll(p.id, sched.procs(), neglected_for, run_of).wake(Some(rt));
}

/// Searches everywhere, for as long as spinning pays (`idle.rs`) or until a timer that is due very
/// soon. Returns None if it found nothing, if the M may not spin, or if a request to the P is
/// pending.
fn spin(rt: Rt, p: &'static P) -> Option<Runnable> {
    let (m, sched) = (rt.m(), rt.sched());
    let was_woken = m.spinning.get();
    if !was_woken {
        let busy = sched.procs().saturating_sub(sched.idle.idle_ps());
        if 2 * sched.idle.spinning() >= busy {
            return None;
        }
        m.spinning.set(true);
        sched.idle.start_spinning();
    }
    let start = now();
    let until = spin_until(sched, start);
    let mut time = start;
    loop {
        // A goroutine that waits elsewhere may be out of reach only for a moment (`steal.rs`): then
        // the M spins for the whole time.
        let is_last = time >= until.max(start + SPIN_NANOS) || (time >= until && !sched.has_work());
        if is_last && time == start && sched.next_timer() > start && !sched.has_queued() {
            // It does not pay to spin, and nothing waits. If the M was not woken to search, that
            // says nothing about wake-ups.
            return if was_woken { spin_failed(sched) } else { None };
        }
        let sweep = if is_last { Sweep::Last } else { Sweep::Ordinary };
        if let Some((g, source)) = search_everywhere(rt, p, sweep) {
            sched.idle.search_succeeded();
            if source == Source::Elsewhere && time != start {
                sched.idle.spin_paid();
            }
            return Some(g);
        }
        if p.flags.load(Ordering::Relaxed) != 0 {
            return None;
        }
        if is_last {
            sched.idle.spin_failed();
            return spin_failed(sched);
        }
        for _ in 0..PAUSES_BETWEEN_SWEEPS {
            spin_hint();
        }
        time = now();
    }
}

/// Returns until when an M that begins to search at `start` spins.
fn spin_until(sched: &Sched, start: Nanos) -> Nanos {
    let until = start + sched.idle.spin_nanos();
    let timer = sched.next_timer();
    // The M would hardly be asleep before it had to wake up again.
    if timer > until && timer <= until + MIN_SLEEP_NANOS { timer } else { until }
}

/// Counts a search that found nothing.
fn spin_failed(sched: &Sched) -> Option<Runnable> {
    if sched.idle.search_failed() {
        // Pairs with the barrier in sysmon's `sleep_until`: this thread sees until when sysmon
        // sleeps, or sysmon sees that wake-ups are suppressed.
        full_fence();
        sched.sysmon.wake_by(now() + MAX_PAUSE_SUPPRESSED_NANOS);
    }
    None
}

/// Makes one sweep over the other Ps, then searches the global queues and the shards.
fn search_everywhere(rt: Rt, p: &'static P, sweep: Sweep) -> Option<(Runnable, Source)> {
    if let Some((g, source)) = steal::steal(rt, p, sweep) {
        p.begin_slice();
        return Some((g, source));
    }
    // With the last sweep, no shard is too fresh to be polled.
    let neglected_for = if sweep == Sweep::Last { 0 } else { NEGLECTED_SHARD_NANOS };
    take_share_if_any(rt.sched(), p)
        .or_else(|| poll_shards(rt, p, neglected_for))
        .or_else(|| take_expired(rt, p))
        .map(|g| (g, Source::Elsewhere))
}

/// Ends the spinning of an M that has found a goroutine. If it was the last M that spun, checks
/// whether there is work for another M; if not, checks whether the idle poller knows every timer
/// and shard. (If there is no idle poller, this M was probably it, and will probably be it again in
/// a moment: see `netpoll/idle_poller.rs`.) Does nothing if the M did not spin.
fn finish_search(rt: Rt) {
    let (m, sched) = (rt.m(), rt.sched());
    if !m.spinning.replace(false) || !sched.idle.stop_spinning() {
        return;
    }
    sched.idle.before_recheck();
    if sched.idle.idle_ps() == 0 {
        return;
    }
    if sched.has_work() {
        sched.wake();
    } else if !sched.is_idle_poller_current() {
        sched.update_or_vacate_idle_poller();
    }
}

/// As [`give_up`], in a simulation, where no goroutine can run until one is started or woken from
/// outside. Only the end of the runtime is a request to a simulated P.
#[cold]
fn give_up_simulated(own: OwnContext, p: &'static P) {
    p.flags.fetch_and(flag::STOP, Ordering::Relaxed);
    give_up(own, p);
}

/// Gives the P back and checks the queues once more. The M keeps its P if a request is pending or a
/// goroutine waits in a global queue. It takes an idle P again if the second check finds work.
fn give_up(own: OwnContext, p: &'static P) {
    let (m, sched) = (own.m(), own.sched());
    {
        let mut central = sched.central.lock();
        if p.flags.load(Ordering::Relaxed) != 0 || sched.has_global() {
            return;
        }
        record::becomes_idle(p);
        m.set_p(None);
        sched.put_idle_p(&mut central, p);
    }
    if m.spinning.replace(false) {
        sched.idle.stop_spinning();
    }
    sched.idle.before_recheck();
    if sched.has_work() {
        let mut central = sched.central.lock();
        if let Some(p) = sched.take_idle_p(&mut central) {
            drop(central);
            own.set_p(p);
            own.start_spinning();
        }
    }
}

impl Sched {
    /// Returns whether any queue holds a goroutine.
    fn has_queued(&self) -> bool {
        self.has_global() || self.all_ps().any(|p| !p.is_empty())
    }

    /// Returns whether any queue holds work for another M. While wake-ups are suppressed
    /// (`idle.rs`), a goroutine that is alone in `runnext` does not count.
    pub(crate) fn has_work(&self) -> bool {
        let suppressed = self.idle.is_suppressed();
        let has_work = |p: &P| if suppressed { p.ring_len() != 0 } else { !p.is_empty() };
        self.has_global() || self.all_ps().any(has_work)
    }
}
