//! `Pool`: objects for reuse, kept per P. Go's `sync.Pool`.
//!
//! A pool has as many *shards* as there are CPUs, with [`SHARD_SLOTS`] slots each. A slot is null
//! or owns an object. A goroutine uses the shard of its P, a plain thread that of its CPU. The
//! number of the shard is only a hint, so nothing here needs to hold the P: one exchange takes an
//! object out of a slot, and one puts an object into an empty slot. If its own shard has none, the
//! caller takes from the shared list, then from the slots of other shards.
//!
//! # Emptying
//! Go's garbage collector drops what was not used between two cycles. Here a thread, the *cleaner*,
//! runs while any pool of the process holds objects. It counts the periods of each pool, and drops
//! objects that were put in two periods ago or earlier. It is a plain thread, because `drop` of an
//! object is the user's code: it may block, and must keep no P.
//!
//! Invariants:
//! 1. The caller whose exchange took a pointer out of a slot owns the object.
//! 2. A pool with an object in it is in the list of the cleaner. A caller that puts an object into
//!    a slot checks `is_listed` afterwards; the cleaner clears it before it checks the slots for
//!    the last time. Both are SeqCst, so one of them sees the other.

use super::mutex::Mutex;
use super::once::OnceLock;
use crate::sched::calls;
use crate::sched::monitor::helper::ServiceWait;
use crate::sched::simulation::Undecided;
use crate::sys::cpus;
use crate::sys::thread::spawn_std;
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex as StdMutex, MutexGuard as StdMutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Objects that each shard keeps.
const SHARD_SLOTS: usize = 16;
/// Objects that the shared list of a pool keeps, unless the caller sets another number.
const MAX_SHARED: usize = 1024;
/// How long an object is kept at least, unless the caller sets another time.
const KEEP_FOR: Duration = Duration::from_secs(10);

/// Unused objects that are kept for the next user: Go's `sync.Pool`.
///
/// Use it for objects that are expensive to make and cheap to reuse, such as buffers.
/// [`get`](Pool::get) returns an unused object, or makes one. The guard gives it back when it is
/// dropped. An object comes back as its last user left it: clear it before use.
///
/// Each P keeps up to 16 objects, so that `get` and the return are one atomic operation each on
/// memory that no other P uses. Further objects are in a list that all Ps share. If that is full,
/// returned objects are dropped. A thread of the library drops objects that were not used for 10
/// seconds, or another time ([`with_limits`](Pool::with_limits)); it runs only while pools hold
/// objects. So a pool is no place for objects that must live on.
///
/// Goroutines, tasks and plain threads may share a pool, and it works in a `static`.
///
/// # Drop
/// Dropping the pool drops its unused objects. (If that thread is at work on the pool, it drops
/// them.)
///
/// # Examples
/// ```
/// use trefoil::sync::Pool;
/// static BUFFERS: Pool<Vec<u8>> = Pool::new(|| Vec::with_capacity(4096));
///
/// trefoil::run(|| {
///     trefoil::scope(|s| {
///         for i in 0..100 {
///             s.go(move || {
///                 let mut buffer = BUFFERS.get();
///                 buffer.clear();
///                 buffer.push(i);
///                 assert!(buffer.capacity() >= 4096);
///             });
///         }
///     });
/// });
/// ```
pub struct Pool<T, F = fn() -> T> {
    make: F,
    max_shared: usize,
    keep_for: Duration,
    /// Made by the first use.
    shared: OnceLock<Arc<Shared<T>>>,
}

