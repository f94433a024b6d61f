//! A set timer: its memory, and what happens when its time comes.
//!
//! The heap of a P has an **entry** for a timer: its slot and a number (`sched/timers.rs`). When the entry comes up, the
//! slot knows what time it is really set for. So a timer that is set for later, as one that watches a connection is
//! with each packet, or stopped, leaves its entry where it is; only one that is set for earlier needs another. A slot is
//! never freed, only reused (`pool.rs`), and an entry that was replaced has another number.
//!
//! Invariants:
//! 1. What a setting does happens under the slot's lock, after a look at the time. So when `stop` or `set` has
//!    returned, the old setting has either done it or never will.
//! 2. With the lock held on a goroutine the goroutine is inside the runtime; nothing is allocated or freed.
//! 3. A slot belongs to one `Timer` or `Ticker`, or (after `abandon`) to its setting: then it is spent when
//!    it has fired, and the pool cleans it up.
//! 4. If it is set, the entry numbered `number` is in a heap for that time or an earlier one, or in the hands of who
//!    will call `fire`. `queued` says which heap's runtime, and which time; None: there is no such entry.

use super::pool;
use crate::chan::Sender;
use crate::chan::cells::{AtomicU64, Ordering};
use crate::runtime::with_sched;
use crate::sched::timers::Alarm;
use crate::sched::{Rt, RuntimeId, Sched, spawn, wait};
use crate::sys::clock::{NEVER, Nanos};
use crate::sys::lock::Lock;
use std::ops::DerefMut;
use std::panic::Location;
use std::time::Instant;

/// What happens when the time comes.
pub(super) enum Job {
    Nothing,
    /// The time is sent, if there is room.
    Send(TimerSender),
    /// A goroutine runs it.
    Call(Box<dyn FnOnce() + Send>, &'static Location<'static>),
}

/// A timer's sender. Its drop does not close the channel: a fired or stopped timer is silent for ever, as in Go. (A closed
/// channel is always ready, and a loop would choose its arm again and again.)
pub(super) struct TimerSender(Option<Sender<Instant>>);

impl Drop for TimerSender {
    fn drop(&mut self) {
        if let Some(sender) = self.0.take() {
            sender.leave_open();
        }
    }
}

impl Job {
    /// The time is sent by `sender`.
    pub(super) fn send(sender: Sender<Instant>) -> Job {
        Job::Send(TimerSender(Some(sender)))
    }
}

struct State {
    job: Job,
    /// Nobody holds the slot: it is spent when it has fired.
    orphan: bool,
    /// Of a ticker; 0 for a timer.
    period: Nanos,
    /// `NEVER`: it is not set.
    when: Nanos,
    /// Invariant 4.
    queued: Option<(RuntimeId, Nanos)>,
    next: Option<&'static Slot>,
}

/// See the head of the file.
pub(super) struct Slot {
    /// The number of the entry that counts. Written under the lock.
    number: AtomicU64,
    state: Lock<State>,
}

/// Calls `f` with the runtime entered, if this is a goroutine (invariant 2).
pub(super) fn inside<T>(f: impl FnOnce(Option<Rt>) -> T) -> T {
    let here = Rt::enter();
    let value = f(here);
    wait::leave(here);
    value
}

/// [`inside`], for who sets a timer for `when`: with its runtime, if there is something to set. Found before anything is
/// locked: on a plain thread the default one may have to be started.
fn inside_for<T>(when: Nanos, f: impl FnOnce(Option<Rt>, Option<&Sched>) -> T) -> T {
    inside(|here| match here {
        Some(rt) => f(here, Some(rt.sched())),
        None if when == NEVER => f(None, None),
        None => with_sched(|sched| f(None, Some(sched))),
    })
}

impl Slot {
    pub(super) fn new() -> Slot {
        Slot {
            number: AtomicU64::new(0),
            state: Lock::new(State {
                job: Job::Nothing,
                orphan: false,
                period: 0,
                when: NEVER,
                queued: None,
                next: None,
            }),
        }
    }

    /// Under the lock: a number for a new entry; or for none, and the old one means nothing.
    fn next_number(&self) -> u64 {
        let number = self.number.load(Ordering::Relaxed) + 1;
        self.number.store(number, Ordering::Relaxed);
        number
    }

    /// Takes the job away. The present setting will not happen.
    #[must_use = "to be dropped outside the runtime"]
    fn cancel(&'static self) -> Job {
        let mut state = self.state.lock();
        self.next_number();
        (state.when, state.queued, state.orphan) = (NEVER, None, false);
        std::mem::replace(&mut state.job, Job::Nothing)
    }

    /// For the pool: it was spent.
    pub(super) fn clear(&'static self) {
        drop(inside(|_| self.cancel()));
    }

