//! Channels that goroutines, tasks and plain threads use to pass values to each other.
//!
//! They behave like Go's channels and use the method names of crossbeam's channels.
//!
//! ```
//! use trefoil::chan::bounded;
//!
//! trefoil::run(|| {
//!     let (tx, rx) = bounded(8);
//!     for n in 1..=3 {
//!         let tx = tx.clone();
//!         trefoil::go(move || tx.send(n * n).unwrap());
//!     }
//!     drop(tx); // the clones remain; the loop ends when the last one is dropped
//!     assert_eq!(rx.iter().sum::<i32>(), 14);
//! });
//! ```
//!
//! # What is in this module
//! | item | purpose |
//! |---|---|
//! | [`bounded`], [`unbounded`] | create a channel and return its two ends |
//! | [`nil`], [`never()`](never()) | create both ends, or the receiver, of Go's nil channel: its operations wait forever |
//! | [`after`], [`at`], [`tick`] | create a receiver that gets the time once, or again and again |
//! | [`Sender`], [`Receiver`] | the two ends of a channel; both can be cloned |
//! | [`select!`](crate::select) | waits for the first of several operations |
//! | [`select_biased!`](crate::select_biased) | the same; prefers the arms that are written first |
//! | [`Select`], [`SelectedOperation`] | the same, for a set of operations known only at run time |
//! | [`Iter`], [`TryIter`], [`IntoIter`] | iterators over received values |
//! | [`SendFuture`], [`RecvFuture`] | what [`Sender::send_async`] and [`Receiver::recv_async`] return |
//! | [`SendSink`], [`RecvStream`] | a sender and a receiver as a sink and a stream of async code |
//! | [`SendError`], [`TrySendError`], [`SendTimeoutError`] | errors of sends, with the value |
//! | [`RecvError`], [`TryRecvError`], [`RecvTimeoutError`] | errors of receives |
//! | [`TrySelectError`], [`SelectTimeoutError`], [`TryReadyError`], [`ReadyTimeoutError`] | errors of [`Select`] |
//!
//! # Which channel to use
//! | constructor | capacity | a send waits | a receive waits |
//! |---|---|---|---|
//! | [`bounded(0)`](bounded) | none: a *rendezvous* | for a receiver | for a sender |
//! | [`bounded(n)`](bounded) | n values | while n values are in the channel | while it is empty |
//! | [`unbounded()`](unbounded) | limited by memory only | never | while it is empty |
//! | [`nil()`](nil), [`never()`](never()) | none | forever | forever |
//!
//! # Rules
//! - **Order.** Values are received in the order in which they were sent. Waiting senders and
//!   waiting receivers are each served in the order in which they began to wait. A value for a
//!   waiting receiver goes to it directly.
//! - **Closing.** A channel is closed by [`Sender::close`], or when the last sender or the last
//!   receiver is dropped. From then on every send fails and returns its value. Receivers still get
//!   the values that are left; after that every receive fails. (In Go a send on a closed channel
//!   panics. Here it is an error, as in crossbeam.)
//! - **Goroutines, tasks and threads.** Both ends work on goroutines and [tasks](crate::task) of any
//!   runtime, in other executors and on plain threads, in every combination. A goroutine that waits
//!   is parked; a thread that waits is blocked. Async code awaits [`Sender::send_async`] and
//!   [`Receiver::recv_async`]. All wait in the same queues.
//! - **Cancel.** A wait ends early when the channel is closed. To end it on another condition, use
//!   [`select!`](crate::select), for example with an arm for
//!   [`Context::done`](crate::context::Context::done). A future may be dropped at any time; no value
//!   is lost by that.

mod buffer;
pub(crate) mod cells;
mod core;
mod error;
mod future;
mod handle;
mod iter;
mod lock;
mod queue;
#[doc(hidden)]
pub mod select;
mod timers;

pub use self::error::{
    RecvError, RecvTimeoutError, SendError, SendTimeoutError, TryRecvError, TrySendError,
};
pub use self::future::{RecvFuture, RecvStream, SendFuture, SendSink};
pub use self::iter::{IntoIter, Iter, TryIter};
pub use self::select::{
    ReadyTimeoutError, Select, SelectTimeoutError, SelectedOperation, TryReadyError, TrySelectError,
};
pub use self::timers::{after, at, tick};

