//! Several goroutines and threads at once, whose logs are checked at the end.

use crate::action::{Action, Arm, DropCounts, End, Form, Got, How, Side, Value};
use crate::{
    Handle, MAX_CHANNELS, PROCS, a_form, a_how, a_side, capacities, new_channel, run_programs,
    runtime,
};
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use trefoil::chan::{Receiver, Sender};
use trefoil::time::sleep;
use trefoil::yield_now;

#[derive(Clone, Debug)]
enum Step {
    Act { arms: Vec<(usize, Side)>, with_never: bool, how: How, form: Form },
    Close(usize),
    DropEnd(usize, Side),
    CheckLen(usize),
    Yield,
}

#[derive(Clone, Debug)]
struct Actor {
    /// Runs on a plain thread.
    on_thread: bool,
    /// How often the steps are repeated.
    rounds: usize,
    steps: Vec<Step>,
}

/// A program of several actors that run at once.
#[derive(Clone, Debug)]
struct Concurrent {
    caps: Vec<usize>,
    /// Channels of which the test keeps no handles: they are closed when the actors have dropped
    /// the last handle of a side. Operations on these alone have a deadline.
    unkept: Vec<bool>,
    actors: Vec<Actor>,
    /// When the test closes the channels that it keeps.
    close_after_micros: u64,
    runtime: usize,
}

fn a_step() -> impl Strategy<Value = Step> {
    let arms = prop_oneof![
        2 => vec((0..MAX_CHANNELS, a_side()), 1..=1),
        3 => vec((0..MAX_CHANNELS, a_side()), 2..=4),
    ];
    let act = (arms, any::<bool>(), a_how(), a_form())
        .prop_map(|(arms, with_never, how, form)| Step::Act { arms, with_never, how, form });
    prop_oneof![
        60 => act,
        1 => (0..MAX_CHANNELS).prop_map(Step::Close),
        1 => (0..MAX_CHANNELS, a_side()).prop_map(|(c, side)| Step::DropEnd(c, side)),
        3 => (0..MAX_CHANNELS).prop_map(Step::CheckLen),
        6 => Just(Step::Yield),
    ]
}

fn a_concurrent_program() -> impl Strategy<Value = Concurrent> {
    let on_thread = prop_oneof![5 => Just(false), 1 => Just(true)];
    let actor = (on_thread, 1..20usize, vec(a_step(), 1..20))
        .prop_map(|(on_thread, rounds, steps)| Actor { on_thread, rounds, steps });
    let unkept = prop_oneof![3 => Just(false), 1 => Just(true)];
    (
        capacities(),
        vec(unkept, MAX_CHANNELS),
        vec(actor, 2..=8),
        prop_oneof![0..3000u64, Just(3000)],
        0..PROCS.len(),
    )
        .prop_map(|(caps, unkept, actors, close_after_micros, runtime)| Concurrent {
            caps,
            unkept,
            actors,
            close_after_micros,
            runtime,
        })
}

/// What an actor has done or seen. Its log is in order.
#[derive(Clone, Copy, Debug)]
enum Event {
    Made { id: usize, chan: usize },
    Sent { id: usize, chan: usize },
    Refused { id: usize, chan: usize },
    Received { id: usize, chan: usize },
    Closed { chan: usize },
}

/// What all actors share.
struct Shared {
    counts: Arc<DropCounts>,
    caps: Vec<usize>,
    unkept: Vec<bool>,
    /// Set when a `close` has returned.
    closed: Vec<AtomicBool>,
    running: AtomicUsize,
}

type Ends = Vec<(Option<Sender<Value>>, Option<Receiver<Value>>)>;

