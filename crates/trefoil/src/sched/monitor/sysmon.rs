//! sysmon: a thread without a P that watches the Ms.
//!
//! In each round ([`Monitor::scan`]) it checks every running P ([`Monitor::check_p`]) for
//! 1. an M that is **blocked** in the kernel while there is work: its P is retaken (`handoff.rs`).
//!    The rounds begin [`MIN_PAUSE_NANOS`] apart. While no M is found blocked, they become rarer.
//!    Go's numbers.
//! 2. a goroutine that has run for a whole [`SLICE_NANOS`] while others wait: it is preempted
//!    (`preempt.rs`).
//! 3. a goroutine that has run for [`SHORT_SLICE_NANOS`] while a **woken** goroutine waits: woken
//!    by the running goroutine (`runnext`), by a timer that is due, or from outside. Woken
//!    goroutines do not queue behind goroutines that compute: the goroutine that has run longest is
//!    preempted. The same applies to an expired goroutine that runs again while others wait in its
//!    P's own queue.
//!
//! It also preempts Ms without a P that compute (`handoff.rs`) and goroutines on Ps that are to
//! retire, and, while wake-ups are suppressed (`idle.rs`), wakes an M if work waits and a P is
//! idle.
//!
//! When every P is idle, it sleeps until a P is taken, and meanwhile checks for deadlocks
//! ([`Monitor::sleep_while_idle`]). To wake it for every goroutine that runs for a few microseconds
//! would cost more than the goroutine. So while Ps are taken often, and lately no M was found
//! blocked and no goroutine ran for long, it sleeps for [`LIGHT_PAUSE_NANOS`] at a time instead,
//! and is not woken. A blocked M, or a timer that is due while a goroutine computes, may have to
//! wait for the end of that sleep.
//!
//! It never waits for anything that a goroutine could hold: no malloc, no std. The helper thread
//! does what needs those (`helper.rs`).
//!
//! The idle poller runs due timers (`netpoll/idle_poller.rs`). When no P is idle there is no idle
//! poller, and sysmon wakes up in time (unless it sleeps lightly). If the place of the idle poller
//! is vacant for too long, sysmon wakes an M that becomes it.

use crate::mem;
use crate::sched::monitor::helper::{self, Request};
use crate::sched::monitor::preempt::{self, RequestBy};
use crate::sched::netpoll::idle_poller::VACANCY_NANOS;
use crate::sched::netpoll::poller::Poller;
use crate::sched::p::{P, PStatus, flag};
use crate::sched::record;
use crate::sched::{MAX_PROCS, Sched};
use crate::shim::{fence_after_rmw, full_fence};
use crate::sys::clock::{NEVER, Nanos, now};
use crate::sys::epoll::PollSlot;
use crate::sys::parker::Parker;
use crate::sys::probe::{ThreadProbe, ThreadState};
use crate::sys::syscalls;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const MICROS: Nanos = 1_000;
const MILLIS: Nanos = 1_000_000;

