//! Channels: how goroutines (and plain threads) hand each other values. Go's channels, with the
//! names of crossbeam's.
//!
//! | | capacity | a send waits | a receive waits |
//! |---|---|---|---|
//! | [`bounded(0)`](bounded) | none: a *rendezvous* | for a receiver | for a sender |
//! | [`bounded(n)`](bounded) | n values | while n values lie in it | while it is empty |
//! | [`unbounded()`](unbounded) | as much as fits into memory | never | while it is empty |
//! | [`never()`](never()) | none | there is no sender | for ever: Go's nil channel |
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
//!     drop(tx); // the clones are left; when they are gone the loop ends
//!     assert_eq!(rx.iter().sum::<i32>(), 14);
//! });
//! ```
//!
//! - **Order.** First in, first out; those who wait are served in the order they came, senders and
//!   receivers alike. A value for a receiver that waits goes directly to it.
//! - **Closing.** A channel is closed by [`Sender::close`], or when the last sender or the last
//!   receiver is dropped. Then sends fail and give the value back; receivers get what is left, and
//!   then fail.
//!   (In Go
//!   a send on a closed channel panics; here it is an error, as in crossbeam.)
//! - **Anywhere.** Both ends work on goroutines of any runtime and on plain threads, in every
//!   combination; a goroutine that waits is parked, a thread sleeps.
//! - **Several at once.** [`select!`](crate::select) waits for the first of several operations,
//!   [`Select`] for a set that is known only at run time.

mod buffer;
pub(crate) mod cells;
mod core;
mod error;
mod handle;
mod iter;
mod lock;
mod queue;
#[doc(hidden)]
pub mod select;

pub use self::error::{
    RecvError, RecvTimeoutError, SendError, SendTimeoutError, TryRecvError, TrySendError,
};
pub use self::iter::{IntoIter, Iter, TryIter};
pub use self::select::{Select, SelectTimeoutError, SelectedOperation, TrySelectError};

use self::buffer::{Of, UNBOUNDED};
use self::core::{Core, Ended, Side};
use self::handle::Handle;
use crate::sched::Rt;
use crate::sched::reason::WaitReason;
use crate::sched::wait;
use crate::sys::clock::{self, NEVER, Nanos};
use std::fmt;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::time::{Duration, Instant};

/// As core.rs says.
const _: () = assert!(size_of::<Core>() == 128);

/// A channel with room for `cap` values. With 0 every send waits for its receiver.
///
/// # Panics
/// If `cap` values do not fit into memory.
///
/// ```
/// let (tx, rx) = trefoil::chan::bounded(2);
/// tx.send('a').unwrap();
/// tx.send('b').unwrap();
/// assert!(tx.try_send('c').unwrap_err().is_full());
/// assert_eq!(rx.recv(), Ok('a'));
/// ```
pub fn bounded<T>(cap: usize) -> (Sender<T>, Receiver<T>) {
    // Values without a size fit in any number; the largest one means "unbounded" inside.
    let cap = if size_of::<T>() == 0 { cap.min(UNBOUNDED - 1) } else { cap };
    assert!(cap != UNBOUNDED, "a channel of {cap} elements does not fit into memory");
    pair(cap)
}

/// A channel that takes every value at once and keeps it until it is received.
///
/// Nothing slows down senders that are faster than their receivers: prefer [`bounded`].
///
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
    (Sender { handle: sender }, Receiver { handle: Some(receiver) })
}

/// A receiver to which nothing ever comes: Go's nil channel. In a select it switches an arm off.
///
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
///             Err(_) => rx = never(), // closed: this arm is done
///         },
///         default => break,
///     }
/// }
/// assert_eq!(got, [1]);
/// ```
pub fn never<T>() -> Receiver<T> {
    Receiver { handle: None }
}

/// The sending end of a channel. Clones send to the same one.
pub struct Sender<T> {
    handle: Handle<T, true>,
}

/// The receiving end of a channel. Clones receive from the same one: each value goes to one of
/// them.
pub struct Receiver<T> {
    /// None: [`never`].
    handle: Option<Handle<T, false>>,
}

