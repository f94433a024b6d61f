//! Async tasks on the scheduler: [`spawn`], [`JoinSet`], [`LocalSet`], [`yield_now`].
//!
//! A task is a future that the runtime polls. It takes about 200 bytes, has no stack, and waits in
//! the same run queues as goroutines. Use tasks for code that is written with `async`; use
//! [`go`](crate::go) for straight-line code. Both may be mixed: a task can await a goroutine's
//! [`JoinHandle`], and a goroutine can [`join`](JoinHandle::join) a task.
//!
//! # Blocking is allowed
//! A poll may block and may compute for as long as it likes: `std::thread::sleep`, `std::sync`,
//! `std::net`, files, C code, endless loops. Each poll runs on a goroutine, its *carrier*. If the
//! poll blocks, the carrier parks and other tasks run on other carriers; if it computes, the
//! carrier is preempted after 10 ms. So there is no `spawn_blocking` here.
//!
//! ```
//! use std::sync::{Arc, Barrier};
//! use trefoil::task;
//!
//! trefoil::run(|| {
//!     let barrier = Arc::new(Barrier::new(64));
//!     let wait = |_| {
//!         let barrier = barrier.clone();
//!         // Blocks until 64 tasks wait at the same time.
//!         task::spawn(async move { barrier.wait() })
//!     };
//!     let tasks: Vec<_> = (0..64).map(wait).collect();
//!     tasks.into_iter().for_each(|task| drop(task.join().unwrap()));
//! });
//! ```
//!
//! # The end of a runtime
//! When a [`Runtime`](crate::Runtime) is dropped, its tasks are aborted: their futures are dropped,
//! except those in whose poll a carrier is blocked.

mod join_set;
mod local_set;

pub use crate::join_handle::{AbortHandle, JoinError, JoinHandle};
pub use join_set::JoinSet;
pub use local_set::{LocalSet, spawn_local};

use crate::join_handle::Join;
use crate::runtime::{current_sched, with_sched};
use crate::sched::task::body::TaskExtra;
use crate::sched::{Sched, task};
use std::future::{Future, poll_fn};
use std::io;
use std::panic::Location;
use std::task::Poll;

/// Starts a future as a task and returns a handle to wait for its output.
///
/// The task runs in the caller's runtime. If the caller is a plain thread, it runs in the default
/// runtime, which the first such call starts and which lives as long as the process. Use
/// [`Builder`] for a name.
///
/// The future must be `Send`, because its polls run on different threads. A [`LocalSet`] takes
/// futures that are not.
///
/// ```
/// use trefoil::task;
///
/// trefoil::run(|| {
///     let tasks: Vec<_> = (0..1000u64).map(|i| task::spawn(async move { i * i })).collect();
///     let sum: u64 = tasks.into_iter().map(|task| task.join().unwrap()).sum();
///     assert_eq!(sum, 332_833_500);
/// });
/// ```
///
/// A future that is not `Send` does not compile:
/// ```compile_fail
/// trefoil::task::spawn(async {
///     let local = std::rc::Rc::new(1);
///     trefoil::task::yield_now().await;
///     drop(local);
/// });
/// ```
///
/// # Panics
/// Panics if there is no memory for another task; [`Builder::spawn`] returns an error instead.
/// Panics on a plain thread if the default runtime cannot start. A panic of the future is returned
/// by the handle.
#[track_caller]
#[inline]
pub fn spawn<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    match start(future, (), Location::caller()) {
        Ok(handle) => handle,
        Err(e) => cannot_spawn(&e),
    }
}

#[cold]
#[track_caller]
fn cannot_spawn(e: &io::Error) -> ! {
    panic!("cannot spawn a task: {e}")
}

#[inline]
fn start<F, X>(
    future: F,
    extra: X,
    created_at: &'static Location<'static>,
) -> io::Result<JoinHandle<F::Output>>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
    X: TaskExtra,
{
    let sched = current_sched()?;
    // SAFETY: the future and its output are Send and 'static. This is the task's only handle.
    unsafe {
        let task = task::spawn::spawn(sched, future, extra, created_at)?;
        Ok(JoinHandle::from_join(Join::new(task)))
    }
}

/// The settings of a new task.
///
/// ```
/// trefoil::run(|| {
///     let task = trefoil::task::Builder::new().name("worker").spawn(async { 7 }).unwrap();
///     assert_eq!(task.name(), Some("worker"));
///     assert_eq!(task.join().unwrap(), 7);
/// });
/// ```
#[derive(Debug, Default)]
#[must_use = "a Builder does nothing until `spawn`"]
pub struct Builder {
    name: Option<Box<str>>,
}

impl Builder {
    /// Returns the default settings: no name.
    pub fn new() -> Builder {
        Builder::default()
    }

    /// Sets the task's name. [Dumps](crate::debug::dump) and panic messages print it.
    pub fn name(mut self, name: impl Into<String>) -> Builder {
        self.name = Some(name.into().into_boxed_str());
        self
    }

    /// Starts the future as a task with these settings, in the runtime that [`spawn`] uses.
    ///
    /// # Errors
    /// - The [errors of `build`](crate::RuntimeBuilder::build), if the caller is a plain thread and
    ///   the default runtime cannot start.
    /// - [`OutOfMemory`](io::ErrorKind::OutOfMemory): there is no memory for another task.
    #[track_caller]
    pub fn spawn<F>(self, future: F) -> io::Result<JoinHandle<F::Output>>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        match self.name {
            Some(name) => start(future, name, Location::caller()),
            None => start(future, (), Location::caller()),
        }
    }
}

/// Lets other goroutines and tasks run before the caller continues.
///
/// In a task, do not call [`trefoil::yield_now`](crate::yield_now) instead: that one lets the
/// *carrier* wait, and the task keeps it meanwhile.
///
/// # Cancel
/// Dropping the future has no effect.
///
/// ```
/// trefoil::run(|| {
///     let task = trefoil::task::spawn(async {
///         for _ in 0..10 {
///             trefoil::task::yield_now().await;
///         }
///     });
///     task.join().unwrap();
/// });
/// ```
pub async fn yield_now() {
    let mut has_yielded = false;
    poll_fn(|context| {
        if has_yielded {
            return Poll::Ready(());
        }
        has_yielded = true;
        task::yield_when_pending(context.waker());
        Poll::Pending
    })
    .await
}

/// Returns the id of the task that calls it, or 0 outside of tasks.
///
/// [`trefoil::id`](crate::id) returns the id of the goroutine that polls the task at the moment.
///
/// ```
/// use trefoil::task;
///
/// trefoil::run(|| {
///     assert_eq!(task::id(), 0);
///     let task = task::spawn(async { task::id() });
///     let id = task.id();
///     assert_eq!(task.join().unwrap(), id);
/// });
/// ```
pub fn id() -> u64 {
    task::current().map_or(0, |task| task.id())
}

/// Returns how many tasks of the caller's runtime are alive: spawned and not ended.
///
/// ```
/// use trefoil::task;
///
/// trefoil::run(|| {
///     let task = task::spawn(std::future::pending::<()>());
///     assert_eq!(task::num_tasks(), 1);
///     task.abort();
///     assert!(task.join().is_err());
///     assert_eq!(task::num_tasks(), 0);
/// });
/// ```
pub fn num_tasks() -> usize {
    with_sched(Sched::num_tasks) as usize
}
