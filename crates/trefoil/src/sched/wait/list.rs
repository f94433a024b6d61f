//! Queues of sleepers: what the primitives of `sync` and descriptors wait in.
//!
//! A sleeper lies in a [`Node`] in its own frame; a [`List`] links nodes, first in, first out. The
//! list is behind a lock of its owner: a bucket of `table.rs` (mutexes and read-write locks, which
//! are one word each), or a lock in the primitive itself.
//!
//! # The life of a node
//! | state | who may touch it |
//! |---|---|
//! | not linked, sleeper awake | the sleeper |
//! | linked | whoever holds the list's lock |
//! | [`Taken`] | its taker, until it has woken the sleeper |
//!
//! A sleep ends by a taker or by its deadline, whoever claims it first (`sched/wait.rs`); never for
//! no reason. A taker that loses unlinks the node all the same, and takes the next.
//!
//! A goroutine whose runtime was dropped never runs again. Takers pass it over: a lock that is handed
//! to it, or a permit, would be gone, and with it all who wait behind it. (One that is taken
//! *before* its runtime is dropped keeps what it was given, like any goroutine that is left.)
//!
//! Invariants:
//! 1. A linked node is alive: its sleeper leaves the frame only after it was taken and woken, or
//!    after it has unlinked the node itself.
//! 2. Locks of lists are taken inside the runtime (or on a plain thread), and nothing is allocated,
//!    freed or woken under them. A taken sleeper is woken after the lock is given back.

use crate::sched::Rt;
use crate::sched::wait::reason::WaitReason;
use crate::sched::wait::{self, Waiter};
use crate::sys::clock::{NEVER, Nanos};
#[cfg(feature = "std")]
use crate::sys::frame_waiter::{ClockTime, FrameWaiter};
use std::cell::Cell;
use std::ptr::{NonNull, null};

/// The winner of a claim by a taker; the other one is `Waiter::TIMED_OUT`.
const TAKEN: u16 = 1;

/// One sleeper. See the head of the file.
pub(crate) struct Node {
    /// Nobody's before its first sleep.
    waiter: Cell<Waiter>,
    goroutine: Cell<bool>,
    next: Cell<*const Node>,
    prev: Cell<*const Node>,
    linked: Cell<bool>,
    /// A taker has it. It may be in the taker's [`Batch`], and count as linked there. Under the lock of its list.
    #[cfg(feature = "std")]
    taken: Cell<bool>,
    /// What it waits for belongs to the whole process: if it is a goroutine and is taken, it runs, even if its runtime
    /// ends before.
    #[cfg(feature = "std")]
    of_process: bool,
    /// What the taker wants to say.
    word: Cell<u32>,
    /// What the sleeper wants: permits, for a semaphore; its mutex, for a condition variable.
    pub(crate) weight: usize,
    /// Since when it wants it; 0 if nobody asks.
    pub(crate) since: Cell<Nanos>,
    /// Where the node is first of its queue (`table.rs`): the queue, its key, the next queue.
    pub(crate) queue: Cell<List>,
    pub(crate) key: Cell<usize>,
    pub(crate) chain: Cell<*const Node>,
}

/// How a [`Node::sleep`] ended.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Slept {
    /// It did not begin: `enqueue` said no.
    No,
    /// Taken, with the taker's word.
    Woken(u32),
    /// The deadline passed, and the node is in no list.
    TimedOut,
}