impl<T: Send + 'static, F: Fn() -> T> Pool<T, F> {
    /// Creates an empty pool. `make` makes an object when [`get`](Pool::get) finds none.
    ///
    /// It is [`with_limits`](Pool::with_limits) with 1024 objects and 10 seconds.
    pub const fn new(make: F) -> Pool<T, F> {
        Pool::with_limits(make, MAX_SHARED, KEEP_FOR)
    }

    /// Creates an empty pool that keeps at most `max_shared` objects beyond the 16 of each P, and
    /// drops objects that were not used for `keep_for`.
    ///
    /// An object is dropped when `keep_for` has passed, and before twice that time has passed. Less
    /// than a millisecond counts as one.
    ///
    /// # Examples
    /// ```
    /// use std::time::Duration;
    /// use trefoil::sync::Pool;
    /// static LARGE: Pool<Vec<u8>> =
    ///     Pool::with_limits(|| vec![0; 1 << 20], 8, Duration::from_secs(1));
    /// assert_eq!(LARGE.get().len(), 1 << 20);
    /// ```
    pub const fn with_limits(make: F, max_shared: usize, keep_for: Duration) -> Pool<T, F> {
        Pool { make, max_shared, keep_for, shared: OnceLock::new() }
    }

    /// Returns an unused object, or makes one.
    ///
    /// # Panics
    /// Panics if the closure of [`new`](Pool::new) is called and panics.
    ///
    /// # Examples
    /// ```
    /// let pool = trefoil::sync::Pool::new(|| 5);
    /// *pool.get() += 1;
    /// assert!([5, 6].contains(&*pool.get()));
    /// ```
    #[inline]
    pub fn get(&self) -> PoolGuard<'_, T> {
        let shared = self.shared();
        let object = match shared.take() {
            Some(object) => object,
            None => Box::new(Object { put_in: 0, value: (self.make)() }),
        };
        PoolGuard { object: ManuallyDrop::new(object), pool: shared }
    }

    /// Returns an unused object, or `None` if there is none.
    ///
    /// # Examples
    /// ```
    /// let pool = trefoil::sync::Pool::new(|| 5);
    /// assert!(pool.try_get().is_none());
    /// pool.put(6);
    /// assert_eq!(*pool.try_get().unwrap(), 6);
    /// ```
    #[inline]
    pub fn try_get(&self) -> Option<PoolGuard<'_, T>> {
        let shared = self.shared();
        let object = ManuallyDrop::new(shared.take()?);
        Some(PoolGuard { object, pool: shared })
    }

    /// Puts an object into the pool. If the pool is full, drops it.
    ///
    /// Use it for objects that were made elsewhere: those of [`get`](Pool::get) come back by
    /// themselves. It allocates a place for the object; a guard keeps the place that it has.
    pub fn put(&self, value: T) {
        self.shared().give_back(Box::new(Object { put_in: 0, value }));
    }

    /// Drops all unused objects now.
    ///
    /// # Examples
    /// ```
    /// let pool = trefoil::sync::Pool::new(|| 5);
    /// pool.put(6);
    /// pool.clear();
    /// assert!(pool.try_get().is_none());
    /// ```
    pub fn clear(&self) {
        if let Some(shared) = self.shared.get() {
            drop(shared.remove_if(|_| true));
        }
    }

    #[inline]
    fn shared(&self) -> &Arc<Shared<T>> {
        self.shared.get_or_init(|| Arc::new(Shared::new(self.max_shared, self.keep_for)))
    }
}

impl<T, F> fmt::Debug for Pool<T, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unused = self.shared.get().map_or(0, |shared| shared.count());
        f.debug_struct("Pool").field("unused", &unused).finish_non_exhaustive()
    }
}

/// An object of a [`Pool`], returned by [`Pool::get`].
///
/// # Drop
/// Dropping the guard gives the object back to the pool. If that happens because of a panic, the
/// object is dropped instead: its user may have left it half changed.
///
/// # Examples
/// ```
/// use trefoil::sync::{Pool, PoolGuard};
/// let pool = Pool::new(String::new);
/// let mut text = pool.get();
/// text.push_str("kept");
/// let text: String = PoolGuard::into_inner(text); // not given back
/// assert_eq!(text, "kept");
/// ```
pub struct PoolGuard<'a, T: Send + 'static> {
    /// Taken by `drop` and `into_inner`.
    object: ManuallyDrop<Box<Object<T>>>,
    pool: &'a Arc<Shared<T>>,
}

