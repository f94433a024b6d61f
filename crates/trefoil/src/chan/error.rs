//! The errors of channel operations.

use std::error::Error;
use std::fmt;

/// The error of [`Sender::send`](super::Sender::send): the channel is closed. It contains the value
/// that was not sent.
///
/// # Examples
/// ```
/// use trefoil::chan::{SendError, bounded};
/// let (tx, rx) = bounded(1);
/// drop(rx);
/// let SendError(value) = tx.send("lost").unwrap_err();
/// assert_eq!(value, "lost");
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SendError<T>(pub T);

/// The error of [`Receiver::recv`](super::Receiver::recv): the channel is closed and empty, so no
/// value will ever come.
///
/// # Examples
/// ```
/// use trefoil::chan::{RecvError, bounded};
/// let (tx, rx) = bounded::<i32>(1);
/// drop(tx);
/// assert_eq!(rx.recv(), Err(RecvError));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecvError;

/// The error of [`Sender::try_send`](super::Sender::try_send). It contains the value that was not
/// sent.
///
/// # Examples
/// ```
/// use trefoil::chan::{TrySendError, bounded};
/// let (tx, _rx) = bounded(1);
/// tx.send(1).unwrap();
/// match tx.try_send(2) {
///     Err(TrySendError::Full(value)) => assert_eq!(value, 2),
///     Err(TrySendError::Closed(_)) => unreachable!("the receiver exists"),
///     Ok(()) => unreachable!("there is no room"),
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum TrySendError<T> {
    /// There is no room in the channel. With capacity 0: no receiver waits.
    Full(T),
    /// The channel is closed by [`close`](super::Sender::close), or because all receivers were
    /// dropped.
    Closed(T),
}

/// The error of [`Receiver::try_recv`](super::Receiver::try_recv).
///
/// # Examples
/// ```
/// use trefoil::chan::{TryRecvError, bounded};
/// let (tx, rx) = bounded::<i32>(1);
/// assert_eq!(rx.try_recv(), Err(TryRecvError::Empty));
/// drop(tx);
/// assert_eq!(rx.try_recv(), Err(TryRecvError::Closed));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TryRecvError {
    /// The channel is empty. A value may come later.
    Empty,
    /// The channel is closed and empty. No value will ever come.
    Closed,
}

/// The error of [`Sender::send_timeout`](super::Sender::send_timeout) and
/// [`Sender::send_deadline`](super::Sender::send_deadline). It contains the value that was not
/// sent.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use trefoil::chan::{SendTimeoutError, bounded};
/// let (tx, rx) = bounded(0);
/// let limit = Duration::from_millis(1);
/// assert_eq!(tx.send_timeout('a', limit), Err(SendTimeoutError::Timeout('a')));
/// drop(rx);
/// assert_eq!(tx.send_timeout('b', limit), Err(SendTimeoutError::Closed('b')));
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum SendTimeoutError<T> {
    /// The value could not be sent in time.
    Timeout(T),
    /// The channel is closed by [`close`](super::Sender::close), or because all receivers were
    /// dropped.
    Closed(T),
}

/// The error of [`Receiver::recv_timeout`](super::Receiver::recv_timeout) and
/// [`Receiver::recv_deadline`](super::Receiver::recv_deadline).
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use trefoil::chan::{RecvTimeoutError, bounded};
/// let (tx, rx) = bounded::<i32>(1);
/// let limit = Duration::from_millis(1);
/// assert_eq!(rx.recv_timeout(limit), Err(RecvTimeoutError::Timeout));
/// drop(tx);
/// assert_eq!(rx.recv_timeout(limit), Err(RecvTimeoutError::Closed));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RecvTimeoutError {
    /// No value came in time.
    Timeout,
    /// The channel is closed and empty. No value will ever come.
    Closed,
}

impl<T> SendError<T> {
    /// Returns the value that was not sent.
    ///
    /// # Examples
    /// ```
    /// let (tx, rx) = trefoil::chan::bounded(1);
    /// drop(rx);
    /// assert_eq!(tx.send("lost").unwrap_err().into_inner(), "lost");
    /// ```
    pub fn into_inner(self) -> T {
        self.0
    }
}

impl<T> TrySendError<T> {
    /// Returns the value that was not sent.
    ///
    /// # Examples
    /// ```
    /// let (tx, _rx) = trefoil::chan::bounded(0);
    /// assert_eq!(tx.try_send("again").unwrap_err().into_inner(), "again");
    /// ```
    pub fn into_inner(self) -> T {
        match self {
            TrySendError::Full(value) | TrySendError::Closed(value) => value,
        }
    }

