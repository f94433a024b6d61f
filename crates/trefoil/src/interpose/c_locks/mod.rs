//! Locks of C and C++ code: pthread's mutexes, read-write locks, condition variables and barriers, POSIX's semaphores,
//! C11's `mtx_t` and `cnd_t`. A goroutine that must wait for one parks; a plain thread waits as ever.
//!
//! | file | what |
//! |---|---|
//! | `mutex.rs`, `rwlock.rs`, `semaphore.rs` | glibc's `try` function, a queue by address for goroutines, the real function for threads |
//! | `cond.rs`, `barrier.rs` | replaced as a whole, for goroutines and threads alike |
//! | `c11.rs` | the same by C11's names |
//! | `layout.rs` | where glibc keeps what cannot be asked for |
//! | `real.rs` | glibc's functions |
//!
//! # The protocol of a wait ([`Waiters`])
//! ```text
//!   the goroutine that waits                     the owner, on any thread
//!   sleeping += 1          (locked)              the real unlock     (locked)
//!   under the bucket's lock:                     sleeping != 0?
//!     the real try function; on EBUSY: enqueue     yes: under the bucket's lock: take the first
//!   park                                           wake it
//!   retry
//! ```
//! One of the two locked instructions comes first. If it is the unlock, the try function succeeds or finds a newer
//! owner, whose unlock is still to come. If it is the count, the owner takes the bucket's lock, and finds the goroutine
//! in the queue, or the goroutine has not tried yet.
//!
//! Invariants:
//! 1. The object's memory is not touched after the real unlock: another thread may have destroyed it. From there on its
//!    address is only a key.
//! 2. The real unlock publishes by a locked instruction. (It must learn whether a thread sleeps in the kernel, so it is
//!    a read-modify-write. glibc leaves the prefix out only in a process with one thread.) On x86 that is a full
//!    barrier, so no other one is paid for.
//! 3. Nothing here allocates, and no function of std that locks is called: allocators lock mutexes, also before `main`.
//! 4. In a child of `fork`, in signal handlers, with a lock of the runtime in hand, and on goroutines whose runtime has
//!    ended, waits are the real functions'.
//! 5. Process-shared, robust, priority-inheriting and priority-protected objects are the real functions' alone: the
//!    thread blocks, and loses its P.
//!
//! A goroutine that was woken before its runtime ended, and never ran, has taken a wake-up with it. One that still waits
//! when its runtime ends is passed over.
//!
//! Rejected: our own implementation of all of it in glibc's memory (static initialisers, robust lists and `gdb` know
//! glibc's). A fence after each unlock (7 ns on every thread of the process, see invariant 2).

mod barrier;
mod c11;
mod cond;
mod layout;
mod mutex;
mod real;
mod rwlock;
mod semaphore;

use super::waking::WakeContext;
use super::{FORKED, begin_wait_as, may_park};
use crate::arch;
use crate::sched::deferred::{KEY_BARRIER, key_of, wake_later};
use crate::sched::queue::{Batch, List, Node, Slept};
use crate::sched::reason::WaitReason;
use crate::sched::table::FOREIGN;
use crate::sched::{Rt, has_runtime_ended, holds_lock_of_std, switch};
use crate::sys::clock::{NEVER, Nanos, now};
use crate::sys::frame_waiter::{ClockTime, WaitClock};
use crate::sys::lock;
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What is waited for: the low bits of a key (`deferred.rs`). 0 is a futex word.
const MUTEX: usize = 1;
const COND: usize = 2;
const SEMAPHORE: usize = 3;
const RWLOCK: usize = 4;
const BARRIER: usize = KEY_BARRIER;

/// Bits of a node's weight: it failed so often that its waker yields to it; it wants a rwlock for writing; that lock
/// prefers writers.
const STARVED: usize = 1;
const WRITER: usize = 2;
const PREFERRED: usize = 4;
/// A waiter is starved when it was woken so often, and each time another one was faster. glibc's locks are not fair;
/// threads are torn apart by their CPUs, goroutines on one P are not.
const STARVED_AFTER: u32 = 2;

/// Calls `lock`, which takes a mutex or a read-write lock, and counts it if it was taken. (`EOWNERDEAD` says so as well.)
/// It is counted before: a goroutine that is stopped in between must not hold a lock that is not counted.
#[inline(always)]
fn counted(lock: impl FnOnce() -> c_int) -> c_int {
    lock::count_c_lock();
    let rc = lock();
    if rc != 0 && rc != libc::EOWNERDEAD {
        lock::uncount_c_lock();
    }
    rc
}

