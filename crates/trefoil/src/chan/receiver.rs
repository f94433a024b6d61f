//! The receiving end of a channel.
//!
//! A receive gives the channel room for a value in the caller's frame (`MaybeUninit`); the room
//! holds a value only if the operation was made.

use super::buffer::TypedElem;
use super::core::{ChanSide, Core, OpResult};
use super::handle::{Handle, ReceiverHandle};
use super::{Iter, RecvError, RecvTimeoutError, TryIter, TryRecvError, capacity, wait_for_never};
use crate::sched::Rt;
use crate::sched::wait;
use crate::sched::wait::reason::WaitReason;
use crate::sys::clock::{self, NEVER, Nanos};
use std::fmt;
use std::mem::MaybeUninit;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::time::{Duration, Instant};

/// The receiving end of a channel, created by [`bounded`](super::bounded),
/// [`unbounded`](super::unbounded), [`nil`](super::nil) or [`never()`](super::never()).
///
/// All clones receive from the same channel. Each value is received by exactly one of them, so
/// clones share work; they do not broadcast.
///
/// # Drop
/// The channel is closed when its last receiver is dropped. The values that are still in it are
/// dropped at that moment.
///
/// # Examples
/// Two workers take jobs from one channel:
/// ```
/// use trefoil::chan::bounded;
///
/// trefoil::run(|| {
///     let (jobs, queue) = bounded(4);
///     let workers: Vec<_> = (0..2)
///         .map(|_| {
///             let queue = queue.clone();
///             trefoil::go(move || queue.iter().sum::<u32>())
///         })
///         .collect();
///     (1..=10).for_each(|n| jobs.send(n).unwrap());
///     drop(jobs); // the workers' loops end
///     let total: u32 = workers.into_iter().map(|w| w.join().unwrap()).sum();
///     assert_eq!(total, 55);
/// });
/// ```
pub struct Receiver<T> {
    /// None for [`never`](super::never()).
    pub(super) handle: Option<ReceiverHandle<T>>,
}

// SAFETY: a channel moves values between threads, and gives no thread a reference to one. Its lock
// guards the rest.
unsafe impl<T: Send> Send for Receiver<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Receiver<T> {}

// No user code runs while a channel is being changed.
impl<T> UnwindSafe for Receiver<T> {}
impl<T> RefUnwindSafe for Receiver<T> {}

impl<T> Receiver<T> {
    #[inline(always)]
    pub(super) fn core(&self) -> Option<&Core> {
        self.handle.as_ref().map(Handle::core)
    }

    /// Removes a value, if there is one, and returns whether there was. Inside the runtime or on a
    /// plain thread. The value is forgotten, so its type must need no drop. Not for unbounded
    /// channels.
    pub(crate) fn discard_in(&self, here: Option<Rt>) -> bool
    where
        T: Copy,
    {
        self.core().is_some_and(|core| core.discard_in::<T>(here))
    }

    /// Receives the next value, and waits while the channel is empty.
    ///
    /// # Errors
    /// Returns [`RecvError`] if the channel is closed and empty, or becomes so while the receiver
    /// waits.
    ///
    /// # Cancel
    /// Closing the channel ends the wait. For other conditions use a `recv` arm of
    /// [`select!`](crate::select), or [`recv_timeout`](Receiver::recv_timeout).
    ///
    /// # Examples
    /// ```
    /// use trefoil::chan::{RecvError, bounded};
    /// trefoil::run(|| {
    ///     let (tx, rx) = bounded(0);
    ///     trefoil::go(move || tx.send("hello").unwrap());
    ///     assert_eq!(rx.recv(), Ok("hello"));
    ///     assert_eq!(rx.recv(), Err(RecvError)); // the sender was dropped
    /// });
    /// ```
    #[inline]
    pub fn recv(&self) -> Result<T, RecvError> {
        self.recv_until(NEVER).map_err(|_| RecvError)
    }