/// How long a goroutine may run while others wait. Go's number.
pub(crate) const SLICE_NANOS: Nanos = 10 * MILLIS;
/// How long it may run while a woken goroutine waits.
const SHORT_SLICE_NANOS: Nanos = MILLIS;
/// The pause between two rounds: the first, and the longest. Go's numbers.
const MIN_PAUSE_NANOS: Nanos = 20 * MICROS;
const MAX_PAUSE_NANOS: Nanos = 10 * MILLIS;
/// The longest pause when no P is idle: then new work waits for sysmon.
const MAX_PAUSE_BUSY_NANOS: Nanos = 2 * MILLIS;
/// The longest pause while wake-ups are suppressed (`idle.rs`): a goroutine may wait behind one
/// that computes, while a P is idle.
pub(crate) const MAX_PAUSE_SUPPRESSED_NANOS: Nanos = 250 * MICROS;
/// The pause if all Ps are idle and were not all idle since the last round. Also the longest pause
/// while the place of the idle poller is vacated from time to time.
const LIGHT_PAUSE_NANOS: Nanos = 2 * MILLIS;
/// How long an M that was found blocked makes sysmon watch every P that is taken, at once.
const EAGER_AFTER_BLOCK_NANOS: Nanos = 1_000 * MILLIS;
/// The same for a goroutine that was found to run for more than [`SHORT_SLICE_NANOS`]. A stall of
/// the whole machine looks like that too, so the time is short.
const EAGER_AFTER_LONG_RUN_NANOS: Nanos = 100 * MILLIS;
/// The longest pause in a runtime that shuts down and still has threads.
const MAX_PAUSE_STOPPING_NANOS: Nanos = 100 * MILLIS;
/// Rounds without a blocked M before the pause grows. Go's number.
const EAGER_ROUNDS: u32 = 50;
/// When to check again after a request for preemption, which may be refused.
const PREEMPT_RETRY_NANOS: Nanos = 60 * MICROS;
/// How often a P takes from the expired queue, if other goroutines keep every P busy.
const FAIR_INTERVAL_NANOS: Nanos = 5 * MILLIS;
/// How often the number of CPUs is checked.
const CPUS_INTERVAL_NANOS: Nanos = 1_000 * MILLIS;
/// The time after which sysmon polls a shard that no M has polled. Go's number.
const POLL_INTERVAL_NANOS: Nanos = 10 * MILLIS;
/// If a goroutine has run for longer, its P is not expected to poll its shard soon.
const HOG_NANOS: Nanos = 200 * MICROS;
/// How long everything must be asleep before the first deadlock check. The delay doubles, up to the
/// maximum, if wake-ups from outside arrive before the check.
const FIRST_DEADLOCK_CHECK_NANOS: Nanos = 2 * MILLIS;
const MAX_FIRST_DEADLOCK_CHECK_NANOS: Nanos = 500 * MILLIS;
/// The delay before the last deadlock check.
const LAST_DEADLOCK_CHECK_NANOS: Nanos = 10_000 * MILLIS;
const STACK_BYTES: usize = 256 << 10;

/// The part of sysmon that other threads use.
pub(crate) struct Sysmon {
    /// Every P is idle, and the thread sleeps without a limit.
    asleep: AtomicBool,
    /// The time until which the thread sleeps between two rounds; 0 while it is awake.
    sleeps_until: AtomicU64,
    /// A goroutine was woken from outside while no P was idle.
    wakeup_pending: AtomicBool,
    parker: Parker,
    /// Where the thread sleeps while it sleeps in the poller instead of its parker.
    polling: PollSlot,
    poller: &'static Poller,
}

