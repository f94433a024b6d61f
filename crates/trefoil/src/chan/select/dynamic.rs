//! `Select`: operations that are gathered at run time.

use super::super::core::{Core, Side};
use super::super::{Receiver, RecvError, SendError, Sender};
use super::passes::{Arm, Chosen, poll, select, unchosen};
use crate::sys::clock::{self, NEVER};
use std::error::Error;
use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

/// A select whose operations are gathered at run time. For a fixed set there is
/// [`select!`](crate::select).
///
/// The names are crossbeam's, but a `send` brings its value along (as in Go's `reflect.Select`): so
/// the select does the whole operation, and there is none that must be completed.
///
/// ```
/// use trefoil::chan::{Select, bounded};
///
/// let (senders, receivers): (Vec<_>, Vec<_>) = (0..10).map(|_| bounded(1)).unzip();
/// senders[7].send("seven").unwrap();
///
/// let mut select = Select::new();
/// for rx in &receivers {
///     select.recv(rx);
/// }
/// let done = select.select();
/// assert_eq!(done.index(), 7);
/// assert_eq!(done.recv(&receivers[7]), Ok("seven"));
/// ```
pub struct Select<'a> {
    operations: Vec<Operation<'a>>,
}

struct Operation<'a> {
    core: Option<&'a Core>,
    side: Side,
    slot: Box<dyn Slot + 'a>,
    /// Removed, or its value was sent.
    spent: bool,
}

/// Where a value lies before it is sent, or when it has been received. The type is that of the
/// channel.
trait Slot {
    fn place(&mut self) -> *mut u8;
    /// The value in it has moved out, or one has moved in.
    fn moved(&mut self);
    /// Drops the value, if there is one.
    fn discard(&mut self);
}

struct Room<T> {
    value: MaybeUninit<T>,
    full: bool,
}

impl<T> Room<T> {
    fn take(&mut self) -> Option<T> {
        // SAFETY: full, and empty from now on.
        std::mem::take(&mut self.full).then(|| unsafe { self.value.assume_init_read() })
    }
}

impl<T> Slot for Room<T> {
    fn place(&mut self) -> *mut u8 {
        self.value.as_mut_ptr().cast()
    }

    fn moved(&mut self) {
        self.full = !self.full;
    }

    fn discard(&mut self) {
        drop(self.take());
    }
}

impl<T> Drop for Room<T> {
    fn drop(&mut self) {
        self.discard();
    }
}

impl<'a> Select<'a> {
    /// No operations yet.
    pub fn new() -> Select<'a> {
        Select { operations: Vec::new() }
    }

    /// Adds a receive; returns its index.
    pub fn recv<T>(&mut self, receiver: &'a Receiver<T>) -> usize
    where
        T: 'a,
    {
        let room = Room::<T> { value: MaybeUninit::uninit(), full: false };
        self.add(receiver.core(), Side::Recv, Box::new(room))
    }

    /// Adds a send of `value`; returns its index. When it was chosen it is spent: another select on
    /// the same object leaves it out.
    pub fn send<T>(&mut self, sender: &'a Sender<T>, value: T) -> usize
    where
        T: 'a,
    {
        let room = Room { value: MaybeUninit::new(value), full: true };
        self.add(Some(sender.core()), Side::Send, Box::new(room))
    }

    fn add(&mut self, core: Option<&'a Core>, side: Side, slot: Box<dyn Slot + 'a>) -> usize {
        self.operations.push(Operation { core, side, slot, spent: false });
        self.operations.len() - 1
    }

    /// Takes an operation out; the indices of the others stay.
    ///
    /// # Panics
    /// If there is none with this index.
    pub fn remove(&mut self, index: usize) {
        self.operations[index].spent = true;
    }

    fn arms(&mut self) -> Vec<Arm<'a>> {
        let arm = |op: &mut Operation<'a>| {
            let core = op.core.filter(|_| !op.spent);
            // SAFETY: the box stays until the select has ended, and it holds a value if this is a
            // send that is not spent; a received value was taken out by its SelectedOperation.
            unsafe { Arm::channel(core, op.side, op.slot.place()) }
        };
        self.operations.iter_mut().map(arm).collect()
    }

    fn chosen(&mut self, chosen: Chosen) -> SelectedOperation<'_, 'a> {
        let op = &mut self.operations[chosen.index];
        if chosen.done {
            op.slot.moved();
        }
        op.spent = op.side == Side::Send;
        SelectedOperation { op, chosen, _not_send: PhantomData }
    }

    /// Waits for one of the operations and does it. Without operations it waits for ever.
    ///
    /// ```
    /// use trefoil::chan::{Select, bounded};
    /// let (tx, rx) = bounded(1);
    /// let mut select = Select::new();
    /// let send = select.send(&tx, 5);
    /// let recv = select.recv(&rx);
    /// let done = select.select();
    /// assert_eq!(done.index(), send);
    /// done.send(&tx).unwrap();
    /// let done = select.select();
    /// assert_eq!(done.index(), recv);
    /// assert_eq!(done.recv(&rx), Ok(5));
    /// ```
    pub fn select(&mut self) -> SelectedOperation<'_, 'a> {
        match select(&mut self.arms(), NEVER) {
            Some(chosen) => self.chosen(chosen),
            None => unchosen(),
        }
    }

    /// Does one of the operations if that needs no waiting.
    ///
    /// # Errors
    /// If none can go on now.
    ///
    /// ```
    /// use trefoil::chan::{Select, bounded};
    /// let (tx, rx) = bounded::<i32>(1);
    /// let mut select = Select::new();
    /// select.recv(&rx);
    /// assert!(select.try_select().is_err());
    /// drop(tx);
    /// assert!(select.try_select().unwrap().recv(&rx).is_err()); // closed
    /// ```
    pub fn try_select(&mut self) -> Result<SelectedOperation<'_, 'a>, TrySelectError> {
        match poll(&mut self.arms()) {
            Some(chosen) => Ok(self.chosen(chosen)),
            None => Err(TrySelectError),
        }
    }

    /// As [`select`](Select::select), but waits at most for `limit`.
    ///
    /// # Errors
    /// If the time is up.
    pub fn select_timeout(
        &mut self,
        limit: Duration,
    ) -> Result<SelectedOperation<'_, 'a>, SelectTimeoutError> {
        match select(&mut self.arms(), clock::after(limit)) {
            Some(chosen) => Ok(self.chosen(chosen)),
            None => Err(SelectTimeoutError),
        }
    }

    /// As [`select`](Select::select), but waits at most until `deadline`.
    ///
    /// # Errors
    /// If the time is up.
    pub fn select_deadline(
        &mut self,
        deadline: Instant,
    ) -> Result<SelectedOperation<'_, 'a>, SelectTimeoutError> {
        match select(&mut self.arms(), clock::at(deadline)) {
            Some(chosen) => Ok(self.chosen(chosen)),
            None => Err(SelectTimeoutError),
        }
    }
}

