//! A free list of leaked objects: objects that are never freed, only reused.
//!
//! Objects that a signal handler or a late waker may still reach (an M, a poll descriptor, a timer
//! slot) are leaked: their memory stays valid for ever, and what is no longer used waits in a
//! [`FreeList`] for its next user.
//!
//! ```text
//!   FreeList.head ─▶ T { free_link } ─▶ T { free_link } ─▶ null
//! ```
//!
//! Invariants:
//! 1. Every pointer in `head` and in a [`FreeLink`] is null or comes from a `&'static T`, so
//!    dereferencing it is always allowed.
//! 2. `head` and the links are written only under the list's lock.
//! 3. An object is in at most one list, once: its link belongs to that list. A caller that breaks
//!    this rule makes two users of one object.
//!
//! `push` and `pop` do not allocate. `pop` of an empty list is one load, without the lock.
//!
//! Rejected: a lock-free stack (needs a tag against ABA); a `Vec` under the lock (its push
//! allocates, and the runtime must not call malloc).

use super::lock::Lock;
use std::ptr::{from_ref, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};

/// The link of an object to the next one in its [`FreeList`].
pub struct FreeLink<T: 'static>(AtomicPtr<T>);

impl<T> FreeLink<T> {
    pub const fn new() -> FreeLink<T> {
        FreeLink(AtomicPtr::new(null_mut()))
    }
}

/// An object that can be in a [`FreeList`].
pub trait Reusable: Sized + 'static {
    /// Returns the object's link. Nothing but the list may use it.
    fn free_link(&self) -> &FreeLink<Self>;
}

/// See the head of the file.
pub struct FreeList<T: 'static> {
    lock: Lock<()>,
    head: AtomicPtr<T>,
}

impl<T: Reusable + Sync> FreeList<T> {
    pub const fn new() -> FreeList<T> {
        FreeList { lock: Lock::new(()), head: AtomicPtr::new(null_mut()) }
    }

    /// Adds an object that no thread uses any more.
    pub fn push(&self, object: &'static T) {
        let _locked = self.lock.lock();
        // Relaxed: the lock orders everything, here and in `pop`.
        object.free_link().0.store(self.head.load(Ordering::Relaxed), Ordering::Relaxed);
        self.head.store(from_ref(object).cast_mut(), Ordering::Relaxed);
    }

    /// Takes the object that was added last; the caller is its only user.
    pub fn pop(&self) -> Option<&'static T> {
        // An object that another thread adds at the same time may be missed.
        if self.head.load(Ordering::Relaxed).is_null() {
            return None;
        }
        let _locked = self.lock.lock();
        // SAFETY: null, or from a `&'static T` (invariant 1).
        let object = unsafe { self.head.load(Ordering::Relaxed).as_ref() }?;
        self.head.store(object.free_link().0.load(Ordering::Relaxed), Ordering::Relaxed);
        Some(object)
    }

    /// Takes an object from the list, or leaks a new one made by `make`.
    pub fn pop_or_leak(&self, make: impl FnOnce() -> T) -> &'static T {
        self.pop().unwrap_or_else(|| Box::leak(Box::new(make())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    struct Object {
        used: AtomicBool,
        link: FreeLink<Object>,
    }

    impl Object {
        fn new() -> Object {
            Object { used: AtomicBool::new(false), link: FreeLink::new() }
        }
    }

    impl Reusable for Object {
        fn free_link(&self) -> &FreeLink<Object> {
            &self.link
        }
    }

    #[test]
    fn pop_returns_the_object_that_was_pushed_last() {
        static LIST: FreeList<Object> = FreeList::new();
        assert!(LIST.pop().is_none());
        let (a, b) = (LIST.pop_or_leak(Object::new), LIST.pop_or_leak(Object::new));
        LIST.push(a);
        LIST.push(b);
        assert!(std::ptr::eq(LIST.pop_or_leak(Object::new), b));
        assert!(std::ptr::eq(LIST.pop_or_leak(Object::new), a));
        assert!(LIST.pop().is_none());
    }

    #[test]
    fn no_object_has_two_users() {
        static LIST: FreeList<Object> = FreeList::new();
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for _ in 0..20_000 {
                        let object = LIST.pop_or_leak(Object::new);
                        assert!(!object.used.swap(true, Ordering::Relaxed));
                        object.used.store(false, Ordering::Relaxed);
                        LIST.push(object);
                    }
                });
            }
        });
        assert!(std::iter::from_fn(|| LIST.pop()).count() <= 4);
    }
}
