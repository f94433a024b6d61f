//! Checks of the idle poller (`sched/central.rs`, `sched/find.rs`): no timer is forgotten while a P is idle.
//!
//! A small scheduler around the real counters, as in [`wake`](crate::wake): what `wait_for_p`, `enter_idle`, `see_to_timer`
//! and `stop_spinning` do, step for step and with the same barriers. A timer is set from outside. Who searches comes too
//! early for it; only an idle thread that sleeps until its time (the idle poller) lets it fire, and sends the others home. So
//! a timer that nobody keeps leaves everybody asleep, which loom reports as a deadlock.

use std::sync::Arc;

use loom::sync::{Condvar, Mutex, MutexGuard};
use loom::thread;

use crate::explore::{Bound, explore, must_fail};
use crate::idle_rs::Idle;
use crate::shim::{AtomicU32, AtomicU64, Mutation, Ordering, full_fence};
use crate::sys::clock::NEVER;

/// The time of the timer, which comes; and one that does not within a run of the model.
const SOON: u64 = 1;
const LATER: u64 = 2;

/// What is done wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    /// Who finds work looks for more work, but not whether somebody keeps the timers.
    LeavesTimersUnkept,
    /// It looks only whether there is an idle poller, not whether he knows of this timer.
    AnyKeeperWillDo,
    /// Who sets a timer does not hurry the idle poller.
    HurriesNobody,
}

/// Behind the scheduler's lock.
#[derive(Default)]
struct Central {
    idle_ps: u32,
    idle_ms: Vec<usize>,
    idle_poller: Option<usize>,
    /// Who was handed a P, with a claim on spinning.
    handed: [bool; 2],
    /// Notes in the threads' beds.
    noted: [bool; 2],
    /// Ps for which no thread was in bed: the next that comes by takes one.
    orphans: u32,
    fired: bool,
}

struct World {
    idle: Idle,
    /// The earliest of all timers.
    timer: AtomicU64,
    /// As `Sched::idle_poller_until`.
    idle_poller_until: AtomicU64,
    /// Goroutines in the global queue. They never end.
    work: AtomicU32,
    central: Mutex<Central>,
    beds: [Condvar; 2],
    flaw: Flaw,
}

impl World {
    fn new(first: u64, flaw: Flaw) -> Arc<World> {
        let idle = Idle::new();
        idle.start_spinning();
        idle.start_spinning();
        Arc::new(World {
            idle,
            timer: AtomicU64::new(first),
            idle_poller_until: AtomicU64::new(NEVER),
            work: AtomicU32::new(0),
            central: Mutex::new(Central::default()),
            beds: [Condvar::new(), Condvar::new()],
            flaw,
        })
    }

