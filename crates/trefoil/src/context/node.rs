//! The tree of cancellation: a node for each context that can be cancelled.
//!
//! A node has weak references to its children, so a context without handles is freed, whether it
//! was cancelled or not. A tree may be deeper than a stack allows for a recursion: it is cancelled
//! by a list, and freed by a loop.
//!
//! Invariants:
//! 1. `NodeState::reason` is set once, before the node's channel is closed: a goroutine that sees
//!    the close finds the error. A context is done when its channel is closed, and
//!    [`Context::err`](super::Context::err) returns nothing earlier. A caller that finds
//!    `NodeState::reason` set closes the channel too before it continues, because the caller that
//!    set it may not have closed the channel yet.
//! 2. A child is in its parent's `children`, or the parent was cancelled before the child could be
//!    inserted (then the child is created cancelled), or the child itself is cancelled or freed.
//! 3. The lock of a node is not held while the lock of another is taken, or a channel is closed.

use super::ContextError;
use super::after_func::FuncCell;
use crate::chan::{self, Receiver, Sender};
use crate::sync::Mutex;
use crate::sys::map::Map;
use crate::time::{Timer, after_func};
use std::error::Error;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// The cause of a context's end.
pub(super) type Cause = Arc<dyn Error + Send + Sync>;

/// Makes a cause of an error. If that is the cause of another context, it is the same one.
pub(super) fn share(error: Box<dyn Error + Send + Sync>) -> Cause {
    match error.downcast::<Cause>() {
        Ok(passed_on) => *passed_on,
        Err(error) => error.into(),
    }
}

/// Why a node is done.
#[derive(Clone)]
pub(super) struct Reason {
    pub(super) err: ContextError,
    /// None if the error says it all.
    pub(super) cause: Option<Cause>,
}

impl From<ContextError> for Reason {
    fn from(err: ContextError) -> Reason {
        Reason { err, cause: None }
    }
}

/// See the head of the file.
pub(super) struct CancelNode {
    parent: Option<Arc<CancelNode>>,
    pub(super) deadline: Option<Instant>,
    /// No value is ever sent; the channel is closed when the context is done.
    pub(super) done: Receiver<()>,
    /// None only while the node is dropped.
    closer: Option<Sender<()>>,
    pub(super) state: Mutex<NodeState>,
}

#[derive(Default)]
pub(super) struct NodeState {
    pub(super) reason: Option<Reason>,
    /// Keyed by the child's address.
    children: Map<usize, Weak<CancelNode>>,
    /// The functions to call when the node is done, keyed by the address of their cell.
    pub(super) funcs: Map<usize, Arc<FuncCell>>,
    timer: Option<DeadlineTimer>,
}

/// The timer of a node with a deadline of its own.
struct DeadlineTimer {
    timer: Timer,
    /// What the node is done for when it fires.
    reason: Reason,
}

impl CancelNode {
    /// Creates a node below `parent`. The new node is cancelled if the parent is.
    pub(super) fn below(
        parent: Option<Arc<CancelNode>>,
        deadline: Option<Instant>,
    ) -> Arc<CancelNode> {
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
impl CancelNode {
    fn key(&self) -> usize {
        std::ptr::from_ref(self) as usize
    }

    /// Returns why the node is done, if it is (invariant 1).
    pub(super) fn reason(&self) -> Option<Reason> {
        if self.done.is_closed() { self.state.lock().reason.clone() } else { None }
    }

    /// Makes the node done for `reason` after `left`, if `node` returns it then.
    pub(super) fn set_timer(
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

    pub(super) fn cancel(&self, reason: Reason) {
        let Some(children) = self.finish(&reason) else { return };
        if let Some(parent) = &self.parent {
            parent.remove_child(self.key());
        }
        // A list, not a recursion: contexts may be nested too deeply for a stack.
        let mut below = Vec::new();
        below.extend(children);
        while let Some((_, child)) = below.pop() {
            if let Some(child) = child.upgrade()
                && let Some(children) = child.finish(&reason)
            {
                below.extend(children);
            }
        }
    }

    /// Makes this node done, starts its functions, and returns its children, or None if it was done
    /// before.
    fn finish(&self, reason: &Reason) -> Option<Map<usize, Weak<CancelNode>>> {
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
    pub(super) fn close(&self) {
        if let Some(closer) = &self.closer {
            closer.close();
        }
    }

    fn remove_child(&self, key: usize) {
        // Dropped without the lock.
        let removed = self.state.lock().children.remove(&key);
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
