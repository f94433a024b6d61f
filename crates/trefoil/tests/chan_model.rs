//! Channels and selects against a model: random programs, whose results are known.
//!
//! | test | what runs | what is compared |
//! |---|---|---|
//! | `one_at_a_time` | one operation after another; who must wait does so on a goroutine or thread of its own | everything, after every step: results, who sleeps, who is woken, in which order, what is left |
//! | `all_at_once` | up to eight goroutines and threads, each with its own operations, at 1, 2, 4 and 16 Ps | what must hold in whatever order: each value has one fate, orders are kept, nobody is left waiting |
//!
//! | variable | meaning |
//! |---|---|
//! | `TREFOIL_CHAN_SECS` | how long each of the two goes on, 4 by default |
//! | `TREFOIL_CHAN_SEED` | the seed to begin with, printed by every run |
//!
//! A program that fails is made smaller by proptest and printed. `one_at_a_time` depends on the seed
//! alone but for the random choice among ready arms; `all_at_once` also on how threads interleave.

mod common;

use common::{watchdog_for, yield_until};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};
use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};
use trefoil::chan::{
    Receiver, RecvTimeoutError, Select, SendTimeoutError, Sender, TryRecvError, TrySendError,
    bounded, never, unbounded,
};
use trefoil::time::sleep;
use trefoil::{Runtime, go, select, yield_now};

/// Stands for an unbounded channel among capacities.
const UNBOUNDED: usize = usize::MAX;
/// A limit that is never reached.
const LONG: Duration = Duration::from_secs(300);
/// Programs between two looks at the clock.
const BATCH: u32 = 16;

// ---- Values that are counted.

/// Every value ever made, and how often it was dropped.
#[derive(Default)]
struct Book {
    drops: Mutex<Vec<u32>>,
}

/// What goes through the channels. Neither Copy nor of one word.
struct Value {
    id: usize,
    /// The same again, to notice bytes that were mixed up.
    check: [usize; 2],
    book: Arc<Book>,
}

impl Book {
    fn make(self: &Arc<Book>) -> Value {
        let mut drops = self.drops.lock().unwrap();
        drops.push(0);
        let id = drops.len() - 1;
        Value { id, check: [!id, id], book: self.clone() }
    }

    fn drops_of(&self, id: usize) -> u32 {
        self.drops.lock().unwrap()[id]
    }

    fn check_all_gone(&self) {
        let drops = self.drops.lock().unwrap();
        let wrong: Vec<_> = drops.iter().enumerate().filter(|&(_, &n)| n != 1).collect();
        assert!(wrong.is_empty(), "values (id, drops) not dropped exactly once: {wrong:?}");
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        assert_eq!(self.check, [!self.id, self.id], "a value was mixed up");
        self.book.drops.lock().unwrap()[self.id] += 1;
    }
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.id)
    }
}

// ---- Operations.

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Side {
    Send,
    Recv,
}

/// For how long an operation waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum How {
    /// For as long as it takes.
    Block,
    /// Likewise, but it has a limit: it can be claimed by two.
    Patient,
    /// A moment.
    Brief,
    Try,
}

impl How {
    fn limit(self) -> Duration {
        if self == How::Patient { LONG } else { Duration::from_micros(300) }
    }

    fn waits(self) -> bool {
        matches!(self, How::Block | How::Patient)
    }
}

/// By which of the faces of the library.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Form {
    /// `send`, `recv_timeout`, …; for one operation.
    Method,
    /// `Select`.
    Dynamic,
    /// `select!`; for one or two.
    Macro,
}

/// One end of a channel.
enum End {
    Tx(Sender<Value>),
    Rx(Receiver<Value>),
}

/// An operation with what it needs.
struct Arm {
    end: End,
    /// Of a send.
    value: Option<Value>,
}

struct Action {
    arms: Vec<Arm>,
    /// An arm that is never chosen, too.
    with_never: bool,
    how: How,
    form: Form,
}

