//! Arms with types. The macro makes one slot for each arm in its frame, an array of [`Arm`]s that
//! point to the slots, and takes the result of the chosen arm out of its slot.
//!
//! Everything here is public for the macro, so safe code can call it in any order. Invariant: what
//! a slot contains follows from its own [`Outcome`], which only a select writes (`passes.rs`,
//! invariant 3). No argument of a caller is trusted.

use super::super::core::{ChanSide, OpResult};
use super::super::{Receiver, RecvError, SendError, Sender};
use super::passes::{Arm, ArmFuture, ArmTarget, Outcome};
use crate::sys::clock;
use std::cell::Cell;
use std::fmt;
use std::future::{Future, IntoFuture};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::Deref;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

/// The types that `recv(…)` takes: a receiver, or what derefs to one.
#[diagnostic::on_unimplemented(
    message = "`recv(…)` takes a `Receiver`, not `{Self}`",
    label = "not the receiving end of a channel"
)]
pub trait SelectRecv {
    /// The type of the received values.
    type Item;
    /// Returns the receiver.
    fn receiver(&self) -> &Receiver<Self::Item>;
}

/// The types that `send(…, value)` takes: a sender, or what derefs to one.
#[diagnostic::on_unimplemented(
    message = "`send(…, value)` takes a `Sender`, not `{Self}`",
    label = "not the sending end of a channel"
)]
pub trait SelectSend {
    /// The type of the sent values.
    type Item;
    /// Returns the sender.
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

// Whatever derefs to a channel end: references, `Box`, `Rc`, `Arc`, the guards of locks, and types
// of the user. (The channel ends themselves do not deref, so these do not overlap with the above.)
impl<P> SelectRecv for P
where
    P: Deref + ?Sized,
    P::Target: SelectRecv,
{
    type Item = <P::Target as SelectRecv>::Item;
    #[inline(always)]
    fn receiver(&self) -> &Receiver<Self::Item> {
        (**self).receiver()
    }
}

impl<P> SelectSend for P
where
    P: Deref + ?Sized,
    P::Target: SelectSend,
{
    type Item = <P::Target as SelectSend>::Item;
    #[inline(always)]
    fn sender(&self) -> &Sender<Self::Item> {
        (**self).sender()
    }
}

/// Room for the value that a `recv` arm receives.
///
/// A slot that is dropped before `finish` leaks the received value.
#[derive(Debug)]
pub struct RecvSlot<T> {
    value: MaybeUninit<T>,
    outcome: Cell<Outcome>,
}

impl<T> RecvSlot<T> {
    /// Creates an empty slot.
    #[allow(clippy::new_without_default)]
    #[inline]
    pub fn new() -> Self {
        RecvSlot { value: MaybeUninit::uninit(), outcome: Cell::new(Outcome::NotDone) }
    }

    /// Returns the arm that receives into the slot.
    ///
    /// # Panics
    /// Panics if an arm of this slot was chosen before.
    #[inline]
    pub fn recv<'a, C>(&'a mut self, channel: &'a C) -> Arm<'a>
    where
        C: SelectRecv<Item = T> + ?Sized,
    {
        assert!(self.outcome.get() == Outcome::NotDone, "{SLOT_USED}");
        let slot = self.value.as_mut_ptr().cast();
        // SAFETY: the slot has room for a T, and is borrowed for as long as the arm exists.
        let arm = unsafe { Arm::channel(channel.receiver().core(), ChanSide::Recv, slot) };
        arm.reports_to(&self.outcome)
    }

    /// Returns the result of the receive, or `None` if the arm was not chosen.
    #[inline]
    pub fn finish(self) -> Option<Result<T, RecvError>> {
        match self.outcome.get() {
            Outcome::NotDone => None,
            // SAFETY: a select moved a value into the slot, and `self` is consumed here.
            Outcome::Moved => Some(Ok(unsafe { self.value.assume_init() })),
            Outcome::Closed => Some(Err(RecvError)),
        }
    }
}

/// The value that a `send` arm sends.
///
/// # Drop
/// Drops the value unless it was sent.
#[derive(Debug)]
pub struct SendSlot<T> {
    value: Option<ManuallyDrop<T>>,
    outcome: Cell<Outcome>,
}

impl<T> SendSlot<T> {
    /// Creates an empty slot.
    #[allow(clippy::new_without_default)]
    #[inline]
    pub fn new() -> Self {
        SendSlot { value: None, outcome: Cell::new(Outcome::NotDone) }
    }

