//! The flight recorder: what the Ps did last, in rings of 8-byte words.
//!
//! Each P has a ring, which only the P's owner writes to, so that no lock and no atomic operation
//! is needed. Threads without a P share one more ring under a lock. While nothing is recorded, the
//! pointers to the rings are null, and an event costs one load and a branch.
//!
//! This file has the events. `words.rs`: what a word means. `ring.rs`: a ring, its clocks and its
//! copy. `control.rs`: a recording begins, ends, and is copied.
//!
//! # Time
//! Most events have no clock (`ring.rs`). sysmon writes marks: which ring had how many words at
//! what time; the first event after a mark has a clock. A reader (`observe/trace/`) concludes for
//! each event between which two times it happened. What ends or begins an idle time, and the end of
//! a slice, has a clock.
//!
//! # Where a waker was
//! An event says which goroutine woke another, but not where in the program: only unwinding tells
//! that. So the waker of a goroutine that has waited for long takes a sample of its own stack
//! (`sched/sample.rs`), if it has not taken many lately. It is unwound later.
//!
//! Invariants:
//! 1. The ring of a P is written to by the thread that owns the P, inside the runtime; by the
//!    preemption handler on that thread, while it is outside of the runtime; and under the
//!    scheduler's lock, while no thread owns the P.
//! 2. Every `Place`, `RegionBegin` and `Log` has the address of something that is never freed.
//!
//! Rejected: a clock with every event (a yield took more than twice as long; now it takes 3 ns
//! longer), and one for each goroutine that a search finds at once (a third of the recorder's cost
//! of a spawn); addresses of Gs instead of ids (a G is reused, and the order of events on two rings
//! is not always known).

mod control;
mod ring;
mod words;

pub(crate) use control::{Record, RecordCopy};
pub(crate) use ring::{RingCopy, RingSlot};
pub(crate) use words::{ANNOUNCED_CALL, Kind, Source, Stop, StopCode, UNKNOWN_CALL, Word};

use crate::sched::Sched;
use crate::sched::g::G;
use crate::sched::m::Rt;
use crate::sched::p::{P, PStatus};
use crate::sched::runnable::{RunHead, Runnable, Unpacked};
use crate::sched::sample;
use crate::sched::task::Task;
use crate::sched::trigger::{Incident, Noticed};
use crate::sys::clock::{Nanos, now};
use crate::sys::syscalls;
use ring::Ring;
use std::panic::Location;
use std::sync::atomic::Ordering;
use words::PAYLOAD;

/// Memory of the rings together, unless the program says otherwise.
pub(crate) const DEFAULT_BYTES: usize = 8 << 20;
/// A wait is long from so many milliseconds on, by the coarse clock: its waker takes a sample.
const LONG_WAIT_MS: u32 = 2;
/// The time between two marks. They share a ring with the wake-ups by threads without a P.
const MARK_INTERVAL_NANOS: Nanos = 1_000_000;

/// Returns the id of what `g` runs: itself, or the task that it carries.
#[inline]
pub(crate) fn id_of(g: &G) -> u64 {
    if g.head.is_carrier()
        && let Some(task) = g.task.get()
    {
        return task.id();
    }
    g.id()
}

// The events, in the order in which they occur in the life of a goroutine or task.

/// Records that `item` was created at `at`.
#[inline(always)]
pub(crate) fn created(rt: Rt, item: Runnable, at: &'static Location<'static>) {
    if let Some(ring) = rt.p().ring.active() {
        record_created(ring, item, at);
    }
}

/// As [`created`], on a thread without a P.
#[inline]
pub(crate) fn created_outside(sched: &Sched, item: Runnable, at: &'static Location<'static>) {
    if sched.record.is_on() {
        let tid = this_thread();
        sched.record.write_outside(|ring| {
            ring.clock(now());
            record_created(ring, item, at);
            ring.push(Word::new(Kind::Thread, 0, tid));
        });
    }
}

#[inline(never)]
fn record_created(ring: &Ring, item: Runnable, at: &'static Location<'static>) {
    let (id, is_task) = match item.unpack() {
        Unpacked::Goroutine(g) => (g.id(), 0),
        Unpacked::Task(task) => (task.id(), 1),
    };
    let place = std::ptr::from_ref(at) as u64;
    // A loop creates many at the same place.
    if ring.is_last_place(place) {
        ring.event(Kind::Create, is_task, id);
    } else {
        record_first_at_place(ring, is_task, id, place);
    }
}

#[cold]
#[inline(never)]
fn record_first_at_place(ring: &Ring, is_task: u8, id: u64, place: u64) {
    ring.place(place);
    ring.event(Kind::Create, is_task, id);
}

/// Returns the kernel's id of this thread.
fn this_thread() -> u64 {
    syscalls::gettid().into()
}

