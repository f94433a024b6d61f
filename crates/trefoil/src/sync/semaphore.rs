//! `Semaphore`: permits, first come, first served.
//!
//! | bit of `word` | meaning |
//! |---|---|
//! | 0, `QUEUED` | the list is not empty |
//! | the rest | number of available permits |
//!
//! Invariants:
//! 1. `QUEUED` is set and cleared under the list's lock. There, it is set if the list is not empty.
//! 2. While it is set, the word changes only under the lock: no caller overtakes the waiters.
//! 3. When the lock is released, the first waiter wants more permits than are available.
//!
//! A released permit goes to the first waiter, and its goroutine runs at once: the releasing
//! goroutine yields to it. A permit of a goroutine that only waits to run would be unused
//! meanwhile.

use crate::runtime::task_waiter;
use crate::sched::wait::list::{Batch, List, Node, WaitResult};
use crate::sched::wait::reason::WaitReason;
use crate::sched::wait::task_node::TaskNode;
use crate::sched::{Rt, switch};
use crate::sys::clock::{self, NEVER, Nanos};
use crate::sys::lock::Lock;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

const QUEUED: usize = 1;
/// One permit, in `word`.
const ONE: usize = 2;

/// A number of permits that goroutines take and release.
///
/// Use it to limit how many goroutines do something at once. A goroutine that asks for more permits
/// than are available waits. Waiters are served in the order in which they came, and no later
/// caller overtakes them.
///
/// # Examples
/// ```
/// use trefoil::sync::Semaphore;
/// static TABLES: Semaphore = Semaphore::new(2);
/// trefoil::run(|| {
///     trefoil::scope(|s| {
///         for guest in 0..10 {
///             s.go(move || {
///                 let _table = TABLES.acquire();
///                 println!("guest {guest} eats");
///             });
///         }
///     });
///     assert_eq!(TABLES.available_permits(), 2);
/// });
/// ```
pub struct Semaphore {
    word: AtomicUsize,
    list: Lock<List>,
}

impl Semaphore {
    /// The largest number of permits that a semaphore can have.
    pub const MAX_PERMITS: usize = usize::MAX >> 2;

    /// Creates a semaphore with `n` permits.
    ///
    /// # Panics
    /// Panics if `n` is more than [`Semaphore::MAX_PERMITS`].
    pub const fn new(n: usize) -> Semaphore {
        assert!(n <= Semaphore::MAX_PERMITS, "Semaphore: more permits than MAX_PERMITS");
        Semaphore { word: AtomicUsize::new(n * ONE), list: Lock::new(List::new()) }
    }

