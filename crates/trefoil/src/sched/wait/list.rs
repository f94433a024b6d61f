//! Queues of sleepers: the primitives of `sync`, descriptors and futexes wait in them.
//!
//! A sleeper is a goroutine, a plain thread or a task that waits. Its [`Node`] is in its own frame;
//! that of a task is in its future (`task_node.rs`). A [`List`] links nodes, first in, first out. A
//! lock of the list's owner guards it: the lock of a bucket of `table.rs` (mutexes and read-write
//! locks, which are one word each), or a lock in the primitive itself. Channels have a list of
//! their own, which is smaller and can be probed without its lock: see `chan/queue.rs`.
//!
//! # The life of a node
//! | state | may be touched by |
//! |---|---|
//! | not linked, sleeper awake | the sleeper |
//! | linked | the holder of the list's lock |
//! | [`Taken`] | its taker, until it has woken the sleeper |
//! | [ended](Node::has_ended) | the future of the task |
//!
//! A *taker* is the goroutine or thread that takes a node out of the list in order to wake its
//! sleeper. A taker or the deadline ends a sleep, whichever claims it first (`wait/mod.rs`). There
//! are no spurious wake-ups. A taker that loses the claim unlinks the node, and takes the next one.
//!
//! A goroutine that still waits when its runtime shuts down is *orphaned*: it never runs again.
//! Takers pass it over, because a lock or a permit that is handed to it would be lost, and all
//! sleepers behind it would wait for ever. (A goroutine that is taken *before* its runtime shuts
//! down keeps what it was given.) `shutdown.rs` lists the exceptions.
//!
//! Invariants:
//! 1. A linked node is alive: its sleeper leaves the frame only after the node was taken and the
//!    sleeper woken, or after the sleeper has unlinked the node itself.
//! 2. Locks of lists are taken inside the runtime (or on a plain thread). Their holder does not
//!    allocate, free, or wake. A taken sleeper is woken after the lock is released.

use crate::sched::Rt;
use crate::sched::g::G;
use crate::sched::wait::reason::WaitReason;
use crate::sched::wait::{self, Waiter};
use crate::sys::clock::{NEVER, Nanos};
#[cfg(feature = "std")]
use crate::sys::frame_waiter::{ClockTime, FrameWaiter};
use std::cell::Cell;
use std::ptr::{NonNull, null};
use std::sync::atomic::{AtomicBool, Ordering};

/// The winner of a wait that a taker claimed. The only other one is `Waiter::TIMED_OUT`.
const TAKEN: u16 = 1;

/// One sleeper. See the head of the file.
pub(crate) struct Node {
    /// The sleeper; none (0) before its first sleep.
    waiter: Cell<Waiter>,
    is_goroutine: Cell<bool>,
    /// The neighbours in the list, or in a [`Batch`].
    next: Cell<*const Node>,
    prev: Cell<*const Node>,
    /// The node is in a list, or in a taker's [`Batch`].
    linked: Cell<bool>,
    /// A taker has the node. Guarded by the lock of its list.
    taken: Cell<bool>,
    /// The taker has stored its word, and does not touch the node any more.
    ended: AtomicBool,
    /// The sleeper waits for something that the whole process shares (a futex, a C lock). If it is
    /// a goroutine and is taken, it runs, even if its runtime shuts down before.
    #[cfg(feature = "std")]
    of_process: bool,
    /// The taker's message to the sleeper.
    word: Cell<u32>,
    /// What the sleeper wants: the number of permits of a semaphore, or the mutex of a condition
    /// variable.
    pub(crate) weight: usize,
    /// When the sleeper began to wait; 0 if the primitive does not use it.
    pub(crate) since: Cell<Nanos>,
    /// If the node is the first of its queue (`table.rs`): the queue, its key, the next queue.
    pub(crate) queue: Cell<List>,
    pub(crate) key: Cell<usize>,
    pub(crate) chain: Cell<*const Node>,
}

/// How a [`Node::sleep`] ended.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WaitResult {
    /// The sleep did not begin: `enqueue` returned false.
    NotQueued,
    /// A taker woke the sleeper, with this word.
    Woken(u32),
    /// The deadline passed, and the node is in no list.
    TimedOut,
}

