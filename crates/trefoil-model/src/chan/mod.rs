//! The files of a channel, as they are in `trefoil`, with this crate's cells and lock.
//!
//! `Sender` and `Receiver` are the thinnest possible: the checks talk to the [`Core`](core::Core)
//! through them.

pub(crate) mod cells;
mod lock;

#[path = "../../../trefoil/src/chan/buffer.rs"]
mod buffer;
#[path = "../../../trefoil/src/chan/core.rs"]
mod core;
#[path = "../../../trefoil/src/chan/handle.rs"]
mod handle;
#[path = "../../../trefoil/src/chan/queue.rs"]
mod queue;
pub(crate) mod select;

use self::buffer::TypedElem;
use self::core::{ChanSide, Core, OpResult};
use self::handle::Handle;
use self::queue::{Sudog, SudogState};
use crate::sched::Rt;
use crate::sched::wait;
use crate::sched::wait::reason::WaitReason;
use std::mem::{ManuallyDrop, MaybeUninit};

/// Why an operation failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Failed {
    Closed,
    TimedOut,
    NotNow,
}

impl Failed {
    fn because(ended: Option<OpResult>) -> Failed {
        match ended {
            Some(OpResult::TimedOut) => Failed::TimedOut,
            Some(_) => Failed::Closed,
            None => Failed::NotNow,
        }
    }
}

/// As in `trefoil`.
pub(crate) struct Sender<T>(ManuallyDrop<Handle<T, true>>);

/// As in `trefoil`. None is a channel that never delivers ([`never`]).
pub(crate) struct Receiver<T>(ManuallyDrop<Option<Handle<T, false>>>);

// A model that has failed is not cleaned up: its channels may be broken.
impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: dropped once, by its owner, and not used after it.
            unsafe { ManuallyDrop::drop(&mut self.0) };
        }
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: dropped once, by its owner, and not used after it.
            unsafe { ManuallyDrop::drop(&mut self.0) };
        }
    }
}

// SAFETY: as in `trefoil`.
unsafe impl<T: Send> Send for Sender<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Sender<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Receiver<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Receiver<T> {}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Sender(self.0.clone())
    }
}

impl<T> Clone for Receiver<T> {
    fn clone(&self) -> Self {
        Receiver(self.0.clone())
    }
}

pub(crate) fn bounded<T>(cap: usize) -> (Sender<T>, Receiver<T>) {
    let (sender, receiver) = handle::new(cap);
    (Sender(ManuallyDrop::new(sender)), Receiver(ManuallyDrop::new(Some(receiver))))
}

pub(crate) fn unbounded<T>() -> (Sender<T>, Receiver<T>) {
    bounded(buffer::UNBOUNDED)
}

pub(crate) fn never<T>() -> Receiver<T> {
    Receiver(ManuallyDrop::new(None))
}

impl<T> Sender<T> {
    pub(crate) fn core(&self) -> &Core {
        self.0.core()
    }

    /// Sends, and waits until `deadline` if it must.
    pub(crate) fn send(&self, value: T, deadline: u64) -> Result<(), (T, Failed)> {
        let value = ManuallyDrop::new(value);
        let slot = (&raw const value).cast_mut().cast();
        // SAFETY: `value` is a T of this frame. It is moved out if the result is `Done`.
        match unsafe {
            self.core().blocking_op(ChanSide::Send, TypedElem::<T>::ELEM, slot, deadline)
        } {
            OpResult::Done => Ok(()),
            ended => Err((ManuallyDrop::into_inner(value), Failed::because(Some(ended)))),
        }
    }

    /// Sends without waiting.
    pub(crate) fn try_send(&self, value: T) -> Result<(), (T, Failed)> {
        let value = ManuallyDrop::new(value);
        let slot = (&raw const value).cast_mut().cast();
        // SAFETY: `value` is a T of this frame. It is moved out if the result is `Done`.
        match unsafe { self.core().try_op(ChanSide::Send, TypedElem::<T>::ELEM, slot) } {
            Some(OpResult::Done) => Ok(()),
            ended => Err((ManuallyDrop::into_inner(value), Failed::because(ended))),
        }
    }

    pub(crate) fn try_send_in(&self, rt: Rt, value: T)
    where
        T: Copy,
    {
        let slot = (&raw const value).cast_mut().cast();
        // SAFETY: `value` is a T of this frame, and Copy.
        let _ =
            unsafe { self.core().try_op_in(Some(rt), ChanSide::Send, TypedElem::<T>::ELEM, slot) };
    }