/// What an operation came to.
#[derive(Debug)]
enum Got {
    Sent,
    /// Closed; the value comes back.
    Refused(Value),
    Received(Value),
    Closed,
    /// Not now, or not in time.
    Nothing,
}

/// Which arm, and what. For `Nothing` the arm means nothing.
type Outcome = (usize, Got);

fn sent<E>(arm: usize, result: Result<(), E>, back: impl FnOnce(E) -> Value) -> Outcome {
    (arm, result.map_or_else(|e| Got::Refused(back(e)), |()| Got::Sent))
}

fn received<E>(arm: usize, result: Result<Value, E>) -> Outcome {
    (arm, result.map_or(Got::Closed, Got::Received))
}

const NOTHING: Outcome = (usize::MAX, Got::Nothing);

/// `select!` in the form that `$how` asks for.
macro_rules! select_how {
    ($how:expr, $never:expr, $($arms:tt)*) => {
        match ($how, $never) {
            (How::Block, false) => select! { $($arms)* },
            (How::Block, true) => {
                select! { recv(never::<u8>()) -> _ => unreachable!(), $($arms)* }
            }
            (How::Try, false) => select! { $($arms)* default => NOTHING },
            (How::Try, true) => {
                select! { recv(never::<u8>()) -> _ => unreachable!(), $($arms)* default => NOTHING }
            }
            (how, false) => select! { $($arms)* after(how.limit()) => NOTHING },
            (how, true) => {
                select! {
                    $($arms)*
                    recv(never::<u8>()) -> _ => unreachable!(),
                    after(how.limit()) => NOTHING,
                }
            }
        }
    };
}

impl Action {
    /// Does it, and gives the ends back: who drops them is a matter of the program.
    fn perform(self) -> (Outcome, Vec<End>) {
        let Action { arms, with_never, how, form } = self;
        let (ends, mut values): (Vec<End>, Vec<Option<Value>>) =
            arms.into_iter().map(|arm| (arm.end, arm.value)).unzip();
        let outcome = match (form, &ends[..]) {
            (Form::Method, [end]) => method(end, values.remove(0), how),
            (Form::Macro, [end]) => macro_one(end, values.remove(0), how, with_never),
            (Form::Macro, [a, b]) => {
                let b_value = values.remove(1);
                macro_two(a, b, values.remove(0), b_value, how, with_never)
            }
            _ => dynamic(&ends, values, how, with_never),
        };
        (outcome, ends)
    }
}

fn method(end: &End, value: Option<Value>, how: How) -> Outcome {
    match (end, value) {
        (End::Tx(tx), Some(value)) => {
            let id = value.id;
            let (got, back) = match how {
                How::Block => match tx.send(value) {
                    Ok(()) => (Got::Sent, None),
                    Err(e) => (Got::Refused(e.into_inner()), None),
                },
                How::Try => match tx.try_send(value) {
                    Ok(()) => (Got::Sent, None),
                    Err(TrySendError::Full(value)) => (Got::Nothing, Some(value)),
                    Err(TrySendError::Closed(value)) => (Got::Refused(value), None),
                },
                how => match tx.send_timeout(value, how.limit()) {
                    Ok(()) => (Got::Sent, None),
                    Err(SendTimeoutError::Timeout(value)) => (Got::Nothing, Some(value)),
                    Err(SendTimeoutError::Closed(value)) => (Got::Refused(value), None),
                },
            };
            assert!(back.is_none_or(|value| value.id == id), "another value came back");
            (0, got)
        }
        (End::Rx(rx), None) => {
            let got = match how {
                How::Block => rx.recv().map_or(Got::Closed, Got::Received),
                How::Try => match rx.try_recv() {
                    Ok(value) => Got::Received(value),
                    Err(TryRecvError::Empty) => Got::Nothing,
                    Err(TryRecvError::Closed) => Got::Closed,
                },
                how => match rx.recv_timeout(how.limit()) {
                    Ok(value) => Got::Received(value),
                    Err(RecvTimeoutError::Timeout) => Got::Nothing,
                    Err(RecvTimeoutError::Closed) => Got::Closed,
                },
            };
            (0, got)
        }
        _ => unreachable!("a send has a value, a receive has none"),
    }
}

