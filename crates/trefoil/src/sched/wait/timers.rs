//! A P's timers: a heap by time (`heap.rs`).
//!
//! Timers are put into the heap of the P that runs the goroutine which sets them. They are run by
//! whoever holds that P between goroutines, by thieves (also for idle Ps), and, when all threads sleep,
//! by the **idle poller**: the one idle thread that sleeps only until the earliest timer of all Ps
//! (`central.rs`).
//!
//! # Lazy deletion
//! A wait that ends early leaves its entry in the heap. The entry does not point into the goroutine's
//! frames: it names the G, whose memory stays, and the number of the wait; when its time comes it finds
//! another wait (or none) and is dropped. When more than a quarter of a heap is such *stale* entries,
//! it is swept. Alarms that are stopped or set for earlier are not counted (they do not know their heap, which
//! may be gone); so a heap is also swept when it is twice as long as the last sweep left it. That is a
//! constant time for each entry, and a heap is at most twice as long as the most that ever meant something.
//!
//! Invariants:
//! 1. `next` is the time of the heap's first entry (`NEVER` if empty), written under the lock.
//! 2. Nothing under the lock allocates from malloc, wakes, or runs user code.

use crate::sched::Sched;
use crate::sched::m::Rt;
use crate::sched::wait::Waiter;
use crate::sched::wait::heap::{Heap, Timed};
use crate::shim::full_fence;
use crate::sys::clock::{NEVER, Nanos, now};
use crate::sys::lock::Lock;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Stale entries below this are not worth a sweep.
const SWEEP_MIN: u32 = 64;
/// Heaps shorter than this are not worth one either.
const SWEEP_MIN_LEN: u32 = 256;
/// Entries taken out under one hold of the lock.
const BATCH: usize = 32;

/// Something that happens at a time, other than the end of a goroutine's wait. Its memory is never
/// freed, only reused, and each entry has a number: so a stale one does no harm.
pub(crate) trait Alarm: Sync {
    /// The time of the entry numbered `seq` has come; it is `now`. Runs inside the runtime, so it neither
    /// allocates nor frees nor runs user code.
    fn fire(&'static self, rt: Rt, seq: u64, now: Nanos);
    /// Whether the entry numbered `seq` is for nothing: then it may not count on it any more. Does not wait.
    fn forget_if_idle(&self, seq: u64) -> bool;
}

#[derive(Clone, Copy)]
enum Target {
    Wait(Waiter),
    Alarm(&'static dyn Alarm, u64),
}

#[derive(Clone, Copy)]
struct Entry {
    when: Nanos,
    target: Target,
}

/// See the head of the file.
pub(crate) struct Timers {
    heap: Lock<Heap<Entry>>,
    next: AtomicU64,
    len: AtomicU32,
    stale: AtomicU32,
    /// The length at which it is swept. Under the lock.
    sweep_at: AtomicU32,
}

impl Timers {
    pub(crate) fn new() -> Self {
        Timers {
            heap: Lock::new(Heap::new()),
            next: AtomicU64::new(NEVER),
            len: AtomicU32::new(0),
            stale: AtomicU32::new(0),
            sweep_at: AtomicU32::new(SWEEP_MIN_LEN),
        }
    }

    /// When the first one is due.
    #[inline]
    pub(crate) fn next(&self) -> Nanos {
        self.next.load(Ordering::Relaxed)
    }

    pub(crate) fn len(&self) -> u32 {
        self.len.load(Ordering::Relaxed)
    }

    fn publish(&self, heap: &Heap<Entry>) {
        self.next.store(heap.next(), Ordering::Relaxed);
        self.len.store(heap.len() as u32, Ordering::Relaxed);
    }

    /// Adds an entry. True: it is the first now.
    fn add(&self, entry: Entry) -> bool {
        let mut heap = self.heap.lock();
        let len = heap.len() as u32;
        if self.stale.load(Ordering::Relaxed) > SWEEP_MIN.max(len / 4)
            || len >= self.sweep_at.load(Ordering::Relaxed)
        {
            self.sweep_slow(&mut heap);
        }
        let first = heap.add(entry);
        self.publish(&heap);
        first
    }

