//! Cancellation, deadlines and values that belong to a request: Go's `context`.
//!
//! A function that may take long gets a [`Context`] from its caller. It ends early when
//! [`Context::done`] is closed, and passes the context on to the functions that it calls.
//!
//! ```
//! use trefoil::context::{Context, ContextError};
//! use trefoil::select;
//! use std::time::Duration;
//!
//! trefoil::run(|| {
//!     let (ctx, cancel) = Context::background().with_timeout(Duration::from_secs(60));
//!     let worker = trefoil::go(move || {
//!         select! {
//!             recv(ctx.done()) -> _ => {}
//!             after(Duration::from_secs(30)) => {}
//!         }
//!         ctx.err()
//!     });
//!     cancel.cancel();
//!     assert_eq!(worker.join().unwrap(), Some(ContextError::Canceled));
//! });
//! ```
//!
//! # What is in this module
//! | item | purpose |
//! |---|---|
//! | [`Context`] | tells a function whether it should end, and carries values |
//! | [`Cancel`] | cancels a context and all contexts below it |
//! | [`CancelCause`] | the same, and says why |
//! | [`AfterFunc`] | a function that is called when a context is done |
//! | [`ContextError`] | the reason why a context is done |
//! | [`DoneFuture`] | what [`Context::done_async`] returns, for async code |
//!
//! [`ErrGroup::with_context`](crate::sync::ErrGroup::with_context) cancels a context when the first
//! goroutine of a group fails, and
//! [`with_context_cause`](crate::sync::ErrGroup::with_context_cause) says why.

// # Implementation
// A context is a node in two trees: one for cancellation (`node.rs`), one for values (`values.rs`).
// Both are chains of `Arc`s towards the root.

mod after_func;
mod cancel;
mod error;
mod future;
mod node;
mod values;

use crate::chan::{self, Receiver};
use crate::sync::OnceLock;
use node::{CancelNode, Cause, Reason, share};
use std::any::Any;
use std::error::Error;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::time::{Duration, Instant};
use values::Values;

pub use after_func::AfterFunc;
pub use cancel::{Cancel, CancelCause};
pub use error::ContextError;
pub use future::DoneFuture;

/// Tells a function whether it should end, and carries the values of a request.
///
/// [`Context::background`] is the root. The `with_…` methods make a context below another one. When
/// a context is done, all contexts below it are done too; contexts above it are not affected.
/// Clones are handles of the same context.
///
/// # Drop
/// A context whose handles are all dropped is freed together with its timer. Unlike in Go, no call
/// of [`Cancel::cancel`] is needed for that.
///
/// # Examples
/// ```
/// use trefoil::context::Context;
/// let (ctx, cancel) = Context::background().with_cancel();
/// let (below, _) = ctx.with_cancel();
/// assert_eq!(below.err(), None);
/// cancel.cancel();
/// assert!(below.err().is_some(), "contexts below are cancelled, too");
/// ```
#[derive(Clone, Default)]
pub struct Context {
    /// None if the context is never cancelled.
    node: Option<Arc<CancelNode>>,
    values: Option<Arc<Values>>,
}

impl Context {
    /// Returns the root context. It is never done, and has no deadline and no values.
    ///
    /// # Examples
    /// ```
    /// let ctx = trefoil::context::Context::background();
    /// assert_eq!((ctx.err(), ctx.deadline()), (None, None));
    /// ```
    pub const fn background() -> Context {
        Context { node: None, values: None }
    }

    /// Returns a context below this one, and a [`Cancel`] for it.
    ///
    /// # Examples
    /// ```
    /// let (ctx, cancel) = trefoil::context::Context::background().with_cancel();
    /// trefoil::go(move || cancel.cancel());
    /// assert!(ctx.done().recv().is_err()); // closed
    /// ```
    pub fn with_cancel(&self) -> (Context, Cancel) {
        let (ctx, node) = self.cancellable(self.deadline());
        (ctx, Cancel { node })
    }

    /// Returns a context below this one, and a [`CancelCause`] that cancels it with a cause.
    ///
    /// # Examples
    /// ```
    /// use trefoil::context::{Context, ContextError};
    /// let (ctx, cancel) = Context::background().with_cancel_cause();
    /// let (below, _) = ctx.with_cancel();
    /// cancel.cancel("shutting down");
    /// assert_eq!(below.err(), Some(ContextError::Canceled));
    /// assert_eq!(below.cause().unwrap().to_string(), "shutting down");
    /// ```
    pub fn with_cancel_cause(&self) -> (Context, CancelCause) {
        let (ctx, node) = self.cancellable(self.deadline());
        (ctx, CancelCause { node })
    }

