//! Goroutines as a list and in groups.
//!
//! A group is made without reading a stack per goroutine: 1.4 µs each would be more than a second
//! for a million. Goroutines that were created at the same place, wait for the same reason, and have
//! the same number of bytes on their stack took the same path to their wait, with few exceptions. So
//! one stack is read per such set, and sets that wait at the same place are merged.

use super::super::snapshot::{self, Subject};
use super::Graph;
use super::report::{Goroutine, Place, Places};
use crate::sched::Sched;
use crate::sched::g::Status;
use std::collections::HashMap;
use std::fmt;
use std::panic::Location;
use std::time::Duration;

/// Ids that a group names at most.
const EXAMPLES_MAX: usize = 5;

/// Returns every goroutine and task of `sched`, the caller first, then by id.
pub(crate) fn goroutines(sched: &Sched) -> Vec<Goroutine> {
    let graph = Graph::read();
    let read = |(id, subject)| Goroutine::read(&graph, sched, id, subject);
    snapshot::subjects(sched).into_iter().filter_map(read).collect()
}

/// Goroutines that were created at the same place and wait at the same place, returned by
/// [`groups`](crate::debug::groups).
///
/// ```
/// use trefoil::time::sleep;
/// use std::time::Duration;
/// trefoil::run(|| {
///     for _ in 0..100 {
///         trefoil::go(|| sleep(Duration::from_secs(3600)));
///     }
///     sleep(Duration::from_millis(50));
///     let groups = trefoil::debug::groups();
///     assert_eq!((groups[0].count, groups[0].state), (100, "sleep"));
///     println!("{}", groups[0]);
/// });
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GoroutineGroup {
    /// `running`, `runnable`, or why they wait, in Go's words.
    pub state: &'static str,
    /// How many there are.
    pub count: usize,
    /// Where they were started.
    pub created_at: &'static Location<'static>,
    /// The name of the type of their closure or future.
    pub function: &'static str,
    /// Where they wait. `None` for goroutines that run or are runnable, and for tasks without a
    /// stack.
    pub waits_at: Option<Place>,
    /// How long the one that has waited longest has waited. Zero if they do not wait.
    pub oldest: Duration,
    /// The ids of a few of them, the smallest first.
    pub examples: Vec<u64>,
}

impl fmt::Display for GoroutineGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (count, state, place) = (self.count, self.state, self.created_at);
        write!(f, "{count} [{state}] created at {}:{}", place.file(), place.line())?;
        if let Some(waits_at) = &self.waits_at {
            write!(f, ", waiting at {waits_at}")?;
        }
        if !self.oldest.is_zero() {
            write!(f, ", for up to {:.1} s", self.oldest.as_secs_f64())?;
        }
        write!(f, ", e.g. {:?}", self.examples)
    }
}

/// A set of goroutines that are alike as far as their Gs tell.
struct Alike {
    count: usize,
    oldest_millis: u32,
    /// The first ones that were found, with their ids.
    examples: Vec<(u64, Subject)>,
    function: &'static str,
}

/// Returns the goroutines and tasks of `sched` in groups, the largest first.
pub(crate) fn groups(sched: &Sched) -> Vec<GoroutineGroup> {
    type Key = (&'static str, usize, usize);
    let mut sets: HashMap<Key, (Alike, &'static Location<'static>)> = HashMap::new();
    let now = sched.millis();
    snapshot::for_each_subject(sched, |id, subject| {
        let status = subject.status();
        if status == Status::Dead {
            return;
        }
        let (function, created_at) = subject.origin();
        let waits = matches!(status, Status::Waiting(_));
        let depth = match subject.g() {
            Some(g) if waits => g.stack_depth_hint(),
            _ => 0,
        };
        let millis = if waits { Sched::millis_waited_at(now, subject.head()) } else { 0 };
        let place = std::ptr::from_ref(created_at) as usize;
        let key = (snapshot::text_of(status), place, depth);
        let new = || {
            let alike = Alike { count: 0, oldest_millis: 0, examples: Vec::new(), function };
            (alike, created_at)
        };
        let (set, _) = sets.entry(key).or_insert_with(new);
        set.count += 1;
        set.oldest_millis = set.oldest_millis.max(millis);
        if set.examples.len() < EXAMPLES_MAX {
            set.examples.push((id, subject));
        }
    });
    merge(sets.into_iter().map(|((state, ..), (set, created_at))| (state, set, created_at)))
}

/// Makes groups of sets: finds where each set waits, and merges the sets that do so at one place.
fn merge(
    sets: impl Iterator<Item = (&'static str, Alike, &'static Location<'static>)>,
) -> Vec<GoroutineGroup> {
    let mut places = Places::new();
    type Key = (&'static str, usize, Option<Place>);
    let mut groups: HashMap<Key, GoroutineGroup> = HashMap::new();
    for (state, set, created_at) in sets {
        let waits = !matches!(state, "running" | "runnable");
        let find = |&(_, subject): &(u64, Subject)| places.of(subject);
        let waits_at = if waits { set.examples.iter().find_map(find) } else { None };
        let key = (state, std::ptr::from_ref(created_at) as usize, waits_at.clone());
        let group = groups.entry(key).or_insert_with(|| GoroutineGroup {
            state,
            count: 0,
            created_at,
            function: set.function,
            waits_at,
            oldest: Duration::ZERO,
            examples: Vec::new(),
        });
        group.count += set.count;
        group.oldest = group.oldest.max(Duration::from_millis(set.oldest_millis.into()));
        group.examples.extend(set.examples.iter().map(|&(id, _)| id));
    }
    let mut groups: Vec<_> = groups.into_values().collect();
    for group in &mut groups {
        group.examples.sort_unstable();
        group.examples.truncate(EXAMPLES_MAX);
    }
    groups.sort_by(|a, b| (b.count, &a.examples).cmp(&(a.count, &b.examples)));
    groups
}
