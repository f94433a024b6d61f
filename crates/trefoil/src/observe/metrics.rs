//! Numbers about a runtime that are cheap enough to ask for every second: latency histograms, and
//! goroutines counted by place and state.
//!
//! Goroutines are not grouped by stack here: to read a million stacks takes more than a second. A
//! group is what was started at the same place with the same closure and is in the same state. To
//! count a million goroutines like that takes some tens of nanoseconds for each, and no memory. The
//! stack of a single goroutine of a group ([`stack`]) says where the group waits.

use super::snapshot::{self, StackSnapshot};
use super::symbols::SymbolCache;
use crate::sched::Sched;
use crate::sched::g::{self, Status};
use crate::sched::latency::{BUCKETS, LatencyCounts};
use crate::sched::runnable::RunHead;
use crate::sched::task::block;
use crate::sched::task::state::TaskSnapshot;
use std::collections::HashMap;
use std::fmt::Write;
use std::panic::Location;
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

/// Goroutines or tasks that were started at the same place and are in the same state.
#[derive(Clone, Debug)]
pub struct Group {
    /// They are tasks.
    pub is_task: bool,
    /// The type of their closure or future.
    pub function: &'static str,
    /// Where they were started.
    pub created_at: &'static Location<'static>,
    /// The words of a dump.
    pub state: &'static str,
    /// How many there are.
    pub count: u64,
    /// The id of one of them: the one that has waited longest.
    pub example: u64,
    /// For how long that one has waited; None if they do not wait.
    pub oldest: Option<Duration>,
    /// The sum over all of them, for the mean.
    pub waited: Duration,
}

/// By the addresses of the type's name and of the place.
type GroupKey = (bool, &'static str, *const Location<'static>, &'static str);

/// Counts the goroutines and tasks of `sched`, largest group first.
pub(crate) fn groups(sched: &Sched) -> Vec<Group> {
    let now_ms = sched.started.elapsed().as_millis() as u32;
    let mut groups = Groups { now_ms, all: Vec::new(), index: HashMap::new(), last: None };
    g::for_each(&mut |g| {
        let status = g.status();
        // A carrier counts with its task.
        if status != Status::Dead && std::ptr::eq(g.sched_hint(), sched) && !g.is_carrier_hint() {
            groups.add(false, g.origin(), status, g.id(), &g.head);
        }
    });
    block::for_each(&mut |task| {
        let status = match task.state.snapshot().0 {
            TaskSnapshot::Free => return,
            TaskSnapshot::Idle => Status::Waiting(task.head.reason()),
            TaskSnapshot::Scheduled => Status::Runnable,
            TaskSnapshot::Running => Status::Running,
        };
        if std::ptr::eq(task.sched_hint(), sched) {
            groups.add(true, task.origin(), status, task.id(), &task.head);
        }
    });
    let mut all = groups.all;
    all.sort_by(|a, b| b.count.cmp(&a.count).then_with(|| a.example.cmp(&b.example)));
    all
}

struct Groups {
    /// The runtime's age, in the unit of `RunHead::waiting_since_ms`.
    now_ms: u32,
    all: Vec<Group>,
    index: HashMap<GroupKey, usize>,
    /// The group of the last one: the next one is often of the same.
    last: Option<(GroupKey, usize)>,
}

impl Groups {
    fn add(
        &mut self,
        is_task: bool,
        (function, created_at): (&'static str, &'static Location<'static>),
        status: Status,
        id: u64,
        head: &RunHead,
    ) {
        let (state, waits) = match status {
            Status::Dead => return,
            Status::Runnable => ("runnable", false),
            Status::Running => ("running", false),
            Status::Waiting(reason) => (reason.text(), true),
        };
        let key: GroupKey = (is_task, function, created_at, state);
        let i = match self.last {
            // The texts are static, so equal addresses are enough here.
            Some((last, i))
                if std::ptr::eq(last.1, function)
                    && (last.0, last.2) == (is_task, key.2)
                    && std::ptr::eq(last.3, state) =>
            {
                i
            }
            _ => *self.index.entry(key).or_insert_with(|| {
                let (count, oldest, waited) = (0, None, Duration::ZERO);
                self.all.push(Group {
                    is_task,
                    function,
                    created_at,
                    state,
                    count,
                    example: id,
                    oldest,
                    waited,
                });
                self.all.len() - 1
            }),
        };
        self.last = Some((key, i));
        let group = &mut self.all[i];
        group.count += 1;
        if waits {
            let since = head.waiting_since_ms.load(std::sync::atomic::Ordering::Relaxed);
            let waited = self.now_ms.wrapping_sub(since);
            // The coarse clock of `since` may be a little ahead.
            let waited = if waited > u32::MAX / 2 { 0 } else { waited };
            let waited = Duration::from_millis(waited.into());
            group.waited += waited;
            if group.oldest.is_none_or(|oldest| waited > oldest) {
                (group.oldest, group.example) = (Some(waited), id);
            }
        }
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
