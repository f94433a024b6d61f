//! The counters by which as many Ms are woken as there is work for.
//!
//! An M that runs out of work first *spins*: it owns a P and searches. If it finds nothing it gives
//! its P back, stops spinning, and parks. Work may be published at any moment of that. The rule by
//! which no wake-up is lost is Dekker's, with one full barrier on each side. The *submitter* is the
//! thread that publishes work:
//!
//! ```text
//!   submitter                                M that goes to sleep
//!   publish work                             give the P back (`idle_ps` + 1), stop spinning (- 1)
//!   full barrier                             full barrier
//!   a P is idle and no M spins? wake an M    check every queue again; work? take a P and continue
//! ```
//!
//! In every interleaving at least one of the two sees the other. A submitter may skip the wake-up
//! if an M spins, because that M will make the second check. The last spinning M makes the second
//! check also when it finds work: if there is more work, it wakes the next M. So one wake-up leads
//! to as many Ms as are needed.
//!
//! Unlike Go, *every* M checks again after it has given its P back, not only one that was spinning.
//! That takes one scan of the queues per sleep and makes Go's `needspinning` flag unnecessary. And
//! Go's last spinning M wakes the next M without a check: for one goroutine that is woken while all
//! Ps are idle, two threads wake up, and the goroutine waits for the system call of the second
//! wake-up.
//!
//! # Wake-up suppression
//! A goroutine in `runnext` is an exception: its waker will probably park in a moment and run it
//! itself, and an M that is woken for it comes too late. After [`SUPPRESS_AFTER`] searches in a row
//! that found nothing, wake-ups are suppressed: no M is woken for a goroutine that is alone in
//! `runnext`, and such a goroutine does not keep an M from parking. The P's owner runs it at the
//! next switch. If the running goroutine computes instead, sysmon notices and wakes an M. The first
//! search that finds something ends the suppression.
//!
//! # How long an M spins
//! An M that runs out of work may spin for a while: waking a thread takes 6 to 18 µs, and the next
//! goroutine often arrives sooner. On a machine that is mostly idle it does not, and then spinning
//! is most of the CPU time that the runtime uses. So a *spin level* records whether spinning has
//! paid lately. It rises by [`LEVELS_PER_SUCCESS`] if an M finds work while it spins, and also if
//! work arrives within [`SPIN_NANOS`] after an M went to sleep, because then a spin would have
//! found it. So the level recovers from zero within a few wake-ups. It falls by one if an M spins
//! in vain. At level 0 an M goes to sleep at once if no queue holds anything.
//!
//! Timers do not count: their times are known, so no M has to guess (`find::spin`).
//!
//! Invariants:
//! 1. `spinning` counts Ms that own a P and search, plus claims: wake-ups in progress, each of
//!    which passes to the M that is woken.
//! 2. `idle_ps` is changed only under the scheduler's lock, and read anywhere.

use crate::shim::{AtomicU32, Ordering, full_fence};

/// The longest time for which an M without work spins before it gives up its P.
pub(crate) const SPIN_NANOS: u64 = 25_000;
/// For how long an M spins at each spin level.
const LEVEL_NANOS: [u64; 5] = [0, SPIN_NANOS / 8, SPIN_NANOS / 4, SPIN_NANOS / 2, SPIN_NANOS];
const MAX_LEVEL: u32 = LEVEL_NANOS.len() as u32 - 1;
/// Two, so that an M spins if that pays once in three times: the latency of a wake-up counts more
/// than the CPU time of a spin.
const LEVELS_PER_SUCCESS: u32 = 2;

/// Searches in a row that found nothing, after which wake-ups are suppressed.
const SUPPRESS_AFTER: u32 = 4;

/// The counters; see the head of the file.
pub(crate) struct Idle {
    idle_ps: AtomicU32,
    spinning: AtomicU32,
    /// Searches in a row that found nothing, up to [`SUPPRESS_AFTER`]. A hint: threads may
    /// overwrite each other's count.
    failed_searches: AtomicU32,
    /// An index into [`LEVEL_NANOS`]. A hint, too.
    spin_level: AtomicU32,
    /// How many times an idle P was taken, modulo 2³². Written under the scheduler's lock.
    ps_taken: AtomicU32,
}

impl Idle {
    pub(crate) fn new() -> Self {
        Idle {
            idle_ps: AtomicU32::new(0),
            spinning: AtomicU32::new(0),
            failed_searches: AtomicU32::new(0),
            spin_level: AtomicU32::new(MAX_LEVEL),
            ps_taken: AtomicU32::new(0),
        }
    }

    /// Submitter, after publishing work and a full barrier: returns true if an M must be woken.
    /// Then the caller has made a claim on spinning. It must pass the claim to the M that it wakes,
    /// or return the claim by [`Idle::stop_spinning`].
    #[inline]
    #[must_use]
    pub(crate) fn claim_wake(&self) -> bool {
        // Relaxed: the barriers of the protocol order these loads.
        self.idle_ps.load(Ordering::Relaxed) != 0
            && self.spinning.load(Ordering::Relaxed) == 0
            && self.claim_slow()
    }

