//! The waker of a goroutine or plain thread that polls futures itself: `block_on`, and a `select!`
//! with futures among its arms.
//!
//! It is a block like that of a task, with the same state word and the same wakers. But no carrier
//! polls it: its wake-up makes the goroutine or thread runnable that waits.
//!
//! # Two kinds of waits
//! - [`Blocker::sleep`], for `block_on`: only the waker that found the state idle ends the wait.
//! - Between [`Blocker::arm`] and [`Blocker::disarm`], for a select: a channel or the deadline may
//!   end the wait as well. The waker that found the state idle claims the wait. If the claim fails,
//!   the waker says so in [`Contents::was_refused`], its last access to the block: `disarm` waits
//!   for that before the block may be used for anything else.
//!
//! Invariant 1: the waiter is in the block from before `end_poll` until the wake-up, or until
//! `disarm` returns. Only the waker that found the state idle reads it.

use super::Task;
use super::block::{self, Class};
use super::body::{TaskBody, WakeBy};
use super::state::{Begin, TaskSnapshot, Turn, Woken};
use super::waker;
use crate::sched::g::G;
use crate::sched::m::Rt;
use crate::sched::wait::Waiter;
use crate::sched::wait::reason::WaitReason;
use crate::sched::{current_g, wait};
use crate::sys::futex::futex_wait;
use std::alloc::Layout;
use std::cell::Cell;
use std::io;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, fence};
use std::task::Waker;
use std::time::Duration;

/// The winner of [`Blocker::sleep`], where the claim always succeeds. Any number but 0.
const SLEEP_WINNER: u16 = 1;
/// Probes of a waker whose claim has failed, before the thread sleeps.
const PROBES: u32 = 1000;
/// The sleep between further probes.
const BACKOFF: Duration = Duration::from_micros(50);

static BODY: TaskBody = TaskBody::without_future(WakeBy::Sleeper, Class::MIN);

/// See the head of the file.
pub(crate) struct Blocker {
    task: &'static Task,
    word: usize,
}

/// What a blocker's block contains.
struct Contents {
    /// The wait that a wake-up ends.
    waiter: Cell<Waiter>,
    /// The number by which a wake-up claims it.
    winner: Cell<u16>,
    /// A waker found that the wait was claimed already, and touches the block no longer.
    was_refused: AtomicBool,
    /// The address of the goroutine that polls, or 0 on a plain thread.
    goroutine: AtomicUsize,
}

const _: () = assert!(matches!(
    Class::for_body(Layout::new::<Contents>()),
    Some(class) if class.is_min()
));

/// Returns the contents of a block.
///
/// # Safety
/// The block is a blocker's, which does not end while the result is used.
unsafe fn contents(task: &Task) -> &Contents {
    // SAFETY: `Blocker::new` has written them. The caller's contract.
    unsafe { &*block::contents(task).cast() }
}

/// Ends the wait of a blocker.
///
/// # Safety
/// The caller's wake-up has found the state of the blocker idle (invariant 1).
pub(super) unsafe fn wake(here: Option<Rt>, task: &Task) {
    // SAFETY: until the wake-up, or until `was_refused` is set, the blocker does not end.
    let contents = unsafe { contents(task) };
    let waiter = contents.waiter.get();
    if waiter.claim(contents.winner.get()) {
        wait::wake_here(here, waiter.sleeper());
    } else {
        // Release: the reads above come before what the owner does with the block.
        contents.was_refused.store(true, Ordering::Release);
    }
}

/// Returns the goroutine of a blocker. Returns None on a plain thread, for another task, and for a
/// blocker that has ended: a future that a blocker has polled may outlive it.
pub(super) fn goroutine(task: &Task, waker_bits: u64) -> Option<&'static G> {
    if task.body.get().wake_by != WakeBy::Sleeper {
        return None;
    }
    let (state, generation) = task.state.snapshot();
    if state == TaskSnapshot::Free || generation.waker_bits() != waker_bits {
        return None;
    }
    let place: *mut Contents = block::contents(task).cast();
    // SAFETY: memory that is never unmapped. If the block has another use by now, the address is
    // not used: then the generation has changed.
    let address = unsafe { (*place).goroutine.load(Ordering::Relaxed) };
    // Orders the load before the check that the blocker has not ended. Pairs with the fence in
    // `drop`.
    fence(Ordering::Acquire);
    if task.state.has_ended(generation) {
        return None;
    }
    // SAFETY: 0 or a G, which is never freed.
    unsafe { std::ptr::with_exposed_provenance::<G>(address).as_ref() }
}

