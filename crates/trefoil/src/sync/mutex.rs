//! `Mutex`: Go's mutex, with the names of std.
//!
//! The rules are in `mutex_word.rs`, the queue is in `sched/wait/table.rs`; this file connects
//! them.
//!
//! Invariant 1: a waiter is woken with [`HANDED_OVER`] (it has the mutex), with [`RETRY_WOKEN`] (it
//! tries again, and owns `WOKEN`), or with [`RETRY`] (it tries again, and does not).
//!
//! A task waits in the same queue ([`LockOp`]). A future that is dropped after it was woken passes
//! on what it was given: it unlocks the mutex, or gives up `WOKEN`.

use super::mutex_word::{Contender, MutexMode, MutexWord, NextWaiter, QueueState, Unlocked};
use super::spin::Spin;
use crate::runtime::task_waiter;
use crate::sched::simulation;
use crate::sched::task::waker;
use crate::sched::wait::holder::{self, Holder};
use crate::sched::wait::list::{Batch, List, Node, Taken, WaitResult};
use crate::sched::wait::reason::WaitReason;
use crate::sched::wait::table;
use crate::sched::wait::task_node::TaskNode;
use crate::sched::{Rt, switch};
use crate::sys::clock::{self, NEVER, Nanos, now};
use lock_api::GuardSend;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::AtomicU32;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

/// A waiter that has waited for this long gets the mutex before newcomers. Go's number.
const STARVATION_NANOS: Nanos = 1_000_000;

const HANDED_OVER: u32 = 1;
const RETRY_WOKEN: u32 = 2;
const RETRY: u32 = 3;
/// In place of a word: the caller has not been in the queue of the mutex.
const NO_WORD: u32 = 0;

/// A mutual exclusion lock that parks goroutines.
///
/// Use it to protect data that several goroutines change. The method names are those of
/// [`std::sync::Mutex`], but `lock` returns the guard itself: **there is no poisoning**. A panic
/// while the guard is held unlocks the mutex, and the next holder sees the data as the panic left
/// them.
///
/// Goroutines and plain threads may share a mutex, it works in a `static`, and it takes eight bytes
/// in addition to the data: its state, and the goroutine that holds it, for
/// [dumps](crate::debug::dump) and [`deadlocks`](crate::debug::deadlocks). A guard may be sent to
/// another goroutine and dropped there.
///
/// The rules are those of Go's mutex. A caller may take a free mutex even if others wait, which is
/// fast. When a waiter has waited for a millisecond, the mutex enters starvation mode and goes to
/// the waiters in their order, which is fair. `try_lock` fails while the mutex is in starvation
/// mode.
///
/// A goroutine that locks a mutex it already holds waits forever.
///
/// A goroutine that holds a mutex for long may let the first waiter in with `MutexGuard::bump`,
/// which then locks again; `MutexGuard::unlock_fair` unlocks and hands the mutex to the first
/// waiter. Both are parking_lot's.
///
/// Async code locks it with [`lock_async`](MutexExt::lock_async), a method of [`MutexExt`].
///
/// # Cancel
/// `lock` cannot be ended early. `try_lock_for` and `try_lock_until` return `None` when the time is
/// up.
///
/// # Examples
/// ```
/// use trefoil::sync::Mutex;
/// static TOTAL: Mutex<u64> = Mutex::new(0);
/// trefoil::run(|| {
///     trefoil::scope(|s| {
///         for i in 1..=100 {
///             s.go(move || *TOTAL.lock() += i);
///         }
///     });
///     assert_eq!(*TOTAL.lock(), 5050);
///     let guard = TOTAL.lock();
///     assert!(TOTAL.try_lock().is_none());
///     assert!(TOTAL.try_lock_for(std::time::Duration::from_millis(1)).is_none());
///     drop(guard);
/// });
/// ```
pub type Mutex<T> = lock_api::Mutex<RawMutex, T>;

