//! A set timer: its memory, and what happens when its time comes.
//!
//! The heap of a P names a timer by its slot and the number of its setting (`sched/timers.rs`), so a slot
//! is never freed, only reused (`pool.rs`), and a setting that was changed has another number.
//!
//! Invariants:
//! 1. What a setting does happens under the slot's lock, after a look at the number. So when `stop` or
//!    `reset` has returned, the old setting has either done it or never will.
//! 2. With the lock held on a goroutine the goroutine is inside the runtime; nothing is allocated or freed.
//! 3. A slot belongs to one `Timer` or `Ticker`, or (after `abandon`) to its setting: then it is spent when
//!    it has fired, and the pool cleans it up.

use super::pool;
use crate::chan::Sender;
use crate::chan::cells::{AtomicU64, Ordering};
use crate::runtime::with_sched;
use crate::sched::timers::Alarm;
use crate::sched::{Rt, spawn, wait};
use crate::shim::Lock;
use crate::sys::clock::{NEVER, Nanos};
use std::ops::DerefMut;
use std::panic::Location;
use std::time::Instant;

/// What happens when the time comes.
pub(super) enum Job {
    Nothing,
    /// The time is sent, if there is room.
    Send(Sender<Instant>),
    /// A goroutine runs it.
    Call(Box<dyn FnOnce() + Send>, &'static Location<'static>),
}

struct State {
    job: Job,
    armed: bool,
    /// Nobody holds the slot: it is spent when it has fired.
    orphan: bool,
    /// Of a ticker; 0 for a timer.
    period: Nanos,
    when: Nanos,
    next: Option<&'static Slot>,
}

/// See the head of the file.
pub(super) struct Slot {
    /// The number of the present setting. Written under the lock.
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

impl Slot {
    pub(super) fn new() -> Slot {
        Slot {
            number: AtomicU64::new(0),
            state: Lock::new(State {
                job: Job::Nothing,
                armed: false,
                orphan: false,
                period: 0,
                when: NEVER,
                next: None,
            }),
        }
    }

    /// Takes the job away. The present setting will not happen.
    #[must_use = "to be dropped outside the runtime"]
    fn cancel(&'static self) -> Job {
        let mut state = self.state.lock();
        self.number.fetch_add(1, Ordering::Relaxed);
        (state.armed, state.orphan) = (false, false);
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
        inside(|here| {
            let mut state = self.state.lock();
            // There was none; so nothing is dropped here.
            debug_assert!(matches!(state.job, Job::Nothing));
            std::mem::forget(std::mem::replace(&mut state.job, job));
            state.orphan = orphan;
            self.arm(here, state, when, period);
        });
    }

    /// For the pool's lists: the slot after this one becomes `next`; returns which it was.
    pub(super) fn link(&self, next: Option<&'static Slot>) -> Option<&'static Slot> {
        std::mem::replace(&mut self.state.lock().next, next)
    }

    /// The holder leaves it to its setting: it lives until it has fired.
    pub(super) fn abandon(&'static self) {
        let armed = inside(|_| {
            let mut state = self.state.lock();
            state.orphan = state.armed;
            state.armed
        });
        if !armed {
            self.retire();
        }
    }

    /// A new setting. Returns whether an old one was still to come.
    pub(super) fn set(&'static self, when: Nanos, period: Nanos) -> bool {
        inside(|here| {
            let state = self.state.lock();
            self.arm(here, state, when, period)
        })
    }

    fn arm(
        &'static self,
        here: Option<Rt>,
        mut state: impl DerefMut<Target = State>,
        when: Nanos,
        period: Nanos,
    ) -> bool {
        let number = self.number.fetch_add(1, Ordering::Relaxed) + 1;
        let was = std::mem::replace(&mut state.armed, when != NEVER);
        (state.when, state.period) = (when, period);
        drop(state);
        if when != NEVER {
            match here {
                Some(rt) => rt.sched().set_alarm(here, when, self, number),
                None => with_sched(|sched| sched.set_alarm(here, when, self, number)),
            }
        }
        was
    }

    /// The present setting will not happen. Returns whether it was still to come.
    pub(super) fn stop(&'static self) -> bool {
        inside(|_| {
            let mut state = self.state.lock();
            self.number.fetch_add(1, Ordering::Relaxed);
            std::mem::replace(&mut state.armed, false)
        })
    }
}

impl Alarm for Slot {
    fn fire(&'static self, rt: Rt, number: u64, now: Nanos) {
        let mut state = self.state.lock();
        if self.number.load(Ordering::Relaxed) != number {
            return;
        }
        match &state.job {
            Job::Nothing => {}
            Job::Send(sender) => sender.try_send_in(rt, rt.sched().instant(now)),
            Job::Call(..) => {
                if let Job::Call(f, place) = std::mem::replace(&mut state.job, Job::Nothing) {
                    spawn::spawn_in(rt, f, place);
                }
            }
        }
        if state.period == 0 {
            state.armed = false;
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
        let when = state.when;
        drop(state);
        rt.sched().set_alarm(Some(rt), when, self, number);
    }

    fn is_current(&self, number: u64) -> bool {
        self.number.load(Ordering::Relaxed) == number
    }
}
