//! Waiting: how goroutines and plain threads wait, and how they are woken.
//!
//! Everything that waits goes through one of two functions, on goroutines and plain threads alike:
//!
//! - [`block`]: there is exactly one waker. The caller becomes a *sleeper*, one word that fits into
//!   an atomic. It stores the word where its waker finds it, and the waker ends the wait with
//!   [`wake_here`], exactly once.
//! - [`wait`]: several parties may end it (the arms of a select, a deadline, a close). The first
//!   one to [`claim`](Waiter::claim) the [`Waiter`] wins and wakes it. The others must not touch
//!   it.
//!
//! In both the wake-up may come before the sleep.
//!
//! [`block_in`] and [`wait_in`] are for a caller that is inside the runtime already, and still is
//! when they return: it registers under a lock, unlocks and parks without leaving the runtime in
//! between. Their parameter `here` is the result of the caller's `Rt::enter()`: None on a plain
//! thread.
//!
//! | file | job |
//! |---|---|
//! | `mod.rs` | `block` and `wait`, sleepers and waiters |
//! | `thread_waiter.rs` | where a plain thread waits |
//! | `list.rs` | lists of waiters: locks, semaphores, descriptors |
//! | `task_node.rs` | the wait of a task in such a list |
//! | `table.rs` | lists of waiters found by address: locks of one word, futexes |
//! | `deferred.rs` | wake-ups that a signal handler leaves to a helper thread |
//! | `timers.rs`, `heap.rs` | a P's timers |
//! | `reason.rs` | why a goroutine waits, for dumps and traces |
//! | `holder.rs` | what it waits for, and who holds that, for the wait-for graph |
//!
//! # The claim word
//! | bits | meaning |
//! |---|---|
//! | 63..16 | number of the wait |
//! | 15..0 | `OPEN` (0), or the winner: a number that the claimer chose, or `TIMED_OUT` |
//!
//! It is in the G, or in a plain thread's [`ThreadWaiter`]. Neither is ever freed, so a timer or a
//! channel may try to claim a wait that ended long ago: the number differs, and the claim fails. So
//! the party that registered a [`Waiter`] may withdraw it after the wait has returned.

#[cfg(feature = "std")]
pub(crate) mod deferred;
mod heap;
pub(crate) mod holder;
pub(crate) mod list;
pub(crate) mod reason;
pub(crate) mod table;
pub(crate) mod task_node;
pub(crate) mod thread_waiter;
pub(crate) mod timers;

use crate::sched::g::G;
use crate::sched::goroutine::join::TASK_SLEEPER;
use crate::sched::m::Rt;
use crate::sched::p::flag;
use crate::sched::switch;
use crate::sched::task::waker;
use crate::sched::wait::reason::WaitReason;
use crate::sched::wait::thread_waiter::ThreadWaiter;
use crate::sys::clock::{NEVER, Nanos, now};
#[cfg(feature = "std")]
use crate::sys::frame_waiter::FrameWaiter;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bit 0 of a sleeper: a [`ThreadWaiter`]. (Gs and ThreadWaiters are aligned to at least 4.)
const THREAD: usize = 1;
/// Bit 1 of a sleeper: a thread that sleeps on a word in its frame ([`FrameWaiter`], aligned to 4).
#[cfg(feature = "std")]
const FRAME: usize = 2;
/// The lower part of a claim word: the winner.
const WINNER_BITS: u32 = 16;
const WINNER_MASK: u64 = (1 << WINNER_BITS) - 1;
/// No party has claimed the wait.
const OPEN: u64 = 0;

/// Blocks the caller. `store` puts the sleeper where its waker finds it, and returns whether to
/// sleep. If it returns true, the waker must wake the sleeper ([`wake_here`]). `store` must not run
/// user code.
pub(crate) fn block(reason: WaitReason, store: impl FnOnce(usize) -> bool) {
    leave(block_in(Rt::enter(), reason, store));
}

/// As [`block`], inside the runtime.
#[inline]
pub(crate) fn block_in(
    here: Option<Rt>,
    reason: WaitReason,
    store: impl FnOnce(usize) -> bool,
) -> Option<Rt> {
    let sleeper = sleeper_of(here);
    if !store(sleeper) {
        return here;
    }
    match here {
        Some(rt) => Some(switch::park(rt, reason)),
        None => {
            sleep_on_thread(sleeper);
            None
        }
    }
}

