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

use super::mutex::{MutexGuard, RawMutex};
use crate::sched::wait::holder;
use crate::sched::wait::inside;
use crate::sched::wait::list::{List, Node, WaitResult};
use crate::sched::wait::reason::WaitReason;
use crate::sys::clock::{self, NEVER, Nanos};
use crate::sys::lock::Lock;
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
pub struct Condvar {
    waiting: AtomicU32,
    list: Lock<List>,
}

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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    /// Returns true if the time was up before a notification, or before the condition changed.
    #[must_use]
    pub const fn timed_out(self) -> bool {
        self.0
    }
}

impl Condvar {
    /// Creates a condition variable without waiters.
    #[must_use]
    pub const fn new() -> Condvar {
        Condvar { waiting: AtomicU32::new(0), list: Lock::new(List::new()) }
    }

    /// Wakes the goroutine that has waited longest. Returns false if none waited.
    ///
    /// A notification is not kept for later: a goroutine that begins to wait afterwards does not
    /// see it.
    pub fn notify_one(&self) -> bool {
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

    /// Wakes all goroutines that wait, and returns their number.
    ///
    /// If the caller holds the mutex, they get it one by one after the caller has unlocked it.
    pub fn notify_all(&self) -> usize {
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

    /// Unlocks the mutex, waits for a notification, and locks the mutex again.
    pub fn wait<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>) {
        self.wait_with(guard, NEVER);
    }

    /// Waits as long as `condition` returns true. It is called with the mutex locked: first at
    /// once, then after each notification.
    pub fn wait_while<T, F>(&self, guard: &mut MutexGuard<'_, T>, condition: F)
    where
        T: ?Sized,
        F: FnMut(&mut T) -> bool,
    {
        self.wait_while_with(guard, condition, NEVER);
    }

    /// Waits for a notification, but not longer than `timeout`. The mutex is locked again in
    /// either case.
    pub fn wait_for<T: ?Sized>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        timeout: Duration,
    ) -> WaitTimeoutResult {
        self.wait_with(guard, clock::after(timeout))
    }

    /// Waits for a notification, but not after `deadline`. The mutex is locked again in either
    /// case.
    pub fn wait_until<T: ?Sized>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        deadline: Instant,
    ) -> WaitTimeoutResult {
        self.wait_with(guard, clock::at(deadline))
    }

    /// Waits as long as `condition` returns true, but not longer than `timeout`. The wait timed
    /// out if `condition` still returns true then.
    pub fn wait_while_for<T, F>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        condition: F,
        timeout: Duration,
    ) -> WaitTimeoutResult
    where
        T: ?Sized,
        F: FnMut(&mut T) -> bool,
    {
        self.wait_while_with(guard, condition, clock::after(timeout))
    }

    /// Waits as long as `condition` returns true, but not after `deadline`. The wait timed out if
    /// `condition` still returns true then.
    pub fn wait_while_until<T, F>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        condition: F,
        deadline: Instant,
    ) -> WaitTimeoutResult
    where
        T: ?Sized,
        F: FnMut(&mut T) -> bool,
    {
        self.wait_while_with(guard, condition, clock::at(deadline))
    }

    fn wait_while_with<T, F>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        mut condition: F,
        deadline: Nanos,
    ) -> WaitTimeoutResult
    where
        T: ?Sized,
        F: FnMut(&mut T) -> bool,
    {
        let mut result = WaitTimeoutResult(false);
        while condition(guard) {
            if result.timed_out() {
                return result;
            }
            result = self.wait_with(guard, deadline);
        }
        WaitTimeoutResult(false)
    }

    fn wait_with<T: ?Sized>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        deadline: Nanos,
    ) -> WaitTimeoutResult {
        // SAFETY: `wait_nanos` unlocks the mutex and locks it again. It does not unwind in between,
        // and the borrowed guard gives no access to the data meanwhile.
        let raw = unsafe { MutexGuard::mutex(guard).raw() };
        WaitTimeoutResult(!self.wait_nanos(raw, deadline))
    }

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

impl Default for Condvar {
    fn default() -> Condvar {
        Condvar::new()
    }
}

impl fmt::Debug for Condvar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let waiting = self.waiting.load(Ordering::Relaxed);
        f.debug_struct("Condvar").field("waiting", &waiting).finish()
    }
}