impl Node {
    pub(crate) fn new(weight: usize) -> Node {
        Node {
            waiter: Cell::new(Waiter::sole(0)),
            is_goroutine: Cell::new(false),
            next: Cell::new(null()),
            prev: Cell::new(null()),
            linked: Cell::new(false),
            taken: Cell::new(false),
            ended: AtomicBool::new(false),
            #[cfg(feature = "std")]
            of_process: false,
            word: Cell::new(0),
            weight,
            since: Cell::new(0),
            queue: Cell::new(List::new()),
            key: Cell::new(0),
            chain: Cell::new(null()),
        }
    }

    /// Creates a node for a wait that threads and all runtimes share. There, a wake-up must not be
    /// lost with a goroutine whose runtime ends.
    #[cfg(feature = "std")]
    pub(crate) fn of_process(weight: usize) -> Node {
        Node { of_process: true, ..Node::new(weight) }
    }

    /// Sleeps in a list until a taker wakes the sleeper, or until `deadline`.
    ///
    /// `enqueue` links the node under the list's lock, or returns false. `withdraw` unlinks it
    /// under the same lock, if it is still linked. Both run inside the runtime, and get the `Rt`
    /// for sleepers that they may have to wake (a condition variable unlocks its mutex).
    #[inline]
    pub(crate) fn sleep(
        &self,
        reason: WaitReason,
        deadline: Nanos,
        enqueue: impl FnOnce(Option<Rt>) -> bool,
        withdraw: impl FnOnce(Option<Rt>),
    ) -> WaitResult {
        if deadline != NEVER {
            return self.sleep_until(reason, deadline, enqueue, withdraw);
        }
        self.sleep_without_deadline(reason, enqueue)
    }

    /// [`Node::sleep`] without a deadline.
    #[inline]
    pub(crate) fn sleep_without_deadline(
        &self,
        reason: WaitReason,
        enqueue: impl FnOnce(Option<Rt>) -> bool,
    ) -> WaitResult {
        let here = Rt::enter();
        self.is_goroutine.set(here.is_some());
        let mut sleeps = false;
        let here = wait::block_in(here, reason, |sleeper| {
            self.waiter.set(Waiter::sole(sleeper));
            sleeps = enqueue(here);
            sleeps
        });
        self.return_to_user(here);
        if sleeps { WaitResult::Woken(self.word.get()) } else { WaitResult::NotQueued }
    }

    /// [`Node::sleep`] with a deadline. Not inlined: a sleep without one needs only a third of its
    /// frame, and the frames of a parked goroutine should fit in its one page.
    #[inline(never)]
    pub(crate) fn sleep_until(
        &self,
        reason: WaitReason,
        deadline: Nanos,
        enqueue: impl FnOnce(Option<Rt>) -> bool,
        withdraw: impl FnOnce(Option<Rt>),
    ) -> WaitResult {
        let here = Rt::enter();
        self.is_goroutine.set(here.is_some());
        // From an earlier sleep.
        self.taken.set(false);
        let (winner, here) = wait::wait_in(here, reason, deadline, |waiter| {
            self.waiter.set(waiter);
            enqueue(here)
        });
        let slept = match winner {
            None => WaitResult::NotQueued,
            Some(Waiter::TIMED_OUT) => {
                withdraw(here);
                WaitResult::TimedOut
            }
            Some(_) => WaitResult::Woken(self.word.get()),
        };
        self.return_to_user(here);
        slept
    }

    /// Returns to user code. A goroutine that was promised a run (`Sched::promise_run`) is not
    /// stopped on the way, even if its runtime shuts down.
    fn return_to_user(&self, here: Option<Rt>) {
        #[cfg(feature = "std")]
        if self.of_process
            && let Some(rt) = here
            && rt.sched().keep_promise(rt.g())
        {
            return rt.leave_without_yield();
        }
        wait::leave(here);
    }

