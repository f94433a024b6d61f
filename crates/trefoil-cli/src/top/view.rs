//! What `trefoil top` shows at one moment, wherever it was read.

use std::cmp::Ordering;

use crate::report::grouped;

/// A runtime of a process. What only the process itself can tell is None if it was read from
/// outside.
#[derive(Default)]
pub(crate) struct View {
    pub(crate) program: String,
    pub(crate) pid: u64,
    /// How it was read, in words.
    pub(crate) source: String,
    pub(crate) runtime: u64,
    pub(crate) runtimes: Vec<u64>,
    pub(crate) uptime_ms: Option<u64>,
    pub(crate) goroutines: u64,
    pub(crate) tasks: u64,
    pub(crate) runnable: u64,
    pub(crate) threads: u64,
    /// Threads in calls that block.
    pub(crate) threads_blocked: Option<u64>,
    pub(crate) ps: Vec<P>,
    /// Name, median and 99th percentile in nanoseconds. Both are bounds of buckets.
    pub(crate) latencies: Vec<(String, u64, u64)>,
    pub(crate) groups: Vec<Group>,
    pub(crate) groups_total: usize,
    pub(crate) users: Option<Vec<User>>,
    /// What each goroutine waits for, in words.
    pub(crate) waits: Option<Vec<String>>,
    pub(crate) waits_total: u64,
    /// Goroutines that wait for each other, in words.
    pub(crate) deadlocks: Option<Vec<String>>,
}

pub(crate) struct P {
    pub(crate) id: u64,
    pub(crate) status: String,
    pub(crate) m: Option<u64>,
    pub(crate) thread: Option<u64>,
    pub(crate) queue: Option<u64>,
    /// Time slices so far.
    pub(crate) slices: Option<u64>,
    /// What it runs, in words.
    pub(crate) runs: Option<String>,
}

/// Goroutines or tasks that were started at the same place and wait at the same place.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Group {
    pub(crate) is_task: bool,
    pub(crate) count: u64,
    pub(crate) state: String,
    pub(crate) function: String,
    pub(crate) created_at: String,
    pub(crate) waits_at: String,
    pub(crate) oldest_ms: Option<u64>,
    pub(crate) mean_ms: Option<u64>,
    /// The id of the one that has waited longest.
    pub(crate) example: u64,
}

/// The CPU time of a goroutine or task: an estimate.
#[derive(Clone)]
pub(crate) struct User {
    pub(crate) id: u64,
    /// None if it has ended.
    pub(crate) who: Option<String>,
    pub(crate) what: String,
    pub(crate) running_us: u64,
    pub(crate) runnable_us: u64,
}

impl View {
    /// Returns the numbers about the runtime, in words.
    pub(crate) fn numbers(&self) -> String {
        let active = self.ps.iter().filter(|p| p.status != "retired").count();
        let running = self.ps.iter().filter(|p| p.status == "running").count();
        let blocked = match self.threads_blocked {
            Some(n) => format!(" ({} in blocking calls)", grouped(n)),
            None => String::new(),
        };
        format!(
            "goroutines {} · tasks {} · runnable {} · Ps {running} of {active} running · threads {}{blocked}",
            grouped(self.goroutines),
            grouped(self.tasks),
            grouped(self.runnable),
            grouped(self.threads),
        )
    }

    /// Returns what it is about, in words.
    pub(crate) fn title(&self) -> String {
        let up = self.uptime_ms.map(|ms| format!(" · up {}", age(ms))).unwrap_or_default();
        let runtime = match self.runtimes.len() {
            0 | 1 => String::new(),
            n => format!(" · runtime {} of {n}", self.runtime),
        };
        format!("{} · process {}{up}{runtime} · {}", self.program, self.pid, self.source)
    }

    pub(crate) fn latency_text(&self) -> String {
        let texts = self.latencies.iter().map(|(name, median, p99)| {
            format!("{name} p50 ≤ {} p99 ≤ {}", nanos(*median), nanos(*p99))
        });
        texts.collect::<Vec<_>>().join(" · ")
    }
}

/// By what groups are sorted. All but `Place` with the largest first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Sort {
    Count,
    Change,
    Oldest,
    State,
    Place,
}

impl Sort {
    pub(crate) fn next(self) -> Sort {
        match self {
            Sort::Count => Sort::Change,
            Sort::Change => Sort::Oldest,
            Sort::Oldest => Sort::State,
            Sort::State => Sort::Place,
            Sort::Place => Sort::Count,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Sort::Count => "count",
            Sort::Change => "change",
            Sort::Oldest => "oldest",
            Sort::State => "state",
            Sort::Place => "place",
        }
    }
}

impl Group {
    /// Returns whether it is about the same goroutines as a group of another moment.
    fn is_like(&self, other: &Group) -> bool {
        self.is_task == other.is_task
            && self.state == other.state
            && self.created_at == other.created_at
            && self.function == other.function
            && self.waits_at == other.waits_at
    }

    /// Returns whether it has all words of the filter.
    fn matches(&self, filter: &str) -> bool {
        let kind = if self.is_task { "task" } else { "goroutine" };
        let text = [kind, &self.state, &self.function, &self.created_at, &self.waits_at]
            .join(" ")
            .to_lowercase();
        filter.to_lowercase().split_whitespace().all(|word| text.contains(word))
    }
}