/// The goroutine that runs on `rt`'s P stops, and the next one runs; None: the thread searches.
#[inline(always)]
pub(crate) fn switched(rt: Rt, stop: StopCode, next: Option<&G>) {
    if let Some(ring) = rt.p().ring.active() {
        record_switch(ring, rt, stop, next);
    }
}

/// As [`switched`]. `g` stops, but stays runnable if `stop` says so.
#[inline(always)]
pub(crate) fn switched_from(rt: Rt, g: &G, stop: impl FnOnce(&G) -> StopCode, next: Option<&G>) {
    if let Some(ring) = rt.p().ring.active() {
        let stop = stop(g);
        if matches!(stop, StopCode::YIELDED | StopCode::PREEMPTED)
            && let Some(table) = ring.runnable()
        {
            table.begin(id_of(g));
        }
        record_switch(ring, rt, stop, next);
    }
}

#[inline(always)]
fn record_switch(ring: &Ring, rt: Rt, stop: StopCode, next: Option<&G>) {
    match next {
        Some(next) => ring.event(Kind::Switch, stop.0, id_of(next)),
        None => record_search(ring, rt, stop),
    }
}

#[cold]
#[inline(never)]
fn record_search(ring: &Ring, rt: Rt, stop: StopCode) {
    // The end of a slice is rare, and tells for how long the goroutine ran. Otherwise, if there is
    // work, the search ends in a moment.
    if stop != StopCode::PREEMPTED && has_work(rt) {
        ring.event(Kind::Switch, stop.0, 0);
    } else {
        ring.event_between_clocks(Kind::Switch, stop.0, 0);
    }
}

/// Returns whether a search on this P finds something at once.
fn has_work(rt: Rt) -> bool {
    rt.m().chosen.get().is_some() || rt.sched().has_global() || !rt.p().is_empty()
}

/// The thread's own context has found `g`, which runs now.
#[inline(always)]
pub(crate) fn found(rt: Rt, g: &G) {
    if let Some(ring) = rt.p().ring.active() {
        record_found(ring, rt, g);
    }
}

#[cold]
fn record_found(ring: &Ring, rt: Rt, g: &G) {
    let m = rt.m().id.load(Ordering::Relaxed);
    ring.on_m(m);
    ring.event(Kind::Switch, StopCode::NOTHING.0, id_of(g));
}

/// The P becomes idle: what ran last on it has stopped before now.
pub(crate) fn becomes_idle(p: &P) {
    if let Some(ring) = p.ring.active() {
        ring.clock(now());
        ring.clock_next();
    }
}

/// The running goroutine has got a P again; or the recording begins while it runs.
#[cold]
pub(crate) fn runs_here(rt: Rt) {
    if let Some(ring) = rt.p().ring.active() {
        ring.clock_next();
        record_found(ring, rt, rt.g());
    }
}

/// A carrier begins to poll a task.
#[inline(always)]
pub(crate) fn poll_began(p: &P, id: impl FnOnce() -> u64) {
    if let Some(ring) = p.ring.active() {
        ring.event(Kind::Switch, StopCode::NOTHING.0, id());
    }
}

/// A poll of `task`, which has not ended, has returned.
#[inline(always)]
pub(crate) fn poll_ended(rt: Rt, task: &Task, stop: impl FnOnce() -> StopCode) {
    if let Some(ring) = rt.p().ring.active() {
        let stop = stop();
        if stop == StopCode::YIELDED
            && let Some(table) = ring.runnable()
        {
            table.begin(task.id());
        }
        ring.event(Kind::Switch, stop.0, 0);
    }
}

/// The task that was polled has ended.
#[inline(always)]
pub(crate) fn task_ended(rt: Rt) {
    if let Some(ring) = rt.p().ring.active() {
        ring.event(Kind::Switch, StopCode::ENDED.0, 0);
    }
}

/// What woke a goroutine or task.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum WokenBy {
    /// What runs on this P, or the last [`Source`]; or this thread, if it has no P.
    Here = 0,
    /// It was woken earlier, and the wake-up takes effect only now.
    Unknown = 1,
}

/// The goroutine or task with this head and id was woken, on this P.
#[inline(always)]
pub(crate) fn woken(rt: Rt, head: &RunHead, id: impl FnOnce() -> u64, by: WokenBy) {
    if let Some(ring) = rt.p().ring.active() {
        let id = id();
        if by == WokenBy::Here && has_waited_long(rt, head) {
            record_end_of_long_wait(rt, ring, id);
        } else {
            record_woken(ring, id, by);
        }
    }
}

/// Both ends of the wait are read from the coarse clock, so the answer may be wrong for one of a few
/// milliseconds.
#[inline(always)]
fn has_waited_long(rt: Rt, head: &RunHead) -> bool {
    let coarse_ms = rt.sched().coarse_ms.load(Ordering::Relaxed);
    Sched::millis_waited_at(coarse_ms, head) >= LONG_WAIT_MS
}

