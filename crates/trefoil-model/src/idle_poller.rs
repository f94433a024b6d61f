//! Checks of the idle poller: while a P is idle, an M sleeps until the earliest timer.
//!
//! The counters (`sched/search/idle.rs`) are the real file. Around them, as in
//! [`wake`](crate::wake), a small scheduler restates steps of `search/find.rs`,
//! `search/wait_for_p.rs`, `wait/timers.rs` and `netpoll/idle_poller.rs` under the same names, with
//! the same barriers. The timer is not due while an M searches. Only the idle poller, the idle M
//! that sleeps until the timer's time, lets it fire; then all threads end. A timer for which no M
//! waits leaves all threads asleep, which loom reports as a deadlock.
//!
//! In the checks of a vacancy, goroutines end at once. The M that ran one leaves the place of the
//! idle poller vacant meanwhile, and goes idle again. (sysmon, which ends a vacancy that lasts too
//! long, is not modelled: in these checks the M comes back.)

use std::sync::Arc;

use loom::sync::{Condvar, Mutex, MutexGuard};
use loom::thread;

use crate::explore::{Bound, explore, must_fail};
use crate::idle_rs::Idle;
use crate::shim::{AtomicU32, AtomicU64, Mutation, Ordering, full_fence};
use crate::sys::clock::NEVER;

/// The time of the timer, a time before it, and one that does not come within a run of the model.
const EARLIER: u64 = 0;
const SOON: u64 = 1;
const LATER: u64 = 2;

/// The step that a mutation check leaves out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StepMutation {
    None,
    /// An M that finds work checks for more work, but not whether an M waits for the timers.
    IgnoresTimers,
    /// It checks only whether there is an idle poller, not until when that sleeps.
    IgnoresDeadline,
    /// The thread that sets a timer does not wake the idle poller.
    WakesNoM,
    /// An M that goes idle does not end the vacancy.
    KeepsVacancy,
    /// The M that becomes the idle poller does not look again if it had announced an earlier time.
    TrustsLater,
}

/// What the goroutines do.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Work {
    /// They never end.
    Endless,
    /// They end at once, and the place of the idle poller stays vacant meanwhile.
    Short,
}

/// Behind the scheduler's lock.
#[derive(Default)]
struct Central {
    idle_ps: u32,
    idle_ms: Vec<usize>,
    idle_poller: Option<usize>,
    /// Whether each M was handed a P. Then it is counted as spinning.
    handed: [bool; 2],
    /// Whether each M's parker holds a token.
    token: [bool; 2],
    /// Ps for which no M was asleep: the next M that is about to sleep takes one.
    ps_wanting_m: u32,
    fired: bool,
}

struct Model {
    idle: Idle,
    /// The earliest of all timers.
    timer: AtomicU64,
    /// As `Sched::idle_poller_until`.
    idle_poller_until: AtomicU64,
    /// As `Vacancy::since`: 1 while the place of the idle poller is vacant.
    vacant: AtomicU32,
    /// Goroutines in the global queue.
    work: AtomicU32,
    kind: Work,
    central: Mutex<Central>,
    woken: [Condvar; 2],
    mutation: StepMutation,
}

impl Model {
    fn new(first: u64, kind: Work, mutation: StepMutation) -> Arc<Model> {
        let idle = Idle::new();
        idle.start_spinning();
        idle.start_spinning();
        Arc::new(Model {
            idle,
            timer: AtomicU64::new(first),
            idle_poller_until: AtomicU64::new(NEVER),
            vacant: AtomicU32::new(0),
            work: AtomicU32::new(0),
            kind,
            central: Mutex::new(Central::default()),
            woken: [Condvar::new(), Condvar::new()],
            mutation,
        })
    }