    /// Returns true if there was no room, or with capacity 0, if no receiver waited.
    pub fn is_full(&self) -> bool {
        matches!(self, TrySendError::Full(_))
    }

    /// Returns true if the channel is closed.
    pub fn is_closed(&self) -> bool {
        matches!(self, TrySendError::Closed(_))
    }
}

impl<T> SendTimeoutError<T> {
    /// Returns the value that was not sent.
    ///
    /// # Examples
    /// ```
    /// use std::time::Duration;
    /// let (tx, _rx) = trefoil::chan::bounded(0);
    /// let error = tx.send_timeout("late", Duration::from_millis(1)).unwrap_err();
    /// assert_eq!(error.into_inner(), "late");
    /// ```
    pub fn into_inner(self) -> T {
        match self {
            SendTimeoutError::Timeout(value) | SendTimeoutError::Closed(value) => value,
        }
    }

    /// Returns true if the value could not be sent in time.
    pub fn is_timeout(&self) -> bool {
        matches!(self, SendTimeoutError::Timeout(_))
    }

    /// Returns true if the channel is closed.
    pub fn is_closed(&self) -> bool {
        matches!(self, SendTimeoutError::Closed(_))
    }
}

impl TryRecvError {
    /// Returns true if the channel was empty but not closed.
    pub fn is_empty(&self) -> bool {
        *self == TryRecvError::Empty
    }

    /// Returns true if the channel is closed and empty.
    pub fn is_closed(&self) -> bool {
        *self == TryRecvError::Closed
    }
}

impl RecvTimeoutError {
    /// Returns true if no value came in time.
    pub fn is_timeout(&self) -> bool {
        *self == RecvTimeoutError::Timeout
    }

    /// Returns true if the channel is closed and empty.
    pub fn is_closed(&self) -> bool {
        *self == RecvTimeoutError::Closed
    }
}

const SEND_CLOSED: &str = "sending on a closed channel";
const RECV_CLOSED: &str = "receiving on a closed and empty channel";

impl<T> fmt::Debug for SendError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SendError(..)")
    }
}

impl<T> fmt::Display for SendError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(SEND_CLOSED)
    }
}

impl<T> Error for SendError<T> {}

impl fmt::Display for RecvError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(RECV_CLOSED)
    }
}

impl Error for RecvError {}

impl<T> fmt::Debug for TrySendError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TrySendError::Full(_) => "Full(..)",
            TrySendError::Closed(_) => "Closed(..)",
        })
    }
}

impl<T> fmt::Display for TrySendError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TrySendError::Full(_) => "sending on a full channel",
            TrySendError::Closed(_) => SEND_CLOSED,
        })
    }
}

impl<T> Error for TrySendError<T> {}

impl fmt::Display for TryRecvError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TryRecvError::Empty => "receiving on an empty channel",
            TryRecvError::Closed => RECV_CLOSED,
        })
    }
}

impl Error for TryRecvError {}

impl<T> fmt::Debug for SendTimeoutError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SendTimeoutError::Timeout(_) => "Timeout(..)",
            SendTimeoutError::Closed(_) => "Closed(..)",
        })
    }
}

impl<T> fmt::Display for SendTimeoutError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SendTimeoutError::Timeout(_) => "timed out waiting to send",
            SendTimeoutError::Closed(_) => SEND_CLOSED,
        })
    }
}

impl<T> Error for SendTimeoutError<T> {}

impl fmt::Display for RecvTimeoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RecvTimeoutError::Timeout => "timed out waiting to receive",
            RecvTimeoutError::Closed => RECV_CLOSED,
        })
    }
}

impl Error for RecvTimeoutError {}

impl<T> From<SendError<T>> for TrySendError<T> {
    fn from(SendError(value): SendError<T>) -> Self {
        TrySendError::Closed(value)
    }
}

impl<T> From<SendError<T>> for SendTimeoutError<T> {
    fn from(SendError(value): SendError<T>) -> Self {
        SendTimeoutError::Closed(value)
    }
}

impl From<RecvError> for TryRecvError {
    fn from(_: RecvError) -> Self {
        TryRecvError::Closed
    }
}

impl From<RecvError> for RecvTimeoutError {
    fn from(_: RecvError) -> Self {
        RecvTimeoutError::Closed
    }
}
