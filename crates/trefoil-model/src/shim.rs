//! `trefoil`'s shim, made of loom's types, with knobs to break it.
//!
//! The names are those of trefoil's own `shim.rs`. The atomics are thin wrappers around loom's that
//! ask the current [`Mutation`] which ordering to use. So a check can be run against a
//! protocol file with one ordering weakened, without a copy of the file.
//!
//! The mutation is in a plain `thread_local`: loom runs all threads of a model as coroutines on the
//! test's own thread, so they share it, and tests that run side by side do not.

use std::cell::{Cell, RefCell};
use std::panic::Location;

use std::time::Duration;

use loom::sync::{Condvar, Mutex, MutexGuard, atomic as loomed};

pub(crate) use std::sync::atomic::Ordering;

/// Slots in a run queue: few, so that few steps fill it; and half of it is more than one.
pub(crate) const RING: usize = 4;

/// What an operation does with its cell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Op {
    Load,
    Store,
    /// Swap, add, compare-and-swap.
    Change,
}

/// The half of an ordering to take away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Half {
    Acquire,
    Release,
}

/// A place in a protocol file where an atomic is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Site {
    pub(crate) file: &'static str,
    pub(crate) line: u32,
    pub(crate) op: Op,
    pub(crate) order: Ordering,
}

/// How a mutation check breaks the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Mutation {
    /// Not at all.
    #[default]
    None,
    /// [`full_fence`] does nothing, and [`swap_full`] is an ordinary swap.
    NoFullFence,
    /// All operations of this kind in this file lose half of their ordering.
    Everywhere(&'static str, Op, Half),
    /// One place loses half of its ordering.
    At(Site, Half),
    /// A part of the model itself is broken.
    Broken(Part),
}

/// A part of a model that can be broken; see the callers of [`is_broken`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Part {
    /// A channel's lock excludes no thread.
    ChannelLock,
    /// A claim of a wait succeeds although another waker has claimed it.
    Claim,
    /// A select that finds an arm ready while it registers does not claim its own wait first.
    OwnClaim,
    /// Waits have no numbers: a claim of an earlier wait fits the next one.
    WaitNumber,
    /// A goroutine that is handed the mutex is told to compete for it.
    HandOver,
    /// The last waiter that leaves the mutex's queue does not report it empty.
    EmptyQueue,
    /// A select parks although a future was woken during its poll.
    WakeupDuringPoll,
    /// A select does not wait for a waker whose claim has failed.
    RefusedWaker,
}

thread_local! {
    static MUTATION: Cell<Mutation> = const { Cell::new(Mutation::None) };
    /// The places passed so far, while [`sites_of`] runs.
    static SITES: RefCell<Option<Vec<Site>>> = const { RefCell::new(None) };
}

/// Runs `f` with this mutation.
pub(crate) fn mutated<R>(mutation: Mutation, f: impl FnOnce() -> R) -> R {
    struct Restore(Mutation);
    impl Drop for Restore {
        fn drop(&mut self) {
            MUTATION.set(self.0);
        }
    }
    let _restore = Restore(MUTATION.replace(mutation));
    f()
}

/// Returns whether this part is broken now.
pub(crate) fn is_broken(part: Part) -> bool {
    MUTATION.get() == Mutation::Broken(part)
}

/// Runs `f` and returns the places that it passed.
pub(crate) fn sites_of(f: impl FnOnce()) -> Vec<Site> {
    SITES.set(Some(Vec::new()));
    f();
    SITES.take().unwrap_or_default()
}

/// Returns the ordering to use at `at`, where the source says `order`.
fn actual(op: Op, order: Ordering, at: &'static Location<'static>) -> Ordering {
    let site = Site { file: at.file(), line: at.line(), op, order };
    SITES.with_borrow_mut(|seen| {
        if let Some(seen) = seen
            && !seen.contains(&site)
        {
            seen.push(site);
        }
    });
    match MUTATION.get() {
        Mutation::Everywhere(file, what, half) if what == op && at.file().ends_with(file) => {
            without(order, half)
        }
        Mutation::At(place, half) if place == site => without(order, half),
        _ => order,
    }
}

fn without(order: Ordering, half: Half) -> Ordering {
    match (order, half) {
        (Ordering::Acquire, Half::Acquire) | (Ordering::Release, Half::Release) => {
            Ordering::Relaxed
        }
        (Ordering::AcqRel | Ordering::SeqCst, Half::Acquire) => Ordering::Release,
        (Ordering::AcqRel | Ordering::SeqCst, Half::Release) => Ordering::Acquire,
        (order, _) => order,
    }
}

