//! Context: cancellation, deadlines and values that go with a request. Go's `context`.
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
//! # How it is made
//! A context is a place in two trees: who is cancelled by whom (`Node`), and the values
//! (`Values`). Both are chains of `Arc`s towards the root; a node knows its children weakly, so a
//! context that nobody holds any more is gone, whether it was cancelled or not.
//!
//! Invariants:
//! 1. `State::err` is set once, before the node's channel is closed: whoever sees the close finds the
//!    error. A context is done when its channel is closed, and [`Context::err`] tells nothing earlier.
//!    Whoever finds `State::err` set closes the channel too before going on: the caller that set it may
//!    not have come so far.
//! 2. A child is in its parent's `children`, or the parent was cancelled before it could be put
//!    there (then the child is born cancelled), or the child itself is cancelled or gone.
//! 3. No lock of a node is held while that of another is taken, or while a channel is closed.

use crate::chan::{self, Receiver, Sender};
use crate::sync::{Mutex, OnceLock};
use crate::time::{Timer, after_func};
use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Why a context is done.
///
/// ```
/// use trefoil::context::ContextError;
/// assert_eq!(ContextError::Canceled.to_string(), "context canceled");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ContextError {
    /// [`Cancel::cancel`] was called, for it or one above it.
    Canceled,
    /// Its deadline has passed.
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

/// A request's cancellation, deadline and values. Clones are the same context.
///
/// ```
/// use trefoil::context::Context;
/// let (ctx, cancel) = Context::background().with_cancel();
/// let (below, _) = ctx.with_cancel();
/// assert_eq!(below.err(), None);
/// cancel.cancel();
/// assert!(below.err().is_some(), "what is below is cancelled, too");
/// ```
#[derive(Clone, Default)]
pub struct Context {
    /// None: never cancelled.
    node: Option<Arc<Node>>,
    values: Option<Arc<Values>>,
}

/// Cancels a [`Context`] and all below it. Clones cancel the same one. Dropping it does nothing.
///
/// ```
/// let (ctx, cancel) = trefoil::context::Context::background().with_cancel();
/// cancel.cancel();
/// cancel.cancel(); // does nothing
/// assert!(ctx.done().recv().is_err());
/// ```
#[derive(Clone)]
pub struct Cancel {
    node: Arc<Node>,
}

struct Node {
    parent: Option<Arc<Node>>,
    deadline: Option<Instant>,
    /// Nothing is ever sent; it is closed when the context is done.
    done: Receiver<()>,
    close: Sender<()>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    err: Option<ContextError>,
    /// By the child's address.
    children: HashMap<usize, Weak<Node>>,
    timer: Option<Timer>,
}

struct Values {
    value: Box<dyn Any + Send + Sync>,
    above: Option<Arc<Values>>,
}

impl Context {
    /// The root: never cancelled, no deadline, no values.
    ///
    /// ```
    /// let ctx = trefoil::context::Context::background();
    /// assert_eq!((ctx.err(), ctx.deadline()), (None, None));
    /// ```
    pub const fn background() -> Context {
        Context { node: None, values: None }
    }

    /// A context below this one that can be cancelled.
    ///
    /// ```
    /// let (ctx, cancel) = trefoil::context::Context::background().with_cancel();
    /// trefoil::go(move || cancel.cancel());
    /// assert!(ctx.done().recv().is_err()); // closed
    /// ```
    pub fn with_cancel(&self) -> (Context, Cancel) {
        let node = self.below(self.deadline());
        (Context { node: Some(node.clone()), values: self.values.clone() }, Cancel { node })
    }

    /// A context below this one that is done after `d`, or when it is cancelled.
    ///
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

    /// A context below this one that is done at `deadline` (or this one's, if that is earlier), or
    /// when it is cancelled.
    ///
    /// ```
    /// use std::time::Instant;
    /// use trefoil::context::{Context, ContextError};
    /// let (ctx, _cancel) = Context::background().with_deadline(Instant::now());
    /// assert_eq!(ctx.err(), Some(ContextError::DeadlineExceeded));
    /// ```
    pub fn with_deadline(&self, deadline: Instant) -> (Context, Cancel) {
        if self.deadline().is_some_and(|ours| ours <= deadline) {
            return self.with_cancel(); // this one's own timer is earlier
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

    /// This context with one more value. Values are found by their type: make one of your own.
    ///
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

    /// The value of this type that was put in last.
    ///
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

    /// A channel that is closed when the context is done; nothing is ever sent. For
    /// [`select!`](crate::select). Of a context that cannot be cancelled it blocks for ever.
    pub fn done(&self) -> &Receiver<()> {
        static NEVER: OnceLock<Receiver<()>> = OnceLock::new();
        match &self.node {
            Some(node) => &node.done,
            None => NEVER.get_or_init(chan::never),
        }
    }

    /// Why it is done; None until [`done`](Context::done) is closed.
    pub fn err(&self) -> Option<ContextError> {
        let node = self.node.as_ref()?;
        if node.done.is_closed() { node.state.lock().err } else { None }
    }

    /// When it will be done at the latest.
    pub fn deadline(&self) -> Option<Instant> {
        self.node.as_ref()?.deadline
    }

    /// A node below ours; cancelled if ours is.
    fn below(&self, deadline: Option<Instant>) -> Arc<Node> {
        let (close, done) = chan::bounded(1);
        let state = Mutex::new(State::default());
        let node = Arc::new(Node { parent: self.node.clone(), deadline, done, close, state });
        if let Some(parent) = &self.node {
            let mut state = parent.state.lock();
            match state.err {
                None => {
                    state.children.insert(node.key(), Arc::downgrade(&node));
                }
                Some(err) => {
                    drop(state);
                    parent.close.close();
                    node.cancel(err);
                }
            }
        }
        node
    }
}

impl Cancel {
    /// Cancels the context, and all below it. Does nothing if it is done already.
    pub fn cancel(&self) {
        self.node.cancel(ContextError::Canceled);
    }
}

impl Node {
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
            parent.forget(self);
        }
        // A list, not a recursion: contexts may be nested deeper than a stack is.
        let mut below: Vec<_> = children.into_values().collect();
        while let Some(child) = below.pop() {
            if let Some(child) = child.upgrade()
                && let Some(children) = child.finish(err)
            {
                below.extend(children.into_values());
            }
        }
    }

    /// Makes this one done, and returns its children. None: it was done before.
    fn finish(&self, err: ContextError) -> Option<HashMap<usize, Weak<Node>>> {
        let mut state = self.state.lock();
        if state.err.is_some() {
            drop(state);
            self.close.close();
            return None;
        }
        state.err = Some(err);
        let children = std::mem::take(&mut state.children);
        let timer = state.timer.take();
        drop(state);
        self.close.close();
        if let Some(timer) = timer {
            timer.stop();
        }
        Some(children)
    }

    fn forget(&self, child: &Node) {
        let gone = self.state.lock().children.remove(&child.key());
        drop(gone);
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(timer) = self.state.get_mut().timer.take() {
            timer.stop();
        }
        let mut parent = self.parent.take();
        if let Some(parent) = &parent {
            parent.forget(self);
        }
        // A loop, not a recursion, as in `cancel`.
        while let Some(mut node) = parent.take().and_then(Arc::into_inner) {
            parent = node.parent.take();
            if let Some(parent) = &parent {
                parent.forget(&node);
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