    pub(crate) fn drop_keep_open(self) {
        let mut this = ManuallyDrop::new(self);
        if !std::thread::panicking() {
            // SAFETY: dropped once, by its owner, and not used after it.
            unsafe { ManuallyDrop::take(&mut this.0) }.drop_keep_open();
        }
    }

    pub(crate) fn close(&self) {
        self.core().close();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.core().is_closed()
    }
}

impl<T> Receiver<T> {
    pub(crate) fn core(&self) -> Option<&Core> {
        self.0.as_ref().map(Handle::core)
    }

    /// Receives, and waits until `deadline` if it must.
    pub(crate) fn recv(&self, deadline: u64) -> Result<T, Failed> {
        let core = self.core().expect("a channel that never sends has no receive");
        let mut value = MaybeUninit::<T>::uninit();
        let slot = value.as_mut_ptr().cast();
        // SAFETY: `value` has room for a T, and holds one if the result is `Done`.
        unsafe {
            match core.blocking_op(ChanSide::Recv, TypedElem::<T>::ELEM, slot, deadline) {
                OpResult::Done => Ok(value.assume_init()),
                ended => Err(Failed::because(Some(ended))),
            }
        }
    }

    /// Receives without waiting.
    pub(crate) fn try_recv(&self) -> Result<T, Failed> {
        let Some(core) = self.core() else { return Err(Failed::NotNow) };
        let mut value = MaybeUninit::<T>::uninit();
        let slot = value.as_mut_ptr().cast();
        // SAFETY: `value` has room for a T, and holds one if the result is `Done`.
        unsafe {
            match core.try_op(ChanSide::Recv, TypedElem::<T>::ELEM, slot) {
                Some(OpResult::Done) => Ok(value.assume_init()),
                ended => Err(Failed::because(ended)),
            }
        }
    }

    pub(crate) fn discard_in(&self, here: Option<Rt>) -> bool
    where
        T: Copy,
    {
        self.core().is_some_and(|core| core.discard_in::<T>(here))
    }

    /// Asserts that the channel's lists are empty.
    pub(crate) fn assert_no_waiters(&self) {
        let waiters = self.core().map_or((0, 0), Core::waiters);
        assert_eq!(waiters, (0, 0), "a waiter is left in a list");
    }
}

/// A receive of a task: restates `chan/future.rs`. The task is the goroutine that calls it.
pub(crate) struct TaskRecv<'a> {
    core: &'a Core,
    node: Box<Sudog>,
    value: Box<u32>,
}

impl<'a> TaskRecv<'a> {
    /// The first poll, by goroutine `number`. Returns the result, or the receive that waits.
    pub(crate) fn begin(
        rx: &'a Receiver<u32>,
        number: usize,
    ) -> Result<Result<u32, Failed>, TaskRecv<'a>> {
        let core = rx.core().expect("a channel that never sends has no receive");
        let mut value = Box::new(0u32);
        let node = Box::new(Sudog::new(std::ptr::from_mut(&mut *value).cast()));
        let this = TaskRecv { core, node, value };
        // SAFETY: node and value are boxed until `poll` has returned a result, or `cancel` has.
        let begun = unsafe {
            core.begin_wait(ChanSide::Recv, TypedElem::<u32>::ELEM, &this.node, number + 1)
        };
        match begun {
            Some(OpResult::Done) => Ok(Ok(*this.value)),
            Some(_) => Ok(Err(Failed::Closed)),
            None => Err(this),
        }
    }

    /// A later poll. It may come before the wake-up.
    pub(crate) fn poll(&self) -> Option<Result<u32, Failed>> {
        let result = match self.node.state() {
            SudogState::Waiting => return None,
            SudogState::Moved => Ok(*self.value),
            SudogState::Closed => Err(Failed::Closed),
        };
        self.reuse();
        Some(result)
    }

    /// Polls after each wake-up, until the receive has ended.
    pub(crate) fn wait(&self) -> Result<u32, Failed> {
        loop {
            if let Some(result) = self.poll() {
                return result;
            }
            wait::block(WaitReason::ChanReceive, |_| true);
        }
    }

    /// Drops the future.
    pub(crate) fn cancel(self) {
        // SAFETY: it waits, or its wait has ended; then the slot holds a value.
        unsafe {
            let state = self.core.cancel_wait(ChanSide::Recv, &self.node);
            self.reuse();
            if state == SudogState::Moved {
                let from = std::ptr::from_ref(&*self.value).cast();
                self.core.give_back(TypedElem::<u32>::ELEM, from);
            }
        }
    }

    /// The memory of the future is used for something else: loom reports a taker that still reads
    /// the node.
    fn reuse(&self) {
        self.node.set_sleeper(0);
        self.node.slot.set(std::ptr::null_mut());
    }
}