/// Returns the sleeper word of the caller.
#[inline]
fn sleeper_of(here: Option<Rt>) -> usize {
    match here {
        Some(rt) => std::ptr::from_ref(rt.g()) as usize,
        None => thread_sleeper(ThreadWaiter::of_this_thread()),
    }
}

/// Sleeps on a plain thread, whose sleeper word is `sleeper`, until the waker comes.
fn sleep_on_thread(sleeper: usize) {
    if let Sleeper::Thread(waiter) = decode(sleeper) {
        waiter.sleep();
    }
}

/// Returns whether the caller may spin before it waits. A plain thread may. A goroutine may if its
/// P has no other goroutine to run, and the goroutine that will end the wait may be running on
/// another P.
pub(crate) fn may_spin() -> bool {
    let Some(rt) = Rt::enter() else { return true };
    let (p, sched) = (rt.p(), rt.sched());
    let busy = sched.procs().saturating_sub(sched.idle.idle_ps() + sched.idle.spinning());
    // A goroutine whose slice has expired waits at once. `leave_without_yield` does not preempt it
    // here, where it may be in the middle of an operation that other goroutines wait for.
    let in_slice = p.flags.load(Ordering::Relaxed) & flag::PREEMPT == 0;
    let may_spin = in_slice && busy > 1 && p.is_empty();
    rt.leave_without_yield();
    may_spin
}

/// Ends a [`block`], inside the runtime.
#[inline]
pub(crate) fn wake_in(rt: Rt, sleeper: usize) {
    match decode(sleeper) {
        Sleeper::Goroutine(g) => switch::ready(rt, g),
        Sleeper::Thread(waiter) => waiter.parker.unpark(),
        Sleeper::Task(word) => waker::wake(Some(rt), word),
        #[cfg(feature = "std")]
        Sleeper::Frame(waiter) => waiter.wake(),
    }
}

/// Ends a [`block`], inside the runtime or on a plain thread.
#[inline]
pub(crate) fn wake_here(here: Option<Rt>, sleeper: usize) {
    match (here, decode(sleeper)) {
        (Some(rt), Sleeper::Goroutine(g)) => switch::ready(rt, g),
        (None, Sleeper::Goroutine(g)) => switch::ready_outside(g),
        (_, Sleeper::Thread(waiter)) => waiter.parker.unpark(),
        (_, Sleeper::Task(word)) => waker::wake(here, word),
        #[cfg(feature = "std")]
        (_, Sleeper::Frame(waiter)) => waiter.wake(),
    }
}

/// Leaves the runtime if `here`, the result of `Rt::enter()`, says that the caller is inside it.
#[inline(always)]
pub(crate) fn leave(here: Option<Rt>) {
    if let Some(rt) = here {
        rt.leave();
    }
}

/// Calls `f` inside the runtime, and leaves the runtime again. On a plain thread `f` gets None.
#[inline]
pub(crate) fn inside<T>(f: impl FnOnce(Option<Rt>) -> T) -> T {
    let here = Rt::enter();
    let value = f(here);
    leave(here);
    value
}

