//! `ProcessLock`: a lock of the whole process, for state that dumps and profiles share.
//!
//! It is std's mutex, so a goroutine that waits for it parks. It counts like a lock of C code: a
//! goroutine that holds it is not stopped for ever by the end of its runtime, because every later
//! dump or profile would wait for it.

use crate::sys::lock;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// A value behind a lock of the process. A panic does not poison it.
pub(super) struct ProcessLock<T>(Mutex<T>);

/// A [`ProcessLock`] that is held. The fields are dropped in this order.
pub(super) struct ProcessGuard<'a, T> {
    guard: MutexGuard<'a, T>,
    _counted: CountedLock,
}

/// Counts a lock while it exists.
struct CountedLock;

impl CountedLock {
    fn new() -> CountedLock {
        lock::count_c_lock();
        CountedLock
    }
}

impl Drop for CountedLock {
    fn drop(&mut self) {
        lock::uncount_c_lock();
    }
}

impl<T> ProcessLock<T> {
    pub(super) const fn new(value: T) -> ProcessLock<T> {
        ProcessLock(Mutex::new(value))
    }

    /// Takes the lock; waits while another goroutine or thread holds it.
    pub(super) fn lock(&self) -> ProcessGuard<'_, T> {
        let counted = CountedLock::new();
        let guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ProcessGuard { guard, _counted: counted }
    }

    /// Takes the lock if it is free now.
    pub(super) fn try_lock(&self) -> Option<ProcessGuard<'_, T>> {
        let counted = CountedLock::new();
        let guard = match self.0.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(ProcessGuard { guard, _counted: counted })
    }
}

impl<T> Deref for ProcessGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for ProcessGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}