    fn central(&self) -> MutexGuard<'_, Central> {
        self.central.lock().expect("a panic ends the model")
    }

    /// A plain thread sets the timer: `set_callback_timer`, `arrange_timer_wakeup`.
    fn set_timer(&self) {
        self.timer.store(SOON, Ordering::Relaxed);
        if self.mutation != StepMutation::WakesNoM {
            self.arrange_timer_wakeup();
        }
    }

    fn arrange_timer_wakeup(&self) {
        full_fence();
        // Without an idle P sysmon watches the timers. An M that goes idle reads them itself.
        if self.idle.idle_ps() != 0
            && SOON < self.idle_poller_until.load(Ordering::Relaxed)
            && self.vacant.load(Ordering::Relaxed) == 0
        {
            self.wake_idle_poller();
        }
    }

    fn update_or_vacate_idle_poller(&self) {
        let central = self.central();
        let idle_poller = central.idle_poller;
        let is_vacant = idle_poller.is_none() && self.kind == Work::Short;
        if is_vacant {
            self.vacant.store(1, Ordering::Relaxed);
        }
        drop(central);
        match idle_poller {
            Some(m) => self.unpark(&mut self.central(), m),
            None if is_vacant => {}
            None => self.wake(),
        }
    }

    fn end_vacancy(&self) {
        if self.vacant.load(Ordering::Relaxed) != 0 {
            self.vacant.store(0, Ordering::Relaxed);
            full_fence();
        }
    }

    fn wake_idle_poller(&self) {
        let idle_poller = self.central().idle_poller;
        match idle_poller {
            Some(m) => self.unpark(&mut self.central(), m),
            None => self.wake(),
        }
    }

    /// A plain thread submits a goroutine.
    fn submit(&self) {
        self.work.store(1, Ordering::Release);
        full_fence();
        self.wake();
    }

    fn unpark(&self, central: &mut Central, m: usize) {
        central.token[m] = true;
        self.woken[m].notify_one();
    }

    fn wake(&self) {
        if !self.idle.claim_wake() {
            return;
        }
        let mut central = self.central();
        if !self.take_idle_p(&mut central) {
            self.idle.stop_spinning();
            return;
        }
        match central.idle_ms.pop().or_else(|| self.clear_idle_poller(&mut central)) {
            Some(m) => {
                central.handed[m] = true;
                self.unpark(&mut central, m);
            }
            None => central.ps_wanting_m += 1,
        }
    }

    fn take_idle_p(&self, central: &mut Central) -> bool {
        let any = central.idle_ps != 0;
        if any {
            central.idle_ps -= 1;
            self.idle.p_taken();
        }
        any
    }

    fn clear_idle_poller(&self, central: &mut Central) -> Option<usize> {
        self.idle_poller_until.store(NEVER, Ordering::Relaxed);
        central.idle_poller.take()
    }

    /// A goroutine of an M sets the timer for its own wait, and parks: `set_wait_timer`. It wakes
    /// no M, because its own M searches next.
    fn set_own_timer(&self) {
        self.timer.store(SOON, Ordering::Relaxed);
    }

    /// Runs an M that holds a P and searches: `find_work`.
    fn thread_main(&self, me: usize) {
        loop {
            if self.work.compare_exchange(1, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                self.finish_search();
                if self.kind == Work::Endless {
                    return;
                }
                self.idle.start_spinning(); // It searches again.
            }
            if !self.give_up() && !self.wait_for_p(me) {
                return;
            }
        }
    }

    fn finish_search(&self) {
        if !self.idle.stop_spinning() {
            return;
        }
        self.idle.before_recheck();
        if self.idle.idle_ps() == 0 {
            return;
        }
        let (timer, until) =
            (self.timer.load(Ordering::Relaxed), self.idle_poller_until.load(Ordering::Relaxed));
        let is_watched = match self.mutation {
            StepMutation::IgnoresTimers => true,
            StepMutation::IgnoresDeadline => until != NEVER || timer == NEVER,
            _ => timer >= until,
        };
        if self.has_work() {
            self.wake();
        } else if !is_watched {
            self.update_or_vacate_idle_poller();
        }
    }

    fn has_work(&self) -> bool {
        self.work.load(Ordering::Acquire) != 0
    }

    /// Gives the P back. Returns true if there is work and the M has taken a P again.
    fn give_up(&self) -> bool {
        {
            let mut central = self.central();
            central.idle_ps += 1;
            self.idle.p_idle();
        }
        self.idle.stop_spinning();
        self.idle.before_recheck();
        let found = self.has_work() && self.take_idle_p(&mut self.central());
        if found {
            self.idle.start_spinning();
        }
        found
    }

    /// Sleeps until the M gets a P. Returns false if the timer has fired.
    fn wait_for_p(&self, me: usize) -> bool {
        let mut central = self.central();
        let mut slept = false;
        loop {
            if std::mem::take(&mut central.handed[me]) {
                return true; // counted as spinning by the waker
            }
            if central.fired {
                return false;
            }
            let listed = central.idle_ms.contains(&me);
            if !listed && central.ps_wanting_m != 0 {
                central.ps_wanting_m -= 1;
                if central.idle_poller == Some(me) {
                    self.clear_idle_poller(&mut central);
                }
                return true;
            }
            let until = self.enter_idle(&mut central, me, listed);
            if until == SOON {
                if slept {
                    // The timer is due.
                    self.clear_idle_poller(&mut central);
                    if self.take_idle_p(&mut central) {
                        central.fired = true;
                        self.woken.iter().for_each(Condvar::notify_one);
                        return false;
                    }
                    central.idle_ms.push(me);
                } else {
                    // It sleeps until the timer's time; meanwhile the other threads run.
                    slept = true;
                    drop(central);
                    thread::yield_now();
                    central = self.central();
                    continue;
                }
            }
            while !std::mem::take(&mut central.token[me]) && !central.fired {
                central = self.woken[me].wait(central).expect("a panic ends the model");
            }
        }
    }

    fn enter_idle(&self, central: &mut Central, me: usize, listed: bool) -> u64 {
        let is_idle_poller = central.idle_poller.is_none_or(|m| m == me) && !listed;
        if is_idle_poller && self.mutation != StepMutation::KeepsVacancy {
            self.end_vacancy();
        }
        let first = self.timer.load(Ordering::Relaxed);
        if is_idle_poller && first != NEVER {
            central.idle_poller = Some(me);
            let mut announced = first;
            loop {
                self.idle_poller_until.store(announced, Ordering::Relaxed);
                full_fence();
                let earliest = self.timer.load(Ordering::Relaxed);
                if earliest <= announced || self.mutation == StepMutation::TrustsLater {
                    self.idle_poller_until.store(earliest, Ordering::Relaxed);
                    return earliest;
                }
                announced = earliest;
            }
        }
        if !listed {
            central.idle_ms.push(me);
        }
        if let Some(idle_poller) = central.idle_poller
            && first < self.idle_poller_until.load(Ordering::Relaxed)
        {
            self.unpark(central, idle_poller);
        }
        NEVER
    }
}

