//! Locks of C and C++ code: pthread's mutexes, read-write locks, condition variables and barriers,
//! POSIX's semaphores, C11's `mtx_t` and `cnd_t`. A goroutine that must wait for one parks; a plain
//! thread waits in the kernel as before.
//!
//! | file | what |
//! |---|---|
//! | `mutex.rs`, `rwlock.rs`, `semaphore.rs` | goroutines wait here, threads in glibc's functions |
//! | `cond.rs`, `barrier.rs` | replaced as a whole, for goroutines and threads alike |
//! | `c11.rs` | the same by C11's names |
//! | `layout.rs` | where glibc keeps state for which it has no function |
//! | `real.rs` | glibc's functions |
//!
//! # The protocol of a wait ([`Waiters`])
//! ```text
//!   the goroutine that waits                     the owner, on any thread
//!   sleeping += 1     (lock prefix)              the real unlock     (lock prefix)
//!   under the queue's lock:                     sleeping != 0?
//!     the real try function; on EBUSY: enqueue     yes: under the queue's lock: take the first
//!   park                                           wake it
//!   retry
//! ```
//! One of the two instructions with a lock prefix comes first. If it is the unlock, the try
//! function succeeds or finds a newer owner, whose unlock is still to come. If it is the count, the
//! owner takes the queue's lock, and finds the goroutine in the queue, or the goroutine has not
//! tried yet.
//!
//! Invariants:
//! 1. The object's memory is not touched after the real unlock: another thread may have destroyed
//!    it. From there on its address is only a key.
//! 2. The real unlock publishes by an instruction with a lock prefix. (It must learn whether a
//!    thread sleeps in the kernel, so it is a read-modify-write. glibc omits the prefix only in a
//!    process with one thread.) On x86 that is a full barrier; elsewhere a fence follows.
//! 3. Nothing here allocates, and no function of std that locks is called: allocators lock mutexes,
//!    also before `main`.
//! 4. In a child of `fork`, in signal handlers, while a lock of the runtime is held, and on
//!    goroutines whose runtime has ended, waits are left to the real functions.
//! 5. Process-shared, robust, priority-inheriting and priority-protected objects are left to the
//!    real functions: the thread blocks, and loses its P.
//!
//! A goroutine that was woken before its runtime ended, and never ran, consumes its wake-up. A
//! goroutine that still waits when its runtime ends is skipped.
//!
//! Rejected: our own implementation of all of it in glibc's memory (static initialisers, robust
//! lists and `gdb` know glibc's). A fence after each unlock (7 ns on every thread of the process,
//! see invariant 2).

mod barrier;
mod c11;
mod cond;
mod layout;
mod mutex;
mod real;
mod rwlock;
mod semaphore;

use super::park::begin_c_lock_wait;
use super::waking::WakeContext;
use crate::sched::wait::deferred::{KEY_BARRIER, key_of, wake_later};
use crate::sched::wait::holder::note_object;
use crate::sched::wait::list::{Batch, List, Node, WaitResult};
use crate::sched::wait::reason::WaitReason;
use crate::sched::wait::table::FOREIGN;
use crate::sched::{Rt, holds_lock_of_std, switch};
use crate::shim::fence_after_rmw;
use crate::sys::clock::{self, NEVER, Nanos};
use crate::sys::fork::is_forked;
use crate::sys::frame_waiter::{ClockTime, WaitClock};
use crate::sys::lock;
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The low bits of a key (`sched/wait/deferred.rs`): the kind of object that is waited for. 0 is a
/// futex word.
const MUTEX: usize = 1;
const COND: usize = 2;
const SEMAPHORE: usize = 3;
const RWLOCK: usize = 4;
const BARRIER: usize = KEY_BARRIER;

/// Bits of a node's weight. The waiter is starved ([`STARVED_AFTER`]): its waker yields to it.
const STARVED: usize = 1;
/// The waiter waits to write.
const WRITER: usize = 2;
/// The waiter's read-write lock prefers writers.
const PREFERRED: usize = 4;
/// A waiter is starved when it was woken this many times, and each time another one was faster.
/// glibc's locks are not fair. Threads run on different CPUs, which gives each of them a chance;
/// goroutines on one P do not.
const STARVED_AFTER: u32 = 2;