/// How [`Blocker::sleep`] ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Slept {
    /// After a wake-up.
    Woken,
    /// At once: a wake-up came during the poll.
    WasNotified,
}

/// Which party has claimed the wait of an armed [`Blocker`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClaimedBy {
    Wakeup,
    Other,
}

impl Blocker {
    pub(crate) fn new() -> io::Result<Blocker> {
        let taken = wait::inside(|here| block::take(here, Class::MIN));
        taken.map(|task| {
            task.body.set(&BODY);
            // No runtime ends it (`Sched::close_tasks`).
            task.sched.set(std::ptr::null());
            let g = current_g().map_or(0, |g| std::ptr::from_ref(g).expose_provenance());
            let contents = Contents {
                waiter: Cell::new(Waiter::sole(0)),
                winner: Cell::new(SLEEP_WINNER),
                was_refused: AtomicBool::new(false),
                goroutine: AtomicUsize::new(g),
            };
            // SAFETY: this function owns the block, which has room for the contents.
            unsafe { block::contents(task).cast::<Contents>().write(contents) };
            task.state.begin(Begin::Running);
            Blocker { task, word: waker::word_of(task) }
        })
    }

    pub(crate) fn waker(&self) -> ManuallyDrop<Waker> {
        waker::waker(self.word)
    }

    fn contents(&self) -> &Contents {
        // SAFETY: the blocker has not ended.
        unsafe { contents(self.task) }
    }

    /// Sleeps until a wake-up, after a poll that returned `Pending`.
    pub(crate) fn sleep(&self) -> Slept {
        let mut notified = false;
        wait::block(WaitReason::Future, |sleeper| {
            // No waker reads it yet (invariant 1).
            self.contents().waiter.set(Waiter::sole(sleeper));
            notified = self.task.state.end_poll();
            !notified
        });
        self.begin_poll();
        if notified { Slept::WasNotified } else { Slept::Woken }
    }

    /// Makes a wake-up claim `waiter` with the number `winner`, after polls that returned
    /// `Pending`, and returns true. Then the caller calls [`Blocker::disarm`] after the wait.
    ///
    /// Returns false if a wake-up came during the polls.
    #[must_use]
    pub(crate) fn arm(&self, waiter: Waiter, winner: u16) -> bool {
        let contents = self.contents();
        // No waker reads them yet (invariant 1).
        contents.waiter.set(waiter);
        contents.winner.set(winner);
        contents.was_refused.store(false, Ordering::Relaxed);
        let armed = !self.task.state.end_poll();
        if !armed {
            self.begin_poll();
        }
        armed
    }

    /// Ends a wait after [`Blocker::arm`], before the next poll. `by` says which party has claimed
    /// it. Called outside the runtime.
    pub(crate) fn disarm(&self, by: ClaimedBy) {
        if by == ClaimedBy::Other {
            let state = &self.task.state;
            // The caller takes the place of the waker, unless there is one.
            if state.wake(state.generation().waker_bits()) == Woken::Noted {
                self.wait_for_refused_waker();
            }
        }
        self.begin_poll();
    }

    /// Waits until the waker that has found the state idle has failed to claim the wait. The waker
    /// is inside the runtime or on a plain thread, so that takes some nanoseconds, unless the
    /// kernel has stopped its thread.
    #[cold]
    fn wait_for_refused_waker(&self) {
        let mut probes = 0;
        // Acquire: the waker's reads of the block come before what the caller does with it.
        while !self.contents().was_refused.load(Ordering::Acquire) {
            if probes < PROBES {
                probes += 1;
                std::hint::spin_loop();
            } else {
                futex_wait(&AtomicU32::new(0), 0, Some(BACKOFF));
            }
        }
    }

    fn begin_poll(&self) {
        let turn = self.task.state.begin_poll();
        debug_assert_eq!(turn, Turn::Poll, "a blocker is never cancelled");
    }
}

impl Drop for Blocker {
    fn drop(&mut self) {
        self.task.state.finish();
        // Pairs with the fence in `goroutine`: a thread that sees what the block holds next sees
        // that the blocker has ended.
        fence(Ordering::Release);
        wait::inside(|here| block::put(here, self.task));
    }
}
