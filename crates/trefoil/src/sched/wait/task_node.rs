//! The wait of a task in a list of sleepers (`list.rs`).
//!
//! A goroutine's node is in its frame, and the goroutine does nothing until its taker has woken it.
//! A task's [`Node`] is in its future: it may be polled, and the future may be dropped, at any
//! moment, also while a taker has the node. So the taker marks the node as *ended* in its last
//! access to it.
//!
//! - A poll that finds the node ended needs no lock.
//! - A drop withdraws the node under the list's lock. If a taker was faster, the drop waits until
//!   the taker has finished with the node. A taker is inside the runtime and about to wake its
//!   sleepers, so that takes some nanoseconds, unless the kernel has stopped its thread. What the
//!   taker gave to the task (a lock, a permit) is then the future's, which passes it on.
//!
//! Rejected: to copy the sleeper words under the lock, as a close of a channel does. A taker may
//! take any number of sleepers at once, in one step with a change of the primitive's word (the
//! readers of a `RwLock`), and can allocate nothing.

use crate::sched::Rt;
use crate::sched::task::note_reason;
use crate::sched::task::waker::TaskWaiter;
use crate::sched::wait;
use crate::sched::wait::list::Node;
use crate::sched::wait::reason::WaitReason;
use crate::sys::futex::futex_wait;
use std::marker::PhantomPinned;
use std::sync::atomic::AtomicU32;
use std::task::{Context, Poll};
use std::time::Duration;

/// Probes of a node whose taker has not finished, before the thread sleeps.
const PROBES: u32 = 1000;
/// The sleep between further probes.
const BACKOFF: Duration = Duration::from_micros(50);

/// See the head of the file. It must not move while the task waits.
pub(crate) struct TaskNode {
    pub(crate) node: Node,
    waiter: TaskWaiter,
    waits: bool,
    _pinned: PhantomPinned,
}

// SAFETY: while the task waits, the node is shared by the rules of `list.rs`, and other threads
// touch it under the list's lock or as its taker; otherwise it belongs to the owner of the future.
unsafe impl Send for TaskNode {}
// SAFETY: a shared reference gives access to nothing that is not guarded as above.
unsafe impl Sync for TaskNode {}

impl TaskNode {
    pub(crate) fn new(weight: usize, waiter: TaskWaiter) -> TaskNode {
        TaskNode { node: Node::new(weight), waiter, waits: false, _pinned: PhantomPinned }
    }

    /// Returns whether the task waits, or its wait has ended and [`TaskNode::poll`] has not yet
    /// said so.
    pub(crate) fn waits(&self) -> bool {
        self.waits
    }

    /// Begins a wait. `enqueue` links the node under the list's lock and returns true, or returns
    /// false. Then this returns false: the task does not wait.
    ///
    /// # Safety
    /// If it returns true, the node does not move, and the list lives, until the wait has ended or
    /// was cancelled.
    pub(crate) unsafe fn begin(
        &mut self,
        context: &Context<'_>,
        reason: WaitReason,
        enqueue: impl FnOnce(&Node, Option<Rt>) -> bool,
    ) -> bool {
        self.node.prepare_for_task(self.waiter.set(context.waker()));
        self.waits = wait::inside(|here| enqueue(&self.node, here));
        if self.waits {
            note_reason(reason);
        }
        self.waits
    }

    /// Returns the word of the taker that has ended the wait. `with_lock` calls its parameter under
    /// the lock of the list.
    pub(crate) fn poll(
        &mut self,
        context: &Context<'_>,
        reason: WaitReason,
        with_lock: impl FnOnce(&mut dyn FnMut()),
    ) -> Poll<u32> {
        debug_assert!(self.waits);
        if !self.node.has_ended() {
            let registered = self.waiter.word();
            let sleeper = self.waiter.set(context.waker());
            if sleeper != registered {
                let mut changed = false;
                wait::inside(|_| with_lock(&mut || changed = self.node.change_task(sleeper)));
                if !changed {
                    // The taker wakes the old waker, which is valid no longer.
                    self.wait_for_taker();
                }
            }
            if !self.node.has_ended() {
                note_reason(reason);
                return Poll::Pending;
            }
        }
        self.waits = false;
        Poll::Ready(self.node.taker_word())
    }

    /// Ends a wait: the future is dropped. `withdraw` takes the node out of the list, under its
    /// lock, with `List::withdraw`, and returns the result of that. Returns the word of the taker
    /// if a taker was faster.
    pub(crate) fn cancel(
        &mut self,
        withdraw: impl FnOnce(&Node, Option<Rt>) -> bool,
    ) -> Option<u32> {
        self.waits = false;
        if !self.node.has_ended() {
            // If it is neither in the list nor taken, a taker has left it out, because the runtime
            // of its goroutine ends.
            if wait::inside(|here| withdraw(&self.node, here)) || !self.node.was_taken() {
                return None;
            }
            self.wait_for_taker();
        }
        Some(self.node.taker_word())
    }

    fn wait_for_taker(&self) {
        let mut probes = 0;
        while !self.node.has_ended() {
            if probes < PROBES {
                probes += 1;
                std::hint::spin_loop();
            } else {
                futex_wait(&AtomicU32::new(0), 0, Some(BACKOFF));
            }
        }
    }
}
