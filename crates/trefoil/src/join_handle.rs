//! `JoinHandle`: waits for a goroutine or a task and takes its result.

use crate::sched::g::G;
use crate::sched::goroutine::body::Body;
use crate::sched::goroutine::join::{Detached, JoinCell};
use crate::sched::runnable::{Runnable, Unpacked};
use crate::sched::task::body::Failure;
use crate::sched::task::state::Generation;
use crate::sched::task::waker::{self, TaskWaiter};
use crate::sched::task::{self, Task, carrier};
use crate::sched::wait::holder::note_held_object;
use crate::sched::wait::reason::WaitReason;
use crate::sched::{Rt, switch, wait};
use crate::sys::clock::NEVER;
use std::any::Any;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll};

/// The handle's side of a join cell (`sched/goroutine/join.rs`): the right to the result of a
/// goroutine or task. `JoinHandle` and `ScopedJoinHandle` wrap it.
pub(crate) struct Join<T> {
    /// None after the result was taken.
    target: Option<Runnable>,
    /// The task that awaits the handle.
    waiter: TaskWaiter,
    /// The word of `waiter` that is in the join cell, or 0. It may be older than `waiter`: code of
    /// another executor, which may panic, runs while `waiter` changes.
    registered: usize,
    result: PhantomData<T>,
}

// SAFETY: it is the right to take a T that another thread made. The other fields of the G or task
// are atomic, or do not change while a handle exists.
unsafe impl<T: Send> Send for Join<T> {}
// SAFETY: through `&Join` only the id, the name, `is_finished` and `abort` are reachable.
unsafe impl<T> Sync for Join<T> {}

impl<T> Join<T> {
    /// # Safety
    /// `target` was just spawned with result type `T`, and this is its only handle.
    pub(crate) unsafe fn new(target: impl Into<Runnable>) -> Self {
        Join {
            target: Some(target.into()),
            waiter: TaskWaiter::new(),
            registered: 0,
            result: PhantomData,
        }
    }

    /// Waits for the end. Returns the result, or why there is none, and frees the G or the block of
    /// the task.
    pub(crate) fn join(mut self) -> std::thread::Result<T> {
        let id = self.id();
        self.wait().map_err(|failure| match failure {
            Failure::Panicked(payload) => payload,
            Failure::Cancelled => Box::new(JoinError { id, failure }),
        })
    }

    fn wait(&mut self) -> Result<T, Failure> {
        let Some(target) = self.target else { already_taken() };
        let cell = cell(target);
        if !cell.is_done() {
            let registered = self.registered;
            note_held_object(target.as_item().as_ptr() as usize, NEVER);
            wait::block(WaitReason::Join, |waiter| cell.wait(registered, waiter));
        }
        // SAFETY: the goroutine or task has ended, so the handle owns the result (join.rs,
        // invariant 1).
        unsafe { self.take(target) }
    }