/// Two Ms search while `outside` runs on a plain thread. `first` is the earliest timer before.
fn check(first: u64, mutation: StepMutation, outside: fn(&Model)) {
    check_with(first, Work::Endless, mutation, |_| (), outside);
}

/// As [`check`]. The first M runs `before_search` before it searches.
fn check_with(
    first: u64,
    kind: Work,
    mutation: StepMutation,
    before_search: fn(&Model),
    outside: fn(&Model),
) {
    explore(Bound::Preemptions(3), move || {
        let model = Model::new(first, kind, mutation);
        let threads = [0, 1].map(|me| {
            let model = model.clone();
            thread::spawn(move || {
                if me == 0 {
                    before_search(&model);
                }
                model.thread_main(me);
            })
        });
        outside(&model);
        for thread in threads {
            thread.join().expect("a panic ends the model");
        }
        assert!(model.central().fired);
    });
}

/// An M becomes the idle poller, while the timer for which it does goes away and another is set.
fn check_timer_that_goes_away(mutation: StepMutation) {
    explore(Bound::Preemptions(3), move || {
        let model = Model::new(EARLIER, Work::Endless, mutation);
        model.central().idle_ps += 1;
        model.idle.p_idle();
        let m = thread::spawn({
            let model = model.clone();
            move || {
                let mut central = model.central();
                model.enter_idle(&mut central, 0, false)
            }
        });
        model.timer.store(LATER, Ordering::Relaxed);
        model.set_timer();
        let until = m.join().expect("a panic ends the model");
        assert!(until <= SOON || model.central().token[0]);
    });
}