    /// As [`Node::sleep`], on a plain thread or on a goroutine that must not park: the thread
    /// sleeps in the kernel, on a word in this frame, and nothing is allocated. `withdraw` is
    /// [`List::withdraw`] under the list's lock: there is no claim word in a frame, so that lock
    /// decides between a taker and the deadline. The node must be new.
    #[cfg(feature = "std")]
    pub(crate) fn sleep_in_kernel(
        &self,
        limit: Option<ClockTime>,
        enqueue: impl FnOnce() -> bool,
        withdraw: impl FnOnce() -> bool,
    ) -> WaitResult {
        let frame = FrameWaiter::new();
        self.waiter.set(Waiter::sole(wait::frame_sleeper(&frame)));
        self.is_goroutine.set(false);
        if !enqueue() {
            return WaitResult::NotQueued;
        }
        if !frame.wait(limit) {
            if withdraw() {
                return WaitResult::TimedOut;
            }
            // A taker came first: it still needs the frame.
            frame.wait(None);
        }
        WaitResult::Woken(self.word.get())
    }

    /// Returns whether the sleeper can still be woken. The caller holds the lock of its list.
    #[cfg(feature = "std")]
    fn is_live(&self) -> bool {
        !self.is_orphaned() && self.waiter.get().is_open()
    }

    /// Claims the sleep for the caller, which holds the list's lock. Returns false if the deadline
    /// has passed, or the sleeper's runtime has just ended.
    fn claim(&self) -> bool {
        let claimed = self.waiter.get().claim(TAKEN);
        #[cfg(feature = "std")]
        let claimed = claimed && (!self.of_process || self.waiter.get().promise_run());
        self.taken.set(claimed);
        claimed
    }

    /// Returns whether a taker has the node. The caller has held the list's lock since the node was
    /// last in the list, so the answer does not change any more.
    pub(super) fn was_taken(&self) -> bool {
        self.taken.get()
    }

    /// Prepares the node for a wait of the task with this sleeper word.
    pub(super) fn prepare_for_task(&self, sleeper: usize) {
        debug_assert!(!self.linked.get());
        self.taken.set(false);
        // Relaxed: no other thread knows the node yet.
        self.ended.store(false, Ordering::Relaxed);
        self.waiter.set(Waiter::sole(sleeper));
    }

    /// Makes another task wait in place of the present one. Returns false if a taker has the node.
    /// The caller holds the lock of the list.
    pub(super) fn change_task(&self, sleeper: usize) -> bool {
        let waits = !self.taken.get();
        if waits {
            self.waiter.set(Waiter::sole(sleeper));
        }
        waits
    }

    /// Returns whether the taker has finished with the node. For the future of a task.
    #[inline]
    pub(super) fn has_ended(&self) -> bool {
        // Acquire: pairs with `Taken::wake`.
        self.ended.load(Ordering::Acquire)
    }

    /// Returns the taker's word, after the wait has ended.
    pub(super) fn taker_word(&self) -> u32 {
        self.word.get()
    }

    /// Returns whether the sleeper is an orphaned goroutine. The caller holds the list's lock.
    fn is_orphaned(&self) -> bool {
        self.waiter.get().is_orphaned()
    }
}

/// Sleeps in several lists at once, with a new node in each, until a taker takes one of the nodes,
/// or until `deadline`. `enqueue` links a node under its list's lock. If it returns false, the
/// sleep does not begin. `withdraw` unlinks a node under that lock, if it is still linked. Both run
/// inside the runtime.
#[cfg(feature = "std")]
pub(crate) fn sleep_in_any(
    nodes: &[Node],
    reason: WaitReason,
    deadline: Nanos,
    enqueue: impl Fn(usize, &Node) -> bool,
    withdraw: impl Fn(usize, &Node),
) {
    let here = Rt::enter();
    let withdraw_all = || nodes.iter().enumerate().for_each(|(i, node)| withdraw(i, node));
    let (winner, here) = wait::wait_in(here, reason, deadline, |waiter| {
        for (i, node) in nodes.iter().enumerate() {
            node.waiter.set(waiter);
            node.is_goroutine.set(here.is_some());
            if !enqueue(i, node) {
                // If a taker was faster, its wake-up is on its way, and the sleeper must wait for
                // it.
                let sleeps = !waiter.claim(TAKEN);
                if !sleeps {
                    withdraw_all();
                }
                return sleeps;
            }
        }
        true
    });
    if winner.is_some() {
        withdraw_all();
    }
    wait::leave(here);
}

