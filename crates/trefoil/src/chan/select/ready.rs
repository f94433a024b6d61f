//! Waiting until one of several operations is ready, and leaving it to the caller: `Select::ready`.
//!
//! The wait is that of a select, with *watchers* in the queues instead of waiters (`queue.rs`). An
//! operation takes no watcher as its partner. If it makes an operation of the other side ready, or
//! begins to wait itself, it claims and wakes **one** watcher of that other side, because it can
//! carry only one sleeper out of the channel's lock. The watcher that was woken *passes on*: if the
//! operation is still ready, it wakes the next watcher. So all watchers are woken as long as the
//! operation stays ready, although the caller of the first may leave the value where it is.
//!
//! Known weakness: "ready" holds for the moment at which it was checked. Another goroutine may be
//! faster, so the caller must be prepared for an operation that has to wait.

use super::super::core::Core;
use super::passes::{Arm, Preference, Shuffle, cores_of, number, withdraw_pass};
use crate::sched::Rt;
use crate::sched::wait::reason::WaitReason;
use crate::sched::wait::{self, Waiter};
use crate::sys::clock::{NEVER, Nanos, now};

/// Waits until one of the arms is ready, or until `deadline`. Returns its number. Sorts the arms.
pub(super) fn ready(
    arms: &mut [Arm<'_>],
    deadline: Nanos,
    preference: Preference,
) -> Option<usize> {
    number(arms);
    let here = Rt::enter();
    if let Some(i) = poll_pass(here, arms, preference) {
        wait::leave(here);
        return Some(i);
    }
    if deadline == NEVER || deadline > now() {
        if let Some(i) = watch_and_park(here, arms, deadline) {
            return Some(i);
        }
    } else {
        wait::leave(here);
    }
    // As in a select, what became ready after the deadline still counts.
    ready_at_one_moment(arms, preference)
}

/// Returns the number of an arm that is ready, or None if none was at one moment. Sorts the arms.
pub(super) fn try_ready(arms: &mut [Arm<'_>], preference: Preference) -> Option<usize> {
    number(arms);
    let here = Rt::enter();
    let found = poll_pass(here, arms, preference);
    wait::leave(here);
    found.or_else(|| ready_at_one_moment(arms, preference))
}

/// Checks one arm after the other, in the order of the select.
fn poll_pass(here: Option<Rt>, arms: &[Arm<'_>], preference: Preference) -> Option<usize> {
    let mut shuffle = Shuffle::start(arms, preference);
    for k in 0..arms.len() {
        let i = shuffle.place(here, arms, k);
        let Some((core, side)) = arms[i].core() else { continue };
        if !core.probe_ready(side) {
            continue;
        }
        core.lock();
        // SAFETY: the lock is held.
        let is_ready = unsafe { core.is_ready_now(side) };
        core.unlock();
        if is_ready {
            return Some(i);
        }
    }
    None
}

/// Enlists a watcher for each arm, and parks. Returns the arm that is ready, or None if the
/// deadline has passed. Leaves the runtime.
fn watch_and_park(here: Option<Rt>, arms: &[Arm<'_>], deadline: Nanos) -> Option<usize> {
    let (mut found, mut enlisted) = (None, 0);
    let (winner, here) = wait::wait_in(here, WaitReason::Select, deadline, |waiter| {
        for k in 0..arms.len() {
            let i = usize::from(arms[k].node.order.get());
            if let Some((core, side)) = arms[i].core() {
                let node = &arms[i].node;
                core.lock();
                // SAFETY: the lock is held; the node is withdrawn before this function returns.
                unsafe {
                    if core.is_ready_now(side) {
                        core.unlock();
                        if !waiter.claim(node.arm.get() + 1) {
                            // The wake-up of another waker is on its way.
                            return true;
                        }
                        found = Some(i);
                        withdraw_pass(arms, enlisted, None);
                        return false;
                    }
                    node.waiter.set(waiter);
                    core.watch(side, node);
                }
                core.unlock();
            }
            enlisted = k + 1;
        }
        true
    });
    if let Some(winner) = winner {
        withdraw_pass(arms, enlisted, None);
        if winner != Waiter::TIMED_OUT {
            let i = usize::from(winner - 1);
            if let Some((core, side)) = arms[i].core() {
                core.pass_on(here, side);
            }
            found = Some(i);
        }
    }
    wait::leave(here);
    found
}

/// Checks all arms while all channels are locked (`passes.rs`, "With `default`, or a deadline").
fn ready_at_one_moment(arms: &mut [Arm<'_>], preference: Preference) -> Option<usize> {
    arms.sort_unstable_by_key(Arm::address);
    let here = Rt::enter();
    cores_of(arms).for_each(Core::lock);
    let mut shuffle = Shuffle::start(arms, preference);
    let found = (0..arms.len()).map(|k| shuffle.place(here, arms, k)).find(|&i| {
        // SAFETY: the lock is held.
        arms[i].core().is_some_and(|(core, side)| unsafe { core.is_ready_now(side) })
    });
    cores_of(arms).for_each(Core::unlock);
    wait::leave(here);
    found.map(|i| usize::from(arms[i].node.arm.get()))
}
