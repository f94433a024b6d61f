//! Sends and receives of tasks: futures, a stream and a sink.
//!
//! | type | made by | operation |
//! |---|---|---|
//! | [`SendFuture`] | `Sender::send_async` | [`SendOp`] |
//! | [`SendSink`] | `Sender::sink` | [`SendOp`], again and again |
//! | [`RecvFuture`] | `Receiver::recv_async` | [`RecvOp`] |
//! | [`RecvStream`] | `Receiver::stream` | [`RecvOp`], again and again |
//!
//! An operation contains the sudog and the value (or room for it). Both are pinned with the future
//! while the sudog waits in a queue of the channel: other threads find them there, under the
//! channel's lock. A taker stores the state of the sudog as its last access (`queue.rs`), so a poll
//! that finds the wait ended needs no lock.
//!
//! Invariants:
//! 1. In `Phase::Waiting` the sudog is in the queue of its channel, or its wait has ended.
//! 2. A future that is dropped in that phase withdraws the sudog under the lock. If a receive was
//!    handed a value before, it gives the value back to the channel.

use super::buffer::TypedElem;
use super::core::{ChanSide, Core, OpResult};
use super::queue::{Sudog, SudogState};
use super::{Receiver, RecvError, SendError, Sender};
use crate::runtime::task_waiter;
use crate::sched::task::waker::TaskWaiter;
use crate::sched::task::{self, note_reason};
use crate::sched::wait::reason::WaitReason;
use std::cell::UnsafeCell;
use std::fmt;
use std::future::Future;
use std::marker::PhantomPinned;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::task::{Context, Poll};

/// What an operation does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// It has not begun. That of a send has its value.
    Ready,
    /// Its sudog waits (invariant 1).
    Waiting,
    /// It has ended: a send has no value any more.
    Ended,
}

/// One operation of a task.
struct TaskOp<T> {
    node: Sudog,
    waiter: TaskWaiter,
    phase: Phase,
    /// The value to send, or room for the one to receive.
    value: UnsafeCell<MaybeUninit<T>>,
    /// The sudog may be in a queue.
    _pinned: PhantomPinned,
}

impl<T> TaskOp<T> {
    fn new(value: MaybeUninit<T>, phase: Phase) -> TaskOp<T> {
        TaskOp {
            node: Sudog::new(std::ptr::null_mut()),
            waiter: task_waiter(),
            phase,
            value: UnsafeCell::new(value),
            _pinned: PhantomPinned,
        }
    }

    /// Does the operation, or waits for it. The value has moved if the result is true; false means
    /// that the channel is closed.
    ///
    /// # Safety
    /// The operation is pinned, and `core` is always the same channel, of Ts. The phase is not
    /// `Ended`.
    #[inline]
    unsafe fn poll(
        &mut self,
        core: &Core,
        side: ChanSide,
        context: &mut Context<'_>,
    ) -> Poll<bool> {
        let moved = match self.phase {
            Phase::Waiting => match self.node.state() {
                SudogState::Moved => true,
                SudogState::Closed => false,
                SudogState::Waiting => {
                    let registered = self.waiter.word();
                    let sleeper = self.waiter.set(context.waker());
                    if sleeper != registered {
                        core.change_sleeper(&self.node, sleeper);
                    }
                    // The wait may have ended while the old waker was valid no longer.
                    match self.node.state() {
                        SudogState::Moved => true,
                        SudogState::Closed => false,
                        SudogState::Waiting => return pending(side),
                    }
                }
            },
            _ => {
                if task::yields_to_others(context) {
                    return Poll::Pending;
                }
                let sleeper = self.waiter.set(context.waker());
                self.node = Sudog::new(self.value.get().cast());
                // SAFETY: the caller's guarantee. A future that waits stays pinned until its wait
                // has ended or was cancelled in `Drop`.
                let begun =
                    unsafe { core.begin_wait(side, TypedElem::<T>::ELEM, &self.node, sleeper) };
                match begun {
                    Some(result) => result == OpResult::Done,
                    None => {
                        self.phase = Phase::Waiting;
                        return pending(side);
                    }
                }
            }
        };
        self.phase = Phase::Ended;
        Poll::Ready(moved)
    }

