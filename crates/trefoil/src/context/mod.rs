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
//! goroutine of a group fails.

// # Implementation
// A context is a node in two trees: one for cancellation (`CancelNode`), one for values (`Values`).
// Both are chains of `Arc`s towards the root. A node has weak references to its children, so a
// context without handles is freed, whether it was cancelled or not.
//
// Invariants:
// 1. `NodeState::reason` is set once, before the node's channel is closed: a goroutine that sees the
//    close finds the error. A context is done when its channel is closed, and [`Context::err`]
//    returns nothing earlier. A caller that finds `NodeState::reason` set closes the channel too
//    before it continues, because the caller that set it may not have closed the channel yet.
// 2. A child is in its parent's `children`, or the parent was cancelled before the child could be
//    inserted (then the child is created cancelled), or the child itself is cancelled or freed.
// 3. The lock of a node is not held while the lock of another is taken, or a channel is closed.
// 4. A function of `after_func` is in the `funcs` of the node where it was registered. If that node
//    is freed before it is done, the function moves to the node above: the contexts above are all
//    that could still end this one. The exception is a node whose own deadline is still to come. A
//    new node takes its place, and its timer keeps it alive, because the deadline must call the
//    function although the program has dropped the context. A function that no node can start any
//    more is dropped. The function itself is in a `FuncCell`, whose lock decides between its start
//    and `AfterFunc::stop`; it is taken last.

use crate::chan::{self, Receiver, RecvFuture, Sender};
use crate::goroutine::Builder;
use crate::sync::{Mutex, OnceLock};
use crate::time::{Timer, after_func};
use std::any::Any;
use std::collections::HashMap;
use std::error::Error;
use std::fmt;
use std::future::Future;
use std::panic::Location;
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

impl Error for ContextError {}

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

/// Cancels a [`Context`] and all contexts below it, and says why. [`Context::with_cancel_cause`]
/// creates it. Clones cancel the same context.
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
    node: Arc<CancelNode>,
}

/// Why a node is done.
#[derive(Clone)]
struct Reason {
    err: ContextError,
    /// None if the error says it all.
    cause: Option<Arc<dyn Error + Send + Sync>>,
}

impl From<ContextError> for Reason {
    fn from(err: ContextError) -> Reason {
        Reason { err, cause: None }
    }
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
    reason: Option<Reason>,
    /// Keyed by the child's address.
    children: HashMap<usize, Weak<CancelNode>>,
    /// The functions to call when the node is done, keyed by the address of their cell.
    funcs: HashMap<usize, Arc<FuncCell>>,
    timer: Option<DeadlineTimer>,
}

/// The timer of a node with a deadline of its own.
struct DeadlineTimer {
    timer: Timer,
    /// What the node is done for when it fires.
    reason: Reason,
}

/// A function of [`Context::after_func`], until it is started or stopped.
struct FuncCell {
    created_at: &'static Location<'static>,
    state: Mutex<FuncState>,
}

