//! One operation after another, each compared with the model.

use crate::action::{Action, Arm, DropCounts, End, Form, Got, How, Outcome, Side, Value};
use crate::common::yield_until;
use crate::{
    Handle, MAX_CHANNELS, PROCS, UNBOUNDED, a_form, a_how, a_side, capacities, new_channel,
    run_programs, runtime,
};
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use trefoil::chan::{Receiver, Sender};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Here,
    Goroutine,
    Thread,
}

#[derive(Clone, Debug)]
enum Op {
    /// With one arm: a plain operation, or a select of one.
    Act {
        arms: Vec<(usize, Side)>,
        with_never: bool,
        how: How,
        form: Form,
        place: Place,
    },
    Close(usize),
    /// Drops the program's own handle; operations that wait have theirs.
    DropEnd(usize, Side),
}

#[derive(Clone, Debug)]
struct Program {
    caps: Vec<usize>,
    ops: Vec<Op>,
    /// The runtime, as an index into `PROCS`; `None` for a plain thread.
    driver: Option<usize>,
}

fn an_op() -> impl Strategy<Value = Op> {
    let arms = prop_oneof![
        5 => vec((0..MAX_CHANNELS, a_side()), 1..=1),
        5 => vec((0..MAX_CHANNELS, a_side()), 2..=4),
    ];
    let place = prop_oneof![
        3 => Just(Place::Here),
        5 => Just(Place::Goroutine),
        1 => Just(Place::Thread)
    ];
    let act = (arms, any::<bool>(), a_how(), a_form(), place).prop_map(
        |(arms, with_never, how, form, place)| Op::Act { arms, with_never, how, form, place },
    );
    prop_oneof![
        30 => act,
        1 => (0..MAX_CHANNELS).prop_map(Op::Close),
        1 => (0..MAX_CHANNELS, a_side()).prop_map(|(c, side)| Op::DropEnd(c, side)),
    ]
}

fn a_program() -> impl Strategy<Value = Program> {
    let driver = prop_oneof![Just(None), (0..PROCS.len()).prop_map(Some)];
    (capacities(), vec(an_op(), 1..60), driver).prop_map(|(caps, ops, driver)| Program {
        caps,
        ops,
        driver,
    })
}

/// The specification of a channel: Go's rules.
struct Model {
    cap: usize,
    buffer: VecDeque<usize>,
    closed: bool,
    /// Handles that exist, also below.
    senders: usize,
    receivers: usize,
    /// The waiting operations in order: the number of the wait, and its arms at this channel. (If a
    /// select has several equal arms, any of them may be served.)
    waiting: HashMap<Side, VecDeque<(usize, Vec<usize>)>>,
}

impl Model {
    fn new(cap: usize) -> Model {
        let waiting = [(Side::Send, VecDeque::new()), (Side::Recv, VecDeque::new())].into();
        Model { cap, buffer: VecDeque::new(), closed: false, senders: 1, receivers: 1, waiting }
    }

    fn queue(&mut self, side: Side) -> &mut VecDeque<(usize, Vec<usize>)> {
        self.waiting.get_mut(&side).expect("both sides have a queue")
    }

    fn is_ready(&self, side: Side) -> bool {
        self.closed
            || match side {
                Side::Send => self.buffer.len() < self.cap || !self.waiting[&Side::Recv].is_empty(),
                Side::Recv => !self.buffer.is_empty() || !self.waiting[&Side::Send].is_empty(),
            }
    }

    fn waiters(&self) -> (usize, usize) {
        let count = |side| self.waiting[&side].iter().map(|(_, arms)| arms.len()).sum();
        (count(Side::Send), count(Side::Recv))
    }
}

struct Channel {
    tx: Option<Sender<Value>>,
    rx: Option<Receiver<Value>>,
    model: Model,
}

impl Channel {
    fn has(&self, side: Side) -> bool {
        match side {
            Side::Send => self.tx.is_some(),
            Side::Recv => self.rx.is_some(),
        }
    }