impl Default for Select<'_> {
    fn default() -> Self {
        Select::new()
    }
}

impl fmt::Debug for Select<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Select { .. }")
    }
}

/// The operation that a [`Select`] did. Its result is in here; who does not want it drops it.
#[must_use = "what was received is dropped with it"]
pub struct SelectedOperation<'s, 'a> {
    op: &'s mut Operation<'a>,
    chosen: Chosen,
    _not_send: PhantomData<*mut ()>,
}

impl<'a> SelectedOperation<'_, 'a> {
    /// Which operation: what [`Select::recv`] or [`Select::send`] returned for it.
    pub fn index(&self) -> usize {
        self.chosen.index
    }

    /// The result of a receive.
    ///
    /// # Errors
    /// If the channel is closed and empty.
    ///
    /// # Panics
    /// If the operation is not a receive from this channel.
    pub fn recv<T>(mut self, receiver: &Receiver<T>) -> Result<T, RecvError> {
        let this = receiver.core().map(std::ptr::from_ref);
        assert!(
            self.op.side == Side::Recv && self.op.core.map(std::ptr::from_ref) == this,
            "this operation is not a receive from this channel"
        );
        self.room::<T>().take().ok_or(RecvError)
    }

    /// The result of a send.
    ///
    /// # Errors
    /// If the channel is closed: gives the value back.
    ///
    /// # Panics
    /// If the operation is not a send to this channel.
    pub fn send<T>(mut self, sender: &Sender<T>) -> Result<(), SendError<T>> {
        let this = Some(std::ptr::from_ref(sender.core()));
        assert!(
            self.op.side == Side::Send && self.op.core.map(std::ptr::from_ref) == this,
            "this operation is not a send to this channel"
        );
        match self.room::<T>().take() {
            Some(value) => Err(SendError(value)),
            None => Ok(()),
        }
    }

    /// The slot; the channel is one of Ts.
    fn room<T>(&mut self) -> &mut Room<T> {
        let slot: *mut (dyn Slot + 'a) = &raw mut *self.op.slot;
        // SAFETY: made by `Select::recv` or `Select::send` for this channel, so for this type.
        unsafe { &mut *slot.cast::<Room<T>>() }
    }
}

impl Drop for SelectedOperation<'_, '_> {
    fn drop(&mut self) {
        if self.op.side == Side::Recv {
            self.op.slot.discard();
        }
    }
}

impl fmt::Debug for SelectedOperation<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SelectedOperation")
            .field("index", &self.chosen.index)
            .finish_non_exhaustive()
    }
}

/// [`Select::try_select`]: nothing can go on now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TrySelectError;

/// [`Select::select_timeout`]: the time is up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SelectTimeoutError;

impl fmt::Display for TrySelectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("none of the operations can go on now")
    }
}

impl fmt::Display for SelectTimeoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("timed out waiting for one of the operations")
    }
}

impl Error for TrySelectError {}
impl Error for SelectTimeoutError {}
