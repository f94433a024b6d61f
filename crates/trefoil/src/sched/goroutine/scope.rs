//! The count of goroutines that a `scope` waits for.
//!
//! The *owner* is the goroutine or plain thread that called `scope`.
//!
//! Invariant 1: a [`ScopeData`] is in a frame of the owner. It is alive while `running` is above
//! zero, because the owner waits. The last access of an ending goroutine is the subtraction from
//! `running`. Then it wakes the owner with a copy of the `owner` word, read before.

use crate::sched::m::Rt;
use crate::sched::wait;
use crate::sched::wait::holder::note_held_object;
use crate::sched::wait::reason::WaitReason;
use crate::sys::clock::NEVER;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Set in `running` once the owner has entered its final wait; then `owner` is valid.
const WAITING: usize = 1 << (usize::BITS - 1);

/// See the head of the file.
pub(crate) struct ScopeData {
    /// Goroutines not ended, and the `WAITING` bit.
    running: AtomicUsize,
    /// The owner's sleeper word (`wait/mod.rs`), for the goroutine that ends last.
    owner: AtomicUsize,
    /// A goroutine of the scope has panicked.
    panicked: AtomicBool,
}

impl ScopeData {
    pub(crate) fn new() -> Self {
        ScopeData {
            running: AtomicUsize::new(0),
            owner: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
        }
    }

    /// Counts a goroutine that is about to be spawned.
    pub(crate) fn add(&self) {
        self.running.fetch_add(1, Ordering::Relaxed);
    }

    /// Undoes an [`add`](ScopeData::add) whose spawn failed.
    ///
    /// It never brings `running` to zero while the owner waits: the caller is the owner, or a
    /// goroutine of the scope, which is counted itself.
    pub(crate) fn cancel_add(&self) {
        self.running.fetch_sub(1, Ordering::Relaxed);
    }

    /// Counts the end of a goroutine, and wakes the owner if it was the last.
    ///
    /// # Safety
    /// Called once by each ending goroutine, which must not use `this` afterwards.
    pub(crate) unsafe fn finish_one(this: *const ScopeData, rt: Rt) {
        // SAFETY: the caller is counted in `running` until the subtraction (invariant 1).
        let (owner, before) = unsafe {
            // The owner stores `owner` before it sets WAITING. If this goroutine sees the bit, the
            // word is valid; if not, it does not use the word. It reads the word before the
            // subtraction, because after it the memory may be gone.
            // Release: publishes the goroutine's effects. Acquire: the `owner` word.
            let mut now = (*this).running.load(Ordering::Acquire);
            loop {
                let owner = (*this).owner.load(Ordering::Relaxed);
                match (*this).running.compare_exchange_weak(
                    now,
                    now - 1,
                    Ordering::AcqRel,
                    Ordering::Acquire,
                ) {
                    Ok(before) => break (owner, before),
                    Err(changed) => now = changed,
                }
            }
        };
        if before == WAITING + 1 {
            wait::wake_in(rt, owner);
        }
    }

    /// Waits, as the owner, until all goroutines of the scope have ended.
    pub(crate) fn wait(&self) {
        // Acquire: the goroutines' effects, if all of them have ended already.
        if self.running.load(Ordering::Acquire) == 0 {
            return;
        }
        note_held_object(std::ptr::from_ref(self) as usize, NEVER);
        wait::block(WaitReason::Scope, |waiter| {
            self.owner.store(waiter, Ordering::Relaxed);
            // Release: publishes `owner`. Acquire: the effects of goroutines that ended before.
            self.running.fetch_add(WAITING, Ordering::AcqRel) != 0
        });
    }

    /// Records a panic. The goroutine's later [`finish_one`](ScopeData::finish_one) publishes it.
    pub(crate) fn note_panic(&self) {
        self.panicked.store(true, Ordering::Relaxed);
    }

    /// Returns whether a goroutine of the scope has panicked. Only after
    /// [`wait`](ScopeData::wait).
    pub(crate) fn panicked(&self) -> bool {
        self.panicked.load(Ordering::Relaxed)
    }
}