use self::buffer::{TypedElem, UNBOUNDED};
use self::core::{ChanSide, Core, OpResult};
use self::handle::{Handle, ReceiverHandle, SenderHandle};
use crate::sched::Rt;
use crate::sched::wait;
use crate::sched::wait::reason::WaitReason;
use crate::sys::clock::{self, NEVER, Nanos};
use std::fmt;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::time::{Duration, Instant};

// A dump reads them by address (`sched/wait/holder.rs`).
const _: () = assert!(
    std::mem::offset_of!(core::Core, sender_count)
        == crate::sched::wait::holder::CHAN_SENDERS_OFFSET
);
const _: () = assert!(
    std::mem::offset_of!(core::Core, receiver_count)
        == crate::sched::wait::holder::CHAN_RECEIVERS_OFFSET
);

// Two cache lines (core.rs).
const _: () = assert!(size_of::<Core>() == 128);

/// Creates a channel with room for `cap` values.
///
/// A send waits while `cap` values are in the channel. So receivers that are slower than the
/// senders slow them down, and memory use is limited. With a capacity of 0 every send waits until a
/// receiver takes its value.
///
/// # Panics
/// Panics if the buffer would be larger than `isize::MAX` bytes.
///
/// # Examples
/// ```
/// let (tx, rx) = trefoil::chan::bounded(2);
/// tx.send('a').unwrap();
/// tx.send('b').unwrap();
/// assert!(tx.try_send('c').unwrap_err().is_full());
/// assert_eq!(rx.recv(), Ok('a'));
/// ```
pub fn bounded<T>(cap: usize) -> (Sender<T>, Receiver<T>) {
    // Any number of values of size zero fits; the largest number means "unbounded" internally.
    let cap = if size_of::<T>() == 0 { cap.min(UNBOUNDED - 1) } else { cap };
    assert!(cap != UNBOUNDED, "a channel of {cap} elements does not fit into memory");
    pair(cap)
}

/// Creates a channel that holds any number of values.
///
/// A send never waits. Nothing slows down senders that are faster than their receivers, and memory
/// use grows with every value that is not yet received. Prefer [`bounded`] unless a sender must not
/// wait.
///
/// # Examples
/// ```
/// let (tx, rx) = trefoil::chan::unbounded();
/// (0..1000).for_each(|n| tx.send(n).unwrap());
/// assert_eq!(rx.len(), 1000);
/// ```
pub fn unbounded<T>() -> (Sender<T>, Receiver<T>) {
    pair(UNBOUNDED)
}

fn pair<T>(cap: usize) -> (Sender<T>, Receiver<T>) {
    let (sender, receiver) = handle::new(cap);
    (Sender { handle: Some(sender) }, Receiver { handle: Some(receiver) })
}

/// Creates a receiver that never receives a value and is never closed: Go's nil channel.
///
/// Assign it to a receiver variable to turn off that arm of a [`select!`](crate::select) in a loop.
///
/// # Examples
/// ```
/// use trefoil::chan::{bounded, never};
/// use trefoil::select;
///
/// let (tx, mut rx) = bounded(1);
/// tx.send(1).unwrap();
/// drop(tx);
/// let mut got = Vec::new();
/// loop {
///     select! {
///         recv(rx) -> v => match v {
///             Ok(v) => got.push(v),
///             Err(_) => rx = never(), // closed: turn this arm off
///         },
///         default => break,
///     }
/// }
/// assert_eq!(got, [1]);
/// ```
pub fn never<T>() -> Receiver<T> {
    Receiver { handle: None }
}

/// Creates both ends of Go's nil channel: a send and a receive wait forever, and it is never closed.
///
/// Assign its sender to a variable to turn off a `send` arm of a [`select!`](crate::select) in a
/// loop. Its receiver is that of [`never()`]. Without waiting, a send finds the channel full and a
/// receive finds it empty.
///
/// # Examples
/// A goroutine that forwards values one by one sends only if it has one, and receives only if it has
/// none:
/// ```
/// use trefoil::chan::{bounded, nil, never};
/// use trefoil::select;
///
/// trefoil::run(|| {
///     let (tx, input) = bounded(4);
///     let (output, rx) = bounded(0);
///     (1..=3).for_each(|n| tx.send(n).unwrap());
///     drop(tx);
///     trefoil::go(move || {
///         let (mut from, mut to, mut value) = (input.clone(), nil().0, 0);
///         loop {
///             select! {
///                 recv(from) -> v => match v {
///                     Ok(v) => (from, to, value) = (never(), output.clone(), v),
///                     Err(_) => break,
///                 },
///                 send(to, value) -> _ => (from, to) = (input.clone(), nil().0),
///             }
///         }
///     });
///     assert_eq!(rx.iter().collect::<Vec<_>>(), [1, 2, 3]);
/// });
/// ```
pub fn nil<T>() -> (Sender<T>, Receiver<T>) {
    (Sender { handle: None }, never())
}

