//! The runtime's own locks.
//!
//! std's locks cannot be used below the scheduler. Their futex call is one of the interposed
//! functions: on a goroutine it would park the goroutine that holds the scheduler. And their
//! poisoning reads `thread::panicking` from TLS that a goroutine under construction does not have
//! yet. These locks touch only their own word and the kernel: raw system calls, no errno.
//!
//! A goroutine that holds such a lock is not preempted: it would stop every P that wants the lock.
//! Code inside the runtime is never preempted. For user code that takes a lock (`set_procs`, naming
//! a goroutine), each lock counts itself in `LOCKS_HELD`, which the preemption handler checks.
//!
//! Rules for users:
//! 1. Unlock on the stack that locked: `LOCKS_HELD` belongs to the goroutine.
//! 2. Never park, run user code, or call an interposed libc function while holding a lock.
//! 3. Locks nest only in the order that their owners document.
//!
//! Rejected: a ticket lock (fair, but while the holder is descheduled every waiter burns its CPU),
//! and `parking_lot_core` (its table is malloc'ed, and malloc may be what was interrupted).

use std::cell::{Cell, UnsafeCell};
use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroU32;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering, compiler_fence};

use super::futex::{futex_wait_marked, futex_wake};

/// Reads of a held lock before the thread sleeps. Critical sections last tens to hundreds of
/// nanoseconds and a read with its pause 40–140 cycles, so this covers several of them. A sleep and
/// a wake-up cost 6 µs.
const SPINS: u32 = 64;

/// The futex bitset of a thread that sleeps for one of these locks. It tells sysmon's probe what
/// the thread waits for (`probe.rs`).
pub(super) const LOCK_BITSET: NonZeroU32 = NonZeroU32::new(0x7472_6566).unwrap();

const UNLOCKED: u32 = 0;
const LOCKED: u32 = 1;
const CONTENDED: u32 = 2;

thread_local! {
    /// How many of these locks the running goroutine (or thread) holds.
    static LOCKS_HELD: Cell<u32> = const { Cell::new(0) };
    /// How many mutexes and read-write locks of C code the running goroutine (or thread) holds. A
    /// call of the loader counts as one (`interpose/dlopen.rs`).
    static C_LOCKS_HELD: Cell<u32> = const { Cell::new(0) };
}

/// Returns whether the running goroutine holds a lock of the runtime. Safe in a signal handler that
/// knows to which goroutine or thread the current thread-locals belong.
#[inline]
pub fn holds_runtime_lock() -> bool {
    LOCKS_HELD.get() != 0
}

/// Returns how many mutexes and read-write locks of C code (`interpose/c_locks/`) the running
/// goroutine holds. A hint: a lock may be unlocked by a goroutine that did not lock it. Safe in a
/// signal handler, as [`holds_runtime_lock`].
#[inline]
pub fn c_locks_held() -> u32 {
    C_LOCKS_HELD.get()
}

/// Counts a C lock that the running goroutine has locked.
#[inline(always)]
pub fn count_c_lock() {
    C_LOCKS_HELD.set(C_LOCKS_HELD.get().wrapping_add(1));
}

/// Uncounts a C lock that the running goroutine has unlocked.
#[inline(always)]
pub fn uncount_c_lock() {
    C_LOCKS_HELD.set(C_LOCKS_HELD.get().saturating_sub(1));
}

#[inline(always)]
fn disable_preemption() {
    LOCKS_HELD.set(LOCKS_HELD.get() + 1);
    // The handler of the preemption signal reads it, so it is stored before what follows.
    compiler_fence(Ordering::SeqCst);
}

#[inline(always)]
fn enable_preemption() {
    compiler_fence(Ordering::SeqCst);
    LOCKS_HELD.set(LOCKS_HELD.get() - 1);
}

/// Prevents preemption of the running goroutine while it exists: for holders of a libc lock. It is
/// dropped on the stack that made it.
pub(super) struct PreemptGuard(PhantomData<*const ()>);