    /// Takes the value out.
    ///
    /// # Safety
    /// There is one, and it is not used again.
    #[inline]
    unsafe fn take_value(&self) -> T {
        // SAFETY: the caller's guarantee.
        unsafe { (*self.value.get()).assume_init_read() }
    }
}

#[inline]
fn pending(side: ChanSide) -> Poll<bool> {
    note_reason(match side {
        ChanSide::Send => WaitReason::ChanSend,
        ChanSide::Recv => WaitReason::ChanReceive,
    });
    Poll::Pending
}

#[cold]
fn polled_after_end() -> ! {
    panic!("a future of a channel was polled after it had ended")
}

/// A receive of a task.
struct RecvOp<T>(TaskOp<T>);

impl<T> RecvOp<T> {
    fn new() -> RecvOp<T> {
        RecvOp(TaskOp::new(MaybeUninit::uninit(), Phase::Ready))
    }

    /// # Safety
    /// As for [`TaskOp::poll`].
    #[inline]
    unsafe fn poll(
        &mut self,
        receiver: &Receiver<T>,
        context: &mut Context<'_>,
    ) -> Poll<Result<T, RecvError>> {
        let Some(core) = receiver.core() else {
            note_reason(WaitReason::ChanReceiveNil);
            return Poll::Pending;
        };
        // SAFETY: the caller's guarantee.
        match unsafe { self.0.poll(core, ChanSide::Recv, context) } {
            // SAFETY: a sender has moved a value there.
            Poll::Ready(true) => Poll::Ready(Ok(unsafe { self.0.take_value() })),
            Poll::Ready(false) => Poll::Ready(Err(RecvError)),
            Poll::Pending => Poll::Pending,
        }
    }

    /// Ends a receive that may wait (invariant 2).
    #[inline]
    fn cancel(&mut self, receiver: &Receiver<T>) {
        if self.0.phase == Phase::Waiting
            && let Some(core) = receiver.core()
        {
            self.cancel_slow(core);
        }
    }

    #[cold]
    fn cancel_slow(&mut self, core: &Core) {
        self.0.phase = Phase::Ended;
        // SAFETY: the receive waits; if its state is `Moved`, its slot holds a value.
        unsafe {
            if core.cancel_wait(ChanSide::Recv, &self.0.node) == SudogState::Moved {
                core.give_back(TypedElem::<T>::ELEM, self.0.value.get().cast());
            }
        }
    }
}

/// A send of a task.
struct SendOp<T>(TaskOp<T>);

impl<T> SendOp<T> {
    /// # Safety
    /// As for [`TaskOp::poll`].
    #[inline]
    unsafe fn poll(
        &mut self,
        sender: &Sender<T>,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), SendError<T>>> {
        let Some(core) = sender.core() else {
            note_reason(WaitReason::ChanSendNil);
            return Poll::Pending;
        };
        // SAFETY: the caller's guarantee.
        match unsafe { self.0.poll(core, ChanSide::Send, context) } {
            Poll::Ready(true) => Poll::Ready(Ok(())),
            // SAFETY: the value has not moved.
            Poll::Ready(false) => Poll::Ready(Err(SendError(unsafe { self.0.take_value() }))),
            Poll::Pending => Poll::Pending,
        }
    }

    /// Ends a send that may wait (invariant 2), and drops its value if it was not sent.
    #[inline]
    fn cancel(&mut self, sender: &Sender<T>) {
        let has_value = match self.0.phase {
            Phase::Ready => true,
            Phase::Ended => false,
            // SAFETY: the send waits.
            Phase::Waiting => sender.core().is_none_or(|core| unsafe {
                core.cancel_wait(ChanSide::Send, &self.0.node) != SudogState::Moved
            }),
        };
        self.0.phase = Phase::Ended;
        if has_value {
            // SAFETY: it has not moved, and no receiver can find it any more.
            drop(unsafe { self.0.take_value() });
        }
    }
}

/// A send that a task awaits, returned by [`Sender::send_async`].
///
/// # Cancel
/// If the future is dropped before it has returned, the value is either sent or dropped. To keep
/// a value that was not sent, use [`Sender::try_send`].
///
/// # Examples
/// ```
/// use trefoil::chan::bounded;
///
/// trefoil::run(|| {
///     let (tx, rx) = bounded(0);
///     let task = trefoil::task::spawn(async move { tx.send_async("from a task").await });
///     assert_eq!(rx.recv(), Ok("from a task"));
///     assert_eq!(task.join().unwrap(), Ok(()));
/// });
/// ```
#[must_use = "a future does nothing unless it is awaited"]
pub struct SendFuture<'a, T> {
    sender: &'a Sender<T>,
    op: SendOp<T>,
}