impl Actor {
    fn run(&self, shared: &Shared, mut ends: Ends) -> Vec<Event> {
        let mut log = Vec::new();
        for step in std::iter::repeat_n(&self.steps, self.rounds).flatten() {
            match step {
                Step::Act { arms, with_never, how, form } => {
                    let arms: Vec<_> =
                        arms.iter().map(|&(c, side)| (c % ends.len(), side)).collect();
                    act(shared, &ends, &mut log, &arms, *with_never, *how, *form);
                }
                Step::Close(c) => {
                    let c = c % ends.len();
                    if let Some(tx) = &ends[c].0 {
                        tx.close();
                        shared.closed[c].store(true, Ordering::SeqCst);
                    }
                }
                Step::DropEnd(c, Side::Send) => {
                    let c = c % ends.len();
                    ends[c].0 = None;
                }
                Step::DropEnd(c, Side::Recv) => {
                    let c = c % ends.len();
                    ends[c].1 = None;
                }
                Step::CheckLen(c) => {
                    let c = c % ends.len();
                    let len = ends[c].1.as_ref().map_or(0, Receiver::len);
                    assert!(
                        len <= shared.caps[c],
                        "{len} values in a channel with a smaller capacity"
                    );
                }
                Step::Yield => yield_now(),
            }
        }
        drop(ends);
        shared.running.fetch_sub(1, Ordering::SeqCst);
        log
    }
}

fn act(
    shared: &Shared,
    ends: &Ends,
    log: &mut Vec<Event>,
    arms: &[(usize, Side)],
    with_never: bool,
    how: How,
    form: Form,
) {
    let has = |&(c, side): &(usize, Side)| match side {
        Side::Send => ends[c].0.is_some(),
        Side::Recv => ends[c].1.is_some(),
    };
    if !arms.iter().all(has) {
        return;
    }
    // On channels that the test does not close an operation must not wait for ever.
    let how = match how.waits() && arms.iter().all(|&(c, _)| shared.unkept[c]) {
        true => How::ShortDeadline,
        false => how,
    };
    let closed_before: Vec<bool> =
        arms.iter().map(|&(c, _)| shared.closed[c].load(Ordering::SeqCst)).collect();
    let mut ids = Vec::new();
    let make = |&(chan, side): &(usize, Side)| match side {
        Side::Send => {
            let value = shared.counts.make_value();
            log.push(Event::Made { id: value.id, chan });
            ids.push(Some(value.id));
            Arm { end: End::Tx(ends[chan].0.clone().expect("checked above")), value: Some(value) }
        }
        Side::Recv => {
            ids.push(None);
            Arm { end: End::Rx(ends[chan].1.clone().expect("checked above")), value: None }
        }
    };
    let action = Action { arms: arms.iter().map(make).collect(), with_never, how, form };
    let ((i, got), _ends) = action.perform();
    if let Got::Nothing = got {
        let may = how == How::Try || how == How::ShortDeadline;
        assert!(may && !closed_before.contains(&true), "nothing was done, though an arm was ready");
        return;
    }
    let (chan, _) = arms[i];
    log.push(match got {
        Got::Sent => {
            assert!(!closed_before[i], "sent to a closed channel");
            Event::Sent { id: ids[i].expect("a send has a value"), chan }
        }
        Got::Refused(value) => {
            assert_eq!(Some(value.id), ids[i], "another value was returned");
            Event::Refused { id: value.id, chan }
        }
        Got::Received(value) => Event::Received { id: value.id, chan },
        Got::Closed => Event::Closed { chan },
        Got::Nothing => unreachable!("handled above"),
    });
}

/// Runs the actors, closes the kept channels, and checks the logs.
fn run_concurrently(program: &Concurrent) {
    let (kept, mut clones): (Ends, Ends) = program
        .caps
        .iter()
        .enumerate()
        .map(|(c, &cap)| {
            let (tx, rx) = new_channel(cap);
            let ours = (!program.unkept[c]).then(|| (tx.clone(), rx.clone()));
            (ours.unzip(), (Some(tx), Some(rx)))
        })
        .unzip();
    let shared = Arc::new(Shared {
        counts: Arc::default(),
        caps: program.caps.clone(),
        unkept: program.unkept.clone(),
        closed: program.caps.iter().map(|_| AtomicBool::new(false)).collect(),
        running: AtomicUsize::new(program.actors.len()),
    });
    let actors: Vec<_> = program
        .actors
        .iter()
        .map(|actor| {
            let (actor, shared, ends) = (actor.clone(), shared.clone(), clones.clone());
            Handle::start_on_thread_if(actor.on_thread, move || actor.run(&shared, ends))
        })
        .collect();
    clones.clear();

    let start = Instant::now();
    while shared.running.load(Ordering::SeqCst) > 0
        && start.elapsed() < Duration::from_micros(program.close_after_micros)
    {
        sleep(Duration::from_micros(100));
    }
    for (c, (tx, _)) in kept.iter().enumerate() {
        if let Some(tx) = tx {
            tx.close();
            shared.closed[c].store(true, Ordering::SeqCst);
        }
    }
    let logs: Vec<_> = actors.into_iter().map(|actor| actor.join("an actor to end")).collect();

    // The values left in the kept channels, at which no operation may wait any more.
    let mut left = Vec::new();
    for (chan, (_, rx)) in kept.iter().enumerate() {
        if let Some(rx) = rx {
            assert_eq!(rx.waiters(), (0, 0), "an operation is left waiting at channel {chan}");
            left.extend(rx.try_iter().map(|value| Event::Received { id: value.id, chan }));
        }
    }
    drop(kept);
    shared.counts.assert_all_dropped_once();
    check_logs(program, &logs, &left);
}

