//! Restates trefoil's `chan/select/futures.rs` and `sched/task/blocker.rs`, over the state word of
//! a task: the waker of the futures among a select's arms.

use super::passes::{ArmFuture, FutureWaits};
use crate::chan::cells::Cell;
use crate::sched::Rt;
use crate::sched::wait::{Waiter, wake_here};
use crate::shim::{AtomicBool, Ordering, Part, is_broken};
use crate::task_state_rs::{Begin, Generation, TaskState, Turn, Woken};
use loom::sync::Mutex;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

/// Which party has claimed the wait of an armed select.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ClaimedBy {
    Wakeup,
    Other,
}

/// The block of a blocker.
struct Block {
    state: TaskState,
    waiter: Cell<Option<Waiter>>,
    winner: Cell<u16>,
    was_refused: AtomicBool,
}

// SAFETY: loom checks that accesses to the cells are ordered.
unsafe impl Sync for Block {}
// SAFETY: as above.
unsafe impl Send for Block {}

/// A waker: a block and the generation for which it was made.
struct BlockWaker(Arc<Block>, Generation);

impl Wake for BlockWaker {
    fn wake(self: Arc<Self>) {
        let block = &self.0;
        if block.state.wake(self.1.waker_bits()) != Woken::Enqueue {
            return;
        }
        let waiter = block.waiter.get().expect("armed");
        if waiter.claim(block.winner.get()) {
            wake_here(Rt::enter(), waiter.sleeper());
        } else {
            block.was_refused.store(true, Ordering::Release);
        }
    }
}

pub(super) struct SelectFutures {
    block: Arc<Block>,
    waker: Waker,
    generation: Generation,
    winner: u16,
}

impl SelectFutures {
    pub(super) fn new(winner: u16) -> SelectFutures {
        let block = Arc::new(Block {
            state: TaskState::new(),
            waiter: Cell::new(None),
            winner: Cell::new(0),
            was_refused: AtomicBool::new(false),
        });
        let generation = block.state.begin(Begin::Running);
        let waker = Waker::from(Arc::new(BlockWaker(block.clone(), generation)));
        SelectFutures { block, waker, generation, winner }
    }

    fn begin_poll(&self) {
        assert_eq!(self.block.state.begin_poll(), Turn::Poll);
    }
}

impl FutureWaits for SelectFutures {
    const ANY: bool = true;

    fn poll(&self, future: Pin<&mut (dyn ArmFuture + '_)>) -> bool {
        future.poll(&mut Context::from_waker(&self.waker))
    }

    fn winner(&self) -> u16 {
        self.winner
    }

    fn arm(&self, waiter: Waiter) -> bool {
        self.block.waiter.set(Some(waiter));
        self.block.winner.set(self.winner);
        self.block.was_refused.store(false, Ordering::Relaxed);
        let was_woken = self.block.state.end_poll();
        if was_woken {
            self.begin_poll();
        }
        !was_woken || is_broken(Part::WakeupDuringPoll)
    }

    fn disarm(&self, by: ClaimedBy) {
        if by == ClaimedBy::Other
            && self.block.state.wake(self.generation.waker_bits()) == Woken::Noted
        {
            while !is_broken(Part::RefusedWaker) && !self.block.was_refused.load(Ordering::Acquire)
            {
                loom::thread::yield_now();
            }
        }
        self.begin_poll();
    }

    fn yield_now(&self) {
        loom::thread::yield_now();
    }
}

impl Drop for SelectFutures {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return; // The model has ended.
        }
        self.block.state.finish();
        // The block gets another use: loom reports a waker that still reads it.
        self.block.waiter.set(None);
    }
}

/// A future that another goroutine completes.
pub(crate) struct Event {
    is_ready: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Event {
    pub(crate) fn new() -> Event {
        Event { is_ready: AtomicBool::new(false), waker: Mutex::new(None) }
    }

    /// Completes the future.
    pub(crate) fn complete(&self) {
        self.is_ready.store(true, Ordering::Release);
        self.wake();
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.is_ready.load(Ordering::Acquire)
    }

    /// Wakes the task that polled last, if there was a poll.
    pub(crate) fn wake(&self) {
        let waker = self.waker.lock().expect("a panic ends the model").take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(crate) fn poll(&self, context: &Context<'_>) -> Poll<()> {
        *self.waker.lock().expect("a panic ends the model") = Some(context.waker().clone());
        if self.is_ready.load(Ordering::Acquire) { Poll::Ready(()) } else { Poll::Pending }
    }
}

/// An event as the future of an arm.
pub(super) struct EventArm<'a>(pub(super) &'a Event);

impl ArmFuture for EventArm<'_> {
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> bool {
        self.0.poll(context).is_ready()
    }

    fn clear(self: Pin<&mut Self>) {}
}
