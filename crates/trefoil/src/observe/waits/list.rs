//! Goroutines as a list and in groups.
//!
//! A group is made without reading a stack per goroutine: 1.4 µs each would be more than a second
//! for a million. Goroutines that were created at the same place, wait for the same reason, and
//! have the same number of bytes on their stack took the same path to their wait, with few
//! exceptions. So one stack is read per such set, and sets that wait at the same place are merged.

use super::super::snapshot::{self, Subject};
use super::report::{Goroutine, Kind, Place, Places};
use super::{Graph, Wait};
use crate::sched::Sched;
use crate::sched::g::Status;
use crate::sys::map::{Map, Set};
use crate::sys::sort::{sort_by, sort_by_key};
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

/// Returns the goroutines and tasks of `sched` with these ids, in no order, without what they wait
/// for. Those that have ended are left out.
pub(crate) fn with_ids(sched: &Sched, ids: &Set<u64>) -> Vec<Goroutine> {
    let mut found = Vec::new();
    snapshot::for_each_subject(sched, &mut |id, subject| {
        if ids.contains(&id) {
            found.push((id, subject));
        }
    });
    let graph = Graph::empty();
    let read = |(id, subject)| Goroutine::read(&graph, sched, id, subject);
    found.into_iter().filter_map(read).collect()
}

/// Returns the goroutines of `sched` that wait for a lock, a goroutine or a scope, the longest
/// waits first, and at most `max`; and how many there are.
pub(crate) fn waiting(sched: &Sched, max: usize) -> (Vec<Goroutine>, usize) {
    let graph = Graph::read();
    let is_own = |wait: &&Wait| std::ptr::eq(graph.sched(wait.party), sched);
    let mut waits: Vec<&Wait> = graph.waits.iter().filter(is_own).collect();
    sort_by_key(&mut waits, |wait| (std::cmp::Reverse(wait.waited), wait.party.id));
    let read = |wait: &&Wait| Goroutine::read(&graph, sched, wait.party.id, wait.party.subject);
    let listed = waits.iter().take(max).filter_map(read).collect();
    (listed, waits.len())
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
///     // Until all of them sleep.
///     let groups = loop {
///         let groups = trefoil::debug::groups();
///         if (groups[0].count, groups[0].state) == (100, "sleep") {
///             break groups;
///         }
///         sleep(Duration::from_millis(1));
///     };
///     println!("{}", groups[0]);
/// });
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GoroutineGroup {
    /// Goroutines or tasks.
    pub kind: Kind,
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
    /// The id of that one, or of any if they do not wait.
    pub oldest_id: u64,
    /// How long they have waited on average. Zero if they do not wait.
    pub mean: Duration,
    /// The ids of a few of them, the smallest first.
    pub examples: Vec<u64>,
}

impl fmt::Display for GoroutineGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (count, state, place) = (self.count, self.state, self.created_at);
        let tasks = if self.kind == Kind::Task { "tasks " } else { "" };
        write!(f, "{count} {tasks}[{state}] created at {}:{}", place.file(), place.line())?;
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
    kind: Kind,
    status: Status,
    created_at: &'static Location<'static>,
    function: &'static str,
    count: usize,
    /// The longest wait, and whose it is.
    oldest_millis: u32,
    oldest_id: u64,
    /// The sum of all waits.
    millis: u64,
    /// The first ones that were found, with their ids.
    examples: Vec<(u64, Subject)>,
}

/// What goroutines of one set have in common: kind, state, the addresses of the place and of the
/// type's name, and the size of the stack. The texts are static, so that addresses tell them apart.
type AlikeKey = (bool, *const u8, *const Location<'static>, *const u8, usize);

/// Returns the goroutines and tasks of `sched` in groups, the largest first.
pub(crate) fn groups(sched: &Sched) -> Vec<GoroutineGroup> {
    let mut sets: Vec<Alike> = Vec::new();
    let mut index: Map<AlikeKey, usize> = Map::new();
    // The set of the last one: the next one is often of the same.
    let mut last: Option<(AlikeKey, usize)> = None;
    let now = sched.millis();
    snapshot::for_each_subject(sched, &mut |id, subject| {
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
        let kind = match subject {
            Subject::Goroutine(_) => Kind::Goroutine,
            Subject::Task { .. } => Kind::Task,
        };
        let text = snapshot::text_of(status).as_ptr();
        let key = (kind == Kind::Task, text, created_at as *const _, function.as_ptr(), depth);
        let i = match last {
            Some((same, i)) if same == key => i,
            _ => *index.get_or_insert_with(key, || {
                sets.push(Alike {
                    kind,
                    status,
                    created_at,
                    function,
                    count: 0,
                    oldest_millis: 0,
                    oldest_id: id,
                    millis: 0,
                    examples: Vec::new(),
                });
                sets.len() - 1
            }),
        };
        last = Some((key, i));
        let set = &mut sets[i];
        set.count += 1;
        set.millis += u64::from(millis);
        if millis > set.oldest_millis {
            (set.oldest_millis, set.oldest_id) = (millis, id);
        }
        if set.examples.len() < EXAMPLES_MAX {
            set.examples.push((id, subject));
        }
    });
    merge(sets)
}

/// Makes groups of sets: finds where each set waits, and merges the sets that do so at one place.
fn merge(sets: Vec<Alike>) -> Vec<GoroutineGroup> {
    let mut places = Places::new();
    type Key = (Kind, &'static str, &'static Location<'static>, &'static str, Option<Place>);
    // With the sum of all waits.
    let mut groups: Map<Key, (GoroutineGroup, u64)> = Map::new();
    for set in sets {
        let Alike { kind, status, created_at, function, .. } = set;
        let state = snapshot::text_of(status);
        let waits = matches!(status, Status::Waiting(_));
        let find = |&(_, subject): &(u64, Subject)| places.of(subject);
        let waits_at = if waits { set.examples.iter().find_map(find) } else { None };
        let key = (kind, state, created_at, function, waits_at.clone());
        let (group, millis) = groups.get_or_insert_with(key, || {
            let group = GoroutineGroup {
                kind,
                state,
                count: 0,
                created_at,
                function,
                waits_at,
                oldest: Duration::ZERO,
                oldest_id: set.oldest_id,
                mean: Duration::ZERO,
                examples: Vec::new(),
            };
            (group, 0)
        });
        group.count += set.count;
        *millis += set.millis;
        let oldest = Duration::from_millis(set.oldest_millis.into());
        if oldest > group.oldest {
            (group.oldest, group.oldest_id) = (oldest, set.oldest_id);
        }
        group.examples.extend(set.examples.iter().map(|&(id, _)| id));
    }
    let finish = |(_, (mut group, millis)): (Key, (GoroutineGroup, u64))| {
        group.mean = Duration::from_millis(millis / group.count as u64);
        group.examples.sort_unstable();
        group.examples.truncate(EXAMPLES_MAX);
        group
    };
    let mut groups: Vec<_> = groups.into_iter().map(finish).collect();
    sort_by(&mut groups, |a, b| (b.count, &a.examples).cmp(&(a.count, &b.examples)));
    groups
}
