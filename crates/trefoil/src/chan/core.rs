//! A channel without the type of its values: a lock, a buffer, and two queues of waiters.
//!
//! # States
//! | state | buffer | receivers wait | senders wait |
//! |---|---|---|---|
//! | idle | neither empty nor full | no | no |
//! | empty | empty | maybe | only if the capacity is 0, and then no receiver |
//! | full | full | no | maybe |
//! | closed | values that are left | no | no |
//!
//! A close wakes the waiters in batches, so a closed channel may have waiters for a moment. They
//! are not served any more.
//!
//! "Wait" means: there is a sudog whose wait can be claimed. The queues may also contain stale
//! sudogs and watchers (queue.rs) at any time. Whatever makes an operation ready wakes a watcher of
//! that operation: a push, a pop, a waiter that is appended, a close.
//!
//! As in Go, a value goes directly to a receiver that waits, past the buffer. When a receiver takes
//! the head of a full buffer, the value of the first waiting sender takes the tail in the same
//! step. So waiters are served in their order, and no later operation overtakes them.
//!
//! # Tasks
//! A task waits in the same queues, and a value goes directly to it, too: into its future. If the
//! future is dropped before it has returned the value, the value is *given back*
//! ([`Core::give_back`]): to the next receiver that waits, or to the front of the buffer, which may
//! then hold more than its capacity. So no value is lost, and a send need not know whether the
//! receiver is a goroutine or a task.
//!
//! Known weakness: if several receives that were handed values are dropped at once, their values
//! may change places.
//!
//! Rejected: to leave the value with the sender or in the buffer, and only to notify the task. A
//! `try_send` on a channel without a buffer would fail although a task waits to receive; each value
//! would pass through the buffer; a task could find that another receiver was faster.
//!
//! Invariants:
//! 1. `lock` guards everything except these reads without it: `closed`, the buffer's `len`, the
//!    queues' `first`.
//! 2. The lock is held only inside the runtime (or on a plain thread). Its holder does not
//!    allocate, free, wake, or run user code: values are moved as bytes, and dropped outside.
//! 3. `closed` is set once, under the lock.
//! 4. A probe without the lock that finds the channel empty (full), *and after that* not closed,
//!    has seen it empty (full) and open at one moment, because of 3. So `try_recv` (`try_send`) may
//!    say so.
//! 5. A thread locks several channels only in the order of their addresses (select/passes.rs).
//!
//! Rejected: lock-free rings as in crossbeam. They are faster when both sides run in parallel, but
//! they have neither the direct handoff nor the order of waiters, and a select over them needs a
//! second protocol.

use super::buffer::{Blocks, Buffer, Elem, TypedElem};
use super::cells::{AtomicBool, AtomicU32, CacheHint, Ordering};
use super::lock::ChanLock;
use super::queue::{Sudog, SudogState, WaitQueue};
use crate::sched::Rt;
use crate::sched::wait::holder;
use crate::sched::wait::reason::WaitReason;
use crate::sched::wait::{self, Waiter};
use crate::sys::clock::{NEVER, Nanos, now};
use std::alloc::Layout;
use std::mem::MaybeUninit;

/// See the head of the file.
///
/// Two cache lines: the first has what every operation changes, the second what only operations of
/// unbounded channels change. The ring follows (handle.rs).
#[repr(C, align(64))]
pub(crate) struct Core {
    lock: ChanLock,
    receivers: WaitQueue,
    senders: WaitQueue,
    pub(super) buffer: Buffer,
    /// The sleeper of the waiter that found its queue empty.
    first_waiter: CacheHint,
    closed: AtomicBool,
    /// One side has no handles left; the last handle of the other side frees the channel
    /// (handle.rs).
    pub(super) one_side_gone: AtomicBool,
    pub(super) sender_count: AtomicU32,
    pub(super) receiver_count: AtomicU32,
    /// Bytes between the beginning of the allocation and the `Core` (handle.rs).
    pub(super) alloc_offset: u32,
}

// SAFETY: invariant 1; the sudogs in the queues are shared by the rules of queue.rs. `Sender` and
// `Receiver` decide whether the values may cross threads.
unsafe impl Sync for Core {}
// SAFETY: as above.
unsafe impl Send for Core {}

/// The sleeper that stands for none: for operations that are no part of a select.
pub(super) const NO_SLEEPER: usize = 0;

