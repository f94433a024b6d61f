//! What can go wrong at a channel.

use std::error::Error;
use std::fmt;

/// [`Sender::send`](super::Sender::send): the channel is closed. Gives the value back.
///
/// ```
/// use trefoil::chan::{SendError, bounded};
/// let (tx, rx) = bounded(1);
/// drop(rx);
/// let SendError(value) = tx.send("lost").unwrap_err();
/// assert_eq!(value, "lost");
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SendError<T>(pub T);

/// [`Receiver::recv`](super::Receiver::recv): the channel is closed and empty.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecvError;

/// [`Sender::try_send`](super::Sender::try_send). Gives the value back.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum TrySendError<T> {
    /// No room, or with capacity 0: no receiver waits.
    Full(T),
    /// The channel is closed, or all receivers are gone.
    Closed(T),
}

/// [`Receiver::try_recv`](super::Receiver::try_recv).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TryRecvError {
    /// Nothing there, but there may be later.
    Empty,
    /// The channel is closed and empty.
    Closed,
}

/// [`Sender::send_timeout`](super::Sender::send_timeout). Gives the value back.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum SendTimeoutError<T> {
    /// The time is up.
    Timeout(T),
    /// The channel is closed, or all receivers are gone.
    Closed(T),
}

/// [`Receiver::recv_timeout`](super::Receiver::recv_timeout).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RecvTimeoutError {
    /// The time is up.
    Timeout,
    /// The channel is closed and empty.
    Closed,
}

impl<T> SendError<T> {
    /// The value that was not sent.
    pub fn into_inner(self) -> T {
        self.0
    }
}

impl<T> TrySendError<T> {
    /// The value that was not sent.
    pub fn into_inner(self) -> T {
        match self {
            TrySendError::Full(value) | TrySendError::Closed(value) => value,
        }
    }

    /// Whether there was no room.
    pub fn is_full(&self) -> bool {
        matches!(self, TrySendError::Full(_))
    }

    /// Whether the channel is closed.
    pub fn is_closed(&self) -> bool {
        matches!(self, TrySendError::Closed(_))
    }
}

impl<T> SendTimeoutError<T> {
    /// The value that was not sent.
    pub fn into_inner(self) -> T {
        match self {
            SendTimeoutError::Timeout(value) | SendTimeoutError::Closed(value) => value,
        }
    }

    /// Whether the time was up.
    pub fn is_timeout(&self) -> bool {
        matches!(self, SendTimeoutError::Timeout(_))
    }

    /// Whether the channel is closed.
    pub fn is_closed(&self) -> bool {
        matches!(self, SendTimeoutError::Closed(_))
    }
}

impl TryRecvError {
    /// Whether nothing was there.
    pub fn is_empty(&self) -> bool {
        *self == TryRecvError::Empty
    }

    /// Whether the channel is closed and empty.
    pub fn is_closed(&self) -> bool {
        *self == TryRecvError::Closed
    }
}

impl RecvTimeoutError {
    /// Whether the time was up.
    pub fn is_timeout(&self) -> bool {
        *self == RecvTimeoutError::Timeout
    }

    /// Whether the channel is closed and empty.
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