    fn waiters(&self) -> Option<(usize, usize)> {
        match (&self.tx, &self.rx) {
            (Some(tx), _) => Some(tx.waiters()),
            (_, Some(rx)) => Some(rx.waiters()),
            _ => None,
        }
    }

    /// Asserts that the channel is in the state of the model.
    #[track_caller]
    fn check(&self, c: usize) {
        let model = &self.model;
        let (len, full) = (model.buffer.len(), model.buffer.len() == model.cap);
        let capacity = Some(model.cap).filter(|&cap| cap != UNBOUNDED);
        if let Some(tx) = &self.tx {
            let seen = (tx.len(), tx.is_full(), tx.is_empty(), tx.is_closed(), tx.capacity());
            assert_eq!(seen, (len, full, len == 0, model.closed, capacity), "channel {c}");
        }
        if let Some(rx) = &self.rx {
            let seen = (rx.len(), rx.is_full(), rx.is_empty(), rx.is_closed(), rx.capacity());
            assert_eq!(seen, (len, full, len == 0, model.closed, capacity), "channel {c}");
        }
        if let Some(waiters) = self.waiters() {
            assert_eq!(waiters, model.waiters(), "waiters (senders, receivers) of channel {c}");
        }
    }
}

/// An operation that waits, according to the model.
struct Waiting {
    handle: Handle<(Outcome, Vec<End>)>,
    arms: Vec<ModelArm>,
}

#[derive(Clone, Copy, Debug)]
struct ModelArm {
    chan: usize,
    side: Side,
    /// For a send.
    value: Option<usize>,
}

/// The channels of a program with their models, and the operations that wait.
struct Simulation {
    counts: Arc<DropCounts>,
    channels: Vec<Channel>,
    waiting: HashMap<usize, Waiting>,
    next: usize,
    /// Ends of operations that have ended, to be dropped one by one.
    returned: Vec<(usize, Side, End)>,
}

impl Simulation {
    fn new(caps: &[usize]) -> Simulation {
        let channel = |&cap: &usize| {
            let (tx, rx) = new_channel(cap);
            Channel { tx: Some(tx), rx: Some(rx), model: Model::new(cap) }
        };
        Simulation {
            counts: Arc::default(),
            channels: caps.iter().map(channel).collect(),
            waiting: HashMap::new(),
            next: 0,
            returned: Vec::new(),
        }
    }

    fn run(&mut self, ops: &[Op]) {
        for op in ops {
            self.step(op);
        }
        // At the end all waiters are woken and all values dropped.
        for c in 0..self.channels.len() {
            match self.channels[c].has(Side::Send) {
                true => self.step(&Op::Close(c)),
                false => self.drop_end(c, Side::Recv),
            }
            self.drop_returned();
        }
        assert!(self.waiting.is_empty(), "an operation still waits at a closed channel");
        for c in 0..self.channels.len() {
            self.drop_end(c, Side::Send);
            self.drop_end(c, Side::Recv);
        }
        self.counts.assert_all_dropped_once();
    }

    fn step(&mut self, op: &Op) {
        let n = self.channels.len();
        match op {
            Op::Act { arms, with_never, how, form, place } => {
                let arms: Vec<_> = arms.iter().map(|&(c, side)| (c % n, side)).collect();
                if arms.iter().all(|&(c, side)| self.channels[c].has(side)) {
                    self.act(&arms, *with_never, *how, *form, *place);
                }
            }
            Op::Close(c) => {
                let c = c % n;
                if let Some(tx) = &self.channels[c].tx {
                    tx.close();
                    self.close(c);
                }
            }
            Op::DropEnd(c, side) => {
                let c = c % n;
                // A select that owns the last handles of both ends of a channel waits for ever.
                let owns_both = |w: &Waiting| {
                    [Side::Send, Side::Recv]
                        .iter()
                        .all(|&s| w.arms.iter().any(|arm| arm.chan == c && arm.side == s))
                };
                if !self.waiting.values().any(owns_both) {
                    self.drop_end(c, *side);
                }
            }
        }
        self.drop_returned();
        self.check();
    }