    /// As [`Join::join`], for a task.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<T, Failure>> {
        let Some(target) = self.target else { already_taken() };
        let cell = cell(target);
        if !cell.is_done() {
            let waiter = self.waiter.set(context.waker());
            if self.registered == waiter || cell.wait(self.registered, waiter) {
                self.registered = waiter;
                task::note_reason(WaitReason::Join);
                return Poll::Pending;
            }
        }
        // SAFETY: as in `join`.
        Poll::Ready(unsafe { self.take(target) })
    }

    /// Takes the result, and frees the G or the block.
    ///
    /// # Safety
    /// The goroutine or task has ended.
    unsafe fn take(&mut self, target: Runnable) -> Result<T, Failure> {
        self.target = None;
        // SAFETY: the caller's contract: the handle owns the result, whose type is T.
        unsafe {
            match target.unpack() {
                Unpacked::Goroutine(g) => {
                    let result = Body::take::<T>(g);
                    free_g(g);
                    result.map_err(Failure::Panicked)
                }
                Unpacked::Task(task) => {
                    let result = task::body::take::<T>(task);
                    carrier::free(task);
                    result
                }
            }
        }
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.target.is_none_or(|target| cell(target).is_done())
    }

    /// Returns whether its goroutine has not ended, and never will, because its simulation has
    /// ended.
    #[cfg(feature = "std")]
    pub(crate) fn never_ends(&self) -> bool {
        let Some(Unpacked::Goroutine(g)) = self.target.map(Runnable::unpack) else { return false };
        // SAFETY: a goroutine that has not ended keeps its runtime.
        let is_left = || unsafe { &*g.sched.get() }.is_ended_simulation();
        !cell(g.into()).is_done() && is_left()
    }

    pub(crate) fn id(&self) -> u64 {
        match self.target.map(Runnable::unpack) {
            Some(Unpacked::Goroutine(g)) => g.id(),
            Some(Unpacked::Task(task)) => task.id(),
            None => 0,
        }
    }

    pub(crate) fn name(&self) -> Option<&str> {
        match self.target?.unpack() {
            Unpacked::Goroutine(g) => g.name(),
            // SAFETY: the name lives as long as the block, which the handle keeps.
            Unpacked::Task(task) => unsafe { (task.body.get().name)(task) },
        }
    }

    /// Gives up the handle. Returns None if the closure has not returned yet: then the goroutine
    /// drops its own result. Otherwise drops the result and returns whether the closure panicked.
    pub(crate) fn detach(mut self) -> Option<bool> {
        self.give_up()
    }

    /// See [`Join::detach`].
    fn give_up(&mut self) -> Option<bool> {
        let target = self.target.take()?;
        let (cell, registered) = (cell(target), self.registered);
        let detached = cell.detach(registered);
        if detached == Detached::Running {
            return None;
        }
        match target.unpack() {
            Unpacked::Goroutine(g) => {
                // SAFETY: the closure has returned, so the handle owns the result (join.rs,
                // invariant 1).
                let panicked = unsafe { (g.body.get().drop_result)(g) };
                // If the goroutine has not ended yet, it frees the G itself.
                if detached == Detached::Done || !cell.emptied(registered) {
                    free_g(g);
                }
                Some(panicked)
            }
            Unpacked::Task(task) => {
                // SAFETY: the task has ended, so the handle owns its output.
                unsafe { (task.body.get().drop_output)(task) };
                carrier::free(task);
                Some(false)
            }
        }
    }
}

impl<T> Drop for Join<T> {
    fn drop(&mut self) {
        let _ = self.give_up();
    }
}

fn cell(target: Runnable) -> &'static JoinCell {
    match target.unpack() {
        Unpacked::Goroutine(g) => &g.join,
        Unpacked::Task(task) => &task.join,
    }
}

#[cold]
fn already_taken() -> ! {
    panic!("a JoinHandle was polled or joined after it had returned the result")
}

/// Frees the name of the goroutine, which has ended, and puts its G into a free list.
fn free_g(g: &'static G) {
    g.clear_name();
    match Rt::enter() {
        Some(rt) => {
            switch::free_g(rt, g);
            rt.leave();
        }
        None => switch::free_g_outside(g),
    }
}

/// The right to wait for a goroutine or a task and to take its result.
///
/// [`go`](crate::go) and [`task::spawn`](crate::task::spawn) return it. It can be sent to other
/// goroutines, tasks and threads, also of other runtimes.
///
/// Straight-line code calls [`join`](Self::join). Async code awaits the handle: it is a future.
/// Both work for goroutines and for tasks.
///
/// ```
/// trefoil::run(|| {
///     let handle = trefoil::go(|| "done");
///     assert_eq!(handle.join().unwrap(), "done");
///
///     let task = trefoil::task::spawn(async {
///         let goroutine = trefoil::go(|| 6 * 7);
///         goroutine.await.unwrap()
///     });
///     assert_eq!(task.join().unwrap(), 42);
/// });
/// ```
///
/// # Drop
/// Dropping the handle detaches the goroutine or task: it continues to run, and its result, or the
/// payload of its panic, is dropped.
///
/// ```
/// trefoil::run(|| {
///     let (tx, rx) = trefoil::chan::bounded(1);
///     drop(trefoil::go(move || tx.send(42)));
///     assert_eq!(rx.recv(), Ok(42)); // The goroutine has run nevertheless.
/// });
/// ```
///
/// # Cancel
/// Awaiting a `&mut JoinHandle` loses nothing if the await is dropped: the result is still there
/// for the next one.
pub struct JoinHandle<T> {
    inner: Join<T>,
}