// SAFETY: the value may cross threads. What other threads touch of the operation, they touch under
// the channel's lock (`queue.rs`); the rest belongs to the owner of the future.
unsafe impl<T: Send> Send for SendFuture<'_, T> {}
// SAFETY: through a shared reference only the `Debug` text is reachable.
unsafe impl<T: Send> Sync for SendFuture<'_, T> {}

impl<T> Future for SendFuture<'_, T> {
    type Output = Result<(), SendError<T>>;

    #[inline]
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // SAFETY: nothing is moved out of the pinned operation except the value, when it has ended.
        let this = unsafe { self.get_unchecked_mut() };
        if this.op.0.phase == Phase::Ended {
            polled_after_end();
        }
        // SAFETY: the operation is pinned with the future, and the sender stays the same.
        unsafe { this.op.poll(this.sender, context) }
    }
}

impl<T> Drop for SendFuture<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.op.cancel(self.sender);
    }
}

impl<T> fmt::Debug for SendFuture<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SendFuture { .. }")
    }
}

/// A receive that a task awaits, returned by [`Receiver::recv_async`].
///
/// # Cancel
/// If the future is dropped before it has returned a value, no value is lost: one that was handed
/// to it already goes back to the front of the channel. If the channel was closed and another
/// receiver was told so meanwhile, that receiver has to look again.
///
/// # Examples
/// ```
/// use trefoil::chan::bounded;
///
/// trefoil::run(|| {
///     let (tx, rx) = bounded(0);
///     let task = trefoil::task::spawn(async move { rx.recv_async().await });
///     tx.send("to a task").unwrap();
///     assert_eq!(task.join().unwrap(), Ok("to a task"));
/// });
/// ```
#[must_use = "a future does nothing unless it is awaited"]
pub struct RecvFuture<'a, T> {
    receiver: &'a Receiver<T>,
    op: RecvOp<T>,
}

// SAFETY: as for `SendFuture`.
unsafe impl<T: Send> Send for RecvFuture<'_, T> {}
// SAFETY: as for `SendFuture`.
unsafe impl<T: Send> Sync for RecvFuture<'_, T> {}

impl<T> Future for RecvFuture<'_, T> {
    type Output = Result<T, RecvError>;

    #[inline]
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // SAFETY: as in `SendFuture`.
        let this = unsafe { self.get_unchecked_mut() };
        if this.op.0.phase == Phase::Ended {
            polled_after_end();
        }
        // SAFETY: the operation is pinned with the future, and the receiver stays the same.
        unsafe { this.op.poll(this.receiver, context) }
    }
}

impl<T> Drop for RecvFuture<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.op.cancel(self.receiver);
    }
}

impl<T> fmt::Debug for RecvFuture<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RecvFuture { .. }")
    }
}

/// The values of a channel as a stream, returned by [`Receiver::stream`].
///
/// It ends when the channel is closed and empty. With the feature `futures` it implements
/// `futures_core::Stream`. It is a receiver of its own: the channel stays open while it exists.
///
/// # Cancel
/// Dropping a `next()` future, or the stream, loses no value: one that was handed to the stream
/// already stays in it for the next poll, or goes back to the front of the channel.
///
/// # Examples
/// ```
/// use std::future::poll_fn;
/// use std::pin::pin;
/// use trefoil::chan::unbounded;
///
/// trefoil::run(|| {
///     let (tx, rx) = unbounded();
///     let sum = trefoil::task::spawn(async move {
///         let mut values = pin!(rx.stream());
///         let mut sum = 0;
///         while let Some(n) = poll_fn(|cx| values.as_mut().poll_next(cx)).await {
///             sum += n;
///         }
///         sum
///     });
///     (1..=10).for_each(|n| tx.send(n).unwrap());
///     drop(tx);
///     assert_eq!(sum.join().unwrap(), 55);
/// });
/// ```
#[must_use = "a stream does nothing unless it is polled"]
pub struct RecvStream<T> {
    receiver: Receiver<T>,
    op: RecvOp<T>,
}

