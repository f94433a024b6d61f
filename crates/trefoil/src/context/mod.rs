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
//! | [`ContextError`] | the reason why a context is done |
//! | [`DoneFuture`] | what [`Context::done_async`] returns, for async code |
//!
//! [`ErrGroup::with_context`](crate::sync::ErrGroup::with_context) cancels a context when the first
//! goroutine of a group fails.

// # Implementation
// A context is a node in two trees: one for cancellation (`CancelNode`), one for values (`Values`).
// Both are chains of `Arc`s towards the root. A node has weak references to its children, so a
// context without handles is freed, whether it was cancelled or not.
//
// Invariants:
// 1. `NodeState::err` is set once, before the node's channel is closed: a goroutine that sees the
//    close finds the error. A context is done when its channel is closed, and [`Context::err`]
//    returns nothing earlier. A caller that finds `NodeState::err` set closes the channel too
//    before it continues, because the caller that set it may not have closed the channel yet.
// 2. A child is in its parent's `children`, or the parent was cancelled before the child could be
//    inserted (then the child is created cancelled), or the child itself is cancelled or freed.
// 3. The lock of a node is not held while the lock of another is taken, or a channel is closed.

use crate::chan::{self, Receiver, RecvFuture, Sender};
use crate::sync::{Mutex, OnceLock};
use crate::time::{Timer, after_func};
use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{self, Poll};
use std::time::{Duration, Instant};

/// The reason why a context is done, returned by [`Context::err`].
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
    /// [`Cancel::cancel`] was called for the context or for a context above it.
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

impl std::error::Error for ContextError {}

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

/// Cancels a [`Context`] and all contexts below it. Clones cancel the same context.
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
    node: Arc<CancelNode>,
}

struct CancelNode {
    parent: Option<Arc<CancelNode>>,
    deadline: Option<Instant>,
    /// No value is ever sent; the channel is closed when the context is done.
    done: Receiver<()>,
    /// None only while the node is dropped.
    closer: Option<Sender<()>>,
    state: Mutex<NodeState>,
}

#[derive(Default)]
struct NodeState {
    err: Option<ContextError>,
    /// Keyed by the child's address.
    children: HashMap<usize, Weak<CancelNode>>,
    timer: Option<Timer>,
}

struct Values {
    value: Box<dyn Any + Send + Sync>,
    above: Option<Arc<Values>>,
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
        let node = self.below(self.deadline());
        (Context { node: Some(node.clone()), values: self.values.clone() }, Cancel { node })
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
        match Instant::now().checked_add(d) {
            Some(deadline) => self.with_deadline(deadline),
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
        if self.deadline().is_some_and(|ours| ours <= deadline) {
            return self.with_cancel(); // the timer of this context is earlier
        }
        let node = self.below(Some(deadline));
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            node.cancel(ContextError::DeadlineExceeded);
        } else {
            node.set_timer(left);
        }
        (Context { node: Some(node.clone()), values: self.values.clone() }, Cancel { node })
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
        let values = Values { value: Box::new(value), above: self.values.clone() };
        Context { node: self.node.clone(), values: Some(Arc::new(values)) }
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
        let mut next = self.values.as_deref();
        while let Some(values) = next {
            if let Some(value) = values.value.downcast_ref() {
                return Some(value);
            }
            next = values.above.as_deref();
        }
        None
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
        let node = self.node.as_ref()?;
        if node.done.is_closed() { node.state.lock().err } else { None }
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

    /// Creates a node below that of this context. The new node is cancelled if the old one is.
    fn below(&self, deadline: Option<Instant>) -> Arc<CancelNode> {
        let (closer, done) = chan::bounded(1);
        let state = Mutex::new(NodeState::default());
        let node = Arc::new(CancelNode {
            parent: self.node.clone(),
            deadline,
            done,
            closer: Some(closer),
            state,
        });
        if let Some(parent) = &self.node {
            let mut state = parent.state.lock();
            match state.err {
                None => {
                    state.children.insert(node.key(), Arc::downgrade(&node));
                }
                Some(err) => {
                    drop(state);
                    parent.close();
                    node.cancel(err);
                }
            }
        }
        node
    }
}