impl Sysmon {
    /// Makes a sysmon for `poller`. It is never freed, like its poller.
    pub(crate) fn leak(poller: &'static Poller) -> &'static Self {
        Box::leak(Box::new(Sysmon {
            polling: PollSlot::new(),
            poller,
            asleep: AtomicBool::new(false),
            sleeps_until: AtomicU64::new(0),
            wakeup_pending: AtomicBool::new(false),
            parker: Parker::new(),
        }))
    }

    /// Prepares it for another runtime.
    pub(crate) fn reset(&self) {
        self.asleep.store(false, Ordering::Relaxed);
        self.sleeps_until.store(0, Ordering::Relaxed);
        self.wakeup_pending.store(false, Ordering::Relaxed);
    }

    /// Returns whether the thread sleeps without a limit.
    pub(crate) fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::Relaxed)
    }

    /// Wakes the thread if it sleeps without a limit. Called when an idle P was taken.
    pub(crate) fn wake_if_asleep(&self) {
        // Acquire: pairs with the Release in `sleep_while_idle`. Of several callers one wakes.
        if self.is_asleep() && self.asleep.swap(false, Ordering::AcqRel) {
            self.wake();
        }
    }

    /// Makes the thread begin another round, whatever it is doing.
    pub(crate) fn wake(&self) {
        self.parker.unpark();
        full_fence();
        self.polling.wake();
    }

    /// Sleeps in the poller until `until`, or until the thread is woken, and wakes the goroutines
    /// whose descriptors are ready. Unlike the idle poller it does not keep Ms from polling.
    fn sleep_polling(&self, until: Nanos) {
        let poller = self.poller;
        let ready = self.polling.wait_in(poller.wakeup_epoll(), || {
            poller.sleep(if self.parker.take_token() { 0 } else { until })
        });
        ready.wake(None);
    }

    /// Makes sure that the thread is awake at `when`.
    pub(crate) fn wake_by(&self, when: Nanos) {
        if when < self.sleeps_until.load(Ordering::Relaxed) {
            self.wake();
        }
    }

    /// Makes sure that the thread is awake for a timer that is due at `when`, while no P may be
    /// idle. A timer that is due at once is not urgent: the P on which it was set will probably run
    /// it, and no other P would be preempted for it within [`SHORT_SLICE_NANOS`].
    pub(crate) fn arrange_timer_wakeup(&self, when: Nanos) {
        if when < self.sleeps_until.load(Ordering::Relaxed) {
            self.wake_by(when.max(now() + SHORT_SLICE_NANOS / 4));
        }
    }

    /// Asks for a preemption, because a goroutine was woken from outside and no P is idle.
    pub(crate) fn preempt_for_wakeup(&self) {
        // Release: pairs with the Acquire of sysmon, which then sees no idle P, as this thread.
        if !self.wakeup_pending.swap(true, Ordering::Release) {
            // Pairs with the barrier in `sleep_until`: this thread sees until when sysmon sleeps,
            // or sysmon sees the request.
            fence_after_rmw();
            self.wake_by(now() + SHORT_SLICE_NANOS / 4);
        }
    }
}

/// Starts the sysmon thread of `sched`.
pub(crate) fn start(sched: &Arc<Sched>) -> io::Result<()> {
    helper::start_service_thread(sched, "sysmon", STACK_BYTES, |sched| Monitor::new(sched).run())
}

/// The state of the sysmon thread.
struct Monitor<'a> {
    sched: &'a Sched,
    /// One per P, made in advance: sysmon must not allocate later.
    probes: Box<[ThreadProbe]>,
    /// For each P: the goroutine in `runnext`, and since when it has been there.
    runnexts: Box<[(usize, Nanos)]>,
    /// For each P: in the last round it ran a goroutine that had begun less than [`HOG_NANOS`]
    /// before. It comes to the scheduler often, and runs its timers itself.
    runs_timers: Box<[bool]>,
    /// The pause between two rounds.
    pause: Nanos,
    /// The number of rounds since an M was last found blocked.
    rounds_without_block: u32,
    /// Until when sysmon is woken for every P that is taken.
    eager_until: Nanos,
    /// `Idle::ps_taken` when all Ps were last found idle.
    ps_taken: u32,
    /// When `flag::FAIR` was last set on the Ps.
    last_fair: Nanos,
    /// When the number of CPUs was last checked.
    last_cpus: Nanos,
    /// Every P runs a goroutine that has run for [`HOG_NANOS`]: no P will poll its shard soon.
    hogged: bool,
    /// A goroutine was woken while no P was idle, and no running goroutine had run long enough to
    /// be preempted.
    preempt_later: bool,
    /// How long the next sleep lasts before its first deadlock check.
    first_deadlock_check: Nanos,
}

/// What is true of the whole runtime during one round.
struct Round {
    now: Nanos,
    /// A goroutine waits in a global queue.
    has_global: bool,
    /// No P is idle: only running Ms can take new work.
    all_busy: bool,
    /// A timer is due that an idle P would have run already.
    timer_due: bool,
    /// The runtime shuts down.
    stopping: bool,
    /// Wake-ups are suppressed (`idle.rs`), so possibly no M was woken for work that waits.
    suppressed: bool,
    /// When the next round must begin at the latest.
    next: Nanos,
    /// An M was found blocked.
    found_blocked: bool,
    /// A goroutine was asked to stop.
    asked: bool,
    /// A P is not idle whose goroutine has run for [`SHORT_SLICE_NANOS`].
    computes: bool,
    /// The goroutine to stop for a woken one, or for a timer.
    victim: Option<Victim>,
}