/// Calls `lock`, which takes a mutex or a read-write lock, and counts the lock if it was taken.
/// (`EOWNERDEAD` means that as well.) The lock is counted before the call, and uncounted if the
/// call fails: a goroutine that is stopped in between must not hold a lock that is not counted.
#[inline(always)]
fn counted(lock: impl FnOnce() -> c_int) -> c_int {
    lock::count_c_lock();
    let rc = lock();
    if rc != 0 && rc != libc::EOWNERDEAD {
        lock::uncount_c_lock();
    }
    rc
}

/// Uncounts a lock that was released, if `rc` is 0.
#[inline(always)]
fn uncount_if_unlocked(rc: c_int) -> c_int {
    if rc == 0 {
        lock::uncount_c_lock();
    }
    rc
}

/// Returns the deadline that C code passes, on the clock `clock`.
///
/// # Errors
/// Returns `EINVAL` for another clock than the real-time and the monotonic one, and for an invalid
/// number of nanoseconds.
///
/// # Safety
/// `at` is a timespec.
unsafe fn deadline(clock: libc::clockid_t, at: *const libc::timespec) -> Result<ClockTime, c_int> {
    let clock = match clock {
        libc::CLOCK_REALTIME => WaitClock::Realtime,
        libc::CLOCK_MONOTONIC => WaitClock::Monotonic,
        _ => return Err(libc::EINVAL),
    };
    // SAFETY: the caller's contract.
    let at = unsafe { &*at };
    if !(0..1_000_000_000).contains(&at.tv_nsec) {
        return Err(libc::EINVAL);
    }
    Ok(ClockTime { clock, seconds: at.tv_sec, nanos: at.tv_nsec as u32 })
}

/// Returns the same point in time on the runtime's clock, as the other clock is set now.
fn on_runtime_clock(limit: Option<ClockTime>) -> Nanos {
    let Some(limit) = limit else { return NEVER };
    if limit.seconds < 0 {
        return 0;
    }
    let at =
        (limit.seconds as u64).saturating_mul(1_000_000_000).saturating_add(limit.nanos.into());
    // `NEVER` means that there is no deadline.
    let at = at.min(NEVER - 1);
    match limit.clock {
        WaitClock::Monotonic => at,
        WaitClock::Realtime => clock::from_wall(at),
    }
}

/// The waiters for all kinds of objects, except barriers, which always enter the runtime.
static KINDS: [&Waiters; 4] =
    [&mutex::WAITERS, &rwlock::WAITERS, &cond::WAITERS, &semaphore::WAITERS];

/// Counts a waiter of each kind for a simulation: [`super::EnterAtWakes`].
pub(super) fn add_sleepers() {
    for kind in KINDS {
        kind.sleeping.fetch_add(1, Ordering::SeqCst);
    }
}

