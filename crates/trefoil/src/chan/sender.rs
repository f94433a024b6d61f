//! The sending end of a channel.
//!
//! A value that is sent stays in the caller's frame until the channel has copied it: the methods
//! forget it (`ManuallyDrop`), and take it back if the operation was not made.

use super::buffer::TypedElem;
use super::core::{ChanSide, Core, OpResult};
use super::handle::{Handle, SenderHandle};
use super::{SendError, SendTimeoutError, TrySendError, capacity, wait_for_never};
use crate::sched::Rt;
use crate::sched::wait;
use crate::sched::wait::reason::WaitReason;
use crate::sys::clock::{self, NEVER, Nanos};
use std::fmt;
use std::mem::ManuallyDrop;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::time::{Duration, Instant};

/// The sending end of a channel, created by [`bounded`](super::bounded),
/// [`unbounded`](super::unbounded) or [`nil`](super::nil).
///
/// All clones send to the same channel. A sender may be shared by reference, or cloned and moved
/// into other goroutines and threads.
///
/// # Drop
/// The channel is closed when its last sender is dropped. The values in it stay there for the
/// receivers.
///
/// # Examples
/// ```
/// use trefoil::chan::bounded;
///
/// trefoil::run(|| {
///     let (tx, rx) = bounded(0);
///     let worker = tx.clone();
///     trefoil::go(move || worker.send("from a goroutine").unwrap());
///     assert_eq!(rx.recv(), Ok("from a goroutine"));
///
///     drop(tx); // with the goroutine's clone gone too, the channel is closed
///     assert!(rx.recv().is_err());
/// });
/// ```
pub struct Sender<T> {
    /// None for [`nil`](super::nil).
    pub(super) handle: Option<SenderHandle<T>>,
}

// SAFETY: a channel moves values between threads, and gives no thread a reference to one. Its lock
// guards the rest.
unsafe impl<T: Send> Send for Sender<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Sender<T> {}

// No user code runs while a channel is being changed.
impl<T> UnwindSafe for Sender<T> {}
impl<T> RefUnwindSafe for Sender<T> {}

impl<T> Sender<T> {
    #[inline(always)]
    pub(super) fn core(&self) -> Option<&Core> {
        self.handle.as_ref().map(Handle::core)
    }

    /// Sends a value, and waits while the channel is full.
    ///
    /// With capacity 0 it waits until a receiver takes the value. On an
    /// [`unbounded`](super::unbounded) channel it never waits.
    ///
    /// # Errors
    /// Returns [`SendError`] with the value if the channel is closed, or is closed while the sender
    /// waits.
    ///
    /// # Cancel
    /// Closing the channel ends the wait. For other conditions use a `send` arm of
    /// [`select!`](crate::select), or [`send_timeout`](Sender::send_timeout).
    ///
    /// # Examples
    /// ```
    /// let (tx, rx) = trefoil::chan::bounded(1);
    /// tx.send(5)?;
    /// tx.close();
    /// assert_eq!(tx.send(6).unwrap_err().into_inner(), 6);
    /// assert_eq!(rx.recv(), Ok(5));
    /// # Ok::<(), trefoil::chan::SendError<i32>>(())
    /// ```
    #[inline]
    pub fn send(&self, value: T) -> Result<(), SendError<T>> {
        match self.send_until(value, NEVER) {
            Ok(()) => Ok(()),
            Err((value, _)) => Err(SendError(value)),
        }
    }

    /// Sends a value if it can do so without waiting.
    ///
    /// # Errors
    /// - [`TrySendError::Full`] if there is no room. With capacity 0: if no receiver waits.
    /// - [`TrySendError::Closed`] if the channel is closed.
    ///
    /// Both contain the value.
    ///
    /// # Examples
    /// ```
    /// use trefoil::chan::{TrySendError, bounded};
    /// let (tx, rx) = bounded(1);
    /// assert_eq!(tx.try_send(1), Ok(()));
    /// assert_eq!(tx.try_send(2), Err(TrySendError::Full(2)));
    /// drop(rx);
    /// assert_eq!(tx.try_send(3), Err(TrySendError::Closed(3)));
    /// ```
    #[inline]
    pub fn try_send(&self, value: T) -> Result<(), TrySendError<T>> {
        let Some(core) = self.core() else {
            wait::leave(Rt::enter()); // as in `Core::try_op`
            return Err(TrySendError::Full(value));
        };
        let value = ManuallyDrop::new(value);
        let slot = (&raw const value).cast_mut().cast();
        // SAFETY: `value` is a T, and moves if the result is `Done`.
        match unsafe { core.try_op(ChanSide::Send, TypedElem::<T>::ELEM, slot) } {
            Some(OpResult::Done) => Ok(()),
            Some(_) => Err(TrySendError::Closed(ManuallyDrop::into_inner(value))),
            None => Err(TrySendError::Full(ManuallyDrop::into_inner(value))),
        }
    }