    /// Takes a permit, and waits while none is available.
    ///
    /// Dropping the permit releases it.
    ///
    /// # Cancel
    /// The wait cannot be ended early; see [`acquire_timeout`](Semaphore::acquire_timeout).
    ///
    /// # Examples
    /// ```
    /// let s = trefoil::sync::Semaphore::new(1);
    /// let permit = s.acquire();
    /// assert!(s.try_acquire().is_none());
    /// drop(permit);
    /// assert!(s.try_acquire().is_some());
    /// ```
    #[inline]
    pub fn acquire(&self) -> SemaphorePermit<'_> {
        self.acquire_many(1)
    }

    /// Takes `n` permits at once, and waits until `n` are available.
    ///
    /// Later callers wait behind it, even if they ask for fewer permits. A caller that asks for
    /// more permits than the semaphore ever has waits forever.
    ///
    /// # Cancel
    /// The wait cannot be ended early.
    ///
    /// # Examples
    /// ```
    /// let s = trefoil::sync::Semaphore::new(3);
    /// let two = s.acquire_many(2);
    /// assert_eq!((two.permits(), s.available_permits()), (2, 1));
    /// ```
    #[inline]
    pub fn acquire_many(&self, n: usize) -> SemaphorePermit<'_> {
        if !self.try_take(n) {
            self.take_slow(n, NEVER);
        }
        SemaphorePermit { semaphore: self, n }
    }

    /// Takes a permit if one is available and no other caller waits. Otherwise returns `None`.
    ///
    /// # Examples
    /// ```
    /// assert!(trefoil::sync::Semaphore::new(0).try_acquire().is_none());
    /// ```
    #[inline]
    pub fn try_acquire(&self) -> Option<SemaphorePermit<'_>> {
        self.try_acquire_many(1)
    }

    /// Takes `n` permits if they are available and no other caller waits. Otherwise returns `None`.
    ///
    /// # Examples
    /// ```
    /// assert!(trefoil::sync::Semaphore::new(2).try_acquire_many(3).is_none());
    /// ```
    #[inline]
    pub fn try_acquire_many(&self, n: usize) -> Option<SemaphorePermit<'_>> {
        self.try_take(n).then(|| SemaphorePermit { semaphore: self, n })
    }

    /// Takes a permit, and waits at most for `limit`. Returns `None` if no permit was available in
    /// time.
    ///
    /// # Examples
    /// ```
    /// let s = trefoil::sync::Semaphore::new(0);
    /// assert!(s.acquire_timeout(std::time::Duration::from_millis(1)).is_none());
    /// ```
    pub fn acquire_timeout(&self, limit: Duration) -> Option<SemaphorePermit<'_>> {
        let taken = self.try_take(1) || self.take_slow(1, clock::after(limit));
        taken.then(|| SemaphorePermit { semaphore: self, n: 1 })
    }

    /// Takes a permit that holds the semaphore by an [`Arc`], and waits while none is available.
    ///
    /// Use it for a permit that is moved into another goroutine.
    ///
    /// # Cancel
    /// The wait cannot be ended early.
    ///
    /// # Examples
    /// ```
    /// use std::sync::Arc;
    /// let s = Arc::new(trefoil::sync::Semaphore::new(1));
    /// let permit = s.clone().acquire_owned();
    /// trefoil::go(move || drop(permit)).join().unwrap();
    /// assert_eq!(s.available_permits(), 1);
    /// ```
    pub fn acquire_owned(self: Arc<Self>) -> OwnedSemaphorePermit {
        self.acquire().forget();
        OwnedSemaphorePermit { semaphore: self }
    }

    /// Takes a permit, and waits while none is available: [`acquire`](Semaphore::acquire) for async
    /// code.
    ///
    /// Tasks, goroutines and threads are served in the order in which they came.
    ///
    /// # Cancel
    /// The future may be dropped at any time. If it was given a permit already, the permit is
    /// released. A future that is neither polled nor dropped keeps its place, and its permit, from
    /// others.
    ///
    /// # Examples
    /// ```
    /// use trefoil::sync::Semaphore;
    /// static TABLES: Semaphore = Semaphore::new(2);
    /// trefoil::run(|| {
    ///     let guests: Vec<_> = (0..10)
    ///         .map(|guest| {
    ///             trefoil::task::spawn(async move {
    ///                 let _table = TABLES.acquire_async().await;
    ///                 println!("guest {guest} eats");
    ///             })
    ///         })
    ///         .collect();
    ///     guests.into_iter().for_each(|guest| guest.join().unwrap());
    ///     assert_eq!(TABLES.available_permits(), 2);
    /// });
    /// ```
    pub fn acquire_async(&self) -> AcquireFuture<'_> {
        self.acquire_many_async(1)
    }

    /// Takes `n` permits at once, and waits until `n` are available:
    /// [`acquire_many`](Semaphore::acquire_many) for async code.
    ///
    /// # Cancel
    /// As for [`acquire_async`](Semaphore::acquire_async).
    pub fn acquire_many_async(&self, n: usize) -> AcquireFuture<'_> {
        AcquireFuture { semaphore: self, node: TaskNode::new(n, task_waiter()) }
    }

    /// Takes a permit that holds the semaphore by an [`Arc`], and waits while none is available:
    /// [`acquire_owned`](Semaphore::acquire_owned) for async code.
    ///
    /// # Cancel
    /// As for [`acquire_async`](Semaphore::acquire_async).
    ///
    /// # Examples
    /// ```
    /// use std::sync::Arc;
    /// let s = Arc::new(trefoil::sync::Semaphore::new(1));
    /// trefoil::block_on(async {
    ///     let permit = s.clone().acquire_owned_async().await;
    ///     trefoil::task::spawn(async move { drop(permit) }).await.unwrap();
    ///     assert_eq!(s.available_permits(), 1);
    /// });
    /// ```
    pub async fn acquire_owned_async(self: Arc<Self>) -> OwnedSemaphorePermit {
        self.acquire_async().await.forget();
        OwnedSemaphorePermit { semaphore: self }
    }

    /// Takes a permit that holds the semaphore by an [`Arc`], if one is available and no other
    /// caller waits. Otherwise returns `None`.
    ///
    /// # Examples
    /// ```
    /// use std::sync::Arc;
    /// let s = Arc::new(trefoil::sync::Semaphore::new(1));
    /// let permit = s.clone().try_acquire_owned();
    /// assert!(permit.is_some());
    /// assert!(s.try_acquire_owned().is_none());
    /// ```
    pub fn try_acquire_owned(self: Arc<Self>) -> Option<OwnedSemaphorePermit> {
        self.try_acquire()?.forget();
        Some(OwnedSemaphorePermit { semaphore: self })
    }

    /// Adds `n` permits to the semaphore. Waiters get them first.
    ///
    /// # Panics
    /// Panics if more than [`Semaphore::MAX_PERMITS`] would be available.
    ///
    /// # Examples
    /// ```
    /// let s = trefoil::sync::Semaphore::new(0);
    /// s.add_permits(2);
    /// assert_eq!(s.available_permits(), 2);
    /// ```
    pub fn add_permits(&self, n: usize) {
        self.release(n);
    }

    /// Returns how many permits are available now.
    ///
    /// Other goroutines may change the number at any time.
    ///
    /// # Examples
    /// ```
    /// let s = trefoil::sync::Semaphore::new(3);
    /// let _permit = s.acquire();
    /// assert_eq!(s.available_permits(), 2);
    /// ```
    pub fn available_permits(&self) -> usize {
        self.word.load(Ordering::Relaxed) / ONE
    }

    /// Takes `n` permits if they are available and the list is empty.
    #[inline]
    fn try_take(&self, n: usize) -> bool {
        let mut now = self.word.load(Ordering::Relaxed);
        while now & QUEUED == 0 && now / ONE >= n {
            // Acquire: what was done before the permit was released.
            match self.word.compare_exchange_weak(
                now,
                now - n * ONE,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(changed) => now = changed,
            }
        }
        false
    }

    /// Takes `n` permits, and waits for them. Returns false if the deadline has passed.
    #[cold]
    fn take_slow(&self, n: usize, deadline: Nanos) -> bool {
        let node = Node::new(n);
        let enqueue = |here| self.enqueue(&node, here);
        let withdraw = |here| {
            self.withdraw(&node, here);
        };
        match node.sleep(WaitReason::Semacquire, deadline, enqueue, withdraw) {
            WaitResult::NotQueued | WaitResult::Woken(_) => true,
            // The waiter may run long after its time-out, and permits may be available by now.
            WaitResult::TimedOut => self.try_take(n),
        }
    }

    /// Takes the permits that the node wants and returns false, or puts it into the list and
    /// returns true.
    fn enqueue(&self, node: &Node, here: Option<Rt>) -> bool {
        let mut list = self.list.lock();
        let mut freed = Batch::new();
        if list.drop_orphaned() {
            // Orphaned goroutines were unlinked. For the waiters behind them there may be enough
            // permits now.
            self.grant(&mut list, 0, &mut freed);
        }
        let waits = self.must_wait(node.weight);
        if waits {
            list.push_back(node);
        }
        drop(list);
        freed.wake_all(here, 0);
        waits
    }

    /// Takes the node of a waiter that gives up out of the list. Returns false if a taker has it.
    fn withdraw(&self, node: &Node, here: Option<Rt>) -> bool {
        let mut list = self.list.lock();
        let withdrawn = list.withdraw(node);
        // For the waiters behind this one there may be enough permits now.
        let mut freed = Batch::new();
        self.grant(&mut list, 0, &mut freed);
        drop(list);
        freed.wake_all(here, 0);
        withdrawn
    }

    /// Takes `n` permits and returns false, or sets `QUEUED` and returns true. Called under the
    /// lock.
    fn must_wait(&self, n: usize) -> bool {
        loop {
            if self.try_take(n) {
                return false;
            }
            let now = self.word.load(Ordering::Relaxed);
            if now & QUEUED != 0 {
                return true;
            }
            // Relaxed: the lock publishes the list.
            if now / ONE < n
                && self
                    .word
                    .compare_exchange(now, now | QUEUED, Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok()
            {
                return true;
            }
        }
    }

    /// Adds `n` permits, and wakes the waiters that get theirs.
    #[inline]
    fn release(&self, n: usize) {
        let mut now = self.word.load(Ordering::Relaxed);
        while now & QUEUED == 0 {
            check_total(now / ONE, n);
            // Release: the next holder of the permit sees what this one did.
            match self.word.compare_exchange_weak(
                now,
                now + n * ONE,
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return,
                Err(changed) => now = changed,
            }
        }
        self.release_slow(n);
    }

    #[cold]
    fn release_slow(&self, n: usize) {
        check_total(self.word.load(Ordering::Relaxed) / ONE, n);
        let rt = Rt::enter();
        let mut served = Batch::new();
        self.grant(&mut self.list.lock(), n, &mut served);
        let woke_goroutine = served.wake_all(rt, 0);
        match rt {
            Some(rt) if woke_goroutine => switch::yield_now(rt).leave(),
            Some(rt) => rt.leave(),
            None => {}
        }
    }

    /// Adds `more` permits, and takes the waiters that get theirs from the list. Called under the
    /// lock.
    fn grant(&self, list: &mut List, more: usize, served: &mut Batch) {
        let mut now = self.word.load(Ordering::Relaxed);
        // If `QUEUED` is clear (the last waiter withdrew before the caller had the lock), other
        // callers change the word, too. AcqRel: a permit passes through here from its last holder
        // to the next.
        while now & QUEUED == 0 {
            match self.word.compare_exchange_weak(
                now,
                now + more * ONE,
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) => return,
                Err(changed) => now = changed,
            }
        }
        let mut permits = now / ONE + more;
        while let Some(first) = list.take_first_if(|node| node.weight <= permits) {
            permits -= first.node().weight;
            served.push(first);
        }
        let queued = if list.is_empty() { 0 } else { QUEUED };
        // A swap, not a store: it continues the release sequence of earlier releases.
        self.word.swap(permits * ONE + queued, Ordering::AcqRel);
    }
}