    #[cold]
    fn claim_slow(&self) -> bool {
        self.spinning.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Counts an M that owns a P and begins to search.
    pub(crate) fn start_spinning(&self) {
        self.spinning.fetch_add(1, Ordering::AcqRel);
    }

    /// Uncounts an M whose search ends, or returns a claim. Returns true if no other M spins: an M
    /// that has found work must then check for more.
    pub(crate) fn stop_spinning(&self) -> bool {
        let before = self.spinning.fetch_sub(1, Ordering::AcqRel);
        debug_assert!(before > 0, "spinning must not fall below zero");
        before == 1
    }

    /// The barrier between the end of a search (spinning stopped; the P given back if nothing was
    /// found) and the second check of the queues.
    pub(crate) fn before_recheck(&self) {
        full_fence();
    }

    /// Under the scheduler's lock: counts a P that became idle.
    pub(crate) fn p_idle(&self) {
        self.idle_ps.fetch_add(1, Ordering::AcqRel);
    }

    /// Under the scheduler's lock: uncounts an idle P that was taken.
    pub(crate) fn p_taken(&self) {
        let before = self.idle_ps.fetch_sub(1, Ordering::AcqRel);
        debug_assert!(before > 0, "the number of idle Ps must not fall below zero");
        let taken = self.ps_taken.load(Ordering::Relaxed);
        self.ps_taken.store(taken.wrapping_add(1), Ordering::Relaxed);
    }

    /// Returns how many times an idle P was taken, modulo 2³².
    pub(crate) fn ps_taken(&self) -> u32 {
        self.ps_taken.load(Ordering::Relaxed)
    }

    /// Returns for how long an M spins now, at most [`SPIN_NANOS`].
    pub(crate) fn spin_nanos(&self) -> u64 {
        LEVEL_NANOS[self.spin_level.load(Ordering::Relaxed) as usize]
    }

    /// Raises the spin level: an M found work while it spun, or would have found work if it had
    /// spun longer.
    pub(crate) fn spin_paid(&self) {
        let level = self.spin_level.load(Ordering::Relaxed);
        if level < MAX_LEVEL {
            self.spin_level.store((level + LEVELS_PER_SUCCESS).min(MAX_LEVEL), Ordering::Relaxed);
        }
    }

    /// Lowers the spin level: an M spun in vain.
    pub(crate) fn spin_failed(&self) {
        let level = self.spin_level.load(Ordering::Relaxed);
        if level > 0 {
            self.spin_level.store(level - 1, Ordering::Relaxed);
        }
    }

    /// Ends the suppression of wake-ups, because an M that spun has found work.
    pub(crate) fn search_succeeded(&self) {
        if self.failed_searches.load(Ordering::Relaxed) != 0 {
            self.failed_searches.store(0, Ordering::Relaxed);
        }
    }

    /// Counts a search that found nothing. Returns true if wake-ups are suppressed now. The caller
    /// tells sysmon, which may have paused for longer while no P was idle.
    #[must_use]
    pub(crate) fn search_failed(&self) -> bool {
        let failed = self.failed_searches.load(Ordering::Relaxed) + 1;
        if failed <= SUPPRESS_AFTER {
            self.failed_searches.store(failed, Ordering::Relaxed);
        }
        failed >= SUPPRESS_AFTER
    }

    /// Returns whether wake-ups for a goroutine that is alone in `runnext` are suppressed.
    #[inline]
    pub(crate) fn is_suppressed(&self) -> bool {
        self.failed_searches.load(Ordering::Relaxed) >= SUPPRESS_AFTER
    }

    pub(crate) fn idle_ps(&self) -> u32 {
        self.idle_ps.load(Ordering::Relaxed)
    }

    pub(crate) fn spinning(&self) -> u32 {
        self.spinning.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spin_level_falls_to_zero_and_recovers_within_a_few_wakeups() {
        let idle = Idle::new();
        assert_eq!(idle.spin_nanos(), SPIN_NANOS);
        for _ in 0..MAX_LEVEL {
            assert_ne!(idle.spin_nanos(), 0);
            idle.spin_failed();
        }
        idle.spin_failed();
        assert_eq!(idle.spin_nanos(), 0);
        idle.spin_paid();
        assert_ne!(idle.spin_nanos(), 0);
        idle.spin_paid();
        assert_eq!(idle.spin_nanos(), SPIN_NANOS);
    }

    #[test]
    fn spin_level_stays_high_if_every_second_spin_pays() {
        let idle = Idle::new();
        for _ in 0..100 {
            idle.spin_failed();
            idle.spin_paid();
        }
        assert_eq!(idle.spin_nanos(), SPIN_NANOS);
    }
}
