//! Checks of a goroutine's state word (`sched/goroutine/state.rs`): a park meets its wake-up.
//!
//! The saved registers and the waker's message are loom cells, so loom reports a data race if a
//! goroutine is resumed before its registers are saved, or twice, or without seeing what its waker
//! did.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex};
use loom::thread;

use crate::explore::{Bound, explore, must_fail, sweep};
use crate::shim::{Half, Mutation, Op};
use crate::state_rs::{GoroutineState, Notify, ParkOutcome};

/// A queue with room for one item; a taker sleeps until it is full.
struct OneSlotQueue {
    full: Mutex<bool>,
    filled: Condvar,
}

impl OneSlotQueue {
    fn new() -> Self {
        OneSlotQueue { full: Mutex::new(false), filled: Condvar::new() }
    }

    fn put(&self) {
        let mut full = self.full.lock().unwrap();
        assert!(!*full, "queued twice");
        *full = true;
        self.filled.notify_one();
    }

    fn take(&self) {
        let mut full = self.full.lock().unwrap();
        while !*full {
            full = self.filled.wait(full).unwrap();
        }
        *full = false;
    }
}

/// A goroutine and the object that it waits for.
struct Model {
    state: GoroutineState,
    /// Which wait the registers were saved for.
    registers: UnsafeCell<u32>,
    /// The waker's message.
    message: UnsafeCell<u32>,
    /// The waiter list: the waker that takes the goroutine from it has the right to wake it. The
    /// goroutine only puts itself in, so the list publishes nothing to it.
    waiter: OneSlotQueue,
    /// The run queue.
    queue: OneSlotQueue,
}

// SAFETY: loom checks that accesses to the cells are ordered; that is the point.
unsafe impl Sync for Model {}
// SAFETY: as above.
unsafe impl Send for Model {}

impl Model {
    fn new() -> Arc<Model> {
        let model = Model {
            state: GoroutineState::new(),
            registers: UnsafeCell::new(0),
            message: UnsafeCell::new(0),
            waiter: OneSlotQueue::new(),
            queue: OneSlotQueue::new(),
        };
        model.state.set_runnable();
        model.state.set_running();
        Arc::new(model)
    }

    /// Takes the goroutine from the run queue and resumes it.
    fn resume(&self, wait: u32) {
        self.queue.take();
        // SAFETY: loom reports any concurrent access.
        let saved = self.registers.with_mut(|r| unsafe { std::mem::replace(&mut *r, 0) });
        assert_eq!(saved, wait, "resumed without its registers");
        self.state.set_running();
    }

    /// Runs the goroutine, on any thread: it waits for the `wait`-th time, is resumed, and reads
    /// the message.
    fn wait(&self, wait: u32) {
        self.waiter.put();
        if !self.state.take_notification() {
            // The switch. The next context on the M does what follows.
            // SAFETY: loom reports any concurrent access.
            self.registers.with_mut(|r| unsafe { *r = wait });
            if self.state.commit_park() == ParkOutcome::AlreadyNotified {
                self.queue.put();
            }
            self.resume(wait);
        }
        // SAFETY: loom reports any concurrent write.
        let message = self.message.with(|m| unsafe { *m });
        assert_eq!(message, wait, "woken without its message");
    }

    /// Runs the waker: it takes the goroutine from the waiter list and wakes it with a message.
    fn wake(&self, wait: u32) {
        self.waiter.take();
        // SAFETY: loom reports any concurrent access.
        self.message.with_mut(|m| unsafe { *m = wait });
        self.notify();
    }

    fn notify(&self) {
        match self.state.notify() {
            Notify::Enqueue => self.queue.put(),
            Notify::Noted => {}
            Notify::Twice(state) => panic!("woken twice: {state}"),
        }
    }
}

/// A goroutine parks while its waker wakes it, in all orders.
///
/// Races: the wake-up comes before the park begins (`take_notification`), between it and the saving
/// of the registers (`Notified` at the commit), or after (`Waiting`). In each it is resumed once,
/// with its registers and the waker's message visible. A lost wake-up is a deadlock.
pub fn park_against_wake() {
    explore(Bound::All, || {
        let model = Model::new();
        let waker = thread::spawn({
            let model = model.clone();
            move || model.wake(1)
        });
        model.wait(1);
        waker.join().unwrap();
    });
}

/// The same goroutine parks twice and is woken twice, by different wakers.
///
/// Race: the second waker meets a state word on which the first one's changes are not visible yet
/// (a stale `Runnable` would be "woken twice"). Bounded to three preemptions.
pub fn park_twice() {
    explore(Bound::Preemptions(3), || {
        let model = Model::new();
        let first = thread::spawn({
            let model = model.clone();
            move || model.wake(1)
        });
        model.wait(1);
        let second = thread::spawn({
            let model = model.clone();
            move || model.wake(2)
        });
        model.wait(2);
        first.join().unwrap();
        second.join().unwrap();
    });
}

/// The goroutine is resumed on another thread than the one it parked on.
///
/// Race: the resumer (the waker's own thread) must see the registers that the first thread saved,
/// through nothing but the state word.
pub fn resumed_elsewhere() {
    explore(Bound::All, || {
        let model = Model::new();
        let parker = thread::spawn({
            let model = model.clone();
            move || {
                // SAFETY: loom reports any concurrent access.
                model.registers.with_mut(|r| unsafe { *r = 1 });
                model.state.commit_park() == ParkOutcome::AlreadyNotified
            }
        });
        let ours = model.state.notify() == Notify::Enqueue;
        if ours {
            // SAFETY: loom reports any concurrent access.
            let saved = model.registers.with_mut(|r| unsafe { std::mem::take(&mut *r) });
            assert_eq!(saved, 1, "resumed without its registers");
            model.state.set_running();
        }
        assert!(ours != parker.join().unwrap(), "enqueued by exactly one");
    });
}

/// Mutation check: without Release in `commit_park` the resumer finds no registers.
pub fn detects_unpublished_registers() {
    must_fail(Mutation::Everywhere("state.rs", Op::Change, Half::Release), resumed_elsewhere);
}

/// Mutation check: without Acquire in `take_notification` the goroutine goes on without its waker's
/// message.
pub fn detects_unacquired_notice() {
    must_fail(Mutation::Everywhere("state.rs", Op::Load, Half::Acquire), park_against_wake);
}

/// Mutation check: a goroutine that announces its own park, before its registers are saved.
pub fn detects_commit_before_save() {
    let broken = || {
        explore(Bound::All, || {
            let model = Model::new();
            let waker = thread::spawn({
                let model = model.clone();
                move || {
                    model.notify();
                    model.resume(1);
                }
            });
            if model.state.commit_park() == ParkOutcome::AlreadyNotified {
                model.queue.put();
            }
            // SAFETY: loom reports the concurrent access, which this check provokes.
            model.registers.with_mut(|r| unsafe { *r = 1 });
            waker.join().unwrap();
        });
    };
    must_fail(Mutation::None, broken);
}

/// Which orderings of `state.rs` do the checks need? Prints a table.
pub fn sweep_orderings() {
    for check in [park_against_wake, park_twice, resumed_elsewhere] {
        sweep(check);
    }
}
