//! Where the next goroutine comes from. Runs on the thread's own context.
//!
//! The order (Go's): who was stopped inside a library, if threads are short (`preempt.rs`); requests on this P; every 61st tick one from the global queue; the local queue;
//! a share of the global queue; descriptors that became ready; those who used up their slice; other Ps' queues. (61 turns may be long ones, and `yield_now` keeps a
//! goroutine local, unlike Go's: so sysmon, too, asks for a look at the global queue, by `flag::FAIR`.) Then the P is given back and the thread looks once
//! more (`idle.rs` says why) before it parks.
//!
//! # Spinning
//! A thread that found nothing goes on searching for [`SPIN`] before it gives up: a wake-up from the
//! kernel costs 6–18 µs, and the next goroutine is often nearer than that. At most half of the busy
//! Ps spin.
//!
//! # What talks stays together
//! Goroutines that wake each other run for fractions of a microsecond, and on one P they find everything in its
//! cache; a thief tears them apart. So a thief watches first, without touching what the owner writes: of an owner
//! that takes one after the other it takes nothing, but in its last sweep, so that no P stays idle for ever while
//! goroutines wait elsewhere. A select over four channels on two Ps takes 230 ns an item like this, and 600 if whatever
//! lies there is taken; goroutines that only yield are spread as before.

use crate::sched::Sched;
use crate::sched::g::G;
use crate::sched::m::Rt;
use crate::sched::monitor::sysmon::MAX_PAUSE_SUPPRESSED_NANOS;
use crate::sched::netpoll::poller::ReadyBatch;
use crate::sched::p::{P, PStatus, bump, flag};
use crate::sched::switch::{is_global_turn, pop_local};
use crate::sched::wait::timers;
use crate::shim::spin_hint;
use crate::sys::clock::{NEVER, Nanos, now};
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long a thread that nobody needed is kept, if there are more idle ones than Ps. (Go keeps them all.)
const SPARE: Nanos = 5_000_000_000;
/// How long a thread without work searches before it parks.
const SPIN: Duration = Duration::from_micros(25);
/// Pauses between two sweeps over the other Ps: spinning must not slow down those who work.
const PAUSES_BETWEEN_SWEEPS: u32 = 32;
/// Visits of every P in a sweep; `runnext` may be taken only in the last. Go's number.
const STEAL_ROUNDS: u32 = 4;
/// How long a thief lets the owner go before it takes its `runnext`: the owner is probably about to
/// run it, and a goroutine that just made another runnable often parks at once. Go's number.
const RUNNEXT_GRACE: Duration = Duration::from_micros(3);
/// A ring of so few whose owner takes so many in so short a time is left alone, until the last sweep.
const FEW: u32 = 4;
const BRISK: u32 = 2;
const RING_GRACE: Duration = Duration::from_micros(1);
/// Descriptors that another P has not looked at for so long are anybody's. Longer than it takes to serve a hundred.
const NEGLECTED: Nanos = 500_000;

/// How long a thread without a P sleeps at a time when its runtime ends.
pub(crate) const LAST_NAP: Nanos = 1_000_000;

