//! `JoinSet`: many tasks, awaited in the order in which they end.
//!
//! Each task of the set owns an [`Announcement`], which is dropped with its future: when the future
//! has returned, has panicked, or was aborted. The drop puts the task's key into a queue, and wakes
//! the task that waits for the set. The output is then taken by the handle, a moment later.

use super::{AbortHandle, JoinError, JoinHandle, spawn};
use crate::sync::Mutex;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// A set of tasks with the same type of output. [`join_next`](JoinSet::join_next) returns the
/// outputs in the order in which the tasks end.
///
/// ```
/// use trefoil::task::JoinSet;
///
/// trefoil::run(|| {
///     let mut set = JoinSet::new();
///     for i in 0..10u64 {
///         set.spawn(async move { i * i });
///     }
///     let mut sum = 0;
///     trefoil::block_on(async {
///         while let Some(output) = set.join_next().await {
///             sum += output.unwrap();
///         }
///     });
///     assert_eq!(sum, 285);
/// });
/// ```
///
/// # Drop
/// Dropping the set aborts its tasks; [`detach_all`](JoinSet::detach_all) lets them continue.
pub struct JoinSet<T> {
    tasks: HashMap<u64, JoinHandle<T>>,
    next_key: u64,
    /// The task whose future is gone, and whose output comes next.
    ending: Option<JoinHandle<T>>,
    ended: Arc<Ended>,
}

/// The tasks whose futures are gone.
struct Ended(Mutex<EndedState>);

struct EndedState {
    keys: VecDeque<u64>,
    waker: Option<Waker>,
}

/// See the head of the file.
struct Announcement {
    key: u64,
    ended: Arc<Ended>,
}

impl Drop for Announcement {
    fn drop(&mut self) {
        let waker = {
            let mut state = self.ended.0.lock();
            state.keys.push_back(self.key);
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> JoinSet<T> {
    /// Creates an empty set.
    pub fn new() -> JoinSet<T> {
        let state = EndedState { keys: VecDeque::new(), waker: None };
        JoinSet {
            tasks: HashMap::new(),
            next_key: 0,
            ending: None,
            ended: Arc::new(Ended(Mutex::new(state))),
        }
    }

    /// Returns how many tasks are in the set: those whose output was not returned yet.
    pub fn len(&self) -> usize {
        self.tasks.len() + usize::from(self.ending.is_some())
    }

    /// Returns true if the set has no tasks.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Aborts all tasks. They stay in the set, and [`join_next`](JoinSet::join_next) returns them.
    ///
    /// ```
    /// use trefoil::task::JoinSet;
    ///
    /// trefoil::run(|| {
    ///     let mut set = JoinSet::new();
    ///     set.spawn(std::future::pending::<()>());
    ///     set.abort_all();
    ///     let error = trefoil::block_on(set.join_next()).unwrap().unwrap_err();
    ///     assert!(error.is_cancelled());
    /// });
    /// ```
    pub fn abort_all(&self) {
        self.tasks.values().for_each(JoinHandle::abort);
    }

    /// Removes all tasks from the set. They continue to run.
    pub fn detach_all(&mut self) {
        self.tasks.clear();
        self.ending = None;
    }

    /// Waits for the next task to end, and returns its output. Returns None if the set is empty.
    ///
    /// # Cancel
    /// No output is lost if the future is dropped: the next call returns it.
    pub async fn join_next(&mut self) -> Option<Result<T, JoinError>> {
        poll_fn(|context| self.poll_join_next(context)).await
    }

    /// Returns the output of a task that has ended, or None if there is none at the moment.
    pub fn try_join_next(&mut self) -> Option<Result<T, JoinError>> {
        loop {
            if let Some(handle) = self.ending.take_if(|handle| handle.is_finished()) {
                let output = pin!(handle).poll(&mut Context::from_waker(Waker::noop()));
                return match output {
                    Poll::Ready(output) => Some(output),
                    Poll::Pending => unreachable!("the task has ended"),
                };
            }
            if self.ending.is_some() || !self.take_ended() {
                return None;
            }
        }
    }

    /// Polls for the output of the next task that ends; see [`join_next`](JoinSet::join_next).
    pub fn poll_join_next(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<T, JoinError>>> {
        loop {
            if let Some(handle) = &mut self.ending {
                let output = std::task::ready!(Pin::new(handle).poll(context));
                self.ending = None;
                return Poll::Ready(Some(output));
            }
            if self.tasks.is_empty() {
                return Poll::Ready(None);
            }
            if !self.take_ended_or_register(context) {
                return Poll::Pending;
            }
        }
    }

    /// Aborts all tasks and waits until they have ended.
    pub async fn shutdown(&mut self) {
        self.abort_all();
        while self.join_next().await.is_some() {}
    }

    /// Moves a task that was announced to `ending`. Returns whether there is one.
    fn take_ended(&mut self) -> bool {
        self.take_ended_and(|_| ())
    }

    /// As [`JoinSet::take_ended`]. If there is none, the next announcement wakes the caller.
    fn take_ended_or_register(&mut self, context: &Context<'_>) -> bool {
        // Wakers of other executors are cloned and dropped without the lock.
        let waker = context.waker().clone();
        let mut before = None;
        let found = self.take_ended_and(|state| before = state.waker.replace(waker));
        drop(before);
        found
    }

    fn take_ended_and(&mut self, if_none: impl FnOnce(&mut EndedState)) -> bool {
        let mut state = self.ended.0.lock();
        while let Some(key) = state.keys.pop_front() {
            // A task that was detached is not in the map.
            if let Some(handle) = self.tasks.remove(&key) {
                self.ending = Some(handle);
                return true;
            }
        }
        if_none(&mut state);
        false
    }
}

impl<T: Send + 'static> JoinSet<T> {
    /// Spawns a task in the set; see [`task::spawn`](spawn). Returns a handle to abort it.
    #[track_caller]
    pub fn spawn<F>(&mut self, future: F) -> AbortHandle
    where
        F: Future<Output = T> + Send + 'static,
    {
        let key = self.next_key;
        self.next_key += 1;
        let announcement = Announcement { key, ended: self.ended.clone() };
        let handle = spawn(async move {
            // Declared first, so dropped last: after the future.
            let _announcement = announcement;
            future.await
        });
        let abort = handle.abort_handle();
        self.tasks.insert(key, handle);
        abort
    }
}

impl<T> Default for JoinSet<T> {
    fn default() -> JoinSet<T> {
        JoinSet::new()
    }
}

impl<T> Drop for JoinSet<T> {
    fn drop(&mut self) {
        self.abort_all();
    }
}

impl<T> fmt::Debug for JoinSet<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinSet").field("len", &self.len()).finish()
    }
}
