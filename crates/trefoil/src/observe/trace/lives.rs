//! From events to lives: the states of each goroutine and task, one after the other.
//!
//! The events of one goroutine are spread over several rings, whose order among each other is known
//! only as far as their times do not overlap. Where they do, the states decide: a goroutine that
//! waits is woken next, not run.

use super::decode::{Call, Cause, Event, Trace, What, When};
use crate::sched::record::Stop;
use std::collections::HashMap;
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

/// An event of one goroutine, with the number of its ring.
type Step = (usize, Event);

impl Trace<'_> {
    /// Returns the lives of all goroutines and tasks, by id.
    pub(super) fn lives(&self) -> HashMap<u64, Life> {
        // By ring, each in its order.
        let mut steps: HashMap<u64, Vec<Vec<Step>>> = HashMap::new();
        for (ring, events) in self.rings().enumerate() {
            for &event in events {
                let Some(id) = event.what.subject() else { continue };
                let rings = steps.entry(id).or_default();
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

/// Merges the events of one goroutine from several rings.
fn in_order(rings: Vec<Vec<Step>>) -> Vec<Step> {
    let mut rings: Vec<_> = rings.into_iter().map(|ring| ring.into_iter().peekable()).collect();
    let mut merged: Vec<Step> = Vec::new();
    let mut state = State::Unknown;
    loop {
        let mut heads: Vec<(usize, Step)> = Vec::with_capacity(rings.len());
        for (i, ring) in rings.iter_mut().enumerate() {
            heads.extend(ring.peek().map(|&step| (i, step)));
        }
        let earliest = |of: &mut dyn Iterator<Item = &(usize, Step)>| {
            of.min_by_key(|(_, (_, event))| (event.when.latest, event.when.earliest)).copied()
        };
        let is_create = |step: &Step| matches!(step.1.what, What::Create { .. });
        let created = heads.iter().find(|(_, step)| is_create(step)).copied();
        // Nothing comes before the start of a goroutine.
        let first = created.or_else(|| earliest(&mut heads.iter()));
        let Some(first) = first else { return merged };
        let fits = earliest(&mut heads.iter().filter(|(_, step)| can_follow(state, step)));
        // One that can follow goes first, unless another is certainly earlier: then words between
        // them were lost.
        let (ring, step) = match fits {
            Some(fits) if created.is_none() && first.1.1.when.latest >= fits.1.1.when.earliest => {
                fits
            }
            _ => first,
        };
        rings[ring].next();
        state = after(&step);
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
}
