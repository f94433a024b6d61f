//! `WaitGroup`: Go's.
//!
//! | bits of `state` | meaning |
//! |---|---|
//! | 63..32 | how many are not done |
//! | 31..0 | how many wait |
//!
//! Invariants:
//! 1. The number of waiters changes under the list's lock, and there it is the list's length.
//! 2. Who brings the first number to zero wakes all that wait.
//!
//! The counter is behind an `Arc` that is made when it is first needed: `new` is `const`, and a
//! goroutine started with [`WaitGroup::go`] can outlive the handle that started it.

use crate::sched::queue::{List, Node, WaitResult, inside};
use crate::sched::reason::WaitReason;
use crate::sys::clock::NEVER;
use crate::sys::lock::Lock;
use std::fmt;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

const ONE: u64 = 1 << 32;
const WAITERS: u64 = ONE - 1;
/// Goroutines that one group can count.
const MAX: u64 = i32::MAX as u64;

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
    /// Null until it is needed; else from `Arc::into_raw`.
    inner: AtomicPtr<Inner>,
}

pub(crate) struct Inner {
    state: AtomicU64,
    list: Lock<List>,
}

impl WaitGroup {
    /// Creates a group with a count of zero.
    pub const fn new() -> WaitGroup {
        WaitGroup { inner: AtomicPtr::new(null_mut()) }
    }

    #[inline]
    fn inner(&self) -> &Inner {
        // Acquire: the counter was made before its address was published.
        let inner = self.inner.load(Ordering::Acquire);
        let inner = if inner.is_null() { self.make_slow() } else { inner };
        // SAFETY: we own a count of the Arc until we are dropped.
        unsafe { &*inner }
    }

    #[cold]
    fn make_slow(&self) -> *mut Inner {
        let new = Arc::new(Inner { state: AtomicU64::new(0), list: Lock::new(List::new()) });
        let new = Arc::into_raw(new).cast_mut();
        // Release: see `inner`; Acquire: somebody else's.
        match self.inner.compare_exchange(null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => new,
            Err(theirs) => {
                // SAFETY: made just now, and nobody knows it.
                drop(unsafe { Arc::from_raw(new) });
                theirs
            }
        }
    }

    fn share(&self) -> Arc<Inner> {
        let inner = std::ptr::from_ref(self.inner());
        // SAFETY: it came from `Arc::into_raw`, and our own count stays.
        unsafe {
            Arc::increment_strong_count(inner);
            Arc::from_raw(inner)
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
        self.inner().add(n);
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
        self.inner().done();
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
        self.inner().wait();
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
        let ticket = self.ticket();
        crate::go(move || {
            let _done = ticket;
            drop(f());
        });
    }

    /// Counts one more until the ticket is dropped.
    #[track_caller]
    pub(crate) fn ticket(&self) -> Ticket {
        let inner = self.share();
        inner.add(1);
        Ticket(inner)
    }

    /// How many are not done.
    pub(crate) fn count(&self) -> u64 {
        self.inner().state.load(Ordering::Relaxed) / ONE
    }
}

impl Inner {
    #[track_caller]
    fn add(&self, n: usize) {
        let n = n as u64;
        assert!(n <= MAX, "WaitGroup: cannot count {n} goroutines");
        if n == 0 {
            return;
        }
        // Relaxed: `done` publishes what was done.
        let before = self.state.fetch_add(n * ONE, Ordering::Relaxed);
        let count = before / ONE;
        if count + n > MAX || count == 0 && before & WAITERS != 0 {
            self.state.fetch_sub(n * ONE, Ordering::Relaxed);
            assert!(count + n <= MAX, "WaitGroup: cannot count {} goroutines", count + n);
            panic!("WaitGroup misuse: add called concurrently with wait");
        }
    }

    #[track_caller]
    fn done(&self) {
        // Release: our work is seen by who waits. Acquire: that of the others, by who wakes it.
        let before = self.state.fetch_sub(ONE, Ordering::AcqRel);
        if before < ONE {
            self.state.fetch_add(ONE, Ordering::Relaxed);
            panic!("WaitGroup: negative counter: done called more often than add");
        }
        if before / ONE == 1 && before & WAITERS != 0 {
            self.release_slow();
        }
    }

    #[cold]
    fn release_slow(&self) {
        inside(|rt| {
            let mut list = self.list.lock();
            let all = list.take_all();
            self.state.fetch_and(!WAITERS, Ordering::Relaxed);
            drop(list);
            all.wake_all(rt, 0);
        });
    }

    #[track_caller]
    fn wait(&self) {
        // Acquire: what was done before `done`.
        if self.state.load(Ordering::Acquire) < ONE {
            return;
        }
        let node = Node::new(0);
        let enqueue = |_| {
            let mut list = self.list.lock();
            let mut now = self.state.load(Ordering::Acquire);
            while now >= ONE {
                // Acquire on failure: as above. The lock publishes the list.
                match self.state.compare_exchange_weak(
                    now,
                    now + 1,
                    Ordering::Relaxed,
                    Ordering::Acquire,
                ) {
                    Ok(_) => {
                        list.push_back(&node);
                        return true;
                    }
                    Err(changed) => now = changed,
                }
            }
            false
        };
        // Without a deadline nobody withdraws.
        let slept = node.sleep(WaitReason::WaitGroupWait, NEVER, enqueue, |_| ());
        if slept != WaitResult::NotQueued && self.state.load(Ordering::Acquire) != 0 {
            panic!("WaitGroup is reused before previous wait has returned");
        }
    }
}

/// One that is not done; dropping it is `done`.
pub(crate) struct Ticket(Arc<Inner>);

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.done();
    }
}

impl Clone for WaitGroup {
    fn clone(&self) -> WaitGroup {
        WaitGroup { inner: AtomicPtr::new(Arc::into_raw(self.share()).cast_mut()) }
    }
}

impl Drop for WaitGroup {
    fn drop(&mut self) {
        let inner = *self.inner.get_mut();
        if !inner.is_null() {
            // SAFETY: our count, from `Arc::into_raw`.
            drop(unsafe { Arc::from_raw(inner) });
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
