//! How a select waits for the futures among its arms: by one waker for all of them.

use super::passes::{ArmFuture, FutureWaits};
use crate::goroutine;
use crate::sched::task::blocker::Blocker;
pub(super) use crate::sched::task::blocker::ClaimedBy;
use crate::sched::wait::Waiter;
use std::pin::Pin;
use std::task::Context;

/// The futures of one select. After it was dropped, their wake-ups do nothing.
pub(super) struct SelectFutures {
    blocker: Blocker,
    winner: u16,
}

impl SelectFutures {
    /// Makes the waker. A wake-up claims the wait of the select with the number `winner`.
    pub(super) fn new(winner: u16) -> SelectFutures {
        match Blocker::new() {
            Ok(blocker) => SelectFutures { blocker, winner },
            Err(e) => panic!("select: no memory for a waker: {e}"),
        }
    }
}

impl FutureWaits for SelectFutures {
    const ANY: bool = true;

    fn poll(&self, future: Pin<&mut (dyn ArmFuture + '_)>) -> bool {
        future.poll(&mut Context::from_waker(&self.blocker.waker()))
    }

    fn winner(&self) -> u16 {
        self.winner
    }

    fn arm(&self, waiter: Waiter) -> bool {
        self.blocker.arm(waiter, self.winner)
    }

    fn disarm(&self, by: ClaimedBy) {
        self.blocker.disarm(by);
    }

    fn yield_now(&self) {
        goroutine::yield_now();
    }
}
