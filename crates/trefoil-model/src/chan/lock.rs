//! A channel's lock as seen from outside.

use crate::shim::{Part, is_broken};
use loom::sync::{Mutex, MutexGuard};
use std::cell::UnsafeCell;

/// See the head of the file.
pub(super) struct ChanLock {
    mutex: Mutex<()>,
    /// Held for who is in.
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
        // SAFETY: we are in, so the place is ours; the guard is gone before the mutex is, by
        // `unlock`.
        unsafe {
            *self.guard.get() =
                Some(std::mem::transmute::<MutexGuard<'_, ()>, MutexGuard<'static, ()>>(guard))
        };
    }

    pub(super) fn unlock(&self) {
        // SAFETY: we are in, so the place is ours.
        let guard = unsafe { (*self.guard.get()).take() };
        drop(guard);
    }
}