/// Gives access to the data of a locked [`Mutex`].
///
/// # Drop
/// Dropping the guard unlocks the mutex. In starvation mode the goroutine that drops it also yields
/// to the next holder.
///
/// # Examples
/// ```
/// let m = trefoil::sync::Mutex::new(vec![1]);
/// let mut guard = m.lock();
/// guard.push(2);
/// drop(guard);
/// assert_eq!(m.into_inner(), [1, 2]);
/// ```
///
/// A long job lets waiters in between its steps:
/// ```
/// use trefoil::sync::{Mutex, MutexGuard};
/// static DONE: Mutex<u32> = Mutex::new(0);
/// trefoil::run(|| {
///     let mut guard = DONE.lock();
///     for _ in 0..100 {
///         *guard += 1;
///         MutexGuard::bump(&mut guard); // Costs one load while no other goroutine waits.
///     }
///     assert_eq!(*guard, 100);
/// });
/// ```
pub type MutexGuard<'a, T> = lock_api::MutexGuard<'a, RawMutex, T>;

/// Gives access to a part of the data of a locked [`Mutex`], made by `MutexGuard::map`.
///
/// # Drop
/// Dropping the guard unlocks the mutex.
///
/// # Examples
/// ```
/// use trefoil::sync::{Mutex, MutexGuard};
/// let pair = Mutex::new((1, 2));
/// *MutexGuard::map(pair.lock(), |p| &mut p.1) += 40;
/// assert_eq!(*pair.lock(), (1, 42));
/// ```
pub type MappedMutexGuard<'a, T> = lock_api::MappedMutexGuard<'a, RawMutex, T>;

/// A mutex without data, for the types of [`lock_api`]. Most programs use [`Mutex`].
///
/// # Examples
/// ```
/// use lock_api::RawMutex as _;
/// static RAW: trefoil::sync::RawMutex = trefoil::sync::RawMutex::INIT;
/// RAW.lock();
/// assert!(!RAW.try_lock());
/// // SAFETY: locked above.
/// unsafe { RAW.unlock() };
/// ```
#[repr(C)]
pub struct RawMutex {
    holder: Holder,
    word: MutexWord,
}

impl RawMutex {
    #[allow(clippy::declare_interior_mutable_const)]
    pub(crate) const NEW: RawMutex =
        RawMutex { holder: Holder::NEW, word: MutexWord(AtomicU32::new(0)) };

    fn key(&self) -> usize {
        std::ptr::from_ref(self) as usize
    }

    /// Locks the mutex. Returns false if it could not be locked before `deadline`.
    #[inline]
    pub(crate) fn lock_until(&self, deadline: Nanos, reason: WaitReason) -> bool {
        let locked = self.word.lock_fast() || self.lock_slow(deadline, reason, NO_WORD);
        if locked {
            self.holder.set();
        }
        locked
    }

    /// Locks the mutex again after a wait on a condition variable that ended with `word`: an
    /// unlocker's word (invariant 1) if the waiter was moved to the queue of the mutex
    /// ([`RawMutex::requeue`]), else [`NO_WORD`].
    pub(crate) fn lock_after(&self, word: u32, reason: WaitReason) {
        if word != HANDED_OVER && (word == RETRY_WOKEN || !self.word.lock_fast()) {
            self.lock_slow(NEVER, reason, word);
        }
        self.holder.set();
    }

    /// Moves the sleepers in `batch` to the queue of the mutex, as long as a holder will unlock it:
    /// woken at once they would only wait for the mutex. Leaves in `batch` the sleepers that the
    /// caller must wake. Called inside the runtime or on a plain thread.
    pub(crate) fn requeue(&self, batch: &mut Batch) {
        let now = now();
        let mut rest = Batch::new();
        let mut moved = false;
        table::with_queue(self.key(), |queue| {
            while let Some(sleeper) = batch.pop() {
                if sleeper.may_move() && self.word.join_queue(Contender::default()) {
                    sleeper.node().since.set(now);
                    if let Some(g) = sleeper.goroutine() {
                        holder::note_moved(g, self.key());
                        moved = true;
                    }
                    sleeper.move_to(queue);
                } else {
                    rest.push(sleeper);
                }
            }
        });
        *batch = rest;
        if moved {
            holder::note_wait();
        }
    }