    fn central(&self) -> MutexGuard<'_, Central> {
        self.central.lock().expect("a panic ends the model")
    }

    /// A plain thread sets the timer: `set_alarm`, `see_to_timer`.
    fn set_timer(&self) {
        self.timer.store(SOON, Ordering::Relaxed);
        if self.flaw != Flaw::HurriesNobody {
            self.see_to_timer();
        }
    }

    fn see_to_timer(&self) {
        full_fence();
        // With no idle P sysmon sees to it, until there is one: then its thread lies down.
        if self.idle.idle_ps() != 0 && SOON < self.idle_poller_until.load(Ordering::Relaxed) {
            self.wake_idle_poller();
        }
    }

    fn wake_idle_poller(&self) {
        let keeper = self.central().idle_poller;
        match keeper {
            Some(m) => self.rouse(&mut self.central(), m),
            None => self.wake(),
        }
    }

    /// A plain thread submits a goroutine.
    fn submit(&self) {
        self.work.store(1, Ordering::Release);
        full_fence();
        self.wake();
    }

    fn rouse(&self, central: &mut Central, m: usize) {
        central.noted[m] = true;
        self.beds[m].notify_one();
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
                self.rouse(&mut central, m);
            }
            None => central.orphans += 1,
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

    /// A thread that holds a P and searches, from then on: `find_work`. `sleeper`: a goroutine has just gone to sleep
    /// here, and told nobody.
    fn thread_main(&self, me: usize, sleeper: bool) {
        if sleeper {
            self.timer.store(SOON, Ordering::Relaxed);
        }
        loop {
            if self.work.compare_exchange(1, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                self.stop_spinning();
                return; // and never comes back
            }
            if !self.give_up() && !self.wait_for_p(me) {
                return;
            }
        }
    }

    fn stop_spinning(&self) {
        if !self.idle.stop_spinning() {
            return;
        }
        self.idle.before_recheck();
        if self.idle.idle_ps() == 0 {
            return;
        }
        let (timer, until) =
            (self.timer.load(Ordering::Relaxed), self.idle_poller_until.load(Ordering::Relaxed));
        let is_kept = match self.flaw {
            Flaw::LeavesTimersUnkept => true,
            Flaw::AnyKeeperWillDo => until != NEVER || timer == NEVER,
            _ => timer >= until,
        };
        if self.has_work() {
            self.wake();
        } else if !is_kept {
            self.wake_idle_poller();
        }
    }

    fn has_work(&self) -> bool {
        self.work.load(Ordering::Acquire) != 0
    }

    /// True: there is work, and it has a P again.
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

    /// False: the timer has fired, by whomever.
    fn wait_for_p(&self, me: usize) -> bool {
        let mut central = self.central();
        let mut slept = false;
        loop {
            if std::mem::take(&mut central.handed[me]) {
                return true; // the waker's claim
            }
            if central.fired {
                return false;
            }
            let listed = central.idle_ms.contains(&me);
            if !listed && central.orphans != 0 {
                central.orphans -= 1;
                if central.idle_poller == Some(me) {
                    self.clear_idle_poller(&mut central);
                }
                return true;
            }
            let until = self.enter_idle(&mut central, me, listed);
            if until == SOON {
                if slept {
                    // Its time has come.
                    self.clear_idle_poller(&mut central);
                    if self.take_idle_p(&mut central) {
                        central.fired = true;
                        self.beds.iter().for_each(Condvar::notify_one);
                        return false;
                    }
                    central.idle_ms.push(me);
                } else {
                    // It sleeps as long as it must; meanwhile anything may happen.
                    slept = true;
                    drop(central);
                    thread::yield_now();
                    central = self.central();
                    continue;
                }
            }
            while !std::mem::take(&mut central.noted[me]) && !central.fired {
                central = self.beds[me].wait(central).expect("a panic ends the model");
            }
        }
    }

    fn enter_idle(&self, central: &mut Central, me: usize, listed: bool) -> u64 {
        let keeps = central.idle_poller.is_none_or(|keeper| keeper == me) && !listed;
        let first = self.timer.load(Ordering::Relaxed);
        if keeps && first != NEVER {
            central.idle_poller = Some(me);
            self.idle_poller_until.store(first, Ordering::Relaxed);
            full_fence();
            let first = self.timer.load(Ordering::Relaxed);
            self.idle_poller_until.store(first, Ordering::Relaxed);
            return first;
        }
        if !listed {
            central.idle_ms.push(me);
        }
        if let Some(keeper) = central.idle_poller
            && first < self.idle_poller_until.load(Ordering::Relaxed)
        {
            self.rouse(central, keeper);
        }
        NEVER
    }
}

/// Two threads that search, and what happens outside meanwhile.
fn check(first: u64, flaw: Flaw, outside: fn(&World)) {
    check_with(first, flaw, false, outside);
}

fn check_with(first: u64, flaw: Flaw, sleeper: bool, outside: fn(&World)) {
    explore(Bound::Preemptions(3), move || {
        let world = World::new(first, flaw);
        let threads = [0, 1].map(|me| {
            let world = world.clone();
            thread::spawn(move || world.thread_main(me, sleeper && me == 0))
        });
        outside(&world);
        for thread in threads {
            thread.join().expect("a panic ends the model");
        }
        assert!(world.central().fired);
    });
}

/// Two threads go to sleep while a timer is set.
pub fn timer_against_sleep() {
    check(NEVER, Flaw::None, World::set_timer);
}

/// There is a later timer already, and maybe an idle poller who sleeps for it.
pub fn earlier_timer_against_the_keeper() {
    check(LATER, Flaw::None, World::set_timer);
}

/// A timer is set and somebody searches: he will see to it. But he finds a goroutine that never ends.
pub fn timer_then_work() {
    check(NEVER, Flaw::None, |world| {
        world.set_timer();
        world.submit();
    });
}

/// The same in the other order; the idle poller of a later timer may be the one who is woken for the work.
pub fn work_then_earlier_timer() {
    check(LATER, Flaw::None, |world| {
        world.submit();
        world.set_timer();
    });
}

/// A goroutine goes to sleep, and its thread tells nobody: it will look itself. But it finds a goroutine that never ends,
/// while the idle poller sleeps for a later timer.
pub fn unannounced_timer_then_work() {
    check_with(LATER, Flaw::None, true, World::submit);
}

/// Teeth: who finds work is content with an idle poller that does not know.
pub fn teeth_any_keeper_will_do() {
    must_fail(Mutation::None, || {
        check_with(LATER, Flaw::AnyKeeperWillDo, true, World::submit);
    });
}

/// Teeth: who finds work leaves the timers to nobody.
pub fn teeth_unkept_timers() {
    must_fail(Mutation::None, || {
        check(NEVER, Flaw::LeavesTimersUnkept, |world| {
            world.set_timer();
            world.submit();
        });
    });
}

/// Teeth: an idle poller that is not told of an earlier timer.
pub fn teeth_hurries_nobody() {
    must_fail(Mutation::None, || check(LATER, Flaw::HurriesNobody, World::set_timer));
}

/// Teeth: without the barriers one may miss the other.
pub fn teeth_no_barrier() {
    must_fail(Mutation::NoFullFence, || check(NEVER, Flaw::None, World::set_timer));
}
