//! From events to lives: the states of each goroutine and task, one after the other.
//!
//! The events of one goroutine are spread over several rings, whose order among each other is known
//! only as far as their times do not overlap. Where they do, the states decide: a goroutine that
//! waits is woken next, not run.

use super::decode::{Call, Cause, Event, Trace, What, When};
use crate::sched::record::Stop;
use crate::sys::map::Map;
use std::time::Duration;

/// What a goroutine or task does for a while.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// Nothing is known of it: the recording began later, or words were overwritten.
    Unknown,
    /// It waits in a queue, since this has started or woken it; or since it was stopped.
    Runnable(Cause),
    /// It runs on the P with this id.
    Running(u32),
    /// It is in this call, or computes, without a P.
    WithoutP(Call),
    /// It waits.
    Waiting(Stop),
    Ended,
}

/// A state and how long it lasted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) state: State,
    pub(super) begin: When,
    pub(super) end: When,
}

impl Span {
    /// Returns how long it lasted, and by how much that may be wrong.
    pub(super) fn duration(&self) -> (u64, u64) {
        let nanos = self.end.middle().saturating_sub(self.begin.middle());
        (nanos, self.begin.error().saturating_add(self.end.error()))
    }
}

/// What is known of a goroutine or task.
pub(super) struct Life {
    pub(super) is_task: bool,
    /// Where it was started (the address of a text), and by whom.
    pub(super) created: Option<(u64, Cause)>,
    pub(super) spans: Vec<Span>,
}

/// How long a goroutine or task was in which state, as far as it was recorded.
/// [`Snapshot::times`](super::Snapshot::times) returns it.
///
/// ```
/// # use trefoil::trace::{self, Recorder};
/// trefoil::run(|| {
///     let recorder = Recorder::start().unwrap();
///     let id = trefoil::go(trefoil::id).join().unwrap();
///     let times = trace::snapshot().unwrap().times(id).unwrap();
///     println!("it ran for {:?} ± {:?}", times.running, times.running_error);
///     assert_eq!(times.without_p, std::time::Duration::ZERO);
///     recorder.stop();
/// });
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Times {
    /// It ran on a P.
    pub running: Duration,
    /// It was in a run queue.
    pub runnable: Duration,
    /// It waited.
    pub waiting: Duration,
    /// It was in a call that blocks its thread, or went on after it, without a P.
    pub without_p: Duration,
    /// By how much `running` may be wrong. All errors are zero if the clock was read for each event
    /// ([`exact_clock`](crate::trace::RecorderBuilder::exact_clock)).
    pub running_error: Duration,
    /// By how much `runnable` may be wrong.
    pub runnable_error: Duration,
    /// By how much `waiting` may be wrong.
    pub waiting_error: Duration,
    /// By how much `without_p` may be wrong.
    pub without_p_error: Duration,
}

impl Life {
    pub(super) fn times(&self) -> Times {
        let total = |of: fn(State) -> bool| {
            let spans = self.spans.iter().filter(|span| of(span.state));
            // Times in a file may be anything.
            let nanos =
                spans.clone().fold(0_u64, |sum, span| sum.saturating_add(span.duration().0));
            (Duration::from_nanos(nanos), Duration::from_nanos(error_of_sum(spans)))
        };
        let (running, running_error) = total(|state| matches!(state, State::Running(_)));
        let (runnable, runnable_error) = total(|state| matches!(state, State::Runnable(_)));
        let (waiting, waiting_error) = total(|state| matches!(state, State::Waiting(_)));
        let (without_p, without_p_error) = total(|state| matches!(state, State::WithoutP(_)));
        Times {
            running,
            runnable,
            waiting,
            without_p,
            running_error,
            runnable_error,
            waiting_error,
            without_p_error,
        }
    }
}

/// Returns by how much the sum of a goroutine's spans, given in order, may be wrong.
///
/// That is the smaller of two bounds: the sum of the spans' errors, and the total time in which it
/// is unknown whether a span has begun or ended. Short spans between the same two clocks share that
/// time, so the second bound counts it once.
fn error_of_sum<'a>(spans: impl Iterator<Item = &'a Span>) -> u64 {
    let (mut errors, mut uncertain, mut until) = (0_u64, 0_u64, 0);
    for span in spans {
        errors = errors.saturating_add(span.duration().1);
        for when in [span.begin, span.end] {
            let from = when.earliest.max(until);
            uncertain = uncertain.saturating_add(when.latest.saturating_sub(from));
            until = until.max(when.latest);
        }
    }
    errors.min(uncertain)
}