impl<T> JoinHandle<T> {
    /// Waits for the goroutine or task to end and returns its result.
    ///
    /// A caller that is a goroutine parks; a plain thread blocks. It may be called inside a task:
    /// then the task's carrier parks, and other tasks run on. The thread-locals of a goroutine have
    /// been dropped when `join` returns.
    ///
    /// If the runtime of the goroutine was [dropped](crate::Runtime#drop) before the goroutine
    /// ended, `join` may never return.
    ///
    /// ```
    /// let h = trefoil::go(|| -> i32 { panic!("no luck") });
    /// let payload = h.join().unwrap_err();
    /// assert_eq!(payload.downcast_ref(), Some(&"no luck"));
    /// ```
    ///
    /// # Errors
    /// Returns the payload of the panic if the goroutine or task panicked. If a task was aborted,
    /// the payload is a [`JoinError`].
    ///
    /// # Panics
    /// Panics if an await of this handle has returned the result already.
    pub fn join(self) -> std::thread::Result<T> {
        self.inner.join()
    }

    /// Returns true if the goroutine or task has ended, so that [`join`](Self::join) returns at
    /// once.
    ///
    /// ```
    /// trefoil::run(|| {
    ///     let h = trefoil::go(|| ());
    ///     while !h.is_finished() {
    ///         trefoil::yield_now();
    ///     }
    /// });
    /// ```
    pub fn is_finished(&self) -> bool {
        self.inner.is_finished()
    }

    /// Returns the id of the goroutine or task. A runtime never uses an id twice. After an await
    /// has returned the result, it is 0.
    ///
    /// ```
    /// trefoil::run(|| {
    ///     let handle = trefoil::go(trefoil::id);
    ///     let id = handle.id();
    ///     assert_eq!(handle.join().unwrap(), id);
    /// });
    /// ```
    pub fn id(&self) -> u64 {
        self.inner.id()
    }

    /// Returns the name that [`Builder::name`](crate::Builder::name) or
    /// [`task::Builder::name`](crate::task::Builder::name) has set.
    pub fn name(&self) -> Option<&str> {
        self.inner.name()
    }

    /// Asks a task to end. Its future is dropped when it returns from the current poll, or at once
    /// if it waits; the handle then returns a [`JoinError`] that says so. A task that has ended
    /// keeps its result.
    ///
    /// A goroutine cannot be aborted, so this does nothing for the handle of [`go`](crate::go). Use
    /// a [`Context`](crate::context::Context) to ask a goroutine to end.
    ///
    /// ```
    /// trefoil::run(|| {
    ///     let task = trefoil::task::spawn(std::future::pending::<()>());
    ///     task.abort();
    ///     let error = trefoil::block_on(task).unwrap_err();
    ///     assert!(error.is_cancelled());
    /// });
    /// ```
    pub fn abort(&self) {
        self.abort_handle().abort();
    }

    /// Returns a handle that can abort the task, but not wait for it.
    ///
    /// ```
    /// trefoil::run(|| {
    ///     let task = trefoil::task::spawn(std::future::pending::<()>());
    ///     let abort = task.abort_handle();
    ///     trefoil::go(move || abort.abort());
    ///     assert!(task.join().is_err());
    /// });
    /// ```
    pub fn abort_handle(&self) -> AbortHandle {
        let task = match self.inner.target.map(Runnable::unpack) {
            // The handle keeps the block from being used for another task.
            Some(Unpacked::Task(task)) => Some((task, task.state.generation())),
            _ => None,
        };
        AbortHandle { task, id: self.id() }
    }
}

impl<T> JoinHandle<T> {
    pub(crate) fn from_join(inner: Join<T>) -> Self {
        JoinHandle { inner }
    }
}

impl<T> Future for JoinHandle<T> {
    type Output = Result<T, JoinError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let id = self.id();
        self.inner.poll(context).map_err(|failure| JoinError { id, failure })
    }
}

