//! `pthread_barrier_wait`, replaced as a whole.
//!
//! Goroutines and plain threads meet at the same barrier, so one implementation must count both. Those that wait are in
//! the queue of the barrier's address; the one that makes them as many as the barrier wants takes all of them.
//!
//! Of glibc's object only the number of participants and the process-shared flag are read, which `pthread_barrier_init`
//! wrote. The rest stays zero, so the real `pthread_barrier_destroy` returns at once.
//!
//! Invariants:
//! 1. The length of the queue and the decision to leave are under one lock (the bucket's): a round has exactly `count`
//!    participants.
//! 2. The barrier is not touched after its last participant has come: a participant that was woken may destroy it.
//! 3. Waits here end only by a round (`KEY_BARRIER`).
//!
//! Goroutines whose runtime ended while they waited do not count.

use super::{BARRIER, Waiters, layout, real, sleep};
use crate::interpose::FORKED;
use crate::sched::queue::{Batch, Node, WaitResult};
use crate::sched::reason::WaitReason;
use libc::pthread_barrier_t;
use std::ffi::c_int;
use std::sync::atomic::Ordering;

static WAITERS: Waiters = Waiters::new(BARRIER);

/// POSIX's function.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pthread_barrier_wait(barrier: *mut pthread_barrier_t) -> c_int {
    let address = barrier as usize;
    // SAFETY: the caller's barrier.
    let wanted = unsafe { layout::barrier_count(barrier) };
    let Some(wanted) = wanted.filter(|_| !FORKED.load(Ordering::Relaxed)) else {
        // SAFETY: as above.
        return unsafe { real::pthread_barrier_wait(barrier) };
    };
    let node = Node::of_process(0);
    let slept = sleep(
        &node,
        WaitReason::PthreadBarrier,
        0,
        None,
        |here| {
            let round = WAITERS.with_queue(address, |queue| {
                // The length first: it counts those too that are abandoned, and costs nothing.
                if queue.len() + 1 >= wanted && queue.live().count() as u32 + 1 >= wanted {
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