/// Waiters that a close wakes each time it has taken the lock.
const CLOSE_BATCH: usize = 16;

/// The result of an operation under the lock.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// The value has moved. The caller wakes the sleeper, unless it is [`NO_SLEEPER`], after it has
    /// released the lock.
    Done(usize),
    /// The operation must wait.
    Wait,
    Closed,
    /// A chain needs a block ([`Core::grow_slow`]); then the caller tries again.
    NoBlock,
}

/// The direction of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ChanSide {
    Send,
    Recv,
}

/// How an operation on a channel ended.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum OpResult {
    Done,
    Closed,
    TimedOut,
}

impl Core {
    pub(super) fn new(cap: usize, elem: Layout, ring: *mut u8, alloc_offset: u32) -> Core {
        Core {
            lock: ChanLock::new(),
            receivers: WaitQueue::new(),
            senders: WaitQueue::new(),
            buffer: Buffer::new(cap, elem, ring),
            first_waiter: CacheHint::new(),
            closed: AtomicBool::new(false),
            one_side_gone: AtomicBool::new(false),
            sender_count: AtomicU32::new(1),
            receiver_count: AtomicU32::new(1),
            alloc_offset,
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
    fn queue(&self, side: ChanSide) -> &WaitQueue {
        match side {
            ChanSide::Send => &self.senders,
            ChanSide::Recv => &self.receivers,
        }
    }

    /// Returns, without the lock, whether every further operation of this side finds the channel
    /// closed. True is final, because no value is put into a closed channel, except one that a
    /// dropped future gives back. (`closed` is read first: a
    /// thread that sees it set also sees the values that were put there before.) Many goroutines
    /// may check a closed channel at once, for example the `done` of a context, and none of them
    /// needs the lock.
    #[inline]
    fn is_finished(&self, side: ChanSide) -> bool {
        self.is_closed() && (side == ChanSide::Send || self.buffer.len() == 0)
    }

    /// Returns, without the lock, whether an operation of this side may be ready. False is exact
    /// for one moment (invariant 4). Stale sudogs and watchers make it return true.
    #[inline]
    pub(super) fn probe_ready(&self, side: ChanSide) -> bool {
        let waiting = match side {
            ChanSide::Send => {
                self.buffer.len() >= self.buffer.cap() && self.receivers.probe_empty()
            }
            ChanSide::Recv => self.buffer.len() == 0 && self.senders.probe_empty(),
        };
        !waiting || self.is_closed()
    }

    /// Returns whether an operation of this side, by the select whose sleeper is `me`, is ready. A
    /// stale waiter counts, so the operation may still have to wait.
    ///
    /// # Safety
    /// The lock is held.
    pub(super) unsafe fn is_ready(&self, side: ChanSide, me: usize) -> bool {
        // SAFETY: the lock is held.
        unsafe {
            self.is_closed()
                || match side {
                    ChanSide::Send => {
                        self.buffer.len() < self.buffer.cap() || self.receivers.has_other(me)
                    }
                    ChanSide::Recv => self.buffer.len() > 0 || self.senders.has_other(me),
                }
        }
    }

    /// Moves the channel's next value to `to`, if there is one. `me` is the sleeper of the select
    /// that receives, or [`NO_SLEEPER`].
    ///
    /// # Safety
    /// The lock is held; `elem` is this channel's; `to` has room for a value.
    #[inline]
    pub(super) unsafe fn recv_step<E: Elem>(&self, elem: E, to: *mut u8, me: usize) -> Step {
        // SAFETY: the lock is held; a taken sender's slot holds a value until the sender is woken.
        unsafe {
            let len = self.buffer.len();
            if len > self.buffer.cap() {
                self.buffer.pop_extra(elem, to);
                return Step::Done(NO_SLEEPER);
            }
            // The senders of a closed channel are about to be woken by the close.
            let sender = self.senders.take_first_unless(me, || self.is_closed());
            if len > 0 {
                return match sender {
                    Some(sender) => {
                        self.buffer.rotate(elem, sender.slot.get(), to);
                        Step::Done(sender.complete())
                    }
                    None => {
                        self.buffer.pop(elem, to);
                        Step::Done(self.take_watcher(ChanSide::Send))
                    }
                };
            }
            match sender {
                Some(sender) => {
                    elem.copy(sender.slot.get(), to);
                    Step::Done(sender.complete())
                }
                None if self.is_closed() => Step::Closed,
                None => Step::Wait,
            }
        }
    }

    /// Moves the value at `from` into the channel, if there is room or a receiver waits. `me` is
    /// the sleeper of the select that sends, or [`NO_SLEEPER`].
    ///
    /// # Safety
    /// The lock is held; `elem` is this channel's; `from` is a value, which moves if the result is
    /// `Done`.
    #[inline]
    pub(super) unsafe fn send_step<E: Elem>(&self, elem: E, from: *const u8, me: usize) -> Step {
        if self.is_closed() {
            return Step::Closed;
        }
        // SAFETY: the lock is held; a taken receiver's slot has room until the receiver is woken.
        unsafe {
            if let Some(receiver) = self.receivers.take_first(me) {
                elem.copy(from, receiver.slot.get());
                return Step::Done(receiver.complete());
            }
            if self.buffer.len() >= self.buffer.cap() {
                return Step::Wait;
            }
            if self.buffer.push(elem, from) {
                Step::Done(self.take_watcher(ChanSide::Recv))
            } else {
                Step::NoBlock
            }
        }
    }

    /// Takes a watcher of this side, whose operation has become ready. The caller wakes the
    /// returned sleeper, unless it is [`NO_SLEEPER`], after it has released the lock.
    ///
    /// # Safety
    /// The lock is held.
    #[inline]
    unsafe fn take_watcher(&self, side: ChanSide) -> usize {
        let queue = self.queue(side);
        if queue.is_empty() {
            return NO_SLEEPER;
        }
        // SAFETY: the lock is held; the caller wakes the sleeper.
        unsafe { queue.take_watcher() }.map_or(NO_SLEEPER, Sudog::complete)
    }

    /// Returns whether an operation of this side need not wait at this moment.
    ///
    /// # Safety
    /// The lock is held.
    pub(super) unsafe fn is_ready_now(&self, side: ChanSide) -> bool {
        // SAFETY: the lock is held.
        unsafe {
            self.is_closed()
                || match side {
                    ChanSide::Send => {
                        self.buffer.len() < self.buffer.cap() || self.receivers.has_open()
                    }
                    ChanSide::Recv => self.buffer.len() > 0 || self.senders.has_open(),
                }
        }
    }

    /// Appends a watcher to its queue.
    ///
    /// # Safety
    /// The lock is held, and the sudog stays alive until it was taken or withdrawn.
    pub(super) unsafe fn watch(&self, side: ChanSide, node: &Sudog) {
        // SAFETY: the caller's guarantee.
        unsafe { self.queue(side).push(node) };
    }

    /// Wakes the next watcher of this side if the operation is still ready. A watcher that was
    /// woken calls it (`select/ready.rs`). Called inside the runtime or on a plain thread.
    pub(super) fn pass_on(&self, here: Option<Rt>, side: ChanSide) {
        self.lock();
        // SAFETY: the lock is held.
        let next =
            unsafe { if self.is_ready_now(side) { self.take_watcher(side) } else { NO_SLEEPER } };
        self.unlock();
        if next != NO_SLEEPER {
            wait::wake_here(here, next);
        }
    }

    /// Does [`Core::send_step`] or [`Core::recv_step`].
    ///
    /// # Safety
    /// As for those.
    #[inline]
    pub(super) unsafe fn step<E: Elem>(
        &self,
        side: ChanSide,
        elem: E,
        slot: *mut u8,
        me: usize,
    ) -> Step {
        // SAFETY: the caller's guarantee.
        unsafe {
            match side {
                ChanSide::Send => self.send_step(elem, slot, me),
                ChanSide::Recv => self.recv_step(elem, slot, me),
            }
        }
    }

    /// Does an operation, and waits for it until `deadline`. The value at `slot` moves if the
    /// result is `Done`.
    ///
    /// # Safety
    /// `elem` is this channel's, and `slot` is a value to send, or room for one to receive.
    #[inline]
    pub(super) unsafe fn blocking_op<E: Elem>(
        &self,
        side: ChanSide,
        elem: E,
        slot: *mut u8,
        deadline: Nanos,
    ) -> OpResult {
        self.prefetch_partner(side);
        let result = loop {
            let here = Rt::enter();
            if self.is_finished(side) {
                wait::leave(here);
                break OpResult::Closed;
            }
            self.lock();
            // SAFETY: the lock is held; the rest is the caller's guarantee.
            match unsafe { self.step(side, elem, slot, NO_SLEEPER) } {
                Step::Done(sleeper) => {
                    self.unlock();
                    if sleeper != NO_SLEEPER {
                        wait::wake_here(here, sleeper);
                    }
                    wait::leave(here);
                    break OpResult::Done;
                }
                Step::Closed => {
                    self.unlock();
                    wait::leave(here);
                    break OpResult::Closed;
                }
                // SAFETY: the lock is held, and the slot is valid until this returns.
                Step::Wait => break unsafe { self.wait_slow(here, side, slot, deadline) },
                Step::NoBlock => {
                    self.unlock();
                    wait::leave(here);
                    self.grow_slow();
                }
            }
        };
        self.free_blocks();
        result
    }

    /// As [`Core::blocking_op`], but returns None instead of waiting.
    ///
    /// # Safety
    /// As for `blocking_op`.
    #[inline]
    pub(super) unsafe fn try_op<E: Elem>(
        &self,
        side: ChanSide,
        elem: E,
        slot: *mut u8,
    ) -> Option<OpResult> {
        loop {
            // Enters the runtime even for the probe, so that a loop that only probes can be
            // preempted.
            let here = Rt::enter();
            if !self.probe_ready(side) {
                wait::leave(here);
                return None;
            }
            if self.is_finished(side) {
                wait::leave(here);
                return Some(OpResult::Closed);
            }
            // SAFETY: the caller's guarantee.
            let step = unsafe { self.try_op_in(here, side, elem, slot) };
            wait::leave(here);
            match step {
                Step::Done(_) => {
                    self.free_blocks();
                    return Some(OpResult::Done);
                }
                Step::Closed => return Some(OpResult::Closed),
                Step::Wait => return None,
                Step::NoBlock => self.grow_slow(),
            }
        }
    }

    /// Does one step inside the runtime (or on a plain thread), and wakes the partner.
    ///
    /// # Safety
    /// As for `blocking_op`.
    #[inline]
    pub(super) unsafe fn try_op_in<E: Elem>(
        &self,
        here: Option<Rt>,
        side: ChanSide,
        elem: E,
        slot: *mut u8,
    ) -> Step {
        self.lock();
        // SAFETY: the lock is held; the rest is the caller's guarantee.
        let step = unsafe { self.step(side, elem, slot, NO_SLEEPER) };
        self.unlock();
        if let Step::Done(sleeper) = step
            && sleeper != NO_SLEEPER
        {
            wait::wake_here(here, sleeper);
        }
        step
    }

    /// Removes a value, if there is one, and returns whether there was. The channel's values are
    /// Ts, and the channel is bounded. Called inside the runtime or on a plain thread.
    pub(super) fn discard_in<T: Copy>(&self, here: Option<Rt>) -> bool {
        if !self.probe_ready(ChanSide::Recv) {
            return false;
        }
        let mut value = MaybeUninit::<T>::uninit();
        let slot = value.as_mut_ptr().cast();
        // SAFETY: `value` has room for a T.
        let step = unsafe { self.try_op_in(here, ChanSide::Recv, TypedElem::<T>::ELEM, slot) };
        matches!(step, Step::Done(_))
    }

    /// Waits until an operation of the other side takes the sudog, until the channel is closed, or
    /// until `deadline`. Releases the lock, and leaves the runtime.
    ///
    /// # Safety
    /// The lock is held, and the slot is as for `blocking_op`.
    #[inline(never)]
    unsafe fn wait_slow(
        &self,
        here: Option<Rt>,
        side: ChanSide,
        slot: *mut u8,
        deadline: Nanos,
    ) -> OpResult {
        let node = Sudog::new(slot);
        let queue = self.queue(side);
        let reason = match side {
            ChanSide::Send => WaitReason::ChanSend,
            ChanSide::Recv => WaitReason::ChanReceive,
        };
        if let Some(rt) = here {
            holder::note_chan(rt, std::ptr::from_ref(self) as usize, deadline);
        }
        let register = |waiter| {
            node.waiter.set(waiter);
            // SAFETY: the lock is held; the sudog stays in this frame until it was taken or
            // withdrawn.
            let watcher = unsafe { self.enlist(side, &node) };
            self.unlock();
            if watcher != NO_SLEEPER {
                wait::wake_here(here, watcher);
            }
            true
        };
        let here = if deadline == NEVER {
            wait::block_in(here, reason, |sleeper| register(Waiter::sole(sleeper)))
        } else if deadline <= now() {
            self.unlock();
            wait::leave(here);
            return OpResult::TimedOut;
        } else {
            let (winner, here) = wait::wait_in(here, reason, deadline, register);
            if winner == Some(Waiter::TIMED_OUT) {
                self.lock();
                // SAFETY: the lock is held; the sudog was pushed to this queue above.
                unsafe { queue.withdraw(&node) };
                self.unlock();
                wait::leave(here);
                // The caller may run long after its time-out: if the operation is possible by now,
                // that is the better result.
                // SAFETY: the caller's guarantee.
                let last = unsafe { self.try_op(side, self.buffer.elem(), slot) };
                return last.unwrap_or(OpResult::TimedOut);
            }
            here
        };
        wait::leave(here);
        if node.state() == SudogState::Moved { OpResult::Done } else { OpResult::Closed }
    }

    /// Begins the operation of a task: does it, or makes the task wait and returns None. The value
    /// at the slot of `node` moves if the result is `Done`. While the task waits, [`Sudog::state`]
    /// tells how the wait has ended.
    ///
    /// # Safety
    /// `elem` is this channel's. The slot of `node` is a value to send, or room for one to receive.
    /// The node is not linked. If the task waits, node and slot stay where they are until the state
    /// is not `Waiting`, or until [`Core::cancel_wait`] has returned.
    #[inline]
    pub(super) unsafe fn begin_wait<E: Elem>(
        &self,
        side: ChanSide,
        elem: E,
        node: &Sudog,
        sleeper: usize,
    ) -> Option<OpResult> {
        let result = loop {
            let here = Rt::enter();
            if self.is_finished(side) {
                wait::leave(here);
                break OpResult::Closed;
            }
            self.lock();
            // SAFETY: the lock is held; the rest is the caller's guarantee.
            match unsafe { self.step(side, elem, node.slot.get(), NO_SLEEPER) } {
                Step::Done(partner) => {
                    self.unlock();
                    if partner != NO_SLEEPER {
                        wait::wake_here(here, partner);
                    }
                    wait::leave(here);
                    break OpResult::Done;
                }
                Step::Closed => {
                    self.unlock();
                    wait::leave(here);
                    break OpResult::Closed;
                }
                Step::Wait => {
                    node.set_sleeper(sleeper);
                    // SAFETY: the lock is held; the node stays alive by the caller's guarantee.
                    let watcher = unsafe { self.enlist(side, node) };
                    self.unlock();
                    if watcher != NO_SLEEPER {
                        wait::wake_here(here, watcher);
                    }
                    wait::leave(here);
                    return None;
                }
                Step::NoBlock => {
                    self.unlock();
                    wait::leave(here);
                    self.grow_slow();
                }
            }
        };
        self.free_blocks();
        Some(result)
    }

    /// Makes `sleeper` wait with `node` from now on: the future of the task has moved to another
    /// task. If the wait has ended meanwhile, the state of the node says so.
    pub(super) fn change_sleeper(&self, node: &Sudog, sleeper: usize) {
        self.locked(|| node.set_sleeper(sleeper));
    }

    /// Ends the wait of a task that gives up, and returns the state of its node. `Waiting` means
    /// that the operation was not done.
    ///
    /// # Safety
    /// [`Core::begin_wait`] was called with this side and node.
    pub(super) unsafe fn cancel_wait(&self, side: ChanSide, node: &Sudog) -> SudogState {
        // SAFETY: the lock is held; the node was pushed to this queue.
        self.locked(|| unsafe { self.queue(side).withdraw(node) });
        node.state()
    }

    /// Puts back a value that was handed to a task which gave up: the first receiver that waits
    /// gets it, or it becomes the first value of the channel. Called outside the runtime.
    ///
    /// # Safety
    /// `elem` is this channel's, and `from` is a value, which moves.
    #[cold]
    pub(super) unsafe fn give_back<E: Elem>(&self, elem: E, from: *const u8) {
        let mut block = Blocks::none();
        loop {
            let here = Rt::enter();
            self.lock();
            // SAFETY: the lock is held; a taken receiver's slot has room until its wait has ended.
            let (done, partner) = unsafe {
                match self.receivers.take_first(NO_SLEEPER) {
                    Some(receiver) => {
                        elem.copy(from, receiver.slot.get());
                        (true, receiver.complete())
                    }
                    None if self.buffer.push_front(elem, from, &mut block) => {
                        (true, self.take_watcher(ChanSide::Recv))
                    }
                    None => (false, NO_SLEEPER),
                }
            };
            self.unlock();
            if partner != NO_SLEEPER {
                wait::wake_here(here, partner);
            }
            wait::leave(here);
            if done {
                return;
            }
            block = self.buffer.allocate();
        }
    }

    /// Appends a waiter to its queue. Returns a watcher of the other side, whose operation is ready
    /// by that: the caller wakes it, unless it is [`NO_SLEEPER`], after it has released the lock.
    ///
    /// # Safety
    /// The lock is held, and the sudog stays alive until it was taken or withdrawn.
    #[inline]
    #[must_use]
    pub(super) unsafe fn enlist(&self, side: ChanSide, node: &Sudog) -> usize {
        let queue = self.queue(side);
        if queue.first().is_null() {
            self.first_waiter.set(node.waiter.get().sleeper());
        }
        // SAFETY: the caller's guarantee.
        unsafe {
            queue.push(node);
            self.take_watcher(match side {
                ChanSide::Send => ChanSide::Recv,
                ChanSide::Recv => ChanSide::Send,
            })
        }
    }

    /// Loads what an operation of this side touches if a partner waits, before it takes the lock.
    #[inline]
    fn prefetch_partner(&self, side: ChanSide) {
        let partners = match side {
            ChanSide::Send => &self.receivers,
            ChanSide::Recv => &self.senders,
        };
        let first = partners.first();
        if !first.is_null() {
            self.first_waiter.prefetch(first.cast());
        }
    }

    /// Unlinks a sudog of a select, unless a taker has.
    ///
    /// # Safety
    /// The caller is inside the runtime or on a plain thread. If the sudog was linked, then in this
    /// queue of this channel.
    #[inline]
    pub(super) unsafe fn withdraw(&self, side: ChanSide, node: &Sudog) {
        self.lock();
        // SAFETY: the lock is held; the rest is the caller's guarantee.
        unsafe { self.queue(side).withdraw(node) };
        self.unlock();
    }

    /// Returns the numbers of waiting senders and receivers, stale ones included. For tests.
    pub(super) fn waiters(&self) -> (usize, usize) {
        let mut counts = (0, 0);
        // SAFETY: the lock is held.
        self.locked(|| counts = unsafe { (self.senders.count(), self.receivers.count()) });
        counts
    }

    /// Adds a block to a chain. Called outside the runtime.
    #[cold]
    pub(super) fn grow_slow(&self) {
        let mut block = self.buffer.allocate();
        self.locked(|| self.buffer.add_spare(&mut block));
        // If another sender has added one meanwhile, this block is freed here.
    }

    /// Frees the blocks that a chain has used up. Called outside the runtime.
    #[inline]
    pub(super) fn free_blocks(&self) {
        if self.buffer.has_discarded() {
            self.free_blocks_slow();
        }
    }

    #[cold]
    fn free_blocks_slow(&self) {
        let mut discarded: Option<Blocks> = None;
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

    /// Closes the channel: sends fail from now on, and receivers get the values that are left.
    /// Wakes waiting receivers, then waiting senders. Does nothing if the channel is closed.
    pub(super) fn close(&self) {
        let here = Rt::enter();
        self.close_in(here);
        wait::leave(here);
    }

    /// [`Core::close`], inside the runtime or on a plain thread.
    pub(super) fn close_in(&self, here: Option<Rt>) {
        self.lock();
        let was_open = !self.is_closed();
        // Release: pairs with `is_closed` without the lock.
        self.closed.store(true, Ordering::Release);
        self.unlock();
        if was_open {
            self.wake_closed(here, &self.receivers);
            self.wake_closed(here, &self.senders);
        }
    }

    /// Wakes all waiters of a queue, because the channel is closed. No waiter is added any more.
    fn wake_closed(&self, here: Option<Rt>, queue: &WaitQueue) {
        // A task that waits may end at any moment, so its sudog cannot be in a list outside the
        // lock: the sleepers are copied.
        let mut taken = [NO_SLEEPER; CLOSE_BATCH];
        while !queue.probe_empty() {
            self.lock();
            // SAFETY: the lock is held; the sleepers are woken below.
            let n = unsafe { queue.take_closed(&mut taken) };
            self.unlock();
            for &sleeper in &taken[..n] {
                wait::wake_here(here, sleeper);
            }
        }
    }
}
