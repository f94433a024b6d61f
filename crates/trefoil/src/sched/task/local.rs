//! Tasks of a `LocalSet`: their futures are polled and dropped by one goroutine or thread only.
//!
//! They have the blocks, state words, wakers and join cells of other tasks. But a wake-up puts them
//! into the queue of their [`LocalHome`], and wakes the *driver*: the task, goroutine or thread
//! that polls the set. They belong to no runtime (`task.sched` is null), so that the end of a
//! runtime does not wait for a driver that it has orphaned.
//!
//! Invariant 1: only the driver's side calls [`poll`] for a task, with a task from
//! [`LocalHome::pop`].

use super::body::{Polled, TaskExtra, TypedTaskBody, WakeBy};
use super::state::{Begin, Generation, Turn};
use super::{Task, block, carrier, waker};
use crate::sched::goroutine::join::Completed;
use crate::sched::m::Rt;
use crate::sched::runnable::{RunList, Unpacked};
use crate::sched::{current_g, wait};
use crate::sys::lock::Lock;
use std::future::Future;
use std::io;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Context;

/// Where the tasks of a set are queued.
pub(crate) struct LocalHome(Lock<LocalQueue>);

struct LocalQueue {
    ready: RunList,
    /// The sleeper word of the driver, or 0.
    driver: usize,
}

impl LocalHome {
    pub(crate) fn new() -> LocalHome {
        LocalHome(Lock::new(LocalQueue { ready: RunList::new(), driver: 0 }))
    }

    /// Queues a task that was woken, and wakes the driver.
    pub(super) fn push(&self, here: Option<Rt>, task: &'static Task) {
        let mut queue = self.0.lock();
        queue.ready.push_back(task);
        let driver = queue.driver;
        drop(queue);
        if driver != 0 {
            wait::wake_here(here, driver);
        }
    }

    /// Driver: sets the sleeper word that a wake-up of a task wakes. Returns whether it was
    /// another.
    pub(crate) fn set_driver(&self, word: usize) -> bool {
        wait::inside(|_| std::mem::replace(&mut self.0.lock().driver, word)) != word
    }

    /// Driver: takes the next task that is to be polled.
    pub(crate) fn pop(&self) -> Option<&'static Task> {
        match wait::inside(|_| self.0.lock().ready.pop_front())?.unpack() {
            Unpacked::Task(task) => Some(task),
            Unpacked::Goroutine(_) => unreachable!("only tasks are queued here"),
        }
    }

    /// Driver: returns whether a task is to be polled.
    pub(crate) fn is_empty(&self) -> bool {
        wait::inside(|_| self.0.lock().ready.is_empty())
    }
}

/// What is stored with a task of a set.
pub(crate) struct OfSet(Arc<LocalHome>);

impl TaskExtra for OfSet {
    const WAKE_BY: WakeBy = WakeBy::Home;

    fn home(&self) -> Option<&LocalHome> {
        Some(&self.0)
    }
}

/// The ids of tasks of sets, which no runtime counts. They are above all ids of a runtime.
static NEXT_ID: AtomicU64 = AtomicU64::new(1 << 62);

/// Starts a task in the set with this home. The caller owns the handle's side of its join cell.
///
/// # Safety
/// The future is 'static. The task is polled and cancelled only where the future may be used.
pub(crate) unsafe fn spawn<F: Future>(
    home: &Arc<LocalHome>,
    future: F,
    created_at: &'static Location<'static>,
) -> io::Result<(&'static Task, Generation)> {
    type Body<F> = TypedTaskBody<F, OfSet>;
    let reserved = Body::<F>::reserve();
    let taken = wait::inside(|here| block::take(here, Body::<F>::class()));
    let task = taken.inspect_err(|_| {
        // SAFETY: `reserve` returned it, and no task uses it.
        unsafe { Body::<F>::unreserve(reserved) }
    })?;
    // SAFETY: this function owns the block, which is of the right class; the caller's contract.
    unsafe { Body::<F>::put(task, future, OfSet(home.clone()), reserved) };
    task.id.store(NEXT_ID.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
    task.sched.set(std::ptr::null());
    task.origin.begin(created_at, None);
    task.join.reset();
    let generation = task.state.begin(Begin::Scheduled);
    wait::inside(|here| home.push(here, task));
    Ok((task, generation))
}

/// Driver: polls a task that [`LocalHome::pop`] returned, or drops its future if it was cancelled.
/// Returns whether the task has ended.
///
/// # Safety
/// The caller is the driver of the task's set.
pub(crate) unsafe fn poll(home: &LocalHome, task: &'static Task) -> bool {
    let body = task.body.get();
    let polled = match task.state.begin_poll() {
        Turn::Poll => {
            let waker = waker::waker(waker::word_of(task));
            // SAFETY: the driver has set `RUNNING`, so it alone touches the future.
            unsafe { (body.poll)(task, &mut Context::from_waker(&waker)) }
        }
        // SAFETY: as above.
        Turn::Cancel => unsafe { (body.cancel)(task) },
    };
    if polled == Polled::Pending {
        if task.state.end_poll() {
            wait::inside(|here| home.push(here, task));
        }
        return false;
    }
    if polled == Polled::Panicked && current_g().is_some_and(|g| g.abort_on_panic.get()) {
        carrier::abort_after_panic(task);
    }
    task.state.finish();
    match task.join.complete() {
        Completed::Kept => {}
        Completed::Wake(sleeper) => wait::inside(|here| wait::wake_here(here, sleeper)),
        Completed::Unwanted => {
            // SAFETY: there is no handle that could take the output.
            unsafe { (body.drop_output)(task) };
            carrier::free(task);
        }
    }
    true
}
