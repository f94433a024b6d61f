//! A vector for the heaps of timers: the scheduler must not call malloc (sched/mod.rs, rule 2), so
//! its pages come from `mmap`.
//!
//! It grows by doubling with `mremap`, which moves page tables instead of bytes.

use crate::sys::mm;
use crate::sys::syscalls::{READ_WRITE, mmap_anonymous, mremap, munmap};
use std::ops::{Deref, DerefMut};
use std::ptr::{NonNull, null_mut};

/// See the head of the file.
pub struct MmapVec<T: Copy> {
    items: NonNull<T>,
    len: usize,
    bytes: usize,
}

// SAFETY: it owns its items, as a Vec does.
unsafe impl<T: Copy + Send> Send for MmapVec<T> {}

impl<T: Copy> MmapVec<T> {
    pub const fn new() -> Self {
        MmapVec { items: NonNull::dangling(), len: 0, bytes: 0 }
    }

    #[inline]
    pub fn push(&mut self, item: T) {
        if (self.len + 1) * size_of::<T>() > self.bytes {
            self.grow_slow();
        }
        // SAFETY: inside this vector's own mapping, by the check.
        unsafe { self.items.add(self.len).write(item) };
        self.len += 1;
    }

    #[inline]
    pub fn pop(&mut self) -> Option<T> {
        self.len = self.len.checked_sub(1)?;
        // SAFETY: the item was inside the array, which this vector owns.
        Some(unsafe { self.items.add(self.len).read() })
    }

    /// Takes out the item at `index`, and keeps the order of the others.
    pub fn remove_at(&mut self, index: usize) {
        self.copy_within(index + 1.., index);
        self.len -= 1;
    }

    /// Keeps the first `len` items.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Doubles the mapping, or makes the first one.
    #[cold]
    fn grow_slow(&mut self) {
        let bytes = (self.bytes * 2).max(mm::page());
        // SAFETY: a new mapping, or a larger one that replaces this vector's own mapping.
        let memory = unsafe {
            if self.bytes == 0 {
                mmap_anonymous(null_mut(), bytes, READ_WRITE, 0)
            } else {
                mremap(self.items.as_ptr().cast(), self.bytes, bytes)
            }
        };
        match memory.ok().and_then(|m| NonNull::new(m.cast())) {
            Some(items) => (self.items, self.bytes) = (items, bytes),
            None => crate::sys::fatal(format_args!("out of memory for timers")),
        }
    }
}

impl<T: Copy> Deref for MmapVec<T> {
    type Target = [T];
    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: this vector owns the items, and the first `len` of them are written.
        unsafe { std::slice::from_raw_parts(self.items.as_ptr(), self.len) }
    }
}

impl<T: Copy> DerefMut for MmapVec<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as `deref`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.items.as_ptr(), self.len) }
    }
}

impl<T: Copy> Drop for MmapVec<T> {
    fn drop(&mut self) {
        if self.bytes != 0 {
            // SAFETY: this vector's own mapping, and no borrow of it is left.
            let _ = unsafe { munmap(self.items.as_ptr().cast(), self.bytes) };
        }
    }
}
