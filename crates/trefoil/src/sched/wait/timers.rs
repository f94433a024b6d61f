//! A P's timers: a heap by time (`heap.rs`).
//!
//! A timer goes into the heap of the P that runs the goroutine which sets it. Its entry is run by
//! the M that has that P, between two goroutines; or by an M that steals, also from idle Ps; or,
//! when all Ms sleep, by the *idle poller*: the one idle M that sleeps only until the earliest
//! timer of all Ps (`netpoll/idle_poller.rs`).
//!
//! # Lazy deletion
//! A wait that ends early leaves its entry in the heap. The entry does not point into the
//! goroutine's frames. It names the G, whose memory is never freed, and the number of the wait.
//! When its time comes, the G is in another wait or in none, and the entry is dropped. A heap is
//! swept when more than a quarter of its entries are such *stale* entries. Timer callbacks that are
//! stopped or set to an earlier time are not counted as stale, because they do not know their heap,
//! which may be gone. Therefore a heap is also swept when it is twice as long as the last sweep
//! left it. That costs a constant time per entry, and a heap longer than [`SWEEP_MIN_LEN`] never
//! exceeds twice its peak number of live entries.
//!
//! Invariants:
//! 1. `next` is the time of the heap's first entry (`NEVER` if it is empty), written under the
//!    lock.
//! 2. Nothing under the lock allocates from malloc, wakes a goroutine or thread, or runs user code.

use crate::sched::Sched;
use crate::sched::m::Rt;
use crate::sched::record;
use crate::sched::wait::Waiter;
use crate::sched::wait::heap::{Heap, Timed};
use crate::shim::full_fence;
use crate::sys::clock::{LATEST, NEVER, Nanos, now};
use crate::sys::lock::Lock;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A heap with at most so many stale entries is not swept for them.
const SWEEP_MIN_STALE: u32 = 64;
/// A heap shorter than this is not swept for its length.
const SWEEP_MIN_LEN: u32 = 256;
/// The most entries that are taken out under one acquisition of the lock.
const BATCH_ENTRIES: usize = 32;

/// What happens at a timer's time, other than the end of a goroutine's wait. The memory is never
/// freed, only reused, and each entry has a number. So a stale entry does no harm.
pub(crate) trait TimerCallback: Sync {
    /// Runs when the time of the entry numbered `seq` has come. Runs inside the runtime, so it
    /// neither allocates nor frees nor runs user code.
    fn fire(&'static self, rt: Rt, seq: u64, now: Nanos);
    /// Returns whether the entry numbered `seq` has no effect any more. If it returns true, the
    /// entry is dropped, and the timer must not rely on it. Does not wait.
    fn forget_if_idle(&self, seq: u64) -> bool;
}

/// What an entry does at its time.
#[derive(Clone, Copy)]
enum TimerAction {
    /// Ends the wait with `Waiter::TIMED_OUT`.
    TimeOut(Waiter),
    /// Calls [`TimerCallback::fire`] with this number.
    Call(&'static dyn TimerCallback, u64),
}

/// One timer in the heap.
#[derive(Clone, Copy)]
struct TimerEntry {
    when: Nanos,
    action: TimerAction,
}

/// See the head of the file.
pub(crate) struct Timers {
    heap: Lock<Heap<TimerEntry>>,
    /// The time of the first entry (invariant 1).
    next: AtomicU64,
    /// The number of entries, for readers without the lock.
    len: AtomicU32,
    /// The number of entries that were counted as stale since the last sweep. It may be too large:
    /// an entry whose time comes leaves the heap and stays counted.
    stale: AtomicU32,
    /// The length at which the heap is swept. Under the lock.
    sweep_len: AtomicU32,
}

impl Timers {
    pub(crate) fn new() -> Self {
        Timers {
            heap: Lock::new(Heap::new()),
            next: AtomicU64::new(NEVER),
            len: AtomicU32::new(0),
            stale: AtomicU32::new(0),
            sweep_len: AtomicU32::new(SWEEP_MIN_LEN),
        }
    }

    /// Returns the time of the first entry, or `NEVER`.
    #[inline]
    pub(crate) fn next(&self) -> Nanos {
        self.next.load(Ordering::Relaxed)
    }

    pub(crate) fn len(&self) -> u32 {
        self.len.load(Ordering::Relaxed)
    }

    /// Publishes the heap's first time and its length, under the lock.
    fn publish(&self, heap: &Heap<TimerEntry>) {
        self.next.store(heap.next(), Ordering::Relaxed);
        self.len.store(heap.len() as u32, Ordering::Relaxed);
    }

    /// Adds an entry. Returns true if it is the first now.
    fn add(&self, entry: TimerEntry) -> bool {
        let mut heap = self.heap.lock();
        let len = heap.len() as u32;
        if self.stale.load(Ordering::Relaxed) > SWEEP_MIN_STALE.max(len / 4)
            || len >= self.sweep_len.load(Ordering::Relaxed)
        {
            self.sweep(&mut heap);
        }
        let first = heap.add(entry);
        self.publish(&heap);
        first
    }

    /// Counts an entry of this heap that has become stale.
    pub(crate) fn count_stale(&self) {
        self.stale.fetch_add(1, Ordering::Relaxed);
    }

    /// Drops all stale entries.
    #[cold]
    fn sweep(&self, heap: &mut Heap<TimerEntry>) {
        self.stale.store(0, Ordering::Relaxed);
        heap.retain(|entry| !entry.forget_if_idle());
        let kept = heap.len() as u32;
        self.sweep_len.store(kept.saturating_mul(2).max(SWEEP_MIN_LEN), Ordering::Relaxed);
    }