/// Counts a lock that was given back, if `rc` says so.
#[inline(always)]
fn count_unlocked(rc: c_int) -> c_int {
    if rc == 0 {
        lock::uncount_c_lock();
    }
    rc
}

/// Whether the caller may park: on a goroutine, on its own stack, outside the runtime.
fn may_park_here() -> bool {
    // In a runtime that has ended a holder that parks would keep its locks for good.
    let lost = lock::c_locks_held() > 1 && has_runtime_ended();
    // SAFETY: on a goroutine GS is the M.
    !lost && may_park() && !lock::holds_runtime_lock() && !unsafe { arch::is_in_runtime() }
}

/// The deadline that C code passes, on the clock `clock`.
///
/// # Safety
/// `at` is a timespec.
unsafe fn deadline(clock: libc::clockid_t, at: *const libc::timespec) -> Result<ClockTime, c_int> {
    let clock = match clock {
        libc::CLOCK_REALTIME => WaitClock::Realtime,
        libc::CLOCK_MONOTONIC => WaitClock::Monotonic,
        _ => return Err(libc::EINVAL),
    };
    // SAFETY: the caller's.
    let at = unsafe { &*at };
    if !(0..1_000_000_000).contains(&at.tv_nsec) {
        return Err(libc::EINVAL);
    }
    Ok(ClockTime { clock, seconds: at.tv_sec, nanos: at.tv_nsec as u32 })
}

/// The same point in time on the runtime's clock, as that other clock goes now.
fn on_runtime_clock(limit: Option<ClockTime>) -> Nanos {
    let Some(limit) = limit else { return NEVER };
    if limit.seconds < 0 {
        return 0;
    }
    let at =
        (limit.seconds as u64).saturating_mul(1_000_000_000).saturating_add(limit.nanos.into());
    // Never is for those that have no deadline.
    let at = at.min(NEVER - 1);
    match limit.clock {
        WaitClock::Monotonic => at,
        WaitClock::Realtime => {
            let wall = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
            let wall = wall.tv_sec as u64 * 1_000_000_000 + wall.tv_nsec as u64;
            now().saturating_add(at.saturating_sub(wall)).min(NEVER - 1)
        }
    }
}

/// Those that wait for one kind of object, in the table [`FOREIGN`].
struct Waiters {
    tag: usize,
    /// How many are between their first failure and their success. While there are none, nothing is woken.
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