fn check_total(permits: usize, more: usize) {
    assert!(
        more <= Semaphore::MAX_PERMITS - permits.min(Semaphore::MAX_PERMITS),
        "Semaphore: more permits than MAX_PERMITS"
    );
}

impl fmt::Debug for Semaphore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Semaphore").field("available", &self.available_permits()).finish()
    }
}

/// Permits that a task awaits, returned by [`Semaphore::acquire_async`] and
/// [`Semaphore::acquire_many_async`].
///
/// # Examples
/// ```
/// let s = trefoil::sync::Semaphore::new(3);
/// trefoil::block_on(async {
///     let two = s.acquire_many_async(2).await;
///     assert_eq!((two.permits(), s.available_permits()), (2, 1));
/// });
/// ```
#[must_use = "a future does nothing unless it is awaited"]
pub struct AcquireFuture<'a> {
    semaphore: &'a Semaphore,
    /// Its weight is the number of permits.
    node: TaskNode,
}

impl<'a> Future for AcquireFuture<'a> {
    type Output = SemaphorePermit<'a>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        const REASON: WaitReason = WaitReason::Semacquire;
        // SAFETY: nothing is moved out of the pinned node.
        let this = unsafe { self.get_unchecked_mut() };
        let (semaphore, n) = (this.semaphore, this.node.node.weight);
        if this.node.waits() {
            let with_lock = |f: &mut dyn FnMut()| {
                let _list = semaphore.list.lock();
                f();
            };
            if this.node.poll(context, REASON, with_lock).is_pending() {
                return Poll::Pending;
            }
        } else if !semaphore.try_take(n) {
            // SAFETY: the node is pinned, and `drop` cancels the wait; the semaphore is borrowed.
            if unsafe { this.node.begin(context, REASON, |node, rt| semaphore.enqueue(node, rt)) } {
                return Poll::Pending;
            }
        }
        Poll::Ready(SemaphorePermit { semaphore, n })
    }
}

