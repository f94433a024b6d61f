//! Restates trefoil's `sched/wait/mod.rs`, with its claim word and its orderings: waits that
//! several wakers may end, each wait with a number.

pub(crate) mod holder;
#[path = "../../../../trefoil/src/sched/wait/reason.rs"]
pub(crate) mod reason;
pub(crate) mod timers;

use crate::sched::wait::reason::WaitReason;
use crate::sched::{MAX_GOROUTINES, Rt, me};
use crate::shim::{AtomicU64, Ordering, Part, is_broken};
use crate::sys::clock::{NEVER, Nanos};
use loom::sync::{Condvar, Mutex};

const WINNER_BITS: u32 = 16;
const WINNER_MASK: u64 = (1 << WINNER_BITS) - 1;

/// Where a goroutine sleeps.
struct Sleeper {
    claim: AtomicU64,
    woken: Mutex<bool>,
    wake: Condvar,
}

loom::lazy_static! {
    static ref SLEEPERS: Vec<Sleeper> = (0..MAX_GOROUTINES)
        .map(|_| Sleeper {
            claim: AtomicU64::new(0),
            woken: Mutex::new(false),
            wake: Condvar::new(),
        })
        .collect();
    /// Deadlines that are still in the heap, including those of waits that have ended.
    static ref DEADLINES: Mutex<Vec<Waiter>> = Mutex::new(Vec::new());
}

/// Returns the place of a sleeper word: the goroutine's number plus 1, because 0 is no sleeper.
fn slot(sleeper: usize) -> &'static Sleeper {
    &SLEEPERS[sleeper - 1]
}

fn park(rt: Rt) {
    let slot = &SLEEPERS[rt.0];
    let mut woken = slot.woken.lock().expect("a panic ends the model");
    while !*woken {
        woken = slot.wake.wait(woken).expect("a panic ends the model");
    }
    *woken = false;
}

pub(crate) fn wake_here(_: Option<Rt>, sleeper: usize) {
    let slot = slot(sleeper);
    let mut woken = slot.woken.lock().expect("a panic ends the model");
    assert!(!*woken, "woken twice");
    *woken = true;
    slot.wake.notify_one();
}

/// As [`wake_here`], inside the runtime.
pub(crate) fn wake_in(rt: Rt, sleeper: usize) {
    wake_here(Some(rt), sleeper);
}

pub(crate) fn leave(_: Option<Rt>) {}

pub(crate) fn inside<T>(f: impl FnOnce(Option<Rt>) -> T) -> T {
    f(Rt::enter())
}

pub(crate) fn block(reason: WaitReason, store: impl FnOnce(usize) -> bool) {
    block_in(Rt::enter(), reason, store);
}

pub(crate) fn block_in(
    here: Option<Rt>,
    _: WaitReason,
    store: impl FnOnce(usize) -> bool,
) -> Option<Rt> {
    let rt = here.expect("goroutines only");
    if store(rt.0 + 1) {
        park(rt);
    }
    here
}

#[derive(Clone, Copy)]
pub(crate) struct Waiter {
    sleeper: usize,
    number: u64,
}

impl Waiter {
    pub(crate) const TIMED_OUT: u16 = u16::MAX;
    const SOLE: u64 = u64::MAX;

    pub(crate) fn sole(sleeper: usize) -> Waiter {
        Waiter { sleeper, number: Waiter::SOLE }
    }

    pub(crate) fn sleeper(self) -> usize {
        self.sleeper
    }

    pub(crate) fn is_open(self) -> bool {
        self.number == Waiter::SOLE
            || slot(self.sleeper).claim.load(Ordering::Relaxed) == self.number << WINNER_BITS
    }

    #[must_use]
    pub(crate) fn claim(self, winner: u16) -> bool {
        let own = self.sleeper == me() + 1;
        if self.number == Waiter::SOLE || (is_broken(Part::OwnClaim) && own) {
            return true;
        }
        let word = &slot(self.sleeper).claim;
        let open = self.number << WINNER_BITS;
        let won = open | u64::from(winner);
        if is_broken(Part::Claim) {
            word.store(won, Ordering::Release);
            return true;
        }
        word.compare_exchange(open, won, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

pub(crate) fn wait_in(
    here: Option<Rt>,
    _: WaitReason,
    deadline: Nanos,
    register: impl FnOnce(Waiter) -> bool,
) -> (Option<u16>, Option<Rt>) {
    let rt = here.expect("goroutines only");
    let claim = &SLEEPERS[rt.0].claim;
    let before = claim.load(Ordering::Relaxed) >> WINNER_BITS;
    let number = if is_broken(Part::WaitNumber) { 1 } else { before + 1 };
    claim.store(number << WINNER_BITS, Ordering::Release);
    let waiter = Waiter { sleeper: rt.0 + 1, number };
    if !register(waiter) {
        return (None, here);
    }
    if deadline != NEVER {
        DEADLINES.lock().expect("a panic ends the model").push(waiter);
    }
    park(rt);
    let winner = (claim.load(Ordering::Relaxed) & WINNER_MASK) as u16;
    assert!(winner != 0, "woken without a winner");
    (Some(winner), here)
}

/// Returns how many waits with a claim word `goroutine` has begun. It must not be waiting.
pub(crate) fn waits_of(goroutine: usize) -> u64 {
    SLEEPERS[goroutine].claim.load(Ordering::Relaxed) >> WINNER_BITS
}

/// Lets all deadlines that are set now pass.
pub(crate) fn time_passes() {
    let due = std::mem::take(&mut *DEADLINES.lock().expect("a panic ends the model"));
    for waiter in due {
        if waiter.claim(Waiter::TIMED_OUT) {
            wake_here(None, waiter.sleeper());
        }
    }
}
