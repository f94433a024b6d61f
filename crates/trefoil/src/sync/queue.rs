//! Queues of sleepers: what every primitive of `sync` waits in.
//!
//! A sleeper lies in a [`Node`] in its own frame; a [`List`] links nodes, first in, first out. The list
//! is behind a lock of its owner: a bucket of `table.rs` (mutexes and read-write locks, which are one
//! word each), or a lock in the primitive itself.
//!
//! # The life of a node
//! | state | who may touch it |
//! |---|---|
//! | not linked, sleeper awake | the sleeper |
//! | linked | whoever holds the list's lock |
//! | [`Taken`] | its taker, until it has woken the sleeper |
//!
//! A sleep ends by a taker, or by its deadline; never by both, and never for no reason:
//! - A goroutine with a deadline is claimed (`wait.rs`) by the timer or by the taker. A taker that loses
//!   unlinks the node and takes the next.
//! - A plain thread whose time is up takes the list's lock: if its node is linked it leaves, else it has
//!   been taken and the wake-up is on its way.
//!
//! Invariants:
//! 1. A linked node is alive: its sleeper leaves the frame only after it was taken and woken, or after
//!    it has unlinked the node itself.
//! 2. Locks of lists are taken inside the runtime (or on a plain thread), and nothing is allocated,
//!    freed or woken under them. A taken sleeper is woken after the lock is given back.
//!
//! Rejected: `wait::wait` for plain threads too. Its claim word lies in its own frame, which is gone
//! when a thread that timed out comes to unlink its node; here the bed is part of the node.

use crate::sched::reason::WaitReason;
use crate::sched::wait::{self, Waiter};
use crate::sched::{Rt, current_g};
use crate::sys::clock::{NEVER, Nanos};
use crate::sys::parker::Parker;
use std::cell::Cell;
use std::ptr::{NonNull, null};

/// The winner of a claim by a taker; the other one is `Waiter::TIMED_OUT`.
const TAKEN: u16 = 1;

/// How a sleeper is woken.
#[derive(Clone, Copy)]
enum Sleeper {
    /// A plain thread, in the node's parker.
    Thread,
    /// A goroutine that only a taker can wake.
    Goroutine(usize),
    /// A goroutine with a deadline.
    Timed(Waiter),
}

/// One sleeper. See the head of the file.
pub(crate) struct Node {
    sleeper: Cell<Sleeper>,
    parker: Parker,
    next: Cell<*const Node>,
    prev: Cell<*const Node>,
    linked: Cell<bool>,
    /// What the taker wants to say.
    word: Cell<u32>,
    /// What the sleeper wants: permits, for a semaphore.
    pub(crate) weight: usize,
    /// Since when it wants it; 0 if nobody asks.
    pub(crate) since: Cell<Nanos>,
    /// Where the node is first of its queue (`table.rs`): the queue, its key, the next queue.
    pub(super) queue: Cell<List>,
    pub(super) key: Cell<usize>,
    pub(super) chain: Cell<*const Node>,
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
            sleeper: Cell::new(Sleeper::Thread),
            parker: Parker::new(),
            next: Cell::new(null()),
            prev: Cell::new(null()),
            linked: Cell::new(false),
            word: Cell::new(0),
            weight,
            since: Cell::new(0),
            queue: Cell::new(List::new()),
            key: Cell::new(0),
            chain: Cell::new(null()),
        }
    }

    /// Sleeps in a list until a taker comes, or until `deadline`.
    ///
    /// `enqueue` links the node under the list's lock, or says no. `withdraw` takes it out again under
    /// the same lock, if it is still linked, and tells whether it was. Both run inside the runtime;
    /// `enqueue` gets it, for what it may have to wake (a condition variable gives its mutex back).
    pub(crate) fn sleep(
        &self,
        reason: WaitReason,
        deadline: Nanos,
        enqueue: impl FnOnce(Option<Rt>) -> bool,
        withdraw: impl FnOnce() -> bool,
    ) -> Slept {
        if current_g().is_none() {
            return self.sleep_on_thread(deadline, enqueue, withdraw);
        }
        if deadline == NEVER {
            let mut slept = false;
            wait::block(reason, |sleeper| {
                self.sleeper.set(Sleeper::Goroutine(sleeper));
                slept = enqueue(Some(Rt::after_switch()));
                slept
            });
            return if slept { Slept::Woken(self.word.get()) } else { Slept::No };
        }
        let winner = wait::wait(reason, deadline, |waiter| {
            self.sleeper.set(Sleeper::Timed(waiter));
            enqueue(Some(Rt::after_switch()))
        });
        match winner {
            None => Slept::No,
            Some(Waiter::TIMED_OUT) => {
                // A taker that lost the claim may have unlinked it already.
                inside(|_| withdraw());
                Slept::TimedOut
            }
            Some(_) => Slept::Woken(self.word.get()),
        }
    }

    #[cold]
    fn sleep_on_thread(
        &self,
        deadline: Nanos,
        enqueue: impl FnOnce(Option<Rt>) -> bool,
        withdraw: impl FnOnce() -> bool,
    ) -> Slept {
        self.sleeper.set(Sleeper::Thread);
        if !enqueue(None) {
            return Slept::No;
        }
        while !self.parker.park_until(deadline) {
            if crate::sys::clock::now() < deadline {
                continue; // a signal
            }
            if withdraw() {
                return Slept::TimedOut;
            }
            self.parker.park();
            break;
        }
        Slept::Woken(self.word.get())
    }

    /// Under the list's lock. False: its deadline has passed.
    fn claim(&self) -> bool {
        match self.sleeper.get() {
            Sleeper::Timed(waiter) => waiter.claim(TAKEN),
            _ => true,
        }
    }
}

