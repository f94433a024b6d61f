//! Checks of a task's state word (`sched/task/state.rs`): wake-ups, polls and aborts meet, and a
//! stale waker does not reach the next task in the block.
//!
//! The future is a loom cell, so loom reports a data race if two carriers poll it at once, or if a
//! carrier does not see what the last one did. What wakers say is in relaxed atomics: a poll sees
//! it only if the state word orders it.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicBool;
use loom::sync::{Condvar, Mutex};
use loom::thread;
use std::sync::atomic::Ordering;

use crate::explore::{Bound, explore, must_fail, sweep};
use crate::shim::{Half, Mutation, Op};
use crate::task_state_rs::{Begin, Generation, TaskSnapshot, TaskState, Turn, Woken};

/// A task, and the run queue.
struct Model {
    state: TaskState,
    generation: Generation,
    /// How many times the future was polled.
    future: UnsafeCell<u32>,
    /// The future was dropped.
    dropped: UnsafeCell<bool>,
    /// What the wakers say.
    messages: [AtomicBool; 2],
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    /// The task is in the queue.
    has_task: bool,
    /// No waker will come any more.
    is_closed: bool,
}

// SAFETY: loom checks that accesses to the cells are ordered; that is the point.
unsafe impl Sync for Model {}
// SAFETY: as above.
unsafe impl Send for Model {}

impl Model {
    fn new(begin: Begin) -> Arc<Model> {
        let state = TaskState::new();
        let generation = state.begin(begin);
        let model = Model {
            state,
            generation,
            future: UnsafeCell::new(0),
            dropped: UnsafeCell::new(false),
            messages: [AtomicBool::new(false), AtomicBool::new(false)],
            queue: Mutex::new(Queue::default()),
            changed: Condvar::new(),
        };
        if begin == Begin::Scheduled {
            model.put();
        }
        Arc::new(model)
    }

    fn put(&self) {
        let mut queue = self.queue.lock().unwrap();
        assert!(!queue.has_task, "queued twice");
        queue.has_task = true;
        self.changed.notify_one();
    }

    /// Takes the task from the queue. Returns false if the queue is closed and empty.
    fn take(&self) -> bool {
        let mut queue = self.queue.lock().unwrap();
        while !queue.has_task && !queue.is_closed {
            queue = self.changed.wait(queue).unwrap();
        }
        std::mem::take(&mut queue.has_task)
    }

    fn close(&self) {
        self.queue.lock().unwrap().is_closed = true;
        self.changed.notify_one();
    }

    /// Wakes the task, after a message.
    fn wake(&self, waker: usize) {
        self.messages[waker].store(true, Ordering::Relaxed);
        if self.state.wake(self.generation.waker_bits()) == Woken::Enqueue {
            self.put();
        }
    }

    fn cancel(&self) {
        if self.state.cancel(self.generation) == Woken::Enqueue {
            self.put();
        }
    }

    /// Runs carriers, one after the other, until the queue is closed and empty, or the task was
    /// cancelled. Returns what the last poll saw of the messages.
    fn carry(&self) -> [bool; 2] {
        let mut seen = [false; 2];
        while self.take() {
            match self.state.begin_poll() {
                Turn::Poll => {
                    // SAFETY: loom reports any concurrent access.
                    self.future.with_mut(|polls| unsafe { *polls += 1 });
                    seen = [0, 1].map(|i| self.messages[i].load(Ordering::Relaxed));
                    if self.state.end_poll() {
                        self.put();
                    }
                }
                Turn::Cancel => {
                    // SAFETY: loom reports any concurrent access.
                    let dropped =
                        self.dropped.with_mut(|d| unsafe { std::mem::replace(&mut *d, true) });
                    assert!(!dropped, "dropped twice");
                    self.state.finish();
                    break;
                }
            }
        }
        seen
    }
}

/// Two wakers wake a task that waits.
///
/// Race: the second wake-up comes while the task is queued, is polled, or after the poll. The last
/// poll sees both messages: no wake-up is lost, and each orders the poll after it.
pub fn two_wakes_against_polls() {
    explore(Bound::Preemptions(3), || {
        let model = Model::new(Begin::Idle);
        let wakers = [0, 1].map(|waker| {
            let model = model.clone();
            thread::spawn(move || model.wake(waker))
        });
        let carrier = thread::spawn({
            let model = model.clone();
            move || model.carry()
        });
        for waker in wakers {
            waker.join().unwrap();
        }
        model.close();
        assert_eq!(carrier.join().unwrap(), [true; 2], "a wake-up was lost");
    });
}