impl PreemptGuard {
    pub(super) fn new() -> PreemptGuard {
        disable_preemption();
        PreemptGuard(PhantomData)
    }
}

impl Drop for PreemptGuard {
    fn drop(&mut self) {
        enable_preemption();
    }
}

/// A mutex of one word, without a value.
///
/// | `state` | meaning |
/// |---|---|
/// | `UNLOCKED` | free |
/// | `LOCKED` | held, no thread sleeps |
/// | `CONTENDED` | held, threads may sleep: `unlock` must wake one |
pub struct RawLock {
    state: AtomicU32,
}

impl RawLock {
    #[inline]
    pub const fn new() -> Self {
        RawLock { state: AtomicU32::new(UNLOCKED) }
    }

    /// Takes the lock; sleeps in the kernel while another thread holds it.
    #[inline]
    pub fn lock(&self) {
        disable_preemption();
        if !self.try_lock() {
            self.lock_slow();
        }
    }

    /// Takes the lock if it is free now.
    #[inline]
    fn try_lock(&self) -> bool {
        // Acquire pairs with the Release in `unlock`: what the last holder wrote is visible.
        self.state.compare_exchange(UNLOCKED, LOCKED, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Unlocks. Only the holder may call this; a second call would let two holders in.
    #[inline]
    pub fn unlock(&self) {
        // Release pairs with the Acquire of the next holder.
        if self.state.swap(UNLOCKED, Ordering::Release) == CONTENDED {
            self.wake_slow();
        }
        enable_preemption();
    }

    #[cold]
    fn lock_slow(&self) {
        for _ in 0..SPINS {
            // Read before trying: a failed exchange would pull the cache line away from the holder.
            if self.state.load(Ordering::Relaxed) == UNLOCKED && self.try_lock() {
                return;
            }
            std::hint::spin_loop();
        }
        // From here on the lock is taken as CONTENDED: other threads may sleep too, and a needless
        // wake-up is cheaper than a lost one. Acquire: as in `try_lock`.
        while self.state.swap(CONTENDED, Ordering::Acquire) != UNLOCKED {
            sleep_while(&self.state, CONTENDED);
        }
    }

    #[cold]
    fn wake_slow(&self) {
        wake(&self.state, 1);
    }
}

/// A value behind a [`RawLock`].
pub struct Lock<T> {
    raw: RawLock,
    value: UnsafeCell<T>,
}

// SAFETY: the lock gives `&mut T` to one thread at a time, so sharing it only ever moves a `T`
// between threads.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    #[inline]
    pub const fn new(value: T) -> Self {
        Lock { raw: RawLock::new(), value: UnsafeCell::new(value) }
    }

    /// Takes the lock; dropping the guard unlocks it.
    #[inline]
    pub fn lock(&self) -> LockGuard<'_, T> {
        self.raw.lock();
        LockGuard { lock: self }
    }

    /// Takes the lock if it is free now.
    #[inline]
    pub fn try_lock(&self) -> Option<LockGuard<'_, T>> {
        disable_preemption();
        if self.raw.try_lock() {
            return Some(LockGuard { lock: self });
        }
        enable_preemption();
        None
    }
}

impl<T> fmt::Debug for Lock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lock")
    }
}

/// Access to the value of a locked [`Lock`].
#[must_use]
pub struct LockGuard<'a, T> {
    lock: &'a Lock<T>,
}

impl<T> Deref for LockGuard<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the guard exists only between `lock` and `unlock`, so this thread alone owns the
        // value; the borrow ends with the guard.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for LockGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`, and `&mut self` excludes a second borrow through this guard.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for LockGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.lock.raw.unlock();
    }
}

/// A read-write lock without a value. A waiting writer stops new readers, so it waits only for the
/// readers that are already in.
///
/// `state`: bit 31 (`WRITER`) is set while a writer holds or waits for the lock; bits 0–30 count
/// the readers.
pub struct SharedLock {
    state: AtomicU32,
    writer: RawLock,
}