/// A running goroutine that has not run for its slice yet.
struct Victim {
    run_since: Nanos,
    p: &'static P,
    /// The numbers of its slice and run.
    run: (u32, u32),
    by: RequestBy,
}

impl Victim {
    /// Returns whether this goroutine is to stop rather than `other`: one that a signal may stop
    /// does so at once; of two, the one that has run longer.
    fn is_better_than(&self, other: &Victim) -> bool {
        let has_signal = |victim: &Victim| victim.by == RequestBy::FlagAndSignal;
        match (has_signal(self), has_signal(other)) {
            (true, false) => true,
            (false, true) => false,
            _ => self.run_since < other.run_since,
        }
    }
}

impl Round {
    fn new(sched: &Sched) -> Round {
        let now = now();
        sched.refresh_coarse();
        let all_busy = sched.idle.idle_ps() == 0;
        let stopping = sched.stopping.load(Ordering::Relaxed);
        // If a P is idle, the idle poller runs a timer in time, unless no M is available.
        let late = if all_busy { now } else { now.saturating_sub(SHORT_SLICE_NANOS) };
        Round {
            now,
            has_global: sched.has_global(),
            all_busy,
            timer_due: sched.next_timer() <= late,
            stopping,
            suppressed: false,
            next: now + if stopping { MAX_PAUSE_STOPPING_NANOS } else { MAX_PAUSE_NANOS },
            found_blocked: false,
            asked: false,
            computes: false,
            victim: None,
        }
    }

    /// Makes the next round begin at `when` at the latest.
    fn next_by(&mut self, when: Nanos) {
        self.next = self.next.min(when);
    }
}

impl<'a> Monitor<'a> {
    fn new(sched: &'a Sched) -> Self {
        Monitor {
            sched,
            probes: (0..MAX_PROCS).map(|_| ThreadProbe::new()).collect(),
            runnexts: vec![(0, 0); MAX_PROCS].into(),
            runs_timers: vec![false; MAX_PROCS].into(),
            pause: MIN_PAUSE_NANOS,
            rounds_without_block: 0,
            eager_until: 0,
            ps_taken: 0,
            last_fair: 0,
            last_cpus: now(),
            hogged: false,
            preempt_later: false,
            first_deadlock_check: FIRST_DEADLOCK_CHECK_NANOS,
        }
    }

    fn run(&mut self) {
        // Linux may delay the end of a sleep by the thread's timer slack, by default 50 µs. The
        // shortest pause is 20 µs.
        syscalls::set_timer_slack(1);
        let sched = self.sched;
        while !sched.is_terminated() {
            let next = self.scan();
            wake_scavenger(sched);
            if must_watch(sched) {
                self.sleep_until(next);
            } else if self.may_sleep_lightly() {
                // sysmon does not watch for a lone `runnext` entry meanwhile, so Ms are woken for
                // it again.
                sched.idle.search_succeeded();
                self.sleep_until(now() + LIGHT_PAUSE_NANOS);
            } else {
                self.sleep_while_idle();
                (self.pause, self.rounds_without_block) = (MIN_PAUSE_NANOS, 0);
            }
        }
        // Orphaned goroutines keep the runtime, and a test may leave thousands of runtimes.
        sched.record.end_waker_samples();
        if let Some(simulation) = &sched.simulation {
            sched.poller.close();
            simulation.uncount();
        }
    }

    /// All Ps are idle: returns whether sysmon sleeps for a limited time without being woken.
    fn may_sleep_lightly(&mut self) -> bool {
        let taken = self.sched.idle.ps_taken();
        let was_busy = std::mem::replace(&mut self.ps_taken, taken) != taken;
        was_busy && now() >= self.eager_until && self.sched.vacancy.since().is_none()
    }

