//! The queues of a channel: goroutines, threads and tasks that wait to send or to receive.
//!
//! A waiter has a [`Sudog`] (Go's name) in its own frame, and a select has one for each of its
//! arms. The sudog of a task is in its future (`future.rs`). A [`WaitQueue`] links them, first in,
//! first out. A *sleeper* is the word that names the waiting goroutine, thread or task. A waker
//! *claims* a wait before it ends it, because a select or a deadline gives a wait several wakers
//! (`sched/wait/mod.rs`).
//!
//! # The life of a sudog
//! | state | may be touched by |
//! |---|---|
//! | not linked, its owner awake | the owner |
//! | linked | the holder of the channel's lock |
//! | taken: unlinked *and* claimed | the taker, until it has woken the owner |
//! | stale: linked, but its wait was claimed for another arm, or by the deadline | as linked |
//! | ended: the taker has stored the [`SudogState`] | the owner, if it is a task |
//!
//! A goroutine does nothing until it is woken. A task may be polled, and its future may be dropped,
//! at any moment. So a taker finishes with a sudog *under the lock*: it copies the sleeper, moves
//! the value, and stores the state as its last access. After it has released the lock it wakes the
//! sleeper by the copy.
//!
//! Invariants:
//! 1. A linked sudog is alive. Its owner leaves the frame only after the sudog was taken and the
//!    owner woken, or after the owner has held the channel's lock and found the sudog unlinked (or
//!    unlinked it). The future of a task also ends it after it has read a state other than
//!    `Waiting`.
//! 2. A taker moves the value, then stores the state, then wakes the owner. For a goroutine the
//!    wake-up publishes both, for a task the state publishes the value.
//! 3. Queues and the links of sudogs are touched only under the channel's lock. `first` is also
//!    read without it, as a hint: null or not, or an address for the cache.
//!
//! # Watchers
//! A sudog without a slot is a *watcher*: its owner waits until an operation is ready, and does
//! none (`select/ready.rs`). It is claimed, taken and withdrawn as any other sudog. But an
//! operation that searches for a partner passes it over, and it does not count where waiters are
//! counted.
//!
//! # Why not `sched/wait/list.rs`
//! That list serves `sync`, descriptors and futexes. The two differ where it costs time or memory:
//!
//! | | here | `sched/wait/list.rs` |
//! |---|---|---|
//! | emptiness | `first` is atomic: an operation can read it without the lock | under the lock |
//! | size | 16 bytes per queue: a channel fits into two cache lines | 24 bytes: with a length |
//! | node | 48 bytes: a select initialises one per arm | about 100 bytes |
//! | take | claims one arm of a select; skips the taker's own sudogs | skips orphaned goroutines |
//! | checked by | `trefoil-model`, which compiles this file with loom's cells | tests |

use super::cells::{AtomicPtr, AtomicU8, Cell, Ordering};
use crate::sched::wait::Waiter;
use std::ptr::{null, null_mut};

/// A goroutine, thread or task that waits to send or to receive. See the head of the file.
pub(crate) struct Sudog {
    next: Cell<*const Sudog>,
    prev: Cell<*const Sudog>,
    pub(super) waiter: Cell<Waiter>,
    /// The value to send, or room for the one to receive; null in a watcher.
    pub(super) slot: Cell<*mut u8>,
    /// The number of the arm in its select, by which the wait is claimed; 0 for a plain operation.
    pub(super) arm: Cell<u16>,
    /// In the k-th arm of a select: the index of the arm that is k-th in the random order.
    pub(super) order: Cell<u16>,
    linked: Cell<bool>,
    /// A [`SudogState`], written by the taker.
    state: AtomicU8,
}

/// How the wait of a [`Sudog`] has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum SudogState {
    /// Not at all.
    Waiting,
    /// The value has moved.
    Moved,
    /// The channel was closed.
    Closed,
}

impl Sudog {
    #[inline]
    pub(super) fn new(slot: *mut u8) -> Sudog {
        Sudog {
            next: Cell::new(null()),
            prev: Cell::new(null()),
            waiter: Cell::new(Waiter::sole(0)),
            slot: Cell::new(slot),
            arm: Cell::new(0),
            order: Cell::new(0),
            linked: Cell::new(false),
            state: AtomicU8::new(SudogState::Waiting as u8),
        }
    }

