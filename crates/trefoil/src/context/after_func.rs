//! Functions that are called when a context is done.
//!
//! The function is in a [`FuncCell`]. The cell's lock decides whether the function starts or is
//! stopped by [`AfterFunc::stop`]. No other lock is held while it is taken.
//!
//! Invariants:
//! 1. A function of `after_func` is in the `funcs` of the node where it was registered. If that
//!    node is freed before it is done, the function moves to the node above: the contexts above are
//!    all that could still end this one. The exception is a node whose own deadline is still to
//!    come. A new node takes its place, and its timer keeps it alive, because the deadline must
//!    call the function although the program has dropped the context. A function that no node can
//!    start any more is dropped.

use super::node::CancelNode;
use crate::goroutine::Builder;
use crate::sync::Mutex;
use std::fmt;
use std::panic::Location;
use std::sync::{Arc, Weak};

/// A function that is called when a context is done, returned by
/// [`Context::after_func`](super::Context::after_func).
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

/// A function of [`Context::after_func`](super::Context::after_func), until it is started or
/// stopped.
pub(super) struct FuncCell {
    created_at: &'static Location<'static>,
    state: Mutex<FuncState>,
}

struct FuncState {
    /// None if it was started or stopped.
    f: Option<Box<dyn FnOnce() + Send>>,
    /// The node whose `funcs` contain the cell.
    node: Weak<CancelNode>,
}

impl AfterFunc {
    /// Registers `f` with a node. Without a node it is never called.
    pub(super) fn new(
        node: Option<&Arc<CancelNode>>,
        created_at: &'static Location<'static>,
        f: Box<dyn FnOnce() + Send>,
    ) -> AfterFunc {
        let state = FuncState { f: Some(f), node: Weak::new() };
        let cell = Arc::new(FuncCell { created_at, state: Mutex::new(state) });
        if let Some(node) = node {
            node.add_func(&cell);
        }
        AfterFunc { cell }
    }

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
    pub(super) fn start(&self) {
        let f = self.state.lock().f.take();
        if let Some(f) = f
            && let Err(e) = Builder::new().go_at(self.created_at, f)
        {
            panic!("cannot start the function of a context: {e}");
        }
    }
}

impl CancelNode {
    /// Registers a function (invariant 1), or starts it if the node is done (`node.rs`, invariant
    /// 1).
    pub(super) fn add_func(self: &Arc<Self>, cell: &Arc<FuncCell>) {
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
}