/// The sending end of a channel, created by [`bounded`], [`unbounded`] or [`nil`].
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
    /// None for [`nil`].
    handle: Option<SenderHandle<T>>,
}

/// The receiving end of a channel, created by [`bounded`], [`unbounded`], [`nil`] or [`never()`].
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
    /// None for [`never`].
    handle: Option<ReceiverHandle<T>>,
}

// SAFETY: a channel moves values between threads, and gives no thread a reference to one. Its lock
// guards the rest.
unsafe impl<T: Send> Send for Sender<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Sender<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Receiver<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Receiver<T> {}

// No user code runs while a channel is being changed.
impl<T> UnwindSafe for Sender<T> {}
impl<T> RefUnwindSafe for Sender<T> {}
impl<T> UnwindSafe for Receiver<T> {}
impl<T> RefUnwindSafe for Receiver<T> {}

impl<T> Sender<T> {
    #[inline(always)]
    fn core(&self) -> Option<&Core> {
        self.handle.as_ref().map(Handle::core)
    }

    /// Sends a value, and waits while the channel is full.
    ///
    /// With capacity 0 it waits until a receiver takes the value. On an [`unbounded`] channel it
    /// never waits.
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
    fn send_until(&self, value: T, deadline: Nanos) -> Result<(), (T, OpResult)> {
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
    /// channel of [`nil`]: no operation on it ever ends.
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
    /// it ([`Receiver::recv_async`]). Other senders and receivers may change the number at any time.
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

    /// Returns true if there is no room for another value. With capacity 0, and for [`nil`], this is
    /// always so.
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

    /// Returns how many values the channel has room for, or `None` if it is [`unbounded`]. For
    /// [`nil`] it is 0.
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

    /// Returns true if both senders send to the same channel, or if both are of [`nil`].
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

fn capacity(core: &Core) -> Option<usize> {
    Some(core.buffer.cap()).filter(|&cap| cap != UNBOUNDED)
}

impl<T> Receiver<T> {
    #[inline(always)]
    fn core(&self) -> Option<&Core> {
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
    fn recv_until(&self, deadline: Nanos) -> Result<T, OpResult> {
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
    /// it ([`Receiver::recv_async`]). Other senders and receivers may change the number at any time.
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

    /// Returns true if there is no room for another value. With capacity 0, and for [`never()`],
    /// this is always so.
    pub fn is_full(&self) -> bool {
        self.core().is_none_or(|core| core.buffer.len() >= core.buffer.cap())
    }

    /// Returns how many values the channel has room for, or `None` if it is [`unbounded`]. For
    /// [`never()`] it is 0.
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

    /// Returns what [`Sender::waiters`] does.
    #[doc(hidden)]
    pub fn waiters(&self) -> (usize, usize) {
        self.core().map_or((0, 0), Core::waiters)
    }

    /// Returns true if both receivers receive from the same channel, or if both are [`never()`].
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

/// Waits until `deadline`: the operation is never ready.
#[cold]
fn wait_for_never(reason: WaitReason, deadline: Nanos) -> OpResult {
    loop {
        if deadline != NEVER && deadline <= clock::now() {
            return OpResult::TimedOut;
        }
        wait::wait(reason, deadline, |_| true);
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Sender { handle: self.handle.clone() }
    }
}

impl<T> Clone for Receiver<T> {
    fn clone(&self) -> Self {
        Receiver { handle: self.handle.clone() }
    }
}

impl<T> fmt::Debug for Sender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sender { .. }")
    }
}

impl<T> fmt::Debug for Receiver<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Receiver { .. }")
    }
}