    /// Sends a value from inside the runtime (a timer), if there is room. Otherwise the value is
    /// forgotten, so its type must need no drop. Not for unbounded channels, which may have to
    /// allocate.
    pub(crate) fn try_send_in(&self, rt: Rt, value: T)
    where
        T: Copy,
    {
        let Some(core) = self.core() else { return };
        let slot = (&raw const value).cast_mut().cast();
        // SAFETY: `value` is a T, and T is Copy.
        let _ = unsafe { core.try_op_in(Some(rt), ChanSide::Send, TypedElem::<T>::ELEM, slot) };
    }

    /// Drops the sender. If it is the last, the channel stays open, and no further value comes.
    pub(crate) fn drop_keep_open(self) {
        if let Some(handle) = self.handle {
            handle.drop_keep_open();
        }
    }

    /// Sends a value, and waits at most for `limit`.
    ///
    /// With a limit of zero it still sends the value if there is room.
    ///
    /// # Errors
    /// - [`SendTimeoutError::Timeout`] if the value could not be sent within `limit`.
    /// - [`SendTimeoutError::Closed`] if the channel is closed, or is closed while the sender
    ///   waits.
    ///
    /// Both contain the value.
    ///
    /// # Examples
    /// ```
    /// # use std::time::Duration;
    /// let (tx, _rx) = trefoil::chan::bounded(0);
    /// let late = tx.send_timeout(1, Duration::from_millis(1)).unwrap_err();
    /// assert!(late.is_timeout() && late.into_inner() == 1);
    /// ```
    pub fn send_timeout(&self, value: T, limit: Duration) -> Result<(), SendTimeoutError<T>> {
        self.send_by(value, clock::after(limit))
    }

    /// Sends a value, and waits at most until `deadline`.
    ///
    /// After the deadline it still sends the value if there is room.
    ///
    /// # Errors
    /// - [`SendTimeoutError::Timeout`] if the value could not be sent before `deadline`.
    /// - [`SendTimeoutError::Closed`] if the channel is closed, or is closed while the sender
    ///   waits.
    ///
    /// Both contain the value.
    ///
    /// # Examples
    /// ```
    /// use std::time::{Duration, Instant};
    /// use trefoil::chan::{SendTimeoutError, bounded};
    ///
    /// let deadline = Instant::now() + Duration::from_millis(1);
    /// let (tx, _rx) = bounded(1);
    /// assert_eq!(tx.send_deadline('a', deadline), Ok(()));
    /// assert_eq!(tx.send_deadline('b', deadline), Err(SendTimeoutError::Timeout('b')));
    /// ```
    pub fn send_deadline(&self, value: T, deadline: Instant) -> Result<(), SendTimeoutError<T>> {
        self.send_by(value, clock::at(deadline))
    }

    fn send_by(&self, value: T, deadline: Nanos) -> Result<(), SendTimeoutError<T>> {
        self.send_until(value, deadline).map_err(|(value, result)| match result {
            OpResult::TimedOut => SendTimeoutError::Timeout(value),
            _ => SendTimeoutError::Closed(value),
        })
    }

    #[inline]
    pub(super) fn send_until(&self, value: T, deadline: Nanos) -> Result<(), (T, OpResult)> {
        let Some(core) = self.core() else {
            return Err((value, wait_for_never(WaitReason::ChanSendNil, deadline)));
        };
        let value = ManuallyDrop::new(value);
        let slot = (&raw const value).cast_mut().cast();
        // SAFETY: `value` is a T, and moves if the result is `Done`.
        match unsafe { core.blocking_op(ChanSide::Send, TypedElem::<T>::ELEM, slot, deadline) } {
            OpResult::Done => Ok(()),
            result => Err((ManuallyDrop::into_inner(value), result)),
        }
    }