/// Returns the groups that match, in order, each with the change of its count since `before`.
pub(crate) fn rows<'a>(
    view: &'a View,
    before: Option<&View>,
    sort: Sort,
    filter: &str,
) -> Vec<(&'a Group, i64)> {
    let change = |group: &Group| {
        let Some(before) = before else { return 0 };
        let old = before.groups.iter().find(|old| old.is_like(group)).map_or(0, |old| old.count);
        group.count as i64 - old as i64
    };
    let matching = view.groups.iter().filter(|group| group.matches(filter));
    let mut rows: Vec<_> = matching.map(|group| (group, change(group))).collect();
    rows.sort_by(|(a, a_change), (b, b_change)| {
        let order = match sort {
            Sort::Count => Ordering::Equal,
            Sort::Change => b_change.cmp(a_change),
            Sort::Oldest => b.oldest_ms.cmp(&a.oldest_ms),
            Sort::State => a.state.cmp(&b.state),
            Sort::Place => a.created_at.cmp(&b.created_at),
        };
        order.then(b.count.cmp(&a.count)).then(a.example.cmp(&b.example))
    });
    rows
}

/// Returns the goroutines that use the CPUs since `before`, `seconds` ago: with the percentages of
/// one P's time that each ran and was in a queue. Without `before` they are zero.
pub(crate) fn users(view: &View, before: Option<&View>, seconds: f64) -> Vec<(User, f64, f64)> {
    let old = before.and_then(|before| before.users.as_deref());
    let share = |user: &User, of: fn(&User) -> u64| {
        let Some(old) = old else { return 0.0 };
        let was = old.iter().find(|old| old.id == user.id).map_or(0, of);
        of(user).saturating_sub(was) as f64 / 1e4 / seconds.max(0.001)
    };
    let users = view.users.as_deref().unwrap_or_default().iter();
    let mut rows: Vec<_> = users
        .map(|user| {
            (
                user.clone(),
                share(user, |user| user.running_us),
                share(user, |user| user.runnable_us),
            )
        })
        .collect();
    rows.sort_by(|a, b| b.1.total_cmp(&a.1).then(b.0.running_us.cmp(&a.0.running_us)));
    rows
}

/// Returns a duration in the largest fitting unit.
pub(crate) fn age(ms: u64) -> String {
    match ms {
        0..1000 => format!("{ms} ms"),
        1000..60_000 => format!("{}.{} s", ms / 1000, ms % 1000 / 100),
        60_000..3_600_000 => format!("{}.{} min", ms / 60_000, ms % 60_000 / 6_000),
        _ => format!("{}.{} h", ms / 3_600_000, ms % 3_600_000 / 360_000),
    }
}

/// Returns nanoseconds in the largest fitting unit.
pub(crate) fn nanos(ns: u64) -> String {
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{} µs", ns / 1_000),
        1_000_000..1_000_000_000 => format!("{} ms", ns / 1_000_000),
        u64::MAX => "more".into(),
        _ => format!("{} s", ns / 1_000_000_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(count: u64, state: &str, oldest_ms: Option<u64>, created_at: &str) -> Group {
        let (state, created_at) = (state.into(), created_at.into());
        Group { count, state, oldest_ms, created_at, example: count, ..Group::default() }
    }

    fn view(groups: Vec<Group>) -> View {
        View { groups, ..View::default() }
    }

    fn counts(rows: &[(&Group, i64)]) -> Vec<(u64, i64)> {
        rows.iter().map(|(group, change)| (group.count, *change)).collect()
    }

    #[test]
    fn rows_are_sorted_filtered_and_compared_with_the_last_ones() {
        let before =
            view(vec![group(5, "sleep", Some(1), "b.rs:1"), group(9, "running", None, "a.rs:1")]);
        let now = view(vec![
            group(7, "sleep", Some(3), "b.rs:1"),
            group(8, "running", None, "a.rs:1"),
            group(1, "chan receive", Some(9), "c.rs:1"),
        ]);
        let sorted = |sort, filter| counts(&rows(&now, Some(&before), sort, filter));
        assert_eq!(sorted(Sort::Count, ""), [(8, -1), (7, 2), (1, 1)]);
        assert_eq!(sorted(Sort::Change, ""), [(7, 2), (1, 1), (8, -1)]);
        assert_eq!(sorted(Sort::Oldest, ""), [(1, 1), (7, 2), (8, -1)]);
        assert_eq!(sorted(Sort::State, ""), [(1, 1), (8, -1), (7, 2)]);
        assert_eq!(sorted(Sort::Place, ""), [(8, -1), (7, 2), (1, 1)]);
        assert_eq!(sorted(Sort::Count, "SLEEP b.rs"), [(7, 2)]);
        assert_eq!(sorted(Sort::Count, "sleep a.rs"), []);
        assert_eq!(counts(&rows(&now, None, Sort::Count, "")), [(8, 0), (7, 0), (1, 0)]);
    }

    #[test]
    fn shares_are_those_of_the_last_interval() {
        let user = |id, running_us| User {
            id,
            who: None,
            what: String::new(),
            running_us,
            runnable_us: running_us / 2,
        };
        let with = |users| View { users: Some(users), ..View::default() };
        let before = with(vec![user(1, 1_000_000), user(2, 0)]);
        let now = with(vec![user(1, 1_000_000), user(2, 500_000)]);
        let shares: Vec<_> = users(&now, Some(&before), 2.0)
            .iter()
            .map(|(u, runs, waits)| (u.id, *runs, *waits))
            .collect();
        assert_eq!(shares, [(2, 25.0, 12.5), (1, 0.0, 0.0)]);
        assert_eq!(users(&now, None, 2.0)[0].1, 0.0);
    }

    #[test]
    fn times_have_the_unit_that_fits() {
        assert_eq!([0, 1_250, 61_000, 3_660_000].map(age), ["0 ms", "1.2 s", "1.0 min", "1.0 h"]);
        assert_eq!(
            [512, 2048, 4_194_304, 1 << 33, u64::MAX].map(nanos),
            ["512 ns", "2 µs", "4 ms", "8 s", "more"]
        );
    }
}