    /// Locks the mutex, and waits for it. Returns false if the deadline has passed. `word` is
    /// the one that the caller was woken with (invariant 1), or [`NO_WORD`].
    #[cold]
    fn lock_slow(&self, deadline: Nanos, reason: WaitReason, word: u32) -> bool {
        let mut this = Contender { owns_woken: word == RETRY_WOKEN, starving: false };
        if self.word.try_lock(this) {
            return true;
        }
        let mut spin = Spin::new();
        // A waiter that was in the queue before joins it at the front.
        let mut was_queued = word != NO_WORD;
        let node = Node::new(0);
        loop {
            while self.word.worth_spinning() && spin.possible() {
                this.owns_woken = this.owns_woken || self.word.announce();
                spin.pause();
            }
            if self.word.try_lock(this) {
                return true;
            }
            if node.since.get() == 0 {
                node.since.set(now());
            }
            let enqueue = |_| self.enqueue(&node, this, was_queued);
            let withdraw = |_| {
                self.withdraw(&node);
            };
            holder::note_held_object(self.key(), deadline);
            match node.sleep(reason, deadline, enqueue, withdraw) {
                WaitResult::NotQueued => {}
                WaitResult::Woken(HANDED_OVER) => return true,
                WaitResult::Woken(word) => {
                    was_queued = true;
                    this.owns_woken = word == RETRY_WOKEN;
                    this.starving = this.starving || starves(&node);
                    spin.reset();
                }
                // The waiter may run long after its time-out, and the mutex may be free by now.
                WaitResult::TimedOut => return self.try_lock_now(),
            }
        }
    }

    /// Puts the node of a contender into the queue. Returns false if the mutex is free.
    fn enqueue(&self, node: &Node, by: Contender, was_queued: bool) -> bool {
        table::with_queue(self.key(), |queue| {
            let joins = self.word.join_queue(by);
            match (joins, was_queued) {
                (false, _) => {}
                (true, false) => queue.push_back(node),
                (true, true) => queue.push_front(node),
            }
            joins
        })
    }

    /// Takes the node of a waiter that gives up out of the queue. Returns false if a taker has it.
    fn withdraw(&self, node: &Node) -> bool {
        table::with_queue(self.key(), |queue| {
            let withdrawn = queue.withdraw(node);
            if withdrawn && queue.is_empty() {
                self.word.queue_emptied();
            }
            withdrawn
        })
    }

    #[inline]
    pub(crate) fn try_lock_now(&self) -> bool {
        let locked = self.word.try_lock(Contender::default());
        if locked {
            self.holder.set();
        }
        locked
    }

    /// Unlocks the mutex. Only its holder may call this.
    #[inline]
    pub(crate) fn unlock_held(&self) {
        let holder = self.holder.clear();
        if self.word.unlock() == Unlocked::CallNext {
            self.unlock_slow(holder);
        }
    }

    /// Unlocks the mutex, and hands it to the first waiter, if there is one.
    pub(crate) fn unlock_held_fair(&self) {
        if !self.word.has_queue() {
            return self.unlock_held();
        }
        let holder = self.holder.clear();
        holder::note_unlock(holder);
        let rt = Rt::enter();
        let next = table::with_queue(self.key(), |queue| {
            let first = self.take_first(queue)?;
            self.note_handed_over(queue, &first);
            Some((first, HANDED_OVER))
        });
        // If all waiters have withdrawn, the mutex is still held.
        let next = match next {
            None if self.word.unlock() == Unlocked::CallNext => self.take_next(),
            next => next,
        };
        wake_next(rt, next);
    }

