//! The central stack pool: exchanges whole batches of stacks between the Ps' caches.
//!
//! A P whose cache overflows puts half of it here; a P whose cache is empty takes such a batch. A
//! batch is a chain of nodes whose first node also stores the chain's length and its last node. So
//! both directions are O(1) under the lock, whatever the batch's size: the critical section touches
//! two or three cache lines instead of walking over 32 cold headers.
//!
//! ```text
//!   PoolState.top ─▶ A1 ──next──▶ A2 ──▶ A3    a batch: head A1 has {len 3, tail A3, below B1}
//!                    │below
//!                    ▼
//!                    B1 ──next──▶ B2           the batch below it
//! ```
//!
//! Invariants:
//! 1. A node is in exactly one place: in a [`StackBatch`] that a thread owns, or in the pool. The
//!    owner of a batch owns its nodes, and no other thread touches their links.
//! 2. `PoolState::len` is the sum of the lengths of the batches in the pool. [`StackPool::put`]
//!    never makes it exceed the `max` that it is given. `mem` passes `usize::MAX` (it decides
//!    before what to do with a surplus), so there the pool may exceed `POOL_MAX` until the
//!    scavenger has run.
//! 3. A batch in the pool is not empty.
//! 4. [`StackPool::take_or_else`] runs its second choice under the lock, so the pool *is* empty at
//!    that moment: if pool and second choice together contain a node, the caller gets one. Checking
//!    one after the other would miss a batch that moves in between.
//!
//! This file uses neither the kernel nor stacks: the lock comes from `sys::lock`, the links from
//! [`BatchNode`]. `crates/trefoil-model` compiles it with loom's lock and with nodes that are made
//! of loom's cells.
//!
//! Rejected: a lock-free stack of batches. It needs a tag or hazard pointers against ABA, and the
//! pool is used once per 32 stacks: the lock costs less than a nanosecond per stack.

use std::ptr::NonNull;

use crate::sys::lock::Lock;

/// What the first node of a batch in the pool stores.
pub(crate) struct BatchLinks<N> {
    /// First node of the batch below it.
    below: Option<NonNull<N>>,
    /// Last node of this batch.
    tail: NonNull<N>,
    /// Nodes in this batch.
    len: u32,
}

impl<N> Clone for BatchLinks<N> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<N> Copy for BatchLinks<N> {}

/// An object that can be chained: it has room for a `next` link and for [`BatchLinks`].
///
/// # Safety
/// A getter returns what the last setter on the same node stored.
pub(crate) unsafe trait BatchNode: Sized {
    /// Returns the `next` link.
    ///
    /// # Safety
    /// The caller owns the node (invariant 1), and `set_next` was called on it.
    unsafe fn next(this: NonNull<Self>) -> Option<NonNull<Self>>;
    /// Sets the `next` link.
    ///
    /// # Safety
    /// The caller owns the node.
    unsafe fn set_next(this: NonNull<Self>, next: Option<NonNull<Self>>);
    /// Returns the batch links.
    ///
    /// # Safety
    /// The caller owns the node, and `set_batch` was called on it.
    unsafe fn batch(this: NonNull<Self>) -> BatchLinks<Self>;
    /// Sets the batch links.
    ///
    /// # Safety
    /// The caller owns the node.
    unsafe fn set_batch(this: NonNull<Self>, links: BatchLinks<Self>);
}

/// An owned chain of nodes, newest first. Dropping it leaks the nodes.
#[must_use]
pub(crate) struct StackBatch<N: BatchNode> {
    /// First and last node.
    ends: Option<(NonNull<N>, NonNull<N>)>,
    len: u32,
}

// SAFETY: a batch owns its nodes (invariant 1); moving it moves them.
unsafe impl<N: BatchNode + Send> Send for StackBatch<N> {}

