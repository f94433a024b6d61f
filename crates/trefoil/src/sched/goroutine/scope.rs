//! The count of goroutines that a `scope` waits for.
//!
//! Invariant 1: the memory (a frame of the scope's owner) is alive while `running` is above zero: the
//! owner waits. The last access of an ending goroutine is the one that brings it to zero; waking the
//! owner uses only the word read before.

use crate::sched::m::Rt;
use crate::sched::wait;
use crate::sched::wait::reason::WaitReason;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Set in `running` once the owner has entered its final wait; then `owner` is valid.
const WAITING: usize = 1 << (usize::BITS - 1);

/// See the head of the file.
pub(crate) struct ScopeData {
    /// Goroutines not ended, and the `WAITING` bit.
    running: AtomicUsize,
    owner: AtomicUsize,
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

    pub(crate) fn one_more(&self) {
        self.running.fetch_add(1, Ordering::Relaxed);
    }

    /// A spawn that `one_more` announced did not happen.
    pub(crate) fn one_less(&self) {
        self.running.fetch_sub(1, Ordering::Relaxed);
    }

    /// # Safety
    /// Called once by each ending goroutine; `this` must not be used afterwards.
    pub(crate) unsafe fn one_ended(this: *const ScopeData, rt: Rt) {
        // SAFETY: we are counted in `running` until the subtraction (invariant 1).
        let (owner, before) = unsafe {
            // The owner stores itself before it sets WAITING, so if we see the bit this is valid;
            // if we do not, we do not use it. Read now: after the subtraction it may be gone.
            // Release: the goroutine's effects; Acquire: the owner word.
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

    /// The owner's wait for all.
    pub(crate) fn wait(&self) {
        // Acquire: their effects, if all have ended already.
        if self.running.load(Ordering::Acquire) == 0 {
            return;
        }
        wait::block(WaitReason::Scope, |waiter| {
            self.owner.store(waiter, Ordering::Relaxed);
            // Release: publishes `owner`. Acquire: effects of those that ended before.
            self.running.fetch_add(WAITING, Ordering::AcqRel) != 0
        });
    }

    pub(crate) fn note_panic(&self) {
        self.panicked.store(true, Ordering::Relaxed);
    }

    pub(crate) fn panicked(&self) -> bool {
        self.panicked.load(Ordering::Relaxed)
    }
}