/// The end of a [`Context`], which a task awaits: returned by [`Context::done_async`].
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
    context: &'a Context,
    /// No value is ever sent, so it ends when the channel is closed.
    closed: RecvFuture<'a, ()>,
}

impl Future for DoneFuture<'_> {
    type Output = ContextError;

    fn poll(self: Pin<&mut Self>, cx: &mut task::Context<'_>) -> Poll<ContextError> {
        let context = self.context;
        // SAFETY: `closed` is pinned with the future, and never moved.
        let closed = unsafe { self.map_unchecked_mut(|this| &mut this.closed) };
        // A context that is done has a reason (invariant 1).
        closed.poll(cx).map(|_| context.err().unwrap_or(ContextError::Canceled))
    }
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
        self.node.cancel(ContextError::Canceled);
    }
}

impl CancelNode {
    fn key(&self) -> usize {
        std::ptr::from_ref(self) as usize
    }

    fn set_timer(self: &Arc<Self>, left: Duration) {
        let node = Arc::downgrade(self);
        let timer = after_func(left, move || {
            if let Some(node) = node.upgrade() {
                node.cancel(ContextError::DeadlineExceeded);
            }
        });
        let mut state = self.state.lock();
        if state.err.is_none() {
            state.timer = Some(timer);
        } else {
            drop(state);
            timer.stop();
        }
    }

    fn cancel(&self, err: ContextError) {
        let Some(children) = self.finish(err) else { return };
        if let Some(parent) = &self.parent {
            parent.remove_child(self);
        }
        // A list, not a recursion: contexts may be nested too deeply for a stack.
        let mut below: Vec<_> = children.into_values().collect();
        while let Some(child) = below.pop() {
            if let Some(child) = child.upgrade()
                && let Some(children) = child.finish(err)
            {
                below.extend(children.into_values());
            }
        }
    }

    /// Makes this node done, and returns its children, or None if it was done before.
    fn finish(&self, err: ContextError) -> Option<HashMap<usize, Weak<CancelNode>>> {
        let mut state = self.state.lock();
        if state.err.is_some() {
            drop(state);
            self.close();
            return None;
        }
        state.err = Some(err);
        let children = std::mem::take(&mut state.children);
        let timer = state.timer.take();
        drop(state);
        self.close();
        if let Some(timer) = timer {
            timer.stop();
        }
        Some(children)
    }

    /// Closes the channel of the context.
    fn close(&self) {
        if let Some(closer) = &self.closer {
            closer.close();
        }
    }

    fn remove_child(&self, child: &CancelNode) {
        // Dropped without the lock.
        let removed = self.state.lock().children.remove(&child.key());
        drop(removed);
    }
}

impl Drop for CancelNode {
    fn drop(&mut self) {
        if let Some(timer) = self.state.get_mut().timer.take() {
            timer.stop();
        }
        // As in Go, a context that is only dropped is not done: clones of its channel stay open.
        if let Some(closer) = self.closer.take() {
            closer.drop_keep_open();
        }
        let mut parent = self.parent.take();
        if let Some(parent) = &parent {
            parent.remove_child(self);
        }
        // A loop, not a recursion, as in `cancel`.
        while let Some(mut node) = parent.take().and_then(Arc::into_inner) {
            parent = node.parent.take();
            if let Some(parent) = &parent {
                parent.remove_child(&node);
            }
        }
    }
}

impl Drop for Values {
    fn drop(&mut self) {
        let mut above = self.above.take();
        while let Some(mut values) = above.take().and_then(Arc::into_inner) {
            above = values.above.take();
        }
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

impl fmt::Debug for Cancel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cancel").finish_non_exhaustive()
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
