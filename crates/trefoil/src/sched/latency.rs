//! Latency histograms: how long goroutines are runnable before they run, how late timers are, how
//! long ready descriptors go unnoticed, and how long threads stay in blocking calls.
//!
//! They are always on, so they must cost nothing where the scheduler is fast. Timers, polls and
//! lost Ps are slow paths that read the clock anyway. The time for which goroutines are runnable is
//! *sampled*: in each of its rounds sysmon asks every P to time the next goroutine that is started
//! or woken there (`P::times_next`). That goroutine gets the number of a *stopwatch*
//! ([`Stopwatches`]) in a spare byte of its head, and stops it when it runs, on whichever P. So an
//! event that is not timed costs a load and a branch, and the samples are spread over time,
//! whatever the rate of events is.
//!
//! Invariants:
//! 1. A histogram of a P is written to by the owner of the P alone; the others by any thread.
//! 2. A stopwatch that is not 0 belongs to one goroutine, whose head has its number. A goroutine
//!    that is queued runs, unless its runtime ends; so every stopwatch is stopped.
//!
//! Rejected: the time in the head itself, because a G has no word left in its first cache line;
//! timing every n-th event, because that needs a counter on the fast path, and a program with few
//! events would wait long for its first sample.

use crate::sched::Sched;
use crate::sched::g::G;
use crate::sched::m::Rt;
use crate::sched::p::bump;
use crate::sched::runnable::RunHead;
use crate::sys::clock::{Nanos, now};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Bucket `i` counts latencies of more than 2^(i-1) and at most 2^i nanoseconds. The last one also
/// counts all that are longer, from 275 seconds on.
pub(crate) const BUCKETS: usize = 40;

/// How often which latency has occurred; see the head of the file.
pub(crate) struct LatencyHistogram {
    buckets: [AtomicU64; BUCKETS],
    /// The sum of all latencies in nanoseconds.
    sum: AtomicU64,
}

/// What a [`LatencyHistogram`] held at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LatencyCounts {
    pub(crate) buckets: [u64; BUCKETS],
    pub(crate) sum_nanos: u64,
}

impl LatencyHistogram {
    pub(crate) const fn new() -> LatencyHistogram {
        LatencyHistogram { buckets: [const { AtomicU64::new(0) }; BUCKETS], sum: AtomicU64::new(0) }
    }

    /// Any thread: counts a latency.
    pub(crate) fn add(&self, latency: Nanos) {
        self.buckets[bucket_of(latency)].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(latency, Ordering::Relaxed);
    }

    /// The only writer (invariant 1): counts a latency.
    pub(crate) fn add_as_owner(&self, latency: Nanos) {
        bump(&self.buckets[bucket_of(latency)], 1);
        bump(&self.sum, latency);
    }

    /// Forgets everything, for another runtime. No thread writes to it.
    pub(crate) fn clear(&self) {
        self.buckets.iter().chain([&self.sum]).for_each(|n| n.store(0, Ordering::Relaxed));
    }

    pub(crate) fn read(&self) -> LatencyCounts {
        LatencyCounts {
            buckets: std::array::from_fn(|i| self.buckets[i].load(Ordering::Relaxed)),
            sum_nanos: self.sum.load(Ordering::Relaxed),
        }
    }
}

impl LatencyCounts {
    pub(crate) const NONE: LatencyCounts = LatencyCounts { buckets: [0; BUCKETS], sum_nanos: 0 };

    /// Returns the counts of both together.
    pub(crate) fn plus(self, other: LatencyCounts) -> LatencyCounts {
        LatencyCounts {
            buckets: std::array::from_fn(|i| self.buckets[i] + other.buckets[i]),
            sum_nanos: self.sum_nanos + other.sum_nanos,
        }
    }
}

/// Returns the smallest `i` with `latency` ≤ 2^i, or that of the last bucket.
fn bucket_of(latency: Nanos) -> usize {
    let bits = u64::BITS - latency.saturating_sub(1).leading_zeros();
    (bits as usize).min(BUCKETS - 1)
}

/// The histograms of a P.
pub(crate) struct PLatencies {
    /// From the start or wake-up of a goroutine until it runs, sampled.
    pub(crate) runnable: LatencyHistogram,
    /// How long after its time a timer has fired.
    pub(crate) timers: LatencyHistogram,
}

impl PLatencies {
    pub(crate) const fn new() -> PLatencies {
        PLatencies { runnable: LatencyHistogram::new(), timers: LatencyHistogram::new() }
    }
}

