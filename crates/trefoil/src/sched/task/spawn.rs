//! `task::spawn`: from a future to a runnable task.
//!
//! On a goroutine: takes a block from the P's free list, moves the future into it, and pushes it to
//! `runnext`. Nothing is allocated unless the future is large. On a plain thread: takes the block
//! from the central list and pushes it to a global queue.

use super::Task;
use super::block::{self, Class};
use super::body::{TaskExtra, TypedTaskBody};
use super::state::{Begin, Generation, Woken};
use crate::sched::Sched;
use crate::sched::goroutine::join::Detached;
use crate::sched::labels;
use crate::sched::m::Rt;
use crate::sched::p::bump;
use crate::sched::record;
use crate::sched::simulation;
use crate::shim::full_fence;
use std::future::Future;
use std::io;
use std::panic::Location;
use std::sync::atomic::Ordering;

/// Whether a task has a handle.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Handle {
    One,
    None,
}

/// Starts a task in the runtime `sched` and returns it. The caller owns the handle's side of its
/// join cell.
///
/// # Safety
/// The future and its output may be sent to other threads, and are 'static.
#[inline]
pub(crate) unsafe fn spawn<F: Future, X: TaskExtra>(
    sched: &Sched,
    future: F,
    extra: X,
    created_at: &'static Location<'static>,
) -> io::Result<&'static Task> {
    // SAFETY: the caller's contract.
    let (task, _) =
        unsafe { start(sched, future, extra, created_at, Begin::Scheduled, Handle::One)? };
    Ok(task)
}

/// Starts a task that has no handle, and waits for its first wake-up.
///
/// # Safety
/// As for [`spawn`].
#[track_caller]
pub(crate) unsafe fn spawn_idle<F: Future>(
    sched: &Sched,
    future: F,
) -> io::Result<(&'static Task, Generation)> {
    // SAFETY: the caller's contract.
    unsafe { start(sched, future, (), Location::caller(), Begin::Idle, Handle::None) }
}

/// # Safety
/// As for [`spawn`].
#[inline]
unsafe fn start<F: Future, X: TaskExtra>(
    sched: &Sched,
    future: F,
    extra: X,
    created_at: &'static Location<'static>,
    begin: Begin,
    handle: Handle,
) -> io::Result<(&'static Task, Generation)> {
    // The compiler makes this function again for each future of the program that is spawned. So only
    // what needs the future's type is in it.
    let reserved = TypedTaskBody::<F, X>::reserve();
    let new = match NewTask::make(sched, TypedTaskBody::<F, X>::class(), created_at) {
        Ok(new) => new,
        Err(e) => {
            // SAFETY: `reserve` returned it, and no task uses it.
            unsafe { TypedTaskBody::<F, X>::unreserve(reserved) };
            return Err(no_memory(&e));
        }
    };
    let task = new.task;
    // SAFETY: `new` owns the block, which is of the right class; the caller's contract covers the
    // future and `extra`.
    unsafe { TypedTaskBody::<F, X>::put(task, future, extra, reserved) };
    Ok((task, new.start(sched, created_at, begin, handle)))
}

/// A task that has everything but its future. It fits into two registers.
struct NewTask {
    task: &'static Task,
    /// The caller is inside the runtime until [`NewTask::start`]. None on a plain thread, and on a
    /// goroutine of another runtime.
    rt: Option<Rt>,
}

impl NewTask {
    /// Takes a block, and enters the runtime.
    #[inline(never)]
    fn make(
        sched: &Sched,
        class: Class,
        created_at: &'static Location<'static>,
    ) -> io::Result<NewTask> {
        // Allocate before entering the runtime (sched/mod.rs, rule 2).
        let labels = labels::inherited_by_task(created_at);
        let rt = Rt::enter_if_of(sched);
        let taken = match rt {
            Some(rt) => rt.with_local(|local| {
                let task = local.free_tasks.take(class)?;
                Ok((task, local.next_id(|n| sched.take_ids(n))))
            }),
            None => block::take_central(class).map(|task| (task, sched.take_ids(1))),
        };
        match taken {
            Ok((task, id)) => {
                task.id.store(id, Ordering::Relaxed);
                task.sched.set(sched);
                if let Some(simulation) = &sched.simulation {
                    simulation::note_start(simulation, id);
                }
                task.origin.begin(created_at, labels);
                task.head.woken.set(false);
                task.join.reset();
                Ok(NewTask { task, rt })
            }
            Err(e) => {
                if let Some(rt) = rt {
                    rt.leave();
                }
                Err(e)
            }
        }
    }

    /// Makes it runnable in its runtime, `sched`, or lets it wait for its first wake-up. Its future
    /// is in its place.
    #[inline(never)]
    fn start(
        self,
        sched: &Sched,
        created_at: &'static Location<'static>,
        begin: Begin,
        handle: Handle,
    ) -> Generation {
        let NewTask { task, rt } = self;
        if handle == Handle::None {
            let detached = task.join.detach(0);
            debug_assert_eq!(detached, Detached::Running, "the task has not started yet");
        }
        match rt {
            Some(rt) => bump(&rt.p().counters.tasks_spawned, 1),
            // Release: pairs with the Acquire in `Sched::num_tasks`.
            None => _ = sched.tasks.spawned_outside.fetch_add(1, Ordering::AcqRel),
        }
        let generation = task.state.begin(begin);
        // Either the end of the runtime finds this task (`Sched::close_tasks`), or this sees the
        // end.
        full_fence();
        if begin == Begin::Scheduled && sched.tasks.is_closed() {
            let woken = task.state.cancel(generation);
            debug_assert_eq!(woken, Woken::Noted, "it is scheduled already");
        }
        match rt {
            Some(rt) => {
                if begin == Begin::Scheduled {
                    record::created(rt, task.into(), created_at);
                    rt.p().push_next(sched, task);
                    sched.wake();
                }
                rt.leave();
            }
            None if begin == Begin::Scheduled => {
                record::created_outside(sched, task.into(), created_at);
                sched.push_fresh_from_outside(task);
            }
            None => {}
        }
        generation
    }
}

#[cold]
fn no_memory(e: &io::Error) -> io::Error {
    let text = format!("no memory for another task: {e}; raise the limit (ulimit -v)");
    io::Error::new(e.kind(), text)
}
