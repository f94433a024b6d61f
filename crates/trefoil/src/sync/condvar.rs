//! `Condvar`: Go's `sync.Cond`, with the names of std.
//!
//! Invariants:
//! 1. A waiter joins the list before it unlocks the mutex, so a notification made under the mutex,
//!    or after a change made under it, finds it.
//! 2. `waiting` is the length of the list: a notification without waiters does not take the lock. A
//!    relaxed load is enough: a goroutine that changed the condition under the mutex has seen,
//!    through the mutex, all waiters that joined before.
//! 3. The weight of a waiter's node is the address of its mutex, which the waiter's guard keeps
//!    alive until the waiter is woken. If the waiters have different mutexes, `notify_all` does not
//!    use them.
//!
//! If the mutex is held, `notify_all` moves the waiters to the queue of the mutex instead of waking
//! them. There each is woken by the holder before it. If they were woken together, they would be
//! spread over all Ps and then queue for the mutex one by one: 32 of them took 20 to 30 µs on two
//! Ps, and 4 on one. A single waiter, and a waiter with a deadline, is woken at once.

use super::mutex::RawMutex;
use crate::sched::wait::holder;
use crate::sched::wait::inside;
use crate::sched::wait::list::{List, Node, WaitResult};
use crate::sched::wait::reason::WaitReason;
use crate::sys::clock::{self, NEVER, Nanos};
use crate::sys::lock::Lock;
use lock_api::GuardSend;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Lets a goroutine wait until another goroutine changes the data in a
/// [`Mutex`](crate::sync::Mutex).
///
/// `wait` takes the guard by reference, as in `parking_lot`. It unlocks the mutex, waits for a
/// notification, and locks the mutex again before it returns. Waiters are notified in the order in
/// which they began to wait. **There are no spurious wake-ups**: `wait` returns only after a
/// notification, `wait_for` and `wait_until` after a notification or when the time is up.
///
/// Another goroutine may still change the data before the notified waiter has locked the mutex. So
/// check the condition in a loop, or use `wait_while`.
///
/// # Cancel
/// A notification ends a wait. So does the time limit of `wait_for`, `wait_until`, `wait_while_for`
/// and `wait_while_until`; their result is a [`WaitTimeoutResult`].
///
/// # Examples
/// ```
/// use trefoil::sync::{Condvar, Mutex};
/// static READY: Mutex<bool> = Mutex::new(false);
/// static CHANGED: Condvar = Condvar::new();
/// trefoil::run(|| {
///     trefoil::go(|| {
///         *READY.lock() = true;
///         CHANGED.notify_one();
///     });
///     let mut ready = READY.lock();
///     CHANGED.wait_while(&mut ready, |ready| !*ready);
///     assert!(*ready);
/// });
/// ```
pub type Condvar = lock_api::Condvar<RawCondvar>;

/// Tells whether a wait on a [`Condvar`] with a time limit timed out.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use trefoil::sync::{Condvar, Mutex};
/// let (ready, changed) = (Mutex::new(false), Condvar::new());
/// let result = changed.wait_for(&mut ready.lock(), Duration::from_millis(1));
/// assert!(result.timed_out());
/// ```
pub use lock_api::WaitTimeoutResult;

/// A condition variable for the types of [`lock_api`]. Most programs use [`Condvar`].
///
/// # Examples
/// ```
/// use lock_api::RawCondvar as _;
/// assert!(!trefoil::sync::RawCondvar::INIT.notify_one());
/// ```
pub struct RawCondvar {
    waiting: AtomicU32,
    list: Lock<List>,
}

impl RawCondvar {
    /// Waits with the mutex `raw` held. Returns false if the deadline passed before a notification.
    fn wait_nanos(&self, raw: &RawMutex, deadline: Nanos) -> bool {
        let node = Node::new(std::ptr::from_ref(raw).expose_provenance());
        // Until `requeue` stores the mutex.
        holder::note_object(0, deadline);
        let result = node.sleep(
            WaitReason::CondWait,
            deadline,
            |rt| {
                let mut list = self.list.lock();
                list.push_back(&node);
                self.update_count(&list);
                drop(list);
                raw.unlock_in(rt);
                true
            },
            |_| {
                let mut list = self.list.lock();
                list.remove(&node);
                self.update_count(&list);
            },
        );
        let word = if let WaitResult::Woken(word) = result { word } else { 0 };
        raw.lock_after(word, WaitReason::MutexLock);
        result != WaitResult::TimedOut
    }

    /// Sets `waiting` to the length of `list`. Called under the list's lock.
    fn update_count(&self, list: &List) {
        self.waiting.store(list.len(), Ordering::Relaxed);
    }
}

// SAFETY: invariant 1: a waiter is in the list before the mutex is unlocked. No panic is possible
// in between, and the guard has no state.
unsafe impl lock_api::RawCondvar for RawCondvar {
    #[allow(clippy::declare_interior_mutable_const)]
    const INIT: RawCondvar =
        RawCondvar { waiting: AtomicU32::new(0), list: Lock::new(List::new()) };

    type RawMutex = RawMutex;

    unsafe fn wait(&self, mutex: &RawMutex, _: &mut GuardSend) {
        self.wait_nanos(mutex, NEVER);
    }

    fn notify_one(&self) -> bool {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return false;
        }
        inside(|rt| {
            let mut list = self.list.lock();
            let first = list.take_first();
            self.update_count(&list);
            drop(list);
            let found = first.is_some();
            if let Some(first) = first {
                first.wake(rt, 0);
            }
            found
        })
    }

    fn notify_all(&self) -> usize {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        inside(|rt| {
            let mut list = self.list.lock();
            let mut all = list.take_all();
            self.update_count(&list);
            drop(list);
            let n = all.len();
            if let Some(mutex) = all.weight_of_all() {
                // SAFETY: invariant 3: the waiters were taken here and are not woken yet.
                unsafe { &*std::ptr::with_exposed_provenance::<RawMutex>(mutex) }.requeue(&mut all);
            }
            all.wake_all(rt, 0);
            n
        })
    }
}

// SAFETY: as above.
unsafe impl lock_api::RawCondvarTimed for RawCondvar {
    fn checked_duration_to_instant(timeout: &Duration) -> Option<Instant> {
        Instant::now().checked_add(*timeout)
    }

    unsafe fn wait_until(&self, mutex: &RawMutex, _: &mut GuardSend, timeout: &Instant) -> bool {
        !self.wait_nanos(mutex, clock::at(*timeout))
    }

    unsafe fn wait_for(&self, mutex: &RawMutex, _: &mut GuardSend, timeout: &Duration) -> bool {
        !self.wait_nanos(mutex, clock::after(*timeout))
    }
}

impl fmt::Debug for RawCondvar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let waiting = self.waiting.load(Ordering::Relaxed);
        f.debug_struct("RawCondvar").field("waiting", &waiting).finish()
    }
}
