//! The depot: a pool between the Ps' caches, traded in whole batches.
//!
//! A P whose cache runs over puts half of it here; a P whose cache ran dry takes such a batch. A
//! batch is a chain of nodes whose first node also carries the chain's length and last node, so
//! both directions are O(1) under the lock, whatever the batch's size: the lock is held for two or
//! three cache lines, not for a walk over 32 cold headers.
//!
//! ```text
//!   PoolState.top ─▶ A1 ──next──▶ A2 ──▶ A3        a batch: head A1 carries {len 3, tail A3, below B1}
//!                │below
//!                ▼
//!                B1 ──next──▶ B2               the batch under it
//! ```
//!
//! Invariants:
//! 1. A node is in exactly one place: a batch in someone's hands, or the state. Whoever holds the
//!    [`Batch`] owns its nodes and is the only one to touch their links.
//! 2. `PoolState::len` is the sum of the lengths on the state and never exceeds the `max` given to
//!    `put`.
//! 3. A batch is never empty, except in the hands of its maker.
//! 4. [`StackPool::take_or_else`] runs its second choice under the lock, so the depot *is* empty at
//!    that moment: a caller who knows that "depot + second choice" has something, gets it. Looking
//!    at one after the other would miss a batch that moves meanwhile.
//!
//! This file names nothing of the kernel or of stacks: the lock comes through `crate::shim`, the
//! links through [`BatchNode`]. `crates/trefoil-model` includes it as it is, with loom's lock and nodes
//! made of loom's cells.
//!
//! Rejected: a lock-free stack of batches. Its ABA problem needs a tag or hazard pointers, and the
//! depot is visited once in 32 stacks: the lock is less than a nanosecond a stack.

use std::ptr::NonNull;

use crate::sys::lock::Lock;

/// What the first node of a batch on the state carries.
pub(crate) struct BatchLinks<N> {
    below: Option<NonNull<N>>,
    tail: NonNull<N>,
    len: u32,
}

impl<N> Clone for BatchLinks<N> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<N> Copy for BatchLinks<N> {}

/// A thing that can be chained: it has room for a `next` link and for [`BatchLinks`].
///
/// # Safety
/// A getter returns what the last setter on the same node stored.
pub(crate) unsafe trait BatchNode: Sized {
    /// # Safety
    /// The caller owns the node (invariant 1), and `set_next` was called on it.
    unsafe fn next(this: NonNull<Self>) -> Option<NonNull<Self>>;
    /// # Safety
    /// The caller owns the node.
    unsafe fn set_next(this: NonNull<Self>, next: Option<NonNull<Self>>);
    /// # Safety
    /// The caller owns the node, and `set_batch` was called on it.
    unsafe fn batch(this: NonNull<Self>) -> BatchLinks<Self>;
    /// # Safety
    /// The caller owns the node.
    unsafe fn set_batch(this: NonNull<Self>, links: BatchLinks<Self>);
}

/// An owned chain of nodes, newest first. Dropping it forgets the nodes, which is a leak.
#[must_use]
pub(crate) struct Batch<N: BatchNode> {
    /// First and last node.
    ends: Option<(NonNull<N>, NonNull<N>)>,
    len: u32,
}

// SAFETY: a batch owns its nodes (invariant 1); moving it moves them.
unsafe impl<N: BatchNode + Send> Send for Batch<N> {}