impl<T: Send + 'static> PoolGuard<'_, T> {
    /// Takes the object out of the guard. It does not come back to the pool.
    pub fn into_inner(guard: Self) -> T {
        let mut guard = ManuallyDrop::new(guard);
        // SAFETY: the guard is not dropped, so the object is taken once.
        unsafe { ManuallyDrop::take(&mut guard.object) }.value
    }
}

impl<T: Send + 'static> Deref for PoolGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.object.value
    }
}

impl<T: Send + 'static> DerefMut for PoolGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.object.value
    }
}

impl<T: Send + 'static> Drop for PoolGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: taken once, here.
        let object = unsafe { ManuallyDrop::take(&mut self.object) };
        if std::thread::panicking() {
            drop(object);
        } else {
            self.pool.give_back(object);
        }
    }
}

impl<T: Send + fmt::Debug + 'static> fmt::Debug for PoolGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

struct Object<T> {
    /// The period in which it was put into the pool.
    put_in: u32,
    value: T,
}

/// On cache lines of its own; processors fetch them in pairs.
#[repr(align(128))]
struct Shard<T>([AtomicPtr<Object<T>>; SHARD_SLOTS]);

/// The part of a pool that the cleaner shares.
struct Shared<T> {
    shards: Box<[Shard<T>]>,
    /// The number of the period. The cleaner counts it.
    period: AtomicU32,
    /// The pool is in the list of the cleaner (invariant 2).
    is_listed: AtomicBool,
    /// The length of `list`, for callers that do not hold its lock.
    list_len: AtomicUsize,
    list: Mutex<Vec<Box<Object<T>>>>,
    max_shared: usize,
    period_length: Duration,
    /// It is `Send` and `Sync` if T is `Send`.
    owns: PhantomData<StdMutex<T>>,
}

impl<T> Shared<T> {
    fn new(max_shared: usize, keep_for: Duration) -> Shared<T> {
        let shard = |_| Shard([const { AtomicPtr::new(null_mut()) }; SHARD_SLOTS]);
        Shared {
            shards: (0..cpus::num_cpus().max(1)).map(shard).collect(),
            period: AtomicU32::new(0),
            is_listed: AtomicBool::new(false),
            list_len: AtomicUsize::new(0),
            list: Mutex::new(Vec::new()),
            max_shared,
            period_length: keep_for.max(Duration::from_millis(1)),
            owns: PhantomData,
        }
    }

    /// Returns the shard that the caller uses. A goroutine may move to another P right after.
    #[inline]
    fn own_shard(&self) -> usize {
        calls::current_p_id().unwrap_or_else(current_cpu) as usize % self.shards.len()
    }

    /// Takes an unused object.
    #[inline]
    fn take(&self) -> Option<Box<Object<T>>> {
        let own = self.own_shard();
        self.shards[own].take().or_else(|| self.take_elsewhere(own))
    }

    /// Takes an unused object from the list, or from another shard than `own`.
    #[cold]
    fn take_elsewhere(&self, own: usize) -> Option<Box<Object<T>>> {
        if self.list_len.load(Ordering::Relaxed) != 0 {
            let _undecided = Undecided::begin();
            let mut list = self.list.lock();
            let object = list.pop();
            self.list_len.store(list.len(), Ordering::Relaxed);
            if object.is_some() {
                return object;
            }
        }
        let others = 1..self.shards.len();
        others.into_iter().find_map(|i| self.shards[(own + i) % self.shards.len()].take())
    }

