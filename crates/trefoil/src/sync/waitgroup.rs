//! `WaitGroup`: Go's.
//!
//! | bits of `state` | meaning |
//! |---|---|
//! | 63..32 | the count: how many calls of `done` are missing |
//! | 31..0 | the number of waiters |
//!
//! Invariants:
//! 1. The number of waiters changes under the list's lock, and there it is the list's length.
//! 2. The `done` that takes the count to zero wakes all waiters.
//!
//! The counter is in an `Arc` that is made at its first use: `new` is `const`, and a goroutine
//! started with [`WaitGroup::go`] can outlive the handle that started it.

use crate::goroutine::go;
use crate::runtime::task_waiter;
use crate::sched::wait::inside;
use crate::sched::wait::list::{List, Node, WaitResult};
use crate::sched::wait::reason::WaitReason;
use crate::sched::wait::task_node::TaskNode;
use crate::sys::clock::NEVER;
use crate::sys::lock::Lock;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::task::{Context, Poll};

/// The count 1, in `state`.
const ONE: u64 = 1 << 32;
const WAITERS_MASK: u64 = ONE - 1;
/// The largest count of a group.
const MAX_COUNT: u64 = i32::MAX as u64;

/// Waits for a number of goroutines to be done.
///
/// Use [`go`](WaitGroup::go) to start goroutines that are counted, or call [`add`](WaitGroup::add)
/// and [`done`](WaitGroup::done). Clones are handles of the same group. A group works in a
/// `static`. For goroutines that return errors use [`ErrGroup`](crate::sync::ErrGroup).
///
/// # Rules
/// As in Go, a group may be used again, but only after every `wait` has returned. The `add` that
/// takes the count up from zero must happen before the `wait`. Breaking a rule panics if it is
/// noticed.
///
/// # Drop
/// Dropping a group does not wait for its goroutines; they continue.
///
/// # Examples
/// ```
/// use trefoil::sync::WaitGroup;
/// trefoil::run(|| {
///     let wg = WaitGroup::new();
///     for i in 0..3 {
///         wg.go(move || println!("{i}"));
///     }
///     wg.wait();
/// });
/// ```
pub struct WaitGroup {
    /// Null before its first use; then from `Arc::into_raw`.
    counter: AtomicPtr<WaitCounter>,
}

struct WaitCounter {
    state: AtomicU64,
    list: Lock<List>,
}

impl WaitGroup {
    /// Creates a group with a count of zero.
    pub const fn new() -> WaitGroup {
        WaitGroup { counter: AtomicPtr::new(null_mut()) }
    }

    /// Returns the counter, and makes it at its first use.
    #[inline]
    fn counter(&self) -> &WaitCounter {
        // Acquire: the counter was made before its address was published.
        let counter = self.counter.load(Ordering::Acquire);
        let counter = if counter.is_null() { self.make_slow() } else { counter };
        // SAFETY: this handle owns a strong count of the Arc until it is dropped.
        unsafe { &*counter }
    }

    /// Makes the counter, unless another thread has made it meanwhile.
    #[cold]
    fn make_slow(&self) -> *mut WaitCounter {
        let new = Arc::new(WaitCounter { state: AtomicU64::new(0), list: Lock::new(List::new()) });
        let new = Arc::into_raw(new).cast_mut();
        // Release: see `counter`. Acquire: the counter of another thread.
        match self.counter.compare_exchange(null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => new,
            Err(theirs) => {
                // SAFETY: made above, and no other thread can reach it.
                drop(unsafe { Arc::from_raw(new) });
                theirs
            }
        }
    }

    /// Returns the counter with a strong count of its own.
    fn share(&self) -> Arc<WaitCounter> {
        let counter = std::ptr::from_ref(self.counter());
        // SAFETY: it came from `Arc::into_raw`, and this handle keeps its own strong count.
        unsafe {
            Arc::increment_strong_count(counter);
            Arc::from_raw(counter)
        }
    }

    /// Adds `n` to the count: `n` more calls of [`done`](WaitGroup::done) are needed.
    ///
    /// # Panics
    /// Panics if it takes the count up from zero while a [`wait`](WaitGroup::wait) of the previous
    /// use has not returned, or if the count would be more than `i32::MAX`.
    ///
    /// # Examples
    /// ```
    /// let wg = trefoil::sync::WaitGroup::new();
    /// wg.add(2);
    /// wg.done();
    /// wg.done();
    /// wg.wait();
    /// ```
    #[track_caller]
    pub fn add(&self, n: usize) {
        self.counter().add(n);
    }