/// The stopwatches of a runtime: when goroutines that are being timed became runnable. If all are
/// in use, no further goroutine is timed.
pub(crate) struct Stopwatches {
    /// 0 if the stopwatch is not in use.
    since: [AtomicU64; STOPWATCHES],
    /// The next one to try, modulo their number.
    next: AtomicU32,
}

/// As many as a byte can name, besides 0 for none.
const STOPWATCHES: usize = u8::MAX as usize;

impl Stopwatches {
    pub(crate) const fn new() -> Stopwatches {
        Stopwatches { since: [const { AtomicU64::new(0) }; STOPWATCHES], next: AtomicU32::new(0) }
    }

    /// Starts a stopwatch for a goroutine that the caller owns and is about to queue.
    #[cold]
    pub(crate) fn start(&self, head: &RunHead) {
        if head.stopwatch.get() != 0 {
            return;
        }
        let i = self.next.fetch_add(1, Ordering::Relaxed) as usize % STOPWATCHES;
        let (relaxed, since) = (Ordering::Relaxed, now().max(1));
        if self.since[i].compare_exchange(0, since, relaxed, relaxed).is_ok() {
            head.stopwatch.set(i as u8 + 1);
        }
    }

    /// Stops the stopwatch of a goroutine that is about to run. Returns the time that it shows.
    fn stop(&self, head: &RunHead) -> Option<Nanos> {
        let i = usize::from(head.stopwatch.replace(0)).checked_sub(1)?;
        Some(now().saturating_sub(self.since[i].swap(0, Ordering::Relaxed)))
    }
}

/// A goroutine that the caller owns is about to be queued here, because it was started or woken.
#[inline(always)]
pub(crate) fn becomes_runnable(rt: Rt, g: &G) {
    if rt.p().times_next.load(Ordering::Relaxed) {
        rt.p().times_next.store(false, Ordering::Relaxed);
        rt.sched().stopwatches.start(&g.head);
    }
}

/// A goroutine is about to run here.
#[inline(always)]
pub(crate) fn runs(rt: Rt, g: &G) {
    if g.head.stopwatch.get() != 0 {
        stop_slow(rt, g);
    }
}

#[cold]
fn stop_slow(rt: Rt, g: &G) {
    if let Some(latency) = rt.sched().stopwatches.stop(&g.head) {
        rt.p().latencies.runnable.add_as_owner(latency);
    }
}

impl Sched {
    /// sysmon, in each round: asks every P to time the next goroutine.
    pub(crate) fn time_next_on_all_ps(&self) {
        for p in self.all_ps() {
            // Not written without need: the owner reads the cache line all the time.
            if !p.times_next.load(Ordering::Relaxed) {
                p.times_next.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Returns the counts of all Ps together.
    pub(crate) fn latencies_of_ps(
        &self,
        of: impl Fn(&PLatencies) -> &LatencyHistogram,
    ) -> LatencyCounts {
        self.all_ps()
            .map(|p| of(&p.latencies).read())
            .fold(LatencyCounts::NONE, LatencyCounts::plus)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sched::runnable::RunKind;

    #[test]
    fn a_latency_is_counted_in_the_bucket_whose_bound_it_does_not_exceed() {
        let bounds = [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (1024, 10), (1025, 11)];
        for (latency, bucket) in bounds {
            assert_eq!(bucket_of(latency), bucket, "{latency}");
        }
        assert_eq!(bucket_of(1 << 38), 38);
        assert_eq!(bucket_of((1 << 38) + 1), 39);
        assert_eq!(bucket_of(u64::MAX), 39);
    }

    #[test]
    fn a_stopwatch_is_free_again_after_it_was_stopped() {
        let watches = Stopwatches::new();
        let heads: Vec<RunHead> =
            (0..STOPWATCHES + 1).map(|_| RunHead::new(RunKind::Goroutine)).collect();
        heads.iter().for_each(|head| watches.start(head));
        let (last, timed) = heads.split_last().unwrap();
        assert!(timed.iter().all(|head| head.stopwatch.get() != 0));
        assert_eq!(last.stopwatch.get(), 0, "all stopwatches are in use");
        assert!(timed.iter().all(|head| watches.stop(head).is_some()));
        assert!(timed.iter().all(|head| watches.stop(head).is_none()));
        watches.start(last);
        assert_ne!(last.stopwatch.get(), 0);
    }
}