// SAFETY: as for `SendFuture`.
unsafe impl<T: Send> Send for RecvStream<T> {}
// SAFETY: as for `SendFuture`.
unsafe impl<T: Send> Sync for RecvStream<T> {}

impl<T> RecvStream<T> {
    /// Returns the next value, or `None` if the channel is closed and empty. If it must wait, the
    /// task of `context` is woken when it is worth polling again.
    #[inline]
    pub fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        // SAFETY: as in `SendFuture`.
        let this = unsafe { self.get_unchecked_mut() };
        // SAFETY: the operation is pinned with the stream, and the receiver stays the same.
        let polled = unsafe { this.op.poll(&this.receiver, context) };
        if polled.is_ready() {
            this.op.0.phase = Phase::Ready;
        }
        polled.map(Result::ok)
    }
}

#[cfg(feature = "futures")]
impl<T> futures_core::Stream for RecvStream<T> {
    type Item = T;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        RecvStream::poll_next(self, context)
    }
}

impl<T> Drop for RecvStream<T> {
    fn drop(&mut self) {
        self.op.cancel(&self.receiver);
    }
}

impl<T> fmt::Debug for RecvStream<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RecvStream { .. }")
    }
}

/// A sender as a sink, returned by [`Sender::sink`].
///
/// With the feature `futures` it implements `futures_sink::Sink`. It is a sender of its own: the
/// channel stays open while it exists. It holds at most one value that the channel has no room for.
///
/// # Drop
/// A value that is still in the sink is dropped; see [`poll_flush`](SendSink::poll_flush).
///
/// # Examples
/// ```
/// use std::future::poll_fn;
/// use std::pin::pin;
/// use trefoil::chan::bounded;
///
/// trefoil::run(|| {
///     let (tx, rx) = bounded(1);
///     let task = trefoil::task::spawn(async move {
///         let mut sink = pin!(tx.sink());
///         for n in 1..=10 {
///             poll_fn(|cx| sink.as_mut().poll_ready(cx)).await?;
///             sink.as_mut().start_send(n)?;
///         }
///         poll_fn(|cx| sink.as_mut().poll_flush(cx)).await
///     });
///     assert_eq!(rx.iter().sum::<i32>(), 55);
///     assert_eq!(task.join().unwrap(), Ok(()));
/// });
/// ```
#[must_use = "a sink does nothing unless it is polled"]
pub struct SendSink<T> {
    sender: Sender<T>,
    op: SendOp<T>,
}

// SAFETY: as for `SendFuture`.
unsafe impl<T: Send> Send for SendSink<T> {}
// SAFETY: as for `SendFuture`.
unsafe impl<T: Send> Sync for SendSink<T> {}

impl<T> SendSink<T> {
    /// Returns `Ready` if the sink can take a value: the last one was sent.
    ///
    /// # Errors
    /// Returns [`SendError`] with the value that was in the sink if the channel is closed.
    pub fn poll_ready(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), SendError<T>>> {
        // SAFETY: as in `SendFuture`.
        let this = unsafe { self.get_unchecked_mut() };
        if this.op.0.phase == Phase::Ended {
            return Poll::Ready(Ok(()));
        }
        // SAFETY: the operation is pinned with the sink, and the sender stays the same.
        unsafe { this.op.poll(&this.sender, context) }
    }

    /// Sends a value if the channel has room, or else keeps it until
    /// [`poll_flush`](SendSink::poll_flush) or the next [`poll_ready`](SendSink::poll_ready).
    ///
    /// # Errors
    /// Returns [`SendError`] with the value if the channel is closed.
    ///
    /// # Panics
    /// Panics if the sink has a value: call it after `poll_ready` has returned `Ready`.
    pub fn start_send(self: Pin<&mut Self>, value: T) -> Result<(), SendError<T>> {
        // SAFETY: as in `SendFuture`.
        let this = unsafe { self.get_unchecked_mut() };
        assert!(this.op.0.phase == Phase::Ended, "start_send without poll_ready");
        match this.sender.try_send(value) {
            Ok(()) => Ok(()),
            Err(super::TrySendError::Closed(value)) => Err(SendError(value)),
            Err(super::TrySendError::Full(value)) => {
                this.op.0.value = UnsafeCell::new(MaybeUninit::new(value));
                this.op.0.phase = Phase::Ready;
                Ok(())
            }
        }
    }