    /// Takes one off the count. When the count becomes zero, all waiters continue.
    ///
    /// # Panics
    /// Panics if the count is zero.
    ///
    /// # Examples
    /// ```
    /// trefoil::run(|| {
    ///     let wg = trefoil::sync::WaitGroup::new();
    ///     wg.add(1);
    ///     let worker = wg.clone();
    ///     trefoil::go(move || worker.done());
    ///     wg.wait();
    /// });
    /// ```
    /// ```should_panic
    /// trefoil::sync::WaitGroup::new().done();
    /// ```
    #[track_caller]
    pub fn done(&self) {
        self.counter().done();
    }

    /// Waits until the count is zero. Returns at once if it is zero already.
    ///
    /// # Panics
    /// Panics if the group was used again before this call returned.
    ///
    /// # Cancel
    /// The wait cannot be ended early. To wait for something else too, let the goroutines close a
    /// channel and use [`select!`](crate::select).
    ///
    /// # Examples
    /// ```
    /// use trefoil::sync::{Mutex, WaitGroup};
    /// static LOG: Mutex<Vec<u32>> = Mutex::new(Vec::new());
    /// trefoil::run(|| {
    ///     let wg = WaitGroup::new();
    ///     wg.wait(); // the count is zero
    ///     wg.go(|| LOG.lock().push(1));
    ///     wg.wait();
    ///     assert_eq!(*LOG.lock(), [1]);
    /// });
    /// ```
    #[track_caller]
    pub fn wait(&self) {
        self.counter().wait();
    }

    /// Waits until the count is zero: [`wait`](WaitGroup::wait) for async code.
    ///
    /// # Panics
    /// Awaiting it panics if the group was used again before the future has returned.
    ///
    /// # Cancel
    /// The future may be dropped at any time.
    ///
    /// # Examples
    /// ```
    /// trefoil::run(|| {
    ///     let wg = trefoil::sync::WaitGroup::new();
    ///     wg.go(|| println!("a goroutine"));
    ///     trefoil::task::spawn(async move { wg.wait_async().await }).join().unwrap();
    /// });
    /// ```
    pub fn wait_async(&self) -> WaitGroupFuture<'_> {
        WaitGroupFuture { counter: self.counter(), node: TaskNode::new(0, task_waiter()) }
    }

    /// Starts `f` as a goroutine, and counts it until it ends.
    ///
    /// A goroutine that panics counts as done.
    ///
    /// # Panics
    /// Panics if no memory is left for another goroutine, or as [`add`](WaitGroup::add) does.
    ///
    /// # Examples
    /// ```
    /// trefoil::run(|| {
    ///     let wg = trefoil::sync::WaitGroup::new();
    ///     wg.go(|| println!("hello"));
    ///     wg.go(|| panic!("counts as done"));
    ///     wg.wait();
    /// });
    /// ```
    #[track_caller]
    pub fn go<F, T>(&self, f: F)
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        let guard = self.done_guard();
        go(move || {
            let _done = guard;
            drop(f());
        });
    }

    /// Adds 1 to the count until the guard is dropped.
    #[track_caller]
    pub(crate) fn done_guard(&self) -> DoneGuard {
        let counter = self.share();
        counter.add(1);
        DoneGuard(counter)
    }

    /// Returns the count.
    pub(crate) fn count(&self) -> u64 {
        self.counter().state.load(Ordering::Relaxed) / ONE
    }
}

impl WaitCounter {
    #[track_caller]
    fn add(&self, n: usize) {
        let n = n as u64;
        assert!(n <= MAX_COUNT, "WaitGroup: cannot count {n} goroutines");
        if n == 0 {
            return;
        }
        // Relaxed: `done` publishes the work.
        let before = self.state.fetch_add(n * ONE, Ordering::Relaxed);
        let count = before / ONE;
        if count + n > MAX_COUNT || count == 0 && before & WAITERS_MASK != 0 {
            let after = self.state.fetch_sub(n * ONE, Ordering::AcqRel) - n * ONE;
            if after < ONE && after & WAITERS_MASK != 0 {
                // The last `done` may have mistaken this count for a later round.
                self.wake_all_slow();
            }
            assert!(count + n <= MAX_COUNT, "WaitGroup: cannot count {} goroutines", count + n);
            panic!("WaitGroup misuse: add called concurrently with wait");
        }
    }

    #[track_caller]
    fn done(&self) {
        // Release: a waiter sees the work before this call. Acquire: this call sees that of the
        // others, and the wake-up publishes it.
        let before = self.state.fetch_sub(ONE, Ordering::AcqRel);
        if before < ONE {
            self.state.fetch_add(ONE, Ordering::Relaxed);
            panic!("WaitGroup: negative counter: done called more often than add");
        }
        if before / ONE == 1 && before & WAITERS_MASK != 0 {
            self.wake_all_slow();
        }
    }