    /// Closes the channel for all its senders and receivers.
    ///
    /// From now on every send fails, and so does every send that waits now. Receivers still get the
    /// values that are left. Closing a closed channel does nothing, and neither does closing the
    /// channel of [`nil`](super::nil): no operation on it ever ends.
    ///
    /// # Examples
    /// ```
    /// let (tx, rx) = trefoil::chan::bounded(4);
    /// tx.send(1).unwrap();
    /// tx.close();
    /// tx.close();
    /// assert_eq!(rx.iter().collect::<Vec<_>>(), [1]);
    /// ```
    pub fn close(&self) {
        if let Some(core) = self.core() {
            core.close();
        }
    }

    /// Returns true if the channel is closed: by [`close`](Sender::close), or because all receivers
    /// were dropped.
    ///
    /// # Examples
    /// ```
    /// let (tx, rx) = trefoil::chan::bounded::<i32>(1);
    /// assert!(!tx.is_closed());
    /// drop(rx);
    /// assert!(tx.is_closed());
    /// ```
    pub fn is_closed(&self) -> bool {
        self.core().is_some_and(Core::is_closed)
    }

    /// Returns the number of values in the channel.
    ///
    /// With capacity 0 it is 0, unless an async receive was cancelled after a value was handed to
    /// it ([`Receiver::recv_async`](super::Receiver::recv_async)). Other senders and receivers may
    /// change the number at any time.
    ///
    /// # Examples
    /// ```
    /// let (tx, _rx) = trefoil::chan::bounded(4);
    /// tx.send('a').unwrap();
    /// assert_eq!(tx.len(), 1);
    /// ```
    pub fn len(&self) -> usize {
        self.core().map_or(0, |core| core.buffer.len())
    }

    /// Returns true if no value is in the channel. With capacity 0 this is so, except for a value
    /// that an async receive has given back.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns true if there is no room for another value. With capacity 0, and for
    /// [`nil`](super::nil), this is always so.
    ///
    /// # Examples
    /// ```
    /// let (tx, rx) = trefoil::chan::bounded(1);
    /// tx.send('a').unwrap();
    /// assert!(tx.is_full());
    /// rx.recv().unwrap();
    /// assert!(!tx.is_full());
    /// ```
    pub fn is_full(&self) -> bool {
        self.core().is_none_or(|core| core.buffer.len() >= core.buffer.cap())
    }

    /// Returns how many values the channel has room for, or `None` if it is
    /// [`unbounded`](super::unbounded). For [`nil`](super::nil) it is 0.
    ///
    /// # Examples
    /// ```
    /// use trefoil::chan::{bounded, unbounded};
    /// assert_eq!(bounded::<i32>(3).0.capacity(), Some(3));
    /// assert_eq!(unbounded::<i32>().0.capacity(), None);
    /// ```
    pub fn capacity(&self) -> Option<usize> {
        self.core().map_or(Some(0), capacity)
    }

    /// Returns how many operations wait to send and to receive. For tests. A select counts in each
    /// of its channels, and for a moment longer if it was just served through another one.
    #[doc(hidden)]
    pub fn waiters(&self) -> (usize, usize) {
        self.core().map_or((0, 0), Core::waiters)
    }

    /// Returns true if both senders send to the same channel, or if both are of
    /// [`nil`](super::nil).
    ///
    /// # Examples
    /// ```
    /// use trefoil::chan::bounded;
    /// let (tx, _rx) = bounded::<i32>(1);
    /// assert!(tx.same_channel(&tx.clone()));
    /// assert!(!tx.same_channel(&bounded(1).0));
    /// ```
    pub fn same_channel(&self, other: &Sender<T>) -> bool {
        match (self.core(), other.core()) {
            (Some(a), Some(b)) => std::ptr::eq(a, b),
            (a, b) => a.is_none() && b.is_none(),
        }
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Sender { handle: self.handle.clone() }
    }
}

impl<T> fmt::Debug for Sender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sender { .. }")
    }
}
