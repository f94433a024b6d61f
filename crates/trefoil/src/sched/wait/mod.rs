//! The narrow waist: how anything waits, and how it is woken.
//!
//! Two forms, for goroutines and for plain threads alike:
//!
//! - [`block`]: one waker, known to come. The caller becomes a *sleeper*, one word that fits an
//!   atomic; it stores the word where its waker will find it; [`wake_here`] ends the wait, exactly once.
//! - [`wait`]: several may want to end it (the arms of a select, a deadline, a close); the first to
//!   [`claim`](Waiter::claim) the [`Waiter`] wins and wakes it, the others leave it alone.
//!
//! In both the wake-up may come before the sleep. [`block_in`] and [`wait_in`] are the same for
//! callers that are inside the runtime already (and still are when it returns): register under a
//! lock, give the lock back, park, without leaving in between. There `here` is `Rt::enter()`: None
//! on a plain thread.
//!
//! # The claim word
//! | bits | meaning |
//! |---|---|
//! | 63..16 | number of the wait |
//! | 15..0 | `OPEN` (0), or who won: the claimer's choice, or `TIMED_OUT` |
//!
//! It lies in the G, or in a plain thread's [`Bed`]. Neither is ever freed, so a timer or another
//! channel may try to claim a wait that ended long ago: the number differs, and it loses. So who
//! keeps a Waiter may withdraw it after the wait has returned.

#[cfg(feature = "std")]
pub(crate) mod deferred;
mod heap;
pub(crate) mod list;
pub(crate) mod reason;
pub(crate) mod table;
pub(crate) mod timers;

use crate::sched::g::G;
use crate::sched::m::Rt;
use crate::sched::p::flag;
use crate::sched::switch;
use crate::sched::wait::reason::WaitReason;
use crate::sys::clock::{NEVER, Nanos, now};
#[cfg(feature = "std")]
use crate::sys::frame_waiter::FrameWaiter;
use crate::sys::lock::Lock;
use crate::sys::parker::Parker;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bit 0 of a sleeper: a plain thread. (Gs and beds are aligned to at least 4.)
const THREAD: usize = 1;
/// Bit 1 of a sleeper: a thread that sleeps on a word in its frame ([`FrameWaiter`], aligned to 4).
#[cfg(feature = "std")]
const FRAME: usize = 2;
const WINNER_BITS: u32 = 16;
const WINNER_MASK: u64 = (1 << WINNER_BITS) - 1;
const OPEN: u64 = 0;

/// Blocks the caller. `store` puts the sleeper where it will be found and says whether to sleep at
/// all; once it has said yes, someone must wake it ([`wake_here`]). `store` must not run user code.
pub(crate) fn block(reason: WaitReason, store: impl FnOnce(usize) -> bool) {
    leave(block_in(Rt::enter(), reason, store));
}

/// [`block`], inside the runtime.
#[inline]
pub(crate) fn block_in(
    here: Option<Rt>,
    reason: WaitReason,
    store: impl FnOnce(usize) -> bool,
) -> Option<Rt> {
    match here {
        Some(rt) => {
            let sleeper = std::ptr::from_ref(rt.g()) as usize;
            Some(if store(sleeper) { switch::park(rt, reason) } else { rt })
        }
        None => {
            let bed = Bed::of_this_thread();
            if store(bed.sleeper()) {
                bed.sleep();
            }
            None
        }
    }
}

/// Whether the caller may as well look once more before it waits: a plain thread may; a goroutine if nobody else is to
/// run on its P, and who it waits for may be running on another.
pub(crate) fn may_look() -> bool {
    let Some(rt) = Rt::enter() else { return true };
    let (p, sched) = (rt.p(), rt.sched());
    let busy = sched.procs().saturating_sub(sched.idle.idle_ps() + sched.idle.spinning());
    // Its slice is over: it must not be put aside here, where others may count on it.
    let stays = p.flags.load(Ordering::Relaxed) & flag::PREEMPT == 0;
    let may = stays && busy > 1 && p.is_empty();
    rt.leave_without_yield();
    may
}

