//! Channels that goroutines, tasks and plain threads use to pass values to each other.
//!
//! They behave like Go's channels and use the method names of crossbeam's channels.
//!
//! ```
//! use trefoil::chan::bounded;
//!
//! trefoil::run(|| {
//!     let (tx, rx) = bounded(8);
//!     for n in 1..=3 {
//!         let tx = tx.clone();
//!         trefoil::go(move || tx.send(n * n).unwrap());
//!     }
//!     drop(tx); // the clones remain; the loop ends when the last one is dropped
//!     assert_eq!(rx.iter().sum::<i32>(), 14);
//! });
//! ```
//!
//! # What is in this module
//! | item | purpose |
//! |---|---|
//! | [`bounded`], [`unbounded`] | create a channel and return its two ends |
//! | [`nil`], [`never()`](never()) | create both ends, or the receiver, of Go's nil channel: its operations wait forever |
//! | [`after`], [`at`], [`tick`] | create a receiver that gets the time once, or again and again |
//! | [`Sender`], [`Receiver`] | the two ends of a channel; both can be cloned |
//! | [`select!`](crate::select) | waits for the first of several operations |
//! | [`select_biased!`](crate::select_biased) | the same; prefers the arms that are written first |
//! | [`Select`], [`SelectedOperation`] | the same, for a set of operations known only at run time |
//! | [`Iter`], [`TryIter`], [`IntoIter`] | iterators over received values |
//! | [`SendFuture`], [`RecvFuture`] | what [`Sender::send_async`] and [`Receiver::recv_async`] return |
//! | [`SendSink`], [`RecvStream`] | a sender and a receiver as a sink and a stream of async code |
//! | [`SendError`], [`TrySendError`], [`SendTimeoutError`] | errors of sends, with the value |
//! | [`RecvError`], [`TryRecvError`], [`RecvTimeoutError`] | errors of receives |
//! | [`TrySelectError`], [`SelectTimeoutError`], [`TryReadyError`], [`ReadyTimeoutError`] | errors of [`Select`] |
//!
//! # Which channel to use
//! | constructor | capacity | a send waits | a receive waits |
//! |---|---|---|---|
//! | [`bounded(0)`](bounded) | none: a *rendezvous* | for a receiver | for a sender |
//! | [`bounded(n)`](bounded) | n values | while n values are in the channel | while it is empty |
//! | [`unbounded()`](unbounded) | limited by memory only | never | while it is empty |
//! | [`nil()`](nil), [`never()`](never()) | none | forever | forever |
//!
//! # Rules
//! - **Order.** Values are received in the order in which they were sent. Waiting senders and
//!   waiting receivers are each served in the order in which they began to wait. A value for a
//!   waiting receiver goes to it directly.
//! - **Closing.** A channel is closed by [`Sender::close`], or when the last sender or the last
//!   receiver is dropped. From then on every send fails and returns its value. Receivers still get
//!   the values that are left; after that every receive fails. (In Go a send on a closed channel
//!   panics. Here it is an error, as in crossbeam.)
//! - **Goroutines, tasks and threads.** Both ends work on goroutines and [tasks](crate::task) of
//!   any runtime, in other executors and on plain threads, in every combination. A goroutine that
//!   waits is parked; a thread that waits is blocked. Async code awaits [`Sender::send_async`] and
//!   [`Receiver::recv_async`]. All wait in the same queues.
//! - **Cancel.** A wait ends early when the channel is closed. To end it on another condition, use
//!   [`select!`](crate::select), for example with an arm for
//!   [`Context::done`](crate::context::Context::done). A future may be dropped at any time; no
//!   value is lost by that.

mod buffer;
pub(crate) mod cells;
mod core;
mod error;
mod future;
mod handle;
mod iter;
mod lock;
mod queue;
mod receiver;
#[doc(hidden)]
pub mod select;
mod sender;
mod timers;

pub use self::error::{
    RecvError, RecvTimeoutError, SendError, SendTimeoutError, TryRecvError, TrySendError,
};
pub use self::future::{RecvFuture, RecvStream, SendFuture, SendSink};
pub use self::iter::{IntoIter, Iter, TryIter};
pub use self::receiver::Receiver;
pub use self::select::{
    ReadyTimeoutError, Select, SelectTimeoutError, SelectedOperation, TryReadyError, TrySelectError,
};
pub use self::sender::Sender;
pub use self::timers::{after, at, tick};

use self::buffer::UNBOUNDED;
use self::core::{Core, OpResult};
use crate::sched::wait;
use crate::sched::wait::reason::WaitReason;
use crate::sys::clock::{self, NEVER, Nanos};

// A dump reads them by address (`sched/wait/holder.rs`).
const _: () = assert!(
    std::mem::offset_of!(core::Core, sender_count)
        == crate::sched::wait::holder::CHAN_SENDERS_OFFSET
);
const _: () = assert!(
    std::mem::offset_of!(core::Core, receiver_count)
        == crate::sched::wait::holder::CHAN_RECEIVERS_OFFSET
);

