//! Tasks: futures that the scheduler polls.
//!
//! A task is a future without a stack. It waits in the same run queues as goroutines, and a
//! *carrier* polls it: an ordinary goroutine that takes tasks from the queues, one after the other.
//! What happens inside a poll happens to the carrier. If the poll blocks, the carrier parks; if it
//! computes for long, the carrier is preempted; if it blocks its thread, the thread loses its P.
//! Other tasks continue on other carriers meanwhile.
//!
//! | file | job |
//! |---|---|
//! | `state.rs` | the state word: wake-ups, polls and aborts meet |
//! | `body.rs` | stores the future, and later its output |
//! | `block.rs` | the memory of tasks: blocks that are never freed, only reused |
//! | `waker.rs` | wakers without a reference count; other executors' wakers |
//! | `spawn.rs` | from a future to a runnable task |
//! | `carrier.rs` | carriers: which goroutine polls which task |
//! | `local.rs` | tasks of a `LocalSet`, which one goroutine polls |
//! | `blocker.rs` | the waker of a goroutine or thread that polls a future itself (`block_on`) |
//!
//! Invariants:
//! 1. The memory of a task is never freed, and its first 64 bytes are always a [`Task`]. So a waker
//!    needs no reference count: a stale one finds a later generation in the state word and does
//!    nothing (`state.rs`).
//! 2. A scheduled task is in exactly one queue, or in the hands of one M or carrier.
//! 3. Only the carrier that set `RUNNING` touches the future. After the poll that ended the task,
//!    the join cell says which side owns the output and the memory (`goroutine/join.rs`).
//! 4. User code (polls, destructors, other executors' wakers) never runs inside the runtime.

pub(crate) mod block;
pub(crate) mod blocker;
pub(crate) mod body;
pub(crate) mod carrier;
pub(crate) mod local;
pub(crate) mod spawn;
pub(crate) mod state;
pub(crate) mod waker;

use crate::sched::g::with_names;
use crate::sched::goroutine::join::JoinCell;
use crate::sched::labels::TaskOrigin;
use crate::sched::m::Rt;
use crate::sched::p::flag;
use crate::sched::runnable::{RunHead, RunKind};
use crate::sched::wait::reason::WaitReason;
use crate::sched::{Sched, current_g};
use body::{BodyCell, TaskBody};
use state::{Generation, TaskState};
use std::cell::Cell;
use std::mem::offset_of;
use std::panic::Location;
use std::ptr::null;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Waker};

/// A task: the beginning of its block. The future or its output follows (`body.rs`).
#[repr(C, align(64))]
pub(crate) struct Task {
    /// What run queues touch.
    pub(crate) head: RunHead,
    pub(crate) state: TaskState,
    pub(crate) join: JoinCell,
    /// The functions for the type of the future and its output.
    pub(crate) body: BodyCell,
    /// Its runtime, which lives at least as long as the task.
    pub(crate) sched: Cell<*const Sched>,
    id: AtomicU64,
    /// Where it was spawned, and its labels.
    pub(crate) origin: TaskOrigin,
}

const _: () = assert!(size_of::<Task>() == 64, "the future begins at the second cache line");

// SAFETY: invariant 3 says which thread may touch which cell; the rest are atomics.
unsafe impl Sync for Task {}
// SAFETY: nothing in it is tied to a thread.
unsafe impl Send for Task {}

impl Task {
    fn unused() -> Task {
        Task {
            head: RunHead::new(RunKind::Task),
            state: TaskState::new(),
            join: JoinCell::new(),
            body: BodyCell::new(TaskBody::NONE),
            sched: Cell::new(null()),
            id: AtomicU64::new(0),
            origin: TaskOrigin::new(),
        }
    }

    pub(crate) fn id(&self) -> u64 {
        self.id.load(Ordering::Relaxed)
    }

    /// Returns the runtime of the task. For a dump that does not own the task: the result may be
    /// out of date.
    pub(crate) fn sched_hint(&self) -> *const Sched {
        // SAFETY: an aligned word in memory that is never freed.
        unsafe { self.sched.as_ptr().read_volatile() }
    }

    /// Copies the name of the task of this generation into `buffer`, as far as it fits. Returns the
    /// number of bytes copied, or None if it has no name or has ended.
    pub(crate) fn copy_name(&self, generation: Generation, buffer: &mut [u8]) -> Option<usize> {
        with_names(|| {
            if self.state.has_ended(generation) {
                return None;
            }
            // SAFETY: the task has not ended, so its name is there. It is freed only after the end,
            // under the same lock (`body.rs`).
            let name = unsafe { (self.body.published().name)(self) }?;
            let len = name.len().min(buffer.len());
            buffer[..len].copy_from_slice(&name.as_bytes()[..len]);
            // A task without a name ends without the lock, and the block may have been reused.
            (!self.state.has_ended(generation)).then_some(len)
        })
    }

    /// Returns the name of the future's type, and where the task was spawned. For dumps, as
    /// [`Task::sched_hint`].
    pub(crate) fn origin(&self) -> (&'static str, &'static Location<'static>) {
        ((self.body.get().type_name)(), self.origin.created_at())
    }
}

/// Where debuggers find the fields of tasks (`observe/layout.rs`).
pub(crate) const LAYOUT: &[(&str, usize)] = &[
    ("task.head", offset_of!(Task, head)),
    ("task.state", offset_of!(Task, state)),
    ("task.body", offset_of!(Task, body)),
    ("task.join", offset_of!(Task, join)),
    ("task.sched", offset_of!(Task, sched)),
    ("task.id", offset_of!(Task, id)),
    ("task.origin", offset_of!(Task, origin)),
    ("task.contents", size_of::<Task>()),
];

/// Returns the task that the running goroutine polls, if it is a carrier.
pub(crate) fn current() -> Option<&'static Task> {
    current_g()?.task.get()
}

/// Makes the task that polls with `waker` yield: when the poll returns `Pending`, the task goes
/// behind the others. As `waker.wake_by_ref()`, but faster if the waker is the current task's own.
pub(crate) fn yield_when_pending(waker: &Waker) {
    if let Some(g) = current_g()
        && let Some(task) = g.task.get()
        && waker::word_of_waker(waker) == Some(waker::word_of(task))
    {
        g.task_yields.set(true);
    } else {
        waker.wake_by_ref();
    }
}

/// Returns whether the time slice of the task that polls a leaf future here is over. If so, wakes
/// the task, and the leaf future returns `Pending`: the task goes behind the others, and its
/// carrier polls the next one. Otherwise the carrier would be preempted at the end of the
/// operation, and the next task would need another carrier. Always false if the caller is no task.
#[inline]
pub(crate) fn yields_to_others(context: &Context<'_>) -> bool {
    let Some(rt) = Rt::enter() else { return false };
    // A select or `block_on` inside the poll has a waker of its own.
    let is_polled_by = |task| waker::word_of_waker(context.waker()) == Some(waker::word_of(task));
    // A simulation preempts the carrier instead, where its schedule says so.
    let requests = flag::PREEMPT | flag::SIMULATED;
    let asked = rt.p().flags.load(Ordering::Relaxed) & requests == flag::PREEMPT
        && rt.g().task.get().is_some_and(is_polled_by);
    rt.leave_without_yield();
    if asked {
        yield_when_pending(context.waker());
    }
    asked
}

/// Records what the current task waits for, for dumps: a leaf future calls it before it returns
/// `Pending`. Does nothing if the caller is no task.
pub(crate) fn note_reason(reason: WaitReason) {
    if let Some(task) = current() {
        task.head.set_reason(reason, 0);
    }
}
