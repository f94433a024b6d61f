//! `ProcessLock`: a lock of the whole process, for state that dumps and profiles share.
//!
//! It counts like a lock of C code: a goroutine that holds it is not stopped for ever by the end of
//! its runtime, because every later dump or profile would wait for it.
//!
//! It is std's mutex. Whoever waits for it sleeps, and tries again. Rejected: to wait in the mutex. Its
//! owner may be a thread of the runtime's own, which wakes no goroutine otherwise. If all goroutines
//! wait and no timer is set, they would be taken for deadlocked. In a simulation a goroutine does wait
//! in the mutex, because a sleep would take simulated time.

use crate::sched::simulation::{self, WaitOutside};
use crate::sys::lock;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

/// How long a thread or goroutine sleeps before it tries again.
const PAUSE: Duration = Duration::from_micros(50);

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
        loop {
            if let Some(guard) = self.try_lock() {
                return guard;
            }
            if simulation::here().is_some() {
                let counted = CountedLock::new();
                let _outside = WaitOutside::for_shared_lock(|| true);
                let guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
                return ProcessGuard { guard, _counted: counted };
            }
            std::thread::sleep(PAUSE);
        }
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