/// Events of a ring that are looked at before one is chosen.
const STEPS_AHEAD: usize = 16;

/// An event of one goroutine, with the number of its ring.
type Step = (usize, Event);

impl Trace<'_> {
    /// Returns the lives of all goroutines and tasks, by id.
    pub(super) fn lives(&self) -> Map<u64, Life> {
        // By ring, each in its order.
        let mut steps: Map<u64, Vec<Vec<Step>>> = Map::new();
        for (ring, events) in self.rings.iter().enumerate() {
            for &event in events {
                let Some(id) = event.what.subject() else { continue };
                let rings = steps.get_or_default(id);
                match rings.last_mut() {
                    Some(last) if last[0].0 == ring => last.push((ring, event)),
                    _ => rings.push(vec![(ring, event)]),
                }
            }
        }
        let end = self.snapshot.record.copied;
        steps.into_iter().map(|(id, rings)| (id, life(in_order(rings), end))).collect()
    }
}

/// Returns the ids of goroutines and tasks in ascending order.
pub(super) fn ids(lives: &Map<u64, Life>) -> Vec<u64> {
    let mut ids: Vec<u64> = lives.keys().copied().collect();
    ids.sort_unstable();
    ids
}

/// Returns whether `step` can follow while the goroutine is in `state`.
fn can_follow(state: State, (ring, event): &Step) -> bool {
    match (state, event.what) {
        (State::Unknown, _) => true,
        (State::Runnable(_), What::Run { .. }) => true,
        (State::Running(p), What::Stop { .. } | What::Retaken { .. }) => p as usize == *ring,
        (State::WithoutP(_), What::Ready { .. } | What::Run { .. }) => true,
        (State::Waiting(_), What::Ready { .. }) => true,
        _ => false,
    }
}

/// Returns the state after `step`.
fn after((ring, event): &Step) -> State {
    match event.what {
        What::Run { .. } => State::Running(*ring as u32),
        What::Stop { stop: stop @ Stop::Parked(_), .. } => State::Waiting(stop),
        What::Stop { stop: Stop::Ended, .. } => State::Ended,
        What::Stop { .. } => State::Runnable(Cause::Unknown),
        What::Retaken { call, .. } => State::WithoutP(call),
        What::Create { by, .. } | What::Ready { by, .. } => State::Runnable(by),
        _ => State::Unknown,
    }
}

/// The events of one goroutine in several rings, up to a place in each.
struct Merge {
    rings: Vec<Vec<Step>>,
    /// How many events of each ring were taken.
    taken: Vec<usize>,
    state: State,
}

impl Merge {
    /// Returns the next event of each ring, with the place of the ring.
    fn heads(&self) -> impl Iterator<Item = (usize, Step)> {
        let rings = self.rings.iter().zip(&self.taken).enumerate();
        rings.filter_map(|(i, (ring, &taken))| ring.get(taken).map(|&step| (i, step)))
    }

    /// Returns whether the goroutine has a way on after the next events of a ring, as far as those
    /// follow each other. An event of another ring may have the same time, and only one order of
    /// the two is possible: a goroutine that waits is woken before it runs.
    fn leads_on(&self, ring: usize) -> bool {
        let (mut state, mut taken) = (self.state, self.taken[ring]);
        for _ in 0..STEPS_AHEAD {
            match self.rings[ring].get(taken) {
                Some(step) if can_follow(state, step) => state = after(step),
                _ => break,
            }
            taken += 1;
        }
        let own = self.rings[ring].get(taken).copied();
        let others = self.heads().filter(|(i, _)| *i != ring).map(|(_, step)| step);
        let mut rest = others.chain(own).peekable();
        rest.peek().is_none() || rest.any(|step| can_follow(state, &step))
    }
}