macro_rules! atomic {
    ($name:ident$(<$t:ident>)?, $value:ty) => {
        /// loom's atomic of this name.
        pub(crate) struct $name$(<$t>)?(loomed::$name$(<$t>)?);

        impl$(<$t>)? $name$(<$t>)? {
            #[track_caller]
            pub(crate) fn new(value: $value) -> Self {
                Self(loomed::$name::new(value))
            }
            #[track_caller]
            pub(crate) fn load(&self, order: Ordering) -> $value {
                self.0.load(actual(Op::Load, order, Location::caller()))
            }
            #[track_caller]
            pub(crate) fn store(&self, value: $value, order: Ordering) {
                self.0.store(value, actual(Op::Store, order, Location::caller()));
            }
            #[track_caller]
            pub(crate) fn swap(&self, value: $value, order: Ordering) -> $value {
                self.0.swap(value, actual(Op::Change, order, Location::caller()))
            }
            #[track_caller]
            pub(crate) fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                let at = Location::caller();
                // A failed exchange is a load.
                let failure = actual(Op::Load, failure, at);
                self.0.compare_exchange(current, new, actual(Op::Change, success, at), failure)
            }
            #[track_caller]
            pub(crate) fn compare_exchange_weak(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                // loom never fails a weak exchange without a reason.
                self.compare_exchange(current, new, success, failure)
            }
        }
    };
}

macro_rules! counting {
    ($name:ident, $value:ty) => {
        impl $name {
            #[track_caller]
            pub(crate) fn fetch_add(&self, n: $value, order: Ordering) -> $value {
                self.0.fetch_add(n, actual(Op::Change, order, Location::caller()))
            }
            #[track_caller]
            pub(crate) fn fetch_or(&self, bits: $value, order: Ordering) -> $value {
                self.0.fetch_or(bits, actual(Op::Change, order, Location::caller()))
            }
            #[track_caller]
            pub(crate) fn fetch_and(&self, bits: $value, order: Ordering) -> $value {
                self.0.fetch_and(bits, actual(Op::Change, order, Location::caller()))
            }
            #[track_caller]
            pub(crate) fn fetch_xor(&self, bits: $value, order: Ordering) -> $value {
                self.0.fetch_xor(bits, actual(Op::Change, order, Location::caller()))
            }
            #[track_caller]
            pub(crate) fn fetch_sub(&self, n: $value, order: Ordering) -> $value {
                self.0.fetch_sub(n, actual(Op::Change, order, Location::caller()))
            }
        }
    };
}

atomic!(AtomicPtr<T>, *mut T);
atomic!(AtomicBool, bool);
atomic!(AtomicU8, u8);
atomic!(AtomicU32, u32);
atomic!(AtomicU64, u64);
atomic!(AtomicUsize, usize);
counting!(AtomicU32, u32);
counting!(AtomicU64, u64);
counting!(AtomicUsize, usize);

/// A full (store-load) barrier.
pub(crate) fn full_fence() {
    if MUTATION.get() != Mutation::NoFullFence {
        loomed::fence(Ordering::SeqCst);
    }
}

/// A swap (Release and Acquire) that is also a full barrier.
///
/// loom does not give a SeqCst operation the strength of a fence, and neither does C11; x86 does.
#[track_caller]
pub(crate) fn swap_full<T>(cell: &AtomicPtr<T>, value: *mut T) -> *mut T {
    let old = cell.swap(value, Ordering::AcqRel);
    full_fence();
    old
}

/// What a spinning thread does between two loads.
pub(crate) fn spin_hint() {
    loom::thread::yield_now();
}

/// A value behind a lock, with the interface of `sys/lock.rs`.
pub(crate) struct Lock<T>(Mutex<T>);

impl<T> Lock<T> {
    pub(crate) fn new(value: T) -> Self {
        Lock(Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        // loom's locks are never poisoned: a panic ends the model.
        self.0.lock().expect("a panic ends the model")
    }

    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.0.try_lock().ok()
    }
}

/// The kernel's side of all futexes: for each sleeper the address of its word, and whether it was
/// woken.
struct Futexes {
    sleepers: Mutex<Vec<(usize, bool)>>,
    woken: Condvar,
}

loom::lazy_static! {
    static ref FUTEXES: Futexes =
        Futexes { sleepers: Mutex::new(Vec::new()), woken: Condvar::new() };
}

/// Sleeps if the word has this value, until [`futex_wake`]. A limit passes at once: the shortest
/// sleep has the most races.
pub(crate) fn futex_wait(word: &AtomicU32, value: u32, limit: Option<Duration>) {
    let mut sleepers = FUTEXES.sleepers.lock().expect("a panic ends the model");
    if word.0.load(Ordering::Relaxed) != value || limit.is_some() {
        return;
    }
    let me = sleepers.len();
    sleepers.push((std::ptr::from_ref(word) as usize, false));
    while !sleepers[me].1 {
        sleepers = FUTEXES.woken.wait(sleepers).expect("a panic ends the model");
    }
}

/// Wakes at most `how_many` sleepers of the word.
pub(crate) fn futex_wake(word: &AtomicU32, how_many: u32) {
    let mut sleepers = FUTEXES.sleepers.lock().expect("a panic ends the model");
    let key = std::ptr::from_ref(word) as usize;
    let here = sleepers.iter_mut().filter(|(at, woken)| *at == key && !woken);
    here.take(how_many as usize).for_each(|(_, woken)| *woken = true);
    FUTEXES.woken.notify_all();
}
