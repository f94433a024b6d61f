//! Carriers: the goroutines that poll tasks.
//!
//! When a task is the next to run, it needs a carrier. If a carrier has just ended a poll, it takes
//! the task itself, without a switch. Otherwise [`carrier_for`] takes a *shelved* carrier, one that
//! found no task after its last poll; or it starts a new one. From then on the carrier is a
//! runnable goroutine like any other.
//!
//! ```text
//!   run queue ─ task ─▶ carrier_for ─▶ carrier polls ─┬▶ next is a task: polls that
//!                            ▲                        └▶ next is a goroutine, or nothing:
//!                            └──────────── shelf ◀─────── the carrier is shelved
//! ```
//!
//! A P shelves up to [`SHELVED_MAX`] carriers; those of idle Ps are in a list of the runtime.
//!
//! # Many polls that block
//! A poll that blocks keeps its carrier, so the next task needs another one: that is how a blocking
//! poll stalls no other task. A carrier costs as much as a goroutine. Two cases need care:
//!
//! - A poll was preempted while it held a lock, and thousands of other polls block on that lock,
//!   one carrier each. So if more than [`BLOCKED_CARRIERS_MANY`] carriers exist and one of them was
//!   preempted, that one continues instead of a new one being started, and the task waits; but not
//!   more than [`DEFERRALS_MAX`] times in a row, because it may compute for ever.
//! - The limit [`CARRIERS_MAX`] is reached, or no memory is left. Then tasks wait in a list until a
//!   carrier has ended its poll.
//!
//! Invariants:
//! 1. `g.task` of a carrier is set by the M that switches to it, or by the carrier itself. It is
//!    None exactly while the carrier is shelved or about to end.
//! 2. A shelved carrier is in one list. It is `Runnable`, so that it can be switched to.

use super::body::Polled;
use super::state::{TaskSnapshot, Turn};
use super::{Task, block, waker};
use crate::mem;
use crate::sched::g::G;
use crate::sched::goroutine::join::Completed;
use crate::sched::goroutine::spawn;
use crate::sched::m::{OwnContext, Rt};
use crate::sched::p::{P, bump};
use crate::sched::queues::central::Central;
use crate::sched::record::{self, StopCode, WokenBy};
use crate::sched::runnable::{RunList, Unpacked};
use crate::sched::wait::holder;
use crate::sched::wait::reason::WaitReason;
use crate::sched::{Sched, current_g, simulation, switch, wait};
use crate::shim::full_fence;
use crate::sys::lock::Lock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::task::Context;

/// Shelved carriers that a P keeps.
const SHELVED_MAX: usize = 8;
/// The stack of a carrier: address space, of which only touched pages take memory. Polls of nested
/// futures are deep in debug builds; other runtimes poll on threads with stacks of this size.
const STACK_BYTES: usize = 2 << 20;
/// The largest number of carriers of a runtime.
const CARRIERS_MAX: u32 = 1 << 16;
/// With so many carriers, preempted ones continue before new ones are started.
const BLOCKED_CARRIERS_MANY: u32 = 64;
/// How many times in a row a preempted carrier continues instead: it may compute for ever.
const DEFERRALS_MAX: u32 = 3;

/// What a runtime keeps about its tasks.
pub(crate) struct Tasks {
    /// Tasks that were spawned outside the runtime, so that no P counts them.
    pub(crate) spawned_outside: AtomicU64,
    /// Carriers that exist, shelved ones included.
    carriers: AtomicU32,
    /// How many carriers were ever started.
    started: AtomicU64,
    /// How many times a new carrier was needed while there were many.
    deferrals: AtomicU32,
    /// Tasks that wait for a carrier.
    waiting: Lock<RunList>,
    /// The length of `waiting`, for readers without the lock.
    waiting_len: AtomicU32,
    /// The runtime ends: new tasks are cancelled, and carriers are not shelved any more.
    closed: AtomicBool,
}

impl Tasks {
    pub(crate) const fn new() -> Tasks {
        Tasks {
            spawned_outside: AtomicU64::new(0),
            carriers: AtomicU32::new(0),
            started: AtomicU64::new(0),
            deferrals: AtomicU32::new(0),
            waiting: Lock::new(RunList::new()),
            waiting_len: AtomicU32::new(0),
            closed: AtomicBool::new(false),
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        // SeqCst: see `Sched::close_tasks`.
        self.closed.load(Ordering::SeqCst)
    }

    /// Returns whether a carrier that becomes free is to be shared.
    fn are_carriers_scarce(&self) -> bool {
        self.waiting_len.load(Ordering::Relaxed) != 0 || self.carriers() >= CARRIERS_MAX / 2
    }

    /// Returns how many carriers exist.
    pub(crate) fn carriers(&self) -> u32 {
        self.carriers.load(Ordering::Acquire)
    }

    /// Returns how many carriers were ever started.
    pub(crate) fn carriers_started(&self) -> u64 {
        self.started.load(Ordering::Relaxed)
    }

    fn push_waiting(&self, task: &'static Task) {
        let mut waiting = self.waiting.lock();
        waiting.push_back(task);
        self.waiting_len.store(waiting.len() as u32, Ordering::Relaxed);
    }

    /// Takes a task that waits for a carrier.
    #[inline]
    fn pop_waiting(&self) -> Option<&'static Task> {
        if self.waiting_len.load(Ordering::Relaxed) == 0 {
            return None;
        }
        self.pop_waiting_slow()
    }

