//! A channel without its type: a lock, a buffer, and two lists of those who wait.
//!
//! # States
//! | state | buffer | receivers wait | senders wait |
//! |---|---|---|---|
//! | idle | neither empty nor full | no | no |
//! | empty | empty | maybe | only if the capacity is 0, and then no receiver |
//! | full | full | no | maybe |
//! | closed | what is left | no | no |
//!
//! "Wait" means: can be claimed. Stale nodes (queue.rs) may lie in the lists at any time.
//!
//! As in Go, a value goes directly to a receiver that waits, past the buffer; and when a receiver
//! takes the head of a full buffer, the first waiting sender's value takes the tail in the same
//! step. So those who wait are served in their order, and nobody who comes later overtakes.
//!
//! Invariants:
//! 1. `lock` guards everything but the reads named here: `closed`, the buffer's `len`, the lists'
//!    `first`.
//! 2. The lock is held only inside the runtime (or on a plain thread), and under it nobody
//!    allocates, frees, wakes, or runs the user's code: values are moved as bytes, and dropped
//!    outside.
//! 3. `closed` is set once, under the lock.
//! 4. A look without the lock that finds the channel empty (full) *and after that* not closed has
//!    seen it empty (full) and open at one moment, because of 3. So `try_recv` (`try_send`) may say
//!    so.
//! 5. A thread holds several channels' locks only in the order of their addresses (select.rs).
//!
//! Rejected: lock-free rings as in crossbeam. They are quicker when both sides run in parallel, but
//! have neither the handoff nor the order of waiters, and a select over them needs a second
//! protocol.

use super::buffer::{Buffer, Elem, Lent, Of};
use super::cells::{AtomicBool, AtomicU32, Ordering};
use super::lock::ChanLock;
use super::queue::{List, Node, Taken};
use crate::sched::Rt;
use crate::sched::wait::reason::WaitReason;
use crate::sched::wait::{self, Waiter};
use crate::sys::clock::{NEVER, Nanos, now};
use std::mem::MaybeUninit;

/// See the head of the file.
///
/// Two lines: in the first what every operation changes, in the second what only those of
/// unbounded channels do. The ring comes after it (handle.rs).
#[repr(C, align(64))]
pub(crate) struct Core {
    lock: ChanLock,
    receivers: List,
    senders: List,
    pub(super) buffer: Buffer,
    closed: AtomicBool,
    /// One side has no handles left; the other side's last one frees the channel (handle.rs).
    pub(super) half_dead: AtomicBool,
    pub(super) sender_count: AtomicU32,
    pub(super) receiver_count: AtomicU32,
    /// Where its memory begins: so many bytes before it (handle.rs).
    pub(super) shift: u32,
}

// SAFETY: invariant 1; the nodes in the lists are shared by the rules of queue.rs. Whether the
// values may cross threads is said by `Sender` and `Receiver`.
unsafe impl Sync for Core {}
// SAFETY: as above.
unsafe impl Send for Core {}

/// Nobody: for operations that are no part of a select.
pub(super) const NOBODY: usize = 0;

/// What an operation under the lock came to.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// The value has moved. The sleeper, if not [`NOBODY`], is to be woken after the lock is given
    /// back.
    Done(usize),
    /// Not now.
    Wait,
    Closed,
    /// A chain needs a block ([`Core::grow_slow`]); then try again.
    NoBlock,
}

/// Which end of a channel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Side {
    Send,
    Recv,
}

/// How a wait at a channel ended.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ended {
    Done,
    Closed,
    TimedOut,
}

impl Core {
    pub(super) fn new<T>(cap: usize, ring: *mut u8, shift: u32) -> Core {
        Core {
            lock: ChanLock::new(),
            receivers: List::new(),
            senders: List::new(),
            buffer: Buffer::new::<T>(cap, ring),
            closed: AtomicBool::new(false),
            half_dead: AtomicBool::new(false),
            sender_count: AtomicU32::new(1),
            receiver_count: AtomicU32::new(1),
            shift,
        }
    }

    #[inline(always)]
    pub(super) fn lock(&self) {
        self.lock.lock();
    }

