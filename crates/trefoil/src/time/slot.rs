//! A timer's slot: its memory, and what happens when its time comes.
//!
//! The heap of a P has an **entry** per timer: its slot and a number (`sched/wait/timers.rs`). When
//! the entry comes up, the slot knows the time for which the timer is really set. So a timer that
//! is set for later (as the timer of a connection is with each packet) or stopped leaves its entry
//! in the heap. Only a timer that is set for earlier needs another entry. A slot is never freed,
//! only reused (`pool.rs`), and an entry that was replaced has an old number.
//!
//! Invariants:
//! 1. A timer does its job under the slot's lock, after it has compared its time with the clock. So
//!    when `stop` or `set` has returned, the old setting has done its job or never will.
//! 2. A goroutine that holds the lock is inside the runtime, and does not allocate or free.
//! 3. A slot belongs to a `Timer` or `Ticker`; or, after `detach` and for `after` and `tick`, to
//!    its *setting*. Then the pool takes the slot back when it has fired for the last time: once,
//!    or for `tick` when it finds that all receivers are dropped.
//! 4. If the timer is set, the entry numbered `number` is in a heap, for that time or an earlier
//!    one, or an M has taken it out and is about to call `fire`. `queued` is the runtime of that
//!    heap and the time of the entry; None means that there is no such entry.

use super::pool;
use crate::chan::Sender;
use crate::chan::cells::{AtomicU64, Ordering};
use crate::runtime::with_sched;
use crate::sched::wait::timers::TimerCallback;
use crate::sched::wait::{inside, wake_in};
use crate::sched::{Rt, RuntimeId, Sched, goroutine::spawn};
use crate::sys::clock::{NEVER, Nanos};
use crate::sys::free_list::{FreeLink, Reusable};
use crate::sys::lock::Lock;
use std::ops::DerefMut;
use std::panic::Location;
use std::sync::Arc;
use std::time::Instant;

/// What a timer does when its time comes.
pub(super) enum Job {
    Nothing,
    /// Sends the time, if there is room.
    Send(TimerSender),
    /// Calls the function in a new goroutine.
    CallOnce(Box<dyn FnOnce() + Send>, &'static Location<'static>),
    /// The same, each time that the timer fires.
    Call(Arc<dyn Fn() + Send + Sync>, &'static Location<'static>),
    /// Wakes a task that polls a [`Sleep`](super::Sleep). It is the sleeper word of the task.
    Wake(usize),
}

/// The sender of a timer. Its drop does not close the channel: as in Go, a timer that fired or was
/// stopped sends nothing more. (A closed channel is always ready, and a loop would choose its arm
/// again and again.)
pub(super) struct TimerSender(Option<Sender<Instant>>);

impl Drop for TimerSender {
    fn drop(&mut self) {
        if let Some(sender) = self.0.take() {
            sender.drop_keep_open();
        }
    }
}

impl Job {
    /// Creates a job that sends the time by `sender`.
    pub(super) fn send(sender: Sender<Instant>) -> Job {
        Job::Send(TimerSender(Some(sender)))
    }
}

/// To what a slot belongs (invariant 3).
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// A `Timer` or a `Ticker`.
    Handle,
    /// Its setting.
    Setting,
}

struct SlotState {
    job: Job,
    owner: Owner,
    /// The period of a ticker; 0 for a timer.
    period: Nanos,
    /// The time for which the timer is set; `NEVER` if it is not.
    when: Nanos,
    /// See invariant 4.
    queued: Option<(RuntimeId, Nanos)>,
}

/// See the head of the file.
pub(super) struct TimerSlot {
    /// The number of the valid entry. Written under the lock.
    number: AtomicU64,
    state: Lock<SlotState>,
    /// Its place in a list of the pool.
    free_link: FreeLink<TimerSlot>,
}

impl Reusable for TimerSlot {
    fn free_link(&self) -> &FreeLink<TimerSlot> {
        &self.free_link
    }
}