/// Ends a [`block`], inside the runtime.
#[inline]
pub(crate) fn wake_in(rt: Rt, sleeper: usize) {
    match decode(sleeper) {
        Sleeper::Goroutine(g) => switch::ready(rt, g),
        Sleeper::Thread(bed) => bed.parker.unpark(),
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
        (_, Sleeper::Thread(bed)) => bed.parker.unpark(),
        #[cfg(feature = "std")]
        (_, Sleeper::Frame(waiter)) => waiter.wake(),
    }
}

/// Back to user code, from `Rt::enter()`.
#[inline(always)]
pub(crate) fn leave(here: Option<Rt>) {
    if let Some(rt) = here {
        rt.leave();
    }
}

/// Where a plain thread sleeps, and its claim word. A thread has one for its life; then another
/// thread gets it.
#[repr(align(8))]
struct Bed {
    parker: Parker,
    claim: AtomicU64,
    /// How often the thread has begun, or ended, a wait without a deadline: odd during one.
    waits: AtomicU64,
    /// Next in [`UNUSED`]; under its lock.
    next: Cell<Option<&'static Bed>>,
    /// Next in [`ALL`], for ever.
    next_of_all: Option<&'static Bed>,
}

// SAFETY: `next` is guarded by the lock of `UNUSED`.
unsafe impl Sync for Bed {}

/// Every bed that was ever made.
static ALL: Lock<Option<&'static Bed>> = Lock::new(None);

/// Beds whose threads have ended.
static UNUSED: Lock<Option<&'static Bed>> = Lock::new(None);

