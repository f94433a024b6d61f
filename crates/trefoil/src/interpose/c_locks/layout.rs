//! Where glibc keeps state for which it has no function: the kind and owner of a mutex, whether an
//! object is process-shared, the clock of a condition variable, the size of a barrier.
//!
//! Some of it is in glibc's public headers and part of its binary interface (static initialisers);
//! some has moved (`__wrefs` of a condition variable, between 2.36 and 2.42). So all of it is
//! discovered, or checked, once, by making objects with known attributes and reading their words.
//! If they are not as expected, every function returns `None`, and the real functions are used for
//! every call that would have to wait.
//!
//! Invariant 1: what is read does not change while the object lives (kind, flags), or is compared
//! with the reader's own id (owner), which only the reader itself writes. So relaxed reads are
//! enough.

use super::real;
use libc::{pthread_barrier_t, pthread_cond_t, pthread_mutex_t, pthread_rwlock_t, sem_t};
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Words of `pthread_mutex_t` (bits/struct_mutex.h).
const MUTEX_OWNER: usize = 2;
const MUTEX_KIND: usize = 4;
/// Bits of a mutex's kind: its type, and the properties for which it is left to the real functions
/// (robust, priority inheritance and protection, process-shared).
const KIND_TYPE: u32 = 3;
const KIND_SPECIAL: u32 = 16 | 32 | 64 | 128;
/// Words of `pthread_rwlock_t` (bits/struct_rwlock.h), and the kind that prefers waiting writers.
const RWLOCK_WRITER: usize = 6;
const RWLOCK_KIND: usize = 12;
const PREFER_WRITER_NONRECURSIVE: u32 = 2;
/// Bits of the flag word of a condition variable.
const COND_SHARED: u32 = 1;
const COND_MONOTONIC: u32 = 2;
/// A number of participants that no other word of a new barrier equals.
const PROBE_COUNT: u32 = 0x0135_7924;

unsafe extern "C" {
    fn pthread_rwlockattr_setkind_np(attr: *mut libc::pthread_rwlockattr_t, kind: c_int) -> c_int;
}

/// The discovered layout: the index of a word in each object.
#[derive(Clone, Copy)]
struct LockLayout {
    /// The flags of a condition variable.
    cond: u8,
    /// The word of a semaphore that is 0 unless it is process-shared.
    semaphore: u8,
    /// The same for a read-write lock.
    rwlock_shared: u8,
    /// The number of participants of a barrier.
    barrier_count: u8,
    /// The word of a barrier that is 0 unless it is process-shared.
    barrier_shared: u8,
}

/// States of [`LAYOUT`], in its lowest byte.
const UNUSABLE: u64 = 1;
const KNOWN: u64 = 2;

/// 0 before the discovery, then `UNUSABLE`, or `KNOWN` and a [`LockLayout`] with a byte per field.
static LAYOUT: AtomicU64 = AtomicU64::new(0);

/// Returns the layout; None if glibc's objects are not as expected. The first call discovers it.
#[inline]
fn layout() -> Option<LockLayout> {
    // Relaxed: nothing is read through the word.
    let mut word = LAYOUT.load(Ordering::Relaxed);
    if word == 0 {
        word = discover_slow();
    }
    let [state, cond, semaphore, rwlock_shared, barrier_count, barrier_shared, ..] =
        word.to_le_bytes();
    (u64::from(state) == KNOWN).then_some(LockLayout {
        cond,
        semaphore,
        rwlock_shared,
        barrier_count,
        barrier_shared,
    })
}

#[cold]
fn discover_slow() -> u64 {
    let word = match discover() {
        Some(l) => u64::from_le_bytes([
            KNOWN as u8,
            l.cond,
            l.semaphore,
            l.rwlock_shared,
            l.barrier_count,
            l.barrier_shared,
            0,
            0,
        ]),
        None => UNUSABLE,
    };
    LAYOUT.store(word, Ordering::Relaxed);
    word
}

/// Returns the word number `index` of an object.
///
/// # Safety
/// The object is that large, and alive.
#[inline(always)]
unsafe fn word<T>(object: *const T, index: usize) -> u32 {
    debug_assert!(4 * index < size_of::<T>());
    // SAFETY: the caller's. Other threads may write the word, hence the atomic read.
    unsafe { (*object.cast::<AtomicU32>().add(index)).load(Ordering::Relaxed) }
}

/// Returns the index of the one word in which two new objects differ.
unsafe fn difference<T>(one: *const T, other: *const T) -> Option<u8> {
    // SAFETY: the caller's objects.
    let mut differing =
        (0..size_of::<T>() / 4).filter(|&i| unsafe { word(one, i) != word(other, i) });
    let index = differing.next()?;
    differing.next().is_none().then_some(index as u8)
}

/// Returns zeros: an object before it is initialised.
fn blank<T>() -> MaybeUninit<T> {
    MaybeUninit::zeroed()
}

