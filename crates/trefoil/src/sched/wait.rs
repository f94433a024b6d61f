//! The narrow waist: how anything waits, and how it is woken.
//!
//! Two forms, for goroutines and for plain threads alike:
//!
//! - [`block`]: one waker, known to come. The caller becomes a *sleeper*, one word that fits an atomic;
//!   it stores the word where its waker will find it; [`wake`] ends the wait, exactly once.
//! - [`wait`]: several may want to end it (the arms of a select, a deadline, a close); the first to
//!   [`claim`](Waiter::claim) the [`Waiter`] wins and wakes it, the others leave it alone.
//!
//! In both the wake-up may come before the sleep.
//!
//! # The claim word
//! | bits | meaning |
//! |---|---|
//! | 63..16 | number of the wait |
//! | 15..0 | `OPEN` (0), or who won: the claimer's choice, or `TIMED_OUT` |
//!
//! It lies in the G (never freed), so that a timer may try to claim a wait that ended long ago: the
//! number differs, and it loses. For a plain thread it lies in the frame of [`wait`]: who keeps a
//! thread's Waiter must be done with it before the wait returns (channels unlink it under their lock).

use super::g::G;
use super::m::Rt;
use super::reason::WaitReason;
use super::switch;
use crate::sys::clock::{NEVER, Nanos, now};
use crate::sys::parker::Parker;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Bit 0 of a sleeper: a plain thread. (Gs and beds are aligned to at least 4.)
const THREAD: usize = 1;
const WINNER_BITS: u32 = 16;
const WINNER_MASK: u64 = (1 << WINNER_BITS) - 1;
const OPEN: u64 = 0;

/// Blocks the caller. `store` puts the sleeper where it will be found and says whether to sleep at all;
/// once it has said yes, someone must [`wake`] it. `store` must not run user code.
pub(crate) fn block(reason: WaitReason, store: impl FnOnce(usize) -> bool) {
    match Rt::enter() {
        Some(rt) => {
            let sleeper = std::ptr::from_ref(rt.g()) as usize;
            let rt = if store(sleeper) { switch::park(rt, reason) } else { rt };
            rt.leave();
        }
        None => {
            let bed = Bed::new();
            if store(&raw const bed as usize | THREAD) {
                bed.sleep();
            }
        }
    }
}

/// Ends a [`block`].
pub(crate) fn wake(sleeper: usize) {
    match Rt::enter() {
        Some(rt) => {
            wake_in(rt, sleeper);
            rt.leave();
        }
        None => match decode(sleeper) {
            Sleeper::Goroutine(g) => switch::ready_outside(g),
            Sleeper::Thread(bed) => bed.parker.unpark(),
        },
    }
}

/// [`wake`], inside the runtime.
#[inline]
pub(crate) fn wake_in(rt: Rt, sleeper: usize) {
    match decode(sleeper) {
        Sleeper::Goroutine(g) => switch::ready(rt, g),
        Sleeper::Thread(bed) => bed.parker.unpark(),
    }
}

/// Where a plain thread sleeps: in the frame of `block` or `wait`.
#[repr(align(8))]
struct Bed {
    parker: Parker,
    claim: AtomicU64,
}

impl Bed {
    fn new() -> Self {
        Bed { parker: Parker::new(), claim: AtomicU64::new(OPEN) }
    }

    /// Sleeps for as long as it takes.
    fn sleep(&self) {
        BLOCKED.fetch_add(1, Ordering::Relaxed);
        self.parker.park();
        BLOCKED.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Plain threads that sleep here without a deadline: they will do nothing unless they are woken.
static BLOCKED: AtomicUsize = AtomicUsize::new(0);

/// How many plain threads wait for a goroutine (or another such thread) and for nothing else.
pub(crate) fn blocked_threads() -> usize {
    BLOCKED.load(Ordering::Relaxed)
}

enum Sleeper<'a> {
    Goroutine(&'static G),
    Thread(&'a Bed),
}

#[inline]
fn decode<'a>(sleeper: usize) -> Sleeper<'a> {
    // SAFETY: made by `block` or `wait`; the sleeper's frame lives until we have woken it, once.
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

    fn word<'a>(self) -> &'a AtomicU64 {
        match decode(self.sleeper) {
            Sleeper::Goroutine(g) => &g.claim,
            Sleeper::Thread(bed) => &bed.claim,
        }
    }

    /// Tries to be the one that ends the wait. On success the caller must [`Waiter::wake`] it, after it
    /// has left whatever the sleeper is to find.
    #[inline]
    #[must_use]
    pub(crate) fn claim(self, winner: u16) -> bool {
        debug_assert!(winner != 0);
        let open = self.number << WINNER_BITS;
        // AcqRel: the sleeper's preparations are visible to the winner, and losers see that it is lost.
        // The winner's gifts are published by the wake.
        self.word()
            .compare_exchange(open, open | u64::from(winner), Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }

    /// Whether nobody has claimed it yet (and it is still this wait).
    pub(crate) fn is_open(self) -> bool {
        self.word().load(Ordering::Relaxed) == self.number << WINNER_BITS
    }

    /// Ends the wait, by the winner, once.
    pub(crate) fn wake(self) {
        wake(self.sleeper);
    }

    /// [`Waiter::wake`], inside the runtime.
    #[inline]
    pub(crate) fn wake_in(self, rt: Rt) {
        wake_in(rt, self.sleeper);
    }
}

/// Blocks the caller until someone claims and wakes the [`Waiter`], or until `deadline`. `register` puts
/// the waiter where it can be found and says whether to sleep; it must not run user code. Returns the
/// winner; None if `register` said no.
///
/// The caller must then withdraw the waiter from wherever it still is.
pub(crate) fn wait(
    reason: WaitReason,
    deadline: Nanos,
    register: impl FnOnce(Waiter) -> bool,
) -> Option<u16> {
    match Rt::enter() {
        Some(rt) => {
            let g = rt.g();
            let number = (g.claim.load(Ordering::Relaxed) >> WINNER_BITS) + 1;
            // Release: `register` publishes the waiter; a claim must find this number.
            g.claim.store(number << WINNER_BITS, Ordering::Release);
            let waiter = Waiter { sleeper: std::ptr::from_ref(g) as usize, number };
            if !register(waiter) {
                rt.leave();
                return None;
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
            rt.leave();
            Some(winner)
        }
        None => {
            let bed = Bed::new();
            let waiter = Waiter { sleeper: &raw const bed as usize | THREAD, number: 0 };
            if !register(waiter) {
                return None;
            }
            if deadline == NEVER {
                bed.sleep();
                return Some((bed.claim.load(Ordering::Acquire) & WINNER_MASK) as u16);
            }
            while !bed.parker.park_until(deadline) {
                if now() >= deadline {
                    // Too late to time out if someone has claimed us: then the wake-up is on its way.
                    if !waiter.claim(Waiter::TIMED_OUT) {
                        bed.parker.park();
                    }
                    break;
                }
            }
            Some((bed.claim.load(Ordering::Acquire) & WINNER_MASK) as u16)
        }
    }
}