    #[inline(always)]
    pub(super) fn unlock(&self) {
        self.lock.unlock();
    }

    #[inline]
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    #[inline]
    fn list(&self, side: Side) -> &List {
        match side {
            Side::Send => &self.senders,
            Side::Recv => &self.receivers,
        }
    }

    /// Without the lock: is there nothing more to come for this side? It stays so: nothing is put into a closed
    /// channel. (In this order: whoever sees it closed sees what was put there before.) Many may ask a
    /// closed channel at once, a context's `done` for one, and none of them needs the lock.
    #[inline]
    fn is_over(&self, side: Side) -> bool {
        self.is_closed() && (side == Side::Send || self.buffer.len() == 0)
    }

    /// Without the lock: may an operation of this side go on? If not, it was so at one moment
    /// (invariant 4).
    #[inline]
    pub(super) fn looks_ready(&self, side: Side) -> bool {
        let waiting = match side {
            Side::Send => self.buffer.len() >= self.buffer.cap() && self.receivers.looks_empty(),
            Side::Recv => self.buffer.len() == 0 && self.senders.looks_empty(),
        };
        !waiting || self.is_closed()
    }

    /// Under the lock: would an operation of this side go on, for `me`? A stale waiter counts, so
    /// the operation may still find that it would not.
    ///
    /// # Safety
    /// The lock is held.
    pub(super) unsafe fn is_ready(&self, side: Side, me: usize) -> bool {
        // SAFETY: the lock is held.
        unsafe {
            self.is_closed()
                || match side {
                    Side::Send => {
                        self.buffer.len() < self.buffer.cap() || self.receivers.has_other(me)
                    }
                    Side::Recv => self.buffer.len() > 0 || self.senders.has_other(me),
                }
        }
    }

    /// Under the lock: moves a value to `to`, if there is one.
    ///
    /// # Safety
    /// The lock is held; `elem` is this channel's; `to` has room for a value.
    #[inline]
    pub(super) unsafe fn recv_step<E: Elem>(&self, elem: E, to: *mut u8, me: usize) -> Step {
        // SAFETY: the lock is held; a taken sender's slot holds a value until we wake it.
        unsafe {
            let sender = self.senders.take_first(me);
            if self.buffer.len() > 0 {
                return match sender {
                    Some(sender) => {
                        self.buffer.rotate(elem, sender.slot.get(), to);
                        Step::Done(sender.answer(true))
                    }
                    None => {
                        self.buffer.pop(elem, to);
                        Step::Done(NOBODY)
                    }
                };
            }
            match sender {
                Some(sender) => {
                    elem.copy(sender.slot.get(), to);
                    Step::Done(sender.answer(true))
                }
                None if self.is_closed() => Step::Closed,
                None => Step::Wait,
            }
        }
    }

    /// Under the lock: moves the value at `from` into the channel, if it can take it.
    ///
    /// # Safety
    /// The lock is held; `elem` is this channel's; `from` is a value, which moves if this is
    /// `Done`.
    #[inline]
    pub(super) unsafe fn send_step<E: Elem>(&self, elem: E, from: *const u8, me: usize) -> Step {
        if self.is_closed() {
            return Step::Closed;
        }
        // SAFETY: the lock is held; a taken receiver's slot has room until we wake it.
        unsafe {
            if let Some(receiver) = self.receivers.take_first(me) {
                elem.copy(from, receiver.slot.get());
                return Step::Done(receiver.answer(true));
            }
            if self.buffer.len() >= self.buffer.cap() {
                return Step::Wait;
            }
            if self.buffer.push(elem, from) { Step::Done(NOBODY) } else { Step::NoBlock }
        }
    }

    /// One of the two above.
    ///
    /// # Safety
    /// As theirs.
    #[inline]
    pub(super) unsafe fn step<E: Elem>(
        &self,
        side: Side,
        elem: E,
        slot: *mut u8,
        me: usize,
    ) -> Step {
        // SAFETY: the caller's.
        unsafe {
            match side {
                Side::Send => self.send_step(elem, slot, me),
                Side::Recv => self.recv_step(elem, slot, me),
            }
        }
    }