    /// Counts the caller among those that may have to be woken, until the result is dropped.
    fn count(&self) -> Counted<'_> {
        // SeqCst: the left side of the protocol in the head. A locked instruction, which the real try function's look
        // at the object does not pass.
        self.sleeping.fetch_add(1, Ordering::SeqCst);
        Counted(self)
    }

    #[inline(always)]
    fn is_any_sleeping(&self) -> bool {
        // SeqCst: the right side of the protocol; invariant 2 has the barrier.
        self.sleeping.load(Ordering::SeqCst) != 0
    }

    /// Repeats `attempt` until it returns something other than `EBUSY`, and sleeps in between; `ETIMEDOUT` after
    /// `limit`. `attempt` gets the queue, and how often it failed before; it is called under the queue's lock.
    fn acquire(
        &self,
        address: usize,
        reason: WaitReason,
        weight: usize,
        limit: Option<ClockTime>,
        attempt: impl Fn(&List, u32) -> c_int,
    ) -> c_int {
        let _counted = self.count();
        // A mutex or read-write lock that is waited for is counted already.
        let without = u32::from(self.tag != SEMAPHORE);
        let mut failures = 0;
        loop {
            let starved = if failures >= STARVED_AFTER { STARVED } else { 0 };
            let node = Node::of_process(weight | starved);
            let mut rc = libc::EBUSY;
            let slept = sleep(
                &node,
                reason,
                without,
                limit,
                |_| {
                    self.with_queue(address, |queue| {
                        rc = attempt(queue, failures);
                        if rc != libc::EBUSY {
                            return false;
                        }
                        // Whoever was woken in vain keeps its place.
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
                Slept::No => return rc,
                Slept::Woken(_) => failures += 1,
                Slept::TimedOut => {
                    let rc = self.with_queue(address, |queue| attempt(queue, failures + 1));
                    return if rc == libc::EBUSY { libc::ETIMEDOUT } else { rc };
                }
            }
        }
    }

    /// Calls the real unlock, and wakes whom `select` takes from the queue of `address`.
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

    /// As [`Waiters::release`], where a goroutine sleeps, maybe for another object. On a goroutine it is one runtime
    /// call: a goroutine that is stopped for ever on its way out has woken whom it had to wake.
    #[cold]
    fn release_slow(
        &self,
        address: usize,
        unlock: impl Fn() -> c_int,
        select: impl Fn(&mut List) -> Batch,
    ) -> c_int {
        if WakeContext::current() == WakeContext::Runtime
            && !FORKED.load(Ordering::Relaxed)
            && let Some(rt) = Rt::enter()
        {
            let rc = unlock();
            let starved = rc == 0 && self.wake_in(address, Some(rt), select);
            leave(rt, starved);
            return rc;
        }
        let rc = unlock();
        if rc == 0 {
            self.wake(address, select);
        }
        rc
    }

    /// Wakes whom `select` takes from the queue of `address`. From anywhere, also from a signal handler.
    #[cold]
    fn wake(&self, address: usize, select: impl FnOnce(&mut List) -> Batch) {
        if FORKED.load(Ordering::Relaxed) {
            return;
        }
        match WakeContext::current() {
            WakeContext::Deferred => wake_later(self.key(address)),
            WakeContext::Outside => {
                self.wake_in(address, None, select);
            }
            WakeContext::Runtime => {
                if let Some(rt) = Rt::enter() {
                    let starved = self.wake_in(address, Some(rt), select);
                    leave(rt, starved);
                }
            }
        }
    }

    /// As [`Waiters::wake`], where the caller knows how. Returns whether a starved goroutine was among them.
    fn wake_in(
        &self,
        address: usize,
        here: Option<Rt>,
        select: impl FnOnce(&mut List) -> Batch,
    ) -> bool {
        let batch = self.with_queue(address, select);
        let starved = batch.any(|node| node.weight & STARVED != 0);
        batch.wake_all(here, 0);
        starved
    }
}

/// Out of the runtime; first to another goroutine if one that was woken has waited long, unless the caller holds more than
/// the lock that it is giving back.
fn leave(rt: Rt, starved: bool) {
    let yields = starved && lock::c_locks_held() <= 1 && !holds_lock_of_std();
    let rt = if yields { switch::yield_now(rt) } else { rt };
    rt.leave();
}

/// See [`Waiters::count`].
struct Counted<'a>(&'a Waiters);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.sleeping.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Takes the first of the queue.
fn first(queue: &mut List) -> Batch {
    let mut batch = Batch::new();
    if let Some(taken) = queue.take_first() {
        batch.push(taken);
    }
    batch
}

/// Sleeps once in the queue of an object that is replaced as a whole: parks a goroutine, or blocks the thread. `enqueue`
/// gets the runtime if the caller is inside it, and returns whether to sleep; `withdraw` is
/// [`List::withdraw`]. Of the C locks that the caller holds, `without` are the one that it waits for or gives back.
fn sleep(
    node: &Node,
    reason: WaitReason,
    without: u32,
    limit: Option<ClockTime>,
    enqueue: impl FnOnce(Option<Rt>) -> bool,
    withdraw: impl FnOnce() -> bool,
) -> Slept {
    let holds_lock = || lock::c_locks_held() > without || holds_lock_of_std();
    if may_park_here()
        && let Some(_wait) = begin_wait_as(holds_lock)
    {
        let withdraw = |_| {
            withdraw();
        };
        return node.sleep(reason, on_runtime_clock(limit), enqueue, withdraw);
    }
    node.sleep_in_kernel(limit, || enqueue(None), withdraw)
}

/// Names every function, so that none is left out of the program.
pub(super) fn linked() {
    std::hint::black_box([
        mutex::pthread_mutex_lock as *const (),
        cond::pthread_cond_wait as *const (),
        rwlock::pthread_rwlock_rdlock as *const (),
        semaphore::sem_post as *const (),
        barrier::pthread_barrier_wait as *const (),
        c11::mtx_lock as *const (),
    ]);
}