/// Blocks until there is a goroutine to run. None: the thread is to end.
pub(crate) fn find_work(rt: Rt) -> Option<&'static G> {
    let (m, sched) = (rt.m(), rt.sched());
    loop {
        let Some(p) = m.p.get() else {
            wait_for_p(rt)?;
            continue;
        };
        if sched.is_short_of_threads()
            && !sched.is_drained()
            && !(sched.has_all_threads() && p.was_fair.replace(!p.was_fair.get()))
            && let Some(g) = sched.pop_inside()
        {
            p.next_expired_tick();
            stop_spinning(rt);
            return Some(g);
        }
        let flags = p.flags.load(Ordering::Relaxed);
        if flags != 0 {
            if flags & flag::STOP != 0 {
                if m.spinning.replace(false) {
                    sched.idle.stop_spinning();
                }
                if let Some(g) = sched.next_to_drain(m, p) {
                    return Some(g);
                }
                sched.leave_p(m);
                continue;
            }
            if flags & flag::PREEMPT != 0 {
                let asked = p.is_asked_to_end_slice();
                p.flags.fetch_and(!flag::PREEMPT, Ordering::Relaxed);
                if asked {
                    end_slice(sched, p);
                }
            }
            if flags & flag::RETIRE != 0 && sched.retire(rt, p) {
                continue;
            }
            if flags & flag::TIMERS != 0 {
                p.flags.fetch_and(!flag::TIMERS, Ordering::Relaxed);
                for other in sched.all_ps() {
                    timers::run_due(rt, &other.timers);
                }
                // A goroutine that was just woken goes first, in a slice of its own.
                if let Some(g) = pop_local(p) {
                    p.next_tick();
                    stop_spinning(rt);
                    return Some(g);
                }
            }
            if flags & flag::WOKEN != 0 {
                p.flags.fetch_and(!flag::WOKEN, Ordering::Relaxed);
                if let Some(g) = sched.pop_woken() {
                    p.next_tick();
                    stop_spinning(rt);
                    return Some(g);
                }
            }
            if let Some(g) = take_fairly(sched, p) {
                stop_spinning(rt);
                return Some(g);
            }
        }
        timers::run_due(rt, &p.timers);
        let next = take_here(sched, p)
            .or_else(|| poll(rt, p, NEGLECTED))
            .or_else(|| take_expired(rt, p))
            .or_else(|| search(rt, p));
        if let Some(g) = next {
            stop_spinning(rt);
            return Some(g);
        }
        give_up(rt, p);
    }
}