/// Calls `f` inside the runtime (invariant 2), with the runtime for a timer that is set for `when`,
/// or None if there is no timer to set. The runtime is found before anything is locked: on a plain
/// thread the default one may have to be started.
fn inside_for<T>(when: Nanos, f: impl FnOnce(Option<Rt>, Option<&Sched>) -> T) -> T {
    inside(|here| match here {
        Some(rt) => f(here, Some(rt.sched())),
        None if when == NEVER => f(None, None),
        None => with_sched(|sched| f(None, Some(sched))),
    })
}

impl TimerSlot {
    pub(super) fn new() -> TimerSlot {
        TimerSlot {
            number: AtomicU64::new(0),
            state: Lock::new(SlotState {
                job: Job::Nothing,
                owner: Owner::Handle,
                period: 0,
                when: NEVER,
                queued: None,
            }),
            free_link: FreeLink::new(),
        }
    }

    /// Returns the number for a new entry, and makes the old entry invalid. Called under the lock.
    fn next_number(&self) -> u64 {
        let number = self.number.load(Ordering::Relaxed) + 1;
        self.number.store(number, Ordering::Relaxed);
        number
    }

    /// Stops the timer, and takes its job away.
    #[must_use = "to be dropped outside the runtime"]
    fn cancel(&'static self) -> Job {
        let mut state = self.state.lock();
        self.next_number();
        (state.when, state.queued, state.owner) = (NEVER, None, Owner::Handle);
        std::mem::replace(&mut state.job, Job::Nothing)
    }

    /// Drops the job of a slot that has fired. Called by the pool.
    pub(super) fn clear(&'static self) {
        drop(inside(|_| self.cancel()));
    }

    /// Stops the timer, and returns the slot to the pool.
    pub(super) fn retire(&'static self) {
        drop(inside(|here| {
            let job = self.cancel();
            pool::put(here, self);
            job
        }));
    }

    /// Sets a slot that was just taken from the pool.
    pub(super) fn start(&'static self, job: Job, when: Nanos, period: Nanos, owner: Owner) {
        inside_for(when, |here, sched| {
            let mut state = self.state.lock();
            // There is no old job, so nothing is dropped here.
            debug_assert!(matches!(state.job, Job::Nothing));
            std::mem::forget(std::mem::replace(&mut state.job, job));
            state.owner = owner;
            self.arm(here, sched, state, when, period);
        });
    }

    /// Sets the slot of a [`Sleep`](super::Sleep): at `when` it wakes `sleeper`, and neither an
    /// earlier sleeper nor at an earlier time.
    pub(super) fn set_wake(&'static self, sleeper: usize, when: Nanos) {
        inside_for(when, |here, sched| {
            let mut state = self.state.lock();
            // The old job is a word too, so nothing is dropped here.
            debug_assert!(matches!(state.job, Job::Nothing | Job::Wake(_)));
            std::mem::forget(std::mem::replace(&mut state.job, Job::Wake(sleeper)));
            self.arm(here, sched, state, when, 0);
        });
    }

    /// Leaves the slot to its setting: it stays in use until it has fired.
    pub(super) fn detach(&'static self) {
        let is_set = inside(|_| {
            let mut state = self.state.lock();
            let is_set = state.when != NEVER;
            state.owner = if is_set { Owner::Setting } else { Owner::Handle };
            is_set
        });
        if !is_set {
            self.retire();
        }
    }

    /// Sets the timer again, unless its function can be called only once, and was. Under the lock,
    /// between the old setting and the new one, `drain` removes the value that the old one sent.
    /// Returns whether the old setting had not fired yet, or its value was still there.
    pub(super) fn set(
        &'static self,
        when: Nanos,
        period: Nanos,
        drain: impl FnOnce(Option<Rt>) -> bool,
    ) -> bool {
        inside_for(when, |here, sched| {
            let state = self.state.lock();
            let was_set = state.when != NEVER;
            let drained = drain(here);
            // Without a job the timer stays unset: its function was called, and is gone.
            let when = if matches!(state.job, Job::Nothing) { NEVER } else { when };
            self.arm(here, sched, state, when, period);
            was_set || drained
        })
    }