    /// Removes the objects for which `f` returns true. Objects are out of their slots while `f`
    /// decides, so a caller may miss them.
    fn remove_if(&self, f: impl Fn(&Object<T>) -> bool) -> Vec<Box<Object<T>>> {
        let mut removed = Vec::new();
        for slot in self.shards.iter().flat_map(|shard| &shard.0) {
            let Some(object) = take_from(slot) else { continue };
            if f(&object) {
                removed.push(object);
            } else if let Err(object) = put_into(slot, object) {
                // Another object has its slot by now. It is one more than the slots hold.
                removed.push(object);
            }
        }
        let _undecided = Undecided::begin();
        let mut list = self.list.lock();
        removed.extend(list.extract_if(.., |object| f(object)));
        self.list_len.store(list.len(), Ordering::Relaxed);
        removed
    }

    /// Returns the number of unused objects. Callers may change it meanwhile.
    fn count(&self) -> usize {
        let slots = self.shards.iter().flat_map(|shard| &shard.0);
        // SeqCst: invariant 2.
        let in_slots = slots.filter(|slot| !slot.load(Ordering::SeqCst).is_null()).count();
        in_slots + self.list.lock().len()
    }
}

impl<T: Send + 'static> Shared<T> {
    /// Puts an object into the pool, or drops it if the pool is full.
    #[inline]
    fn give_back(self: &Arc<Self>, mut object: Box<Object<T>>) {
        object.put_in = self.period.load(Ordering::Relaxed);
        let surplus = match self.shards[self.own_shard()].put(object) {
            Ok(()) => None,
            Err(object) => self.put_into_list(object),
        };
        // SeqCst: invariant 2.
        if !self.is_listed.load(Ordering::SeqCst) {
            self.enlist();
        }
        drop(surplus);
    }

    /// Puts an object into the list. Returns it if the list is full.
    #[cold]
    fn put_into_list(&self, object: Box<Object<T>>) -> Option<Box<Object<T>>> {
        let _undecided = Undecided::begin();
        let mut list = self.list.lock();
        if list.len() >= self.max_shared {
            return Some(object);
        }
        list.push(object);
        self.list_len.store(list.len(), Ordering::Relaxed);
        None
    }

    /// Puts the pool into the list of the cleaner, and starts the cleaner if it does not run.
    #[cold]
    fn enlist(self: &Arc<Self>) {
        if !self.is_listed.swap(true, Ordering::SeqCst) {
            let pool: Weak<Self> = Arc::downgrade(self);
            CLEANER.add(self.period_length, pool);
        }
    }
}

/// Returns the CPU that the calling thread is on.
fn current_cpu() -> u32 {
    // SAFETY: a call without arguments. -1, if the kernel does not tell, is a number like others.
    unsafe { libc::sched_getcpu() as u32 }
}

impl<T> Shard<T> {
    #[inline]
    fn take(&self) -> Option<Box<Object<T>>> {
        self.0.iter().find_map(take_from)
    }

    /// Puts an object into the first empty slot: the least used objects are in the last slots.
    ///
    /// # Errors
    /// Returns the object if no slot is empty.
    #[inline]
    fn put(&self, object: Box<Object<T>>) -> Result<(), Box<Object<T>>> {
        self.0
            .iter()
            .try_fold(object, |object, slot| match put_into(slot, object) {
                Ok(()) => Err(()),
                Err(object) => Ok(object),
            })
            .map_or(Ok(()), Err)
    }
}

#[inline]
fn take_from<T>(slot: &AtomicPtr<Object<T>>) -> Option<Box<Object<T>>> {
    if slot.load(Ordering::Relaxed).is_null() {
        return None;
    }
    // Acquire: what the last user did to the object.
    let object = slot.swap(null_mut(), Ordering::Acquire);
    // SAFETY: `put_into` made it from a box, and the exchange gave it to this caller (invariant 1).
    (!object.is_null()).then(|| unsafe { Box::from_raw(object) })
}