    /// Runs one round: checks every running P once. Returns when the next round must begin.
    fn scan(&mut self) -> Nanos {
        let sched = self.sched;
        let mut round = Round::new(sched);
        let now = round.now;
        self.hogged = round.all_busy;
        let fair = round.has_global && now.saturating_sub(self.last_fair) >= FAIR_INTERVAL_NANOS;
        if fair {
            self.last_fair = now;
            // The next round must see when the slice of the next goroutine begins.
            round.next_by(now + PREEMPT_RETRY_NANOS);
        }
        // A simulation preempts its goroutines itself, polls when it decides to, and its P is never
        // retaken.
        let is_watched = sched.simulation.is_none() || round.stopping;
        for p in sched.all_ps() {
            self.runs_timers[p.id as usize] = false;
            if is_watched && p.status() == PStatus::Running && p.holder().is_some() {
                if fair {
                    p.flags.fetch_or(flag::FAIR, Ordering::Relaxed);
                }
                self.check_p(p, &mut round);
            }
        }
        record::mark(sched, now);
        sched.sample_usage(now);
        round.next_by(sched.scan_runnable(now));
        sched.time_next_on_all_ps();
        self.preempt_for_waiting(&mut round);
        self.wake_idle_ms(&mut round);
        self.check_vacancy(&mut round);
        if sched.preempt_ms_without_p(preempt::send_signal) {
            round.next_by(now + PREEMPT_RETRY_NANOS);
        }
        if is_watched {
            sched.poller.poll_neglected(POLL_INTERVAL_NANOS).wake(None);
        }
        if now - self.last_cpus >= CPUS_INTERVAL_NANOS {
            self.last_cpus = now;
            sched.helper.request(Request::CheckCpus);
        }
        self.adapt_pause(&round);
        // In a drained runtime sysmon mostly waits for the Ms to end.
        let min_pause = if sched.is_drained() { MILLIS } else { 0 };
        round.next.min(now + self.pause.max(min_pause))
    }

    /// Checks a running P: retakes it if its M is blocked, and preempts its goroutine if that has
    /// run too long.
    fn check_p(&mut self, p: &'static P, round: &mut Round) {
        let run = (p.tick.load(Ordering::Relaxed), p.run_number());
        let (slice_since, run_since) = p.running_since(round.now);
        let ran = round.now.saturating_sub(slice_since);
        self.hogged &= ran >= HOG_NANOS;
        self.runs_timers[p.id as usize] = ran < HOG_NANOS;
        if ran >= SHORT_SLICE_NANOS {
            self.eager_until = self.eager_until.max(round.now + EAGER_AFTER_LONG_RUN_NANOS);
            round.computes = true;
        }
        let flags = p.flags.load(Ordering::Relaxed);
        if round.timer_due {
            p.flags.fetch_or(flag::TIMERS, Ordering::Relaxed);
        }
        // The goroutine must stop soon, even if no other waits.
        let must_stop = flags & flag::RETIRE != 0 || round.stopping;
        let wanted = must_stop || round.has_global || round.timer_due || !p.is_empty();
        let mut by = RequestBy::FlagAndSignal;
        // If no other goroutine wants the P, a blocked M may keep it for a whole slice: most calls
        // are short.
        if ran >= SLICE_NANOS || (wanted && ran >= MIN_PAUSE_NANOS) {
            match self.probe_holder(p, run_since, round) {
                Some(found) => by = found,
                None => return,
            }
        }
        if !wanted {
            return;
        }
        let limit = self.slice_limit(p, must_stop, round);
        if ran >= limit {
            preempt::request(self.sched, p, run, by);
            round.asked = true;
            // If a goroutine was asked before and goes on, the next check comes later; except if it
            // was found inside libc, which it will leave soon.
            let deferred =
                p.holder().is_some_and(|m| m.preempt_deferrals.load(Ordering::Relaxed) != 0);
            let repeated = flags & flag::PREEMPT != 0 && !deferred;
            let retry = if repeated { 8 * PREEMPT_RETRY_NANOS } else { PREEMPT_RETRY_NANOS };
            round.next_by(round.now + retry);
        } else {
            round.next_by(slice_since + limit);
            let victim = Victim { run_since, p, run, by };
            if round.victim.as_ref().is_none_or(|other| victim.is_better_than(other)) {
                round.victim = Some(victim);
            }
        }
    }

