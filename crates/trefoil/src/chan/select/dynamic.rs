//! `Select`: a set of operations that is made at run time.

use super::super::core::{ChanSide, Core};
use super::super::{Receiver, RecvError, SendError, Sender};
use super::passes::{Arm, Chosen, Outcome, Preference, poll, select, unchosen};
use super::ready;
use crate::sys::clock::{self, NEVER, Nanos};
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
/// is chosen at random, or the first one if the `Select` is [biased](Select::new_biased). An
/// operation on a closed channel is ready; its result is an error. [`ready`](Select::ready) and its
/// variants do not do the operation: they return its index, and the caller tries it.
///
/// The same `Select` can be used again, by any thread. It has memory for the operations that are in
/// it: a removed one, and a send that was chosen, take none.
///
/// The method names are crossbeam's, except that `send` takes its value when it is added, as in
/// Go's `reflect.Select`. So the select does the whole operation, and the caller has nothing to
/// complete. As the `Select` may move to another thread, the values must be [`Send`];
/// [`select!`](crate::select) takes channels of all values.
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
    /// In the order in which they were added, so by index.
    operations: Vec<Operation<'a>>,
    next_index: usize,
    preference: Preference,
    arms: ArmBuffer<'a>,
}

/// The memory of the arms, which every select makes anew. What it contains between two selects is
/// not used.
struct ArmBuffer<'a>(Vec<Arm<'a>>);

// SAFETY: only a method with `&mut Select` uses the arms, and it clears them first.
unsafe impl Send for ArmBuffer<'_> {}
// SAFETY: as above.
unsafe impl Sync for ArmBuffer<'_> {}

struct Operation<'a> {
    index: usize,
    core: Option<&'a Core>,
    side: ChanSide,
    /// Of the channel's type.
    slot: Box<dyn AnyValueSlot + Send + 'a>,
    /// Whether the slot contains a value.
    full: bool,
}

// SAFETY: a shared reference reaches no value: `Select` has no method that takes one, except for
// its `Debug` text.
unsafe impl Sync for Operation<'_> {}

/// A [`ValueSlot`] without its type.
trait AnyValueSlot {
    fn as_mut_ptr(&mut self) -> *mut u8;

    /// Drops the value.
    ///
    /// # Safety
    /// There is one, and it is not used again.
    unsafe fn drop_value(&mut self);
}

/// The place of a value before it is sent, or after it was received.
struct ValueSlot<T>(MaybeUninit<T>);

impl<T> AnyValueSlot for ValueSlot<T> {
    fn as_mut_ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }

    unsafe fn drop_value(&mut self) {
        // SAFETY: the caller's guarantee.
        unsafe { self.0.assume_init_drop() };
    }
}

impl<'a> Operation<'a> {
    /// Drops the value, if there is one.
    fn discard(&mut self) {
        if std::mem::take(&mut self.full) {
            // SAFETY: the slot was full, and is empty from now on.
            unsafe { self.slot.drop_value() };
        }
    }