    /// Returns the time of the first entry that is not stale, or `NEVER`. For simulations, whose
    /// clock jumps to it.
    pub(crate) fn next_live(&self) -> Nanos {
        let mut heap = self.heap.lock();
        while let Some(entry) = heap.take_due(LATEST) {
            if !entry.forget_if_idle() {
                heap.add(entry);
                break;
            }
        }
        self.publish(&heap);
        heap.next()
    }

    /// Drops all entries: a run of a simulation has ended. Timers that are still set never fire.
    pub(crate) fn clear(&self) {
        let mut heap = self.heap.lock();
        heap.retain(|_| false);
        self.stale.store(0, Ordering::Relaxed);
        self.sweep_len.store(SWEEP_MIN_LEN, Ordering::Relaxed);
        self.publish(&heap);
    }

    /// Takes out the entries that are due, at most `BATCH_ENTRIES`.
    fn take_due<'a>(
        &self,
        now: Nanos,
        due: &'a mut [MaybeUninit<TimerEntry>; BATCH_ENTRIES],
    ) -> &'a [TimerEntry] {
        let mut heap = self.heap.lock();
        let mut n = 0;
        while n < BATCH_ENTRIES
            && let Some(entry) = heap.take_due(now)
        {
            due[n].write(entry);
            n += 1;
        }
        self.publish(&heap);
        // SAFETY: the first `n` elements were written.
        unsafe { std::slice::from_raw_parts(due.as_ptr().cast(), n) }
    }

    /// Moves all entries to `to`, because this P retires.
    pub(crate) fn move_to(&self, to: &Timers) {
        loop {
            let mut heap = self.heap.lock();
            let Some(entry) = heap.take_any() else {
                self.publish(&heap);
                return;
            };
            drop(heap);
            to.add(entry);
        }
    }
}

impl Timed for TimerEntry {
    #[inline]
    fn when(&self) -> Nanos {
        self.when
    }
}

impl TimerEntry {
    /// Returns whether the entry is stale. Then the heap must drop it: a callback relies on that
    /// ([`TimerCallback::forget_if_idle`]).
    fn forget_if_idle(&self) -> bool {
        match self.action {
            TimerAction::TimeOut(waiter) => !waiter.is_open(),
            TimerAction::Call(callback, seq) => callback.forget_if_idle(seq),
        }
    }
}

/// Runs the entries of all Ps that are due.
pub(crate) fn run_due_everywhere(rt: Rt) {
    for p in rt.sched().all_ps() {
        run_due(rt, &p.timers);
    }
}

/// Runs the entries of `timers` that are due. Returns whether there were any.
pub(crate) fn run_due(rt: Rt, timers: &Timers) -> bool {
    if timers.next() == NEVER {
        return false;
    }
    let mut any = false;
    let late = &rt.p().latencies.timers;
    let mut now = now();
    while timers.next() <= now {
        record::source(rt, record::Source::Timer, now - timers.next().min(now));
        let mut due = [MaybeUninit::uninit(); BATCH_ENTRIES];
        let due = timers.take_due(now, &mut due);
        for entry in due {
            any = true;
            match entry.action {
                TimerAction::TimeOut(waiter) => {
                    if waiter.claim(Waiter::TIMED_OUT) {
                        late.add_as_owner(now - entry.when);
                        waiter.wake_in(rt);
                    }
                }
                TimerAction::Call(callback, seq) => {
                    late.add_as_owner(now - entry.when);
                    callback.fire(rt, seq, now);
                }
            }
        }
        if due.len() == BATCH_ENTRIES {
            now = crate::sys::clock::now();
        }
    }
    any
}

impl Sched {
    /// Sets a timer for the end of a goroutine's wait. The caller is about to park.
    pub(crate) fn set_wait_timer(&self, rt: Rt, when: Nanos, waiter: Waiter) {
        let action = TimerAction::TimeOut(waiter);
        let first = rt.p().timers.add(TimerEntry { when, action });
        // If the P has nothing else to run, this M checks its timers itself, until its search finds
        // work (`finish_search` in `search/find.rs`). An M that waits for its locked goroutine does
        // not search.
        let busy = !rt.p().is_empty() || self.has_global() || rt.m().locked.get().is_some();
        if first && busy {
            self.arrange_timer_wakeup(when);
        }
    }

    /// Sets a timer that calls `callback`, from a goroutine of this runtime or from a plain thread.
    pub(crate) fn set_callback_timer(
        &self,
        here: Option<Rt>,
        when: Nanos,
        callback: &'static dyn TimerCallback,
        seq: u64,
    ) {
        let action = TimerAction::Call(callback, seq);
        // A plain thread has no P. The P with id 0 always exists.
        let Some(p) = here.map(Rt::p).or_else(|| self.p(0)) else { return };
        if p.timers.add(TimerEntry { when, action }) {
            self.arrange_timer_wakeup(when);
        }
    }

    /// Makes sure that a thread is awake at `when`, the time of a timer that became the first of
    /// its P.
    fn arrange_timer_wakeup(&self, when: Nanos) {
        if self.simulation.is_some() {
            return; // Its clock comes to the timer.
        }
        // The barrier pairs with those of the idle poller and of sysmon: either they see the timer,
        // or this thread sees the time until which they sleep.
        full_fence();
        if self.idle.idle_ps() == 0 {
            self.sysmon.arrange_timer_wakeup(when);
        } else if when < self.idle_poller_until.load(Ordering::Relaxed)
            && self.vacancy.since().is_none()
        {
            self.wake_idle_poller();
        }
    }

    /// Returns the time of the earliest timer of all Ps, or `NEVER`.
    pub(crate) fn next_timer(&self) -> Nanos {
        if self.simulation.is_some() {
            return NEVER; // No thread has to wake up for a simulated time.
        }
        self.all_ps().map(|p| p.timers.next()).min().unwrap_or(NEVER)
    }
}
