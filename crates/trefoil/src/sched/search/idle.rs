//! Who sleeps and who looks: the counters behind waking exactly as many threads as there is work.
//!
//! A thread that runs out of work first *spins*: it holds a P and searches. If it finds nothing it
//! gives its P back, stops spinning, and parks. Work can appear at any moment of that. The rule that
//! keeps every wake-up (Dekker's, with one full barrier on each side):
//!
//! ```text
//!   submitter                            the one going to sleep
//!   publish work                         give the P back (`idle_ps` + 1), stop spinning (- 1)
//!   full barrier                         full barrier
//!   idle P and nobody spins? → wake one  look at every queue again → found? take a P and go on
//! ```
//!
//! Whatever the order, at least one of the two sees the other. A submitter may skip the wake-up when
//! someone spins, because that one will itself make the second look. It makes it, too, when it finds work and nobody
//! else spins: if there is more it wakes the next, so one submitter's wake-up grows to as many threads as are needed.
//!
//! Unlike Go, *every* thread looks again after giving its P back, not only one that was spinning. It
//! costs one sweep a sleep and makes Go's `needspinning` flag unnecessary. And Go's last spinner wakes the next without
//! a look: for one goroutine that is woken while all is idle, two threads get up, and it waits for the second wake-up.
//!
//! # Hush
//! A goroutine in `runnext` is an exception: its waker is probably about to park and to run it itself, and a thread
//! that is woken for it comes too late. When searches have found nothing [`SUPPRESSION`] times in a row, nobody is woken for
//! a goroutine that is alone in `runnext`, and it keeps nobody from sleeping. Its owner runs it at the next switch; if
//! that computes instead, sysmon notices and wakes a thread. The first search that finds something ends the hush.
//!
//! Invariants:
//! 1. `spinning` counts threads that hold a P and search, plus wake-ups under way (a claim that is
//!    handed to the woken thread).
//! 2. `idle_ps` is changed under the scheduler's lock only; it is read anywhere.

use crate::shim::{AtomicU32, Ordering, full_fence};

/// Searches in a row that found nothing, after which there is hush.
const SUPPRESSION: u32 = 4;

/// The counters.
pub(crate) struct Idle {
    idle_ps: AtomicU32,
    spinning: AtomicU32,
    /// Searches in a row that found nothing. A hint.
    fruitless: AtomicU32,
}

impl Idle {
    pub(crate) fn new() -> Self {
        Idle {
            idle_ps: AtomicU32::new(0),
            spinning: AtomicU32::new(0),
            fruitless: AtomicU32::new(0),
        }
    }

    /// Submitter, after publishing work and a full barrier. True: the caller holds a claim on one
    /// spinning thread. It must give it to a thread that it wakes, or [`Idle::stop_spinning`].
    #[inline]
    #[must_use]
    pub(crate) fn claim_wake(&self) -> bool {
        // Relaxed: the barriers of the protocol order these.
        self.idle_ps.load(Ordering::Relaxed) != 0
            && self.spinning.load(Ordering::Relaxed) == 0
            && self.claim_slow()
    }

    #[cold]
    fn claim_slow(&self) -> bool {
        self.spinning.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// A thread that holds a P begins to search.
    pub(crate) fn start_spinning(&self) {
        self.spinning.fetch_add(1, Ordering::AcqRel);
    }

    /// A search ends. True: it was the last one, so who found work must look for more.
    pub(crate) fn stop_spinning(&self) -> bool {
        let before = self.spinning.fetch_sub(1, Ordering::AcqRel);
        debug_assert!(before > 0, "spinning below zero");
        before == 1
    }

    /// The barrier between the end of a search (spinning stopped, the P given back if nothing was found) and the
    /// second look.
    pub(crate) fn before_second_look(&self) {
        full_fence();
    }

    /// Under the scheduler's lock: a P became idle.
    pub(crate) fn p_idle(&self) {
        self.idle_ps.fetch_add(1, Ordering::AcqRel);
    }

    /// Under the scheduler's lock: an idle P was taken.
    pub(crate) fn p_taken(&self) {
        let before = self.idle_ps.fetch_sub(1, Ordering::AcqRel);
        debug_assert!(before > 0, "idle Ps below zero");
    }

    /// A search for work elsewhere has ended. True: there is hush from now on, and sysmon has to know.
    #[must_use]
    pub(crate) fn searched(&self, found: bool) -> bool {
        let before = self.fruitless.load(Ordering::Relaxed);
        let now = if found { 0 } else { before + 1 };
        // Threads may overwrite each other's count: it is a hint.
        if now != before && now <= SUPPRESSION {
            self.fruitless.store(now, Ordering::Relaxed);
        }
        now == SUPPRESSION && before != SUPPRESSION
    }

    /// Whether one that is alone in `runnext` is left to its owner.
    #[inline]
    pub(crate) fn is_suppressed(&self) -> bool {
        self.fruitless.load(Ordering::Relaxed) >= SUPPRESSION
    }

    pub(crate) fn idle_ps(&self) -> u32 {
        self.idle_ps.load(Ordering::Relaxed)
    }

    pub(crate) fn spinning(&self) -> u32 {
        self.spinning.load(Ordering::Relaxed)
    }
}
