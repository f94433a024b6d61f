//! Wakers of tasks, and how a waiter list wakes a task.
//!
//! A waker is one word: the address of the task's block, and the lower bits of its generation. To
//! clone it is to copy the word, and to drop it is to forget it (`mod.rs`, invariant 1). The same
//! word is the *sleeper* of a task (`wait/mod.rs`): whatever can wake a goroutine can wake a task.
//!
//! | bits of a word | content |
//! |---|---|
//! | 63..48 | the lower bits of the generation |
//! | 47..6 | address of the block, which is aligned to 64 |
//! | 2 | used by the join cell (`goroutine/join.rs`) |
//! | 1..0 | [`TASK_SLEEPER`] |
//!
//! # Wakers of other executors
//! A future of this crate may be polled by any executor. Its waker is code that we do not know, and
//! waiter lists are worked off inside the runtime, where no such code may run. So a [`TaskWaiter`]
//! puts a *relay* between them: a small task of ours that calls the other waker when it is polled.

use super::body::{TaskBody, WakeBy};
use super::spawn;
use super::state::{Generation, WAKER_GENERATION_BITS, Woken};
use super::{Task, blocker};
use crate::sched::g::G;
pub(crate) use crate::sched::goroutine::join::TASK_SLEEPER;
use crate::sched::m::Rt;
use crate::sched::record;
use crate::sched::runnable::{RunList, Unpacked};
use crate::sched::{Sched, switch, wait};
use std::future::Future;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, RawWaker, RawWakerVTable, Waker};

const ADDRESS_BITS: u32 = 48;
const _: () = assert!(ADDRESS_BITS + WAKER_GENERATION_BITS == usize::BITS);
const ADDRESS_MASK: usize = ((1 << ADDRESS_BITS) - 1) & !(align_of::<Task>() - 1);

/// The wakers of this crate are those with this table.
static VTABLE: RawWakerVTable = RawWakerVTable::new(
    |data| RawWaker::new(data, &VTABLE),
    |data| wake_outside(data.addr()),
    |data| wake_outside(data.addr()),
    |_| (),
);

/// Returns the sleeper word of `task`, which is alive, in its present generation.
pub(crate) fn word_of(task: &Task) -> usize {
    let generation = task.state.generation().waker_bits() as usize;
    std::ptr::from_ref(task).addr() | generation << ADDRESS_BITS | TASK_SLEEPER
}

/// Returns the block of a sleeper word, whatever its generation.
#[inline(always)]
fn task_of(word: usize) -> &'static Task {
    // SAFETY: made by `word_of` from a task; its block is never freed, and chunks are exposed.
    unsafe { &*std::ptr::with_exposed_provenance::<Task>(word & ADDRESS_MASK) }
}

/// Returns a waker for the sleeper word of a task. It needs no drop.
pub(crate) fn waker(word: usize) -> ManuallyDrop<Waker> {
    // SAFETY: the functions of `VTABLE` accept any word of `word_of`, at any time and on any
    // thread: blocks are never freed.
    let waker = unsafe { Waker::new(std::ptr::without_provenance(word), &VTABLE) };
    ManuallyDrop::new(waker)
}

/// Returns the sleeper word of a waker of this crate, or None for another waker.
pub(crate) fn word_of_waker(waker: &Waker) -> Option<usize> {
    std::ptr::eq(waker.vtable(), &VTABLE).then(|| waker.data().addr())
}

/// `wake` and `wake_by_ref` of a [`Waker`].
fn wake_outside(word: usize) {
    let here = Rt::enter();
    wake(here, word);
    wait::leave(here);
}

/// Returns the goroutine that polls by itself and waits with this word (`blocker.rs`), or None for
/// another task.
pub(crate) fn blocked_goroutine(word: usize) -> Option<&'static G> {
    blocker::goroutine(task_of(word), (word >> ADDRESS_BITS) as u64)
}

/// Wakes the task with this sleeper word, inside the runtime or on a plain thread. It is harmless
/// if the task has ended or was woken already.
#[inline]
pub(crate) fn wake(here: Option<Rt>, word: usize) {
    let task = task_of(word);
    if task.state.wake((word >> ADDRESS_BITS) as u64) == Woken::Enqueue {
        enqueue(here, task);
    }
}

/// As [`wake`], for a caller that must not touch the queues yet. If the task was idle, it is added
/// to `later`, and the caller passes the list to [`wake_all`].
pub(crate) fn wake_later(word: usize, later: &mut RunList) {
    let task = task_of(word);
    if task.state.wake((word >> ADDRESS_BITS) as u64) == Woken::Enqueue {
        later.push_back(task);
    }
}

/// Completes the wake-ups that [`wake_later`] has begun.
pub(crate) fn wake_all(here: Option<Rt>, mut later: RunList) {
    while let Some(item) = later.pop_front() {
        if let Unpacked::Task(task) = item.unpack() {
            enqueue(here, task);
        }
    }
}

/// Asks the task to end: its future is dropped before its next poll. It is harmless if the task of
/// this generation has ended.
pub(crate) fn cancel(here: Option<Rt>, task: &'static Task, generation: Generation) {
    if task.state.cancel(generation) == Woken::Enqueue {
        enqueue(here, task);
    }
}