    /// Receives the next value if it can do so without waiting.
    ///
    /// # Errors
    /// - [`TryRecvError::Empty`] if the channel is empty and open. With capacity 0: if no sender
    ///   waits.
    /// - [`TryRecvError::Closed`] if the channel is closed and empty.
    ///
    /// # Examples
    /// ```
    /// use trefoil::chan::{TryRecvError, bounded};
    /// let (tx, rx) = bounded(1);
    /// assert_eq!(rx.try_recv(), Err(TryRecvError::Empty));
    /// tx.send(7).unwrap();
    /// drop(tx);
    /// assert_eq!(rx.try_recv(), Ok(7));
    /// assert_eq!(rx.try_recv(), Err(TryRecvError::Closed));
    /// ```
    #[inline]
    pub fn try_recv(&self) -> Result<T, TryRecvError> {
        let Some(core) = self.core() else {
            wait::leave(Rt::enter()); // as in `Core::try_op`
            return Err(TryRecvError::Empty);
        };
        let mut value = MaybeUninit::<T>::uninit();
        let slot = value.as_mut_ptr().cast();
        // SAFETY: `value` has room for a T, and holds one if the result is `Done`.
        unsafe {
            match core.try_op(ChanSide::Recv, TypedElem::<T>::ELEM, slot) {
                Some(OpResult::Done) => Ok(value.assume_init()),
                Some(_) => Err(TryRecvError::Closed),
                None => Err(TryRecvError::Empty),
            }
        }
    }

    /// Receives the next value, and waits at most for `limit`.
    ///
    /// With a limit of zero it still receives a value that is in the channel.
    ///
    /// # Errors
    /// - [`RecvTimeoutError::Timeout`] if no value came within `limit`.
    /// - [`RecvTimeoutError::Closed`] if the channel is closed and empty, or becomes so while the
    ///   receiver waits.
    ///
    /// # Examples
    /// ```
    /// # use std::time::Duration;
    /// use trefoil::chan::{RecvTimeoutError, bounded};
    /// let (_tx, rx) = bounded::<i32>(1);
    /// assert_eq!(rx.recv_timeout(Duration::from_millis(1)), Err(RecvTimeoutError::Timeout));
    /// ```
    pub fn recv_timeout(&self, limit: Duration) -> Result<T, RecvTimeoutError> {
        self.recv_by(clock::after(limit))
    }

    /// Receives the next value, and waits at most until `deadline`.
    ///
    /// After the deadline it still receives a value that is in the channel. One deadline may limit
    /// several receives together.
    ///
    /// # Errors
    /// - [`RecvTimeoutError::Timeout`] if no value came before `deadline`.
    /// - [`RecvTimeoutError::Closed`] if the channel is closed and empty, or becomes so while the
    ///   receiver waits.
    ///
    /// # Examples
    /// ```
    /// use std::time::{Duration, Instant};
    /// use trefoil::chan::{RecvTimeoutError, bounded};
    ///
    /// let deadline = Instant::now() + Duration::from_millis(1);
    /// let (tx, rx) = bounded(1);
    /// tx.send(1).unwrap();
    /// assert_eq!(rx.recv_deadline(deadline), Ok(1));
    /// assert_eq!(rx.recv_deadline(deadline), Err(RecvTimeoutError::Timeout));
    /// ```
    pub fn recv_deadline(&self, deadline: Instant) -> Result<T, RecvTimeoutError> {
        self.recv_by(clock::at(deadline))
    }

    fn recv_by(&self, deadline: Nanos) -> Result<T, RecvTimeoutError> {
        self.recv_until(deadline).map_err(|result| match result {
            OpResult::TimedOut => RecvTimeoutError::Timeout,
            _ => RecvTimeoutError::Closed,
        })
    }

    #[inline]
    pub(super) fn recv_until(&self, deadline: Nanos) -> Result<T, OpResult> {
        let Some(core) = self.core() else {
            return Err(wait_for_never(WaitReason::ChanReceiveNil, deadline));
        };
        let mut value = MaybeUninit::<T>::uninit();
        let slot = value.as_mut_ptr().cast();
        // SAFETY: `value` has room for a T, and holds one if the result is `Done`.
        unsafe {
            match core.blocking_op(ChanSide::Recv, TypedElem::<T>::ELEM, slot, deadline) {
                OpResult::Done => Ok(value.assume_init()),
                result => Err(result),
            }
        }
    }