/// Gives the bed back when its thread ends.
struct Lease(&'static Bed);

impl Drop for Lease {
    fn drop(&mut self) {
        let mut unused = UNUSED.lock();
        self.0.next.set(unused.take());
        *unused = Some(self.0);
    }
}

thread_local! {
    static BED: Lease = Lease(Bed::get());
}

impl Bed {
    fn get() -> &'static Bed {
        let reused = {
            let mut unused = UNUSED.lock();
            let bed = *unused;
            if let Some(bed) = bed {
                *unused = bed.next.take();
            }
            bed
        };
        reused.unwrap_or_else(|| {
            let bed = Box::leak(Box::new(Bed {
                parker: Parker::new(),
                claim: AtomicU64::new(OPEN),
                waits: AtomicU64::new(0),
                next: Cell::new(None),
                next_of_all: None,
            }));
            let mut all = ALL.lock();
            bed.next_of_all = all.take();
            *all = Some(bed);
            bed
        })
    }

    /// Only on a plain thread: goroutines sleep in their G.
    fn of_this_thread() -> &'static Bed {
        // A destructor of a thread-local that waits, after ours has run: leaks a bed.
        BED.try_with(|lease| lease.0).unwrap_or_else(|_| Bed::get())
    }

    fn sleeper(&'static self) -> usize {
        std::ptr::from_ref(self) as usize | THREAD
    }

    /// Sleeps for as long as it takes.
    fn sleep(&self) {
        self.count_wait();
        self.parker.park();
        self.count_wait();
    }

    /// By its thread, which alone writes it.
    fn count_wait(&self) {
        self.waits.store(self.waits.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Whether its thread sleeps without a deadline and has not been woken. A thread that was woken, and has not run
    /// since, does not count: `unpark` has changed the parker's word.
    fn is_blocked(&self) -> bool {
        self.waits.load(Ordering::Relaxed) % 2 == 1 && self.parker.is_asleep()
    }
}

/// The plain threads that sleep without a deadline and have not been woken: they do nothing until a goroutine, or another
/// thread, wakes them. Two equal answers mean that each of them slept all the time in between.
#[derive(PartialEq, Eq, Default)]
pub(crate) struct BlockedThreads {
    pub(crate) count: usize,
    waits: u64,
}

/// Counts them. Takes a lock; for the deadlock check.
pub(crate) fn blocked_threads() -> BlockedThreads {
    let first = *ALL.lock();
    let mut blocked = BlockedThreads::default();
    for bed in std::iter::successors(first, |bed| bed.next_of_all) {
        // The sum of numbers that only grow: it is the same only if each of them is.
        blocked.waits = blocked.waits.wrapping_add(bed.waits.load(Ordering::Relaxed));
        blocked.count += usize::from(bed.is_blocked());
    }
    blocked
}

enum Sleeper {
    Goroutine(&'static G),
    Thread(&'static Bed),
    #[cfg(feature = "std")]
    Frame(&'static FrameWaiter),
}

/// The sleeper that is a thread on `waiter`. Its frame must outlive the wait (`frame_waiter.rs`, invariant 2).
#[cfg(feature = "std")]
pub(crate) fn frame_sleeper(waiter: &FrameWaiter) -> usize {
    std::ptr::from_ref(waiter) as usize | FRAME
}

#[inline]
fn decode(sleeper: usize) -> Sleeper {
    #[cfg(feature = "std")]
    if sleeper & FRAME != 0 {
        // SAFETY: made by `frame_sleeper`; its frame is there until the wait is over.
        return Sleeper::Frame(unsafe { &*((sleeper & !FRAME) as *const FrameWaiter) });
    }
    // SAFETY: made by `block` or `wait` from a G or a bed; neither is ever freed.
    unsafe {
        if sleeper & THREAD == 0 {
            Sleeper::Goroutine(&*(sleeper as *const G))
        } else {
            Sleeper::Thread(&*((sleeper & !THREAD) as *const Bed))
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
    /// The winner of a wait whose deadline passed. Other winners are smaller and not 0.
    pub(crate) const TIMED_OUT: u16 = u16::MAX;

    /// The number of no wait; see [`Waiter::sole`].
    const SOLE: u64 = u64::MAX;

    /// A sleeper of [`block`] among those of [`wait`]: whoever finds it owns it, so every claim
    /// succeeds.
    #[inline]
    pub(crate) fn sole(sleeper: usize) -> Waiter {
        Waiter { sleeper, number: Waiter::SOLE }
    }

    /// Whether it is one of those.
    #[inline]
    pub(crate) fn is_sole(self) -> bool {
        self.number == Waiter::SOLE
    }

    /// Who sleeps: what [`wake_here`] wants.
    #[inline]
    pub(crate) fn sleeper(self) -> usize {
        self.sleeper
    }

    #[inline]
    fn word(self) -> &'static AtomicU64 {
        match decode(self.sleeper) {
            Sleeper::Goroutine(g) => &g.claim,
            Sleeper::Thread(bed) => &bed.claim,
            #[cfg(feature = "std")]
            Sleeper::Frame(_) => crate::sched::fatal(format_args!(
                "a sleeper in a frame has no claim word: a bug in trefoil"
            )),
        }
    }

    /// Tries to be the one that ends the wait. On success the caller must wake it ([`wake_here`]),
    /// after it has left whatever the sleeper is to find.
    #[inline]
    #[must_use]
    pub(crate) fn claim(self, winner: u16) -> bool {
        debug_assert!(winner != 0);
        if self.number == Waiter::SOLE {
            return true;
        }
        let open = self.number << WINNER_BITS;
        // AcqRel: the sleeper's preparations are visible to the winner, and losers see that it is
        // lost.
        // The winner's gifts are published by the wake.
        self.word()
            .compare_exchange(open, open | u64::from(winner), Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }

    /// Whether its runtime was dropped: it will not run again, and what it is given is lost. For who
    /// has it in a list, where it is alive.
    pub(crate) fn is_abandoned(self) -> bool {
        match decode(self.sleeper) {
            // SAFETY: a goroutine that is alive keeps its runtime (`Sched::start`).
            Sleeper::Goroutine(g) => unsafe { (*g.sched.get()).has_abandoned(g) },
            _ => false,
        }
    }

    /// For a waiter that the caller has taken: see [`Sched::promise_run`](crate::sched::Sched::promise_run).
    #[cfg(feature = "std")]
    pub(crate) fn promise_run(self) -> bool {
        match decode(self.sleeper) {
            // SAFETY: a goroutine that is alive keeps its runtime (`Sched::start`).
            Sleeper::Goroutine(g) => unsafe { (*g.sched.get()).promise_run(g) },
            _ => true,
        }
    }

    /// Whether nobody has claimed it yet (and it is still this wait).
    pub(crate) fn is_open(self) -> bool {
        self.number == Waiter::SOLE
            || self.word().load(Ordering::Relaxed) == self.number << WINNER_BITS
    }

    /// Ends the wait, by the winner, once.
    #[inline]
    pub(crate) fn wake_in(self, rt: Rt) {
        wake_in(rt, self.sleeper);
    }
}

/// A new wait of the sleeper whose claim word this is.
#[inline]
fn open(claim: &AtomicU64, sleeper: usize) -> Waiter {
    let number = (claim.load(Ordering::Relaxed) >> WINNER_BITS) + 1;
    // Release: `register` publishes the waiter; a claim must find this number.
    claim.store(number << WINNER_BITS, Ordering::Release);
    Waiter { sleeper, number }
}

/// Blocks the caller until someone claims and wakes the [`Waiter`], or until `deadline`. `register`
/// puts the waiter where it can be found and says whether to sleep; it must not run user code.
/// Returns the winner; None if `register` said no (then nobody else may have claimed it).
///
/// The caller must then withdraw the waiter from wherever it still is.
pub(crate) fn wait(
    reason: WaitReason,
    deadline: Nanos,
    register: impl FnOnce(Waiter) -> bool,
) -> Option<u16> {
    let (winner, here) = wait_in(Rt::enter(), reason, deadline, register);
    leave(here);
    winner
}

/// [`wait`], inside the runtime.
#[inline]
pub(crate) fn wait_in(
    here: Option<Rt>,
    reason: WaitReason,
    deadline: Nanos,
    register: impl FnOnce(Waiter) -> bool,
) -> (Option<u16>, Option<Rt>) {
    let Some(rt) = here else {
        return (wait_on_thread(deadline, register), None);
    };
    let g = rt.g();
    let waiter = open(&g.claim, std::ptr::from_ref(g) as usize);
    if !register(waiter) {
        return (None, here);
    }
    let timers = (deadline != NEVER).then(|| {
        rt.sched().set_wait_timer(rt, deadline, waiter);
        &rt.p().timers
    });
    let rt = switch::park(rt, reason);
    let winner = (g.claim.load(Ordering::Relaxed) & WINNER_MASK) as u16;
    if let Some(timers) = timers
        && winner != Waiter::TIMED_OUT
    {
        timers.one_stale();
    }
    (Some(winner), Some(rt))
}

fn wait_on_thread(deadline: Nanos, register: impl FnOnce(Waiter) -> bool) -> Option<u16> {
    let bed = Bed::of_this_thread();
    let waiter = open(&bed.claim, bed.sleeper());
    if !register(waiter) {
        return None;
    }
    if deadline == NEVER {
        bed.sleep();
    } else {
        while !bed.parker.park_until(deadline) {
            if now() >= deadline {
                // Too late to time out if someone has claimed us: then the wake-up is on its way.
                if !waiter.claim(Waiter::TIMED_OUT) {
                    bed.parker.park();
                }
                break;
            }
        }
    }
    Some((bed.claim.load(Ordering::Acquire) & WINNER_MASK) as u16)
}
