//! `Select`: a set of operations that is made at run time.

use super::super::core::{ChanSide, Core};
use super::super::{Receiver, RecvError, SendError, Sender};
use super::passes::{Arm, Chosen, Outcome, poll, select, unchosen};
use crate::sys::clock::{self, NEVER};
use std::error::Error;
use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

/// Waits for the first of several channel operations, where the set of operations is known only at
/// run time.
///
/// For a fixed set use [`select!`](crate::select).
///
/// Add operations with [`recv`](Select::recv) and [`send`](Select::send), then call
/// [`select`](Select::select) or one of its variants. If several operations are ready, one of them
/// is chosen at random. An operation on a closed channel is ready; its result is an error. The same
/// `Select` can be used again.
///
/// The method names are crossbeam's, except that `send` takes its value when it is added, as in
/// Go's `reflect.Select`. So the select does the whole operation, and the caller has nothing to
/// complete.
///
/// # Drop
/// The values of sends that were not chosen are dropped with the `Select`.
///
/// # Examples
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
    side: ChanSide,
    slot: Box<dyn AnyValueSlot + 'a>,
    /// It was removed, or it is a send that was chosen before: it cannot be chosen any more.
    disabled: bool,
}

/// A [`ValueSlot`] without its type.
trait AnyValueSlot {
    fn as_mut_ptr(&mut self) -> *mut u8;
    /// Notes that the value has moved out of the slot, or that one has moved in.
    fn note_moved(&mut self);
    /// Drops the value, if there is one.
    fn discard(&mut self);
}

/// The place of a value before it is sent, or after it was received. T is the type of the channel.
struct ValueSlot<T> {
    value: MaybeUninit<T>,
    full: bool,
}

impl<T> ValueSlot<T> {
    fn take(&mut self) -> Option<T> {
        // SAFETY: the slot is full, and empty from now on.
        std::mem::take(&mut self.full).then(|| unsafe { self.value.assume_init_read() })
    }
}

impl<T> AnyValueSlot for ValueSlot<T> {
    fn as_mut_ptr(&mut self) -> *mut u8 {
        self.value.as_mut_ptr().cast()
    }

    fn note_moved(&mut self) {
        self.full = !self.full;
    }

    fn discard(&mut self) {
        drop(self.take());
    }
}

impl<T> Drop for ValueSlot<T> {
    fn drop(&mut self) {
        self.discard();
    }
}

