//! Checks of a goroutine's state word (`sched/state.rs`): a park meets its wake-up.
//!
//! The saved registers and the waker's message are loom cells, so a goroutine that is resumed before
//! its registers are saved, or twice, or without seeing what its waker did, is a reported data race.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex};
use loom::thread;

use crate::explore::{Bound, explore, must_fail, sweep};
use crate::shim::{Half, Mutation, Op};
use crate::state_rs::{GoroutineState, Notify, ParkOutcome};

/// A queue with room for one, on which a taker sleeps.
struct Slot {
    full: Mutex<bool>,
    filled: Condvar,
}

impl Slot {
    fn new() -> Self {
        Slot { full: Mutex::new(false), filled: Condvar::new() }
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

/// A goroutine and the thing it waits for.
struct World {
    state: GoroutineState,
    /// Which wait the registers were saved for.
    registers: UnsafeCell<u32>,
    /// What the waker tells.
    message: UnsafeCell<u32>,
    /// The waiter list, with room for one: the right to wake. Only the goroutine puts something in,
    /// so nothing comes back to it this way.
    waiter: Slot,
    /// The run queue, with room for one.
    queue: Slot,
}

// SAFETY: loom checks that accesses to the cells are ordered; that is the point.
unsafe impl Sync for World {}
// SAFETY: as above.
unsafe impl Send for World {}

impl World {
    fn new() -> Arc<World> {
        let world = World {
            state: GoroutineState::new(),
            registers: UnsafeCell::new(0),
            message: UnsafeCell::new(0),
            waiter: Slot::new(),
            queue: Slot::new(),
        };
        world.state.set_runnable();
        world.state.set_running();
        Arc::new(world)
    }

    /// Some thread takes the goroutine from the queue and resumes it.
    fn resume(&self, wait: u32) {
        self.queue.take();
        // SAFETY: loom checks that nobody else accesses it now.
        let saved = self.registers.with_mut(|r| unsafe { std::mem::replace(&mut *r, 0) });
        assert_eq!(saved, wait, "resumed without its registers");
        self.state.set_running();
    }

    /// The goroutine, on whatever thread: waits for the `wait`-th time, is resumed, reads.
    fn wait(&self, wait: u32) {
        self.waiter.put();
        if !self.state.take_notification() {
            // The switch; what follows is the successor's.
            // SAFETY: loom checks that nobody else accesses it now.
            self.registers.with_mut(|r| unsafe { *r = wait });
            if self.state.commit_park() == ParkOutcome::AlreadyNotified {
                self.queue.put();
            }
            self.resume(wait);
        }
        // SAFETY: loom checks that nobody writes it now.
        let message = self.message.with(|m| unsafe { *m });
        assert_eq!(message, wait, "woken without its message");
    }

    /// The waker: finds the waiter, and wakes it with a message.
    fn wake(&self, wait: u32) {
        self.waiter.take();
        // SAFETY: loom checks that nobody else accesses it now.
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

/// A goroutine parks while its waker comes, in all orders.
///
/// Races: the wake-up comes before the park begins (`take_notification`), between it and the saving of the
/// registers (`Notified` at the commit), or after (`Waiting`). In each it is resumed once, with its
/// registers and the waker's message visible. A lost wake-up is a deadlock.
pub fn park_against_wake() {
    explore(Bound::All, || {
        let world = World::new();
        let waker = thread::spawn({
            let world = world.clone();
            move || world.wake(1)
        });
        world.wait(1);
        waker.join().unwrap();
    });
}

/// The same goroutine parks twice and is woken twice, by different wakers.
///
/// Race: the second waker meets a state word on which the first one's changes are not visible yet
/// (a stale `Runnable` would be "woken twice"). Bounded to three preemptions.
pub fn park_twice() {
    explore(Bound::Preemptions(3), || {
        let world = World::new();
        let first = thread::spawn({
            let world = world.clone();
            move || world.wake(1)
        });
        world.wait(1);
        let second = thread::spawn({
            let world = world.clone();
            move || world.wake(2)
        });
        world.wait(2);
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
        let world = World::new();
        let parker = thread::spawn({
            let world = world.clone();
            move || {
                // SAFETY: loom checks that nobody else accesses it now.
                world.registers.with_mut(|r| unsafe { *r = 1 });
                world.state.commit_park() == ParkOutcome::AlreadyNotified
            }
        });
        let ours = world.state.notify() == Notify::Enqueue;
        if ours {
            // SAFETY: loom checks that nobody else accesses it now.
            let saved = world.registers.with_mut(|r| unsafe { std::mem::take(&mut *r) });
            assert_eq!(saved, 1, "resumed without its registers");
            world.state.set_running();
        }
        assert!(ours != parker.join().unwrap(), "enqueued by exactly one");
    });
}

/// Teeth: without Release in `commit_park` the resumer finds no registers.
pub fn teeth_unpublished_registers() {
    must_fail(Mutation::Everywhere("state.rs", Op::Change, Half::Release), resumed_elsewhere);
}

/// Teeth: without Acquire in `take_notification` the goroutine goes on without its waker's message.
pub fn teeth_unacquired_notice() {
    must_fail(Mutation::Everywhere("state.rs", Op::Load, Half::Acquire), park_against_wake);
}

/// Teeth: a goroutine that announces its own park, before its registers are saved.
pub fn teeth_commit_before_save() {
    let broken = || {
        explore(Bound::All, || {
            let world = World::new();
            let waker = thread::spawn({
                let world = world.clone();
                move || {
                    world.notify();
                    world.resume(1);
                }
            });
            if world.state.commit_park() == ParkOutcome::AlreadyNotified {
                world.queue.put();
            }
            // SAFETY: loom checks that nobody else accesses it now; and somebody does.
            world.registers.with_mut(|r| unsafe { *r = 1 });
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