    /// Sets the timer under the lock, which it releases. `sched` is Some unless `when` is `NEVER`.
    fn arm(
        &'static self,
        here: Option<Rt>,
        sched: Option<&Sched>,
        mut state: impl DerefMut<Target = SlotState>,
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

    /// Adds an entry to a heap if invariant 4 needs one. Called under the lock, which it releases.
    fn queue(
        &'static self,
        sched: &Sched,
        here: Option<Rt>,
        mut state: impl DerefMut<Target = SlotState>,
    ) {
        let (when, home) = (state.when, sched.runtime_id());
        if state.queued.is_some_and(|(runtime, first)| runtime == home && first <= when) {
            return;
        }
        state.queued = Some((home, when));
        let number = self.next_number();
        drop(state);
        sched.set_callback_timer(here, when, self, number);
    }

    /// Stops the timer. Then `drain` runs and the result is formed as in [`TimerSlot::set`].
    pub(super) fn stop(&'static self, drain: impl FnOnce(Option<Rt>) -> bool) -> bool {
        inside(|here| {
            let mut state = self.state.lock();
            let was_set = std::mem::replace(&mut state.when, NEVER) != NEVER;
            drain(here) || was_set
        })
    }

    fn is_current(&self, number: u64) -> bool {
        self.number.load(Ordering::Relaxed) == number
    }

    /// Does the job under the lock, which the caller holds.
    fn run_job(rt: Rt, state: &mut SlotState, now: Nanos) {
        match &state.job {
            Job::Nothing | Job::Send(TimerSender(None)) => {}
            Job::Send(TimerSender(Some(sender))) => {
                if sender.is_closed() {
                    // The last receiver is dropped, so a ticker without a handle ends.
                    state.period = 0;
                } else {
                    sender.try_send_in(rt, rt.sched().instant(now));
                }
            }
            Job::Wake(sleeper) => wake_in(rt, *sleeper),
            Job::Call(f, place) if state.owner == Owner::Handle => {
                let (f, place) = (f.clone(), *place);
                spawn::spawn_in(rt, move || f(), place);
            }
            // The last call takes the function along: its goroutine drops it.
            Job::CallOnce(..) | Job::Call(..) => {
                match std::mem::replace(&mut state.job, Job::Nothing) {
                    Job::CallOnce(f, place) => spawn::spawn_in(rt, f, place),
                    Job::Call(f, place) => spawn::spawn_in(rt, move || f(), place),
                    _ => {}
                }
            }
        }
    }
}

impl TimerCallback for TimerSlot {
    fn fire(&'static self, rt: Rt, number: u64, now: Nanos) {
        // Checked before the lock, too: if the slot was reused, a goroutine of another runtime may
        // hold the lock.
        if !self.is_current(number) {
            return;
        }
        let mut state = self.state.lock();
        if !self.is_current(number) {
            return;
        }
        state.queued = None;
        if state.when > now {
            if state.when != NEVER {
                self.queue(rt.sched(), Some(rt), state);
            }
            return;
        }
        TimerSlot::run_job(rt, &mut state, now);
        if state.period == 0 {
            state.when = NEVER;
            let owner = state.owner;
            drop(state);
            if owner == Owner::Setting {
                pool::put_fired(rt, self);
            }
            return;
        }
        // Ticks that are late already are left out.
        let period = state.period;
        state.when += (now.saturating_sub(state.when) / period + 1) * period;
        self.queue(rt.sched(), Some(rt), state);
    }

    fn forget_if_idle(&self, number: u64) -> bool {
        if !self.is_current(number) {
            return true;
        }
        // The caller holds the heap's lock, for which the holder of the slot's lock may wait.
        let Some(mut state) = self.state.try_lock() else { return false };
        if self.is_current(number) {
            if state.when != NEVER {
                return false;
            }
            state.queued = None;
        }
        true
    }
}