#[inline]
fn put_into<T>(slot: &AtomicPtr<Object<T>>, object: Box<Object<T>>) -> Result<(), Box<Object<T>>> {
    if !slot.load(Ordering::Relaxed).is_null() {
        return Err(object);
    }
    let object = Box::into_raw(object);
    // SeqCst: invariant 2. It also releases what this user did to the object.
    let put = slot.compare_exchange(null_mut(), object, Ordering::SeqCst, Ordering::Relaxed);
    // SAFETY: made from a box above, and still this caller's.
    put.map(drop).map_err(|_| unsafe { Box::from_raw(object) })
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        drop(self.remove_if(|_| true));
    }
}

/// A pool, for the cleaner.
trait Clean: Send + Sync {
    /// Begins the next period, and drops objects that were put in before the last one. Returns
    /// false if the pool is empty: then it is not in the list any more.
    fn clean(&self) -> bool;
}

impl<T: Send + 'static> Clean for Shared<T> {
    fn clean(&self) -> bool {
        let period = self.period.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        for object in self.remove_if(|object| period.wrapping_sub(object.put_in) >= 2) {
            // An object whose `drop` panics must not end the cleaner.
            let _ = catch_unwind(AssertUnwindSafe(|| drop(object)));
        }
        if self.count() != 0 {
            return true;
        }
        // SeqCst: invariant 2.
        self.is_listed.store(false, Ordering::SeqCst);
        // If a caller has put an object in meanwhile, it or the cleaner lists the pool again.
        self.count() != 0 && !self.is_listed.swap(true, Ordering::SeqCst)
    }
}

/// The pools that hold objects, and the thread that empties them.
struct Cleaner {
    state: StdMutex<CleanerState>,
    added: Condvar,
}

struct CleanerState {
    is_running: bool,
    pools: Vec<ListedPool>,
}

struct ListedPool {
    period_ends: Instant,
    period_length: Duration,
    pool: Weak<dyn Clean>,
}

/// A longer period ends after this time: a sum of times must not overflow.
const PERIOD_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

static CLEANER: Cleaner = Cleaner {
    state: StdMutex::new(CleanerState { is_running: false, pools: Vec::new() }),
    added: Condvar::new(),
};

impl Cleaner {
    fn lock(&self) -> StdMutexGuard<'_, CleanerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&'static self, period_length: Duration, pool: Weak<dyn Clean>) {
        let period_length = period_length.min(PERIOD_MAX);
        let period_ends = Instant::now() + period_length;
        let was_running = {
            let mut state = self.lock();
            state.pools.push(ListedPool { period_ends, period_length, pool });
            std::mem::replace(&mut state.is_running, true)
        };
        // Both without the lock: a goroutine that is preempted there may never run again, because
        // its runtime ends.
        if was_running {
            self.added.notify_one();
            return;
        }
        if spawn_std("trefoil-pools", None, Box::new(|| self.run())).is_err() {
            // Without a thread the pools keep what they have; the next pool tries again.
            self.lock().is_running = false;
        }
    }

    /// Empties pools until all are empty or dropped.
    fn run(&self) {
        let mut state = self.lock();
        loop {
            state.pools.retain(|listed| listed.pool.strong_count() != 0);
            let Some(next) = state.pools.iter().map(|listed| listed.period_ends).min() else {
                state.is_running = false;
                return;
            };
            let now = Instant::now();
            if next > now {
                // Meanwhile this thread wakes no goroutine, so it does not keep a deadlock from
                // being reported.
                let _waits = ServiceWait::begin();
                let wait = self.added.wait_timeout(state, next - now);
                state = wait.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            let due = state.pools.extract_if(.., |listed| listed.period_ends <= now);
            let mut due: Vec<_> = due.collect();
            drop(state);
            // `drop` of an object is the user's code, so the lock is not held meanwhile.
            due.retain_mut(|listed| {
                listed.period_ends = now + listed.period_length;
                // If the pool is dropped meanwhile, the end of this closure drops its objects.
                let clean = || listed.pool.upgrade().is_some_and(|pool| pool.clean());
                catch_unwind(AssertUnwindSafe(clean)).unwrap_or(false)
            });
            state = self.lock();
            state.pools.append(&mut due);
        }
    }
}