fn macro_one(end: &End, value: Option<Value>, how: How, with_never: bool) -> Outcome {
    match (end, value) {
        (End::Tx(tx), Some(v)) => {
            select_how!(how, with_never, send(tx, v) -> r => sent(0, r, |e| e.into_inner()),)
        }
        (End::Rx(rx), _) => select_how!(how, with_never, recv(rx) -> r => received(0, r),),
        _ => unreachable!("a send has a value"),
    }
}

fn macro_two(
    a: &End,
    b: &End,
    va: Option<Value>,
    vb: Option<Value>,
    how: How,
    with_never: bool,
) -> Outcome {
    match (a, va, b, vb) {
        (End::Rx(a), _, End::Rx(b), _) => select_how!(how, with_never,
            recv(a) -> r => received(0, r),
            recv(b) -> r => received(1, r),),
        (End::Rx(a), _, End::Tx(b), Some(vb)) => select_how!(how, with_never,
            recv(a) -> r => received(0, r),
            send(b, vb) -> r => sent(1, r, |e| e.into_inner()),),
        (End::Tx(a), Some(va), End::Rx(b), _) => select_how!(how, with_never,
            send(a, va) -> r => sent(0, r, |e| e.into_inner()),
            recv(b) -> r => received(1, r),),
        (End::Tx(a), Some(va), End::Tx(b), Some(vb)) => select_how!(how, with_never,
            send(a, va) -> r => sent(0, r, |e| e.into_inner()),
            send(b, vb) -> r => sent(1, r, |e| e.into_inner()),),
        _ => unreachable!("a send has a value"),
    }
}

fn dynamic(ends: &[End], values: Vec<Option<Value>>, how: How, with_never: bool) -> Outcome {
    let nothing = never::<u8>();
    let mut select = Select::new();
    for (end, value) in ends.iter().zip(values) {
        match (end, value) {
            (End::Tx(tx), Some(value)) => select.send(tx, value),
            (End::Rx(rx), _) => select.recv(rx),
            _ => unreachable!("a send has a value"),
        };
    }
    if with_never {
        select.recv(&nothing);
    }
    let done = match how {
        How::Block => Some(select.select()),
        How::Try => select.try_select().ok(),
        How::Patient => select.select_deadline(Instant::now() + LONG).ok(),
        how => select.select_timeout(how.limit()).ok(),
    };
    let Some(done) = done else { return NOTHING };
    let i = done.index();
    match &ends[i] {
        End::Tx(tx) => sent(i, done.send(tx), |e| e.into_inner()),
        End::Rx(rx) => received(i, done.recv(rx)),
    }
}

// ---- Those who wait.

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Here,
    Goroutine,
    Thread,
}

enum Handle<T> {
    Goroutine(trefoil::JoinHandle<T>),
    Thread(std::thread::JoinHandle<T>),
}

impl<T: Send + 'static> Handle<T> {
    fn start(thread: bool, f: impl FnOnce() -> T + Send + 'static) -> Handle<T> {
        if thread { Handle::Thread(std::thread::spawn(f)) } else { Handle::Goroutine(go(f)) }
    }

    fn is_finished(&self) -> bool {
        match self {
            Handle::Goroutine(h) => h.is_finished(),
            Handle::Thread(h) => h.is_finished(),
        }
    }

    /// Its value; panics if that takes too long.
    #[track_caller]
    fn join(self, what: &str) -> T {
        yield_until(what, || self.is_finished());
        let result = match self {
            Handle::Goroutine(h) => h.join(),
            Handle::Thread(h) => h.join(),
        };
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

fn new_channel(cap: usize) -> (Sender<Value>, Receiver<Value>) {
    if cap == UNBOUNDED { unbounded() } else { bounded(cap) }
}

// ---- How long, and with which seed.

fn number_from(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text}: expected a number")))
}

