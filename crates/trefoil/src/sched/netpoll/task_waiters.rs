//! Tasks that wait for a descriptor.
//!
//! A task has no frame in which it could wait, so it leaves its sleeper word with the [`Pollable`]
//! ([`Pollable::register_task`]), in one of two places for each direction:
//!
//! - A [`TaskNode`] in the future that it polls, linked into a [`TaskWaiters`]. Any number of tasks
//!   may wait so.
//! - The *slot*: one word. It is for the poll traits (`AsyncRead`), which have no future of their
//!   own. As they define it, only the task that polled last is woken.
//!
//! An edge wakes all of them, and removes them.
//!
//! Invariants:
//! 1. The lock of the Pollable guards everything here. A poll or a drop of the future may come at
//!    any time, so a taker is done with a node when it releases the lock: it has unlinked the node
//!    and copied the word.
//! 2. Each registered word was counted as a waiter in the shard whose handle is beside it.

use crate::sched::Sched;
use crate::sched::netpoll::pollable::{Direction, Pollable};
use crate::sched::netpoll::poller::Shard;
use crate::sched::runnable::RunList;
use crate::sched::task::waker;
use crate::sched::wait::inside;
use crate::sys::clock::Nanos;
use std::cell::Cell;
use std::io;
use std::marker::PhantomPinned;
use std::os::fd::RawFd;
use std::ptr::null;

/// A sleeper word, and the handle of the shard in which it counts as a waiter. Both are 0 if there
/// is none.
#[derive(Clone, Copy)]
struct Registration {
    word: usize,
    shard: u64,
}

impl Registration {
    const NONE: Registration = Registration { word: 0, shard: 0 };

    fn is_some(self) -> bool {
        self.word != 0
    }

    /// Ends the registration.
    fn uncount(self) {
        if self.is_some() {
            Shard::uncount_waiter_of(self.shard);
        }
    }

    /// Ends the registration, and wakes the task. What remains to be done for that after the lock
    /// is released is added to `later`.
    fn wake(self, later: &mut RunList) {
        if self.is_some() {
            waker::wake_later(self.word, later);
            self.uncount();
        }
    }
}

/// The place of a task in a [`TaskWaiters`]. It is part of a pinned future.
pub(crate) struct TaskNode {
    registration: Cell<Registration>,
    next: Cell<*const TaskNode>,
    prev: Cell<*const TaskNode>,
    /// Others have its address.
    _pinned: PhantomPinned,
}

// SAFETY: the holder of the Pollable's lock uses it, on any thread (invariant 1).
unsafe impl Send for TaskNode {}
// SAFETY: as above.
unsafe impl Sync for TaskNode {}

impl TaskNode {
    pub(crate) const fn new() -> TaskNode {
        TaskNode {
            registration: Cell::new(Registration::NONE),
            next: Cell::new(null()),
            prev: Cell::new(null()),
            _pinned: PhantomPinned,
        }
    }
}

/// Where a task leaves its sleeper word.
#[derive(Clone, Copy)]
pub(crate) enum TaskPlace<'a> {
    /// The node must stay where it is until [`TaskWaiters::withdraw`], or until the Pollable is
    /// freed.
    Node(&'a TaskNode),
    Slot,
}

/// The tasks that wait for one direction of a descriptor. See the head of the file.
pub(super) struct TaskWaiters {
    slot: Registration,
    first: *const TaskNode,
}

// SAFETY: the nodes belong to the holder of the lock (invariant 1).
unsafe impl Send for TaskWaiters {}

impl TaskWaiters {
    pub(super) const fn new() -> TaskWaiters {
        TaskWaiters { slot: Registration::NONE, first: null() }
    }

    pub(super) fn is_empty(&self) -> bool {
        !self.slot.is_some() && self.first.is_null()
    }

    /// Registers `word`, which the caller has counted in `shard`, in place of the word that was
    /// there.
    pub(super) fn register(&mut self, place: TaskPlace<'_>, word: usize, shard: &Shard) {
        let new = Registration { word, shard: shard.handle() };
        let old = match place {
            TaskPlace::Slot => std::mem::replace(&mut self.slot, new),
            TaskPlace::Node(node) => {
                let old = node.registration.replace(new);
                if !old.is_some() {
                    self.link(node);
                }
                old
            }
        };
        old.uncount();
    }

    fn link(&mut self, node: &TaskNode) {
        node.prev.set(null());
        node.next.set(self.first);
        // SAFETY: linked nodes are alive: their futures withdraw them before they are gone.
        if let Some(first) = unsafe { self.first.as_ref() } {
            first.prev.set(node);
        }
        self.first = node;
    }

    /// Removes `node`, if it is registered.
    pub(super) fn withdraw(&mut self, node: &TaskNode) {
        let old = node.registration.replace(Registration::NONE);
        if !old.is_some() {
            return;
        }
        old.uncount();
        let (prev, next) = (node.prev.get(), node.next.get());
        // SAFETY: as in `link`.
        unsafe {
            match prev.as_ref() {
                Some(prev) => prev.next.set(next),
                None => self.first = next,
            }
            if let Some(next) = next.as_ref() {
                next.prev.set(prev);
            }
        }
    }

    /// Removes all, and wakes them when the caller passes `later` to [`waker::wake_all`].
    pub(super) fn take_all(&mut self, later: &mut RunList) {
        std::mem::replace(&mut self.slot, Registration::NONE).wake(later);
        self.drain(|registration| registration.wake(later));
    }

    /// Removes all without waking them: the descriptor is gone.
    pub(super) fn clear(&mut self) {
        std::mem::replace(&mut self.slot, Registration::NONE).uncount();
        self.drain(Registration::uncount);
    }

    fn drain(&mut self, mut f: impl FnMut(Registration)) {
        // SAFETY: as in `link`.
        while let Some(node) = unsafe { self.first.as_ref() } {
            self.first = node.next.get();
            f(node.registration.replace(Registration::NONE));
        }
    }
}

impl Pollable {
    /// Makes the next edge wake the task with the sleeper word `word`, unless anything has changed
    /// since the task's attempt: there were more edges than the `seen` ones, or the deadline is
    /// another than `deadline`, or the descriptor is closed. Returns whether it did. If not, the
    /// task tries again.
    ///
    /// # Errors
    /// As [`Pollable::wait`].
    pub(crate) fn register_task(
        &'static self,
        sched: &Sched,
        fd: RawFd,
        direction: Direction,
        (place, word): (TaskPlace<'_>, usize),
        (seen, deadline): (u32, Nanos),
    ) -> io::Result<bool> {
        let shard = self.register(sched, fd, direction)?;
        shard.count_waiter(sched);
        let is_registered = inside(|_| {
            let mut inner = self.inner.lock();
            let moved = self.deadline(direction) != deadline
                || self.registered_shard(sched.poller).is_some_and(|s| !std::ptr::eq(s, shard));
            if inner.closed || moved || self.edges(direction) != seen {
                return false;
            }
            inner.tasks[direction as usize].register(place, word, shard);
            true
        });
        if !is_registered {
            shard.uncount_waiter();
        }
        Ok(is_registered)
    }

    /// Undoes [`Pollable::register_task`] for a node. The caller may free it then.
    pub(crate) fn withdraw_task(&self, direction: Direction, node: &TaskNode) {
        inside(|_| self.inner.lock().tasks[direction as usize].withdraw(node));
    }
}