/// Asserts that each value has one result, that values arrive in order, and that a channel that was
/// seen closed stays closed.
fn check_logs(program: &Concurrent, logs: &[Vec<Event>], left: &[Event]) {
    let mut made = HashMap::new();
    let mut results: HashMap<usize, Vec<Event>> = HashMap::new();
    for (actor, log) in logs.iter().enumerate() {
        for &event in log {
            match event {
                Event::Made { id, chan } => {
                    made.insert(id, (actor, chan));
                }
                Event::Sent { id, .. } | Event::Refused { id, .. } => {
                    results.entry(id).or_default().push(event);
                }
                _ => {}
            }
        }
    }
    // A value is received once, from the channel it was sent to, in the order of its sender.
    let mut received = HashSet::new();
    let mut drained = HashSet::new();
    for log in logs.iter().map(Vec::as_slice).chain([left]) {
        let mut last: HashMap<(usize, usize), usize> = HashMap::new();
        let mut seen_closed = HashSet::new();
        for &event in log {
            match event {
                Event::Received { id, chan } => {
                    assert!(received.insert(id), "#{id} was received twice");
                    assert!(
                        !seen_closed.contains(&chan),
                        "#{id} was received after channel {chan} was seen closed"
                    );
                    let (sender, to) = made[&id];
                    assert_eq!(to, chan, "#{id} was received from another channel");
                    // An actor sends values with ascending ids to a channel.
                    let before = last.insert((sender, chan), id);
                    assert!(before.is_none_or(|b| b < id), "{before:?} of {sender} before #{id}");
                }
                Event::Closed { chan } => {
                    seen_closed.insert(chan);
                    drained.insert(chan);
                }
                _ => {}
            }
        }
    }
    for event in left {
        if let Event::Received { id, chan } = event {
            assert!(
                !drained.contains(chan),
                "#{id} was in channel {chan} after it was seen drained"
            );
        }
    }
    // A send has one result. A value that was sent is received, unless its channel lost all
    // receivers.
    for (id, (_, chan)) in made {
        match results.get(&id).map_or(&[][..], Vec::as_slice) {
            [] | [Event::Refused { .. }] => {
                assert!(!received.contains(&id), "#{id} was received, but not sent");
            }
            [Event::Sent { .. }] => {
                let lost = !received.contains(&id);
                assert!(!lost || program.unkept[chan], "#{id} was sent and is lost");
            }
            several => panic!("#{id} has several results: {several:?}"),
        }
    }
    // An actor that saw a channel closed never sends to it again.
    for log in logs {
        let mut seen_closed = HashSet::new();
        for event in log {
            match event {
                Event::Refused { chan, .. } | Event::Closed { chan } => {
                    seen_closed.insert(chan);
                }
                Event::Sent { id, chan } => {
                    assert!(
                        !seen_closed.contains(chan),
                        "#{id} was sent after channel {chan} was seen closed"
                    );
                }
                _ => {}
            }
        }
    }
}

#[test]
fn concurrent_operations_keep_the_rules_of_channels() {
    run_programs(
        "concurrent_operations_keep_the_rules_of_channels",
        a_concurrent_program(),
        |program| {
            runtime(program.runtime).run(|| run_concurrently(program));
        },
    );
}