    /// Probes the M that has `p`, and retakes the P if the M is blocked: then returns None.
    /// Otherwise returns how the goroutine, which has run since `run_since`, may be asked to stop.
    /// A thread that may sleep in the kernel is not signalled.
    fn probe_holder(
        &mut self,
        p: &'static P,
        run_since: Nanos,
        round: &mut Round,
    ) -> Option<RequestBy> {
        let run_nanos = round.now.saturating_sub(run_since);
        let probe = &mut self.probes[p.id as usize];
        match self.sched.retake_from_blocked(p, probe, run_nanos) {
            ThreadState::Blocked => {
                round.found_blocked = true;
                None
            }
            ThreadState::Running => Some(RequestBy::FlagAndSignal),
            ThreadState::BrieflyBlocked(more) => {
                round.next_by(round.now + more.max(MIN_PAUSE_NANOS));
                Some(RequestBy::Flag)
            }
            ThreadState::Unknown => Some(RequestBy::Flag),
        }
    }

    /// Returns how long the goroutine on `p` may run.
    fn slice_limit(&mut self, p: &P, must_stop: bool, round: &Round) -> Nanos {
        // `runnext` usually runs within microseconds: when its waker parks, or on an M that steals
        // it.
        let runnext = &mut self.runnexts[p.id as usize];
        let waiting = p.runq.next_hint();
        if runnext.0 != waiting {
            *runnext = (waiting, round.now);
        }
        let runnext_waits =
            waiting != 0 && round.all_busy && round.now - runnext.1 >= SHORT_SLICE_NANOS;
        if must_stop || runnext_waits {
            return MIN_PAUSE_NANOS;
        }
        let slice = self.sched.config.slice;
        // The order of precedence: woken goroutines, fresh goroutines, expired goroutines.
        let has_precedence =
            (p.runs_expired() && !p.is_empty()) || (p.runs_fresh() && p.woken.ring_len() != 0);
        if has_precedence { SHORT_SLICE_NANOS.min(slice) } else { slice }
    }

    /// Preempts a goroutine, if a timer is due, or a goroutine was woken while no P is idle. If that goroutine has not run for [`SHORT_SLICE_NANOS`], a later round
    /// does it.
    fn preempt_for_waiting(&mut self, round: &mut Round) {
        // Acquire: pairs with the Release in `preempt_for_wakeup`. If the thread that asks has seen
        // no idle P, neither does sysmon, unless one has become idle since.
        let pending = self.sched.sysmon.wakeup_pending.swap(false, Ordering::Acquire);
        let pending = pending || std::mem::take(&mut self.preempt_later);
        // Not as the round has begun: the request may have come since.
        let woken = pending && self.sched.idle.idle_ps() == 0 && self.sched.has_global();
        if !round.timer_due && !woken {
            return;
        }
        if woken {
            // The first M that comes to the scheduler takes the woken goroutine.
            for p in self.sched.all_ps().filter(|p| p.status() == PStatus::Running) {
                p.flags.fetch_or(flag::WOKEN, Ordering::Relaxed);
            }
        }
        let Some(Victim { run_since, p, run, by }) = round.victim else {
            self.preempt_later = woken;
            // Those that were asked have a time for the next check. Otherwise none was wanted when
            // this round checked the Ps.
            if woken && !round.asked {
                round.next_by(round.now + PREEMPT_RETRY_NANOS);
            }
            return;
        };
        if round.now.saturating_sub(run_since) >= SHORT_SLICE_NANOS {
            preempt::request(self.sched, p, run, by);
            // The flag alone stops a goroutine at its next runtime call, and it may make none.
            self.preempt_later = woken && by == RequestBy::Flag;
            round.next_by(round.now + PREEMPT_RETRY_NANOS);
        } else {
            self.preempt_later = woken;
            round.next_by(run_since + SHORT_SLICE_NANOS);
        }
    }

