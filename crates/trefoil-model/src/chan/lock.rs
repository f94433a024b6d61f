//! A channel's lock, with the interface of `chan/lock.rs`.

use crate::shim::{Part, is_broken};
use loom::sync::{Mutex, MutexGuard};
use std::cell::UnsafeCell;

/// A lock without a guard, made of loom's mutex.
pub(super) struct ChanLock {
    mutex: Mutex<()>,
    /// The guard of the thread that holds the lock.
    guard: UnsafeCell<Option<MutexGuard<'static, ()>>>,
}

impl ChanLock {
    pub(super) fn new() -> ChanLock {
        ChanLock { mutex: Mutex::new(()), guard: UnsafeCell::new(None) }
    }

    pub(super) fn lock(&self) {
        if is_broken(Part::ChannelLock) {
            loom::thread::yield_now();
            return;
        }
        let guard = self.mutex.lock().expect("a panic ends the model");
        // SAFETY: this thread holds the lock, so the cell is its own. `unlock` drops the guard
        // before the mutex is dropped.
        unsafe {
            *self.guard.get() =
                Some(std::mem::transmute::<MutexGuard<'_, ()>, MutexGuard<'static, ()>>(guard))
        };
    }

    pub(super) fn unlock(&self) {
        // SAFETY: this thread holds the lock, so the cell is its own.
        let guard = unsafe { (*self.guard.get()).take() };
        drop(guard);
    }
}
