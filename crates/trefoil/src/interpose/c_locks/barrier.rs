//! `pthread_barrier_wait`, replaced as a whole.
//!
//! Goroutines and plain threads meet at the same barrier, so one implementation must count both.
//! Participants wait in the queue of the barrier's address. The participant that completes the
//! barrier's count takes all of them from the queue and wakes them.
//!
//! Of glibc's object only the number of participants and the process-shared flag are read, which
//! `pthread_barrier_init` wrote. The rest stays zero, so the real `pthread_barrier_destroy` returns
//! at once.
//!
//! Invariants:
//! 1. The queue's lock covers both the length of the queue and the decision to complete the round:
//!    a round has exactly `count` participants.
//! 2. The barrier is not touched after its last participant has arrived: a participant that was
//!    woken may destroy it.
//! 3. Waits here end only by a completed round (`KEY_BARRIER`).
//!
//! Goroutines whose runtime ended while they waited do not count.

use super::{BARRIER, Waiters, layout, real, sleep};
use crate::sched::wait::list::{Batch, Node, WaitResult};
use crate::sched::wait::reason::WaitReason;
use crate::sys::fork::is_forked;
use libc::pthread_barrier_t;
use std::ffi::c_int;

static WAITERS: Waiters = Waiters::new(BARRIER);

interpose! {
    /// POSIX's function.
    fn pthread_barrier_wait(barrier: *mut pthread_barrier_t) -> c_int;
    always => match layout::barrier_count(barrier).filter(|_| !is_forked()) {
        Some(count) => wait(barrier as usize, count),
        None => real::pthread_barrier_wait(barrier),
    }
}

/// Waits at the barrier at `address`, which has `count` participants.
fn wait(address: usize, count: u32) -> c_int {
    let node = Node::of_process(0);
    let slept = sleep(
        &node,
        WaitReason::PthreadBarrier,
        0,
        None,
        |here| {
            let round = WAITERS.with_queue(address, |queue| {
                // The length first: it also counts abandoned goroutines, and is cheap to read.
                if queue.len() + 1 >= count && queue.live().count() as u32 + 1 >= count {
                    return Some(queue.take_all());
                }
                queue.push_back(&node);
                None::<Batch>
            });
            match round {
                Some(round) => {
                    round.wake_all(here, 0);
                    false
                }
                None => true,
            }
        },
        // There is no deadline.
        || false,
    );
    if slept == WaitResult::NotQueued { libc::PTHREAD_BARRIER_SERIAL_THREAD } else { 0 }
}