// Two cache lines (core.rs).
const _: () = assert!(size_of::<Core>() == 128);

/// Creates a channel with room for `cap` values.
///
/// A send waits while `cap` values are in the channel. So receivers that are slower than the
/// senders slow them down, and memory use is limited. With a capacity of 0 every send waits until a
/// receiver takes its value.
///
/// # Panics
/// Panics if the buffer would be larger than `isize::MAX` bytes.
///
/// # Examples
/// ```
/// let (tx, rx) = trefoil::chan::bounded(2);
/// tx.send('a').unwrap();
/// tx.send('b').unwrap();
/// assert!(tx.try_send('c').unwrap_err().is_full());
/// assert_eq!(rx.recv(), Ok('a'));
/// ```
pub fn bounded<T>(cap: usize) -> (Sender<T>, Receiver<T>) {
    // Any number of values of size zero fits; the largest number means "unbounded" internally.
    let cap = if size_of::<T>() == 0 { cap.min(UNBOUNDED - 1) } else { cap };
    assert!(cap != UNBOUNDED, "a channel of {cap} elements does not fit into memory");
    pair(cap)
}

/// Creates a channel that holds any number of values.
///
/// A send never waits. Nothing slows down senders that are faster than their receivers, and memory
/// use grows with every value that is not yet received. Prefer [`bounded`] unless a sender must not
/// wait.
///
/// # Examples
/// ```
/// let (tx, rx) = trefoil::chan::unbounded();
/// (0..1000).for_each(|n| tx.send(n).unwrap());
/// assert_eq!(rx.len(), 1000);
/// ```
pub fn unbounded<T>() -> (Sender<T>, Receiver<T>) {
    pair(UNBOUNDED)
}

fn pair<T>(cap: usize) -> (Sender<T>, Receiver<T>) {
    let (sender, receiver) = handle::new(cap);
    (Sender { handle: Some(sender) }, Receiver { handle: Some(receiver) })
}

/// Creates a receiver that never receives a value and is never closed: Go's nil channel.
///
/// Assign it to a receiver variable to turn off that arm of a [`select!`](crate::select) in a loop.
///
/// # Examples
/// ```
/// use trefoil::chan::{bounded, never};
/// use trefoil::select;
///
/// let (tx, mut rx) = bounded(1);
/// tx.send(1).unwrap();
/// drop(tx);
/// let mut got = Vec::new();
/// loop {
///     select! {
///         recv(rx) -> v => match v {
///             Ok(v) => got.push(v),
///             Err(_) => rx = never(), // closed: turn this arm off
///         },
///         default => break,
///     }
/// }
/// assert_eq!(got, [1]);
/// ```
pub fn never<T>() -> Receiver<T> {
    Receiver { handle: None }
}

/// Creates both ends of Go's nil channel: a send and a receive wait forever, and it is never
/// closed.
///
/// Assign its sender to a variable to turn off a `send` arm of a [`select!`](crate::select) in a
/// loop. Its receiver is that of [`never()`]. Without waiting, a send finds the channel full and a
/// receive finds it empty.
///
/// # Examples
/// A goroutine that forwards values one by one sends only if it has one, and receives only if it
/// has none:
/// ```
/// use trefoil::chan::{bounded, nil, never};
/// use trefoil::select;
///
/// trefoil::run(|| {
///     let (tx, input) = bounded(4);
///     let (output, rx) = bounded(0);
///     (1..=3).for_each(|n| tx.send(n).unwrap());
///     drop(tx);
///     trefoil::go(move || {
///         let (mut from, mut to, mut value) = (input.clone(), nil().0, 0);
///         loop {
///             select! {
///                 recv(from) -> v => match v {
///                     Ok(v) => (from, to, value) = (never(), output.clone(), v),
///                     Err(_) => break,
///                 },
///                 send(to, value) -> _ => (from, to) = (input.clone(), nil().0),
///             }
///         }
///     });
///     assert_eq!(rx.iter().collect::<Vec<_>>(), [1, 2, 3]);
/// });
/// ```
pub fn nil<T>() -> (Sender<T>, Receiver<T>) {
    (Sender { handle: None }, never())
}

/// Returns how many values the channel has room for, or None if it is unbounded.
fn capacity(core: &Core) -> Option<usize> {
    Some(core.buffer.cap()).filter(|&cap| cap != UNBOUNDED)
}

/// Waits until `deadline`: the operation is never ready.
#[cold]
fn wait_for_never(reason: WaitReason, deadline: Nanos) -> OpResult {
    loop {
        if deadline != NEVER && deadline <= clock::now() {
            return OpResult::TimedOut;
        }
        wait::wait(reason, deadline, |_| true);
    }
}
