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
use crate::sys::clock::{NEVER, Nanos, now};
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

    /// Gives it this job, and returns the one it had. The present setting will not happen.
    #[must_use = "to be dropped outside the runtime"]
    pub(super) fn assign(&'static self, job: Job) -> Job {
        inside(|_| {
            let mut state = self.state.lock();
            self.number.fetch_add(1, Ordering::Relaxed);
            (state.armed, state.orphan) = (false, false);
            std::mem::replace(&mut state.job, job)
        })
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
            pool::give_back(self);
        }
    }

    /// A new setting. Returns whether an old one was still to come.
    pub(super) fn set(&'static self, when: Nanos, period: Nanos) -> bool {
        inside(|here| {
            let mut state = self.state.lock();
            let number = self.number.fetch_add(1, Ordering::Relaxed) + 1;
            let was = std::mem::replace(&mut state.armed, when != NEVER);
            (state.when, state.period) = (when, period);
            drop(state);
            if when != NEVER {
                with_sched(|sched| sched.set_alarm(here, when, self, number));
            }
            was
        })
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
    fn fire(&'static self, rt: Rt, number: u64) {
        let mut state = self.state.lock();
        if self.number.load(Ordering::Relaxed) != number {
            return;
        }
        match &state.job {
            Job::Nothing => {}
            Job::Send(sender) => sender.try_send_in(rt, Instant::now()),
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
                pool::spent(self);
            }
            return;
        }
        // Ticks that could not be in time are left out.
        let (now, period) = (now(), state.period);
        state.when += (now.saturating_sub(state.when) / period + 1) * period;
        let when = state.when;
        drop(state);
        rt.sched().set_alarm(Some(rt), when, self, number);
    }

    fn is_current(&self, number: u64) -> bool {
        self.number.load(Ordering::Relaxed) == number
    }
}