    /// Waits until the channel has taken the value that is in the sink.
    ///
    /// # Errors
    /// Returns [`SendError`] with the value if the channel is closed.
    pub fn poll_flush(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), SendError<T>>> {
        self.poll_ready(context)
    }

    /// Does what [`poll_flush`](SendSink::poll_flush) does. It does not close the channel, because
    /// other senders may exist; dropping the sink closes it if it is the last.
    ///
    /// # Errors
    /// Returns [`SendError`] with the value if the channel is closed.
    pub fn poll_close(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), SendError<T>>> {
        self.poll_flush(context)
    }
}

#[cfg(feature = "futures")]
impl<T> futures_sink::Sink<T> for SendSink<T> {
    type Error = SendError<T>;

    fn poll_ready(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), SendError<T>>> {
        SendSink::poll_ready(self, context)
    }

    fn start_send(self: Pin<&mut Self>, value: T) -> Result<(), SendError<T>> {
        SendSink::start_send(self, value)
    }

    fn poll_flush(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), SendError<T>>> {
        SendSink::poll_flush(self, context)
    }

    fn poll_close(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), SendError<T>>> {
        SendSink::poll_close(self, context)
    }
}

impl<T> Drop for SendSink<T> {
    fn drop(&mut self) {
        self.op.cancel(&self.sender);
    }
}

impl<T> fmt::Debug for SendSink<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SendSink { .. }")
    }
}

impl<T> Sender<T> {
    /// Sends a value, and waits while the channel is full: [`send`](Sender::send) for async code.
    ///
    /// It may be awaited in a task, in [`block_on`](crate::block_on), and in other executors.
    ///
    /// # Errors
    /// Returns [`SendError`] with the value if the channel is closed, or is closed while the task
    /// waits.
    ///
    /// # Cancel
    /// If the future is dropped before it has returned, the value is either sent or dropped.
    ///
    /// # Examples
    /// ```
    /// use trefoil::chan::bounded;
    /// let (tx, rx) = bounded(1);
    /// trefoil::block_on(async move {
    ///     tx.send_async(5).await.unwrap();
    ///     assert_eq!(rx.recv_async().await, Ok(5));
    ///     drop(rx);
    ///     assert_eq!(tx.send_async(6).await.unwrap_err().into_inner(), 6);
    /// });
    /// ```
    #[inline]
    pub fn send_async(&self, value: T) -> SendFuture<'_, T> {
        let op = SendOp(TaskOp::new(MaybeUninit::new(value), Phase::Ready));
        SendFuture { sender: self, op }
    }

    /// Returns a sink that sends to this channel.
    pub fn sink(&self) -> SendSink<T> {
        let op = SendOp(TaskOp::new(MaybeUninit::uninit(), Phase::Ended));
        SendSink { sender: self.clone(), op }
    }
}

impl<T> Receiver<T> {
    /// Receives the next value, and waits while the channel is empty: [`recv`](Receiver::recv) for
    /// async code.
    ///
    /// It may be awaited in a task, in [`block_on`](crate::block_on), and in other executors.
    /// Tasks, goroutines and threads wait in one queue.
    ///
    /// # Errors
    /// Returns [`RecvError`] if the channel is closed and empty, or becomes so while the task
    /// waits.
    ///
    /// # Cancel
    /// If the future is dropped, no value is lost. A sender may have handed a value to the future
    /// already; then the value goes to the next receiver that waits, or back to the front of the
    /// channel. The channel may hold one value more than its capacity until that value is received.
    ///
    /// # Examples
    /// ```
    /// use trefoil::chan::{RecvError, bounded};
    /// trefoil::run(|| {
    ///     let (tx, rx) = bounded(0);
    ///     trefoil::go(move || tx.send("hello").unwrap());
    ///     trefoil::block_on(async {
    ///         assert_eq!(rx.recv_async().await, Ok("hello"));
    ///         assert_eq!(rx.recv_async().await, Err(RecvError)); // the sender was dropped
    ///     });
    /// });
    /// ```
    #[inline]
    pub fn recv_async(&self) -> RecvFuture<'_, T> {
        RecvFuture { receiver: self, op: RecvOp::new() }
    }

    /// Returns a stream of the values of this channel.
    pub fn stream(&self) -> RecvStream<T> {
        RecvStream { receiver: self.clone(), op: RecvOp::new() }
    }
}