/// Makes objects with known attributes, and reads them. Returns None if they are not as expected.
fn discover() -> Option<LockLayout> {
    let tid = own_tid();
    // SAFETY: each function uses objects of its own, initialised before they are used. None of the
    // functions that they call allocates or waits.
    unsafe {
        if tid <= 0 || !is_mutex_as_expected() {
            return None;
        }
        let rwlock_shared = discover_rwlock(tid)?;
        let cond = discover_cond()?;
        let semaphore = discover_semaphore()?;
        let (barrier_count, barrier_shared) = discover_barrier()?;
        Some(LockLayout { cond, semaphore, rwlock_shared, barrier_count, barrier_shared })
    }
}

/// Returns whether the kind of a mutex is where the headers say.
unsafe fn is_mutex_as_expected() -> bool {
    // SAFETY: see `discover`.
    unsafe {
        let mut attr = blank::<libc::pthread_mutexattr_t>();
        libc::pthread_mutexattr_init(attr.as_mut_ptr());
        libc::pthread_mutexattr_settype(attr.as_mut_ptr(), libc::PTHREAD_MUTEX_ERRORCHECK);
        libc::pthread_mutexattr_setpshared(attr.as_mut_ptr(), libc::PTHREAD_PROCESS_SHARED);
        let mut mutex = blank::<pthread_mutex_t>();
        libc::pthread_mutex_init(mutex.as_mut_ptr(), attr.as_ptr());
        let kind = word(mutex.as_ptr(), MUTEX_KIND);
        kind & KIND_TYPE == libc::PTHREAD_MUTEX_ERRORCHECK as u32 && kind & KIND_SPECIAL != 0
    }
}

/// Returns the word of a read-write lock that differs if it is process-shared. None if that is not
/// a single word, or if the rest is not where the headers say.
unsafe fn discover_rwlock(tid: c_int) -> Option<u8> {
    // SAFETY: see `discover`.
    unsafe {
        let mut attr = blank::<libc::pthread_rwlockattr_t>();
        libc::pthread_rwlockattr_init(attr.as_mut_ptr());
        pthread_rwlockattr_setkind_np(attr.as_mut_ptr(), PREFER_WRITER_NONRECURSIVE as c_int);
        let mut rwlock = blank::<pthread_rwlock_t>();
        libc::pthread_rwlock_init(rwlock.as_mut_ptr(), attr.as_ptr());
        libc::pthread_rwlockattr_setpshared(attr.as_mut_ptr(), libc::PTHREAD_PROCESS_SHARED);
        let mut shared = blank::<pthread_rwlock_t>();
        libc::pthread_rwlock_init(shared.as_mut_ptr(), attr.as_ptr());
        let shared_word = difference(rwlock.as_ptr(), shared.as_ptr())?;
        let locked = real::pthread_rwlock_trywrlock(rwlock.as_mut_ptr());
        let writer = word(rwlock.as_ptr(), RWLOCK_WRITER);
        real::pthread_rwlock_unlock(rwlock.as_mut_ptr());
        let is_as_expected = locked == 0
            && writer == tid as u32
            && word(rwlock.as_ptr(), RWLOCK_WRITER) != tid as u32
            && word(rwlock.as_ptr(), RWLOCK_KIND) == PREFER_WRITER_NONRECURSIVE
            && word(rwlock.as_ptr(), shared_word.into()) == 0;
        is_as_expected.then_some(shared_word)
    }
}

/// Returns the flag word of a condition variable: the only one that is not zero.
unsafe fn discover_cond() -> Option<u8> {
    // SAFETY: see `discover`.
    unsafe {
        let mut attr = blank::<libc::pthread_condattr_t>();
        libc::pthread_condattr_init(attr.as_mut_ptr());
        libc::pthread_condattr_setpshared(attr.as_mut_ptr(), libc::PTHREAD_PROCESS_SHARED);
        libc::pthread_condattr_setclock(attr.as_mut_ptr(), libc::CLOCK_MONOTONIC);
        let (mut cond, zeros) = (blank::<pthread_cond_t>(), blank::<pthread_cond_t>());
        libc::pthread_cond_init(cond.as_mut_ptr(), attr.as_ptr());
        let flags = difference(cond.as_ptr(), zeros.as_ptr())?;
        (word(cond.as_ptr(), flags.into()) == COND_SHARED | COND_MONOTONIC).then_some(flags)
    }
}

/// Returns the word of a semaphore that differs if it is process-shared.
unsafe fn discover_semaphore() -> Option<u8> {
    // SAFETY: see `discover`.
    unsafe {
        let (mut sem, mut shared) = (blank::<sem_t>(), blank::<sem_t>());
        libc::sem_init(sem.as_mut_ptr(), 0, 1);
        libc::sem_init(shared.as_mut_ptr(), 1, 1);
        let shared_word = difference(sem.as_ptr(), shared.as_ptr())?;
        (word(sem.as_ptr(), shared_word.into()) == 0).then_some(shared_word)
    }
}