/// What runs here has woken a goroutine or task after a long wait: the waker takes a sample of its
/// stack. The event and the sample have the same time, by which a reader joins them.
#[cold]
#[inline(never)]
fn record_end_of_long_wait(rt: Rt, ring: &Ring, id: u64) {
    let samples = rt.sched().record.waker_samples();
    if let Some(samples) = samples.filter(|_| rt.m().current.get().is_some()) {
        let now = now();
        if ring.may_sample(now) {
            sample::sample_waker(rt, samples, id, ring.since_began(now));
            return ring.event_at(now, Kind::Ready, WokenBy::Here as u8, id);
        }
    }
    record_woken(ring, id, WokenBy::Here);
}

#[inline(always)]
fn record_woken(ring: &Ring, id: u64, by: WokenBy) {
    ring.event(Kind::Ready, by as u8, id);
}

/// As [`woken`], on a thread without a P.
#[inline]
pub(crate) fn woken_outside(sched: &Sched, id: impl FnOnce() -> u64, by: WokenBy) {
    if sched.record.is_on() {
        record_woken_outside(sched, id(), by);
    }
}

#[cold]
fn record_woken_outside(sched: &Sched, id: u64, by: WokenBy) {
    let tid = this_thread();
    sched.record.write_outside(|ring| {
        ring.clock(now());
        record_woken(ring, id, by);
        if by == WokenBy::Here {
            ring.push(Word::new(Kind::Thread, 0, tid));
        }
    });
}

/// What is woken next on this P was not woken by a goroutine.
#[inline(always)]
pub(crate) fn source(rt: Rt, source: Source, late: Nanos) {
    if let Some(ring) = rt.p().ring.active() {
        // If all have slept until now, sysmon as well, the coarse clock is out of date, and what is
        // woken here would take the waits that it ends for short ones.
        rt.sched().refresh_coarse();
        ring.event_between_clocks(Kind::Source, source as u8, late.min(PAYLOAD));
        if source == Source::Timer && late >= rt.sched().triggers.limit(Incident::TimerLate) {
            rt.sched().notice(Incident::TimerLate, Noticed { id: 0, nanos: late });
        }
    }
}

/// This P has stolen from `victim`.
pub(crate) fn stolen(p: &P, victim: &P) {
    if let Some(ring) = p.ring.active() {
        ring.event_between_clocks(Kind::Steal, 0, victim.id.into());
    }
}

/// sysmon asks the goroutine on `p` to stop.
pub(crate) fn asked_to_stop(sched: &Sched, p: &P) {
    sched.record.write_outside(|ring| ring.timed_event(Kind::Ask, 0, p.id.into()));
}

/// A goroutine was asked to stop, and does not. For the preemption handler (invariant 1).
pub(crate) fn refused_to_stop(p: &P, why: u8) {
    if let Some(ring) = p.ring.active() {
        ring.timed_event(Kind::Refused, why, 0);
    }
}

/// The M that had `p` is blocked in a system call, and has lost it. Under the scheduler's lock.
pub(crate) fn retaken(p: &P, call: Option<u32>) {
    if let Some(ring) = p.ring.active() {
        ring.event_between_clocks(Kind::Retaken, 0, call.map_or(UNKNOWN_CALL, u64::from));
    }
}

/// The M gives up its P, because the goroutine is about to block.
pub(crate) fn released(rt: Rt) {
    if let Some(ring) = rt.p().ring.active() {
        ring.event_between_clocks(Kind::Retaken, 0, ANNOUNCED_CALL);
    }
}

/// Records how many words the ring of each P in use has, at this time; not too often. For sysmon.
pub(crate) fn mark(sched: &Sched, now_about: Nanos) {
    let record = &sched.record;
    let last = record.last_mark.load(Ordering::Relaxed);
    // A simulation has one P, and a clock of its own.
    if !record.is_on()
        || sched.simulation.is_some()
        || now_about.saturating_sub(last) < MARK_INTERVAL_NANOS
    {
        return;
    }
    record.last_mark.store(now_about, Ordering::Relaxed);
    record.write_outside(|outside| {
        outside.clock(now());
        for p in sched.all_ps().filter(|p| p.status() == PStatus::Running) {
            if let Some(ring) = p.ring.active() {
                outside.push(Word::mark(p.id, ring.words_written()));
                ring.clock_next();
            }
        }
        outside.clock(now());
    });
}

/// Records a region or a message of the program, on a goroutine.
pub(crate) fn note(rt: Rt, kind: Kind, text: &'static str) {
    if let Some(ring) = rt.p().ring.active() {
        // A longer text is cut; not within a character.
        let max = text.len().min(usize::from(u8::MAX));
        let len = (0..=max).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
        ring.timed_event(kind, len as u8, text.as_ptr() as u64);
    }
}
