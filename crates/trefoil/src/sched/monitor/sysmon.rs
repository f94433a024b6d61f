//! sysmon: a thread without a P that watches the others.
//!
//! What it looks for, P by P:
//! 1. A thread that **blocks** in the kernel while there is work: its P is taken (`handoff.rs`). Looked for
//!    every [`SHORTEST`] at first, then, while nothing is found, ever more rarely. Go's numbers.
//! 2. A goroutine that has run for a whole [`SLICE`] while others wait: it is preempted (`preempt.rs`).
//! 3. A goroutine that has run for [`SHORT_SLICE`] while one that was **woken** waits: by the running
//!    goroutine (`runnext`), by a timer that is due, or from outside. Those who are woken do not queue
//!    behind those who compute; the one that has run longest makes room. The same for one that has used
//!    up a slice before while others wait in its P's own queue.
//! 4. MsWithoutP (`handoff.rs`), and Ps that are to retire; in a hush (`idle.rs`), who waits while a P is idle.
//!
//! When every P is idle it sleeps until one is taken. It never waits for anything that a goroutine could
//! hold: no malloc, no std. What needs those is the helper thread's (`helper.rs`).
//!
//! Timers are kept by an idle thread (`central.rs`); where there is no idle P, sysmon wakes up in time.

use crate::mem;
use crate::sched::monitor::helper::{self, CHECK_CPUS, CHECK_DEADLOCK};
use crate::sched::netpoll::pollable::Poller;
use crate::sched::p::{P, PStatus, flag};
use crate::sched::{MAX_PROCS, Sched, monitor::preempt};
use crate::shim::full_fence;
use crate::sys::clock::{NEVER, Nanos, now};
use crate::sys::epoll::Bed;
use crate::sys::parker::Parker;
use crate::sys::probe::{Look, Probe};
use std::io;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const MICRO: Nanos = 1_000;
const MILLI: Nanos = 1_000_000;

/// A goroutine may run this long while others wait. Go's number.
pub(crate) const SLICE: Nanos = 10 * MILLI;
/// And this long while one waits that was woken.
const SHORT_SLICE: Nanos = MILLI;
/// Between two looks for blocked threads: at first, and at most. Go's numbers.
const SHORTEST: Nanos = 20 * MICRO;
const LONGEST: Nanos = 10 * MILLI;
/// At most, when no P is idle: new work waits for us then.
const LONGEST_BUSY: Nanos = 2 * MILLI;
/// How many looks without a find before they become rarer. Go's number.
const EAGER_LOOKS: u32 = 50;
/// At most, in a hush (`idle.rs`): somebody may wait behind a goroutine that computes, while a P is idle.
pub(crate) const LONGEST_SUPPRESSED: Nanos = 250 * MICRO;
/// A request for preemption may be refused: when to look again.
const INSIST: Nanos = 60 * MICRO;
/// How often those who used up their slice are remembered, if others keep every P busy.
const FAIR_EVERY: Nanos = 5 * MILLI;
const CPUS_EVERY: Nanos = 1_000 * MILLI;
/// How long nobody may have looked at the descriptors. Go's number.
const POLL_EVERY: Nanos = 10 * MILLI;
/// How long a goroutine must have run before its P is not expected to poll soon.
const HOGGED: Nanos = 200 * MICRO;
/// A runtime that has been dropped, and still has threads.
const LONGEST_STOPPING: Nanos = 100 * MILLI;
/// How long everything must be asleep before that is reported: at first, and where somebody outside wakes goroutines
/// again and again. And the last time, after which that is given up.
const FIRST_DOUBT: Nanos = 2 * MILLI;
const LATEST_FIRST_DOUBT: Nanos = 500 * MILLI;
const LAST_DOUBT: Nanos = 10_000 * MILLI;
const STACK_BYTES: usize = 256 << 10;

/// How others reach the sysmon thread.
pub(crate) struct Sysmon {
    /// Every P is idle, and it sleeps without a limit.
    asleep: AtomicBool,
    /// Until when it sleeps.
    until: AtomicU64,
    /// Someone was woken from outside while no P was idle.
    urged: AtomicBool,
    bed: Parker,
    /// It sleeps in the poller, not in its bed.
    polling: Bed,
    poller: &'static Poller,
}

