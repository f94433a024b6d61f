//! Arms with types. The macro makes one slot for each arm in its frame, an array of [`Arm`]s that
//! point to them, and takes the chosen one's result out of its slot.

use super::super::core::{Ended, Side};
use super::super::{Receiver, RecvError, SendError, Sender};
use super::passes::{Arm, Chosen, Target};
use crate::sys::clock;
use std::mem::MaybeUninit;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// What `recv(…)` takes: a receiver, or a reference to one.
#[diagnostic::on_unimplemented(
    message = "`recv(…)` takes a `Receiver`, not `{Self}`",
    label = "not the receiving end of a channel"
)]
pub trait SelectRecv {
    /// What is received.
    type Item;
    /// The receiver.
    fn receiver(&self) -> &Receiver<Self::Item>;
}

/// What `send(…, value)` takes: a sender, or a reference to one.
#[diagnostic::on_unimplemented(
    message = "`send(…, value)` takes a `Sender`, not `{Self}`",
    label = "not the sending end of a channel"
)]
pub trait SelectSend {
    /// What is sent.
    type Item;
    /// The sender.
    fn sender(&self) -> &Sender<Self::Item>;
}

impl<T> SelectRecv for Receiver<T> {
    type Item = T;
    #[inline(always)]
    fn receiver(&self) -> &Receiver<T> {
        self
    }
}

impl<T> SelectSend for Sender<T> {
    type Item = T;
    #[inline(always)]
    fn sender(&self) -> &Sender<T> {
        self
    }
}

macro_rules! by_reference {
    ($($reference:ty),+) => {$(
        impl<C: SelectRecv + ?Sized> SelectRecv for $reference {
            type Item = C::Item;
            #[inline(always)]
            fn receiver(&self) -> &Receiver<C::Item> {
                (**self).receiver()
            }
        }
        impl<C: SelectSend + ?Sized> SelectSend for $reference {
            type Item = C::Item;
            #[inline(always)]
            fn sender(&self) -> &Sender<C::Item> {
                (**self).sender()
            }
        }
    )+};
}

by_reference!(&C, &mut C, Box<C>, Rc<C>, Arc<C>);

/// Room for what a `recv` arm receives.
#[derive(Debug)]
pub struct RecvSlot<T>(MaybeUninit<T>);

impl<T> RecvSlot<T> {
    /// An empty one.
    #[allow(clippy::new_without_default)]
    #[inline]
    pub fn new() -> Self {
        RecvSlot(MaybeUninit::uninit())
    }

    /// The arm that receives into it.
    #[inline]
    pub fn recv<'a, C>(&'a mut self, channel: &'a C) -> Arm<'a>
    where
        C: SelectRecv<Item = T> + ?Sized,
    {
        // SAFETY: the slot has room for a T, and is borrowed for as long as the arm.
        unsafe { Arm::channel(channel.receiver().core(), Side::Recv, self.0.as_mut_ptr().cast()) }
    }

    /// What was received, if this is the chosen arm.
    #[inline]
    pub fn finish(self, index: usize, chosen: Chosen) -> Option<Result<T, RecvError>> {
        if chosen.index != index {
            return None;
        }
        // SAFETY: `done` says that the value has moved into the slot.
        Some(if chosen.done { Ok(unsafe { self.0.assume_init() }) } else { Err(RecvError) })
    }
}

/// The value that a `send` arm sends.
#[derive(Debug)]
pub struct SendSlot<T>(Option<T>);

impl<T> SendSlot<T> {
    /// An empty one.
    #[allow(clippy::new_without_default)]
    #[inline]
    pub fn new() -> Self {
        SendSlot(None)
    }

    /// The arm that sends `value` from it.
    #[inline]
    pub fn send<'a, C>(&'a mut self, channel: &'a C, value: T) -> Arm<'a>
    where
        C: SelectSend<Item = T> + ?Sized,
    {
        let slot: *mut T = self.0.insert(value);
        // SAFETY: the slot holds a T, and is borrowed for as long as the arm; see `finish`.
        unsafe { Arm::channel(Some(channel.sender().core()), Side::Send, slot.cast()) }
    }

    /// How it went, if this is the chosen arm. Else the value is dropped.
    #[inline]
    pub fn finish(mut self, index: usize, chosen: Chosen) -> Option<Result<(), SendError<T>>> {
        if chosen.index != index {
            return None;
        }
        let value = self.0.take();
        if chosen.done {
            std::mem::forget(value); // it has moved into the channel
            return Some(Ok(()));
        }
        value.map(|value| Err(SendError(value)))
    }
}

/// An `after` arm.
#[derive(Debug)]
pub struct AfterSlot;

impl AfterSlot {
    /// The arm that is chosen after `limit`.
    #[inline]
    pub fn after(&mut self, limit: Duration) -> Arm<'static> {
        Arm::new(Target::After(clock::after(limit)), std::ptr::null_mut())
    }

    /// Whether this is the chosen arm.
    #[inline]
    pub fn finish(self, index: usize, chosen: Chosen) -> Option<()> {
        (chosen.index == index).then_some(())
    }
}

/// A select of one `recv`.
#[inline]
pub fn recv_one<C: SelectRecv + ?Sized>(channel: &C) -> Result<C::Item, RecvError> {
    channel.receiver().recv()
}

/// A select of one `send`.
#[inline]
pub fn send_one<C: SelectSend + ?Sized>(
    channel: &C,
    value: C::Item,
) -> Result<(), SendError<C::Item>> {
    channel.sender().send(value)
}

/// A select of one `recv` and a `default`: None.
#[inline]
pub fn try_recv_one<C: SelectRecv + ?Sized>(channel: &C) -> Option<Result<C::Item, RecvError>> {
    match channel.receiver().try_recv() {
        Ok(value) => Some(Ok(value)),
        Err(e) => e.is_closed().then_some(Err(RecvError)),
    }
}

/// A select of one `send` and a `default`: None.
#[inline]
pub fn try_send_one<C: SelectSend + ?Sized>(
    channel: &C,
    value: C::Item,
) -> Option<Result<(), SendError<C::Item>>> {
    match channel.sender().try_send(value) {
        Ok(()) => Some(Ok(())),
        Err(e) => e.is_closed().then(|| Err(SendError(e.into_inner()))),
    }
}

/// A select of one `recv` and an `after`: None.
pub fn recv_within<C: SelectRecv + ?Sized>(
    channel: &C,
    limit: Duration,
) -> Option<Result<C::Item, RecvError>> {
    match channel.receiver().recv_until(clock::after(limit)) {
        Ok(value) => Some(Ok(value)),
        Err(ended) => (ended == Ended::Closed).then_some(Err(RecvError)),
    }
}

/// A select of one `send` and an `after`: None.
pub fn send_within<C: SelectSend + ?Sized>(
    channel: &C,
    value: C::Item,
    limit: Duration,
) -> Option<Result<(), SendError<C::Item>>> {
    match channel.sender().send_until(value, clock::after(limit)) {
        Ok(()) => Some(Ok(())),
        Err((value, ended)) => (ended == Ended::Closed).then_some(Err(SendError(value))),
    }
}