struct FuncState {
    /// None if it was started or stopped.
    f: Option<Box<dyn FnOnce() + Send>>,
    /// The node whose `funcs` contain the cell.
    node: Weak<CancelNode>,
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
        self.with_timeout_reason(d, Some(cause.into().into()))
    }

    fn with_timeout_reason(
        &self,
        d: Duration,
        cause: Option<Arc<dyn Error + Send + Sync>>,
    ) -> (Context, Cancel) {
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
        self.with_deadline_reason(deadline, Some(cause.into().into()))
    }

    fn with_deadline_reason(
        &self,
        deadline: Instant,
        cause: Option<Arc<dyn Error + Send + Sync>>,
    ) -> (Context, Cancel) {
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
        let state = FuncState { f: Some(Box::new(f)), node: Weak::new() };
        let cell = Arc::new(FuncCell { created_at: Location::caller(), state: Mutex::new(state) });
        if let Some(node) = &self.node {
            node.add_func(&cell);
        }
        AfterFunc { cell }
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
        self.reason().map(|reason| reason.err)
    }

    /// Returns the cause with which the context was cancelled, or `None` while it is not done.
    ///
    /// It is the cause that [`CancelCause::cancel`], [`with_deadline_cause`] or
    /// [`with_timeout_cause`] was given for this context or for the context above through which it
    /// was cancelled. Without a cause it is the error that [`err`](Context::err) returns.
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

    /// Returns why the context is done, if it is (invariant 1).
    fn reason(&self) -> Option<Reason> {
        let node = self.node.as_ref()?;
        if node.done.is_closed() { node.state.lock().reason.clone() } else { None }
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

impl CancelNode {
    /// Creates a node below `parent`. The new node is cancelled if the parent is.
    fn below(parent: Option<Arc<CancelNode>>, deadline: Option<Instant>) -> Arc<CancelNode> {
        let (closer, done) = chan::bounded(1);
        let state = Mutex::new(NodeState::default());
        let node = Arc::new(CancelNode { parent, deadline, done, closer: Some(closer), state });
        if let Some(parent) = &node.parent {
            let mut state = parent.state.lock();
            match state.reason.clone() {
                None => {
                    state.children.insert(node.key(), Arc::downgrade(&node));
                }
                Some(reason) => {
                    drop(state);
                    parent.close();
                    node.cancel(reason);
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
        self.node.cancel(ContextError::Canceled.into());
    }
}

impl CancelCause {
    /// Cancels the context and all contexts below it for this cause, an error or a text. Does
    /// nothing if the context is done already: the first cause stays.
    ///
    /// [`Context::err`] is [`ContextError::Canceled`], and [`Context::cause`] is the cause.
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
        let cause = Some(Arc::from(cause.into()));
        self.node.cancel(Reason { err: ContextError::Canceled, cause });
    }
}

/// A function that is called when a context is done, returned by [`Context::after_func`].
///
/// # Drop
/// Dropping it does not stop the function.
///
/// # Examples
/// ```
/// use trefoil::context::Context;
/// let (ctx, cancel) = Context::background().with_cancel();
/// let call = ctx.after_func(|| unreachable!("it was stopped"));
/// assert!(call.stop());
/// cancel.cancel();
/// ```
pub struct AfterFunc {
    cell: Arc<FuncCell>,
}

impl AfterFunc {
    /// Stops the function. Returns true if that was in time: the function was not called and will
    /// not be. Returns false if the context is done and the function was started, or if it was
    /// stopped before.
    ///
    /// It does not wait until a started function has returned.
    ///
    /// # Examples
    /// ```
    /// use trefoil::context::Context;
    /// let (ctx, _cancel) = Context::background().with_cancel();
    /// let call = ctx.after_func(|| {});
    /// assert!(call.stop());
    /// assert!(!call.stop()); // stopped already
    /// ```
    pub fn stop(&self) -> bool {
        let mut state = self.cell.state.lock();
        let f = state.f.take();
        let node = state.node.upgrade();
        drop(state);
        if f.is_some()
            && let Some(node) = node
        {
            node.remove_func(&self.cell);
        }
        f.is_some()
    }
}

impl fmt::Debug for AfterFunc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AfterFunc").finish_non_exhaustive()
    }
}

impl FuncCell {
    fn key(&self) -> usize {
        std::ptr::from_ref(self) as usize
    }

    /// Calls the function in a goroutine of its own, unless it was started or stopped.
    fn start(&self) {
        let f = self.state.lock().f.take();
        if let Some(f) = f
            && let Err(e) = Builder::new().go_at(self.created_at, f)
        {
            panic!("cannot start the function of a context: {e}");
        }
    }
}

impl CancelNode {
    fn key(&self) -> usize {
        std::ptr::from_ref(self) as usize
    }

    /// Makes the node done for `reason` after `left`, if `node` returns it then.
    fn set_timer(
        &self,
        left: Duration,
        reason: Reason,
        node: impl FnOnce() -> Option<Arc<CancelNode>> + Send + 'static,
    ) {
        let timer = after_func(left, {
            let reason = reason.clone();
            move || {
                if let Some(node) = node() {
                    node.cancel(reason);
                }
            }
        });
        let timer = DeadlineTimer { timer, reason };
        let mut state = self.state.lock();
        if state.reason.is_none() {
            state.timer = Some(timer);
        } else {
            drop(state);
            timer.timer.stop();
        }
    }

    fn cancel(&self, reason: Reason) {
        let Some(children) = self.finish(&reason) else { return };
        if let Some(parent) = &self.parent {
            parent.remove_child(self.key());
        }
        // A list, not a recursion: contexts may be nested too deeply for a stack.
        let mut below: Vec<_> = children.into_values().collect();
        while let Some(child) = below.pop() {
            if let Some(child) = child.upgrade()
                && let Some(children) = child.finish(&reason)
            {
                below.extend(children.into_values());
            }
        }
    }

    /// Makes this node done, starts its functions, and returns its children, or None if it was done
    /// before.
    fn finish(&self, reason: &Reason) -> Option<HashMap<usize, Weak<CancelNode>>> {
        let mut state = self.state.lock();
        if state.reason.is_some() {
            drop(state);
            self.close();
            return None;
        }
        state.reason = Some(reason.clone());
        let children = std::mem::take(&mut state.children);
        let funcs = std::mem::take(&mut state.funcs);
        let timer = state.timer.take();
        drop(state);
        self.close();
        if let Some(timer) = timer {
            timer.timer.stop();
        }
        funcs.values().for_each(|cell| cell.start());
        Some(children)
    }

    /// Closes the channel of the context.
    fn close(&self) {
        if let Some(closer) = &self.closer {
            closer.close();
        }
    }

    fn remove_child(&self, key: usize) {
        // Dropped without the lock.
        let removed = self.state.lock().children.remove(&key);
        drop(removed);
    }

    /// Registers a function, or starts it if the node is done (invariant 4).
    fn add_func(self: &Arc<Self>, cell: &Arc<FuncCell>) {
        let mut state = self.state.lock();
        if state.reason.is_some() {
            drop(state);
            self.close();
            cell.start();
            return;
        }
        state.funcs.insert(cell.key(), cell.clone());
        drop(state);
        // A `stop` before this finds no node from which it could remove the cell.
        let mut func = cell.state.lock();
        func.node = Arc::downgrade(self);
        let was_ended = func.f.is_none();
        drop(func);
        if was_ended {
            self.remove_func(cell);
        }
    }

    fn remove_func(&self, cell: &FuncCell) {
        // Dropped without the lock.
        let removed = self.state.lock().funcs.remove(&cell.key());
        drop(removed);
    }

    /// Frees what the node refers to, when its last handle is dropped, and returns the node above.
    /// `key` is the node's key, which is its address while it is shared.
    fn release(&mut self, key: usize) -> Option<Arc<CancelNode>> {
        let state = self.state.get_mut();
        let timer = state.timer.take();
        let funcs = std::mem::take(&mut state.funcs);
        if let Some(timer) = &timer {
            timer.timer.stop();
        }
        // As in Go, a context that is only dropped is not done: clones of its channel stay open.
        if let Some(closer) = self.closer.take() {
            closer.drop_keep_open();
        }
        let mut parent = self.parent.take();
        if let Some(parent) = &parent {
            parent.remove_child(key);
        }
        if !funcs.is_empty() {
            if let (Some(timer), Some(deadline)) = (timer, self.deadline) {
                parent = Some(CancelNode::until_deadline(parent, deadline, timer.reason));
            }
            if let Some(node) = &parent {
                funcs.values().for_each(|cell| node.add_func(cell));
            }
        }
        parent
    }

    /// Creates a node below `parent` for the functions of a freed one. Its timer keeps it alive.
    fn until_deadline(
        parent: Option<Arc<CancelNode>>,
        deadline: Instant,
        reason: Reason,
    ) -> Arc<CancelNode> {
        let node = CancelNode::below(parent, Some(deadline));
        let kept = node.clone();
        // In a time of zero the timer fires, too, in a goroutine of its own.
        let left = deadline.saturating_duration_since(Instant::now());
        node.set_timer(left, reason, move || Some(kept));
        node
    }
}

impl Drop for CancelNode {
    fn drop(&mut self) {
        // A loop, not a recursion, as in `cancel`. The nodes in it have nothing to release any more
        // when they are dropped.
        let mut parent = self.release(self.key());
        while let Some(shared) = parent.take() {
            // `into_inner` moves the node.
            let key = shared.key();
            let Some(mut node) = Arc::into_inner(shared) else { break };
            parent = node.release(key);
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
