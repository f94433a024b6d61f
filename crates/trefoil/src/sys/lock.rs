//! The runtime's own locks.
//!
//! std's locks are no use below the scheduler: their futex call is one of the calls we interpose
//! (on a goroutine it would park the goroutine that holds the scheduler), and their poisoning asks
//! `thread::panicking`, which reads TLS that a goroutine being born does not have yet. These locks
//! touch nothing but their own word and the kernel: rustix's raw syscalls, no errno.
//!
//! A holder is never preempted: it would stop every P that wants the lock. Inside the runtime nobody is; for
//! user code that comes by (`set_procs`, a goroutine's name) every lock counts itself in [`PINS`], which the
//! preemption handler looks at.
//!
//! Rules for users:
//! 1. Give a lock back on the stack that took it: `PINS` is the goroutine's.
//! 2. Never park, run user code, or call an interposed libc function with a lock held.
//! 3. Locks nest only in the order their owners document.
//!
//! Rejected: a ticket lock (fair, but a descheduled holder lets every waiter burn its CPU), and
//! `parking_lot_core` (its table is malloc'ed, and malloc may be what was interrupted).

use std::cell::{Cell, UnsafeCell};
use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroU32;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::thread::futex;

/// Looks at a held lock before the thread sleeps. Sections are tens to hundreds of ns and a look
/// with its pause is 40–140 cycles, so this covers several of them; a sleep and wake-up cost 6 µs.
const SPINS: u32 = 64;

/// The bits that who sleeps for one of these locks gives to the kernel: so others can tell what it waits for
/// (`probe.rs`).
pub(super) const OWN: NonZeroU32 = NonZeroU32::new(0x7472_6566).unwrap();

const UNLOCKED: u32 = 0;
const LOCKED: u32 = 1;
const CONTENDED: u32 = 2;

thread_local! {
    /// How many of these locks the running goroutine (or thread) holds.
    static PINS: Cell<u32> = const { Cell::new(0) };
}

/// Whether the running goroutine holds a lock of the runtime. Safe in a signal handler that knows whose
/// thread-locals these are.
pub(crate) fn pinned() -> bool {
    PINS.get() != 0
}

thread_local! {
    /// Mutexes and read-write locks of C code that the running goroutine (or thread) holds.
    static C_LOCKS: Cell<u32> = const { Cell::new(0) };
}

/// How many mutexes and read-write locks of C code (`interpose/c_locks/`) the running goroutine holds. A hint: one may be
/// unlocked by another goroutine than locked it. Safe in a signal handler that knows whose thread-locals these are.
pub(crate) fn c_locks_held() -> u32 {
    C_LOCKS.get()
}

/// The running goroutine has taken one.
#[cfg(feature = "std")]
#[inline(always)]
pub(crate) fn count_c_lock() {
    C_LOCKS.set(C_LOCKS.get().wrapping_add(1));
}

/// The running goroutine has given one back.
#[cfg(feature = "std")]
#[inline(always)]
pub(crate) fn uncount_c_lock() {
    C_LOCKS.set(C_LOCKS.get().saturating_sub(1));
}

#[inline(always)]
fn pin() {
    PINS.set(PINS.get() + 1);
}

#[inline(always)]
fn unpin() {
    PINS.set(PINS.get() - 1);
}

/// While it lives the goroutine is not preempted: for who has one of libc's locks. Dropped on the stack that made it.
pub(super) struct Pin(PhantomData<*const ()>);

impl Pin {
    pub(super) fn new() -> Pin {
        pin();
        Pin(PhantomData)
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        unpin();
    }
}

/// A mutual exclusion of one word.
///
/// | `state` | meaning |
/// |---|---|
/// | `UNLOCKED` | free |
/// | `LOCKED` | held, nobody sleeps |
/// | `CONTENDED` | held, somebody may sleep: the holder must wake one when it leaves |
pub(crate) struct RawLock {
    state: AtomicU32,
}

impl RawLock {
    pub(crate) const fn new() -> Self {
        RawLock { state: AtomicU32::new(UNLOCKED) }
    }

    /// Takes the lock; sleeps in the kernel if it must.
    #[inline]
    pub(crate) fn lock(&self) {
        pin();
        if !self.try_lock() {
            self.lock_slow();
        }
    }