// SAFETY: a channel moves values between threads, and shows no thread a reference to one; the rest
// of it is behind its lock.
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
    fn core(&self) -> &Core {
        self.handle.core()
    }

    /// Sends a value; waits while there is no room for it, or with capacity 0, no receiver.
    ///
    /// # Errors
    /// If the channel is closed or all receivers are gone, also while it waits: gives the value
    /// back.
    ///
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

    /// Sends a value if that needs no waiting.
    ///
    /// # Errors
    /// If there is no room (with capacity 0: no receiver that waits), or the channel is closed.
    ///
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
        let value = ManuallyDrop::new(value);
        let slot = (&raw const value).cast_mut().cast();
        // SAFETY: `value` is one, and moves if this is `Done`.
        match unsafe { self.core().attempt(Side::Send, Of::<T>::ELEM, slot) } {
            Some(Ended::Done) => Ok(()),
            Some(_) => Err(TrySendError::Closed(ManuallyDrop::into_inner(value))),
            None => Err(TrySendError::Full(ManuallyDrop::into_inner(value))),
        }
    }

    /// Sends from inside the runtime (a timer), if there is room: then the value moves, else it is
    /// forgotten, so it must need no drop. Not for unbounded channels, which may have to allocate.
    pub(crate) fn try_send_in(&self, rt: Rt, value: T)
    where
        T: Copy,
    {
        let slot = (&raw const value).cast_mut().cast();
        // SAFETY: `value` is one, and Copy.
        let _ = unsafe { self.core().attempt_in(Some(rt), Side::Send, Of::<T>::ELEM, slot) };
    }

    /// Drops the sender. If it is the last, the channel stays open and nothing more comes.
    pub(crate) fn leave_open(self) {
        self.handle.leave_open();
    }

    /// As [`send`](Sender::send), but waits at most for `limit`.
    ///
    /// # Errors
    /// If the time is up, or the channel is closed.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let (tx, _rx) = trefoil::chan::bounded(0);
    /// let late = tx.send_timeout(1, Duration::from_millis(1)).unwrap_err();
    /// assert!(late.is_timeout() && late.into_inner() == 1);
    /// ```
    pub fn send_timeout(&self, value: T, limit: Duration) -> Result<(), SendTimeoutError<T>> {
        self.send_by(value, clock::after(limit))
    }

    /// As [`send`](Sender::send), but waits at most until `deadline`.
    ///
    /// # Errors
    /// If the time is up, or the channel is closed.
    pub fn send_deadline(&self, value: T, deadline: Instant) -> Result<(), SendTimeoutError<T>> {
        self.send_by(value, clock::at(deadline))
    }

    fn send_by(&self, value: T, deadline: Nanos) -> Result<(), SendTimeoutError<T>> {
        self.send_until(value, deadline).map_err(|(value, ended)| match ended {
            Ended::TimedOut => SendTimeoutError::Timeout(value),
            _ => SendTimeoutError::Closed(value),
        })
    }

    #[inline]
    fn send_until(&self, value: T, deadline: Nanos) -> Result<(), (T, Ended)> {
        let value = ManuallyDrop::new(value);
        let slot = (&raw const value).cast_mut().cast();
        // SAFETY: `value` is one, and moves if this is `Done`.
        match unsafe { self.core().operate(Side::Send, Of::<T>::ELEM, slot, deadline) } {
            Ended::Done => Ok(()),
            ended => Err((ManuallyDrop::into_inner(value), ended)),
        }
    }

    /// Closes the channel for all: sends fail from now on (also those that wait), receivers get
    /// what is left.
    /// Closing again does nothing.
    ///
    /// ```
    /// let (tx, rx) = trefoil::chan::bounded(4);
    /// tx.send(1).unwrap();
    /// tx.close();
    /// tx.close();
    /// assert_eq!(rx.iter().collect::<Vec<_>>(), [1]);
    /// ```
    pub fn close(&self) {
        self.core().close();
    }

    /// Whether the channel is closed: by [`close`](Sender::close), or because all receivers are
    /// gone.
    pub fn is_closed(&self) -> bool {
        self.core().is_closed()
    }

    /// How many values lie in the channel. Always 0 with capacity 0.
    pub fn len(&self) -> usize {
        self.core().buffer.len()
    }

    /// Whether no value lies in the channel. Always so with capacity 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether there is no room for another value. Always so with capacity 0.
    pub fn is_full(&self) -> bool {
        self.len() == self.core().buffer.cap()
    }

    /// For how many values there is room; None: [`unbounded`].
    pub fn capacity(&self) -> Option<usize> {
        capacity(self.core())
    }

    /// How many operations wait to send and to receive. For tests: whoever waits in a select counts
    /// in each of its channels, and one that has just been served elsewhere for a moment longer.
    #[doc(hidden)]
    pub fn waiters(&self) -> (usize, usize) {
        self.core().waiters()
    }

    /// Whether both send to the same channel.
    pub fn same_channel(&self, other: &Sender<T>) -> bool {
        std::ptr::eq(self.core(), other.core())
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

    /// Takes a value out, if there is one, inside the runtime or on a plain thread. It is forgotten, so it must need no
    /// drop. Not for unbounded channels. True: there was one.
    pub(crate) fn discard_in(&self, here: Option<Rt>) -> bool
    where
        T: Copy,
    {
        self.core().is_some_and(|core| core.discard_in::<T>(here))
    }

    /// Receives the next value; waits until there is one.
    ///
    /// # Errors
    /// If the channel is closed and empty, also while it waits.
    ///
    /// ```
    /// use trefoil::chan::{RecvError, bounded};
    /// trefoil::run(|| {
    ///     let (tx, rx) = bounded(0);
    ///     trefoil::go(move || tx.send("hello").unwrap());
    ///     assert_eq!(rx.recv(), Ok("hello"));
    ///     assert_eq!(rx.recv(), Err(RecvError)); // the sender is gone
    /// });
    /// ```
    #[inline]
    pub fn recv(&self) -> Result<T, RecvError> {
        self.recv_until(NEVER).map_err(|_| RecvError)
    }

    /// Receives the next value if there is one.
    ///
    /// # Errors
    /// If there is none, or the channel is closed and empty.
    ///
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
            wait::leave(Rt::enter()); // as in `Core::attempt`
            return Err(TryRecvError::Empty);
        };
        let mut value = MaybeUninit::<T>::uninit();
        let slot = value.as_mut_ptr().cast();
        // SAFETY: `value` has room for one, and holds one if this is `Done`.
        unsafe {
            match core.attempt(Side::Recv, Of::<T>::ELEM, slot) {
                Some(Ended::Done) => Ok(value.assume_init()),
                Some(_) => Err(TryRecvError::Closed),
                None => Err(TryRecvError::Empty),
            }
        }
    }

    /// As [`recv`](Receiver::recv), but waits at most for `limit`.
    ///
    /// # Errors
    /// If the time is up, or the channel is closed and empty.
    ///
    /// ```
    /// # use std::time::Duration;
    /// use trefoil::chan::{RecvTimeoutError, bounded};
    /// let (_tx, rx) = bounded::<i32>(1);
    /// assert_eq!(rx.recv_timeout(Duration::from_millis(1)), Err(RecvTimeoutError::Timeout));
    /// ```
    pub fn recv_timeout(&self, limit: Duration) -> Result<T, RecvTimeoutError> {
        self.recv_by(clock::after(limit))
    }

    /// As [`recv`](Receiver::recv), but waits at most until `deadline`.
    ///
    /// # Errors
    /// If the time is up, or the channel is closed and empty.
    pub fn recv_deadline(&self, deadline: Instant) -> Result<T, RecvTimeoutError> {
        self.recv_by(clock::at(deadline))
    }

    fn recv_by(&self, deadline: Nanos) -> Result<T, RecvTimeoutError> {
        self.recv_until(deadline).map_err(|ended| match ended {
            Ended::TimedOut => RecvTimeoutError::Timeout,
            _ => RecvTimeoutError::Closed,
        })
    }

    #[inline]
    fn recv_until(&self, deadline: Nanos) -> Result<T, Ended> {
        let Some(core) = self.core() else { return Err(wait_for_never(deadline)) };
        let mut value = MaybeUninit::<T>::uninit();
        let slot = value.as_mut_ptr().cast();
        // SAFETY: `value` has room for one, and holds one if this is `Done`.
        unsafe {
            match core.operate(Side::Recv, Of::<T>::ELEM, slot, deadline) {
                Ended::Done => Ok(value.assume_init()),
                ended => Err(ended),
            }
        }
    }

    /// The values as they come, until the channel is closed and empty. `for v in &rx` is the same.
    ///
    /// ```
    /// let (tx, rx) = trefoil::chan::bounded(0);
    /// std::thread::spawn(move || (0..5).for_each(|n| tx.send(n).unwrap()));
    /// assert_eq!(rx.iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    /// ```
    pub fn iter(&self) -> Iter<'_, T> {
        Iter { receiver: self }
    }

    /// The values that can be had without waiting.
    ///
    /// ```
    /// let (tx, rx) = trefoil::chan::unbounded();
    /// tx.send(1).unwrap();
    /// tx.send(2).unwrap();
    /// assert_eq!(rx.try_iter().sum::<i32>(), 3); // though `tx` is still there
    /// ```
    pub fn try_iter(&self) -> TryIter<'_, T> {
        TryIter { receiver: self }
    }

    /// Whether the channel is closed. There may still be values in it.
    pub fn is_closed(&self) -> bool {
        self.core().is_some_and(Core::is_closed)
    }

    /// How many values lie in the channel. Always 0 with capacity 0.
    pub fn len(&self) -> usize {
        self.core().map_or(0, |core| core.buffer.len())
    }

    /// Whether no value lies in the channel. Always so with capacity 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether there is no room for another value. Always so with capacity 0.
    pub fn is_full(&self) -> bool {
        self.core().is_none_or(|core| core.buffer.len() == core.buffer.cap())
    }

    /// For how many values there is room; None: [`unbounded`]. That of [`never()`] is 0.
    pub fn capacity(&self) -> Option<usize> {
        self.core().map_or(Some(0), capacity)
    }

    /// As [`Sender::waiters`].
    #[doc(hidden)]
    pub fn waiters(&self) -> (usize, usize) {
        self.core().map_or((0, 0), Core::waiters)
    }

    /// Whether both receive from the same channel.
    pub fn same_channel(&self, other: &Receiver<T>) -> bool {
        match (self.core(), other.core()) {
            (Some(a), Some(b)) => std::ptr::eq(a, b),
            (a, b) => a.is_none() && b.is_none(),
        }
    }
}

/// Nothing comes; only the deadline, if any.
#[cold]
fn wait_for_never(deadline: Nanos) -> Ended {
    loop {
        if deadline != NEVER && deadline <= clock::now() {
            return Ended::TimedOut;
        }
        wait::wait(WaitReason::ChanReceiveNil, deadline, |_| true);
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