/// Runs `f` inside the runtime (on a plain thread there is none).
#[inline]
pub(crate) fn inside<R>(f: impl FnOnce(Option<Rt>) -> R) -> R {
    let rt = Rt::enter();
    let r = f(rt);
    if let Some(rt) = rt {
        rt.leave();
    }
    r
}

/// Nodes, first in, first out. Doubly linked: a deadline takes a node from the middle.
#[derive(Clone, Copy)]
pub(crate) struct List {
    head: *const Node,
    tail: *const Node,
}

// SAFETY: the nodes belong to whoever holds the list's lock (invariant 1), on any thread.
unsafe impl Send for List {}

impl List {
    pub(crate) const fn new() -> List {
        List { head: null(), tail: null() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.head.is_null()
    }

    pub(super) fn first(&self) -> *const Node {
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
        self.tie(node.prev.get(), node.next.get());
        self.tie_back(node.prev.get(), node.next.get());
        true
    }

    /// Takes the first one, if `wanted` likes it. Those whose deadline has passed are dropped on the way.
    #[must_use]
    pub(crate) fn take_first_if(&mut self, wanted: impl Fn(&Node) -> bool) -> Option<Taken> {
        loop {
            // SAFETY: invariant 1, and we have the lock.
            let node = unsafe { self.head.as_ref()? };
            if !wanted(node) {
                return None;
            }
            self.remove(node);
            if node.claim() {
                return Some(Taken(NonNull::from(node)));
            }
        }
    }

    /// Takes the first one.
    #[must_use]
    pub(crate) fn take_first(&mut self) -> Option<Taken> {
        self.take_first_if(|_| true)
    }

    /// Takes all.
    #[must_use]
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
        !matches!(self.node().sleeper.get(), Sleeper::Thread)
    }

    /// Wakes it with a word. `rt` is where we are.
    pub(crate) fn wake(self, rt: Option<Rt>, word: u32) {
        self.node().word.set(word);
        match (self.node().sleeper.get(), rt) {
            (Sleeper::Thread, _) => self.node().parker.unpark(),
            (Sleeper::Goroutine(sleeper), Some(rt)) => wait::wake_in(rt, sleeper),
            (Sleeper::Goroutine(sleeper), None) => wait::wake(sleeper),
            (Sleeper::Timed(waiter), Some(rt)) => waiter.wake_in(rt),
            (Sleeper::Timed(waiter), None) => waiter.wake(),
        }
    }
}

/// Sleepers that were taken together.
#[must_use = "sleepers that were taken must be woken"]
pub(crate) struct Batch {
    list: List,
    len: usize,
}

impl Batch {
    pub(crate) fn new() -> Batch {
        Batch { list: List::new(), len: 0 }
    }

    pub(crate) fn push(&mut self, taken: Taken) {
        self.list.push_back(taken.node());
        self.len += 1;
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Wakes them in their order. True: there was a goroutine among them.
    pub(crate) fn wake_all(mut self, rt: Option<Rt>, word: u32) -> bool {
        let mut goroutines = false;
        // SAFETY: taken, so ours until we wake it; it is unlinked before that.
        while let Some(node) = unsafe { self.list.head.as_ref() } {
            self.list.remove(node);
            let taken = Taken(NonNull::from(node));
            goroutines |= taken.is_goroutine();
            taken.wake(rt, word);
        }
        goroutines
    }
}