impl<N: BatchNode> StackBatch<N> {
    pub(crate) const fn new() -> Self {
        StackBatch { ends: None, len: 0 }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds a node at the front.
    ///
    /// # Safety
    /// The caller owns `node`; the batch does from now on.
    #[inline]
    pub(crate) unsafe fn push(&mut self, node: NonNull<N>) {
        let (next, tail) = match self.ends {
            Some((head, tail)) => (Some(head), tail),
            None => (None, node),
        };
        // SAFETY: the batch owns the node from here on.
        unsafe { N::set_next(node, next) };
        self.ends = Some((node, tail));
        self.len += 1;
    }

    /// Takes the first node; the caller owns it.
    #[inline]
    pub(crate) fn pop(&mut self) -> Option<NonNull<N>> {
        let (head, tail) = self.ends?;
        // SAFETY: a node of this batch (invariant 1), linked by `push`.
        let next = unsafe { N::next(head) };
        self.ends = next.map(|next| (next, tail));
        self.len -= 1;
        Some(head)
    }

    /// Keeps the first `keep` nodes, the newest, and returns the others. Walks `keep` nodes.
    pub(crate) fn split_off(&mut self, keep: usize) -> StackBatch<N> {
        debug_assert!(keep > 0);
        let Some((head, tail)) = self.ends else { return StackBatch::new() };
        if keep >= self.len() {
            return StackBatch::new();
        }
        let mut last = head;
        for _ in 1..keep {
            // SAFETY: `keep < len`, so this node has a successor in this chain.
            last = unsafe { N::next(last) }.expect("a chain is as long as its len");
        }
        // SAFETY: as above: `last` is a node of this batch and not its tail.
        let rest = unsafe { N::next(last) }.expect("a chain is as long as its len");
        // SAFETY: as above.
        unsafe { N::set_next(last, None) };
        let len = self.len - keep as u32;
        *self = StackBatch { ends: Some((head, last)), len: keep as u32 };
        StackBatch { ends: Some((rest, tail)), len }
    }

    /// Appends another batch.
    pub(crate) fn append(&mut self, other: StackBatch<N>) {
        let Some((other_head, other_tail)) = other.ends else { return };
        self.len += other.len;
        self.ends = match self.ends {
            None => other.ends,
            Some((head, tail)) => {
                // SAFETY: the last node of this batch, which owns the nodes of `other` too now.
                unsafe { N::set_next(tail, Some(other_head)) };
                Some((head, other_tail))
            }
        };
    }

    /// Calls `f` with each node, first to last. `f` may use the node, but not its links.
    pub(crate) fn for_each(&self, mut f: impl FnMut(NonNull<N>)) {
        let mut at = self.ends.map(|(head, _)| head);
        while let Some(node) = at {
            f(node);
            // SAFETY: a node of this batch, linked by `push` or `append`.
            at = unsafe { N::next(node) };
        }
    }
}

/// What the lock of a [`StackPool`] guards: a stack of batches.
pub(crate) struct PoolState<N: BatchNode> {
    /// First node of the batch that was put last.
    top: Option<NonNull<N>>,
    /// Nodes in all batches.
    len: usize,
    /// The lowest `len` since the last call of [`StackPool::unneeded`].
    low: usize,
}

// SAFETY: the pool owns its nodes (invariant 1).
unsafe impl<N: BatchNode + Send> Send for PoolState<N> {}

impl<N: BatchNode> PoolState<N> {
    pub(crate) const fn new() -> Self {
        PoolState { top: None, len: 0, low: 0 }
    }

    fn put(&mut self, batch: StackBatch<N>) {
        let Some((head, tail)) = batch.ends else { return };
        // SAFETY: the pool owns the batch's nodes from here on; only the head gets batch links.
        unsafe { N::set_batch(head, BatchLinks { below: self.top, tail, len: batch.len }) };
        self.top = Some(head);
        self.len += batch.len();
    }

    /// Takes batches while they fit in `want`, and the first one in any case.
    fn take(&mut self, want: usize) -> StackBatch<N> {
        let mut taken = StackBatch::new();
        while let Some(head) = self.top {
            // SAFETY: the pool owns the head of a batch in it, and `put` has set its links.
            let links = unsafe { N::batch(head) };
            if !taken.is_empty() && taken.len() + links.len as usize > want {
                break;
            }
            self.top = links.below;
            self.len -= links.len as usize;
            taken.append(StackBatch { ends: Some((head, links.tail)), len: links.len });
        }
        self.low = self.low.min(self.len);
        taken
    }

    /// Takes a single node; the rest of its batch stays.
    fn take_one(&mut self) -> Option<NonNull<N>> {
        let head = self.top?;
        // SAFETY: as in `take`.
        let links = unsafe { N::batch(head) };
        self.top = links.below;
        self.len -= links.len as usize;
        let mut batch = StackBatch { ends: Some((head, links.tail)), len: links.len };
        let node = batch.pop();
        self.put(batch);
        self.low = self.low.min(self.len);
        node
    }
}

/// See the head of the file.
pub(crate) struct StackPool<N: BatchNode> {
    state: Lock<PoolState<N>>,
}

impl<N: BatchNode> StackPool<N> {
    /// Makes a pool from a lock around an empty state: so this is `const` with the runtime's lock,
    /// and compiles with loom's lock, whose constructor is not `const`.
    pub(crate) const fn new(state: Lock<PoolState<N>>) -> Self {
        StackPool { state }
    }

    /// Returns whether `more` nodes would fit in `max` now. A hint: another thread may put some.
    pub(crate) fn has_room(&self, more: usize, max: usize) -> bool {
        self.state.lock().len + more <= max
    }

    /// Adds the batch, or returns it if the pool would have more than `max` nodes.
    #[must_use = "the caller still owns a batch that did not fit"]
    pub(crate) fn put(&self, batch: StackBatch<N>, max: usize) -> Option<StackBatch<N>> {
        let mut state = self.state.lock();
        if state.len + batch.len() > max {
            return Some(batch);
        }
        state.put(batch);
        None
    }

    /// Takes about `want` nodes (whole batches: at least one batch, and more than `want` nodes only
    /// if a single batch is that long). If the pool is empty, runs `or` while it still is
    /// (invariant 4).
    pub(crate) fn take_or_else<R>(
        &self,
        want: usize,
        or: impl FnOnce() -> R,
    ) -> Result<StackBatch<N>, R> {
        let mut state = self.state.lock();
        let batch = state.take(want);
        if batch.is_empty() { Err(or()) } else { Ok(batch) }
    }

    /// Takes one node, or runs `or` as [`StackPool::take_or_else`] does.
    pub(crate) fn take_one_or_else<R>(&self, or: impl FnOnce() -> R) -> Result<NonNull<N>, R> {
        let mut state = self.state.lock();
        state.take_one().ok_or_else(or)
    }

    /// Returns how many nodes the pool had at every moment since the last call.
    pub(crate) fn unneeded(&self) -> usize {
        let mut state = self.state.lock();
        let len = state.len;
        std::mem::replace(&mut state.low, len)
    }

    /// Returns the number of nodes in the pool.
    pub(crate) fn len(&self) -> usize {
        self.state.lock().len
    }
}
