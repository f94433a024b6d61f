//! The idle poller: the one idle M that is awake when the next timer is due.
//!
//! An idle M sleeps in its parker until it is handed a P, except for one: the idle poller sleeps
//! only until the earliest timer of all Ps. Then it takes an idle P and runs the timers that are
//! due. While goroutines wait for descriptors it sleeps in `epoll_wait`, in all shards at once,
//! instead of in its parker.
//!
//! # Which M is awake at time t
//!
//! | Ps | the thread that is awake when a timer is due or a descriptor is ready |
//! |---|---|
//! | some idle | the idle poller; or an M that spins, until its search ends |
//! | none idle | Ms between two goroutines (`switch.rs`); sysmon, if all goroutines compute |
//!
//! An M becomes the idle poller when it goes idle and finds a timer or a waiting goroutine, and
//! there is no idle poller yet ([`Sched::enter_idle`]). It stops being one when it takes or is
//! handed a P.
//!
//! # No timer is missed
//! `Sched::idle_poller_until` is the time until which the idle poller sleeps, `NEVER` if there is
//! none. A thread that sets an earlier timer wakes the idle poller, or an M that becomes it:
//!
//! ```text
//!   thread that sets a timer (`wait/timers.rs`)    M that becomes the idle poller, under the lock
//!   put the timer into a heap                      idle_poller_until = earliest timer
//!   full barrier                                   full barrier
//!   earlier than idle_poller_until? wake it        read the earliest timer again: sleep until
//!                                                  then, or repeat this if it is a later one
//! ```
//! At least one of the two sees the other. `crates/trefoil-model` checks these steps.
//!
//! A goroutine that sets a timer for its own wait, and leaves its P without work, wakes no M: its
//! own M will search, and a search ends with a check of the timers (`search/find.rs`,
//! `finish_search`). If that M finds work without having searched, it does not check. It comes back
//! to the scheduler soon, and otherwise sysmon checks.
//!
//! # Vacancy
//! The idle poller that was woken by a timer takes a P and runs a goroutine, usually for a few
//! microseconds. To wake a second M that takes its place costs more than that, and the first M is
//! back before the next timer. So, if no goroutine waits for a descriptor, the place stays
//! *vacant*, in the hope that an M goes idle soon: it becomes the idle poller then. sysmon limits
//! the damage if the hope is in vain: it ends a vacancy of more than [`VACANCY_NANOS`] when it sees
//! it. In any case, after a vacancy that lasted longer the place is not vacated for
//! [`FORBIDDEN_FACTOR`] times as long: timers may be late in at most 1 % of the time.
//!
//! ```text
//!   thread that sets a timer or waits for a descriptor    M that goes idle, under the lock
//!   put it into a heap or shard                           end the vacancy (`since` = 0)
//!   full barrier                                          full barrier
//!   vacant? wake no M                                     read timers and waiters
//! ```
//!
//! Rejected: a timer of the kernel (`timerfd`) that wakes sysmon in time for the next timer. To set
//! it takes 2.6 µs on a virtual machine, half of what a wake-up costs.
//!
//! Invariants:
//! 1. The idle poller has no P, and is not in the list of idle Ms.
//! 2. `idle_poller_until` is written under the scheduler's lock. Until the runtime stops it is
//!    `NEVER` while there is no idle poller.
//! 3. During a vacancy there is no idle poller. The place is vacated by an M that has a P, and the
//!    vacancy ends when an M goes idle, or by sysmon, which does not sleep for long before that.

use crate::sched::Sched;
use crate::sched::m::{M, OwnContext};
use crate::sched::netpoll::poller::ReadyBatch;
use crate::sched::queues::central::Central;
use crate::shim::full_fence;
use crate::sys::clock::{NEVER, Nanos, now};
use std::sync::atomic::{AtomicU64, Ordering};

/// How long the place of the idle poller should be vacant at most.
pub(crate) const VACANCY_NANOS: Nanos = 100_000;
/// How many times as long as a vacancy that lasted longer than that no other is allowed.
const FORBIDDEN_FACTOR: Nanos = 100;
/// A vacancy that lasted longer than this counts as this long.
const FORBIDDEN_FOR_MAX_NANOS: Nanos = 10_000_000;

/// Whether the place of the idle poller is vacant; see the head of the file. Written under the
/// scheduler's lock.
pub(crate) struct Vacancy {
    /// Since when it is vacant; 0 if it is not.
    since: AtomicU64,
    /// When it was last vacated.
    last: AtomicU64,
    /// Until when it is not vacated.
    forbidden_until: AtomicU64,
}