    /// An entry put here has lost its meaning.
    pub(crate) fn one_stale(&self) {
        self.stale.fetch_add(1, Ordering::Relaxed);
    }

    #[cold]
    fn sweep_slow(&self, heap: &mut Heap<Entry>) {
        self.stale.store(0, Ordering::Relaxed);
        heap.retain(|entry| !entry.forget_if_idle());
        let kept = heap.len() as u32;
        self.sweep_at.store(kept.saturating_mul(2).max(SWEEP_MIN_LEN), Ordering::Relaxed);
    }

    /// Takes out what is due, at most a batch.
    fn take_due<'a>(&self, now: Nanos, due: &'a mut [MaybeUninit<Entry>; BATCH]) -> &'a [Entry] {
        let mut heap = self.heap.lock();
        let mut n = 0;
        while n < BATCH
            && let Some(entry) = heap.take_due(now)
        {
            due[n].write(entry);
            n += 1;
        }
        self.publish(&heap);
        // SAFETY: the first `n` were written.
        unsafe { due[..n].assume_init_ref() }
    }

    /// Moves everything to `to`, because this P retires.
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

impl Timed for Entry {
    #[inline]
    fn when(&self) -> Nanos {
        self.when
    }
}

impl Entry {
    fn forget_if_idle(&self) -> bool {
        match self.target {
            Target::Wait(waiter) => !waiter.is_open(),
            Target::Alarm(alarm, seq) => alarm.forget_if_idle(seq),
        }
    }
}

/// Runs the due timers of `timers`. Returns whether there were any.
pub(crate) fn run_due(rt: Rt, timers: &Timers) -> bool {
    if timers.next() == NEVER {
        return false;
    }
    let mut any = false;
    let mut now = now();
    while timers.next() <= now {
        let mut due = [MaybeUninit::uninit(); BATCH];
        let due = timers.take_due(now, &mut due);
        for entry in due {
            any = true;
            match entry.target {
                Target::Wait(waiter) => {
                    if waiter.claim(Waiter::TIMED_OUT) {
                        waiter.wake_in(rt);
                    }
                }
                Target::Alarm(alarm, seq) => alarm.fire(rt, seq, now),
            }
        }
        if due.len() == BATCH {
            now = crate::sys::clock::now();
        }
    }
    any
}

impl Sched {
    /// Sets a timer for the end of a goroutine's wait. The caller is about to park.
    pub(crate) fn set_wait_timer(&self, rt: Rt, when: Nanos, waiter: Waiter) {
        let first = rt.p().timers.add(Entry { when, target: Target::Wait(waiter) });
        // If nothing else is to run here, this thread looks at its timers by itself, until its search finds something
        // (`find::stop_spinning`); but not one that waits for a locked goroutine.
        let busy = !rt.p().is_empty() || self.has_global() || rt.m().locked.get().is_some();
        if first && busy {
            self.see_to_timer(when);
        }
    }

    /// Sets an alarm, from a goroutine of this runtime or from a plain thread.
    pub(crate) fn set_alarm(
        &self,
        here: Option<Rt>,
        when: Nanos,
        alarm: &'static dyn Alarm,
        seq: u64,
    ) {
        let target = Target::Alarm(alarm, seq);
        // A plain thread has no P; number 0 is always there.
        let Some(p) = here.map(Rt::p).or_else(|| self.p(0)) else { return };
        if p.timers.add(Entry { when, target }) {
            self.see_to_timer(when);
        }
    }

    /// A timer became the first of its P: some thread must be awake by then.
    fn see_to_timer(&self, when: Nanos) {
        // The barrier pairs with those of the idle poller and of sysmon: they see the timer, or we see their time.
        full_fence();
        if self.idle.idle_ps() == 0 {
            self.sysmon.see_to_timer(when);
        } else if when < self.idle_poller_until.load(Ordering::Relaxed) {
            self.wake_idle_poller();
        }
    }

    /// The earliest timer of all.
    pub(crate) fn next_timer(&self) -> Nanos {
        self.all_ps().map(|p| p.timers.next()).min().unwrap_or(NEVER)
    }
}
