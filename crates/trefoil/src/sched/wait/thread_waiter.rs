//! Where a plain thread waits: its parker and its claim word.
//!
//! A goroutine has both in its G. A plain thread gets a [`ThreadWaiter`] at its first wait and
//! gives it back when it ends; then another thread uses it. Its memory is never freed, because a
//! timer or a channel may try to claim a wait of a thread that has ended long ago.
//!
//! The deadlock check needs to know which plain threads are blocked ([`blocked_threads`]), so each
//! thread counts its waits without a deadline.
//!
//! Invariant 1: `waits` is odd exactly while the thread waits without a deadline. Only the thread
//! itself writes it.

use crate::sys::free_list::{FreeLink, FreeList, Reusable};
use crate::sys::lock::Lock;
use crate::sys::parker::Parker;
use std::sync::atomic::{AtomicU64, Ordering};

/// See the head of the file.
#[repr(align(8))]
pub(super) struct ThreadWaiter {
    pub(super) parker: Parker,
    /// The claim word (`mod.rs`).
    pub(super) claim: AtomicU64,
    /// The number of begins and ends of waits without a deadline (invariant 1).
    waits: AtomicU64,
    /// Its place in [`UNUSED`].
    free_link: FreeLink<ThreadWaiter>,
    /// The next entry in [`ALL`]. Never changes.
    next: Option<&'static ThreadWaiter>,
}

impl Reusable for ThreadWaiter {
    fn free_link(&self) -> &FreeLink<ThreadWaiter> {
        &self.free_link
    }
}

/// Every `ThreadWaiter` that was ever made.
static ALL: Lock<Option<&'static ThreadWaiter>> = Lock::new(None);

/// Those whose threads have ended.
static UNUSED: FreeList<ThreadWaiter> = FreeList::new();

/// Gives the `ThreadWaiter` back when its thread ends.
struct ThreadWaiterHandle(&'static ThreadWaiter);

impl Drop for ThreadWaiterHandle {
    fn drop(&mut self) {
        UNUSED.push(self.0);
    }
}

thread_local! {
    static OWN: ThreadWaiterHandle = ThreadWaiterHandle(ThreadWaiter::take());
}

impl ThreadWaiter {
    /// Returns an unused one, or a new one.
    fn take() -> &'static ThreadWaiter {
        UNUSED.pop().unwrap_or_else(|| {
            let new = Box::leak(Box::new(ThreadWaiter {
                parker: Parker::new(),
                claim: AtomicU64::new(super::OPEN),
                waits: AtomicU64::new(0),
                free_link: FreeLink::new(),
                next: None,
            }));
            let mut all = ALL.lock();
            new.next = all.take();
            *all = Some(new);
            new
        })
    }

    /// Returns the running thread's own. Only on a plain thread: goroutines wait in their G.
    pub(super) fn of_this_thread() -> &'static ThreadWaiter {
        // A thread-local destructor that waits after the destructor of `OWN` leaks one.
        OWN.try_with(|handle| handle.0).unwrap_or_else(|_| ThreadWaiter::take())
    }

    /// Sleeps without a deadline until the thread is unparked.
    pub(super) fn sleep(&self) {
        self.count_wait();
        self.parker.park();
        self.count_wait();
    }

    /// Counts a begin or an end of a wait (invariant 1).
    fn count_wait(&self) {
        self.waits.store(self.waits.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Returns whether the thread sleeps without a deadline and has not been woken. A thread that
    /// was woken but has not run since does not count: `unpark` has changed the parker's word.
    fn is_blocked(&self) -> bool {
        self.waits.load(Ordering::Relaxed) % 2 == 1 && self.parker.is_asleep()
    }
}

/// The plain threads that sleep without a deadline and have not been woken. They do nothing until a
/// goroutine or another thread wakes them. If two values are equal, each of these threads slept all
/// the time in between.
#[derive(PartialEq, Eq, Default)]
pub(crate) struct BlockedThreads {
    pub(crate) count: usize,
    waits: u64,
}

/// Counts the blocked threads, for the deadlock check. Takes a lock.
pub(crate) fn blocked_threads() -> BlockedThreads {
    let first = *ALL.lock();
    let mut blocked = BlockedThreads::default();
    for waiter in std::iter::successors(first, |waiter| waiter.next) {
        // Each count only grows, so the sum is the same only if each count is.
        blocked.waits = blocked.waits.wrapping_add(waiter.waits.load(Ordering::Relaxed));
        blocked.count += usize::from(waiter.is_blocked());
    }
    blocked
}