/// One from the global queue, before the local one, if sysmon asks for it; but not twice in a row, or those
/// who take turns there would starve those who wait here.
fn take_fairly(sched: &Sched, p: &'static P) -> Option<&'static G> {
    if p.flags.load(Ordering::Relaxed) & flag::FAIR == 0 || p.was_fair.replace(false) {
        return None;
    }
    p.flags.fetch_and(!flag::FAIR, Ordering::Relaxed);
    let g = sched.pop_fairly(p.is_empty())?;
    p.was_fair.set(true);
    p.next_expired_tick();
    Some(g)
}

/// The time slice is over, for the goroutine that would inherit it too: `runnext` goes to the tail of a ring.
fn end_slice(sched: &Sched, p: &'static P) {
    p.fresh_turn.set(!p.runs_fresh() && !p.runs_expired());
    if let Some(next) = p.runq.steal_next() {
        // SAFETY: taken from the queue, so ours; Gs are never freed.
        p.push_back(sched, unsafe { &*next.as_ptr() });
    }
    p.next_tick();
    if let Some(realtime) = sched.realtime {
        realtime.let_others_run();
    }
}

/// What needs no search: local and global queue.
fn take_here(sched: &Sched, p: &'static P) -> Option<&'static G> {
    let tick = p.tick.load(Ordering::Relaxed);
    if is_global_turn(sched, tick)
        && let Some(g) = sched.pop_global()
    {
        p.next_tick();
        return Some(g);
    }
    if let Some(g) = pop_local(p) {
        return Some(g);
    }
    take_global(sched, p)
}

fn take_global(sched: &Sched, p: &'static P) -> Option<&'static G> {
    if !sched.has_global() {
        return None;
    }
    let g = sched.take_global_share(&mut sched.central.lock(), p)?;
    p.next_tick();
    Some(g)
}

/// One of those who used up their slice, unless others wait behind such a one elsewhere.
fn take_expired(rt: Rt, p: &'static P) -> Option<&'static G> {
    let sched = rt.sched();
    if !sched.has_global() {
        return None;
    }
    if let Some(g) = steal(rt, p, false) {
        p.next_tick();
        return Some(g);
    }
    let g = sched.pop_expired()?;
    p.next_expired_tick();
    Some(g)
}

/// Looks for descriptors that became ready: its own ones, and those that nobody has looked at for `age`. The first
/// goroutine runs, the rest wait in the queue.
fn poll(rt: Rt, p: &'static P, age: Nanos) -> Option<&'static G> {
    let sched = rt.sched();
    sched.poller.poll(p.id, sched.procs(), age).wake(Some(rt));
    let g = pop_local(p)?;
    p.next_tick();
    Some(g)
}

/// Steals, for a while. None: nothing found, or something is asked of the P.
fn search(rt: Rt, p: &'static P) -> Option<&'static G> {
    let (m, sched) = (rt.m(), rt.sched());
    if !m.spinning.get() {
        let busy = sched.procs().saturating_sub(sched.idle.idle_ps());
        if 2 * sched.idle.spinning() >= busy {
            return None;
        }
        m.spinning.set(true);
        sched.idle.start_spinning();
    }
    let start = Instant::now();
    loop {
        let last = start.elapsed() > SPIN;
        if let Some(g) = steal(rt, p, last) {
            p.next_tick();
            _ = sched.idle.searched(true);
            return Some(g);
        }
        let other = take_global(sched, p)
            .or_else(|| poll(rt, p, if last { 0 } else { NEGLECTED }))
            .or_else(|| take_expired(rt, p));
        if let Some(g) = other {
            _ = sched.idle.searched(true);
            return Some(g);
        }
        if p.flags.load(Ordering::Relaxed) != 0 {
            return None;
        }
        if last {
            if sched.idle.searched(false) {
                sched.sysmon.wake_by(now() + MAX_PAUSE_SUPPRESSED_NANOS);
            }
            return None;
        }
        for _ in 0..PAUSES_BETWEEN_SWEEPS {
            spin_hint();
        }
    }
}

/// For one who yields and is alone on its P: fetches some of those who wait on others, behind one that does not stop, to
/// its own queue. False: nobody does. On a goroutine's stack, so no timers.
#[cold]
pub(crate) fn fetch(rt: Rt) -> bool {
    let (p, sched) = (rt.p(), rt.sched());
    // SAFETY: we own the P, and hold no other borrow of its local state.
    let tour = unsafe { p.local() }.rng.tour(sched.made());
    let others = tour.filter_map(|id| sched.p(id)).filter(|other| other.id != p.id);
    for victim in others.filter(|other| other.status() == PStatus::Running) {
        if victim.is_empty() {
            continue;
        }
        // Where one after the other is taken everybody has his turn.
        if taken_in_a_moment(victim) != 0 {
            continue;
        }
        let Some(g) = p.steal_from(victim).or_else(|| steal_next(victim)) else {
            continue;
        };
        count_stolen(p);
        // SAFETY: taken from a queue, so ours; Gs are never freed.
        p.push_back(sched, unsafe { &*g.as_ptr() });
        return true;
    }
    false
}

fn count_stolen(p: &P) {
    bump(&p.counters.steals, 1);
    bump(&p.counters.stolen, 1 + p.queued() as u64);
}

/// One sweep over the other Ps, in a random order. `last`: of brisk ones, too.
fn steal(rt: Rt, p: &'static P, last: bool) -> Option<&'static G> {
    let sched = rt.sched();
    for round in 1..=STEAL_ROUNDS {
        // SAFETY: we own the P, and hold no other borrow of its local state.
        let tour = unsafe { p.local() }.rng.tour(sched.made());
        for id in tour {
            let Some(victim) = sched.p(id) else { continue };
            // Timers of idle Ps too: nobody else looks at them.
            if round == STEAL_ROUNDS
                && timers::run_due(rt, &victim.timers)
                && let Some(g) = pop_local(p)
            {
                return Some(g);
            }
            // Idle and retired ones have nothing; ourselves neither.
            if victim.id == p.id || victim.status() != PStatus::Running {
                continue;
            }
            // The look takes a while: once a sweep.
            let leave = !last && victim.ring_len() <= FEW && (round > 1 || is_brisk(victim));
            let found = if leave { None } else { p.steal_from(victim) }
                .or_else(|| if round == STEAL_ROUNDS { steal_next(victim) } else { None });
            if let Some(g) = found {
                count_stolen(p);
                // SAFETY: taken from a queue, so ours; Gs are never freed.
                return Some(unsafe { &*g.as_ptr() });
            }
        }
    }
    None
}

/// Lets some time pass without a look at the victim: its owner writes there.
fn spin_for(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        spin_hint();
    }
}

/// Whether the few that wait in the victim's ring are about to run there: its owner takes one after the other.
fn is_brisk(victim: &P) -> bool {
    let len = victim.ring_len();
    if len == 0 || len > FEW {
        return false;
    }
    taken_in_a_moment(victim) >= BRISK
}

/// How many the victim's owner takes in [`RING_GRACE`].
fn taken_in_a_moment(victim: &P) -> u32 {
    let taken = victim.taken();
    spin_for(RING_GRACE);
    victim.taken().wrapping_sub(taken)
}

/// `runnext`, if its owner leaves it there for a while. If it takes one out meanwhile it will take the next one
/// too: two goroutines that wake each other in turn should stay where they are. (Go looks only whether the
/// same goroutine is there again: a ping-pong on two Ps is torn apart 25,000 times a second, and takes a half longer.)
fn steal_next(victim: &P) -> Option<NonNull<G>> {
    if !victim.runq.has_next() {
        return None;
    }
    let taken = victim.runq.nexts_taken();
    spin_for(RUNNEXT_GRACE);
    if victim.runq.nexts_taken() == taken { victim.runq.steal_next() } else { None }
}

/// Found somebody to run: no longer spinning. If that was the last spinner, someone else should look if there is more; and
/// the idle poller should know of every timer and every shard. (A goroutine that goes to sleep and leaves nobody to run tells
/// nobody: `set_wait_timer`. If who finds another one has not even searched, it will be back soon; or sysmon looks.)
fn stop_spinning(rt: Rt) {
    let (m, sched) = (rt.m(), rt.sched());
    if !m.spinning.replace(false) || !sched.idle.stop_spinning() {
        return;
    }
    sched.idle.before_second_look();
    if sched.idle.idle_ps() == 0 {
        return;
    }
    if sched.has_work() {
        sched.wake();
    } else if !sched.is_kept() {
        sched.wake_idle_poller();
    }
}

/// Nothing anywhere: gives the P back and looks once more. The M keeps a P if something came in the last
/// moment, or is asked of it.
fn give_up(rt: Rt, p: &'static P) {
    let (m, sched) = (rt.m(), rt.sched());
    {
        let mut central = sched.central.lock();
        if p.flags.load(Ordering::Relaxed) != 0 || sched.has_global() {
            return;
        }
        m.set_p(None);
        sched.put_idle_p(&mut central, p);
    }
    if m.spinning.replace(false) {
        sched.idle.stop_spinning();
    }
    sched.idle.before_second_look();
    if sched.has_work() {
        let mut central = sched.central.lock();
        if let Some(p) = sched.take_idle_p(&mut central) {
            drop(central);
            m.set_p(Some(p));
            m.spinning.set(true);
            sched.idle.start_spinning();
        }
    }
}

impl Sched {
    /// Whether somebody waits for a thread that looks for him. In a hush that is nobody who is alone in `runnext`.
    fn has_work(&self) -> bool {
        let suppressed = self.idle.is_suppressed();
        let has_work = |p: &P| if suppressed { p.ring_len() != 0 } else { !p.is_empty() };
        self.has_global() || self.all_ps().any(has_work)
    }
}

/// The idle poller has found descriptors that are ready: it takes an idle P and goes on with them; or they wait for
/// those who run. True: it has a P.
fn wake_ready(rt: Rt, ready: ReadyBatch) -> bool {
    let (m, sched) = (rt.m(), rt.sched());
    if ready.is_empty() {
        return false;
    }
    let mut central = sched.central.lock();
    let handed = m.handed.take();
    if handed.is_none() && central.is_idle_poller(m) {
        sched.clear_idle_poller(&mut central);
    }
    let p = handed.or_else(|| {
        let stopping = sched.stopping.load(Ordering::Relaxed);
        if stopping { None } else { sched.take_idle_p(&mut central) }
    });
    drop(central);
    let Some(p) = p else {
        ready.wake(None);
        return false;
    };
    m.set_p(Some(p));
    if handed.is_none() {
        m.spinning.set(true);
        sched.idle.start_spinning();
    }
    ready.wake(Some(rt));
    true
}

/// An M without a P sleeps until someone hands it one. None: the runtime stops, or has too many threads.
///
/// A note in its parker is only a hint to look; what counts is read under the lock.
fn wait_for_p(rt: Rt) -> Option<()> {
    let (m, sched) = (rt.m(), rt.sched());
    loop {
        let mut central = sched.central.lock();
        // From one moment to the next it is no longer expected, and idle or at work: never missing in between.
        central.starting -= u32::from(m.arriving.replace(false));
        if let Some(p) = m.handed.take() {
            // It may have been the idle poller. One that searches will wake the next, who becomes it.
            let unkept =
                central.has_no_idle_poller() && !m.spinning.get() && sched.needs_idle_poller();
            drop(central);
            m.set_p(Some(p));
            if unkept {
                sched.wake();
            }
            return Some(());
        }
        if sched.commit_drained(&mut central) {
            central.remove_idle_m(m);
            sched.publish_spares(&central);
            return None;
        }
        if !m.listed.get()
            && let Some(p) = sched.take_p_wanting_m(&mut central, m)
        {
            if central.is_idle_poller(m) {
                sched.clear_idle_poller(&mut central);
            }
            drop(central);
            m.set_p(Some(p));
            return Some(());
        }
        if sched.stopping.load(Ordering::Relaxed) {
            // A goroutine that is to go on once more may wait for a P whose thread was never started.
            if sched.has_global()
                && let Some(p) = sched.take_idle_p(&mut central)
            {
                central.remove_idle_m(m);
                sched.publish_spares(&central);
                drop(central);
                m.set_p(Some(p));
                return Some(());
            }
            // To spare, for as long as somebody may wait for a lock of libc's.
            if !m.listed.get() {
                central.push_idle_m(m);
                sched.publish_spares(&central);
            }
            drop(central);
            m.parker.park_until(now() + LAST_NAP);
            continue;
        }
        // Work that someone wanted to wake a thread for, and could not.
        let overlooked = sched.has_global() && !m.listed.get() && !central.is_idle_poller(m);
        let until = if overlooked { 0 } else { sched.enter_idle(&mut central, m) };
        if until <= now() {
            if central.is_idle_poller(m) {
                sched.clear_idle_poller(&mut central);
            }
            if let Some(p) = sched.take_idle_p(&mut central) {
                drop(central);
                m.set_p(Some(p));
                m.spinning.set(true);
                sched.idle.start_spinning();
                return Some(());
            }
            // Every P is busy, and looks after timers and queues.
            central.push_idle_m(m);
            sched.publish_spares(&central);
        }
        let until = if m.listed.get() { NEVER } else { until };
        let spare = m.listed.get() && central.idle_m_count > sched.procs();
        let polls = central.is_idle_poller(m) && sched.poller.has_waiters();
        drop(central);
        if polls {
            let ready = m.sleep_polling(sched.poller, until);
            if wake_ready(rt, ready) {
                return Some(());
            }
            continue;
        }
        if !spare {
            m.parker.park_until(until);
        } else if !m.parker.park_until(now() + SPARE) && sched.dismiss_spare(m) {
            return None;
        }
    }
}