impl Node {
    pub(crate) fn new(weight: usize) -> Node {
        Node {
            waiter: Cell::new(Waiter::sole(0)),
            goroutine: Cell::new(false),
            next: Cell::new(null()),
            prev: Cell::new(null()),
            linked: Cell::new(false),
            #[cfg(feature = "std")]
            taken: Cell::new(false),
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

    /// For a wait that threads and all runtimes share: a wake-up that a goroutine takes with it into the end of its
    /// runtime would be lost to the others.
    #[cfg(feature = "std")]
    pub(crate) fn of_process(weight: usize) -> Node {
        Node { of_process: true, ..Node::new(weight) }
    }

    /// Sleeps in a list until a taker comes, or until `deadline`.
    ///
    /// `enqueue` links the node under the list's lock, or says no. `withdraw` takes it out again
    /// under the same lock, if it is still linked. Both run inside the runtime, and get it for what
    /// they may have to wake (a condition variable gives its mutex back).
    pub(crate) fn sleep(
        &self,
        reason: WaitReason,
        deadline: Nanos,
        enqueue: impl FnOnce(Option<Rt>) -> bool,
        withdraw: impl FnOnce(Option<Rt>),
    ) -> Slept {
        let here = Rt::enter();
        self.goroutine.set(here.is_some());
        if deadline == NEVER {
            let mut sleeps = false;
            let here = wait::block_in(here, reason, |sleeper| {
                self.waiter.set(Waiter::sole(sleeper));
                sleeps = enqueue(here);
                sleeps
            });
            self.leave(here);
            return if sleeps { Slept::Woken(self.word.get()) } else { Slept::No };
        }
        let (winner, here) = wait::wait_in(here, reason, deadline, |waiter| {
            self.waiter.set(waiter);
            enqueue(here)
        });
        let slept = match winner {
            None => Slept::No,
            Some(Waiter::TIMED_OUT) => {
                withdraw(here);
                Slept::TimedOut
            }
            Some(_) => Slept::Woken(self.word.get()),
        };
        self.leave(here);
        slept
    }

    /// Back to user code; without stopping there if the sleeper was promised that it runs.
    fn leave(&self, here: Option<Rt>) {
        #[cfg(feature = "std")]
        if self.of_process
            && let Some(rt) = here
            && rt.sched().keep_promise(rt.g())
        {
            return rt.leave_without_yield();
        }
        wait::leave(here);
    }

    /// As [`Node::sleep`], on a plain thread or on a goroutine that must not park: the thread sleeps in the kernel, on
    /// a word in this frame, and nothing is allocated. `withdraw` is [`List::withdraw`] under the list's lock: there is
    /// no claim word in a frame, so that lock decides between a taker and the deadline. For a new node.
    #[cfg(feature = "std")]
    pub(crate) fn sleep_in_kernel(
        &self,
        limit: Option<ClockTime>,
        enqueue: impl FnOnce() -> bool,
        withdraw: impl FnOnce() -> bool,
    ) -> Slept {
        let frame = FrameWaiter::new();
        self.waiter.set(Waiter::sole(wait::frame_sleeper(&frame)));
        self.goroutine.set(false);
        if !enqueue() {
            return Slept::No;
        }
        if !frame.wait(limit) {
            if withdraw() {
                return Slept::TimedOut;
            }
            // It was taken at the last moment: its waker still needs the frame.
            frame.wait(None);
        }
        Slept::Woken(self.word.get())
    }

    /// Whether the sleeper, in a list whose lock the caller holds, can still be woken.
    #[cfg(feature = "std")]
    fn is_live(&self) -> bool {
        !self.is_abandoned() && self.waiter.get().is_open()
    }

    /// Under the list's lock. Returns false if its deadline has passed, or its runtime has just ended.
    fn claim(&self) -> bool {
        let claimed = self.waiter.get().claim(TAKEN);
        #[cfg(feature = "std")]
        let claimed = claimed && (!self.of_process || self.waiter.get().promise_run());
        #[cfg(feature = "std")]
        self.taken.set(claimed);
        claimed
    }

    /// Under the list's lock: it will never run again.
    fn is_abandoned(&self) -> bool {
        self.waiter.get().is_abandoned()
    }
}

/// Sleeps in several lists at once, with a new node in each, until a taker takes one of the nodes, or until `deadline`.
/// `enqueue` links a node under its list's lock, or says no; then the sleep does not begin. `withdraw` takes a node out
/// again under that lock, if it is still linked. Both run inside the runtime.
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
            node.goroutine.set(here.is_some());
            if !enqueue(i, node) {
                // If a taker was faster its wake-up is on its way, and must be awaited.
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

/// Runs `f` inside the runtime (on a plain thread there is none).
#[inline]
pub(crate) fn inside<R>(f: impl FnOnce(Option<Rt>) -> R) -> R {
    let here = Rt::enter();
    let r = f(here);
    wait::leave(here);
    r
}

/// Nodes, first in, first out. Doubly linked: a deadline takes a node from the middle.
#[derive(Clone, Copy)]
pub(crate) struct List {
    head: *const Node,
    tail: *const Node,
    len: u32,
}

// SAFETY: the nodes belong to whoever holds the list's lock (invariant 1), on any thread.
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

    /// Makes `next` follow `prev`; a null `prev` is the list's beginning.
    fn tie(&mut self, prev: *const Node, next: *const Node) {
        // SAFETY: linked nodes are alive (invariant 1), and we have the lock.
        match unsafe { prev.as_ref() } {
            Some(prev) => prev.next.set(next),
            None => self.head = next,
        }
    }

    /// Makes `prev` precede `next`; a null `next` is the list's end.
    fn tie_back(&mut self, prev: *const Node, next: *const Node) {
        // SAFETY: as in `tie`.
        match unsafe { next.as_ref() } {
            Some(next) => next.prev.set(prev),
            None => self.tail = prev,
        }
    }

    /// Takes `node` out, if it is (still) in.
    pub(crate) fn remove(&mut self, node: &Node) -> bool {
        if !node.linked.replace(false) {
            return false;
        }
        self.len -= 1;
        self.tie(node.prev.get(), node.next.get());
        self.tie_back(node.prev.get(), node.next.get());
        true
    }

    /// Takes `node` out unless a taker has it: then its wake-up is on its way, and must be awaited.
    #[cfg(feature = "std")]
    pub(crate) fn withdraw(&mut self, node: &Node) -> bool {
        !node.taken.get() && self.remove(node)
    }

    /// Takes the first one, if `wanted` likes it. Those whose deadline has passed, or whose runtime
    /// is gone, are dropped on the way.
    #[must_use]
    pub(crate) fn take_first_if(&mut self, wanted: impl Fn(&Node) -> bool) -> Option<Taken> {
        loop {
            // SAFETY: invariant 1, and we have the lock.
            let node = unsafe { self.head.as_ref()? };
            let abandoned = node.is_abandoned();
            if !abandoned && !wanted(node) {
                return None;
            }
            self.remove(node);
            if !abandoned && node.claim() {
                return Some(Taken(NonNull::from(node)));
            }
        }
    }

    /// Drops those at the front whose runtime is gone. True: there were some.
    pub(crate) fn drop_abandoned(&mut self) -> bool {
        let before = self.len;
        // SAFETY: invariant 1, and we have the lock.
        while let Some(node) = unsafe { self.head.as_ref() }.filter(|node| node.is_abandoned()) {
            self.remove(node);
        }
        self.len < before
    }

    /// The sleepers that can still be woken: their deadline has not passed, and their runtime is not gone.
    #[cfg(feature = "std")]
    pub(crate) fn live(&self) -> impl Iterator<Item = &Node> {
        // SAFETY: invariant 1, and the caller has the lock; the same for those that follow.
        let first = unsafe { self.head.as_ref() };
        // SAFETY: as above.
        std::iter::successors(first, |node| unsafe { node.next.get().as_ref() })
            .filter(|node| node.is_live())
    }

    /// Takes the first one.
    #[must_use]
    pub(crate) fn take_first(&mut self) -> Option<Taken> {
        self.take_first_if(|_| true)
    }

    /// Takes all.
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
        // SAFETY: ours until we wake it (the table in the head).
        unsafe { self.0.as_ref() }
    }

    /// Whether it is a goroutine.
    pub(crate) fn is_goroutine(&self) -> bool {
        self.node().goroutine.get()
    }

    /// Whether it may sleep on in another list: nothing but a taker can end its sleep.
    pub(crate) fn may_move(&self) -> bool {
        self.node().waiter.get().is_sole()
    }

    /// Under that list's lock, and only if it may.
    pub(crate) fn move_to(self, list: &mut List) {
        debug_assert!(self.may_move());
        list.push_back(self.node());
    }

    /// Wakes it with a word. `here` is where we are.
    pub(crate) fn wake(self, here: Option<Rt>, word: u32) {
        self.node().word.set(word);
        self.node().linked.set(false);
        // The last look at the node: the wake-up ends its life.
        wait::wake_here(here, self.node().waiter.get().sleeper());
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

    /// Whether any of them is as `wanted` says.
    #[cfg(feature = "std")]
    pub(crate) fn any(&self, wanted: impl Fn(&Node) -> bool) -> bool {
        // SAFETY: taken, so ours; the same for those that follow.
        let first = unsafe { self.0.head.as_ref() };
        // SAFETY: as above.
        std::iter::successors(first, |node| unsafe { node.next.get().as_ref() }).any(wanted)
    }

    /// The weight that all of them have, if it is the same and there are several.
    pub(crate) fn weight_of_all(&self) -> Option<usize> {
        // SAFETY: taken, so ours; the same for those that follow.
        let first = unsafe { self.0.head.as_ref()? };
        // SAFETY: as above.
        let next = |node: &&Node| unsafe { node.next.get().as_ref() };
        let same = std::iter::successors(Some(first), next).all(|node| node.weight == first.weight);
        (same && self.len() > 1).then_some(first.weight)
    }

    /// Takes out the first.
    pub(crate) fn pop(&mut self) -> Option<Taken> {
        let first = NonNull::new(self.0.head.cast_mut())?;
        // SAFETY: taken, so ours.
        self.0.remove(unsafe { first.as_ref() });
        Some(Taken(first))
    }

    /// Wakes them in their order. True: there was a goroutine among them.
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
