//! Why a context is done.

use std::error::Error;
use std::fmt;

/// The reason why a context is done, returned by [`Context::err`](super::Context::err).
///
/// # Examples
/// ```
/// use trefoil::context::{Context, ContextError};
/// let (ctx, cancel) = Context::background().with_cancel();
/// cancel.cancel();
/// assert_eq!(ctx.err(), Some(ContextError::Canceled));
/// assert_eq!(ContextError::Canceled.to_string(), "context canceled");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ContextError {
    /// [`Cancel::cancel`](super::Cancel::cancel) was called for the context or for a context above
    /// it.
    Canceled,
    /// The deadline of the context, or of a context above it, has passed.
    DeadlineExceeded,
}

impl fmt::Display for ContextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ContextError::Canceled => "context canceled",
            ContextError::DeadlineExceeded => "context deadline exceeded",
        })
    }
}

impl Error for ContextError {}
