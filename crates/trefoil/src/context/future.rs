//! The future that waits until a context is done.

use super::{Context, ContextError};
use crate::chan::RecvFuture;
use std::future::Future;
use std::pin::Pin;
use std::task::{self, Poll};

/// A future that completes when a [`Context`] is done. [`Context::done_async`] returns it.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use trefoil::context::{Context, ContextError};
/// let (ctx, _cancel) = Context::background().with_timeout(Duration::from_millis(1));
/// assert_eq!(trefoil::block_on(ctx.done_async()), ContextError::DeadlineExceeded);
/// ```
#[must_use = "a future does nothing unless it is awaited"]
#[derive(Debug)]
pub struct DoneFuture<'a> {
    pub(super) context: &'a Context,
    /// No value is ever sent, so it ends when the channel is closed.
    pub(super) closed: RecvFuture<'a, ()>,
}

impl Future for DoneFuture<'_> {
    type Output = ContextError;

    fn poll(self: Pin<&mut Self>, cx: &mut task::Context<'_>) -> Poll<ContextError> {
        let context = self.context;
        // SAFETY: `closed` is pinned with the future, and never moved.
        let closed = unsafe { self.map_unchecked_mut(|this| &mut this.closed) };
        // A context that is done has a reason (`node.rs`, invariant 1).
        closed.poll(cx).map(|_| context.err().unwrap_or(ContextError::Canceled))
    }
}