impl Vacancy {
    pub(crate) const fn new() -> Vacancy {
        Vacancy {
            since: AtomicU64::new(0),
            last: AtomicU64::new(0),
            forbidden_until: AtomicU64::new(0),
        }
    }

    /// Returns since when the place is vacant, if it is.
    pub(crate) fn since(&self) -> Option<Nanos> {
        Some(self.since.load(Ordering::Relaxed)).filter(|&since| since != 0)
    }

    /// Returns when the place was last vacated, or 0.
    pub(crate) fn last(&self) -> Nanos {
        self.last.load(Ordering::Relaxed)
    }

    /// Under the lock: begins a vacancy, unless that is forbidden. Returns whether it did.
    fn begin(&self) -> bool {
        let now = now();
        let is_allowed = now >= self.forbidden_until.load(Ordering::Relaxed);
        if is_allowed {
            // The age of a vacancy is that of its beginning, however many Ms have found work since.
            if self.since().is_none() {
                self.since.store(now, Ordering::Relaxed);
            }
            self.last.store(now, Ordering::Relaxed);
        }
        is_allowed
    }

    /// Under the lock: ends the vacancy, if there is one. The timers and waiters that the caller
    /// reads next include those whose threads saw the vacancy.
    fn end(&self) {
        let Some(since) = self.since() else { return };
        self.since.store(0, Ordering::Relaxed);
        full_fence();
        let now = now();
        let lasted = now.saturating_sub(since);
        if lasted > VACANCY_NANOS {
            // Limited, because the process may have been stopped for minutes.
            let forbidden = FORBIDDEN_FACTOR * lasted.min(FORBIDDEN_FOR_MAX_NANOS);
            self.forbidden_until.store(now + forbidden, Ordering::Relaxed);
        }
    }
}

/// The M that is the idle poller, if there is one. Behind the scheduler's lock.
pub(crate) struct IdlePoller(Option<&'static M>);

impl IdlePoller {
    pub(crate) const fn new() -> IdlePoller {
        IdlePoller(None)
    }

    pub(crate) fn is_some(&self) -> bool {
        self.0.is_some()
    }

    /// Returns whether `m` is the idle poller.
    pub(crate) fn is(&self, m: &M) -> bool {
        self.0.is_some_and(|poller| std::ptr::eq(poller, m))
    }

    /// Takes out the M. Called directly at shutdown only; otherwise by
    /// [`Sched::clear_idle_poller`], which keeps invariant 2.
    pub(crate) fn take(&mut self) -> Option<&'static M> {
        self.0.take()
    }
}

impl Sched {
    /// Under the lock: makes `m`, which has no P, the idle poller or an idle M. Returns until when
    /// it sleeps: `NEVER` unless it is the idle poller.
    pub(crate) fn enter_idle(&self, central: &mut Central, m: &'static M) -> Nanos {
        // The M that runs a simulation polls itself, when the simulation decides to.
        let is_simulated = self.simulation.is_some() && self.idle.idle_ps() == 0;
        let may_poll = (!central.idle_poller.is_some() || central.idle_poller.is(m))
            && !m.listed.get()
            && !is_simulated;
        if may_poll {
            self.vacancy.end();
        }
        let timer = self.next_timer();
        let has_waiters = self.poller.has_waiters() && self.idle.idle_ps() != 0;
        let until = if may_poll && (timer != NEVER || has_waiters) {
            self.become_idle_poller(central, m, timer)
        } else {
            if may_poll {
                self.clear_idle_poller(central);
            }
            if !m.listed.get() {
                central.push_idle_m(m);
            }
            self.wake_if_out_of_date(central, timer, has_waiters);
            NEVER
        };
        self.publish_spares(central);
        until
    }

    /// Under the lock: makes `m` the idle poller. `timer` is the earliest timer. Returns until when
    /// `m` sleeps, which is earlier if a timer was set meanwhile.
    fn become_idle_poller(&self, central: &mut Central, m: &'static M, mut timer: Nanos) -> Nanos {
        central.idle_poller = IdlePoller(Some(m));
        loop {
            self.idle_poller_until.store(timer, Ordering::Relaxed);
            // Pairs with the barrier of the thread that sets a timer (see the head of the file).
            full_fence();
            let earliest = self.next_timer();
            // A timer that is due is no reason to sleep, however many more there are.
            if earliest <= timer || earliest <= now() {
                self.idle_poller_until.store(earliest, Ordering::Relaxed);
                return earliest;
            }
            // The timer that was announced is gone. A thread that has set another meanwhile may
            // have relied on it.
            timer = earliest;
        }
    }