    /// Returns a context below this one that is done after `d`, or when it is cancelled.
    ///
    /// A deadline of this context still counts if it is earlier.
    ///
    /// # Examples
    /// ```
    /// use std::time::Duration;
    /// use trefoil::context::{Context, ContextError};
    /// let (ctx, _cancel) = Context::background().with_timeout(Duration::from_millis(1));
    /// assert!(ctx.done().recv().is_err());
    /// assert_eq!(ctx.err(), Some(ContextError::DeadlineExceeded));
    /// ```
    pub fn with_timeout(&self, d: Duration) -> (Context, Cancel) {
        self.with_timeout_reason(d, None)
    }

    /// As [`with_timeout`](Context::with_timeout), and [`cause`](Context::cause) returns `cause` if
    /// the context is done because `d` is over.
    ///
    /// # Examples
    /// ```
    /// use std::time::Duration;
    /// use trefoil::context::{Context, ContextError};
    /// let limit = Duration::from_millis(1);
    /// let (ctx, _cancel) = Context::background().with_timeout_cause(limit, "the query is slow");
    /// assert!(ctx.done().recv().is_err());
    /// assert_eq!(ctx.err(), Some(ContextError::DeadlineExceeded));
    /// assert_eq!(ctx.cause().unwrap().to_string(), "the query is slow");
    /// ```
    pub fn with_timeout_cause<E>(&self, d: Duration, cause: E) -> (Context, Cancel)
    where
        E: Into<Box<dyn Error + Send + Sync>>,
    {
        self.with_timeout_reason(d, Some(share(cause.into())))
    }

    fn with_timeout_reason(&self, d: Duration, cause: Option<Cause>) -> (Context, Cancel) {
        match Instant::now().checked_add(d) {
            Some(deadline) => self.with_deadline_reason(deadline, cause),
            None => self.with_cancel(), // never
        }
    }

    /// Returns a context below this one that is done at `deadline`, or when it is cancelled.
    ///
    /// The deadline of this context still counts if it is earlier. If `deadline` has passed, the
    /// new context is done already.
    ///
    /// # Examples
    /// ```
    /// use std::time::Instant;
    /// use trefoil::context::{Context, ContextError};
    /// let (ctx, _cancel) = Context::background().with_deadline(Instant::now());
    /// assert_eq!(ctx.err(), Some(ContextError::DeadlineExceeded));
    /// ```
    pub fn with_deadline(&self, deadline: Instant) -> (Context, Cancel) {
        self.with_deadline_reason(deadline, None)
    }

    /// As [`with_deadline`](Context::with_deadline), and [`cause`](Context::cause) returns `cause`
    /// if the context is done because `deadline` has passed.
    ///
    /// # Examples
    /// ```
    /// use std::time::Instant;
    /// use trefoil::context::Context;
    /// let root = Context::background();
    /// let (ctx, _cancel) = root.with_deadline_cause(Instant::now(), "the shop has closed");
    /// assert_eq!(ctx.cause().unwrap().to_string(), "the shop has closed");
    /// ```
    pub fn with_deadline_cause<E>(&self, deadline: Instant, cause: E) -> (Context, Cancel)
    where
        E: Into<Box<dyn Error + Send + Sync>>,
    {
        self.with_deadline_reason(deadline, Some(share(cause.into())))
    }