impl<N: BatchNode> Batch<N> {
    pub(crate) const fn new() -> Self {
        Batch { ends: None, len: 0 }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Puts a node in front.
    ///
    /// # Safety
    /// The caller owns `node`; the batch does from now on.
    #[inline]
    pub(crate) unsafe fn push(&mut self, node: NonNull<N>) {
        let (next, tail) = match self.ends {
            Some((head, tail)) => (Some(head), tail),
            None => (None, node),
        };
        // SAFETY: ours by the contract.
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
    pub(crate) fn split_off(&mut self, keep: usize) -> Batch<N> {
        debug_assert!(keep > 0);
        let Some((head, tail)) = self.ends else { return Batch::new() };
        if keep >= self.len() {
            return Batch::new();
        }
        let mut last = head;
        for _ in 1..keep {
            // SAFETY: `keep < len`, so this node has a successor in our own chain.
            last = unsafe { N::next(last) }.expect("a chain is as long as its len");
        }
        // SAFETY: as above: `last` is ours and not the tail.
        let rest = unsafe { N::next(last) }.expect("a chain is as long as its len");
        // SAFETY: as above.
        unsafe { N::set_next(last, None) };
        let len = self.len - keep as u32;
        *self = Batch { ends: Some((head, last)), len: keep as u32 };
        Batch { ends: Some((rest, tail)), len }
    }

    /// Puts another batch behind this one.
    pub(crate) fn append(&mut self, other: Batch<N>) {
        let Some((other_head, other_tail)) = other.ends else { return };
        self.len += other.len;
        self.ends = match self.ends {
            None => other.ends,
            Some((head, tail)) => {
                // SAFETY: our own last node; `other` was given to us.
                unsafe { N::set_next(tail, Some(other_head)) };
                Some((head, other_tail))
            }
        };
    }

    /// Calls `f` with each node, first to last. `f` may touch the node, not its links.
    pub(crate) fn for_each(&self, mut f: impl FnMut(NonNull<N>)) {
        let mut at = self.ends.map(|(head, _)| head);
        while let Some(node) = at {
            f(node);
            // SAFETY: a node of this batch, linked by `push` or `append`.
            at = unsafe { N::next(node) };
        }
    }
}

/// What the depot's lock guards: a stack of batches.
pub(crate) struct PoolState<N: BatchNode> {
    top: Option<NonNull<N>>,
    len: usize,
    /// The least `len` since somebody asked.
    low: usize,
}

// SAFETY: the state owns the nodes on it (invariant 1).
unsafe impl<N: BatchNode + Send> Send for PoolState<N> {}

impl<N: BatchNode> PoolState<N> {
    pub(crate) const fn new() -> Self {
        PoolState { top: None, len: 0, low: 0 }
    }

    fn put(&mut self, batch: Batch<N>) {
        let Some((head, tail)) = batch.ends else { return };
        // SAFETY: the batch's nodes are ours from here on; only its head gets the batch links.
        unsafe { N::set_batch(head, BatchLinks { below: self.top, tail, len: batch.len }) };
        self.top = Some(head);
        self.len += batch.len();
    }

    /// Takes batches while they fit in `want`, and the first one in any case.
    fn take(&mut self, want: usize) -> Batch<N> {
        let mut taken = Batch::new();
        while let Some(head) = self.top {
            // SAFETY: a batch head on the state is the state's, and `put` set its links.
            let links = unsafe { N::batch(head) };
            if !taken.is_empty() && taken.len() + links.len as usize > want {
                break;
            }
            self.top = links.below;
            self.len -= links.len as usize;
            taken.append(Batch { ends: Some((head, links.tail)), len: links.len });
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
        let mut batch = Batch { ends: Some((head, links.tail)), len: links.len };
        let node = batch.pop();
        self.put(batch);
        self.low = self.low.min(self.len);
        node
    }
}

/// The pool. See the head of the file.
pub(crate) struct StackPool<N: BatchNode> {
    state: Lock<PoolState<N>>,
}

impl<N: BatchNode> StackPool<N> {
    /// Made of a lock around an empty state, so that this is `const` with our lock and compiles
    /// with loom's, whose constructor is not.
    pub(crate) const fn new(state: Lock<PoolState<N>>) -> Self {
        StackPool { state }
    }

    /// Whether `more` nodes would fit now. A hint: `put` decides.
    pub(crate) fn has_room(&self, more: usize, max: usize) -> bool {
        self.state.lock().len + more <= max
    }

    /// Pools the batch, or gives it back if it would not fit in `max` nodes.
    #[must_use = "a batch that did not fit is still the caller's"]
    pub(crate) fn put(&self, batch: Batch<N>, max: usize) -> Option<Batch<N>> {
        let mut state = self.state.lock();
        if state.len + batch.len() > max {
            return Some(batch);
        }
        state.put(batch);
        None
    }

    /// Takes about `want` nodes (whole batches: at least one, and more than `want` only if a single
    /// batch is that long). If there is none, runs `or` while there still is none (invariant 4).
    pub(crate) fn take_or_else<R>(
        &self,
        want: usize,
        or: impl FnOnce() -> R,
    ) -> Result<Batch<N>, R> {
        let mut state = self.state.lock();
        let batch = state.take(want);
        if batch.is_empty() { Err(or()) } else { Ok(batch) }
    }

    /// Takes one node, or runs `or` as [`StackPool::take_or_else`] does.
    pub(crate) fn take_one_or_else<R>(&self, or: impl FnOnce() -> R) -> Result<NonNull<N>, R> {
        let mut state = self.state.lock();
        state.take_one().ok_or_else(or)
    }

    /// How many nodes were here all the time since the last call.
    pub(crate) fn unneeded(&self) -> usize {
        let mut state = self.state.lock();
        let len = state.len;
        std::mem::replace(&mut state.low, len)
    }

    /// Nodes in the pool.
    pub(crate) fn len(&self) -> usize {
        self.state.lock().len
    }
}