impl Sysmon {
    /// One that lives for ever, with its poller.
    pub(crate) fn leak(poller: &'static Poller) -> &'static Self {
        Box::leak(Box::new(Sysmon {
            polling: Bed::new(),
            poller,
            asleep: AtomicBool::new(false),
            until: AtomicU64::new(0),
            urged: AtomicBool::new(false),
            bed: Parker::new(),
        }))
    }

    /// As new, for another runtime.
    pub(crate) fn reset(&self) {
        self.asleep.store(false, Ordering::Relaxed);
        self.until.store(0, Ordering::Relaxed);
        self.urged.store(false, Ordering::Relaxed);
    }

    /// Whether it sleeps without a limit.
    pub(crate) fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::Relaxed)
    }

    /// An idle P was taken: there is something to watch.
    pub(crate) fn wake_if_asleep(&self) {
        if self.is_asleep() && self.asleep.swap(false, Ordering::AcqRel) {
            self.wake();
        }
    }

    /// Whatever it is doing, it is to look again.
    pub(crate) fn wake(&self) {
        self.bed.unpark();
        full_fence();
        self.polling.call();
    }

    /// Sleeps until `until`, or until it is woken; in the poller, if nobody else will look there soon. (Unlike
    /// the idle poller it does not keep others from looking.)
    fn sleep(&self, until: Nanos, polls: bool) {
        if !polls || self.poller.is_slept_in() {
            self.bed.park_until(until);
            return;
        }
        let poller = self.poller;
        let ready = self
            .polling
            .lie(poller.door(), || poller.sleep(if self.bed.take_note() { 0 } else { until }));
        ready.wake(None);
    }

    /// It is to be awake at `when`.
    pub(crate) fn be_awake(&self, when: Nanos) {
        if when < self.until.load(Ordering::Relaxed) {
            self.wake();
        }
    }

    /// A timer is due at `when`, and no P may be idle. For one that is due at once there is no hurry: who set it will
    /// probably look at it, and nobody else makes room for it within [`SHORT_SLICE`].
    pub(crate) fn see_to_timer(&self, when: Nanos) {
        if when < self.until.load(Ordering::Relaxed) {
            self.be_awake(when.max(now() + SHORT_SLICE / 4));
        }
    }

    /// Somebody was woken from outside, and no P is idle.
    pub(crate) fn urge(&self) {
        if !self.urged.swap(true, Ordering::Relaxed) {
            self.be_awake(now() + SHORT_SLICE / 4);
        }
    }
}

pub(crate) fn start(sched: &Arc<Sched>) -> io::Result<()> {
    helper::start_service_thread(sched, "sysmon", STACK_BYTES, |sched| Watch::new(sched).run())
}

/// One watcher.
struct Watch<'a> {
    sched: &'a Sched,
    /// One for each P, made at once: nothing may be allocated later.
    probes: Box<[Probe]>,
    /// For each P, who is in `runnext` and since when.
    nexts: Box<[(usize, Nanos)]>,
    /// Between two looks for blocked threads, and how many of them found nothing.
    pause: Nanos,
    calm: u32,
    last_fair: Nanos,
    last_cpus: Nanos,
    /// Every P runs a goroutine that has run for a while: none of them will look at the descriptors soon.
    hogged: bool,
    /// Somebody was woken while no P was idle, and nobody had run long enough to make room.
    pending: bool,
    first_doubt: Nanos,
}

/// What is true of the runtime as a whole during one look.
struct Scene {
    now: Nanos,
    /// Someone waits in a global queue.
    global: bool,
    /// No P is idle: only those who run can take new work.
    all_busy: bool,
    /// A timer is due that an idle P would have seen to.
    due: bool,
    stopping: bool,
    /// When to look again at the latest.
    next: Nanos,
    found_blocked: bool,
    /// Since when the goroutine that has run longest runs, on which P, and the numbers of its slice and run.
    longest: Option<(Nanos, &'static P, (u32, u32))>,
}

impl<'a> Watch<'a> {
    fn new(sched: &'a Sched) -> Self {
        let probes = (0..MAX_PROCS).map(|_| Probe::new()).collect();
        let nexts = vec![(0, 0); MAX_PROCS].into();
        Watch {
            sched,
            probes,
            nexts,
            pause: SHORTEST,
            calm: 0,
            last_fair: 0,
            last_cpus: now(),
            hogged: false,
            pending: false,
            first_doubt: FIRST_DOUBT,
        }
    }