    #[cold]
    fn wake_all_slow(&self) {
        inside(|rt| {
            let mut list = self.list.lock();
            if self.state.load(Ordering::Acquire) >= ONE {
                // The waiters of this round have withdrawn, and the group was used again: these
                // wait for a later round, whose own `done` wakes them.
                return;
            }
            let all = list.take_all();
            self.state.fetch_and(!WAITERS_MASK, Ordering::Relaxed);
            drop(list);
            all.wake_all(rt, 0);
        });
    }

    #[track_caller]
    fn wait(&self) {
        // Acquire: the work before the calls of `done`.
        if self.state.load(Ordering::Acquire) < ONE {
            return;
        }
        let node = Node::new(0);
        let enqueue = |_| self.enqueue(&node);
        // Without a deadline there is no withdrawal.
        let result = node.sleep(WaitReason::WaitGroupWait, NEVER, enqueue, |_| ());
        if result != WaitResult::NotQueued {
            self.check_not_reused();
        }
    }

    #[track_caller]
    fn check_not_reused(&self) {
        if self.state.load(Ordering::Acquire) != 0 {
            panic!("WaitGroup is reused before previous wait has returned");
        }
    }

    /// Puts a waiter into the list and returns true, or returns false if the count is zero.
    fn enqueue(&self, node: &Node) -> bool {
        let mut list = self.list.lock();
        let mut now = self.state.load(Ordering::Acquire);
        while now >= ONE {
            // Acquire on failure: as in `wait`. The lock publishes the list.
            match self.state.compare_exchange_weak(
                now,
                now + 1,
                Ordering::Relaxed,
                Ordering::Acquire,
            ) {
                Ok(_) => {
                    list.push_back(node);
                    return true;
                }
                Err(changed) => now = changed,
            }
        }
        false
    }

    /// Takes a waiter that gives up out of the list. Returns false if a taker has it.
    fn withdraw(&self, node: &Node) -> bool {
        let mut list = self.list.lock();
        let withdrawn = list.withdraw(node);
        if withdrawn {
            self.state.fetch_sub(1, Ordering::Relaxed);
        }
        withdrawn
    }
}

/// The end of a [`WaitGroup`]'s goroutines, which a task awaits: returned by
/// [`WaitGroup::wait_async`].
///
/// # Examples
/// ```
/// let wg = trefoil::sync::WaitGroup::new();
/// trefoil::block_on(wg.wait_async()); // the count is zero
/// ```
#[must_use = "a future does nothing unless it is awaited"]
pub struct WaitGroupFuture<'a> {
    counter: &'a WaitCounter,
    node: TaskNode,
}

impl Future for WaitGroupFuture<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        const REASON: WaitReason = WaitReason::WaitGroupWait;
        // SAFETY: nothing is moved out of the pinned node.
        let this = unsafe { self.get_unchecked_mut() };
        let counter = this.counter;
        if this.node.waits() {
            let with_lock = |f: &mut dyn FnMut()| {
                let _list = counter.list.lock();
                f();
            };
            if this.node.poll(context, REASON, with_lock).is_pending() {
                return Poll::Pending;
            }
            counter.check_not_reused();
            return Poll::Ready(());
        }
        // Acquire: the work before the calls of `done`.
        let waits = counter.state.load(Ordering::Acquire) >= ONE
            // SAFETY: the node is pinned, and `drop` cancels the wait; the counter is borrowed.
            && unsafe { this.node.begin(context, REASON, |node, _| counter.enqueue(node)) };
        if waits { Poll::Pending } else { Poll::Ready(()) }
    }
}

impl Drop for WaitGroupFuture<'_> {
    fn drop(&mut self) {
        if self.node.waits() {
            self.node.cancel(|node, _| self.counter.withdraw(node));
        }
    }
}

impl fmt::Debug for WaitGroupFuture<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WaitGroupFuture { .. }")
    }
}

/// Calls `done` when it is dropped.
pub(crate) struct DoneGuard(Arc<WaitCounter>);

impl Drop for DoneGuard {
    fn drop(&mut self) {
        self.0.done();
    }
}

impl Clone for WaitGroup {
    fn clone(&self) -> WaitGroup {
        WaitGroup { counter: AtomicPtr::new(Arc::into_raw(self.share()).cast_mut()) }
    }
}

impl Drop for WaitGroup {
    fn drop(&mut self) {
        let counter = *self.counter.get_mut();
        if !counter.is_null() {
            // SAFETY: the strong count of this handle, from `Arc::into_raw`.
            drop(unsafe { Arc::from_raw(counter) });
        }
    }
}

impl Default for WaitGroup {
    fn default() -> WaitGroup {
        WaitGroup::new()
    }
}

impl fmt::Debug for WaitGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitGroup").field("count", &self.count()).finish()
    }
}