/// Nodes, first in, first out. Doubly linked, because a deadline unlinks a node from the middle.
#[derive(Clone, Copy)]
pub(crate) struct List {
    head: *const Node,
    tail: *const Node,
    len: u32,
}

// SAFETY: the nodes belong to the holder of the list's lock, on any thread (the table in the head),
// and are alive (invariant 1).
unsafe impl Send for List {}

impl List {
    pub(crate) const fn new() -> List {
        List { head: null(), tail: null(), len: 0 }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.head.is_null()
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    pub(crate) fn first(&self) -> *const Node {
        self.head
    }

    pub(crate) fn push_back(&mut self, node: &Node) {
        self.link(node, self.tail, null());
    }

    pub(crate) fn push_front(&mut self, node: &Node) {
        self.link(node, null(), self.head);
    }

    fn link(&mut self, node: &Node, prev: *const Node, next: *const Node) {
        debug_assert!(!node.linked.get());
        node.linked.set(true);
        self.len += 1;
        node.prev.set(prev);
        node.next.set(next);
        self.tie(prev, node);
        self.tie_back(node, next);
    }

    /// Makes `next` follow `prev`. A null `prev` stands for the beginning of the list.
    fn tie(&mut self, prev: *const Node, next: *const Node) {
        // SAFETY: linked nodes are alive (invariant 1), and the caller holds the lock.
        match unsafe { prev.as_ref() } {
            Some(prev) => prev.next.set(next),
            None => self.head = next,
        }
    }

    /// Makes `prev` precede `next`. A null `next` stands for the end of the list.
    fn tie_back(&mut self, prev: *const Node, next: *const Node) {
        // SAFETY: as in `tie`.
        match unsafe { next.as_ref() } {
            Some(next) => next.prev.set(prev),
            None => self.tail = prev,
        }
    }

    /// Unlinks `node`, and returns whether it was linked.
    pub(crate) fn remove(&mut self, node: &Node) -> bool {
        if !node.linked.replace(false) {
            return false;
        }
        self.len -= 1;
        self.tie(node.prev.get(), node.next.get());
        self.tie_back(node.prev.get(), node.next.get());
        true
    }

    /// Unlinks `node`, and returns whether it did. If a taker has the node, it returns false: the
    /// wake-up is on its way, and the sleeper must wait for it.
    pub(crate) fn withdraw(&mut self, node: &Node) -> bool {
        !node.taken.get() && self.remove(node)
    }

    /// Takes the first sleeper that can still be woken, if `wanted` returns true for it. Unlinks
    /// the orphaned sleepers, and those whose deadline has passed, that it finds before.
    #[must_use]
    pub(crate) fn take_first_if(&mut self, wanted: impl Fn(&Node) -> bool) -> Option<Taken> {
        loop {
            // SAFETY: invariant 1, and the caller holds the lock.
            let node = unsafe { self.head.as_ref()? };
            let orphaned = node.is_orphaned();
            if !orphaned && !wanted(node) {
                return None;
            }
            self.remove(node);
            if !orphaned && node.claim() {
                return Some(Taken(NonNull::from(node)));
            }
        }
    }

    /// Unlinks the orphaned sleepers at the front. Returns whether there were any.
    pub(crate) fn drop_orphaned(&mut self) -> bool {
        let before = self.len;
        // SAFETY: invariant 1, and the caller holds the lock.
        while let Some(node) = unsafe { self.head.as_ref() }.filter(|node| node.is_orphaned()) {
            self.remove(node);
        }
        self.len < before
    }

    /// Returns the sleepers that can still be woken: their deadline has not passed, and they are
    /// not orphaned. The caller holds the lock.
    #[cfg(feature = "std")]
    pub(crate) fn live(&self) -> impl Iterator<Item = &Node> {
        // SAFETY: invariant 1, and the caller holds the lock.
        let first = unsafe { self.head.as_ref() };
        // SAFETY: as above.
        std::iter::successors(first, |node| unsafe { node.next.get().as_ref() })
            .filter(|node| node.is_live())
    }

    /// Takes the first sleeper that can still be woken.
    #[must_use]
    pub(crate) fn take_first(&mut self) -> Option<Taken> {
        self.take_first_if(|_| true)
    }

    /// Takes all sleepers that can still be woken.
    pub(crate) fn take_all(&mut self) -> Batch {
        let mut batch = Batch::new();
        while let Some(taken) = self.take_first() {
            batch.push(taken);
        }
        batch
    }
}

/// A sleeper that was taken from its list, and must be woken.
#[must_use = "a sleeper that was taken must be woken"]
pub(crate) struct Taken(NonNull<Node>);

impl Taken {
    pub(crate) fn node(&self) -> &Node {
        // SAFETY: the node belongs to the taker until it wakes the sleeper (the table in the head).
        unsafe { self.0.as_ref() }
    }