    fn run(&mut self) {
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        let sched = self.sched;
        while !sched.is_over() {
            let next = self.look();
            let me = sched.sysmon;
            call_scavenger(sched);
            if all_idle(sched) && !sched.stopping.load(Ordering::Relaxed) {
                sleep_deeply(sched, &mut self.first_doubt);
                (self.pause, self.calm) = (SHORTEST, 0);
            } else {
                me.until.store(next, Ordering::Relaxed);
                // Pairs with the barrier of who sets a timer: it sees our time, or we its timer.
                full_fence();
                if me.urged.load(Ordering::Relaxed) && sched.idle.idle_ps() == 0 {
                    continue;
                }
                let timer = if sched.idle.idle_ps() == 0 { sched.next_timer() } else { next };
                let polls = self.hogged && sched.poller.is_wanted();
                me.sleep(next.min(timer.max(now() + SHORTEST)), polls);
                me.until.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Looks at every P once. Returns when to look again.
    fn look(&mut self) -> Nanos {
        let sched = self.sched;
        let now = now();
        sched.refresh_coarse();
        let all_busy = sched.idle.idle_ps() == 0;
        let stopping = sched.stopping.load(Ordering::Relaxed);
        let mut scene = Scene {
            now,
            global: sched.has_global(),
            all_busy,
            // With an idle P some thread sees to it, unless none can be had.
            due: sched.next_timer() <= if all_busy { now } else { now.saturating_sub(SHORT_SLICE) },
            stopping,
            next: now + if stopping { LONGEST_STOPPING } else { LONGEST },
            found_blocked: false,
            longest: None,
        };
        self.hogged = all_busy;
        let fair = scene.global && now.saturating_sub(self.last_fair) >= FAIR_EVERY;
        if fair {
            self.last_fair = now;
            // To see when it begins.
            scene.next = now + INSIST;
        }
        for p in sched.all_ps() {
            if p.status() == PStatus::Running && p.holder().is_some() {
                if fair {
                    p.flags.fetch_or(flag::FAIR, Ordering::Relaxed);
                }
                self.look_at(p, &mut scene);
            }
        }
        self.make_room(&mut scene);
        if scene.due && !all_busy {
            sched.wake_idle_poller();
        }
        // Usually somebody looks already; in a hush nobody was woken for who waits.
        let suppressed = !all_busy && sched.idle.is_suppressed();
        if suppressed && sched.all_ps().any(|p| !p.is_empty()) {
            sched.wake_after_push();
        }
        if sched.preempt_ms_without_p(preempt::send) {
            scene.next = scene.next.min(now + INSIST);
        }
        sched.poller.poll_neglected(POLL_EVERY).wake(None);
        if now - self.last_cpus >= CPUS_EVERY {
            self.last_cpus = now;
            sched.helper.call(CHECK_CPUS);
        }
        if scene.found_blocked {
            (self.pause, self.calm) = (SHORTEST, 0);
        } else {
            self.calm = self.calm.saturating_add(1);
            if self.calm > EAGER_LOOKS {
                let longest = match (all_busy, suppressed) {
                    _ if stopping => LONGEST_STOPPING,
                    (true, _) => LONGEST_BUSY,
                    (_, true) => LONGEST_SUPPRESSED,
                    _ => LONGEST,
                };
                self.pause = (self.pause * 2).min(longest);
            }
        }
        scene.next.min(now + self.pause.max(if sched.is_stopped() { MILLI } else { 0 }))
    }

    fn look_at(&mut self, p: &'static P, scene: &mut Scene) {
        let sched = self.sched;
        let run = (p.tick.load(Ordering::Relaxed), p.run_number());
        let (since, run_since) = p.running_since(scene.now);
        let ran = scene.now.saturating_sub(since);
        self.hogged &= ran >= HOGGED;
        let flags = p.flags.load(Ordering::Relaxed);
        if scene.due {
            p.flags.fetch_or(flag::TIMERS, Ordering::Relaxed);
        }
        let leaves = flags & flag::RETIRE != 0 || scene.stopping;
        let wanted = leaves || scene.global || scene.due || !p.is_empty();
        // Alone, a blocked thread may keep its P for a whole slice: most calls are short.
        let mut on_cpu = true;
        if ran >= SLICE || (wanted && ran >= SHORTEST) {
            let run_nanos = scene.now.saturating_sub(run_since);
            match sched.take_from_blocked(p, &mut self.probes[p.id as usize], run_nanos) {
                Look::Blocked => {
                    scene.found_blocked = true;
                    return;
                }
                Look::Running => {}
                Look::Briefly(more) => {
                    scene.next = scene.next.min(scene.now + more.max(SHORTEST));
                    on_cpu = false;
                }
                Look::Unknown => on_cpu = false,
            }
        }
        if !wanted {
            return;
        }
        // `runnext` usually runs within microseconds: when its waker parks, or on a thief's thread.
        let next = &mut self.nexts[p.id as usize];
        let waiting = p.runq.next_hint();
        if next.0 != waiting {
            *next = (waiting, scene.now);
        }
        let stuck = waiting != 0 && scene.all_busy && scene.now - next.1 >= SHORT_SLICE;
        let limit = if leaves || stuck {
            SHORTEST
        } else if (p.runs_expired() && !p.is_empty()) || (p.runs_fresh() && p.woken.ring_len() != 0)
        {
            // Woken before fresh before expired.
            SHORT_SLICE.min(sched.config.slice)
        } else {
            sched.config.slice
        };
        if ran >= limit {
            // A thread that may sleep in the kernel is not signalled.
            preempt::request(sched, p, run, on_cpu);
            // Inside libc it will not stay long.
            let put_off =
                p.holder().is_some_and(|m| m.preempt_deferrals.load(Ordering::Relaxed) != 0);
            let again = if flags & flag::PREEMPT != 0 && !put_off { 8 * INSIST } else { INSIST };
            scene.next = scene.next.min(scene.now + again);
        } else {
            scene.next = scene.next.min(since + limit);
            if on_cpu && scene.longest.is_none_or(|(longest, ..)| run_since < longest) {
                scene.longest = Some((run_since, p, run));
            }
        }
    }

    /// Someone was woken, and no P is idle: the one that has run longest goes, if it had its share.
    fn make_room(&mut self, scene: &mut Scene) {
        let urged = self.sched.sysmon.urged.swap(false, Ordering::Relaxed);
        let urged = (urged || std::mem::take(&mut self.pending)) && scene.all_busy && scene.global;
        if !scene.due && !urged {
            return;
        }
        if urged {
            // Whoever comes to the scheduler first.
            for p in self.sched.all_ps().filter(|p| p.status() == PStatus::Running) {
                p.flags.fetch_or(flag::WOKEN, Ordering::Relaxed);
            }
        }
        let Some((since, p, run)) = scene.longest else { return };
        if scene.now.saturating_sub(since) >= SHORT_SLICE {
            preempt::request(self.sched, p, run, true);
            scene.next = scene.next.min(scene.now + INSIST);
        } else {
            self.pending = urged;
            scene.next = scene.next.min(since + SHORT_SLICE);
        }
    }
}

/// Many goroutines have ended: the helper thread gives their stacks back, in good time.
fn call_scavenger(sched: &Sched) {
    if mem::has_surplus() {
        sched.helper.call(0);
    }
}

/// Those that are to retire count too: they run until they are asked at the right moment.
fn all_idle(sched: &Sched) -> bool {
    sched.idle.idle_ps() >= sched.procs() && sched.all_ps().all(|p| p.status() != PStatus::Running)
}

/// Sleeps while every P is idle. If nothing will ever change that by itself, asks the helper thread for a report: at
/// once it may be too early (a thread may be about to end), so again after a while, ever more rarely.
/// Where somebody outside has woken a goroutine before the doubt, it may do so again: the next doubt comes later.
fn sleep_deeply(sched: &Sched, first_doubt: &mut Nanos) {
    let me = sched.sysmon;
    let mut patience = *first_doubt;
    loop {
        me.asleep.store(true, Ordering::Release);
        full_fence();
        // A P may have been taken before the flag was seen.
        if !all_idle(sched) || sched.stopping.load(Ordering::Relaxed) {
            break;
        }
        call_scavenger(sched);
        let doubtful = patience != NEVER && sched.is_asleep() && sched.num_goroutines() > 0;
        let woken = if doubtful {
            me.bed.park_until(now() + patience)
        } else {
            me.bed.park();
            true
        };
        if woken {
            if doubtful && patience == *first_doubt {
                *first_doubt = (patience * 2).min(LATEST_FIRST_DOUBT);
            }
            break;
        }
        if sched.is_asleep() {
            sched.helper.call(CHECK_DEADLOCK);
        }
        patience = if patience < LAST_DOUBT { (8 * patience).min(LAST_DOUBT) } else { NEVER };
    }
    me.asleep.store(false, Ordering::Relaxed);
}