/// A decoded sleeper word.
enum Sleeper {
    Goroutine(&'static G),
    Thread(&'static ThreadWaiter),
    /// A task, which polls again when it is woken (`task/waker.rs`).
    Task(usize),
    #[cfg(feature = "std")]
    Frame(&'static FrameWaiter),
}

/// Returns the sleeper word of a thread that sleeps on `waiter`. The frame must outlive the wait
/// (`frame_waiter.rs`, invariant 2).
#[cfg(feature = "std")]
pub(crate) fn frame_sleeper(waiter: &FrameWaiter) -> usize {
    std::ptr::from_ref(waiter) as usize | FRAME
}

/// Returns the sleeper word of a plain thread.
fn thread_sleeper(waiter: &'static ThreadWaiter) -> usize {
    std::ptr::from_ref(waiter) as usize | THREAD
}

/// Returns what a sleeper word stands for.
#[inline]
fn decode(sleeper: usize) -> Sleeper {
    if sleeper & TASK_SLEEPER == TASK_SLEEPER {
        return Sleeper::Task(sleeper);
    }
    #[cfg(feature = "std")]
    if sleeper & FRAME != 0 {
        // SAFETY: made by `frame_sleeper`. The sleeping thread owns the frame, and keeps it until
        // its waker has woken it.
        return Sleeper::Frame(unsafe { &*((sleeper & !FRAME) as *const FrameWaiter) });
    }
    // SAFETY: made by `block` or `wait` from a G or a ThreadWaiter; neither is ever freed.
    unsafe {
        if sleeper & THREAD == 0 {
            Sleeper::Goroutine(&*(sleeper as *const G))
        } else {
            Sleeper::Thread(&*((sleeper & !THREAD) as *const ThreadWaiter))
        }
    }
}

/// One wait that several parties may try to end.
#[derive(Clone, Copy)]
pub(crate) struct Waiter {
    sleeper: usize,
    number: u64,
}

impl Waiter {
    /// The winner of a wait whose deadline passed. Other winners are smaller, and not 0.
    pub(crate) const TIMED_OUT: u16 = u16::MAX;

    /// A number that no wait has; see [`Waiter::sole`].
    const SOLE: u64 = u64::MAX;

    /// Makes a Waiter from a sleeper of [`block`], for lists that also contain Waiters of [`wait`].
    /// The party that takes it from the list is its only waker, so every claim succeeds.
    #[inline]
    pub(crate) fn sole(sleeper: usize) -> Waiter {
        Waiter { sleeper, number: Waiter::SOLE }
    }

    /// Returns whether this waiter was made by [`Waiter::sole`].
    #[inline]
    pub(crate) fn is_sole(self) -> bool {
        self.number == Waiter::SOLE
    }

    /// Returns the sleeper, for [`wake_here`].
    #[inline]
    pub(crate) fn sleeper(self) -> usize {
        self.sleeper
    }

    /// Returns the sleeper, if it is a goroutine.
    pub(crate) fn goroutine(self) -> Option<&'static G> {
        match decode(self.sleeper) {
            Sleeper::Goroutine(g) => Some(g),
            _ => None,
        }
    }

    /// Returns the claim word.
    #[inline]
    fn word(self) -> &'static AtomicU64 {
        match decode(self.sleeper) {
            Sleeper::Goroutine(g) => &g.claim,
            Sleeper::Thread(waiter) => &waiter.claim,
            #[cfg(feature = "std")]
            Sleeper::Frame(_) => no_claim_word(),
            Sleeper::Task(_) => no_claim_word(),
        }
    }

    /// Tries to win the right to end the wait. Returns true on success: then the caller must store
    /// what the sleeper is to find, and wake it ([`wake_here`]).
    #[inline]
    #[must_use]
    pub(crate) fn claim(self, winner: u16) -> bool {
        debug_assert!(winner != 0);
        if self.number == Waiter::SOLE {
            return true;
        }
        let open = self.number << WINNER_BITS;
        // Acquire: the winner sees what the sleeper prepared. Release: a later operation on the
        // word sees what the winner did before. What the winner stores for the sleeper after the
        // claim is published by the wake-up.
        self.word()
            .compare_exchange(open, open | u64::from(winner), Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }

    /// Returns whether the sleeper is a goroutine, maybe in `block_on`, that its runtime will never
    /// resume: what a waker hands to it would be lost. Only for a waiter in a list whose lock the
    /// caller holds, where the goroutine is alive.
    pub(crate) fn is_orphaned(self) -> bool {
        match decode(self.sleeper) {
            // SAFETY: a goroutine that is alive keeps its runtime (`Sched::start`).
            Sleeper::Goroutine(g) => unsafe { (*g.sched.get()).has_orphaned(g) },
            Sleeper::Task(word) => waker::blocked_goroutine(word)
                // SAFETY: as above; the goroutine is in `block_on` or in a select. Nothing keeps it
                // there: this thread would have to stand still here until the goroutine has ended
                // and its runtime was freed.
                .is_some_and(|g| unsafe { (*g.sched.get()).has_orphaned(g) }),
            _ => false,
        }
    }

    /// Promises the sleeper, which the caller has taken from a list, that it runs: see
    /// [`Sched::promise_run`](crate::sched::Sched::promise_run). Always returns true for a thread.
    #[cfg(feature = "std")]
    pub(crate) fn promise_run(self) -> bool {
        match decode(self.sleeper) {
            // SAFETY: a goroutine that is alive keeps its runtime (`Sched::start`).
            Sleeper::Goroutine(g) => unsafe { (*g.sched.get()).promise_run(g) },
            _ => true,
        }
    }

    /// Returns whether this wait is not over and no party has claimed it.
    pub(crate) fn is_open(self) -> bool {
        self.number == Waiter::SOLE
            || self.word().load(Ordering::Relaxed) == self.number << WINNER_BITS
    }

    /// Ends the wait. Only the winner calls it, once.
    #[inline]
    pub(crate) fn wake_in(self, rt: Rt) {
        wake_in(rt, self.sleeper);
    }
}

/// Sleepers in a frame, and tasks, have only one waker: [`Waiter::sole`].
#[cold]
fn no_claim_word() -> ! {
    crate::sched::fatal(format_args!("this sleeper has no claim word: a bug in trefoil"))
}

/// Begins a new wait of the caller.
#[inline]
fn open_wait(here: Option<Rt>) -> Waiter {
    let (claim, sleeper) = match here {
        Some(rt) => (&rt.g().claim, std::ptr::from_ref(rt.g()) as usize),
        None => {
            let thread = ThreadWaiter::of_this_thread();
            (&thread.claim, thread_sleeper(thread))
        }
    };
    let number = (claim.load(Ordering::Relaxed) >> WINNER_BITS) + 1;
    // Release: `register` publishes the waiter, and a claim through it must find this number.
    claim.store(number << WINNER_BITS, Ordering::Release);
    Waiter { sleeper, number }
}

/// Blocks the caller until another party claims and wakes the [`Waiter`], or until `deadline`.
/// `register` puts the waiter where the wakers find it, and returns whether to sleep. It must not
/// run user code.
///
/// Returns the winner, or None if `register` returned false. `register` may return false only if no
/// other party has claimed the waiter. After the wait the caller must withdraw the waiter from
/// every list that still contains it.
pub(crate) fn wait(
    reason: WaitReason,
    deadline: Nanos,
    register: impl FnOnce(Waiter) -> bool,
) -> Option<u16> {
    let (winner, here) = wait_in(Rt::enter(), reason, deadline, register);
    leave(here);
    winner
}

/// As [`wait`], inside the runtime.
#[inline]
pub(crate) fn wait_in(
    here: Option<Rt>,
    reason: WaitReason,
    deadline: Nanos,
    register: impl FnOnce(Waiter) -> bool,
) -> (Option<u16>, Option<Rt>) {
    let waiter = open_wait(here);
    if !register(waiter) {
        return (None, here);
    }
    let (winner, here) = park_waiter(here, waiter, reason, deadline);
    (Some(winner), here)
}

/// Parks the caller until its registered waiter is claimed and woken. Returns the winner.
#[inline]
fn park_waiter(
    here: Option<Rt>,
    waiter: Waiter,
    reason: WaitReason,
    deadline: Nanos,
) -> (u16, Option<Rt>) {
    let Some(rt) = here else {
        return (wait_on_thread(waiter, deadline), None);
    };
    let g = rt.g();
    let timers = (deadline != NEVER).then(|| {
        rt.sched().set_wait_timer(rt, deadline, waiter);
        &rt.p().timers
    });
    let rt = switch::park(rt, reason);
    let winner = (g.claim.load(Ordering::Relaxed) & WINNER_MASK) as u16;
    if let Some(timers) = timers
        && winner != Waiter::TIMED_OUT
    {
        timers.count_stale();
    }
    (winner, Some(rt))
}

/// [`park_waiter`] on a plain thread.
fn wait_on_thread(waiter: Waiter, deadline: Nanos) -> u16 {
    let Sleeper::Thread(thread) = decode(waiter.sleeper) else { no_claim_word() };
    if deadline == NEVER {
        thread.sleep();
    } else {
        while !thread.parker.park_until(deadline) {
            if now() >= deadline {
                // If another party has claimed the wait, its wake-up will come.
                if !waiter.claim(Waiter::TIMED_OUT) {
                    thread.parker.park();
                }
                break;
            }
        }
    }
    // Acquire: pairs with the Release in the winner's `claim`.
    (thread.claim.load(Ordering::Acquire) & WINNER_MASK) as u16
}