    fn act(
        &mut self,
        arms: &[(usize, Side)],
        with_never: bool,
        how: How,
        form: Form,
        place: Place,
    ) {
        let mut action = Action { arms: Vec::new(), with_never, how, form };
        let mut model_arms = Vec::new();
        for &(chan, side) in arms {
            let channel = &mut self.channels[chan];
            let (end, value) = match side {
                Side::Send => {
                    channel.model.senders += 1;
                    (channel.tx.clone().map(End::Tx), Some(self.counts.make_value()))
                }
                Side::Recv => {
                    channel.model.receivers += 1;
                    (channel.rx.clone().map(End::Rx), None)
                }
            };
            model_arms.push(ModelArm { chan, side, value: value.as_ref().map(|v| v.id) });
            action.arms.push(Arm { end: end.expect("checked by the caller"), value });
        }
        let ready: HashSet<usize> =
            (0..arms.len()).filter(|&i| self.is_ready(model_arms[i])).collect();
        if ready.is_empty() && how.waits() {
            return self.must_wait(action, model_arms, place == Place::Thread);
        }
        let (outcome, ends) = match place {
            Place::Here => action.perform(),
            _ => Handle::start_on_thread_if(place == Place::Thread, move || action.perform())
                .join("an operation that need not wait"),
        };
        self.keep_ends(&model_arms, ends);
        match outcome {
            (_, Got::Nothing) => assert!(
                ready.is_empty(),
                "the operation did not take one of the ready arms {ready:?}"
            ),
            (i, got) => {
                assert!(ready.contains(&i), "arm {i} was not ready: {got:?}");
                self.done(model_arms[i], got);
            }
        }
    }

    fn is_ready(&self, arm: ModelArm) -> bool {
        self.channels[arm.chan].model.is_ready(arm.side)
    }

    /// Starts an operation that must wait, and waits until it is in the queues.
    fn must_wait(&mut self, action: Action, arms: Vec<ModelArm>, thread: bool) {
        let number = self.next;
        self.next += 1;
        for (i, arm) in arms.iter().enumerate() {
            let queue = self.channels[arm.chan].model.queue(arm.side);
            match queue.back_mut() {
                Some((last, same)) if *last == number => same.push(i),
                _ => queue.push_back((number, vec![i])),
            }
        }
        let handle = Handle::start_on_thread_if(thread, move || action.perform());
        yield_until("the operation to wait", || {
            self.channels.iter().all(|c| c.waiters().is_none_or(|w| w == c.model.waiters()))
        });
        self.waiting.insert(number, Waiting { handle, arms });
    }

    /// Checks the result of `arm`, and applies the operation to the model.
    fn done(&mut self, arm: ModelArm, got: Got) {
        let ModelArm { chan, side, value } = arm;
        let model = &mut self.channels[chan].model;
        match side {
            Side::Send if model.closed => assert_got(got, Expected::Refused(value)),
            Side::Send => {
                assert_got(got, Expected::Sent);
                let value = value.expect("a send has a value");
                match model.queue(Side::Recv).front().cloned() {
                    Some((waiter, among)) => {
                        let (_, got) = self.woken(waiter, &among);
                        assert_got(got, Expected::Received(value));
                    }
                    None => {
                        assert!(model.buffer.len() < model.cap, "sent to a full channel");
                        model.buffer.push_back(value);
                    }
                }
            }
            Side::Recv => {
                let first = model.buffer.pop_front();
                let sender = model.queue(Side::Send).front().cloned();
                let closed = model.closed;
                // The first waiting sender fills the free slot, or passes its value directly.
                let next = sender.map(|(waiter, among)| {
                    let (served, result) = self.woken(waiter, &among);
                    assert_got(result, Expected::Sent);
                    served.value.expect("a send has a value")
                });
                match (first, next) {
                    (Some(first), next) => {
                        assert_got(got, Expected::Received(first));
                        self.channels[chan].model.buffer.extend(next);
                    }
                    (None, Some(next)) => assert_got(got, Expected::Received(next)),
                    (None, None) => {
                        assert!(closed, "the receive ended on an empty channel that is open");
                        assert_got(got, Expected::Closed);
                    }
                }
            }
        }
    }