    /// Takes the lock if it is free now.
    #[inline]
    fn try_lock(&self) -> bool {
        // Acquire pairs with the Release in `unlock`: we see what the last holder wrote.
        self.state.compare_exchange(UNLOCKED, LOCKED, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Gives the lock back. Only the holder may call this; a second call would let two holders in.
    #[inline]
    pub(crate) fn unlock(&self) {
        // Release pairs with the Acquire of the next holder.
        if self.state.swap(UNLOCKED, Ordering::Release) == CONTENDED {
            self.wake_slow();
        }
        unpin();
    }

    #[cold]
    fn lock_slow(&self) {
        for _ in 0..SPINS {
            // Look before trying: a failed exchange would pull the line away from the holder.
            if self.state.load(Ordering::Relaxed) == UNLOCKED && self.try_lock() {
                return;
            }
            std::hint::spin_loop();
        }
        // From here on we take the lock as CONTENDED: we cannot know whether others sleep too, and
        // a needless wake is cheaper than a lost one. Acquire: as in `try_lock`.
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
pub(crate) struct Lock<T> {
    raw: RawLock,
    value: UnsafeCell<T>,
}

// SAFETY: the lock gives `&mut T` to one thread at a time, so sharing it only ever moves a `T`
// between threads.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    pub(crate) const fn new(value: T) -> Self {
        Lock { raw: RawLock::new(), value: UnsafeCell::new(value) }
    }

    /// Takes the lock; the guard gives it back.
    #[inline]
    pub(crate) fn lock(&self) -> LockGuard<'_, T> {
        self.raw.lock();
        LockGuard { lock: self }
    }

    /// Takes the lock if it is free now.
    pub(crate) fn try_lock(&self) -> Option<LockGuard<'_, T>> {
        pin();
        if self.raw.try_lock() {
            return Some(LockGuard { lock: self });
        }
        unpin();
        None
    }
}

impl<T> fmt::Debug for Lock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lock")
    }
}

/// Holding this is holding the lock.
#[must_use]
pub(crate) struct LockGuard<'a, T> {
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

/// Many pass, or one closes it: a shared/exclusive lock for "do not change the set while I walk
/// it".
///
/// `state`: bit 31 [`CLOSED`] = someone walks or waits to walk; bits 0–30 = how many are inside.
/// Nobody enters a closed gate, so the closer waits only for those already inside.
pub(crate) struct Gate {
    state: AtomicU32,
    closer: RawLock,
}

const CLOSED: u32 = 1 << 31;

impl Gate {
    pub(crate) const fn new() -> Self {
        Gate { state: AtomicU32::new(0), closer: RawLock::new() }
    }

    /// Runs `f` inside, beside any number of others. Must not nest, in itself or in `closed`.
    #[inline]
    pub(crate) fn inside<R>(&self, f: impl FnOnce() -> R) -> R {
        self.enter();
        let _leave = OnDrop(|| self.leave());
        f()
    }

    /// Runs `f` alone: everybody inside has left, nobody enters before `f` ends.
    pub(crate) fn closed<R>(&self, f: impl FnOnce() -> R) -> R {
        self.close();
        let _open = OnDrop(|| self.open());
        f()
    }

    #[inline]
    fn enter(&self) {
        pin();
        let mut s = self.state.load(Ordering::Relaxed);
        loop {
            if s & CLOSED != 0 {
                sleep_while(&self.state, s);
                s = self.state.load(Ordering::Relaxed);
                continue;
            }
            // Acquire pairs with the Release in `open`: we see what the walker wrote.
            let next =
                self.state.compare_exchange_weak(s, s + 1, Ordering::Acquire, Ordering::Relaxed);
            match next {
                Ok(_) => return,
                Err(now) => s = now,
            }
        }
    }

    #[inline]
    fn leave(&self) {
        // Release pairs with the Acquire load in `close`: the walker sees what we did inside.
        if self.state.fetch_sub(1, Ordering::Release) == CLOSED | 1 {
            wake(&self.state, u32::MAX >> 1);
        }
        unpin();
    }

    #[cold]
    fn close(&self) {
        self.closer.lock();
        self.state.fetch_or(CLOSED, Ordering::Relaxed);
        loop {
            let s = self.state.load(Ordering::Acquire);
            if s == CLOSED {
                return;
            }
            sleep_while(&self.state, s);
        }
    }

    #[cold]
    fn open(&self) {
        self.state.store(0, Ordering::Release);
        wake(&self.state, u32::MAX >> 1);
        self.closer.unlock();
    }
}

/// Runs its closure when dropped, so that a panic in the middle does not leave a lock held.
struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Sleeps if the word still has this value. May return early, for no reason too: callers look
/// again.
#[cold]
fn sleep_while(word: &AtomicU32, value: u32) {
    // EAGAIN (it changed) and EINTR (a signal) both mean "look again". A plain wake-up fits every set of bits.
    let _ = futex::wait_bitset(word, futex::Flags::PRIVATE, value, None, OWN);
}

#[cold]
fn wake(word: &AtomicU32, how_many: u32) {
    // Fails only for a bad address, and this one is borrowed.
    let _ = futex::wake(word, futex::Flags::PRIVATE, how_many);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn lock_excludes_and_loses_no_wakeup() {
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
                            std::thread::yield_now(); // let the others reach the futex
                        }
                        *n = seen + 1;
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), 4 * ROUNDS);
    }

    #[test]
    fn closed_gate_has_nobody_inside() {
        let gate = Gate::new();
        let alone = AtomicBool::new(false);
        let stop = AtomicBool::new(false);
        std::thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        gate.inside(|| assert!(!alone.load(Ordering::SeqCst)));
                    }
                });
            }
            for _ in 0..2_000 {
                gate.closed(|| {
                    alone.store(true, Ordering::SeqCst);
                    std::hint::spin_loop();
                    alone.store(false, Ordering::SeqCst);
                });
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