/// The runtimes that programs run on; index into [`PROCS`].
const PROCS: [usize; 4] = [1, 2, 4, 16];

fn runtime(i: usize) -> &'static Runtime {
    static ALL: [OnceLock<Runtime>; PROCS.len()] = [const { OnceLock::new() }; PROCS.len()];
    ALL[i].get_or_init(|| Runtime::builder().procs(PROCS[i]).build().expect("a runtime"))
}

/// Runs random programs for as long as the environment says. A failure shows the smallest program.
fn run_programs<P: fmt::Debug>(name: &str, programs: impl Strategy<Value = P>, test: impl Fn(&P)) {
    let length = Duration::from_secs(number_from("TREFOIL_CHAN_SECS").unwrap_or(4));
    let _dog = watchdog_for(length + Duration::from_secs(240));
    let seed = number_from("TREFOIL_CHAN_SEED").unwrap_or_else(rand::random);
    eprintln!("{name}: TREFOIL_CHAN_SEED={seed} TREFOIL_CHAN_SECS={}", length.as_secs());
    let start = Instant::now();
    let mut batch = 0;
    while batch == 0 || start.elapsed() < length {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&(seed + batch).to_le_bytes());
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        let config = Config {
            cases: BATCH,
            failure_persistence: None,
            max_shrink_time: 20_000,
            max_shrink_iters: 2000,
            ..Config::default()
        };
        let mut runner = TestRunner::new_with_rng(config, rng);
        let result = runner.run(&programs, |program| {
            test(&program);
            Ok(())
        });
        match result {
            Ok(()) => {}
            Err(TestError::Fail(why, program)) => {
                panic!(
                    "{why}\nwith TREFOIL_CHAN_SEED={} and the program\n{program:#?}",
                    seed + batch
                )
            }
            Err(e) => panic!("{e}"),
        }
        batch += 1;
    }
    eprintln!("{name}: {} programs", batch * u64::from(BATCH));
}

fn a_side() -> impl Strategy<Value = Side> + Clone {
    prop_oneof![Just(Side::Send), Just(Side::Recv)]
}

fn a_how() -> impl Strategy<Value = How> {
    prop_oneof![
        6 => Just(How::Block),
        3 => Just(How::Patient),
        1 => Just(How::Brief),
        3 => Just(How::Try),
    ]
}

fn a_form() -> impl Strategy<Value = Form> {
    prop_oneof![Just(Form::Method), Just(Form::Dynamic), Just(Form::Macro)]
}

fn capacities() -> impl Strategy<Value = Vec<usize>> {
    vec(prop_oneof![4 => Just(0), 3 => 1..4usize, 1 => Just(UNBOUNDED)], 1..=MAX_CHANNELS)
}

/// Channels of a program. Few: so that operations meet.
const MAX_CHANNELS: usize = 3;

// ---- One at a time.

#[derive(Clone, Debug)]
enum Op {
    /// One arm is a plain operation, or a select of one.
    Act {
        arms: Vec<(usize, Side)>,
        with_never: bool,
        how: How,
        form: Form,
        place: Place,
    },
    Close(usize),
    /// The program's own handle; operations that wait have theirs.
    DropEnd(usize, Side),
}

#[derive(Clone, Debug)]
struct Program {
    caps: Vec<usize>,
    ops: Vec<Op>,
    /// Which runtime; None: the driver is a plain thread.
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

/// A channel as it should be: Go's rules in a few lines.
struct Model {
    cap: usize,
    buffer: VecDeque<usize>,
    closed: bool,
    /// Handles that exist.
    senders: usize,
    receivers: usize,
    /// Who waits, in order: the number of the wait, and its arms here. (Which of several equal arms
    /// of one select is served is the select's choice.)
    waiting: HashMap<Side, VecDeque<(usize, Vec<usize>)>>,
}

impl Model {
    fn new(cap: usize) -> Model {
        let waiting = [(Side::Send, VecDeque::new()), (Side::Recv, VecDeque::new())].into();
        Model { cap, buffer: VecDeque::new(), closed: false, senders: 1, receivers: 1, waiting }
    }