// It holds no T.
impl<T> Unpin for JoinHandle<T> {}

impl<T> fmt::Debug for JoinHandle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinHandle").field("id", &self.id()).field("name", &self.name()).finish()
    }
}

/// Why a goroutine or task that was awaited has no result: it panicked, or the task was aborted.
///
/// ```
/// trefoil::run(|| {
///     let task = trefoil::task::spawn(async { panic!("no luck") });
///     let error = trefoil::block_on(task).unwrap_err();
///     assert!(error.is_panic());
///     assert_eq!(error.into_panic().downcast_ref(), Some(&"no luck"));
/// });
/// ```
pub struct JoinError {
    id: u64,
    failure: Failure,
}

impl JoinError {
    /// Returns true if the task was aborted.
    pub fn is_cancelled(&self) -> bool {
        matches!(self.failure, Failure::Cancelled)
    }

    /// Returns true if the goroutine or task panicked.
    pub fn is_panic(&self) -> bool {
        !self.is_cancelled()
    }

    /// Returns the payload of the panic, for [`std::panic::resume_unwind`].
    ///
    /// # Panics
    /// Panics if the task was aborted.
    pub fn into_panic(self) -> Box<dyn Any + Send + 'static> {
        match self.try_into_panic() {
            Ok(payload) => payload,
            Err(error) => panic!("{error}"),
        }
    }

    /// Returns the payload of the panic.
    ///
    /// # Errors
    /// Returns the error itself if the task was aborted.
    pub fn try_into_panic(self) -> Result<Box<dyn Any + Send + 'static>, JoinError> {
        match self.failure {
            Failure::Panicked(payload) => Ok(payload),
            Failure::Cancelled => Err(self),
        }
    }

    /// Returns the id of the goroutine or task.
    pub fn id(&self) -> u64 {
        self.id
    }
}

// `Box<dyn Any + Send>` is not Sync; through `&JoinError` the payload is only read as a string.
impl fmt::Display for JoinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let id = self.id;
        match &self.failure {
            Failure::Cancelled => write!(f, "task {id} was aborted"),
            Failure::Panicked(payload) => match panic_text(payload.as_ref()) {
                Some(text) => write!(f, "task {id} panicked: {text}"),
                None => write!(f, "task {id} panicked"),
            },
        }
    }
}

/// Returns the message of a panic, if its payload is a string.
fn panic_text(payload: &(dyn Any + Send)) -> Option<&str> {
    payload.downcast_ref::<&str>().copied().or_else(|| Some(payload.downcast_ref::<String>()?))
}

impl fmt::Debug for JoinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JoinError({self})")
    }
}

impl std::error::Error for JoinError {}

// SAFETY: through `&JoinError` the payload is reachable only for `downcast_ref` to `&str` and
// `String`, which are Sync.
unsafe impl Sync for JoinError {}

/// The right to abort a task.
///
/// [`JoinHandle::abort_handle`] and [`JoinSet::spawn`](crate::task::JoinSet::spawn) return it. It
/// does not keep the task's result alive, and may outlive the task.
///
/// ```
/// trefoil::run(|| {
///     let task = trefoil::task::spawn(async { 1 });
///     let abort = task.abort_handle();
///     assert_eq!(task.join().unwrap(), 1);
///     assert!(abort.is_finished());
///     abort.abort(); // Too late: it has no effect.
/// });
/// ```
#[derive(Clone)]
pub struct AbortHandle {
    /// None for a goroutine, and if the task's result was taken.
    task: Option<(&'static Task, Generation)>,
    id: u64,
}

impl AbortHandle {
    /// Asks the task to end; see [`JoinHandle::abort`].
    pub fn abort(&self) {
        if let Some((task, generation)) = self.task {
            wait::inside(|here| waker::cancel(here, task, generation));
        }
    }

    /// Returns true if the task has ended.
    pub fn is_finished(&self) -> bool {
        self.task.is_none_or(|(task, generation)| task.state.has_ended(generation))
    }

    /// Returns the id of the task.
    pub fn id(&self) -> u64 {
        self.id
    }
}

impl fmt::Debug for AbortHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AbortHandle").field("id", &self.id).finish()
    }
}