    /// A whole operation. The value at `slot` moves if this is `Done`.
    ///
    /// # Safety
    /// `elem` is this channel's, and `slot` a value to send, or room for one to receive.
    #[inline]
    pub(super) unsafe fn operate<E: Elem>(
        &self,
        side: Side,
        elem: E,
        slot: *mut u8,
        deadline: Nanos,
    ) -> Ended {
        let ended = loop {
            let here = Rt::enter();
            if self.is_over(side) {
                wait::leave(here);
                break Ended::Closed;
            }
            self.lock();
            // SAFETY: locked; the rest is the caller's.
            match unsafe { self.step(side, elem, slot, NOBODY) } {
                Step::Done(sleeper) => {
                    self.unlock();
                    if sleeper != NOBODY {
                        wait::wake_here(here, sleeper);
                    }
                    wait::leave(here);
                    break Ended::Done;
                }
                Step::Closed => {
                    self.unlock();
                    wait::leave(here);
                    break Ended::Closed;
                }
                // SAFETY: locked, and the slot is good until this returns.
                Step::Wait => break unsafe { self.wait_slow(here, side, slot, deadline) },
                Step::NoBlock => {
                    self.unlock();
                    wait::leave(here);
                    self.grow_slow();
                }
            }
        };
        self.tidy();
        ended
    }

    /// As [`Core::operate`], but does not wait: None.
    ///
    /// # Safety
    /// As for `operate`.
    #[inline]
    pub(super) unsafe fn attempt<E: Elem>(
        &self,
        side: Side,
        elem: E,
        slot: *mut u8,
    ) -> Option<Ended> {
        loop {
            // Inside also for the look alone: so a loop that only looks can be preempted.
            let here = Rt::enter();
            if !self.looks_ready(side) {
                wait::leave(here);
                return None;
            }
            if self.is_over(side) {
                wait::leave(here);
                return Some(Ended::Closed);
            }
            // SAFETY: the caller's.
            let step = unsafe { self.attempt_in(here, side, elem, slot) };
            wait::leave(here);
            match step {
                Step::Done(_) => {
                    self.tidy();
                    return Some(Ended::Done);
                }
                Step::Closed => return Some(Ended::Closed),
                Step::Wait => return None,
                Step::NoBlock => self.grow_slow(),
            }
        }
    }

    /// [`Core::attempt`] inside the runtime (or on a plain thread): one step, and whom it woke.
    ///
    /// # Safety
    /// As for `operate`.
    #[inline]
    pub(super) unsafe fn attempt_in<E: Elem>(
        &self,
        here: Option<Rt>,
        side: Side,
        elem: E,
        slot: *mut u8,
    ) -> Step {
        self.lock();
        // SAFETY: locked; the rest is the caller's.
        let step = unsafe { self.step(side, elem, slot, NOBODY) };
        self.unlock();
        if let Step::Done(sleeper) = step
            && sleeper != NOBODY
        {
            wait::wake_here(here, sleeper);
        }
        step
    }

    /// Takes a value out and forgets it, if there is one. True: there was. `T` is this channel's, which is bounded.
    pub(super) fn discard_in<T: Copy>(&self, here: Option<Rt>) -> bool {
        if !self.looks_ready(Side::Recv) {
            return false;
        }
        let mut value = MaybeUninit::<T>::uninit();
        let slot = value.as_mut_ptr().cast();
        // SAFETY: `value` has room for one.
        let step = unsafe { self.attempt_in(here, Side::Recv, Of::<T>::ELEM, slot) };
        matches!(step, Step::Done(_))
    }

