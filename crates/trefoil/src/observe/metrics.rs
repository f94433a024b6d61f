//! Latency histograms, cheap enough to ask for every second, and the stack of one goroutine.

use super::snapshot::{self, StackSnapshot};
use super::symbols::SymbolCache;
use crate::sched::Sched;
use crate::sched::latency::{BUCKETS, LatencyCounts};
use std::fmt::Write;
use std::time::Duration;

/// How often which latency has occurred, in buckets whose bounds are powers of two.
/// [`metrics`](crate::debug::metrics) returns four of them.
///
/// A histogram counts from the start of the runtime. To see what happened in an interval, take one
/// at its beginning and one at its end, and use [`since`](Histogram::since).
///
/// ```
/// use std::time::Duration;
/// use trefoil::debug::metrics;
///
/// trefoil::run(|| {
///     let before = metrics().timers;
///     trefoil::time::sleep(Duration::from_millis(1));
///     let late = metrics().timers.since(&before);
///     assert!(late.count() >= 1);
///     println!("half of the timers were at most {:?} late", late.quantile(0.5));
/// });
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Histogram(LatencyCounts);

impl Histogram {
    /// The number of buckets.
    pub const BUCKETS: usize = BUCKETS;

    /// Returns how many latencies each bucket has counted. Bucket `i` is for those of at most
    /// 2^`i` nanoseconds that do not fit into bucket `i` − 1. The last one also counts all that are
    /// longer.
    pub fn buckets(&self) -> &[u64; Histogram::BUCKETS] {
        &self.0.buckets
    }

    /// Returns the longest latency that bucket `i` is for. None for the last bucket, which has no
    /// bound, and beyond.
    ///
    /// ```
    /// use std::time::Duration;
    /// use trefoil::debug::Histogram;
    ///
    /// assert_eq!(Histogram::bound(10), Some(Duration::from_nanos(1024)));
    /// assert_eq!(Histogram::bound(39), None);
    /// ```
    pub fn bound(i: usize) -> Option<Duration> {
        (i < BUCKETS - 1).then(|| Duration::from_nanos(1 << i))
    }

    /// Returns how many latencies were counted.
    pub fn count(&self) -> u64 {
        self.0.buckets.iter().sum()
    }

    /// Returns the sum of all latencies.
    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.0.sum_nanos)
    }

    /// Returns the bound of the bucket in which the quantile `q` is: the fraction `q` of all
    /// latencies, from 0 to 1, is at most that long. Zero if nothing was counted; `Duration::MAX`
    /// if the quantile is in the last bucket.
    pub fn quantile(&self, q: f64) -> Duration {
        let count = self.count();
        if count == 0 {
            return Duration::ZERO;
        }
        let wanted = (q.clamp(0.0, 1.0) * count as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        let bucket = self.0.buckets.iter().position(|n| {
            seen += n;
            seen >= wanted
        });
        bucket.and_then(Histogram::bound).unwrap_or(Duration::MAX)
    }

    /// Returns what was counted after `earlier`, a histogram of the same kind and runtime.
    pub fn since(&self, earlier: &Histogram) -> Histogram {
        let (now, then) = (&self.0, &earlier.0);
        Histogram(LatencyCounts {
            buckets: std::array::from_fn(|i| now.buckets[i].saturating_sub(then.buckets[i])),
            sum_nanos: now.sum_nanos.saturating_sub(then.sum_nanos),
        })
    }
}

/// The histograms of a runtime, in the order of `debug::Metrics`.
pub(crate) struct Latencies {
    pub(crate) scheduling: Histogram,
    pub(crate) timers: Histogram,
    pub(crate) poll: Histogram,
    pub(crate) kernel: Histogram,
}

pub(crate) fn latencies(sched: &Sched) -> Latencies {
    Latencies {
        scheduling: Histogram(sched.latencies_of_ps(|p| &p.runnable)),
        timers: Histogram(sched.latencies_of_ps(|p| &p.timers)),
        poll: Histogram(sched.poller.delays.read()),
        kernel: Histogram(sched.time_without_p.read()),
    }
}

/// Returns the stack of the goroutine or task with this id, one call per line, innermost first; or
/// a sentence if it cannot be read. None if there is none with this id.
pub(crate) fn stack(sched: &Sched, id: u64) -> Option<String> {
    let snapshot = snapshot::one(sched, id)?;
    let mut out = String::new();
    match &snapshot.stack {
        StackSnapshot::Addresses(addresses) => {
            for frame in SymbolCache::default().frames(addresses) {
                let _ = match frame.line {
                    0 => writeln!(out, "{}", frame.name),
                    line => writeln!(out, "{}\n\t{}:{line}", frame.name, frame.file),
                };
            }
        }
        StackSnapshot::Running => out.push_str("it runs now: its stack cannot be read\n"),
        StackSnapshot::None => out.push_str("a task that waits has no stack\n"),
        StackSnapshot::Unknown => out.push_str("no stack yet, or it was resumed meanwhile\n"),
    }
    let (function, place) = snapshot.subject.origin();
    let function = function.strip_suffix("::{{closure}}").unwrap_or(function);
    let _ = writeln!(out, "created by {function}\n\t{}:{}", place.file(), place.line());
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn histogram(counts: &[(usize, u64)]) -> Histogram {
        let mut all = LatencyCounts::NONE;
        counts.iter().for_each(|&(bucket, count)| all.buckets[bucket] = count);
        Histogram(all)
    }

    #[test]
    fn a_quantile_is_the_bound_of_its_bucket() {
        assert_eq!(histogram(&[]).quantile(0.5), Duration::ZERO);
        let some = histogram(&[(3, 98), (10, 1), (39, 1)]);
        assert_eq!(some.quantile(0.0), Duration::from_nanos(8));
        assert_eq!(some.quantile(0.98), Duration::from_nanos(8));
        assert_eq!(some.quantile(0.99), Duration::from_nanos(1024));
        assert_eq!(some.quantile(1.0), Duration::MAX);
    }

    #[test]
    fn since_subtracts_bucket_by_bucket() {
        let later = histogram(&[(1, 5), (2, 3)]);
        assert_eq!(later.since(&histogram(&[(1, 4), (2, 3)])), histogram(&[(1, 1)]));
    }
}