    #[inline]
    fn is_watcher(&self) -> bool {
        self.slot.get().is_null()
    }

    /// Tells a taken sudog that its value has moved. The caller then wakes the returned sleeper.
    /// Called under the lock.
    #[inline]
    pub(super) fn complete(&self) -> usize {
        self.end(SudogState::Moved)
    }

    /// Ends the wait of a taken sudog, and returns the sleeper to wake.
    #[inline]
    fn end(&self, state: SudogState) -> usize {
        let sleeper = self.waiter.get().sleeper();
        // Release: a task that reads the state sees the value, and may free the sudog. So this is
        // the last access.
        self.state.store(state as u8, Ordering::Release);
        sleeper
    }

    /// Returns how the wait has ended. Called by the owner.
    #[inline]
    pub(super) fn state(&self) -> SudogState {
        // Acquire: pairs with `end`.
        match self.state.load(Ordering::Acquire) {
            0 => SudogState::Waiting,
            1 => SudogState::Moved,
            _ => SudogState::Closed,
        }
    }

    /// Makes another sleeper wait in place of the present one. Called by the owner, a task, under
    /// the lock. If the wait has ended, this has no effect.
    pub(super) fn set_sleeper(&self, sleeper: usize) {
        self.waiter.set(Waiter::sole(sleeper));
    }
}

/// See the head of the file.
pub(super) struct WaitQueue {
    first: AtomicPtr<Sudog>,
    last: Cell<*const Sudog>,
}

impl WaitQueue {
    pub(super) fn new() -> WaitQueue {
        WaitQueue { first: AtomicPtr::new(null_mut()), last: Cell::new(null()) }
    }

    /// Returns, without the lock, whether the queue is empty at this moment. A stale sudog counts.
    #[inline]
    pub(super) fn probe_empty(&self) -> bool {
        // Acquire: pairs with the Release in `push` and `unlink`. What the caller reads next is not
        // older than this.
        self.first.load(Ordering::Acquire).is_null()
    }

