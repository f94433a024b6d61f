//! The waker of a goroutine or plain thread that polls a future itself: `block_on`.
//!
//! It is a block like that of a task, with the same state word and the same wakers. But no carrier
//! polls it: its wake-up makes the goroutine or thread runnable that sleeps in [`Blocker::sleep`].
//!
//! The block contains two words: the sleeper, and the goroutine that polls (0 on a plain thread).
//!
//! Invariant 1: the sleeper is in the block from before `end_poll` until the wake-up. Only the
//! waker that found the state idle reads it.

use super::Task;
use super::block::{self, Class};
use super::body::{TaskBody, WakeBy};
use super::state::{Begin, Turn};
use super::waker;
use crate::sched::g::G;
use crate::sched::wait::reason::WaitReason;
use crate::sched::{current_g, wait};
use std::io;
use std::mem::ManuallyDrop;
use std::task::Waker;

static BODY: TaskBody = TaskBody::without_future(WakeBy::Sleeper, Class::MIN);

/// See the head of the file.
pub(crate) struct Blocker {
    task: &'static Task,
    word: usize,
}

/// Returns where the two words of a blocker are.
fn contents(task: &Task) -> *mut usize {
    block::contents(task).cast()
}

/// Returns the sleeper of a blocker.
///
/// # Safety
/// The task is a blocker that sleeps (invariant 1).
pub(super) unsafe fn sleeper(task: &Task) -> usize {
    // SAFETY: the caller's contract.
    unsafe { contents(task).read() }
}

/// Returns the goroutine of a blocker, or None on a plain thread, and for another task.
///
/// # Safety
/// The blocker exists: it does not end before this returns.
pub(super) unsafe fn goroutine(task: &Task) -> Option<&'static G> {
    if task.body.get().wake_by != WakeBy::Sleeper {
        return None;
    }
    // SAFETY: the caller's contract; 0 or a G, which is never freed.
    unsafe { std::ptr::with_exposed_provenance::<G>(contents(task).add(1).read()).as_ref() }
}

/// How [`Blocker::sleep`] ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Slept {
    /// After a wake-up.
    Woken,
    /// At once: a wake-up came during the poll.
    WasNotified,
}

impl Blocker {
    pub(crate) fn new() -> io::Result<Blocker> {
        let taken = wait::inside(|here| block::take(here, Class::MIN));
        taken.map(|task| {
            task.body.set(&BODY);
            // No runtime ends it (`Sched::close_tasks`).
            task.sched.set(std::ptr::null());
            // SAFETY: this function owns the block, whose body has room for two words.
            unsafe {
                contents(task)
                    .add(1)
                    .write(current_g().map_or(0, |g| std::ptr::from_ref(g).expose_provenance()))
            };
            task.state.begin(Begin::Running);
            Blocker { task, word: waker::word_of(task) }
        })
    }

    pub(crate) fn waker(&self) -> ManuallyDrop<Waker> {
        waker::waker(self.word)
    }

    /// Sleeps until a wake-up, after a poll that returned `Pending`.
    pub(crate) fn sleep(&self) -> Slept {
        let state = &self.task.state;
        let mut notified = false;
        wait::block(WaitReason::Future, |sleeper| {
            // SAFETY: the blocker owns the block, and no waker reads it yet (invariant 1).
            unsafe { contents(self.task).write(sleeper) };
            notified = state.end_poll();
            !notified
        });
        let turn = state.begin_poll();
        debug_assert_eq!(turn, Turn::Poll, "a blocker is never cancelled");
        if notified { Slept::WasNotified } else { Slept::Woken }
    }
}

impl Drop for Blocker {
    fn drop(&mut self) {
        self.task.state.finish();
        wait::inside(|here| block::put(here, self.task));
    }
}