impl<'a> Select<'a> {
    /// Creates a `Select` without operations.
    ///
    /// # Examples
    /// ```
    /// let mut select = trefoil::chan::Select::new();
    /// assert!(select.try_select().is_err()); // there is nothing to choose
    /// ```
    pub fn new() -> Select<'a> {
        Select { operations: Vec::new() }
    }

    /// Adds a receive, and returns its index.
    ///
    /// # Examples
    /// ```
    /// use trefoil::chan::{Select, unbounded};
    /// let (_a, numbers) = unbounded::<i32>();
    /// let (_b, words) = unbounded::<String>();
    /// let mut select = Select::new();
    /// assert_eq!(select.recv(&numbers), 0);
    /// assert_eq!(select.recv(&words), 1);
    /// ```
    pub fn recv<T>(&mut self, receiver: &'a Receiver<T>) -> usize
    where
        T: 'a,
    {
        let slot = ValueSlot::<T> { value: MaybeUninit::uninit(), full: false };
        self.add(receiver.core(), ChanSide::Recv, Box::new(slot))
    }

    /// Adds a send of `value`, and returns its index.
    ///
    /// A send can be chosen only once, because its value is gone then. Further selects on the same
    /// `Select` skip it.
    ///
    /// # Examples
    /// ```
    /// use trefoil::chan::{Select, bounded};
    /// let (tx, rx) = bounded(2);
    /// let mut select = Select::new();
    /// select.send(&tx, "once");
    /// select.select().send(&tx).unwrap();
    /// assert!(select.try_select().is_err()); // the value is sent
    /// assert_eq!(rx.try_iter().count(), 1);
    /// ```
    pub fn send<T>(&mut self, sender: &'a Sender<T>, value: T) -> usize
    where
        T: 'a,
    {
        let slot = ValueSlot { value: MaybeUninit::new(value), full: true };
        self.add(Some(sender.core()), ChanSide::Send, Box::new(slot))
    }

    fn add(
        &mut self,
        core: Option<&'a Core>,
        side: ChanSide,
        slot: Box<dyn AnyValueSlot + 'a>,
    ) -> usize {
        self.operations.push(Operation { core, side, slot, disabled: false });
        self.operations.len() - 1
    }

    /// Removes an operation. The indices of the other operations stay the same.
    ///
    /// The value of a removed send is dropped with the `Select`.
    ///
    /// # Panics
    /// Panics if no operation has this index.
    ///
    /// # Examples
    /// A closed channel would be chosen again and again, so it is removed:
    /// ```
    /// use trefoil::chan::{Select, bounded};
    /// let (tx, rx) = bounded::<i32>(1);
    /// drop(tx);
    /// let mut select = Select::new();
    /// let index = select.recv(&rx);
    /// assert!(select.try_select().unwrap().recv(&rx).is_err()); // closed
    /// select.remove(index);
    /// assert!(select.try_select().is_err());
    /// ```
    pub fn remove(&mut self, index: usize) {
        self.operations[index].disabled = true;
    }

    fn arms(&mut self) -> Vec<Arm<'a>> {
        let arm = |op: &mut Operation<'a>| {
            let core = op.core.filter(|_| !op.disabled);
            // SAFETY: the box stays until the select has ended. For a send that is not disabled it
            // holds a value; a received value was taken out by its SelectedOperation.
            unsafe { Arm::channel(core, op.side, op.slot.as_mut_ptr()) }
        };
        self.operations.iter_mut().map(arm).collect()
    }

    fn chosen(&mut self, chosen: Chosen) -> SelectedOperation<'_, 'a> {
        let op = &mut self.operations[chosen.index];
        if chosen.outcome == Outcome::Moved {
            op.slot.note_moved();
        }
        op.disabled = op.side == ChanSide::Send;
        SelectedOperation { op, chosen, _not_send: PhantomData }
    }

    /// Waits until one of the operations is ready, and does it. Without operations it waits
    /// forever.
    ///
    /// # Panics
    /// Panics if there are more than 65,534 operations.
    ///
    /// # Cancel
    /// To end the wait early, add a receive on a channel that is closed at that moment, for example
    /// [`Context::done`](crate::context::Context::done).
    ///
    /// # Examples
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

    /// Does one of the operations if one is ready.
    ///
    /// # Errors
    /// Returns [`TrySelectError`] if none of the operations is ready.
    ///
    /// # Panics
    /// Panics if there are more than 65,534 operations.
    ///
    /// # Examples
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

    /// Waits until one of the operations is ready, at most for `limit`, and does it.
    ///
    /// # Errors
    /// Returns [`SelectTimeoutError`] if none of the operations was ready within `limit`.
    ///
    /// # Panics
    /// Panics if there are more than 65,534 operations.
    ///
    /// # Examples
    /// ```
    /// use std::time::Duration;
    /// use trefoil::chan::{Select, SelectTimeoutError, bounded};
    /// let (_tx, rx) = bounded::<i32>(1);
    /// let mut select = Select::new();
    /// select.recv(&rx);
    /// let late = select.select_timeout(Duration::from_millis(1));
    /// assert_eq!(late.unwrap_err(), SelectTimeoutError);
    /// ```
    pub fn select_timeout(
        &mut self,
        limit: Duration,
    ) -> Result<SelectedOperation<'_, 'a>, SelectTimeoutError> {
        match select(&mut self.arms(), clock::after(limit)) {
            Some(chosen) => Ok(self.chosen(chosen)),
            None => Err(SelectTimeoutError),
        }
    }

    /// Waits until one of the operations is ready, at most until `deadline`, and does it.
    ///
    /// One deadline may limit several selects together.
    ///
    /// # Errors
    /// Returns [`SelectTimeoutError`] if none of the operations was ready before `deadline`.
    ///
    /// # Panics
    /// Panics if there are more than 65,534 operations.
    ///
    /// # Examples
    /// ```
    /// use std::time::{Duration, Instant};
    /// use trefoil::chan::{Select, bounded};
    /// let deadline = Instant::now() + Duration::from_millis(1);
    /// let (tx, rx) = bounded(1);
    /// tx.send(1).unwrap();
    /// let mut select = Select::new();
    /// select.recv(&rx);
    /// assert_eq!(select.select_deadline(deadline).unwrap().recv(&rx), Ok(1));
    /// assert!(select.select_deadline(deadline).is_err());
    /// ```
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