    fn queue(&mut self, side: Side) -> &mut VecDeque<(usize, Vec<usize>)> {
        self.waiting.get_mut(&side).expect("both are there")
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

    /// The real one is as the model says.
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
            assert_eq!(waiters, model.waiters(), "who waits at channel {c}");
        }
    }
}

/// A wait that the model says is on.
struct Waiting {
    handle: Handle<(Outcome, Vec<End>)>,
    arms: Vec<ModelArm>,
}

#[derive(Clone, Copy, Debug)]
struct ModelArm {
    chan: usize,
    side: Side,
    /// Of a send.
    value: Option<usize>,
}

struct World {
    book: Arc<Book>,
    channels: Vec<Channel>,
    waiting: HashMap<usize, Waiting>,
    next: usize,
    /// Ends of operations that are over, to be dropped one by one.
    returned: Vec<(usize, Side, End)>,
}

impl World {
    fn new(caps: &[usize]) -> World {
        let channel = |&cap: &usize| {
            let (tx, rx) = new_channel(cap);
            Channel { tx: Some(tx), rx: Some(rx), model: Model::new(cap) }
        };
        World {
            book: Arc::default(),
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
        // The end: everybody is woken, and nothing is left.
        for c in 0..self.channels.len() {
            match self.channels[c].has(Side::Send) {
                true => self.step(&Op::Close(c)),
                false => self.drop_end(c, Side::Recv),
            }
            self.settle();
        }
        assert!(self.waiting.is_empty(), "somebody still waits at closed channels");
        for c in 0..self.channels.len() {
            self.drop_end(c, Side::Send);
            self.drop_end(c, Side::Recv);
        }
        self.book.check_all_gone();
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
                // A select that holds both ends of a channel and is its last holder waits for ever.
                let holds_both = |w: &Waiting| {
                    [Side::Send, Side::Recv]
                        .iter()
                        .all(|&s| w.arms.iter().any(|arm| arm.chan == c && arm.side == s))
                };
                if !self.waiting.values().any(holds_both) {
                    self.drop_end(c, *side);
                }
            }
        }
        self.settle();
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
                    (channel.tx.clone().map(End::Tx), Some(self.book.make()))
                }
                Side::Recv => {
                    channel.model.receivers += 1;
                    (channel.rx.clone().map(End::Rx), None)
                }
            };
            model_arms.push(ModelArm { chan, side, value: value.as_ref().map(|v| v.id) });
            action.arms.push(Arm { end: end.expect("looked at before"), value });
        }
        let ready: HashSet<usize> =
            (0..arms.len()).filter(|&i| self.is_ready(model_arms[i])).collect();
        if ready.is_empty() && how.waits() {
            return self.must_wait(action, model_arms, place == Place::Thread);
        }
        let (outcome, ends) = match place {
            Place::Here => action.perform(),
            _ => Handle::start(place == Place::Thread, move || action.perform())
                .join("an operation that can go on"),
        };
        self.keep_ends(&model_arms, ends);
        match outcome {
            (_, Got::Nothing) => assert!(ready.is_empty(), "one of {ready:?} could go on"),
            (i, got) => {
                assert!(ready.contains(&i), "arm {i} could not go on: {got:?}");
                self.done(model_arms[i], got);
            }
        }
    }

    fn is_ready(&self, arm: ModelArm) -> bool {
        self.channels[arm.chan].model.is_ready(arm.side)
    }

    /// Starts an operation that must wait, and sees it asleep.
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
        let handle = Handle::start(thread, move || action.perform());
        yield_until("somebody to wait", || {
            self.channels.iter().all(|c| c.waiters().is_none_or(|w| w == c.model.waiters()))
        });
        self.waiting.insert(number, Waiting { handle, arms });
    }

    /// The operation of `arm` went on with this result: it fits, and has its consequences.
    fn done(&mut self, arm: ModelArm, got: Got) {
        let ModelArm { chan, side, value } = arm;
        let model = &mut self.channels[chan].model;
        match side {
            Side::Send if model.closed => expect(got, Expected::Refused(value)),
            Side::Send => {
                expect(got, Expected::Sent);
                let value = value.expect("a send has one");
                match model.queue(Side::Recv).front().cloned() {
                    Some((waiter, among)) => {
                        let (_, got) = self.woken(waiter, &among);
                        expect(got, Expected::Received(value));
                    }
                    None => {
                        assert!(model.buffer.len() < model.cap, "sent where there is no room");
                        model.buffer.push_back(value);
                    }
                }
            }
            Side::Recv => {
                let first = model.buffer.pop_front();
                let sender = model.queue(Side::Send).front().cloned();
                let closed = model.closed;
                // The first who waits to send takes the free place, or gives us its value.
                let next = sender.map(|(waiter, among)| {
                    let (served, result) = self.woken(waiter, &among);
                    expect(result, Expected::Sent);
                    served.value.expect("a send has one")
                });
                match (first, next) {
                    (Some(first), next) => {
                        expect(got, Expected::Received(first));
                        self.channels[chan].model.buffer.extend(next);
                    }
                    (None, Some(next)) => expect(got, Expected::Received(next)),
                    (None, None) => {
                        assert!(closed, "nothing could be received");
                        expect(got, Expected::Closed);
                    }
                }
            }
        }
    }

    /// This wait must have ended by one of these arms.
    fn woken(&mut self, number: usize, among: &[usize]) -> (ModelArm, Got) {
        let Waiting { handle, arms } = self.waiting.remove(&number).expect("it waits");
        for arm in &arms {
            let queue = self.channels[arm.chan].model.queue(arm.side);
            queue.retain(|&(waiter, _)| waiter != number);
        }
        let ((i, got), ends) = handle.join("somebody to wake up");
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

    /// The channel was closed: receivers that wait get nothing, senders their values back.
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
                expect(got, expected);
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
        self.settle();
    }

    /// A handle is gone; the last one of its side closes the channel.
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
                assert_eq!(self.book.drops_of(id), 1, "#{id} lay in a channel without receivers");
            }
        }
    }

    /// Drops the ends of operations that are over. Each may end others.
    fn settle(&mut self) {
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
fn expect(got: Got, expected: Expected) {
    let right = match (&got, &expected) {
        (Got::Sent, Expected::Sent) | (Got::Closed, Expected::Closed) => true,
        (Got::Refused(value), Expected::Refused(id)) => Some(value.id) == *id,
        (Got::Received(value), Expected::Received(id)) => value.id == *id,
        _ => false,
    };
    assert!(right, "{got:?} where the model says {expected:?}");
}

#[test]
fn one_at_a_time() {
    run_programs("one_at_a_time", a_program(), |program| {
        let drive = || World::new(&program.caps).run(&program.ops);
        match program.driver {
            Some(i) => runtime(i).run(drive),
            None => drive(),
        }
    });
}

// ---- All at once.

#[derive(Clone, Debug)]
enum Step {
    Act { arms: Vec<(usize, Side)>, with_never: bool, how: How, form: Form },
    Close(usize),
    DropEnd(usize, Side),
    Look(usize),
    Yield,
}

#[derive(Clone, Debug)]
struct Actor {
    thread: bool,
    /// How often the steps are done.
    rounds: usize,
    steps: Vec<Step>,
}

#[derive(Clone, Debug)]
struct Storm {
    caps: Vec<usize>,
    /// Channels without a idle_poller: closed when the last of a side drops its end. There nobody waits
    /// without a limit.
    orphans: Vec<bool>,
    actors: Vec<Actor>,
    /// When the keepers close their channels, in microseconds.
    close_after: u64,
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
        3 => (0..MAX_CHANNELS).prop_map(Step::Look),
        6 => Just(Step::Yield),
    ]
}

