//! One operation, in each of the forms that the library offers, and the values that it moves.

use crate::LONG;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use trefoil::chan::{
    Receiver, RecvTimeoutError, Select, SendTimeoutError, Sender, TryRecvError, TrySendError, never,
};
use trefoil::select;

/// Counts, for every value ever made, how often it was dropped.
#[derive(Default)]
pub(crate) struct DropCounts {
    pub(crate) drops: Mutex<Vec<u32>>,
}

/// A value that is sent through channels. It is not `Copy` and larger than a word.
pub(crate) struct Value {
    pub(crate) id: usize,
    /// The id again, to notice bytes that were mixed up.
    pub(crate) check: [usize; 2],
    pub(crate) counts: Arc<DropCounts>,
}

impl DropCounts {
    pub(crate) fn make_value(self: &Arc<DropCounts>) -> Value {
        let mut drops = self.drops.lock().unwrap();
        drops.push(0);
        let id = drops.len() - 1;
        Value { id, check: [!id, id], counts: self.clone() }
    }

    pub(crate) fn drops_of(&self, id: usize) -> u32 {
        self.drops.lock().unwrap()[id]
    }

    pub(crate) fn assert_all_dropped_once(&self) {
        let drops = self.drops.lock().unwrap();
        let wrong: Vec<_> = drops.iter().enumerate().filter(|&(_, &n)| n != 1).collect();
        assert!(wrong.is_empty(), "values (id, drops) not dropped exactly once: {wrong:?}");
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        assert_eq!(self.check, [!self.id, self.id], "the bytes of a value were mixed up");
        self.counts.drops.lock().unwrap()[self.id] += 1;
    }
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.id)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Side {
    Send,
    Recv,
}

/// How long an operation waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum How {
    /// Without a deadline.
    Block,
    /// With a deadline that is never reached: a channel and a timer compete for the waiter.
    LongDeadline,
    /// With a deadline in 300 µs.
    ShortDeadline,
    Try,
}

impl How {
    pub(crate) fn limit(self) -> Duration {
        if self == How::LongDeadline { LONG } else { Duration::from_micros(300) }
    }

    pub(crate) fn waits(self) -> bool {
        matches!(self, How::Block | How::LongDeadline)
    }
}

/// Which interface of the library an operation uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Form {
    /// `send`, `recv_timeout`, …; for one operation.
    Method,
    /// `Select`.
    Dynamic,
    /// `select!`; for one or two operations.
    Macro,
}

/// One end of a channel.
pub(crate) enum End {
    Tx(Sender<Value>),
    Rx(Receiver<Value>),
}

/// An operation and what it needs.
pub(crate) struct Arm {
    pub(crate) end: End,
    /// For a send.
    pub(crate) value: Option<Value>,
}

pub(crate) struct Action {
    pub(crate) arms: Vec<Arm>,
    /// Adds an arm that is never chosen.
    pub(crate) with_never: bool,
    pub(crate) how: How,
    pub(crate) form: Form,
}

/// The result of an operation.
#[derive(Debug)]
pub(crate) enum Got {
    Sent,
    /// Closed; the value is returned.
    Refused(Value),
    Received(Value),
    Closed,
    /// It would have to wait, or timed out.
    Nothing,
}

/// The arm and its result. For `Nothing` the arm has no meaning.
pub(crate) type Outcome = (usize, Got);

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
    /// Performs the operation. Returns the ends too: the program decides when they are dropped.
    pub(crate) fn perform(self) -> (Outcome, Vec<End>) {
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
            assert!(back.is_none_or(|value| value.id == id), "another value was returned");
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
        How::LongDeadline => select.select_deadline(Instant::now() + LONG).ok(),
        how => select.select_timeout(how.limit()).ok(),
    };
    let Some(done) = done else { return NOTHING };
    let i = done.index();
    match &ends[i] {
        End::Tx(tx) => sent(i, done.send(tx), |e| e.into_inner()),
        End::Rx(rx) => received(i, done.recv(rx)),
    }
}