/// A poll on one carrier, the next on another.
///
/// Race: the second carrier takes the task as soon as the waker has queued it, while the first one
/// is still ending its poll.
pub fn polls_on_two_carriers() {
    explore(Bound::Preemptions(3), || {
        let model = Model::new(Begin::Scheduled);
        let waker = thread::spawn({
            let model = model.clone();
            move || model.wake(0)
        });
        let other = thread::spawn({
            let model = model.clone();
            move || model.carry()
        });
        let here = model.carry_one();
        waker.join().unwrap();
        model.close();
        let there = other.join().unwrap();
        assert!(here[0] || there[0], "a wake-up was lost");
    });
}

impl Model {
    /// Polls once, if the task is in the queue at the moment.
    fn carry_one(&self) -> [bool; 2] {
        if !std::mem::take(&mut self.queue.lock().unwrap().has_task) {
            return [false; 2];
        }
        assert_eq!(self.state.begin_poll(), Turn::Poll);
        // SAFETY: loom reports any concurrent access.
        self.future.with_mut(|polls| unsafe { *polls += 1 });
        let seen = [0, 1].map(|i| self.messages[i].load(Ordering::Relaxed));
        if self.state.end_poll() {
            self.put();
        }
        seen
    }
}

/// A task is aborted while it is woken and polled.
///
/// Race: both find the task idle, and queue it. The future is dropped exactly once.
pub fn cancel_against_wake() {
    explore(Bound::Preemptions(3), || {
        let model = Model::new(Begin::Idle);
        let waker = thread::spawn({
            let model = model.clone();
            move || model.wake(0)
        });
        let canceller = thread::spawn({
            let model = model.clone();
            move || model.cancel()
        });
        model.carry();
        waker.join().unwrap();
        canceller.join().unwrap();
        // SAFETY: all threads have ended.
        assert!(model.dropped.with(|d| unsafe { *d }), "never dropped");
        assert!(model.state.has_ended(model.generation));
    });
}

/// A waker of a task that has ended, while the next task begins in the same block.
///
/// Race: the waker read the state word of the first task, and writes to that of the second.
pub fn stale_waker_against_reuse() {
    explore(Bound::All, || {
        let model = Model::new(Begin::Scheduled);
        let stale = thread::spawn({
            let model = model.clone();
            move || {
                let woken = model.state.wake(model.generation.waker_bits());
                assert_eq!(woken, Woken::Noted, "the first task was never idle");
                let woken = model.state.cancel(model.generation);
                assert_eq!(woken, Woken::Noted, "the first task was never idle");
            }
        });
        assert!(model.take());
        let _ = model.state.begin_poll();
        model.state.finish();
        let next = model.state.begin(Begin::Idle);
        stale.join().unwrap();
        assert_eq!(model.state.snapshot(), (TaskSnapshot::Idle, next), "a stranger was woken");
    });
}

/// Mutation check: without Release in `wake`, a poll does not see what the waker did.
pub fn detects_unpublished_wake() {
    let mutation = Mutation::Everywhere("task/state.rs", Op::Change, Half::Release);
    must_fail(mutation, two_wakes_against_polls);
}

/// Mutation check: without Acquire in `begin_poll` and `end_poll`, the same.
pub fn detects_unacquired_poll() {
    let mutation = Mutation::Everywhere("task/state.rs", Op::Change, Half::Acquire);
    must_fail(mutation, two_wakes_against_polls);
}

/// Mutation check: a waker that does not write the word if the task is scheduled already.
pub fn detects_wake_without_a_write() {
    let broken = || {
        explore(Bound::Preemptions(3), || {
            let model = Model::new(Begin::Scheduled);
            let waker = thread::spawn({
                let model = model.clone();
                move || {
                    model.messages[0].store(true, Ordering::Relaxed);
                    if model.state.snapshot().0 == TaskSnapshot::Scheduled {
                        return;
                    }
                    if model.state.wake(model.generation.waker_bits()) == Woken::Enqueue {
                        model.put();
                    }
                }
            });
            let carrier = thread::spawn({
                let model = model.clone();
                move || model.carry()
            });
            waker.join().unwrap();
            model.close();
            assert!(carrier.join().unwrap()[0], "a wake-up was lost");
        });
    };
    must_fail(Mutation::None, broken);
}

/// Which orderings of `task/state.rs` do the checks need? Prints a table.
pub fn sweep_orderings() {
    for check in [two_wakes_against_polls, polls_on_two_carriers, cancel_against_wake] {
        sweep(check);
    }
}
