//! `trefoil`'s `chan/cells.rs`, made of loom's types.

pub(crate) use crate::shim::{
    AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering,
};
use loom::cell::UnsafeCell;

/// A cell that loom checks: it reports an access that is not ordered with the others.
pub(crate) struct Cell<T>(UnsafeCell<T>);

impl<T> Cell<T> {
    #[track_caller]
    pub(crate) fn new(value: T) -> Self {
        Cell(UnsafeCell::new(value))
    }

    #[track_caller]
    pub(crate) fn set(&self, value: T) {
        self.replace(value);
    }

    #[track_caller]
    pub(crate) fn replace(&self, value: T) -> T {
        // SAFETY: loom reports any concurrent access.
        self.0.with_mut(|place| unsafe { std::mem::replace(&mut *place, value) })
    }
}

impl<T: Copy> Cell<T> {
    #[track_caller]
    pub(crate) fn get(&self) -> T {
        // SAFETY: loom reports any concurrent write.
        self.0.with(|place| unsafe { *place })
    }

    #[track_caller]
    pub(crate) fn swap(&self, other: &Self) {
        if !std::ptr::eq(self, other) {
            other.set(self.replace(other.get()));
        }
    }
}

/// A hint for the cache: nothing that a model could check.
pub(crate) struct CacheHint;

impl CacheHint {
    pub(crate) fn new() -> Self {
        CacheHint
    }

    pub(crate) fn set(&self, _sleeper: usize) {}
    pub(crate) fn prefetch(&self, _sudog: *const u8) {}
}