/// Merges the events of one goroutine from several rings.
fn in_order(rings: Vec<Vec<Step>>) -> Vec<Step> {
    let mut merge = Merge { taken: vec![0; rings.len()], rings, state: State::Unknown };
    let mut merged: Vec<Step> = Vec::new();
    loop {
        let heads: Vec<(usize, Step)> = merge.heads().collect();
        let earliest = |of: &mut dyn Iterator<Item = &(usize, Step)>| {
            of.min_by_key(|(_, (_, event))| (event.when.latest, event.when.earliest)).copied()
        };
        let is_create = |step: &Step| matches!(step.1.what, What::Create { .. });
        let created = heads.iter().find(|(_, step)| is_create(step)).copied();
        // Nothing comes before the start of a goroutine.
        let first = created.or_else(|| earliest(&mut heads.iter()));
        let Some(first) = first else { return merged };
        let mut fits: Vec<(usize, Step)> = heads.clone();
        fits.retain(|(_, step)| can_follow(merge.state, step));
        let earliest_fit = earliest(&mut fits.iter());
        // Of those that may come first, one after which the others can follow.
        let may_be_first = |step: &Step| {
            earliest_fit.is_some_and(|(_, fit)| step.1.when.earliest <= fit.1.when.latest)
        };
        let leads_on = |(ring, step): &&(usize, Step)| may_be_first(step) && merge.leads_on(*ring);
        let fits = match fits.len() {
            0 | 1 => earliest_fit,
            _ => earliest(&mut fits.iter().filter(leads_on)).or(earliest_fit),
        };
        // One that can follow goes first, unless another is certainly earlier: then words between
        // them were lost.
        let (ring, step) = match fits {
            Some(fits) if created.is_none() && first.1.1.when.latest >= fits.1.1.when.earliest => {
                fits
            }
            _ => first,
        };
        merge.taken[ring] += 1;
        merge.state = after(&step);
        merged.push(step);
    }
}

/// Makes the life of one goroutine from its events.
fn life(mut steps: Vec<Step>, end: u64) -> Life {
    narrow(&mut steps);
    let mut life = Life { is_task: false, created: None, spans: Vec::new() };
    for (i, step) in steps.iter().enumerate() {
        if let What::Create { is_task, place, by, .. } = step.1.what {
            life.is_task = is_task;
            life.created = Some((place, by));
        }
        let now = When { earliest: end, latest: end };
        let next = steps.get(i + 1).map_or(now, |(_, event)| event.when);
        let state = after(step);
        if state != State::Ended {
            life.spans.push(Span { state, begin: step.1.when, end: next });
        }
    }
    life
}

/// Each event is not before the one before it.
fn narrow(steps: &mut [Step]) {
    let mut earliest = 0;
    for (_, event) in steps.iter_mut() {
        earliest = earliest.max(event.when.earliest);
        event.when.earliest = earliest.min(event.when.latest);
    }
    let mut latest = u64::MAX;
    for (_, event) in steps.iter_mut().rev() {
        latest = latest.min(event.when.latest);
        event.when.latest = latest.max(event.when.earliest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sched::wait::reason::WaitReason;

    fn span((begin, end): (u64, u64), (from, to): (u64, u64)) -> Span {
        let begin = When { earliest: begin, latest: end };
        Span { state: State::Running(0), begin, end: When { earliest: from, latest: to } }
    }

    #[test]
    fn the_error_of_a_sum_is_at_most_the_time_that_is_not_known() {
        assert_eq!(error_of_sum([span((10, 10), (30, 30))].iter()), 0);
        assert_eq!(error_of_sum([span((10, 14), (30, 36))].iter()), 5);
        // Twenty spans within the same two clocks.
        assert_eq!(error_of_sum([span((10, 20), (10, 20)); 20].iter()), 10);
    }

    /// The second turn was taken for the first, because its time is known better: the goroutine
    /// seemed to be runnable for ever.
    #[test]
    fn events_with_the_same_time_are_in_the_only_possible_order() {
        let event = |(earliest, latest), what| Event { when: When { earliest, latest }, what };
        let run = What::Run { id: 4 };
        let parked = |reason| What::Stop { id: 4, stop: Stop::Parked(reason) };
        let [barrier, mutex] = [WaitReason::Barrier, WaitReason::MutexLock].map(parked);
        let ready = What::Ready { id: 4, by: Cause::Goroutine(3) };
        let create = What::Create { id: 4, is_task: false, place: 0, by: Cause::Goroutine(1) };
        let wide = |what| (0, event((10, 90), what));
        let rings = vec![
            vec![wide(create), wide(run), wide(barrier), wide(ready)],
            vec![(1, event((20, 60), run)), (1, event((20, 60), mutex))],
        ];
        let order: Vec<_> = in_order(rings).into_iter().map(|(_, event)| event.what).collect();
        assert_eq!(order, [create, run, barrier, ready, run, mutex]);
    }
}