/// Uncounts the waiters that [`add_sleepers`] has counted.
pub(super) fn remove_sleepers() {
    for kind in KINDS {
        kind.sleeping.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The waiters for one kind of object, in the table [`FOREIGN`].
struct Waiters {
    tag: usize,
    /// How many waiters are between their first failure and their success. While there are none, an
    /// unlock wakes no goroutine.
    sleeping: AtomicUsize,
}

impl Waiters {
    const fn new(tag: usize) -> Waiters {
        Waiters { tag, sleeping: AtomicUsize::new(0) }
    }

    fn key(&self, address: usize) -> usize {
        key_of(address, self.tag)
    }

    fn with_queue<R>(&self, address: usize, f: impl FnOnce(&mut List) -> R) -> R {
        FOREIGN.with_queue(self.key(address), f)
    }

    /// Counts the caller among the waiters that may have to be woken, until the result is dropped.
    fn count(&self) -> CountedWaiter<'_> {
        // SeqCst: the left side of the protocol in the head. The real try function cannot read the
        // object before this.
        self.sleeping.fetch_add(1, Ordering::SeqCst);
        fence_after_rmw();
        CountedWaiter(self)
    }

    #[inline(always)]
    fn is_any_sleeping(&self) -> bool {
        // SeqCst: the right side of the protocol; the real unlock was a read-modify-write
        // (invariant 2).
        fence_after_rmw();
        self.sleeping.load(Ordering::SeqCst) != 0
    }

    /// Repeats `attempt` until it does not return `EBUSY`, and sleeps in between. Returns its
    /// result, or `ETIMEDOUT` after `limit`. `attempt` gets the queue, and how often it failed
    /// before; it is called under the queue's lock.
    fn acquire(
        &self,
        address: usize,
        reason: WaitReason,
        weight: usize,
        limit: Option<ClockTime>,
        attempt: &dyn Fn(&List, u32) -> c_int,
    ) -> c_int {
        let _counted = self.count();
        // A mutex or read-write lock that is waited for is counted already.
        let own_locks = u32::from(self.tag != SEMAPHORE);
        let mut failures = 0;
        loop {
            let starved = if failures >= STARVED_AFTER { STARVED } else { 0 };
            let node = Node::of_process(weight | starved);
            // Not for semaphores: nobody holds them.
            if reason == WaitReason::PthreadMutex {
                note_object(address, if limit.is_some() { 0 } else { NEVER });
            }
            let mut rc = libc::EBUSY;
            let slept = sleep(
                &node,
                reason,
                own_locks,
                limit,
                |_| {
                    self.with_queue(address, |queue| {
                        rc = attempt(queue, failures);
                        if rc != libc::EBUSY {
                            return false;
                        }
                        // A waiter that was woken in vain keeps its place.
                        if failures == 0 {
                            queue.push_back(&node)
                        } else {
                            queue.push_front(&node)
                        }
                        true
                    })
                },
                || self.with_queue(address, |queue| queue.withdraw(&node)),
            );
            match slept {
                WaitResult::NotQueued => return rc,
                WaitResult::Woken(_) => failures += 1,
                WaitResult::TimedOut => {
                    let rc = self.with_queue(address, |queue| attempt(queue, failures + 1));
                    return if rc == libc::EBUSY { libc::ETIMEDOUT } else { rc };
                }
            }
        }
    }

    /// Calls the real unlock, and wakes the waiters that `select` takes from the queue of
    /// `address`.
    #[inline(always)]
    fn release(
        &self,
        address: usize,
        unlock: impl Fn() -> c_int,
        select: impl Fn(&mut List) -> Batch,
    ) -> c_int {
        if self.is_any_sleeping() {
            return self.release_slow(address, unlock, select);
        }
        let rc = unlock();
        if rc == 0 && self.is_any_sleeping() {
            self.wake(address, select);
        }
        rc
    }

    /// As [`Waiters::release`], if a goroutine sleeps, maybe for another object. On a goroutine it
    /// is one runtime call: a goroutine whose runtime ends may never return from it, and must have
    /// woken the waiters by then.
    #[cold]
    fn release_slow(
        &self,
        address: usize,
        unlock: impl Fn() -> c_int,
        select: impl Fn(&mut List) -> Batch,
    ) -> c_int {
        if WakeContext::current() == WakeContext::Runtime
            && !is_forked()
            && let Some(rt) = Rt::enter()
        {
            let rc = unlock();
            let woken = match rc {
                0 => self.wake_in(address, Some(rt), select),
                _ => Woken::NoneStarved,
            };
            leave(rt, woken);
            return rc;
        }
        let rc = unlock();
        if rc == 0 {
            self.wake(address, select);
        }
        rc
    }

    /// Wakes the waiters that `select` takes from the queue of `address`. May be called everywhere,
    /// also in a signal handler.
    #[cold]
    fn wake(&self, address: usize, select: impl FnOnce(&mut List) -> Batch) {
        if is_forked() {
            return;
        }
        match WakeContext::current() {
            WakeContext::Deferred => wake_later(self.key(address)),
            WakeContext::Outside => {
                self.wake_in(address, None, select);
            }
            WakeContext::Runtime => {
                if let Some(rt) = Rt::enter() {
                    let woken = self.wake_in(address, Some(rt), select);
                    leave(rt, woken);
                }
            }
        }
    }

    /// As [`Waiters::wake`], inside the runtime if `here` is given, and from outside otherwise.
    fn wake_in(
        &self,
        address: usize,
        here: Option<Rt>,
        select: impl FnOnce(&mut List) -> Batch,
    ) -> Woken {
        let batch = self.with_queue(address, select);
        let any_starved = batch.any(|node| node.weight & STARVED != 0);
        batch.wake_all(here, 0);
        if any_starved { Woken::Starved } else { Woken::NoneStarved }
    }
}

/// Whether a starved goroutine was among those that were woken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Woken {
    Starved,
    NoneStarved,
}

