//! The handles that cancel a context.

use super::ContextError;
use super::node::{CancelNode, Reason, share};
use std::error::Error;
use std::fmt;
use std::sync::Arc;

/// Cancels a [`Context`](super::Context) and all contexts below it. Clones cancel the same context.
///
/// # Drop
/// Dropping a `Cancel` does not cancel the context.
///
/// # Examples
/// ```
/// let (ctx, cancel) = trefoil::context::Context::background().with_cancel();
/// drop(cancel.clone());
/// assert!(ctx.err().is_none());
/// cancel.cancel();
/// cancel.cancel(); // does nothing
/// assert!(ctx.err().is_some());
/// ```
#[derive(Clone)]
pub struct Cancel {
    pub(super) node: Arc<CancelNode>,
}

/// Cancels a [`Context`](super::Context) and all contexts below it, and says why.
/// [`Context::with_cancel_cause`](super::Context::with_cancel_cause) creates it. Clones cancel the
/// same context.
///
/// # Drop
/// Dropping a `CancelCause` does not cancel the context.
///
/// # Examples
/// ```
/// let (ctx, cancel) = trefoil::context::Context::background().with_cancel_cause();
/// cancel.cancel("the client has gone");
/// assert_eq!(ctx.cause().unwrap().to_string(), "the client has gone");
/// ```
#[derive(Clone)]
pub struct CancelCause {
    pub(super) node: Arc<CancelNode>,
}

impl Cancel {
    /// Cancels the context and all contexts below it. Does nothing if the context is done already.
    ///
    /// It does not wait for the goroutines that use the context.
    ///
    /// # Examples
    /// ```
    /// use trefoil::context::Context;
    /// trefoil::run(|| {
    ///     let (ctx, cancel) = Context::background().with_cancel();
    ///     let worker = trefoil::go(move || ctx.done().recv().is_err());
    ///     cancel.cancel();
    ///     assert!(worker.join().unwrap());
    /// });
    /// ```
    pub fn cancel(&self) {
        self.node.cancel(ContextError::Canceled.into());
    }
}

impl CancelCause {
    /// Cancels the context and all contexts below it for this cause, an error or a text. Does
    /// nothing if the context is done already: the first cause stays.
    ///
    /// [`Context::err`](super::Context::err) is [`ContextError::Canceled`], and
    /// [`Context::cause`](super::Context::cause) is the cause. It may be the cause of another
    /// context: that is passed on as it is.
    ///
    /// # Examples
    /// ```
    /// use std::io;
    /// use trefoil::context::Context;
    /// let (ctx, cancel) = Context::background().with_cancel_cause();
    /// cancel.cancel(io::Error::from(io::ErrorKind::BrokenPipe));
    /// cancel.cancel("too late");
    /// let cause = ctx.cause().unwrap();
    /// let error: &io::Error = cause.downcast_ref().unwrap();
    /// assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    /// ```
    pub fn cancel<E>(&self, cause: E)
    where
        E: Into<Box<dyn Error + Send + Sync>>,
    {
        self.node.cancel(Reason { err: ContextError::Canceled, cause: Some(share(cause.into())) });
    }
}

impl fmt::Debug for CancelCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CancelCause").finish_non_exhaustive()
    }
}

impl fmt::Debug for Cancel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cancel").finish_non_exhaustive()
    }
}
