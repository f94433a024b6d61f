//! `LocalSet`: tasks that are not `Send`, on one goroutine.

use crate::join_handle::{Join, JoinHandle};
use crate::runtime::task_waiter;
use crate::sched::task::Task;
use crate::sched::task::local::{self, LocalHome};
use crate::sched::task::state::Generation;
use crate::sched::task::waker::{self, TaskWaiter};
use crate::sched::wait;
use crate::sys::map::Map;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::{Future, poll_fn};
use std::marker::PhantomData;
use std::panic::Location;
use std::pin::{Pin, pin};
use std::ptr::null;
use std::sync::Arc;
use std::task::{Context, Poll};

/// How many polls a set makes before it lets others run.
const POLLS_PER_TURN: usize = 64;

thread_local! {
    /// The set that is being polled here, or null.
    static CURRENT: Cell<*const LocalSet> = const { Cell::new(null()) };
}

/// Tasks whose futures are not `Send`. They run on the goroutine that polls the set, one at a time.
///
/// The goroutine may move from thread to thread: its thread-locals move with it, so neither `Rc`
/// nor a thread-local notices. Unlike in other tasks, a poll that blocks here blocks the other
/// tasks of the set; start a set per goroutine to use several processors.
///
/// ```
/// use std::rc::Rc;
/// use trefoil::task::{self, LocalSet};
///
/// trefoil::run(|| {
///     let set = LocalSet::new();
///     let sum = set.block_on(async {
///         let shared = Rc::new(20);
///         let copy = shared.clone();
///         let task = task::spawn_local(async move { *copy + 1 });
///         *shared + task.await.unwrap()
///     });
///     assert_eq!(sum, 41);
/// });
/// ```
///
/// # Drop
/// Dropping the set drops the futures of its tasks; their handles return that they were aborted.
pub struct LocalSet {
    home: Arc<LocalHome>,
    /// The tasks that have not ended.
    tasks: RefCell<Map<*const Task, Generation>>,
    waiter: RefCell<TaskWaiter>,
    /// It is neither Send nor Sync.
    not_send: PhantomData<*const ()>,
}

impl LocalSet {
    /// Creates a set without tasks.
    pub fn new() -> LocalSet {
        LocalSet {
            home: Arc::new(LocalHome::new()),
            tasks: RefCell::default(),
            waiter: RefCell::new(task_waiter()),
            not_send: PhantomData,
        }
    }

    /// Spawns a task in the set. It is polled when the set is.
    ///
    /// # Panics
    /// Panics if there is no memory for another task.
    #[track_caller]
    pub fn spawn_local<F>(&self, future: F) -> JoinHandle<F::Output>
    where
        F: Future + 'static,
        F::Output: 'static,
    {
        // SAFETY: the future is 'static. The set is not Send, and only it polls and cancels the
        // task, so the future stays where it is.
        match unsafe { local::spawn(&self.home, future, Location::caller()) } {
            Ok((task, generation)) => {
                self.tasks.borrow_mut().insert(task, generation);
                // SAFETY: just spawned with this output, and this is its only handle.
                JoinHandle::from_join(unsafe { Join::new(task) })
            }
            Err(e) => panic!("cannot spawn a task: {e}"),
        }
    }

    /// Polls `future` and the tasks of the set until `future` is ready. Inside of it,
    /// [`spawn_local`] spawns into this set.
    ///
    /// Await only one such future of a set at a time: the last one that was polled is woken for the
    /// tasks. (It may be called inside of a task of the set.)
    ///
    /// # Cancel
    /// Dropping the future stops the polling. The tasks stay in the set.
    pub async fn run_until<F: Future>(&self, future: F) -> F::Output {
        let mut future = pin!(future);
        poll_fn(|context| {
            let _current = self.enter();
            if let Poll::Ready(output) = future.as_mut().poll(context) {
                return Poll::Ready(output);
            }
            self.poll_tasks(context);
            Poll::Pending
        })
        .await
    }

    /// Runs `future` and the tasks of the set on the calling goroutine, or plain thread, until
    /// `future` is ready: [`block_on`](crate::block_on) of [`run_until`](LocalSet::run_until).
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        crate::future::block_on(self.run_until(future))
    }

    /// Returns how many tasks of the set have not ended.
    pub fn len(&self) -> usize {
        self.tasks.borrow().len()
    }

    /// Returns true if all tasks of the set have ended.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Makes this the set of [`spawn_local`] until the result is dropped.
    fn enter(&self) -> Entered {
        Entered { before: CURRENT.replace(self) }
    }

    /// Polls the tasks that were woken, but not for ever: then it wakes the caller again.
    fn poll_tasks(&self, context: &Context<'_>) {
        let mut waiter = std::mem::replace(&mut *self.waiter.borrow_mut(), task_waiter());
        let word = waiter.set(context.waker());
        *self.waiter.borrow_mut() = waiter;
        self.home.set_driver(word);
        for _ in 0..POLLS_PER_TURN {
            match self.home.pop() {
                Some(task) => self.poll_task(task),
                // A poll of the set inside of a poll was the driver meanwhile: check again.
                None if self.home.set_driver(word) => {}
                None => return,
            }
        }
        if !self.home.is_empty() {
            context.waker().wake_by_ref();
        }
    }

    fn poll_task(&self, task: &'static Task) {
        let address: *const Task = task;
        // SAFETY: this is the set of the task, on the goroutine that owns it.
        if unsafe { local::poll(&self.home, task) } {
            self.tasks.borrow_mut().remove(&address);
        }
    }
}

/// Polls the tasks of the set; ready when all of them have ended.
impl Future for LocalSet {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let _current = self.enter();
        self.poll_tasks(context);
        if self.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Default for LocalSet {
    fn default() -> LocalSet {
        LocalSet::new()
    }
}

impl Drop for LocalSet {
    fn drop(&mut self) {
        // Destructors of futures may spawn into the set, and may look at it.
        let _current = self.enter();
        while !self.is_empty() {
            let tasks: Vec<_> = self.tasks.borrow().entries().to_vec();
            for (task, generation) in tasks {
                // SAFETY: blocks of tasks are never freed.
                let task = unsafe { &*task };
                wait::inside(|here| waker::cancel(here, task, generation));
            }
            while let Some(task) = self.home.pop() {
                self.poll_task(task);
            }
            if !self.is_empty() {
                // A waker is about to queue a task.
                crate::goroutine::yield_now();
            }
        }
    }
}

impl fmt::Debug for LocalSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalSet").field("len", &self.len()).finish()
    }
}

/// Restores the set that was current before.
struct Entered {
    before: *const LocalSet,
}

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.set(self.before);
    }
}

/// Spawns a task that need not be `Send` into the [`LocalSet`] that polls the caller.
///
/// # Panics
/// Panics outside of a [`LocalSet`]: use [`LocalSet::spawn_local`] there.
///
/// ```
/// use trefoil::task::{LocalSet, spawn_local};
///
/// trefoil::run(|| {
///     let set = LocalSet::new();
///     let n = set.block_on(async { spawn_local(async { 5 }).await.unwrap() });
///     assert_eq!(n, 5);
/// });
/// ```
#[track_caller]
pub fn spawn_local<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future + 'static,
    F::Output: 'static,
{
    let set = CURRENT.get();
    assert!(
        !set.is_null(),
        "spawn_local was called outside of a LocalSet; \
         call LocalSet::spawn_local, or run this code in LocalSet::run_until"
    );
    // SAFETY: `enter` borrows the set for as long as it is current, on this goroutine.
    unsafe { &*set }.spawn_local(future)
}