    /// Its holder is done with it.
    pub(super) fn retire(&'static self) {
        drop(inside(|here| {
            let job = self.cancel();
            pool::put(here, self);
            job
        }));
    }

    /// The job and the first setting of a slot that was just taken. `orphan`: nobody holds it.
    pub(super) fn start(&'static self, job: Job, when: Nanos, period: Nanos, orphan: bool) {
        inside_for(when, |here, sched| {
            let mut state = self.state.lock();
            // There was none; so nothing is dropped here.
            debug_assert!(matches!(state.job, Job::Nothing));
            std::mem::forget(std::mem::replace(&mut state.job, job));
            state.orphan = orphan;
            self.arm(here, sched, state, when, period);
        });
    }

    /// For the pool's lists: the slot after this one becomes `next`; returns which it was.
    pub(super) fn link(&self, next: Option<&'static Slot>) -> Option<&'static Slot> {
        std::mem::replace(&mut self.state.lock().next, next)
    }

    /// The holder leaves it to its setting: it lives until it has fired.
    pub(super) fn abandon(&'static self) {
        let is_set = inside(|_| {
            let mut state = self.state.lock();
            state.orphan = state.when != NEVER;
            state.orphan
        });
        if !is_set {
            self.retire();
        }
    }

    /// A new setting. Between the two `drain` takes out what the old one has sent. Returns whether the old one was
    /// still to come, or what it sent was still there.
    pub(super) fn set(
        &'static self,
        when: Nanos,
        period: Nanos,
        drain: impl FnOnce(Option<Rt>) -> bool,
    ) -> bool {
        inside_for(when, |here, sched| {
            let state = self.state.lock();
            let was = state.when != NEVER;
            let drained = drain(here);
            self.arm(here, sched, state, when, period);
            was || drained
        })
    }

    /// Under the lock, which it gives back. `sched` is there if `when` comes.
    fn arm(
        &'static self,
        here: Option<Rt>,
        sched: Option<&Sched>,
        mut state: impl DerefMut<Target = State>,
        when: Nanos,
        period: Nanos,
    ) {
        (state.when, state.period) = (when, period);
        if let Some(sched) = sched
            && when != NEVER
        {
            self.queue(sched, here, state);
        }
    }

    /// Under the lock, which it gives back: invariant 4.
    fn queue(
        &'static self,
        sched: &Sched,
        here: Option<Rt>,
        mut state: impl DerefMut<Target = State>,
    ) {
        let (when, home) = (state.when, sched.runtime_id());
        if state.queued.is_some_and(|(runtime, first)| runtime == home && first <= when) {
            return;
        }
        state.queued = Some((home, when));
        let number = self.next_number();
        drop(state);
        sched.set_alarm(here, when, self, number);
    }

    /// The present setting will not happen. Then `drain` as in [`Slot::set`], and so the result.
    pub(super) fn stop(&'static self, drain: impl FnOnce(Option<Rt>) -> bool) -> bool {
        inside(|here| {
            let mut state = self.state.lock();
            let was = std::mem::replace(&mut state.when, NEVER) != NEVER;
            drain(here) || was
        })
    }
}

impl Alarm for Slot {
    fn fire(&'static self, rt: Rt, number: u64, now: Nanos) {
        let is_stale = || self.number.load(Ordering::Relaxed) != number;
        // Before the lock, too: it may be in the hands of another runtime by now.
        if is_stale() {
            return;
        }
        let mut state = self.state.lock();
        if is_stale() {
            return;
        }
        state.queued = None;
        if state.when > now {
            if state.when != NEVER {
                self.queue(rt.sched(), Some(rt), state);
            }
            return;
        }
        match &state.job {
            Job::Nothing | Job::Send(TimerSender(None)) => {}
            Job::Send(TimerSender(Some(sender))) => {
                sender.try_send_in(rt, rt.sched().instant(now));
            }
            Job::Call(..) => {
                if let Job::Call(f, place) = std::mem::replace(&mut state.job, Job::Nothing) {
                    spawn::spawn_in(rt, f, place);
                }
            }
        }
        if state.period == 0 {
            state.when = NEVER;
            let spent = state.orphan;
            drop(state);
            if spent {
                pool::spent(rt, self);
            }
            return;
        }
        // Ticks that could not be in time are left out.
        let period = state.period;
        state.when += (now.saturating_sub(state.when) / period + 1) * period;
        self.queue(rt.sched(), Some(rt), state);
    }

    fn forget_if_idle(&self, number: u64) -> bool {
        if self.number.load(Ordering::Relaxed) != number {
            return true;
        }
        // Its holder may wait for the heap's lock, which we have.
        let Some(mut state) = self.state.try_lock() else { return false };
        if self.number.load(Ordering::Relaxed) == number {
            if state.when != NEVER {
                return false;
            }
            state.queued = None;
        }
        true
    }
}