    /// Takes the value out, if there is one.
    ///
    /// # Safety
    /// The channel's values are Ts.
    unsafe fn take<T>(&mut self) -> Option<T> {
        let slot: *mut (dyn AnyValueSlot + Send + 'a) = &raw mut *self.slot;
        // SAFETY: `Select::recv` or `Select::send` made the slot for this channel, so for this
        // type. It was full, and is empty from now on.
        std::mem::take(&mut self.full)
            .then(|| unsafe { (*slot.cast::<ValueSlot<T>>()).0.assume_init_read() })
    }
}

impl Drop for Operation<'_> {
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
        Select::preferring(Preference::None)
    }

    /// Creates a `Select` without operations that, if several are ready, chooses the one that was
    /// added first, as [`select_biased!`](crate::select_biased) does.
    ///
    /// # Examples
    /// ```
    /// use trefoil::chan::{Select, bounded};
    /// let ((urgent, first), (normal, second)) = (bounded(1), bounded(1));
    /// normal.send("later").unwrap();
    /// urgent.send("now").unwrap();
    /// let mut select = Select::new_biased();
    /// select.recv(&first);
    /// select.recv(&second);
    /// assert_eq!(select.select().recv(&first), Ok("now"));
    /// ```
    pub fn new_biased() -> Select<'a> {
        Select::preferring(Preference::First)
    }

    fn preferring(preference: Preference) -> Select<'a> {
        Select { operations: Vec::new(), next_index: 0, preference, arms: ArmBuffer(Vec::new()) }
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
        T: Send + 'a,
    {
        let slot = ValueSlot::<T>(MaybeUninit::uninit());
        self.add(receiver.core(), ChanSide::Recv, Box::new(slot))
    }

    /// Adds a send of `value`, and returns its index.
    ///
    /// A send can be chosen only once, because its value is gone then. So it is removed when it was
    /// chosen. To send again, add the next value.
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
        T: Send + 'a,
    {
        let slot = ValueSlot(MaybeUninit::new(value));
        self.add(sender.core(), ChanSide::Send, Box::new(slot))
    }

    fn add(
        &mut self,
        core: Option<&'a Core>,
        side: ChanSide,
        slot: Box<dyn AnyValueSlot + Send + 'a>,
    ) -> usize {
        let index = self.next_index;
        self.next_index += 1;
        self.operations.push(Operation { index, core, side, slot, full: side == ChanSide::Send });
        index
    }

    /// Removes an operation, and drops the value of a send. The indices of the other operations
    /// stay the same, and the index is not used again. Does nothing if the operation was removed
    /// before, or was a send that was chosen.
    ///
    /// # Panics
    /// Panics if no operation ever had this index.
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
        assert!(index < self.next_index, "no operation has the index {index}");
        if let Ok(position) = self.operations.binary_search_by_key(&index, |op| op.index) {
            drop(self.operations.remove(position));
        }
    }

    /// Makes the arms for a select.
    fn arms(&mut self) -> &mut [Arm<'a>] {
        self.arms.0.clear();
        for op in &mut self.operations {
            if op.side == ChanSide::Recv {
                // It is empty, unless a `SelectedOperation` was forgotten.
                op.discard();
            }
            // SAFETY: the box stays until the select has ended. That of a send holds a value, that
            // of a receive has room for one.
            let arm = unsafe { Arm::channel(op.core, op.side, op.slot.as_mut_ptr()) };
            self.arms.0.push(arm);
        }
        &mut self.arms.0
    }

    /// Makes the arms for a wait until one of them is ready: they have no slots.
    fn watching_arms(&mut self) -> &mut [Arm<'a>] {
        self.arms.0.clear();
        for op in &self.operations {
            // SAFETY: an arm that is only watched does not use its slot.
            let arm = unsafe { Arm::channel(op.core, op.side, std::ptr::null_mut()) };
            self.arms.0.push(arm);
        }
        &mut self.arms.0
    }

    fn chosen(&mut self, chosen: Chosen) -> SelectedOperation<'_, 'a> {
        let (position, moved) = (chosen.index, chosen.outcome == Outcome::Moved);
        let op = if self.operations[position].side == ChanSide::Send {
            let mut op = self.operations.remove(position);
            op.full = !moved;
            ChosenOperation::Removed(op)
        } else {
            let op = &mut self.operations[position];
            op.full = moved;
            ChosenOperation::Kept(op)
        };
        SelectedOperation { op, _not_send: PhantomData }
    }

    fn select_until(&mut self, deadline: Nanos) -> Option<SelectedOperation<'_, 'a>> {
        let preference = self.preference;
        let chosen = select(self.arms(), deadline, preference)?;
        Some(self.chosen(chosen))
    }

    fn ready_until(&mut self, deadline: Nanos) -> Option<usize> {
        let preference = self.preference;
        let position = ready::ready(self.watching_arms(), deadline, preference)?;
        Some(self.operations[position].index)
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
        match self.select_until(NEVER) {
            Some(selected) => selected,
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
        let preference = self.preference;
        match poll(self.arms(), preference) {
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
        self.select_until(clock::after(limit)).ok_or(SelectTimeoutError)
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
        self.select_until(clock::at(deadline)).ok_or(SelectTimeoutError)
    }

    /// Waits until one of the operations is ready, and returns its index. The caller then tries the
    /// operation, for example with [`Receiver::try_recv`]. Without operations it waits forever.
    ///
    /// An operation is ready if it need not wait: a send also if a receiver waits, a receive also
    /// if a sender waits, and both if the channel is closed. Another goroutine may be faster than
    /// the caller, so the operation may still have to wait: then call `ready` again. If several
    /// threads and goroutines wait for the same operation, all of them return.
    ///
    /// The value of a send is not used: it stays in the `Select`.
    ///
    /// # Panics
    /// Panics if there are more than 65,534 operations.
    ///
    /// # Examples
    /// ```
    /// use trefoil::chan::{Select, bounded};
    /// let ((tx, a), (_tx, b)) = (bounded(1), bounded::<i32>(1));
    /// let receivers = [a, b];
    /// let mut select = Select::new();
    /// receivers.iter().for_each(|rx| _ = select.recv(rx));
    /// std::thread::spawn(move || tx.send(5).unwrap());
    /// let value = loop {
    ///     let i = select.ready();
    ///     if let Ok(value) = receivers[i].try_recv() {
    ///         break value;
    ///     }
    /// };
    /// assert_eq!(value, 5);
    /// ```
    pub fn ready(&mut self) -> usize {
        match self.ready_until(NEVER) {
            Some(index) => index,
            None => unchosen(),
        }
    }

    /// Returns the index of an operation that is ready.
    ///
    /// # Errors
    /// Returns [`TryReadyError`] if none of the operations is ready.
    ///
    /// # Panics
    /// Panics if there are more than 65,534 operations.
    ///
    /// # Examples
    /// ```
    /// use trefoil::chan::{Select, TryReadyError, bounded};
    /// let (tx, rx) = bounded(1);
    /// let mut select = Select::new();
    /// let index = select.recv(&rx);
    /// assert_eq!(select.try_ready(), Err(TryReadyError));
    /// tx.send(1).unwrap();
    /// assert_eq!(select.try_ready(), Ok(index));
    /// assert_eq!(rx.try_recv(), Ok(1));
    /// ```
    pub fn try_ready(&mut self) -> Result<usize, TryReadyError> {
        let preference = self.preference;
        match ready::try_ready(self.watching_arms(), preference) {
            Some(position) => Ok(self.operations[position].index),
            None => Err(TryReadyError),
        }
    }

    /// As [`ready`](Select::ready), and waits at most for `limit`.
    ///
    /// # Errors
    /// Returns [`ReadyTimeoutError`] if none of the operations was ready within `limit`.
    ///
    /// # Panics
    /// Panics if there are more than 65,534 operations.
    ///
    /// # Examples
    /// ```
    /// use std::time::Duration;
    /// use trefoil::chan::{ReadyTimeoutError, Select, bounded};
    /// let (_tx, rx) = bounded::<i32>(1);
    /// let mut select = Select::new();
    /// select.recv(&rx);
    /// assert_eq!(select.ready_timeout(Duration::from_millis(1)), Err(ReadyTimeoutError));
    /// ```
    pub fn ready_timeout(&mut self, limit: Duration) -> Result<usize, ReadyTimeoutError> {
        self.ready_until(clock::after(limit)).ok_or(ReadyTimeoutError)
    }

    /// As [`ready`](Select::ready), and waits at most until `deadline`.
    ///
    /// # Errors
    /// Returns [`ReadyTimeoutError`] if none of the operations was ready before `deadline`.
    ///
    /// # Panics
    /// Panics if there are more than 65,534 operations.
    ///
    /// # Examples
    /// ```
    /// use std::time::Instant;
    /// use trefoil::chan::{Select, bounded};
    /// let (tx, rx) = bounded::<i32>(1);
    /// drop(tx);
    /// let mut select = Select::new();
    /// select.recv(&rx);
    /// assert_eq!(select.ready_deadline(Instant::now()), Ok(0)); // closed
    /// ```
    pub fn ready_deadline(&mut self, deadline: Instant) -> Result<usize, ReadyTimeoutError> {
        self.ready_until(clock::at(deadline)).ok_or(ReadyTimeoutError)
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
    op: ChosenOperation<'s, 'a>,
    _not_send: PhantomData<*mut ()>,
}

enum ChosenOperation<'s, 'a> {
    /// A receive, which may be chosen again.
    Kept(&'s mut Operation<'a>),
    /// A send.
    Removed(Operation<'a>),
}

impl<'a> SelectedOperation<'_, 'a> {
    fn operation(&self) -> &Operation<'a> {
        match &self.op {
            ChosenOperation::Kept(op) => op,
            ChosenOperation::Removed(op) => op,
        }
    }

    /// Takes the value out of the operation, which must belong to this side of this channel, whose
    /// values are Ts.
    #[track_caller]
    unsafe fn take<T>(
        &mut self,
        side: ChanSide,
        core: Option<&Core>,
        otherwise: &str,
    ) -> Option<T> {
        let op = self.operation();
        let this = core.map(std::ptr::from_ref);
        assert!(op.side == side && op.core.map(std::ptr::from_ref) == this, "{otherwise}");
        // SAFETY: the caller's guarantee.
        unsafe {
            match &mut self.op {
                ChosenOperation::Kept(op) => op.take(),
                ChosenOperation::Removed(op) => op.take(),
            }
        }
    }

    /// Returns the index of the operation: the value that [`Select::recv`] or [`Select::send`]
    /// returned for it.
    pub fn index(&self) -> usize {
        self.operation().index
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
        let otherwise = "this operation is not a receive from this channel";
        // SAFETY: the channel of `receiver` has Ts.
        unsafe { self.take(ChanSide::Recv, receiver.core(), otherwise) }.ok_or(RecvError)
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
        let otherwise = "this operation is not a send to this channel";
        // SAFETY: the channel of `sender` has Ts.
        match unsafe { self.take(ChanSide::Send, sender.core(), otherwise) } {
            Some(value) => Err(SendError(value)),
            None => Ok(()),
        }
    }
}

impl Drop for SelectedOperation<'_, '_> {
    fn drop(&mut self) {
        if let ChosenOperation::Kept(op) = &mut self.op {
            op.discard();
        }
    }
}

impl fmt::Debug for SelectedOperation<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SelectedOperation").field("index", &self.index()).finish_non_exhaustive()
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

/// The error of [`Select::try_ready`]: none of the operations is ready.
///
/// # Examples
/// ```
/// use trefoil::chan::{Select, TryReadyError};
/// assert_eq!(Select::new().try_ready(), Err(TryReadyError));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TryReadyError;

/// The error of [`Select::ready_timeout`] and [`Select::ready_deadline`]: none of the operations
/// was ready in time.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use trefoil::chan::{ReadyTimeoutError, Select};
/// let late = Select::new().ready_timeout(Duration::from_millis(1));
/// assert_eq!(late, Err(ReadyTimeoutError));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadyTimeoutError;

impl fmt::Display for TryReadyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        TrySelectError.fmt(f)
    }
}

impl fmt::Display for ReadyTimeoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        SelectTimeoutError.fmt(f)
    }
}

impl Error for TryReadyError {}
impl Error for ReadyTimeoutError {}

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