/// A timer is set while the M that becomes the idle poller has announced an earlier one.
pub fn timer_after_earlier_one() {
    check_timer_that_goes_away(StepMutation::None);
}

/// Mutation check: the idle poller sleeps longer than it had announced.
pub fn detects_idle_poller_that_sleeps_longer() {
    must_fail(Mutation::None, || check_timer_that_goes_away(StepMutation::TrustsLater));
}

/// Two Ms go to sleep while a timer is set.
pub fn timer_against_sleep() {
    check(NEVER, StepMutation::None, Model::set_timer);
}

/// A later timer exists, and an idle poller may already sleep until its time.
pub fn earlier_timer_against_idle_poller() {
    check(LATER, StepMutation::None, Model::set_timer);
}

/// A timer is set while an M spins, so no M is woken. The spinning M then finds a goroutine that
/// never ends.
pub fn timer_then_work() {
    check(NEVER, StepMutation::None, |model| {
        model.set_timer();
        model.submit();
    });
}

/// The same in the other order. The M that is woken for the work may be the idle poller.
pub fn work_then_earlier_timer() {
    check(LATER, StepMutation::None, |model| {
        model.submit();
        model.set_timer();
    });
}

/// A goroutine sets a timer, and its M wakes no other M, because it will check the timers itself.
/// Then it finds a goroutine that never ends, while the idle poller sleeps until a later time.
pub fn unannounced_timer_then_work() {
    check_with(LATER, Work::Endless, StepMutation::None, Model::set_own_timer, Model::submit);
}

/// An M leaves the place of the idle poller vacant while it runs a goroutine. Meanwhile a timer is
/// set, and no M is woken for it.
pub fn timer_against_vacancy() {
    check_with(
        LATER,
        Work::Short,
        StepMutation::None,
        |_| (),
        |model| {
            model.submit();
            model.set_timer();
        },
    );
}

/// The same with a timer that a goroutine of the M sets for itself.
pub fn own_timer_in_vacancy() {
    check_with(LATER, Work::Short, StepMutation::None, Model::set_own_timer, Model::submit);
}

/// Mutation check: an M that becomes the idle poller leaves its place marked as vacant.
pub fn detects_vacancy_that_does_not_end() {
    must_fail(Mutation::None, || {
        check_with(
            LATER,
            Work::Short,
            StepMutation::KeepsVacancy,
            |_| (),
            |model| {
                model.submit();
                model.set_timer();
            },
        );
    });
}

/// Mutation check: an M that finds work relies on an idle poller that sleeps too long.
pub fn detects_idle_poller_with_later_deadline() {
    must_fail(Mutation::None, || {
        let mutation = StepMutation::IgnoresDeadline;
        check_with(LATER, Work::Endless, mutation, Model::set_own_timer, Model::submit);
    });
}

/// Mutation check: an M that finds work does not check whether an M waits for the timers.
pub fn detects_unwatched_timer() {
    must_fail(Mutation::None, || {
        check(NEVER, StepMutation::IgnoresTimers, |model| {
            model.set_timer();
            model.submit();
        });
    });
}

/// Mutation check: the idle poller is not woken for an earlier timer.
pub fn detects_idle_poller_not_woken() {
    must_fail(Mutation::None, || check(LATER, StepMutation::WakesNoM, Model::set_timer));
}

/// Mutation check: without the barriers each side may miss the other's store.
pub fn detects_missing_barrier() {
    must_fail(Mutation::NoFullFence, || check(NEVER, StepMutation::None, Model::set_timer));
}