const WRITER: u32 = 1 << 31;
const ALL_SLEEPERS: u32 = u32::MAX >> 1;

impl SharedLock {
    #[inline]
    pub const fn new() -> Self {
        SharedLock { state: AtomicU32::new(0), writer: RawLock::new() }
    }

    /// Runs `f` as one of any number of readers. Must not nest, in itself or in `exclusive`.
    #[inline]
    pub fn shared<R>(&self, f: impl FnOnce() -> R) -> R {
        self.lock_shared();
        let _unlock = OnDrop(|| self.unlock_shared());
        f()
    }

    /// Runs `f` as the only one: all readers have left, and none enters before `f` ends.
    pub fn exclusive<R>(&self, f: impl FnOnce() -> R) -> R {
        self.lock_exclusive();
        let _unlock = OnDrop(|| self.unlock_exclusive());
        f()
    }

    #[inline]
    fn lock_shared(&self) {
        disable_preemption();
        let mut s = self.state.load(Ordering::Relaxed);
        loop {
            if s & WRITER != 0 {
                sleep_while(&self.state, s);
                s = self.state.load(Ordering::Relaxed);
                continue;
            }
            // Acquire pairs with the Release in `unlock_exclusive`: what the writer wrote is
            // visible.
            let next =
                self.state.compare_exchange_weak(s, s + 1, Ordering::Acquire, Ordering::Relaxed);
            match next {
                Ok(_) => return,
                Err(now) => s = now,
            }
        }
    }

    #[inline]
    fn unlock_shared(&self) {
        // Release pairs with the Acquire load in `lock_exclusive`: the writer sees what the readers
        // did.
        if self.state.fetch_sub(1, Ordering::Release) == WRITER | 1 {
            wake(&self.state, ALL_SLEEPERS);
        }
        enable_preemption();
    }

    #[cold]
    fn lock_exclusive(&self) {
        self.writer.lock();
        self.state.fetch_or(WRITER, Ordering::Relaxed);
        loop {
            // Acquire pairs with the Release in `unlock_shared`.
            let s = self.state.load(Ordering::Acquire);
            if s == WRITER {
                return;
            }
            sleep_while(&self.state, s);
        }
    }

    #[cold]
    fn unlock_exclusive(&self) {
        // Release pairs with the Acquire in `lock_shared`.
        self.state.store(0, Ordering::Release);
        wake(&self.state, ALL_SLEEPERS);
        self.writer.unlock();
    }
}

/// Runs its closure when dropped, so that a panic does not leave a lock held.
struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Sleeps if the word still has this value. May return early and without a reason: callers read the
/// word again.
#[cold]
fn sleep_while(word: &AtomicU32, value: u32) {
    futex_wait_marked(word, value, LOCK_BITSET);
}

#[cold]
fn wake(word: &AtomicU32, how_many: u32) {
    futex_wake(word, how_many);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn lock_excludes_other_threads_and_loses_no_wakeup() {
        const ROUNDS: u64 = 50_000;
        let lock = Lock::new(0u64);
        std::thread::scope(|s| {
            for t in 0..4 {
                let lock = &lock;
                s.spawn(move || {
                    for i in 0..ROUNDS {
                        let mut n = lock.lock();
                        let seen = *n;
                        if (i + t) % 4096 == 0 {
                            std::thread::yield_now(); // let the other threads reach the futex
                        }
                        *n = seen + 1;
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), 4 * ROUNDS);
    }

    #[test]
    fn an_exclusive_holder_excludes_all_shared_holders() {
        let lock = SharedLock::new();
        let alone = AtomicBool::new(false);
        let stop = AtomicBool::new(false);
        std::thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        lock.shared(|| assert!(!alone.load(Ordering::SeqCst)));
                    }
                });
            }
            for _ in 0..2_000 {
                lock.exclusive(|| {
                    alone.store(true, Ordering::SeqCst);
                    std::hint::spin_loop();
                    alone.store(false, Ordering::SeqCst);
                });
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