    /// Joins a wait, which must have ended by one of these arms. Returns the arm and its result.
    fn woken(&mut self, number: usize, among: &[usize]) -> (ModelArm, Got) {
        let Waiting { handle, arms } = self.waiting.remove(&number).expect("the operation waits");
        for arm in &arms {
            let queue = self.channels[arm.chan].model.queue(arm.side);
            queue.retain(|&(waiter, _)| waiter != number);
        }
        let ((i, got), ends) = handle.join("the operation to wake up");
        assert!(
            among.contains(&i),
            "woken by arm {i} of {arms:?}, not by one of {among:?}: {got:?}"
        );
        self.keep_ends(&arms, ends);
        (arms[i], got)
    }

    fn keep_ends(&mut self, arms: &[ModelArm], ends: Vec<End>) {
        let ends = arms.iter().zip(ends).map(|(arm, end)| (arm.chan, arm.side, end));
        self.returned.extend(ends);
    }

    /// After a close: checks that waiting receivers end, and that waiting senders get their values
    /// back.
    fn close(&mut self, chan: usize) {
        self.channels[chan].model.closed = true;
        for side in [Side::Recv, Side::Send] {
            while let Some((waiter, among)) = self.channels[chan].model.queue(side).front().cloned()
            {
                let (arm, got) = self.woken(waiter, &among);
                let expected = match side {
                    Side::Recv => Expected::Closed,
                    Side::Send => Expected::Refused(arm.value),
                };
                assert_got(got, expected);
            }
        }
    }

    fn drop_end(&mut self, chan: usize, side: Side) {
        let channel = &mut self.channels[chan];
        let gone = match side {
            Side::Send => channel.tx.take().map(drop).is_some(),
            Side::Recv => channel.rx.take().map(drop).is_some(),
        };
        if gone {
            self.one_less(chan, side);
        }
        self.drop_returned();
    }

    /// Removes a handle from the model. The last one of its side closes the channel.
    fn one_less(&mut self, chan: usize, side: Side) {
        let model = &mut self.channels[chan].model;
        let count = match side {
            Side::Send => &mut model.senders,
            Side::Recv => &mut model.receivers,
        };
        *count -= 1;
        if *count > 0 {
            return;
        }
        if !model.closed {
            self.close(chan);
        }
        if side == Side::Recv {
            for id in self.channels[chan].model.buffer.drain(..) {
                assert_eq!(self.counts.drops_of(id), 1, "#{id} was in a channel without receivers");
            }
        }
    }

    /// Drops the ends of operations that have ended. Each drop may end other operations.
    fn drop_returned(&mut self) {
        while let Some((chan, side, end)) = self.returned.pop() {
            drop(end);
            self.one_less(chan, side);
        }
    }

    #[track_caller]
    fn check(&self) {
        self.channels.iter().enumerate().for_each(|(c, channel)| channel.check(c));
        for (number, waiting) in &self.waiting {
            assert!(!waiting.handle.is_finished(), "wait {number} ended: {:?}", waiting.arms);
        }
    }
}

#[derive(Debug)]
enum Expected {
    Sent,
    Refused(Option<usize>),
    Received(usize),
    Closed,
}

#[track_caller]
fn assert_got(got: Got, expected: Expected) {
    let right = match (&got, &expected) {
        (Got::Sent, Expected::Sent) | (Got::Closed, Expected::Closed) => true,
        (Got::Refused(value), Expected::Refused(id)) => Some(value.id) == *id,
        (Got::Received(value), Expected::Received(id)) => value.id == *id,
        _ => false,
    };
    assert!(right, "{got:?} where the model says {expected:?}");
}

#[test]
fn operations_one_at_a_time_agree_with_the_model() {
    run_programs("operations_one_at_a_time_agree_with_the_model", a_program(), |program| {
        let drive = || Simulation::new(&program.caps).run(&program.ops);
        match program.driver {
            Some(i) => runtime(i).run(drive),
            None => drive(),
        }
    });
}