impl Drop for AcquireFuture<'_> {
    fn drop(&mut self) {
        if self.node.waits()
            && self.node.cancel(|node, rt| self.semaphore.withdraw(node, rt)).is_some()
        {
            self.semaphore.release(self.node.node.weight);
        }
    }
}

impl fmt::Debug for AcquireFuture<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AcquireFuture").field("permits", &self.node.node.weight).finish()
    }
}

/// One or more permits of a [`Semaphore`], returned by [`Semaphore::acquire`] and its variants.
///
/// # Drop
/// Dropping it releases the permits. If that lets a waiting goroutine continue, the goroutine
/// that drops the permits yields to it.
///
/// # Examples
/// ```
/// let s = trefoil::sync::Semaphore::new(2);
/// {
///     let _permit = s.acquire();
///     assert_eq!(s.available_permits(), 1);
/// } // released here
/// assert_eq!(s.available_permits(), 2);
/// ```
#[must_use = "a permit that is not kept is released at once"]
#[derive(Debug)]
pub struct SemaphorePermit<'a> {
    semaphore: &'a Semaphore,
    n: usize,
}

impl SemaphorePermit<'_> {
    /// Returns how many permits this is.
    pub fn permits(&self) -> usize {
        self.n
    }

    /// Gives up the permits without releasing them: the semaphore has fewer permits from now on.
    ///
    /// # Examples
    /// ```
    /// let s = trefoil::sync::Semaphore::new(1);
    /// s.acquire().forget();
    /// assert_eq!(s.available_permits(), 0);
    /// ```
    pub fn forget(self) {
        std::mem::forget(self);
    }
}