    fn with_deadline_reason(&self, deadline: Instant, cause: Option<Cause>) -> (Context, Cancel) {
        if self.deadline().is_some_and(|ours| ours < deadline) {
            return self.with_cancel(); // the timer of this context is earlier
        }
        let (ctx, node) = self.cancellable(Some(deadline));
        let reason = Reason { err: ContextError::DeadlineExceeded, cause };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            node.cancel(reason);
        } else {
            let weak = Arc::downgrade(&node);
            node.set_timer(left, reason, move || weak.upgrade());
        }
        (ctx, Cancel { node })
    }

    /// Returns a context below this one that is never done: it has the values of this context, but
    /// neither its deadline nor its cancellation.
    ///
    /// Use it for work that must be completed after the request has ended, for example a rollback.
    ///
    /// # Examples
    /// ```
    /// use trefoil::context::Context;
    /// let (ctx, cancel) = Context::background().with_value("request 7").with_cancel();
    /// let cleanup = ctx.without_cancel();
    /// cancel.cancel();
    /// assert!(cleanup.err().is_none());
    /// assert_eq!(cleanup.value::<&str>(), Some(&"request 7"));
    /// ```
    #[must_use]
    pub fn without_cancel(&self) -> Context {
        Context { node: None, values: self.values.clone() }
    }

    /// Calls `f` in a goroutine of its own when the context is done, or at once if it is done
    /// already. Several functions are independent of each other.
    ///
    /// Use it to end a wait that knows nothing of contexts: `f` closes a socket or a channel,
    /// notifies a [`Condvar`](crate::sync::Condvar). A function on a context that is never done is
    /// never called.
    ///
    /// # Drop
    /// Dropping the returned [`AfterFunc`] does not stop it, and neither does dropping the context:
    /// `f` is still called when a context above is done, or when the deadline has passed.
    ///
    /// # Examples
    /// ```
    /// use trefoil::chan::bounded;
    /// use trefoil::context::Context;
    /// trefoil::run(|| {
    ///     let (ctx, cancel) = Context::background().with_cancel();
    ///     let (tx, rx) = bounded::<i32>(0);
    ///     let stop = ctx.after_func(move || tx.close());
    ///     cancel.cancel();
    ///     assert!(rx.recv().is_err()); // the function has closed the channel
    ///     assert!(!stop.stop());
    /// });
    /// ```
    #[track_caller]
    pub fn after_func<F>(&self, f: F) -> AfterFunc
    where
        F: FnOnce() + Send + 'static,
    {
        AfterFunc::new(self.node.as_ref(), Location::caller(), Box::new(f))
    }

    /// Returns this context with one more value.
    ///
    /// A value is found by its type, so define a type of your own for it. The new context is
    /// cancelled together with this one.
    ///
    /// # Examples
    /// ```
    /// use trefoil::context::Context;
    /// struct UserId(u64);
    /// let ctx = Context::background().with_value(UserId(7));
    /// assert_eq!(ctx.value::<UserId>().unwrap().0, 7);
    /// assert!(ctx.value::<u64>().is_none());
    /// ```
    #[must_use]
    pub fn with_value<T: Any + Send + Sync>(&self, value: T) -> Context {
        let values = Values::add(self.values.clone(), value);
        Context { node: self.node.clone(), values: Some(values) }
    }

    /// Returns the value of type `T` that was added last, in this context or above it. Returns
    /// `None` if there is none.
    ///
    /// # Examples
    /// ```
    /// let one = trefoil::context::Context::background().with_value(1);
    /// let two = one.with_value(2);
    /// assert_eq!((one.value::<i32>(), two.value::<i32>()), (Some(&1), Some(&2)));
    /// ```
    pub fn value<T: Any>(&self) -> Option<&T> {
        self.values.as_deref()?.find()
    }

    /// Returns a channel that is closed when the context is done. No value is ever sent on it.
    ///
    /// Use it in a `recv` arm of [`select!`](crate::select). The channel of a context that cannot
    /// be cancelled is never closed, so a receive waits forever.
    ///
    /// # Drop
    /// Dropping the context does not close the channel: a clone of the channel stays open if the
    /// context was not done before.
    ///
    /// # Examples
    /// ```
    /// use trefoil::chan::bounded;
    /// use trefoil::context::Context;
    /// use trefoil::select;
    ///
    /// /// Receives a job, unless the request is cancelled first.
    /// fn next_job(ctx: &Context, jobs: &trefoil::chan::Receiver<u32>) -> Option<u32> {
    ///     select! {
    ///         recv(jobs) -> job => job.ok(),
    ///         recv(ctx.done()) -> _ => None,
    ///     }
    /// }
    ///
    /// trefoil::run(|| {
    ///     let (_tx, jobs) = bounded(0);
    ///     let (ctx, cancel) = Context::background().with_cancel();
    ///     let worker = trefoil::go(move || next_job(&ctx, &jobs));
    ///     cancel.cancel();
    ///     assert_eq!(worker.join().unwrap(), None);
    /// });
    /// ```
    pub fn done(&self) -> &Receiver<()> {
        static NEVER: OnceLock<Receiver<()>> = OnceLock::new();
        match &self.node {
            Some(node) => &node.done,
            None => NEVER.get_or_init(chan::never),
        }
    }

    /// Returns a future that waits until the context is done, and returns the reason.
    ///
    /// The future of a context that cannot be cancelled waits forever.
    ///
    /// # Cancel
    /// The future may be dropped at any time.
    ///
    /// # Examples
    /// ```
    /// use trefoil::context::{Context, ContextError};
    /// trefoil::run(|| {
    ///     let (ctx, cancel) = Context::background().with_cancel();
    ///     let task = trefoil::task::spawn(async move { ctx.done_async().await });
    ///     cancel.cancel();
    ///     assert_eq!(task.join().unwrap(), ContextError::Canceled);
    /// });
    /// ```
    pub fn done_async(&self) -> DoneFuture<'_> {
        DoneFuture { context: self, closed: self.done().recv_async() }
    }

    /// Returns the reason why the context is done, or `None` while [`done`](Context::done) is not
    /// closed.
    ///
    /// Call it now and then in a long computation that waits for no channel.
    ///
    /// # Examples
    /// ```
    /// use trefoil::context::{Context, ContextError};
    /// let (ctx, cancel) = Context::background().with_cancel();
    /// assert_eq!(ctx.err(), None);
    /// cancel.cancel();
    /// assert_eq!(ctx.err(), Some(ContextError::Canceled));
    /// ```
    pub fn err(&self) -> Option<ContextError> {
        self.reason().map(|reason| reason.err)
    }

    /// Returns the cause with which the context was cancelled, or `None` while it is not done.
    ///
    /// It is the cause that [`CancelCause::cancel`], [`with_deadline_cause`] or
    /// [`with_timeout_cause`] was given, or that
    /// [`ErrGroup::with_context_cause`](crate::sync::ErrGroup::with_context_cause) made, for this
    /// context or for the context above through which it was cancelled. Without a cause it is the
    /// error that [`err`](Context::err) returns.
    ///
    /// [`with_deadline_cause`]: Context::with_deadline_cause
    /// [`with_timeout_cause`]: Context::with_timeout_cause
    ///
    /// # Examples
    /// ```
    /// use trefoil::context::{Context, ContextError};
    /// let (ctx, cancel) = Context::background().with_cancel();
    /// assert!(ctx.cause().is_none());
    /// cancel.cancel();
    /// let cause = ctx.cause().unwrap();
    /// assert_eq!(cause.downcast_ref(), Some(&ContextError::Canceled));
    /// ```
    pub fn cause(&self) -> Option<Arc<dyn Error + Send + Sync>> {
        let reason = self.reason()?;
        Some(reason.cause.unwrap_or_else(|| Arc::new(reason.err)))
    }

    /// Returns why the context is done, if it is.
    fn reason(&self) -> Option<Reason> {
        self.node.as_ref()?.reason()
    }

    /// Returns the time at which the context will be done at the latest, or `None` if it has no
    /// deadline.
    ///
    /// # Examples
    /// ```
    /// use std::time::{Duration, Instant};
    /// use trefoil::context::Context;
    /// let soon = Instant::now() + Duration::from_secs(1);
    /// let (ctx, _cancel) = Context::background().with_deadline(soon);
    /// let (below, _cancel) = ctx.with_timeout(Duration::from_secs(60));
    /// assert_eq!(below.deadline(), Some(soon)); // the earlier one counts
    /// ```
    pub fn deadline(&self) -> Option<Instant> {
        self.node.as_ref()?.deadline
    }

    /// Returns a context below this one, with a node of its own.
    fn cancellable(&self, deadline: Option<Instant>) -> (Context, Arc<CancelNode>) {
        let node = CancelNode::below(self.node.clone(), deadline);
        (Context { node: Some(node.clone()), values: self.values.clone() }, node)
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("err", &self.err())
            .field("deadline", &self.deadline())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn done_stays_open_when_the_last_handle_is_dropped() {
        let (ctx, cancel) = Context::background().with_timeout(Duration::from_secs(60));
        let (child, _) = ctx.with_cancel();
        let (done, child_done) = (ctx.done().clone(), child.done().clone());
        drop((ctx, cancel, child));
        assert!(done.try_recv().unwrap_err().is_empty());
        assert!(child_done.try_recv().unwrap_err().is_empty());
    }

    #[test]
    fn done_stays_closed_when_the_last_handle_is_dropped() {
        let (ctx, cancel) = Context::background().with_cancel();
        let done = ctx.done().clone();
        cancel.cancel();
        drop((ctx, cancel));
        assert!(done.try_recv().unwrap_err().is_closed());
    }
}