    /// Returns whether the sleeper is a goroutine.
    pub(crate) fn is_goroutine(&self) -> bool {
        self.node().is_goroutine.get()
    }

    /// Returns whether the sleeper may be moved to another list: only a taker can end its sleep.
    pub(crate) fn may_move(&self) -> bool {
        self.node().waiter.get().is_sole()
    }

    /// Returns the sleeper, if it is a goroutine.
    pub(crate) fn goroutine(&self) -> Option<&'static G> {
        self.node().waiter.get().goroutine()
    }

    /// Moves the sleeper to another list, whose lock the caller holds. Only if [`Taken::may_move`].
    pub(crate) fn move_to(self, list: &mut List) {
        debug_assert!(self.may_move());
        list.push_back(self.node());
    }

    /// Wakes the sleeper with a word. `here` is the caller's `Rt::enter()`.
    pub(crate) fn wake(self, here: Option<Rt>, word: u32) {
        let node = self.node();
        node.word.set(word);
        node.linked.set(false);
        let sleeper = node.waiter.get().sleeper();
        // The last access to the node: a task may be polled before its wake-up, and a goroutine's
        // node may be gone after it. Release: pairs with `has_ended`.
        node.ended.store(true, Ordering::Release);
        wait::wake_here(here, sleeper);
    }
}

/// Sleepers that were taken together, in their order.
#[must_use = "sleepers that were taken must be woken"]
pub(crate) struct Batch(List);

impl Batch {
    pub(crate) const fn new() -> Batch {
        Batch(List::new())
    }

    pub(crate) fn push(&mut self, taken: Taken) {
        self.0.push_back(taken.node());
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len as usize
    }

    /// Returns whether `wanted` is true for any of the nodes.
    #[cfg(feature = "std")]
    pub(crate) fn any(&self, wanted: impl Fn(&Node) -> bool) -> bool {
        // SAFETY: taken nodes belong to the batch.
        let first = unsafe { self.0.head.as_ref() };
        // SAFETY: as above.
        std::iter::successors(first, |node| unsafe { node.next.get().as_ref() }).any(wanted)
    }

    /// Returns the weight of the nodes, if there are several and all have the same.
    pub(crate) fn weight_of_all(&self) -> Option<usize> {
        // SAFETY: taken nodes belong to the batch.
        let first = unsafe { self.0.head.as_ref()? };
        // SAFETY: as above.
        let next = |node: &&Node| unsafe { node.next.get().as_ref() };
        let same = std::iter::successors(Some(first), next).all(|node| node.weight == first.weight);
        (same && self.len() > 1).then_some(first.weight)
    }

    /// Removes the first sleeper.
    pub(crate) fn pop(&mut self) -> Option<Taken> {
        let first = NonNull::new(self.0.head.cast_mut())?;
        // SAFETY: taken nodes belong to the batch.
        self.0.remove(unsafe { first.as_ref() });
        Some(Taken(first))
    }

    /// Wakes the sleepers in their order. Returns whether a goroutine was among them.
    pub(crate) fn wake_all(self, here: Option<Rt>, word: u32) -> bool {
        let mut goroutines = false;
        let mut next = self.0.head;
        while let Some(node) = NonNull::new(next.cast_mut()) {
            let taken = Taken(node);
            next = taken.node().next.get();
            goroutines |= taken.is_goroutine();
            taken.wake(here, word);
        }
        goroutines
    }
}