/// Returns the word of a barrier that is its number of participants, and the word that differs if
/// it is process-shared.
unsafe fn discover_barrier() -> Option<(u8, u8)> {
    // SAFETY: see `discover`.
    unsafe {
        let mut attr = blank::<libc::pthread_barrierattr_t>();
        libc::pthread_barrierattr_init(attr.as_mut_ptr());
        let mut barrier = blank::<pthread_barrier_t>();
        libc::pthread_barrier_init(barrier.as_mut_ptr(), attr.as_ptr(), PROBE_COUNT);
        libc::pthread_barrierattr_setpshared(attr.as_mut_ptr(), libc::PTHREAD_PROCESS_SHARED);
        let mut shared = blank::<pthread_barrier_t>();
        libc::pthread_barrier_init(shared.as_mut_ptr(), attr.as_ptr(), PROBE_COUNT);
        let shared_word = difference(barrier.as_ptr(), shared.as_ptr())?;
        let mut words = 0..size_of::<pthread_barrier_t>() / 4;
        let count_word = words.find(|&i| word(barrier.as_ptr(), i) == PROBE_COUNT)?;
        let is_private = word(barrier.as_ptr(), shared_word.into()) == 0;
        is_private.then_some((count_word as u8, shared_word))
    }
}

/// Returns the id under which glibc knows the running thread or goroutine: the owner that it
/// records.
pub(super) fn own_tid() -> c_int {
    let mut mutex = libc::PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP;
    // SAFETY: a mutex of our own.
    unsafe {
        real::pthread_mutex_trylock(&raw mut mutex);
        let owner = word(&raw const mutex, MUTEX_OWNER);
        real::pthread_mutex_unlock(&raw mut mutex);
        owner as c_int
    }
}

/// The result of [`mutex_kind`].
pub(super) struct MutexKind {
    /// Left to the real functions.
    pub(super) is_special: bool,
    pub(super) is_error_checking: bool,
    pub(super) owner: c_int,
}

/// Returns the kind and the owner of a mutex.
///
/// # Safety
/// `mutex` points to a mutex that is alive. The same holds for the objects of the functions below.
pub(super) unsafe fn mutex_kind(mutex: *const pthread_mutex_t) -> Option<MutexKind> {
    layout()?;
    // SAFETY: the caller's contract.
    let (kind, owner) = unsafe { (word(mutex, MUTEX_KIND), word(mutex, MUTEX_OWNER)) };
    Some(MutexKind {
        is_special: kind & KIND_SPECIAL != 0,
        is_error_checking: kind & KIND_TYPE == libc::PTHREAD_MUTEX_ERRORCHECK as u32,
        owner: owner as c_int,
    })
}

/// The result of [`rwlock_kind`].
pub(super) struct RwLockKind {
    /// Left to the real functions.
    pub(super) is_shared: bool,
    pub(super) prefers_writers: bool,
    pub(super) writer: c_int,
}

/// Returns the kind and the writer of a read-write lock.
///
/// # Safety
/// As above.
pub(super) unsafe fn rwlock_kind(rwlock: *const pthread_rwlock_t) -> Option<RwLockKind> {
    let layout = layout()?;
    // SAFETY: the caller's contract.
    unsafe {
        Some(RwLockKind {
            is_shared: word(rwlock, layout.rwlock_shared.into()) != 0,
            prefers_writers: word(rwlock, RWLOCK_KIND) == PREFER_WRITER_NONRECURSIVE,
            writer: word(rwlock, RWLOCK_WRITER) as c_int,
        })
    }
}

/// Returns the clock of a private condition variable.
///
/// # Safety
/// As above.
#[inline]
pub(super) unsafe fn cond_clock(cond: *const pthread_cond_t) -> Option<libc::clockid_t> {
    let layout = layout()?;
    // SAFETY: the caller's contract.
    let word = unsafe { word(cond, layout.cond.into()) };
    if word & COND_SHARED != 0 {
        return None;
    }
    let monotonic = word & COND_MONOTONIC != 0;
    Some(if monotonic { libc::CLOCK_MONOTONIC } else { libc::CLOCK_REALTIME })
}

/// Returns whether a semaphore is private to this process.
///
/// # Safety
/// As above.
pub(super) unsafe fn is_semaphore_private(sem: *const sem_t) -> Option<bool> {
    let layout = layout()?;
    // SAFETY: the caller's contract.
    Some(unsafe { word(sem, layout.semaphore.into()) } == 0)
}

/// Returns how many participants a private barrier has.
///
/// # Safety
/// As above.
pub(super) unsafe fn barrier_count(barrier: *const pthread_barrier_t) -> Option<u32> {
    let layout = layout()?;
    // SAFETY: the caller's contract.
    unsafe {
        let private = word(barrier, layout.barrier_shared.into()) == 0;
        private.then(|| word(barrier, layout.barrier_count.into()))
    }
}