    /// Returns whether waiters are in the queue. May be out of date at once.
    pub(crate) fn has_queue(&self) -> bool {
        self.word.has_queue()
    }

    /// Lets the first waiter have the mutex, if there is one, and locks it again.
    fn bump_held(&self) {
        if self.word.has_queue() {
            self.unlock_held_fair();
            self.lock_until(NEVER, WaitReason::MutexLock);
        }
    }

    /// Unlocks the mutex inside the runtime or on a plain thread. Unlike [`RawMutex::unlock_slow`],
    /// it does not yield to the next holder.
    pub(crate) fn unlock_in(&self, rt: Option<Rt>) {
        let holder = self.holder.clear();
        if self.word.unlock() == Unlocked::CallNext {
            holder::note_unlock(holder);
            if let Some((next, word)) = self.take_next() {
                next.wake(rt, word);
            }
        }
    }

    /// Notes that the caller is about to unlock, for a holder that others wait for elsewhere than
    /// in the queue of the mutex.
    pub(crate) fn note_unlock(&self) {
        holder::note_unlock(self.holder.get());
    }

    #[cold]
    fn unlock_slow(&self, holder: u32) {
        holder::note_unlock(holder);
        let rt = Rt::enter();
        wake_next(rt, self.take_next());
    }

    /// Takes the waiter that the unlocker must wake from the queue. Returns it and the word to wake
    /// it with (invariant 1).
    fn take_next(&self) -> Option<(Taken, u32)> {
        table::with_queue(self.key(), |queue| match self.word.next() {
            NextWaiter::None => None,
            NextWaiter::Wake => {
                let first = self.take_first(queue)?;
                let owns_woken = self.word.woke(state_of(queue));
                Some((first, if owns_woken { RETRY_WOKEN } else { RETRY }))
            }
            NextWaiter::HandOver => {
                let Some(first) = self.take_first(queue) else {
                    // All waiters have withdrawn, so there is none to wake after this unlock.
                    let _ = self.word.unlock();
                    return None;
                };
                self.note_handed_over(queue, &first);
                Some((first, HANDED_OVER))
            }
        })
    }

    /// Notes that `first`, which was taken from the queue, has the mutex.
    fn note_handed_over(&self, queue: &List, first: &Taken) {
        let rest = state_of(queue);
        let starving = rest == QueueState::NotEmpty && starves(first.node());
        let mode = if starving { MutexMode::Starvation } else { MutexMode::Normal };
        self.word.handed_over(rest, mode);
    }

    /// Takes the first waiter from the queue. If there is none any more, the word notes that.
    fn take_first(&self, queue: &mut List) -> Option<Taken> {
        let first = queue.take_first();
        if first.is_none() {
            self.word.queue_emptied();
        }
        first
    }
}

/// The attempt of a task to lock a [`RawMutex`].
pub(crate) struct LockOp {
    pub(super) node: TaskNode,
    contender: Contender,
    was_queued: bool,
}

impl LockOp {
    pub(crate) fn new() -> LockOp {
        let node = TaskNode::new(0, task_waiter());
        LockOp { node, contender: Contender::default(), was_queued: false }
    }

    /// Locks the mutex, or waits for it.
    ///
    /// # Safety
    /// If it returns `Pending`, the operation does not move, and the mutex lives, until a later
    /// call has returned `Ready`, or `cancel` was called.
    #[inline]
    pub(crate) unsafe fn poll(
        &mut self,
        mutex: &RawMutex,
        context: &Context<'_>,
        reason: WaitReason,
    ) -> Poll<()> {
        let locked = if !self.node.waits() && mutex.word.lock_fast() {
            Poll::Ready(())
        } else {
            // SAFETY: the caller's guarantee.
            unsafe { self.poll_slow(mutex, context, reason) }
        };
        // The future of another executor may go on in another goroutine, so its holder stays
        // unknown.
        if locked.is_ready() && waker::word_of_waker(context.waker()).is_some() {
            mutex.holder.set();
        }
        locked
    }