    /// Returns an iterator over the received values.
    ///
    /// It waits for each value, and ends when the channel is closed and empty. `for v in &rx` does
    /// the same.
    ///
    /// # Examples
    /// ```
    /// let (tx, rx) = trefoil::chan::bounded(0);
    /// std::thread::spawn(move || (0..5).for_each(|n| tx.send(n).unwrap()));
    /// assert_eq!(rx.iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    /// ```
    pub fn iter(&self) -> Iter<'_, T> {
        Iter { receiver: self }
    }

    /// Returns an iterator over the values that can be received without waiting.
    ///
    /// It ends when the channel is empty, whether the channel is closed or not.
    ///
    /// # Examples
    /// ```
    /// let (tx, rx) = trefoil::chan::unbounded();
    /// tx.send(1).unwrap();
    /// tx.send(2).unwrap();
    /// assert_eq!(rx.try_iter().sum::<i32>(), 3); // the channel is still open
    /// ```
    pub fn try_iter(&self) -> TryIter<'_, T> {
        TryIter { receiver: self }
    }

    /// Returns true if the channel is closed. It may still contain values.
    ///
    /// # Examples
    /// ```
    /// let (tx, rx) = trefoil::chan::bounded(1);
    /// tx.send('a').unwrap();
    /// drop(tx);
    /// assert!(rx.is_closed());
    /// assert_eq!(rx.recv(), Ok('a'));
    /// ```
    pub fn is_closed(&self) -> bool {
        self.core().is_some_and(Core::is_closed)
    }

    /// Returns the number of values in the channel.
    ///
    /// With capacity 0 it is 0, unless an async receive was cancelled after a value was handed to
    /// it ([`Receiver::recv_async`]). Other senders and receivers may change the number at any
    /// time.
    ///
    /// # Examples
    /// ```
    /// let (tx, rx) = trefoil::chan::bounded(4);
    /// tx.send('a').unwrap();
    /// assert_eq!(rx.len(), 1);
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
    /// [`never()`](super::never()), this is always so.
    pub fn is_full(&self) -> bool {
        self.core().is_none_or(|core| core.buffer.len() >= core.buffer.cap())
    }

    /// Returns how many values the channel has room for, or `None` if it is
    /// [`unbounded`](super::unbounded). For [`never()`](super::never()) it is 0.
    ///
    /// # Examples
    /// ```
    /// use trefoil::chan::{bounded, never};
    /// assert_eq!(bounded::<i32>(3).1.capacity(), Some(3));
    /// assert_eq!(never::<i32>().capacity(), Some(0));
    /// ```
    pub fn capacity(&self) -> Option<usize> {
        self.core().map_or(Some(0), capacity)
    }

    /// Returns what [`Sender::waiters`](super::Sender::waiters) does.
    #[doc(hidden)]
    pub fn waiters(&self) -> (usize, usize) {
        self.core().map_or((0, 0), Core::waiters)
    }

    /// Returns true if both receivers receive from the same channel, or if both are
    /// [`never()`](super::never()).
    ///
    /// # Examples
    /// ```
    /// use trefoil::chan::bounded;
    /// let (_tx, rx) = bounded::<i32>(1);
    /// assert!(rx.same_channel(&rx.clone()));
    /// assert!(!rx.same_channel(&bounded(1).1));
    /// ```
    pub fn same_channel(&self, other: &Receiver<T>) -> bool {
        match (self.core(), other.core()) {
            (Some(a), Some(b)) => std::ptr::eq(a, b),
            (a, b) => a.is_none() && b.is_none(),
        }
    }
}

impl<T> Clone for Receiver<T> {
    fn clone(&self) -> Self {
        Receiver { handle: self.handle.clone() }
    }
}

impl<T> fmt::Debug for Receiver<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Receiver { .. }")
    }
}