    /// Returns the arm that sends `value` from the slot.
    ///
    /// # Panics
    /// Panics if the slot was used before.
    #[inline]
    pub fn send<'a, C>(&'a mut self, channel: &'a C, value: T) -> Arm<'a>
    where
        C: SelectSend<Item = T> + ?Sized,
    {
        assert!(self.value.is_none(), "{SLOT_USED}");
        let slot: *mut ManuallyDrop<T> = self.value.insert(ManuallyDrop::new(value));
        let core = channel.sender().core();
        // SAFETY: the slot holds a T, and is borrowed for as long as the arm exists. If the value
        // moves, the outcome says so, and the slot does not use the value again.
        let arm = unsafe { Arm::channel(core, ChanSide::Send, slot.cast()) };
        arm.reports_to(&self.outcome)
    }

    /// Returns the result of the send, or `None` if the arm was not chosen. Then the value is
    /// dropped.
    #[inline]
    pub fn finish(mut self) -> Option<Result<(), SendError<T>>> {
        match self.outcome.get() {
            Outcome::NotDone => None,
            Outcome::Moved => Some(Ok(())),
            Outcome::Closed => {
                let value = self.value.take()?;
                Some(Err(SendError(ManuallyDrop::into_inner(value))))
            }
        }
    }
}

impl<T> Drop for SendSlot<T> {
    #[inline]
    fn drop(&mut self) {
        if self.outcome.get() != Outcome::Moved
            && let Some(value) = self.value.take()
        {
            drop(ManuallyDrop::into_inner(value));
        }
    }
}

/// The future of a `future` arm, and room for its value. It is pinned: a poll may have left
/// references to the future in it.
pub struct FutureSlot<F: Future> {
    future: Option<F>,
    output: Option<F::Output>,
}

impl<F: Future> FutureSlot<F> {
    /// Creates an empty slot.
    #[allow(clippy::new_without_default)]
    #[inline]
    pub fn new() -> Self {
        FutureSlot { future: None, output: None }
    }

    /// Returns the pinned future, and the output, which is not pinned.
    #[inline]
    fn project(self: Pin<&mut Self>) -> (Pin<&mut Option<F>>, &mut Option<F::Output>) {
        // SAFETY: the future is pinned with the slot. It does not move: `Pin::set` drops it in
        // place, and there is no other access. `FutureSlot` has no `Drop`.
        unsafe {
            let this = self.get_unchecked_mut();
            (Pin::new_unchecked(&mut this.future), &mut this.output)
        }
    }

    /// Returns the arm that polls `future` in the slot.
    ///
    /// # Panics
    /// Panics if the slot was used before.
    #[inline]
    pub fn future<'a, I>(mut self: Pin<&'a mut Self>, future: I) -> Arm<'a>
    where
        I: IntoFuture<IntoFuture = F>,
    {
        assert!(self.future.is_none() && self.output.is_none(), "{SLOT_USED}");
        self.as_mut().project().0.set(Some(future.into_future()));
        Arm::new(ArmTarget::Future(self), std::ptr::null_mut())
    }

    /// Returns the value of the future, or `None` if the arm was not chosen.
    #[inline]
    pub fn finish(self: Pin<&mut Self>) -> Option<F::Output> {
        self.project().1.take()
    }
}

impl<F: Future> ArmFuture for FutureSlot<F> {
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> bool {
        let (mut future, output) = self.project();
        let Some(polled) = future.as_mut().as_pin_mut() else { return false };
        let Poll::Ready(value) = polled.poll(context) else { return false };
        *output = Some(value);
        future.set(None);
        true
    }

    fn clear(self: Pin<&mut Self>) {
        self.project().0.set(None);
    }
}

impl<F: Future> fmt::Debug for FutureSlot<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FutureSlot { .. }")
    }
}

/// The panic message for the second use of a slot.
const SLOT_USED: &str = "select: a slot serves one arm";

/// An `after` arm.
#[derive(Debug)]
pub struct AfterSlot;

impl AfterSlot {
    /// Returns the arm that is chosen after `limit`.
    #[inline]
    pub fn after<'a>(&mut self, limit: Duration) -> Arm<'a> {
        Arm::new(ArmTarget::After(clock::after(limit)), std::ptr::null_mut())
    }

    /// Returns the result of the arm, which has no value.
    #[inline]
    pub fn finish(self) -> Option<()> {
        Some(())
    }
}

/// Does a select of one `recv`.
#[inline]
pub fn recv_one<C: SelectRecv + ?Sized>(channel: &C) -> Result<C::Item, RecvError> {
    channel.receiver().recv()
}

/// Does a select of one `send`.
#[inline]
pub fn send_one<C: SelectSend + ?Sized>(
    channel: &C,
    value: C::Item,
) -> Result<(), SendError<C::Item>> {
    channel.sender().send(value)
}

/// Does a select of one `recv` and a `default`, for which it returns `None`.
#[inline]
pub fn try_recv_one<C: SelectRecv + ?Sized>(channel: &C) -> Option<Result<C::Item, RecvError>> {
    match channel.receiver().try_recv() {
        Ok(value) => Some(Ok(value)),
        Err(e) => e.is_closed().then_some(Err(RecvError)),
    }
}