    /// As [`LockOp::poll`]. A task does not spin: its P has other work, or another P takes the
    /// task when the mutex is free.
    #[cold]
    unsafe fn poll_slow(
        &mut self,
        mutex: &RawMutex,
        context: &Context<'_>,
        reason: WaitReason,
    ) -> Poll<()> {
        if self.node.waits() {
            let with_lock = |f: &mut dyn FnMut()| table::with_queue(mutex.key(), |_| f());
            match self.node.poll(context, reason, with_lock) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(HANDED_OVER) => {
                    self.contender.owns_woken = false;
                    return Poll::Ready(());
                }
                Poll::Ready(word) => {
                    self.was_queued = true;
                    let starving = self.contender.starving || starves(&self.node.node);
                    self.contender = Contender { owns_woken: word == RETRY_WOKEN, starving };
                }
            }
        }
        if self.node.node.since.get() == 0 {
            self.node.node.since.set(now());
        }
        let (by, was_queued) = (self.contender, self.was_queued);
        loop {
            if mutex.word.try_lock(by) {
                self.contender.owns_woken = false;
                return Poll::Ready(());
            }
            // SAFETY: the caller's guarantee.
            let waits = unsafe {
                self.node.begin(context, reason, |node, _| mutex.enqueue(node, by, was_queued))
            };
            if waits {
                return Poll::Pending;
            }
        }
    }

    /// Ends the attempt. If the mutex was handed to the task, unlocks it.
    pub(crate) fn cancel(&mut self, mutex: &RawMutex) {
        if !self.node.waits() {
            // A waker of another executor has panicked before the task could wait again.
            if std::mem::take(&mut self.contender.owns_woken) && mutex.word.give_up_woken() {
                mutex.unlock_held();
            }
            return;
        }
        match self.node.cancel(|node, _| mutex.withdraw(node)) {
            Some(HANDED_OVER) => mutex.unlock_held(),
            Some(RETRY_WOKEN) if mutex.word.give_up_woken() => mutex.unlock_held(),
            _ => {}
        }
    }
}

/// Locks a [`Mutex`] in async code.
///
/// # Examples
/// ```
/// use trefoil::sync::{Mutex, MutexExt as _};
/// static TOTAL: Mutex<u64> = Mutex::new(0);
/// trefoil::run(|| {
///     let tasks: Vec<_> = (1..=100)
///         .map(|i| trefoil::task::spawn(async move { *TOTAL.lock_async().await += i }))
///         .collect();
///     tasks.into_iter().for_each(|task| task.join().unwrap());
///     assert_eq!(*TOTAL.lock(), 5050);
/// });
/// ```
pub trait MutexExt<T: ?Sized> {
    /// Locks the mutex, and waits while it is locked: `lock` for async code.
    ///
    /// Tasks, goroutines and threads wait in one queue, by the rules of [`Mutex`]. The guard is the
    /// same as that of `lock`. It is `Send` if the data are, so it may be held across an `await`.
    ///
    /// # Cancel
    /// The future may be dropped at any time. If the mutex was handed to it already, the next
    /// waiter gets it. A future that is neither polled nor dropped may keep the mutex from others.
    fn lock_async(&self) -> LockFuture<'_, T>;
}

impl<T: ?Sized> MutexExt<T> for Mutex<T> {
    fn lock_async(&self) -> LockFuture<'_, T> {
        LockFuture { mutex: self, op: LockOp::new() }
    }
}

/// A lock that a task awaits, returned by [`MutexExt::lock_async`].
///
/// # Examples
/// ```
/// use trefoil::sync::{Mutex, MutexExt as _};
/// let m = Mutex::new(1);
/// trefoil::block_on(async {
///     *m.lock_async().await += 1;
/// });
/// assert_eq!(m.into_inner(), 2);
/// ```
#[must_use = "a future does nothing unless it is awaited"]
pub struct LockFuture<'a, T: ?Sized> {
    mutex: &'a Mutex<T>,
    op: LockOp,
}