/// Leaves the runtime. If a starved goroutine was woken, yields first, unless the caller holds
/// another lock than the one that it releases.
fn leave(rt: Rt, woken: Woken) {
    let yields = woken == Woken::Starved && lock::c_locks_held() <= 1 && !holds_lock_of_std();
    let rt = if yields { switch::yield_now(rt) } else { rt };
    rt.leave();
}

/// A waiter that is counted ([`Waiters::count`]).
struct CountedWaiter<'a>(&'a Waiters);

impl Drop for CountedWaiter<'_> {
    fn drop(&mut self) {
        self.0.sleeping.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Takes the first waiter of the queue.
fn first(queue: &mut List) -> Batch {
    let mut batch = Batch::new();
    if let Some(taken) = queue.take_first() {
        batch.push(taken);
    }
    batch
}

/// Sleeps once: parks the goroutine, or blocks the thread. `enqueue` gets the runtime if the caller
/// is inside it, and returns whether to sleep; `withdraw` is [`List::withdraw`]. For `own_locks`
/// see [`begin_c_lock_wait`].
fn sleep(
    node: &Node,
    reason: WaitReason,
    own_locks: u32,
    limit: Option<ClockTime>,
    enqueue: impl FnOnce(Option<Rt>) -> bool,
    withdraw: impl FnOnce() -> bool,
) -> WaitResult {
    if let Some(_wait) = begin_c_lock_wait(own_locks) {
        let withdraw = |_| {
            withdraw();
        };
        return node.sleep(reason, on_runtime_clock(limit), enqueue, withdraw);
    }
    node.sleep_in_kernel(limit, || enqueue(None), withdraw)
}

/// Names a function of every file, so that the linker keeps them.
pub(super) fn keep_symbols() {
    std::hint::black_box([
        mutex::pthread_mutex_lock as *const (),
        cond::pthread_cond_wait as *const (),
        rwlock::pthread_rwlock_rdlock as *const (),
        semaphore::sem_post as *const (),
        barrier::pthread_barrier_wait as *const (),
        c11::mtx_lock as *const (),
    ]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::clock::{now, wall_now};

    #[test]
    fn a_deadline_of_any_number_of_seconds_is_a_time() {
        const CENTURY_NANOS: u64 = 36_525 * 24 * 3600 * 1_000_000_000;
        for clock in [WaitClock::Monotonic, WaitClock::Realtime] {
            let at = |seconds, nanos| on_runtime_clock(Some(ClockTime { clock, seconds, nanos }));
            for far in [at(i64::MAX, 999_999_999), at(i64::MAX / 1_000_000_000, 0)] {
                assert!((now() + CENTURY_NANOS..NEVER).contains(&far), "{far}");
            }
            for past in [at(i64::MIN, 0), at(-1, 999_999_999), at(0, 0)] {
                assert!(past <= now(), "{past}");
            }
        }
        assert_eq!(on_runtime_clock(None), NEVER);
    }

    /// A wait was as much too short as its thread was stopped between the readings of two clocks.
    #[test]
    fn a_deadline_of_the_wall_clock_is_not_earlier_on_the_runtimes_clock() {
        const WAIT_NANOS: u64 = 10_000_000;
        // A program that sets the wall clock may disturb a few rounds.
        let is_earlier = |_: &u32| {
            let before = now();
            let at = wall_now() + WAIT_NANOS;
            let (seconds, nanos) = ((at / 1_000_000_000) as i64, (at % 1_000_000_000) as u32);
            let limit = ClockTime { clock: WaitClock::Realtime, seconds, nanos };
            on_runtime_clock(Some(limit)) < before + WAIT_NANOS
        };
        let earlier = (0..100_000).filter(is_earlier).count();
        assert!(earlier < 10, "{earlier} of 100,000 deadlines were too early");
    }
}