/// The operation that a [`Select`] did, with its result.
///
/// Call [`index`](SelectedOperation::index) to learn which operation it was, then
/// [`recv`](SelectedOperation::recv) or [`send`](SelectedOperation::send) to get the result.
///
/// # Drop
/// The operation has happened already. Dropping a `SelectedOperation` drops the received value.
///
/// # Examples
/// ```
/// use trefoil::chan::{Select, bounded};
/// let (tx, rx) = bounded(1);
/// tx.send("value").unwrap();
/// let mut select = Select::new();
/// let from_rx = select.recv(&rx);
/// let done = select.select();
/// if done.index() == from_rx {
///     assert_eq!(done.recv(&rx), Ok("value"));
/// }
/// ```
#[must_use = "the received value is dropped with it"]
pub struct SelectedOperation<'s, 'a> {
    op: &'s mut Operation<'a>,
    chosen: Chosen,
    _not_send: PhantomData<*mut ()>,
}

impl<'a> SelectedOperation<'_, 'a> {
    /// Returns the index of the operation: the value that [`Select::recv`] or [`Select::send`]
    /// returned for it.
    pub fn index(&self) -> usize {
        self.chosen.index
    }

    /// Returns the result of a receive.
    ///
    /// # Errors
    /// Returns [`RecvError`] if the channel is closed and empty.
    ///
    /// # Panics
    /// Panics if the operation is not a receive from the channel of `receiver`.
    ///
    /// # Examples
    /// ```
    /// use trefoil::chan::{Select, unbounded};
    /// let (tx, rx) = unbounded();
    /// tx.send(1).unwrap();
    /// drop(tx);
    /// let mut select = Select::new();
    /// select.recv(&rx);
    /// assert_eq!(select.select().recv(&rx), Ok(1));
    /// assert!(select.select().recv(&rx).is_err()); // closed and empty
    /// ```
    pub fn recv<T>(mut self, receiver: &Receiver<T>) -> Result<T, RecvError> {
        let this = receiver.core().map(std::ptr::from_ref);
        assert!(
            self.op.side == ChanSide::Recv && self.op.core.map(std::ptr::from_ref) == this,
            "this operation is not a receive from this channel"
        );
        self.slot::<T>().take().ok_or(RecvError)
    }

    /// Returns the result of a send.
    ///
    /// # Errors
    /// Returns [`SendError`] with the value if the channel is closed.
    ///
    /// # Panics
    /// Panics if the operation is not a send to the channel of `sender`.
    ///
    /// # Examples
    /// ```
    /// use trefoil::chan::{Select, bounded};
    /// let (tx, rx) = bounded(0);
    /// drop(rx);
    /// let mut select = Select::new();
    /// select.send(&tx, "lost");
    /// assert_eq!(select.select().send(&tx).unwrap_err().into_inner(), "lost");
    /// ```
    pub fn send<T>(mut self, sender: &Sender<T>) -> Result<(), SendError<T>> {
        let this = Some(std::ptr::from_ref(sender.core()));
        assert!(
            self.op.side == ChanSide::Send && self.op.core.map(std::ptr::from_ref) == this,
            "this operation is not a send to this channel"
        );
        match self.slot::<T>().take() {
            Some(value) => Err(SendError(value)),
            None => Ok(()),
        }
    }

    /// Returns the slot. The channel's values are Ts.
    fn slot<T>(&mut self) -> &mut ValueSlot<T> {
        let slot: *mut (dyn AnyValueSlot + 'a) = &raw mut *self.op.slot;
        // SAFETY: `Select::recv` or `Select::send` made it for this channel, so for this type.
        unsafe { &mut *slot.cast::<ValueSlot<T>>() }
    }
}

impl Drop for SelectedOperation<'_, '_> {
    fn drop(&mut self) {
        if self.op.side == ChanSide::Recv {
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

/// The error of [`Select::try_select`]: none of the operations is ready.
///
/// # Examples
/// ```
/// use trefoil::chan::{Select, TrySelectError, bounded};
/// let (_tx, rx) = bounded::<i32>(1);
/// let mut select = Select::new();
/// select.recv(&rx);
/// assert_eq!(select.try_select().unwrap_err(), TrySelectError);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TrySelectError;

/// The error of [`Select::select_timeout`] and [`Select::select_deadline`]: none of the operations
/// was ready in time.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use trefoil::chan::{Select, SelectTimeoutError};
/// let late = Select::new().select_timeout(Duration::from_millis(1)).map(drop);
/// assert_eq!(late, Err(SelectTimeoutError));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SelectTimeoutError;

impl fmt::Display for TrySelectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("none of the operations is ready")
    }
}

impl fmt::Display for SelectTimeoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("timed out waiting for one of the operations")
    }
}

impl Error for TrySelectError {}
impl Error for SelectTimeoutError {}