/// Does a select of one `send` and a `default`, for which it returns `None`.
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

/// Does a select of one `recv` and an `after`, for which it returns `None`.
pub fn recv_within<C: SelectRecv + ?Sized>(
    channel: &C,
    limit: Duration,
) -> Option<Result<C::Item, RecvError>> {
    match channel.receiver().recv_until(clock::after(limit)) {
        Ok(value) => Some(Ok(value)),
        Err(result) => (result == OpResult::Closed).then_some(Err(RecvError)),
    }
}

/// Does a select of one `send` and an `after`, for which it returns `None`.
pub fn send_within<C: SelectSend + ?Sized>(
    channel: &C,
    value: C::Item,
    limit: Duration,
) -> Option<Result<(), SendError<C::Item>>> {
    match channel.sender().send_until(value, clock::after(limit)) {
        Ok(()) => Some(Ok(())),
        Err((value, result)) => (result == OpResult::Closed).then_some(Err(SendError(value))),
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::bounded;
    use super::super::passes::{choose, choose_or_default};
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;

    #[test]
    fn finish_of_an_unused_slot_is_none() {
        assert_eq!(RecvSlot::<String>::new().finish(), None);
        assert_eq!(SendSlot::<String>::new().finish(), None);
    }

    #[test]
    fn finish_of_an_arm_that_was_not_chosen_is_none() {
        let (tx, ready) = bounded(1);
        let (_tx, empty) = bounded::<String>(1);
        tx.send("value".to_string()).unwrap();
        let (mut a, mut b) = (RecvSlot::new(), RecvSlot::new());
        let chosen = choose(&mut [a.recv(&ready), b.recv(&empty)]);
        assert_eq!(chosen.index(), 0);
        // The token of the other select says "arm 0", and the other slot has nothing to do with it.
        let mut other = RecvSlot::new();
        let other_chosen = choose_or_default(&mut [other.recv(&empty)]);
        assert_eq!(other.finish(), None);
        assert_ne!(other_chosen.index(), chosen.index());
        assert_eq!(b.finish(), None);
        assert_eq!(a.finish(), Some(Ok("value".to_string())));
    }

    #[test]
    fn arms_that_are_selected_twice_are_done_once() {
        let (tx, rx) = bounded(2);
        let value = Arc::new(());
        let mut slot = SendSlot::new();
        {
            let mut arms = [slot.send(&tx, value.clone())];
            assert_eq!(choose_or_default(&mut arms).index(), 0);
            assert_ne!(choose_or_default(&mut arms).index(), 0);
        }
        assert_eq!(slot.finish(), Some(Ok(())));
        assert_eq!((rx.len(), Arc::strong_count(&value)), (1, 2));
        drop(rx);
        assert_eq!(Arc::strong_count(&value), 1);
    }

    #[test]
    fn dropping_a_slot_drops_only_a_value_that_was_not_sent() {
        let (tx, rx) = bounded(1);
        let value = Arc::new(());
        for sent in [true, false] {
            let mut slot = SendSlot::new();
            choose_or_default(&mut [slot.send(&tx, value.clone())]);
            drop(slot);
            assert_eq!((rx.len(), Arc::strong_count(&value)), (1, 2), "{sent}");
        }
    }

    #[test]
    fn a_slot_cannot_be_used_again() {
        let (tx, rx) = bounded(2);
        let mut send = SendSlot::new();
        let _ = send.send(&tx, 1);
        let again = catch_unwind(AssertUnwindSafe(|| _ = send.send(&tx, 2)));
        assert!(again.is_err());
        tx.send(3).unwrap();
        let mut recv = RecvSlot::new();
        choose(&mut [recv.recv(&rx)]);
        let again = catch_unwind(AssertUnwindSafe(|| _ = recv.recv(&rx)));
        assert!(again.is_err());
        assert_eq!(recv.finish(), Some(Ok(3)));
    }
    /// The slots are dropped while the panic unwinds; the sent value belongs to the channel by
    /// then.
    #[test]
    fn a_sent_value_is_not_dropped_when_the_value_of_another_arm_panics() {
        struct PanicsOnDrop;
        impl Drop for PanicsOnDrop {
            fn drop(&mut self) {
                panic!("dropped");
            }
        }
        let (full, _rx) = bounded(0);
        let (tx, rx) = bounded(1);
        let value = Arc::new(());
        let sent = value.clone();
        let select = AssertUnwindSafe(|| {
            crate::select! {
                send(full, PanicsOnDrop) -> _ => unreachable!("no receiver waits"),
                send(tx, sent) -> _ => unreachable!("the other value panics first"),
            }
        });
        assert!(catch_unwind(select).is_err());
        assert_eq!((rx.len(), Arc::strong_count(&value)), (1, 2));
        drop(rx.recv());
        assert_eq!(Arc::strong_count(&value), 1);
    }
}
