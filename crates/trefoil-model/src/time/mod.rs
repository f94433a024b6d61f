//! The files of a timer, as they are in `trefoil`.

mod pool;
#[path = "../../../trefoil/src/time/slot.rs"]
mod slot;
#[allow(unreachable_pub)]
#[path = "../../../trefoil/src/time/timer.rs"]
mod timer;

pub(crate) use timer::{Ticker, Timer, after_func, tick};

use crate::chan::{Receiver, bounded};
use slot::{Job, Owner, TimerSlot};
use std::time::Instant;

/// A broken timer, for a mutation check: its `stop` drains the channel before it stops the timer.
pub(crate) struct DrainsFirst {
    slot: &'static TimerSlot,
    pub(crate) receiver: Receiver<Instant>,
}

impl DrainsFirst {
    pub(crate) fn new() -> DrainsFirst {
        let (sender, receiver) = bounded(1);
        let slot = pool::take();
        slot.start(Job::send(sender), 1, 0, Owner::Handle);
        DrainsFirst { slot, receiver }
    }

    pub(crate) fn stop(&self) -> bool {
        let drained = self.receiver.try_recv().is_ok();
        self.slot.stop(|_| false) || drained
    }
}