    /// Sleeps until someone comes to the other side, the channel is closed, or until `deadline`.
    /// Takes over the lock, and leaves the runtime.
    ///
    /// # Safety
    /// The lock is held, and the slot is as for `operate`.
    #[inline(never)]
    unsafe fn wait_slow(
        &self,
        here: Option<Rt>,
        side: Side,
        slot: *mut u8,
        deadline: Nanos,
    ) -> Ended {
        let node = Node::new(slot);
        let list = self.list(side);
        let reason = match side {
            Side::Send => WaitReason::ChanSend,
            Side::Recv => WaitReason::ChanReceive,
        };
        let register = |waiter| {
            node.waiter.set(waiter);
            // SAFETY: locked; the node stays in this frame until it was taken or withdrawn.
            unsafe { list.push(&node) };
            self.unlock();
            true
        };
        let here = if deadline == NEVER {
            wait::block_in(here, reason, |sleeper| register(Waiter::sole(sleeper)))
        } else if deadline <= now() {
            self.unlock();
            wait::leave(here);
            return Ended::TimedOut;
        } else {
            let (winner, here) = wait::wait_in(here, reason, deadline, register);
            if winner == Some(Waiter::TIMED_OUT) {
                self.lock();
                // SAFETY: locked; pushed to this list above.
                unsafe { list.withdraw(&node) };
                self.unlock();
                wait::leave(here);
                // It may run long after its time-out: what came meanwhile is better.
                // SAFETY: the caller's.
                let last = unsafe { self.attempt(side, self.buffer.elem(), slot) };
                return last.unwrap_or(Ended::TimedOut);
            }
            here
        };
        wait::leave(here);
        if node.done.get() { Ended::Done } else { Ended::Closed }
    }

    /// Adds a node of a select to its list.
    ///
    /// # Safety
    /// The lock is held, and the node stays until it was taken or withdrawn.
    #[inline]
    pub(super) unsafe fn enlist(&self, side: Side, node: &Node) {
        // SAFETY: the caller's.
        unsafe { self.list(side).push(node) };
    }

    /// Takes a node of a select out of its list, unless someone has.
    ///
    /// # Safety
    /// Inside the runtime or on a plain thread; if the node was linked, then at this channel and
    /// side.
    #[inline]
    pub(super) unsafe fn withdraw(&self, side: Side, node: &Node) {
        self.lock();
        // SAFETY: locked; the rest is the caller's.
        unsafe { self.list(side).withdraw(node) };
        self.unlock();
    }

    /// How many nodes lie in the two lists, senders first. For tests.
    pub(super) fn waiters(&self) -> (usize, usize) {
        let mut counts = (0, 0);
        // SAFETY: locked.
        self.locked(|| counts = unsafe { (self.senders.count(), self.receivers.count()) });
        counts
    }

    /// Brings a block to a chain. Outside the runtime.
    #[cold]
    pub(super) fn grow_slow(&self) {
        let mut lent = self.buffer.allocate();
        self.locked(|| self.buffer.lend(&mut lent));
        // Another sender may have brought one: then ours is freed here.
    }

    /// Frees blocks that a chain is done with. Outside the runtime.
    #[inline]
    pub(super) fn tidy(&self) {
        if self.buffer.has_discarded() {
            self.tidy_slow();
        }
    }

    #[cold]
    fn tidy_slow(&self) {
        let mut discarded: Option<Lent> = None;
        self.locked(|| discarded = Some(self.buffer.take_discarded()));
        drop(discarded);
    }

    /// Runs `f` under the lock.
    pub(super) fn locked(&self, f: impl FnOnce()) {
        let here = Rt::enter();
        self.lock();
        f();
        self.unlock();
        wait::leave(here);
    }

    /// Closes: no more sends; receivers drain what is left. Wakes receivers, then senders. Once.
    pub(super) fn close(&self) {
        let here = Rt::enter();
        self.close_in(here);
        wait::leave(here);
    }

    /// [`Core::close`], inside the runtime or on a plain thread.
    pub(super) fn close_in(&self, here: Option<Rt>) {
        let mut taken = Taken::new();
        self.lock();
        if !self.is_closed() {
            // Release: pairs with `is_closed` without the lock.
            self.closed.store(true, Ordering::Release);
            // SAFETY: locked; they are woken below.
            unsafe {
                self.receivers.take_all(&mut taken);
                self.senders.take_all(&mut taken);
            }
        }
        self.unlock();
        while let Some(sleeper) = taken.pop() {
            wait::wake_here(here, sleeper);
        }
    }
}