fn a_storm() -> impl Strategy<Value = Storm> {
    let thread = prop_oneof![5 => Just(false), 1 => Just(true)];
    let actor = (thread, 1..20usize, vec(a_step(), 1..20))
        .prop_map(|(thread, rounds, steps)| Actor { thread, rounds, steps });
    let orphan = prop_oneof![3 => Just(false), 1 => Just(true)];
    (
        capacities(),
        vec(orphan, MAX_CHANNELS),
        vec(actor, 2..=8),
        prop_oneof![0..3000u64, Just(3000)],
        0..PROCS.len(),
    )
        .prop_map(|(caps, orphans, actors, close_after, runtime)| Storm {
            caps,
            orphans,
            actors,
            close_after,
            runtime,
        })
}

/// What an actor has seen, in its order.
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
    book: Arc<Book>,
    caps: Vec<usize>,
    orphans: Vec<bool>,
    /// Set when a `close` has returned.
    closed: Vec<AtomicBool>,
    running: AtomicUsize,
}

type Ends = Vec<(Option<Sender<Value>>, Option<Receiver<Value>>)>;

impl Actor {
    fn live(&self, shared: &Shared, mut ends: Ends) -> Vec<Event> {
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
                Step::Look(c) => {
                    let c = c % ends.len();
                    let len = ends[c].1.as_ref().map_or(0, Receiver::len);
                    assert!(len <= shared.caps[c], "{len} values in a channel for less");
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
    // Where nobody closes from outside we do not wait for ever.
    let how = match how.waits() && arms.iter().all(|&(c, _)| shared.orphans[c]) {
        true => How::Brief,
        false => how,
    };
    let closed_before: Vec<bool> =
        arms.iter().map(|&(c, _)| shared.closed[c].load(Ordering::SeqCst)).collect();
    let mut ids = Vec::new();
    let make = |&(chan, side): &(usize, Side)| match side {
        Side::Send => {
            let value = shared.book.make();
            log.push(Event::Made { id: value.id, chan });
            ids.push(Some(value.id));
            Arm { end: End::Tx(ends[chan].0.clone().expect("it has")), value: Some(value) }
        }
        Side::Recv => {
            ids.push(None);
            Arm { end: End::Rx(ends[chan].1.clone().expect("it has")), value: None }
        }
    };
    let action = Action { arms: arms.iter().map(make).collect(), with_never, how, form };
    let ((i, got), _ends) = action.perform();
    if let Got::Nothing = got {
        let may = how == How::Try || how == How::Brief;
        assert!(may && !closed_before.contains(&true), "nothing, though it could go on");
        return;
    }
    let (chan, _) = arms[i];
    log.push(match got {
        Got::Sent => {
            assert!(!closed_before[i], "sent to a closed channel");
            Event::Sent { id: ids[i].expect("a send has one"), chan }
        }
        Got::Refused(value) => {
            assert_eq!(Some(value.id), ids[i], "another value came back");
            Event::Refused { id: value.id, chan }
        }
        Got::Received(value) => Event::Received { id: value.id, chan },
        Got::Closed => Event::Closed { chan },
        Got::Nothing => unreachable!("seen above"),
    });
}

fn weather(storm: &Storm) {
    let (keepers, mut clones): (Ends, Ends) = storm
        .caps
        .iter()
        .enumerate()
        .map(|(c, &cap)| {
            let (tx, rx) = new_channel(cap);
            let kept = (!storm.orphans[c]).then(|| (tx.clone(), rx.clone()));
            (kept.unzip(), (Some(tx), Some(rx)))
        })
        .unzip();
    let shared = Arc::new(Shared {
        book: Arc::default(),
        caps: storm.caps.clone(),
        orphans: storm.orphans.clone(),
        closed: storm.caps.iter().map(|_| AtomicBool::new(false)).collect(),
        running: AtomicUsize::new(storm.actors.len()),
    });
    let actors: Vec<_> = storm
        .actors
        .iter()
        .map(|actor| {
            let (actor, shared, ends) = (actor.clone(), shared.clone(), clones.clone());
            Handle::start(actor.thread, move || actor.live(&shared, ends))
        })
        .collect();
    clones.clear();

    let start = Instant::now();
    while shared.running.load(Ordering::SeqCst) > 0
        && start.elapsed() < Duration::from_micros(storm.close_after)
    {
        sleep(Duration::from_micros(100));
    }
    for (c, (tx, _)) in keepers.iter().enumerate() {
        if let Some(tx) = tx {
            tx.close();
            shared.closed[c].store(true, Ordering::SeqCst);
        }
    }
    let logs: Vec<_> = actors.into_iter().map(|actor| actor.join("an actor to end")).collect();

    // What is left in the channels that we kept; nobody waits there.
    let mut left = Vec::new();
    for (chan, (_, rx)) in keepers.iter().enumerate() {
        if let Some(rx) = rx {
            assert_eq!(rx.waiters(), (0, 0), "somebody is left at channel {chan}");
            left.extend(rx.try_iter().map(|value| Event::Received { id: value.id, chan }));
        }
    }
    drop(keepers);
    shared.book.check_all_gone();
    audit(storm, &logs, &left);
}

/// Each value has one fate; orders are kept; closed is closed.
fn audit(storm: &Storm, logs: &[Vec<Event>], left: &[Event]) {
    let mut made = HashMap::new();
    let mut fates: HashMap<usize, Vec<Event>> = HashMap::new();
    for (actor, log) in logs.iter().enumerate() {
        for &event in log {
            match event {
                Event::Made { id, chan } => {
                    made.insert(id, (actor, chan));
                }
                Event::Sent { id, .. } | Event::Refused { id, .. } => {
                    fates.entry(id).or_default().push(event);
                }
                _ => {}
            }
        }
    }
    // Received: once, at the channel it was sent to, and in the order of its sender.
    let mut received = HashSet::new();
    let mut drained = HashSet::new();
    for log in logs.iter().map(Vec::as_slice).chain([left]) {
        let mut last: HashMap<(usize, usize), usize> = HashMap::new();
        let mut over = HashSet::new();
        for &event in log {
            match event {
                Event::Received { id, chan } => {
                    assert!(received.insert(id), "#{id} was received twice");
                    assert!(!over.contains(&chan), "#{id} came after the end of channel {chan}");
                    let (sender, to) = made[&id];
                    assert_eq!(to, chan, "#{id} came out of another channel");
                    // Ids grow, so an actor's values to a channel have ascending ones.
                    let before = last.insert((sender, chan), id);
                    assert!(before.is_none_or(|b| b < id), "{before:?} of {sender} before #{id}");
                }
                Event::Closed { chan } => {
                    over.insert(chan);
                    drained.insert(chan);
                }
                _ => {}
            }
        }
    }
    for event in left {
        if let Event::Received { id, chan } = event {
            assert!(!drained.contains(chan), "#{id} lay in channel {chan} after its end was seen");
        }
    }
    // A send is reported once; what was sent is received, or was in a channel without receivers.
    for (id, (_, chan)) in made {
        match fates.get(&id).map_or(&[][..], Vec::as_slice) {
            [] | [Event::Refused { .. }] => {
                assert!(!received.contains(&id), "#{id} was received, but not sent");
            }
            [Event::Sent { .. }] => {
                let lost = !received.contains(&id);
                assert!(!lost || storm.orphans[chan], "#{id} was sent and is lost");
            }
            fates => panic!("#{id} has several fates: {fates:?}"),
        }
    }
    // Who saw a channel closed never sends to it again.
    for log in logs {
        let mut over = HashSet::new();
        for event in log {
            match event {
                Event::Refused { chan, .. } | Event::Closed { chan } => {
                    over.insert(chan);
                }
                Event::Sent { id, chan } => {
                    assert!(!over.contains(chan), "#{id} was sent after the end of channel {chan}");
                }
                _ => {}
            }
        }
    }
}

#[test]
fn all_at_once() {
    run_programs("all_at_once", a_storm(), |storm| {
        runtime(storm.runtime).run(|| weather(storm));
    });
}