    /// Wakes the idle poller if it sleeps beyond `timer`, or if `has_waiters` (goroutines wait for
    /// descriptors while a P is idle) and it does not watch all their shards.
    fn wake_if_out_of_date(&self, central: &Central, timer: Nanos, has_waiters: bool) {
        if let Some(poller) = central.idle_poller.0
            && (timer < self.idle_poller_until.load(Ordering::Relaxed)
                || (has_waiters
                    && (!poller.polling.is_occupied() || self.poller.has_unwatched_shard())))
        {
            poller.wake();
        }
    }

    /// Under the lock: from now on there is no idle poller. Returns the M that was it.
    pub(crate) fn clear_idle_poller(&self, central: &mut Central) -> Option<&'static M> {
        self.idle_poller_until.store(NEVER, Ordering::Relaxed);
        let m = central.idle_poller.take();
        self.publish_spares(central);
        m
    }

    /// Returns whether the idle poller knows of every timer, and watches every shard in which a
    /// goroutine waits. Reads without the lock.
    pub(crate) fn is_idle_poller_current(&self) -> bool {
        self.next_timer() >= self.idle_poller_until.load(Ordering::Relaxed)
            && !self.poller.has_unwatched_shard()
    }

    /// Returns whether a P is idle, and a timer or a waiting goroutine needs an idle poller.
    pub(crate) fn needs_idle_poller(&self) -> bool {
        self.idle.idle_ps() != 0 && (self.poller.has_waiters() || self.next_timer() != NEVER)
    }

    /// Wakes the idle poller, or an M that becomes it, if a P is idle. Called for the first
    /// goroutine that waits in a shard that the idle poller does not watch.
    pub(crate) fn ensure_idle_poller(&self) {
        // Either this thread sees the idle P, or the thread that makes it idle sees the waiter.
        full_fence();
        if self.idle.idle_ps() != 0 && self.vacancy.since().is_none() {
            self.wake_idle_poller();
        }
    }

    /// The idle poller does not know every timer and shard: wakes it. If there is none, leaves its
    /// place vacant, or wakes an M that becomes it. The caller has a P, and is about to run a
    /// goroutine.
    pub(crate) fn update_or_vacate_idle_poller(&self) {
        let central = self.central.lock();
        let poller = central.idle_poller.0;
        // A descriptor has no known time: to wait for it for milliseconds is too long.
        let is_vacant = poller.is_none() && !self.poller.has_waiters() && self.vacancy.begin();
        drop(central);
        match poller {
            Some(m) => m.wake(),
            None if is_vacant => {}
            None => self.wake(),
        }
    }

    /// sysmon: ends the vacancy that has lasted too long, and wakes an M that becomes the idle
    /// poller if a P is idle.
    #[cold]
    pub(crate) fn end_long_vacancy(&self) {
        let central = self.central.lock();
        self.vacancy.end();
        drop(central);
        if !self.is_idle_poller_current() {
            self.wake_idle_poller();
        }
    }

    /// Wakes the idle poller, which then reads the timers and shards again. If there is none, wakes
    /// an M that searches and then becomes it.
    #[cold]
    pub(crate) fn wake_idle_poller(&self) {
        let poller = self.central.lock().idle_poller.0;
        match poller {
            // Ms are never freed, and a superfluous wake-up does no harm.
            Some(m) => m.wake(),
            None => self.wake(),
        }
    }
}

/// Wakes the goroutines whose descriptors the idle poller found ready. It takes an idle P and runs
/// them; if no P is idle, they go to a global queue. Returns true if the M has a P now.
pub(crate) fn wake_ready(own: OwnContext, ready: ReadyBatch) -> bool {
    let (m, sched) = (own.m(), own.sched());
    if ready.is_empty() {
        return false;
    }
    let mut central = sched.central.lock();
    let handed = m.handed.take();
    if handed.is_none() {
        sched.note_end_of_sleep(m);
    }
    if handed.is_none() && central.idle_poller.is(m) {
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
    let rt = own.set_p(p);
    if handed.is_none() {
        own.start_spinning();
    }
    ready.wake(Some(rt));
    true
}