    #[cold]
    fn pop_waiting_slow(&self) -> Option<&'static Task> {
        let mut waiting = self.waiting.lock();
        let item = waiting.pop_front();
        self.waiting_len.store(waiting.len() as u32, Ordering::Relaxed);
        match item?.unpack() {
            Unpacked::Task(task) => Some(task),
            Unpacked::Goroutine(_) => unreachable!("only tasks wait for a carrier"),
        }
    }
}

/// Returns the goroutine to switch to so that `task`, which the caller has taken from a queue, is
/// polled. It may be another carrier, which goes first. Returns None if the task has to wait for a
/// carrier.
pub(crate) fn carrier_for(rt: Rt, task: &'static Task) -> Option<&'static G> {
    if let Some(g) = rt.with_local(|local| local.carriers.pop_g()) {
        g.task.set(Some(task));
        return Some(g);
    }
    carrier_for_slow(rt, task)
}

#[cold]
fn carrier_for_slow(rt: Rt, task: &'static Task) -> Option<&'static G> {
    let sched = rt.sched();
    if let Some(g) = sched.central.lock().carriers.pop_g() {
        g.task.set(Some(task));
        return Some(g);
    }
    let tasks = &sched.tasks;
    if tasks.carriers() >= BLOCKED_CARRIERS_MANY
        && tasks.deferrals.fetch_add(1, Ordering::Relaxed) % (DEFERRALS_MAX + 1) != DEFERRALS_MAX
        && let Some(preempted) = sched.pop_preempted_carrier()
    {
        sched.push_woken(task);
        return Some(preempted);
    }
    if tasks.carriers() < CARRIERS_MAX
        && let Ok(g) = spawn::new_carrier(rt, run)
    {
        tasks.carriers.fetch_add(1, Ordering::AcqRel);
        tasks.started.fetch_add(1, Ordering::Relaxed);
        g.task.set(Some(task));
        return Some(g);
    }
    if tasks.carriers() == 0 {
        crate::sched::fatal(format_args!("task {}: no memory for a stack to poll it", task.id()));
    }
    sched.wait_for_carrier(task);
    None
}

/// On the thread's own context: gives `g`, a new carrier, its stack. Returns false if sysmon has
/// retaken the P meanwhile: then `g` is in a global queue; or if there is no memory: then its task
/// waits for another carrier.
#[cold]
pub(crate) fn provide_stack(own: OwnContext, g: &'static G) -> bool {
    // The error is dropped where the allocator may be called.
    let made = own.retakable(|| mem::acquire(STACK_BYTES).map_err(|e| e.kind()));
    let sched = own.sched();
    match (made, own.rt()) {
        (Ok(stack), rt) => {
            switch::attach_stack(g, stack);
            if rt.is_none() {
                sched.push_global(g);
                sched.wake_after_push();
            }
            rt.is_some()
        }
        (Err(e), _) => {
            // The others may end their polls, and then take the task.
            if sched.tasks.carriers.fetch_sub(1, Ordering::AcqRel) == 1 {
                crate::sched::fatal(format_args!("a task cannot be polled without a stack: {e}"));
            }
            if let Some(task) = g.task.take() {
                sched.wait_for_carrier(task);
            }
            // It was counted as started, and never ran.
            sched.spawned_outside.fetch_sub(1, Ordering::AcqRel);
            switch::free_g_outside(g);
            false
        }
    }
}

/// The closure of a carrier.
fn run() {
    let Some(g) = current_g() else { unreachable!("a carrier is a goroutine") };
    while let Some(task) = g.task.get() {
        let rt = poll(g, task);
        next(rt, g).leave_without_yield();
    }
    // The last access to the runtime's count is before the end of the goroutine, which keeps the
    // runtime alive.
    // SAFETY: a goroutine that runs keeps its runtime.
    unsafe { &*g.sched.get() }.tasks.carriers.fetch_sub(1, Ordering::AcqRel);
}

/// Polls, on the carrier `g`, a task that was taken from a queue, or drops its future if it was
/// cancelled. Returns inside the runtime.
#[inline]
fn poll(g: &G, task: &'static Task) -> Rt {
    g.task_yields.set(false);
    // SAFETY: a task that is polled keeps its runtime.
    let number = holder::number(unsafe { &*task.sched.get() }, task.id());
    g.holder_number.store(number, Ordering::Relaxed);
    record_poll(task);
    let body = task.body.get();
    let polled = match task.state.begin_poll() {
        Turn::Poll => {
            task.head.set_reason(WaitReason::Future, 0);
            let waker = waker::waker(waker::word_of(task));
            // SAFETY: this carrier has set `RUNNING`, so it alone touches the future (mod.rs,
            // invariant 3).
            unsafe { (body.poll)(task, &mut Context::from_waker(&waker)) }
        }
        // SAFETY: as above.
        Turn::Cancel => unsafe { (body.cancel)(task) },
    };
    if polled != Polled::Pending {
        return end(task, polled);
    }
    let rt = enter();
    let sched = rt.sched();
    task.head.waiting_since_ms.store(sched.coarse_ms.load(Ordering::Relaxed), Ordering::Relaxed);
    let yields = g.task_yields.get();
    record::poll_ended(rt, task, || {
        if yields { StopCode::YIELDED } else { StopCode::parked(&task.head) }
    });
    if yields {
        task.state.end_poll_scheduled();
    }
    // Also if it was woken during the poll, by itself or by another thread, it goes behind the
    // others.
    if yields || task.state.end_poll() {
        if !yields {
            record::woken(rt, &task.head, || task.id(), WokenBy::Unknown);
        }
        task.head.woken.set(false);
        rt.p().push_back(sched, task);
        sched.wake_after_push();
    }
    rt
}

/// Records that a poll begins. This code is outside of the runtime, so that the P may change: only
/// while something is recorded, it enters for a moment.
#[inline(always)]
fn record_poll(task: &Task) {
    // SAFETY: a live task keeps its runtime alive.
    if unsafe { &*task.sched.get() }.record.is_on() {
        let rt = enter();
        record::poll_began(rt.p(), || task.id());
        rt.leave_without_yield();
    }
}

fn enter() -> Rt {
    match Rt::enter() {
        Some(rt) => rt,
        None => crate::sched::fatal(format_args!("a carrier lost its thread-local storage")),
    }
}

/// Ends a task whose output is stored. Returns inside the runtime.
fn end(task: &'static Task, polled: Polled) -> Rt {
    // SAFETY: a live task keeps its runtime alive.
    let sched = unsafe { &*task.sched.get() };
    if polled == Polled::Panicked && sched.config.abort_on_panic {
        abort_after_panic(task);
    }
    if polled == Polled::Panicked
        && let Some(simulation) = &sched.simulation
    {
        simulation.count_panic(task.id());
    }
    task.origin.end();
    task.state.finish();
    match task.join.complete() {
        Completed::Kept => record_end(count_end(enter(), task)),
        Completed::Wake(sleeper) => {
            let rt = count_end(enter(), task);
            wait::wake_in(rt, sleeper);
            record_end(rt)
        }
        Completed::Unwanted => {
            let body = task.body.get();
            if !body.is_plain || polled == Polled::Panicked {
                // SAFETY: there is no handle that could take the output, or own the block.
                unsafe {
                    (body.drop_output)(task);
                    (body.free)(task);
                }
                // The destructor may have left labels.
                task.origin.end();
            }
            let rt = count_end(enter(), task);
            rt.with_local(|local| local.free_tasks.put(task));
            record_end(rt)
        }
    }
}

/// Ends the process after a panic, because the mode of the runtime is `PanicMode::Abort`.
#[cold]
pub(super) fn abort_after_panic(task: &Task) -> ! {
    // The panic hook has already printed the panic's own message. The exit code is Go's.
    crate::sys::stderr::write_stderr(format_args!(
        "\ntask {} panicked, and panics end the process (PanicMode::Abort)\n",
        task.id()
    ));
    // SAFETY: ends the process at once, as Go does: no destructors, no atexit.
    unsafe { libc::_exit(2) }
}

fn count_end(rt: Rt, task: &Task) -> Rt {
    bump(&rt.p().counters.tasks_ended, 1);
    if let Some(simulation) = &rt.sched().simulation {
        simulation::note_end(simulation, task.id());
    }
    rt
}

/// Records the end of a task, after its wake-ups.
fn record_end(rt: Rt) -> Rt {
    record::task_ended(rt);
    rt
}

/// Frees the block of a task that has ended and whose output was moved out, for its handle.
pub(crate) fn free(task: &'static Task) {
    let body = task.body.get();
    if !body.is_plain {
        // SAFETY: the handle owns the block (goroutine/join.rs).
        unsafe { (body.free)(task) };
    }
    wait::inside(|here| block::put(here, task));
}

/// Finds the next task for `g`, the carrier that runs here: in the local queue, or after it was
/// shelved. `g.task` is None if the carrier is to end.
#[inline]
fn next(rt: Rt, g: &'static G) -> Rt {
    g.task.set(None);
    let tasks = &rt.sched().tasks;
    if let Some(task) = tasks.pop_waiting() {
        g.task.set(Some(task));
        return rt;
    }
    match switch::pop_unless_requested(rt).map(|item| item.unpack()) {
        Some(Unpacked::Task(task)) => {
            g.task.set(Some(task));
            rt
        }
        Some(Unpacked::Goroutine(next)) => switch::shelve(rt, g, Some(next)),
        None => switch::shelve(rt, g, None),
    }
}

/// Puts `g`, a carrier that has stopped, on the shelf of its P. If the shelf is full, or the
/// runtime ends, queues `g` instead: when it runs, it finds no task, and ends.
pub(crate) fn finish_shelving(rt: Rt, g: &'static G) {
    let sched = rt.sched();
    g.state.set_runnable();
    g.head.woken.set(false);
    if sched.tasks.are_carriers_scarce() && !sched.tasks.is_closed() {
        return sched.share_carrier(g);
    }
    let shelved = !sched.tasks.is_closed()
        && rt.with_local(|local| {
            let has_room = local.carriers.len() < SHELVED_MAX;
            if has_room {
                local.carriers.push_front(g);
            }
            has_room
        });
    if !shelved {
        rt.p().push_back(sched, g);
        sched.wake_after_push();
    }
}

/// Tasks that wait for a carrier. They are in `Tasks::waiting`, and carriers that become free go to
/// the runtime's list instead of a P's shelf. The scheduler's lock orders the two: whichever comes
/// second sees the other, and puts a task back into a run queue.
impl Sched {
    /// Lets `task` wait until a carrier is free.
    #[cold]
    fn wait_for_carrier(&self, task: &'static Task) {
        self.tasks.push_waiting(task);
        let has_carrier = !self.central.lock().carriers.is_empty();
        if has_carrier {
            self.requeue_waiting();
        }
    }

    /// Puts a free carrier into the runtime's list.
    #[cold]
    fn share_carrier(&self, g: &'static G) {
        self.central.lock().carriers.push_front(g);
        self.requeue_waiting();
    }

    /// Puts a task that waits for a carrier back into a run queue.
    fn requeue_waiting(&self) {
        if let Some(task) = self.tasks.pop_waiting() {
            self.push_woken(task);
            self.wake_after_push();
        }
    }
}

impl Sched {
    /// Under the lock: moves the shelved carriers of `p`, which no M owns any more, to the
    /// runtime's list.
    pub(crate) fn collect_carriers(&self, central: &mut Central, p: &P) {
        // SAFETY: no M owns the P, and no M can take it, because the caller holds the lock.
        let carriers = &mut unsafe { p.local() }.carriers;
        let task = if carriers.is_empty() { None } else { self.tasks.pop_waiting() };
        central.carriers.append(carriers);
        if let Some(task) = task {
            self.push_woken_locked(central, task);
        }
    }

    /// Returns how many tasks are alive: spawned and not ended.
    pub(crate) fn num_tasks(&self) -> u64 {
        // As in `num_goroutines`.
        let ended: u64 =
            self.all_ps().map(|p| p.counters.tasks_ended.load(Ordering::Acquire)).sum();
        let spawned: u64 =
            self.all_ps().map(|p| p.counters.tasks_spawned.load(Ordering::Acquire)).sum();
        (spawned + self.tasks.spawned_outside.load(Ordering::Acquire)).saturating_sub(ended)
    }

    /// Begins the end of the runtime's tasks: cancels all of them, and ends the shelved carriers.
    /// Tasks whose polls block stay.
    pub(crate) fn close_tasks(&self) {
        self.tasks.closed.store(true, Ordering::SeqCst);
        // Pairs with the barrier in `spawn::start`.
        full_fence();
        self.cancel_all_tasks();
        self.end_shelved_carriers();
    }

    /// Cancels the tasks that are alive. A relay may begin later, so this is repeated.
    pub(crate) fn cancel_all_tasks(&self) {
        block::for_each(&mut |task| {
            let (state, generation) = task.state.snapshot();
            if state != TaskSnapshot::Free && std::ptr::eq(task.sched_hint(), self) {
                wait::inside(|here| waker::cancel(here, task, generation));
            }
        });
    }

    /// Queues the shelved carriers that are in the runtime's list: they end.
    pub(crate) fn end_shelved_carriers(&self) {
        while let Some(g) = {
            let mut central = self.central.lock();
            central.carriers.pop_g()
        } {
            self.push_fresh_from_outside(g);
        }
    }
}