impl Drop for SemaphorePermit<'_> {
    #[inline]
    fn drop(&mut self) {
        self.semaphore.release(self.n);
    }
}

/// A permit of a [`Semaphore`] that keeps the semaphore alive, returned by
/// [`Semaphore::acquire_owned`] and [`Semaphore::try_acquire_owned`].
///
/// # Drop
/// Dropping it releases the permit. If that lets a waiting goroutine continue, the goroutine that
/// drops the permit yields to it.
///
/// # Examples
/// ```
/// use std::sync::Arc;
/// use trefoil::sync::Semaphore;
/// trefoil::run(|| {
///     let downloads = Arc::new(Semaphore::new(2));
///     let handles: Vec<_> = (0..4)
///         .map(|page| {
///             let permit = downloads.clone().acquire_owned(); // at most two at once
///             trefoil::go(move || {
///                 println!("downloading page {page}");
///                 drop(permit);
///             })
///         })
///         .collect();
///     handles.into_iter().for_each(|h| h.join().unwrap());
///     assert_eq!(downloads.available_permits(), 2);
/// });
/// ```
#[must_use = "a permit that is not kept is released at once"]
#[derive(Debug)]
pub struct OwnedSemaphorePermit {
    semaphore: Arc<Semaphore>,
}

impl Drop for OwnedSemaphorePermit {
    fn drop(&mut self) {
        self.semaphore.release(1);
    }
}