    /// Wakes an M for a late timer, and for work for which no M was woken, if a P is idle.
    fn wake_idle_ms(&mut self, round: &mut Round) {
        let sched = self.sched;
        if round.all_busy {
            return;
        }
        if round.timer_due {
            sched.wake_idle_poller();
        }
        // If work waits, usually an M searches already; not while wake-ups are suppressed.
        round.suppressed = sched.idle.is_suppressed();
        if round.suppressed && sched.all_ps().any(|p| !p.is_empty()) {
            sched.wake_after_push();
        }
    }

    /// Ends a vacancy of the idle poller's place that has lasted too long.
    fn check_vacancy(&mut self, round: &mut Round) {
        let vacancy = &self.sched.vacancy;
        if round.now.saturating_sub(vacancy.last()) < MAX_PAUSE_NANOS {
            round.next_by(round.now + LIGHT_PAUSE_NANOS);
        }
        let Some(since) = vacancy.since() else { return };
        if round.now.saturating_sub(since) > VACANCY_NANOS {
            self.sched.end_long_vacancy();
        } else {
            round.next_by(since + VACANCY_NANOS + MIN_PAUSE_NANOS);
        }
    }

    /// Resets the pause if an M was found blocked; otherwise lets it grow after [`EAGER_ROUNDS`].
    fn adapt_pause(&mut self, round: &Round) {
        if round.found_blocked {
            self.eager_until = round.now + EAGER_AFTER_BLOCK_NANOS;
            (self.pause, self.rounds_without_block) = (MIN_PAUSE_NANOS, 0);
            return;
        }
        self.rounds_without_block = self.rounds_without_block.saturating_add(1);
        if self.rounds_without_block > EAGER_ROUNDS {
            let max = match (round.all_busy, round.suppressed) {
                _ if round.stopping => MAX_PAUSE_STOPPING_NANOS,
                (true, _) => MAX_PAUSE_BUSY_NANOS,
                (_, true) => MAX_PAUSE_SUPPRESSED_NANOS,
                // Soon no P may be idle, and nothing wakes sysmon for the timers that the idle
                // poller has watched.
                _ if round.computes => MAX_PAUSE_BUSY_NANOS,
                _ => MAX_PAUSE_NANOS,
            };
            self.pause = (self.pause * 2).min(max);
        }
    }

    /// Sleeps until `next`, or until the next timer if no P is idle; in the poller, if no P will
    /// poll soon and the idle poller is not blocked there.
    fn sleep_until(&self, next: Nanos) {
        let (sched, sysmon) = (self.sched, self.sched.sysmon);
        sysmon.sleeps_until.store(next, Ordering::Relaxed);
        // Pairs with the barriers of a thread that sets a timer, asks for a preemption or suppresses
        // wake-ups: it sees until when sysmon sleeps, or sysmon sees what it did.
        full_fence();
        // A request is removed if a P is idle by now: while one is there, no other wakes sysmon.
        // Acquire: as in `preempt_for_waiting`.
        if sysmon.wakeup_pending.swap(false, Ordering::Acquire) && sched.idle.idle_ps() == 0 {
            sysmon.wakeup_pending.store(true, Ordering::Relaxed);
            return;
        }
        let until = if sched.idle.idle_ps() == 0 {
            next.min(self.next_timer())
        } else if sched.idle.is_suppressed() {
            // Perhaps only since this round.
            next.min(now() + MAX_PAUSE_SUPPRESSED_NANOS)
        } else {
            next
        };
        let poller = sysmon.poller;
        // A simulation polls when it decides to.
        let may_poll = self.hogged && sched.simulation.is_none();
        if may_poll && poller.has_waiters() && !poller.has_blocked_idle_poller() {
            sysmon.sleep_polling(until);
        } else {
            sysmon.parker.park_until(until);
        }
        sysmon.sleeps_until.store(0, Ordering::Relaxed);
    }