    /// Returns whether the queue is empty. Called under the lock.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.last.get().is_null()
    }

    #[inline]
    pub(super) fn first(&self) -> *const Sudog {
        self.first.load(Ordering::Relaxed)
    }

    /// Appends a sudog.
    ///
    /// # Safety
    /// The lock is held. The sudog is not linked, and stays alive as invariant 1 demands.
    #[inline]
    pub(super) unsafe fn push(&self, node: *const Sudog) {
        // SAFETY: the caller's guarantee; `last` is linked here, so alive (invariant 1).
        unsafe {
            let last = self.last.get();
            (*node).prev.set(last);
            (*node).next.set(null());
            (*node).linked.set(true);
            match last.as_ref() {
                Some(last) => last.next.set(node),
                // Release: pairs with `probe_empty`.
                None => self.first.store(node.cast_mut(), Ordering::Release),
            }
            self.last.set(node);
        }
    }

    /// Unlinks a sudog.
    ///
    /// # Safety
    /// The lock is held, and the sudog is linked in this queue.
    #[inline]
    unsafe fn unlink(&self, node: &Sudog) {
        let (prev, next) = (node.prev.get(), node.next.get());
        // SAFETY: the neighbours are linked, so alive (invariant 1).
        unsafe {
            match prev.as_ref() {
                Some(prev) => prev.next.set(next),
                None => self.first.store(next.cast_mut(), Ordering::Release),
            }
            match next.as_ref() {
                Some(next) => next.prev.set(prev),
                None => self.last.set(prev),
            }
        }
        node.linked.set(false);
    }

    /// Unlinks the caller's own sudog, unless a taker has.
    ///
    /// # Safety
    /// The lock is held. If the sudog was pushed, then to this queue.
    pub(super) unsafe fn withdraw(&self, node: &Sudog) {
        if node.linked.get() {
            // SAFETY: the caller's guarantee.
            unsafe { self.unlink(node) };
        }
    }

    /// Takes the first waiter whose wait can still be claimed, and unlinks the stale ones before
    /// it. Passes over watchers and the sudogs of the sleeper `me`, because a select never
    /// exchanges a value with itself. A `me` of 0 matches no sleeper.
    ///
    /// # Safety
    /// The lock is held. The caller must complete and wake the returned sudog.
    #[inline]
    pub(super) unsafe fn take_first<'a>(&self, me: usize) -> Option<&'a Sudog> {
        // SAFETY: the caller's guarantee.
        unsafe { self.take_first_unless(me, || false) }
    }

    /// As [`WaitQueue::take_first`], but takes none if `refuses` returns true. It is called only if
    /// the queue is not empty.
    ///
    /// # Safety
    /// As for `take_first`.
    #[inline]
    pub(super) unsafe fn take_first_unless<'a>(
        &self,
        me: usize,
        refuses: impl Fn() -> bool,
    ) -> Option<&'a Sudog> {
        let mut at = self.first();
        loop {
            // SAFETY: linked, so alive (invariant 1). A sudog whose claim fails is not touched
            // again.
            unsafe {
                let node = at.as_ref()?;
                if refuses() {
                    return None;
                }
                at = node.next.get();
                let waiter = node.waiter.get();
                if waiter.sleeper() == me || node.is_watcher() {
                    continue;
                }
                self.unlink(node);
                if waiter.claim(node.arm.get() + 1) {
                    return Some(node);
                }
            }
        }
    }

    /// Takes the first watcher whose wait can still be claimed, and unlinks the stale ones before
    /// it.
    ///
    /// # Safety
    /// As for `take_first`.
    #[cold]
    pub(super) unsafe fn take_watcher<'a>(&self) -> Option<&'a Sudog> {
        // SAFETY: the caller's guarantee.
        unsafe { self.take_matching(Sudog::is_watcher) }
    }

    /// Takes the first sudog that `matches` and whose wait can still be claimed.
    ///
    /// # Safety
    /// As for `take_first`.
    unsafe fn take_matching<'a>(&self, matches: fn(&Sudog) -> bool) -> Option<&'a Sudog> {
        let mut at = self.first();
        loop {
            // SAFETY: as in `take_first_unless`.
            unsafe {
                let node = at.as_ref()?;
                at = node.next.get();
                if matches(node) {
                    self.unlink(node);
                    if node.waiter.get().claim(node.arm.get() + 1) {
                        return Some(node);
                    }
                }
            }
        }
    }

    /// Returns whether a waiter is here whose wait can still be claimed. A watcher does not count.
    ///
    /// # Safety
    /// The lock is held.
    pub(super) unsafe fn has_open(&self) -> bool {
        let mut at = self.first();
        // SAFETY: linked, so alive (invariant 1).
        while let Some(node) = unsafe { at.as_ref() } {
            if !node.is_watcher() && node.waiter.get().is_open() {
                return true;
            }
            at = node.next.get();
        }
        false
    }

    /// Returns whether a sleeper other than `me` waits here. A stale sudog counts, a watcher does
    /// not.
    ///
    /// # Safety
    /// The lock is held.
    pub(super) unsafe fn has_other(&self, me: usize) -> bool {
        let mut at = self.first();
        // SAFETY: linked, so alive (invariant 1).
        while let Some(node) = unsafe { at.as_ref() } {
            if node.waiter.get().sleeper() != me && !node.is_watcher() {
                return true;
            }
            at = node.next.get();
        }
        false
    }

    /// Returns the number of linked sudogs, stale ones included. For tests.
    ///
    /// # Safety
    /// The lock is held.
    pub(super) unsafe fn count(&self) -> usize {
        let (mut at, mut n) = (self.first(), 0);
        // SAFETY: linked, so alive (invariant 1).
        while let Some(node) = unsafe { at.as_ref() } {
            n += 1;
            at = node.next.get();
        }
        n
    }

    /// Takes waiters and watchers that can be claimed, because the channel is closed, and stores
    /// their sleepers in `taken`. Returns their number: if it is less than the length of `taken`,
    /// the queue is empty. The caller wakes them after it has released the lock.
    ///
    /// # Safety
    /// The lock is held.
    pub(super) unsafe fn take_closed(&self, taken: &mut [usize]) -> usize {
        for (n, sleeper) in taken.iter_mut().enumerate() {
            // SAFETY: the caller's guarantee.
            match unsafe { self.take_matching(|_| true) } {
                Some(node) => *sleeper = node.end(SudogState::Closed),
                None => return n,
            }
        }
        taken.len()
    }
}
