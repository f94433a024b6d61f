//! Who waits at a channel: nodes in the sleepers' own frames, in first-in first-out lists.
//!
//! # The life of a node
//! | state | who may touch it |
//! |---|---|
//! | not linked, its owner awake | the owner |
//! | linked | whoever holds the channel's lock |
//! | taken: unlinked *and* claimed | the taker, until it has woken the owner |
//! | stale: its wait was claimed through another arm, or by the deadline | as linked |
//!
//! Invariants:
//! 1. A linked node is alive: its owner leaves the frame only after it was taken and woken, or
//!    after it has held the channel's lock and seen (or made) the node unlinked.
//! 2. A taker writes `done` and the value before it wakes; the wake-up publishes both.
//! 3. Lists and the links of nodes are touched under the channel's lock only. `first` is also read
//!    without it, as a hint: null or not.

use super::cells::{AtomicPtr, Cell, Ordering};
use crate::sched::wait::Waiter;
use std::ptr::{null, null_mut};

/// One who waits to send or to receive. See the head of the file.
pub(crate) struct Node {
    next: Cell<*const Node>,
    prev: Cell<*const Node>,
    pub(super) waiter: Cell<Waiter>,
    /// The value to be sent, or room for the one to be received.
    pub(super) slot: Cell<*mut u8>,
    /// Which arm of a select this is; 0 for a plain operation.
    pub(super) arm: Cell<u16>,
    /// For select: a number in its random order.
    pub(super) order: Cell<u16>,
    linked: Cell<bool>,
    /// The taker's answer: the value has moved. Else the channel was closed.
    pub(super) done: Cell<bool>,
}

impl Node {
    #[inline]
    pub(super) fn new(slot: *mut u8) -> Node {
        Node {
            next: Cell::new(null()),
            prev: Cell::new(null()),
            waiter: Cell::new(Waiter::sole(0)),
            slot: Cell::new(slot),
            arm: Cell::new(0),
            order: Cell::new(0),
            linked: Cell::new(false),
            done: Cell::new(false),
        }
    }

    /// Answers a taken node; the caller then wakes the result.
    #[inline]
    pub(super) fn answer(&self, done: bool) -> usize {
        self.done.set(done);
        self.waiter.get().sleeper()
    }
}

/// See the head of the file.
pub(super) struct List {
    first: AtomicPtr<Node>,
    last: Cell<*const Node>,
}

impl List {
    pub(super) fn new() -> List {
        List { first: AtomicPtr::new(null_mut()), last: Cell::new(null()) }
    }

    /// Without the lock: nobody waits, at this moment. (Somebody stale may seem to.)
    #[inline]
    pub(super) fn looks_empty(&self) -> bool {
        // Acquire: what the caller looks at next is not older than this.
        self.first.load(Ordering::Acquire).is_null()
    }

    #[inline]
    fn first(&self) -> *const Node {
        self.first.load(Ordering::Relaxed)
    }

    /// Appends.
    ///
    /// # Safety
    /// The lock is held; the node is not linked, and will be alive as invariant 1 says.
    #[inline]
    pub(super) unsafe fn push(&self, node: *const Node) {
        // SAFETY: the caller's; `last` is linked here, so alive (invariant 1).
        unsafe {
            let last = self.last.get();
            (*node).prev.set(last);
            (*node).next.set(null());
            (*node).linked.set(true);
            match last.as_ref() {
                Some(last) => last.next.set(node),
                // Release: pairs with `looks_empty`.
                None => self.first.store(node.cast_mut(), Ordering::Release),
            }
            self.last.set(node);
        }
    }

    /// Takes a linked node out.
    ///
    /// # Safety
    /// The lock is held, and the node is linked in this list.
    #[inline]
    unsafe fn unlink(&self, node: &Node) {
        let (prev, next) = (node.prev.get(), node.next.get());
        // SAFETY: neighbours are linked, so alive (invariant 1).
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

    /// The owner takes its node out, unless a taker has.
    ///
    /// # Safety
    /// The lock is held, and the node was pushed to this list, if to any.
    pub(super) unsafe fn withdraw(&self, node: &Node) {
        if node.linked.get() {
            // SAFETY: the caller's.
            unsafe { self.unlink(node) };
        }
    }

    /// Takes the first whose wait can still be claimed; stale ones on the way are unlinked. Those
    /// of `me` are passed over: a select does not meet itself. (0: nobody.)
    ///
    /// # Safety
    /// The lock is held. The taken node is the caller's to answer and wake.
    #[inline]
    pub(super) unsafe fn take_first<'a>(&self, me: usize) -> Option<&'a Node> {
        let mut at = self.first();
        loop {
            // SAFETY: linked, so alive (invariant 1). A node whose claim fails is not touched
            // again.
            unsafe {
                let node = at.as_ref()?;
                at = node.next.get();
                let waiter = node.waiter.get();
                if waiter.sleeper() == me {
                    continue;
                }
                self.unlink(node);
                if waiter.claim(node.arm.get() + 1) {
                    return Some(node);
                }
            }
        }
    }

    /// Whether someone else than `me` waits here, stale ones included.
    ///
    /// # Safety
    /// The lock is held.
    pub(super) unsafe fn has_other(&self, me: usize) -> bool {
        let mut at = self.first();
        // SAFETY: linked, so alive (invariant 1).
        while let Some(node) = unsafe { at.as_ref() } {
            if node.waiter.get().sleeper() != me {
                return true;
            }
            at = node.next.get();
        }
        false
    }

    /// How many are linked, stale ones included. For tests.
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

    /// Takes everybody who can be claimed and answers them "closed"; they are appended to `taken`.
    ///
    /// # Safety
    /// As for `take_first`.
    pub(super) unsafe fn take_all(&self, taken: &mut Taken) {
        // SAFETY: the caller's.
        while let Some(node) = unsafe { self.take_first(0) } {
            node.answer(false);
            taken.push(node);
        }
    }
}

/// Taken nodes, first in, first out, to be woken when the lock is given back.
pub(super) struct Taken {
    first: *const Node,
    last: *const Node,
}

impl Taken {
    pub(super) const fn new() -> Taken {
        Taken { first: null(), last: null() }
    }

    fn push(&mut self, node: &Node) {
        node.next.set(null());
        // SAFETY: taken and not yet woken, so alive.
        match unsafe { self.last.as_ref() } {
            Some(last) => last.next.set(node),
            None => self.first = node,
        }
        self.last = node;
    }

    /// The next sleeper to wake.
    pub(super) fn pop(&mut self) -> Option<usize> {
        // SAFETY: taken and not yet woken, so alive; it is not touched after this.
        let node = unsafe { self.first.as_ref()? };
        self.first = node.next.get();
        Some(node.waiter.get().sleeper())
    }
}