    /// Returns when sysmon must be awake for the earliest timer, if no P is idle. A P that comes to
    /// the scheduler often is given a while to run its timers itself.
    fn next_timer(&self) -> Nanos {
        let now = now();
        let wakeup = |p: &P| {
            let runs_timers = self.runs_timers[p.id as usize];
            let pause = if runs_timers { SHORT_SLICE_NANOS / 4 } else { MIN_PAUSE_NANOS };
            p.timers.next().max(now + pause)
        };
        self.sched.all_ps().map(wakeup).min().unwrap_or(NEVER)
    }

    /// Sleeps while every P is idle.
    ///
    /// If nothing that the runtime knows of will change that, asks the helper thread for a deadlock
    /// check. The first check may come too early (a thread may be about to end), so it is repeated
    /// after longer and longer delays. If a wake-up from outside arrives before the first check,
    /// the delay before the first check of the next sleep doubles.
    fn sleep_while_idle(&mut self) {
        let (sched, sysmon) = (self.sched, self.sched.sysmon);
        let mut delay = self.first_deadlock_check;
        loop {
            sysmon.asleep.store(true, Ordering::Release);
            full_fence();
            // The thread that takes a P sees the flag; or sysmon sees here that the P was taken.
            if must_watch(sched) {
                break;
            }
            // The M that vacated the place of the idle poller had a P, so its vacancy is visible.
            if sched.vacancy.since().is_some() {
                sched.end_long_vacancy();
                break;
            }
            wake_scavenger(sched);
            let suspicious = delay != NEVER
                && sched.is_asleep()
                && sched.num_goroutines() + sched.num_tasks() > 0;
            let woken = if suspicious {
                sysmon.parker.park_until(now() + delay)
            } else {
                sysmon.parker.park();
                true
            };
            if woken {
                if suspicious && delay == self.first_deadlock_check {
                    self.first_deadlock_check = (delay * 2).min(MAX_FIRST_DEADLOCK_CHECK_NANOS);
                }
                break;
            }
            if sched.is_asleep() {
                sched.helper.request(Request::CheckDeadlock);
            }
            let is_last = delay >= LAST_DEADLOCK_CHECK_NANOS;
            delay = if is_last { NEVER } else { (8 * delay).min(LAST_DEADLOCK_CHECK_NANOS) };
        }
        sysmon.asleep.store(false, Ordering::Relaxed);
    }
}

/// Wakes the helper thread if many goroutines have ended, so that it releases their stacks.
fn wake_scavenger(sched: &Sched) {
    if mem::has_surplus() {
        sched.helper.wake();
    }
}

/// Returns whether sysmon is needed, and must not sleep without a limit.
fn must_watch(sched: &Sched) -> bool {
    !all_idle(sched) || sched.stopping.load(Ordering::Relaxed) || no_m_is_free(sched)
}

/// Returns whether no M could take an idle P, because all run goroutines without one. If no thread
/// can be started, other goroutines wait until one of these Ms is free, and a goroutine that
/// computes must be preempted for them.
fn no_m_is_free(sched: &Sched) -> bool {
    sched.ms_without_p.load(Ordering::Relaxed) != 0 && sched.has_no_spare()
}

/// Returns whether every P is idle. A P that is to retire counts while it runs: its goroutine must
/// still be asked to stop.
fn all_idle(sched: &Sched) -> bool {
    sched.idle.idle_ps() >= sched.procs() && sched.all_ps().all(|p| p.status() != PStatus::Running)
}