impl<'a, T: ?Sized> Future for LockFuture<'a, T> {
    type Output = MutexGuard<'a, T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // SAFETY: nothing is moved out of the pinned operation, which lives until the end of the
        // wait, or cancels it; the mutex is borrowed. If it is locked, the guard unlocks it.
        unsafe {
            let this = self.get_unchecked_mut();
            this.op
                .poll(this.mutex.raw(), context, WaitReason::MutexLock)
                .map(|()| this.mutex.make_guard_unchecked())
        }
    }
}

impl<T: ?Sized> Drop for LockFuture<'_, T> {
    fn drop(&mut self) {
        // SAFETY: the reference does not leave this function.
        self.op.cancel(unsafe { self.mutex.raw() });
    }
}

impl<T: ?Sized> fmt::Debug for LockFuture<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LockFuture { .. }")
    }
}

/// Wakes the waiter that an unlocker has taken from the queue, with the word for it. Leaves the
/// runtime.
fn wake_next(rt: Option<Rt>, next: Option<(Taken, u32)>) {
    let Some(rt) = rt else {
        if let Some((next, word)) = next {
            next.wake(None, word);
        }
        return;
    };
    match next {
        // As in Go, the next holder runs at once, so that the mutex is not held by a goroutine
        // that waits to run.
        Some((next, HANDED_OVER)) if next.is_goroutine() => {
            next.wake(Some(rt), HANDED_OVER);
            switch::yield_now(rt).leave();
        }
        Some((next, word)) => {
            next.wake(Some(rt), word);
            rt.leave();
        }
        None => rt.leave(),
    }
}

fn state_of(queue: &List) -> QueueState {
    if queue.is_empty() { QueueState::Empty } else { QueueState::NotEmpty }
}

/// Returns whether the waiter has waited for so long that it starves.
fn starves(node: &Node) -> bool {
    now().saturating_sub(node.since.get()) >= STARVATION_NANOS
}

// SAFETY: `LOCKED` is set by one exchange from a state without it, or handed over while it is set.
// Only the holder's `unlock` clears it (`mutex_word.rs`).
unsafe impl lock_api::RawMutex for RawMutex {
    #[allow(clippy::declare_interior_mutable_const)]
    const INIT: RawMutex = RawMutex::NEW;

    /// Another thread may unlock the mutex: it does not know the thread that locked it.
    type GuardMarker = GuardSend;

    #[inline]
    fn lock(&self) {
        self.lock_until(NEVER, WaitReason::MutexLock);
        simulation::point();
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.try_lock_now()
    }

    #[inline]
    unsafe fn unlock(&self) {
        self.unlock_held();
        simulation::point();
    }

    #[inline]
    fn is_locked(&self) -> bool {
        self.word.is_locked()
    }
}

// SAFETY: as above. A fair unlock leaves `LOCKED` set for the waiter that it takes.
unsafe impl lock_api::RawMutexFair for RawMutex {
    unsafe fn unlock_fair(&self) {
        self.unlock_held_fair();
    }

    unsafe fn bump(&self) {
        self.bump_held();
    }
}

// SAFETY: as above; false means that the mutex was not locked.
unsafe impl lock_api::RawMutexTimed for RawMutex {
    type Duration = Duration;
    type Instant = Instant;

    fn try_lock_for(&self, timeout: Duration) -> bool {
        self.lock_until(clock::after(timeout), WaitReason::MutexLock)
    }

    fn try_lock_until(&self, timeout: Instant) -> bool {
        self.lock_until(clock::at(timeout), WaitReason::MutexLock)
    }
}

impl fmt::Debug for RawMutex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RawMutex").field("locked", &self.word.is_locked()).finish()
    }
}