/// Puts a task that was idle into a queue, or wakes the goroutine or thread that polls it.
#[inline]
fn enqueue(here: Option<Rt>, task: &'static Task) {
    let body = task.body.get();
    if body.wake_by != WakeBy::Queue {
        return enqueue_elsewhere(here, task, body);
    }
    task.head.woken.set(true);
    match here {
        Some(rt) if std::ptr::eq(rt.sched(), task.sched.get()) => {
            record::woken(rt, &task.head, || task.id(), record::WokenBy::Here);
            switch::push_woken(rt, task.into());
        }
        _ => {
            // SAFETY: a live task keeps its runtime alive (`Sched::start`).
            let sched = unsafe { &*task.sched.get() };
            record::woken_outside(sched, || task.id(), record::WokenBy::Here);
            sched.push_woken_from_outside(task);
        }
    }
}

/// As [`enqueue`], for a task that no carrier polls.
fn enqueue_elsewhere(here: Option<Rt>, task: &'static Task, body: &TaskBody) {
    // SAFETY: the task is scheduled now, so it does not end before this wake-up has reached it: its
    // home is there. The caller has found a blocker idle.
    unsafe {
        match (body.home)(task) {
            Some(home) => home.push(here, task),
            None => blocker::wake(here, task),
        }
    }
}

/// Returns the caller's runtime, or the default runtime on a plain thread. The first runtime of the
/// process sets it.
pub(crate) static FIND_SCHED: OnceLock<fn() -> &'static Sched> = OnceLock::new();

/// What a future puts into waiter lists for the task that polls it. A future keeps one for as long
/// as it waits.
///
/// One word: 0, the sleeper word of a task of ours, or the address of a boxed [`Relay`].
pub(crate) struct TaskWaiter(usize);

/// A task that calls a waker of another executor each time it is woken.
struct Relay {
    shared: Arc<OtherWaker>,
    word: usize,
    task: &'static Task,
    generation: Generation,
}

/// The waker of another executor.
struct OtherWaker {
    waker: Waker,
    /// The [`Relay`] was not dropped.
    is_wanted: AtomicBool,
}

impl TaskWaiter {
    pub(crate) const fn new() -> TaskWaiter {
        TaskWaiter(0)
    }

    /// Returns the sleeper word for the task that polls with `waker`. It is valid until the next
    /// call with another waker, or the drop of the `TaskWaiter`; it may be woken at any time, also
    /// after that. Must not be called inside the runtime.
    #[inline]
    pub(crate) fn set(&mut self, waker: &Waker) -> usize {
        match word_of_waker(waker) {
            Some(word) => {
                if self.0 != word {
                    *self = TaskWaiter(word);
                }
                word
            }
            None => self.set_other_slow(waker),
        }
    }

    /// Returns the result of the last [`TaskWaiter::set`], or 0 before the first.
    #[inline]
    pub(crate) fn word(&self) -> usize {
        match self.relay() {
            Some(relay) => relay.word,
            None => self.0,
        }
    }

    /// Returns whether the last [`TaskWaiter::set`] was for the task of `waker`.
    pub(crate) fn is_for(&self, waker: &Waker) -> bool {
        match (word_of_waker(waker), self.relay()) {
            (Some(word), _) => self.0 == word,
            (None, Some(relay)) => relay.shared.waker.will_wake(waker),
            (None, None) => false,
        }
    }

    #[inline]
    fn relay(&self) -> Option<&Relay> {
        if self.0 == 0 || self.0 & TASK_SLEEPER == TASK_SLEEPER {
            return None;
        }
        // SAFETY: the address of a box that this owns, exposed by `set_other_slow`.
        Some(unsafe { &*std::ptr::with_exposed_provenance::<Relay>(self.0) })
    }

    #[cold]
    fn set_other_slow(&mut self, waker: &Waker) -> usize {
        // A relay may have ended with its runtime.
        if let Some(relay) = self.relay()
            && relay.shared.waker.will_wake(waker)
            && !relay.task.state.has_ended(relay.generation)
        {
            return relay.word;
        }
        let relay = Box::new(Relay::start(waker.clone()));
        let word = relay.word;
        *self = TaskWaiter(Box::into_raw(relay).expose_provenance());
        word
    }
}

impl Drop for TaskWaiter {
    #[inline]
    fn drop(&mut self) {
        if self.relay().is_some() {
            let relay = std::ptr::with_exposed_provenance_mut::<Relay>(self.0);
            // SAFETY: as in `relay`.
            let relay = unsafe { Box::from_raw(relay) };
            // The destructor of the other waker may panic. A future must not be left half changed.
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(relay))) {
                std::mem::forget(payload);
            }
        }
    }
}

impl Relay {
    fn start(waker: Waker) -> Relay {
        let shared = Arc::new(OtherWaker { waker, is_wanted: AtomicBool::new(true) });
        let find = FIND_SCHED.get().expect("a future of this crate needs a runtime");
        // SAFETY: the future is Send and 'static.
        match unsafe { spawn::spawn_idle(find(), CallWaker(shared.clone())) } {
            Ok((task, generation)) => Relay { shared, word: word_of(task), task, generation },
            Err(e) => panic!("cannot wait for a wake-up: {e}"),
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.is_wanted.store(false, Ordering::Relaxed);
        let here = Rt::enter();
        cancel(here, self.task, self.generation);
        wait::leave(here);
    }
}

/// The future of a [`Relay`]. It never ends; the relay is cancelled.
struct CallWaker(Arc<OtherWaker>);

impl Future for CallWaker {
    type Output = ();

    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<()> {
        self.0.waker.wake_by_ref();
        Poll::Pending
    }
}

impl Drop for CallWaker {
    fn drop(&mut self) {
        if self.0.is_wanted.load(Ordering::Relaxed) {
            // The runtime ends, or the waker has panicked. The task polls again, and gets a relay
            // elsewhere.
            self.0.waker.wake_by_ref();
        }
    }
}
