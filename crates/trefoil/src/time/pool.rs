//! Unused timer slots, in sharded free lists: goroutines that make and drop timers on different Ps
//! do not contend.
//!
//! | list of a shard | contents |
//! |---|---|
//! | `free` | slots that may be reused |
//! | `fired` | slots that fired without a handle, and still have their job |
//!
//! The drop of a job may free memory or run user code, so it does not happen where a timer fires,
//! inside the runtime. `take` drops it, outside.
//!
//! A slot goes to the shard of the P where it became free. It is taken from the shard of the
//! caller's P, or from any other if that one is empty.

use super::slot::TimerSlot;
use crate::blocking::no_preempt;
use crate::sched::Rt;
use crate::sched::wait::inside;
use crate::sys::clock;
use crate::sys::free_list::FreeList;

/// Number of shards. With more Ps, several Ps share one.
const SHARDS: usize = 16;

/// Aligned to two cache lines, so that shards do not share any.
#[repr(align(128))]
struct PoolShard {
    free: FreeList<TimerSlot>,
    fired: FreeList<TimerSlot>,
}

static ALL: [PoolShard; SHARDS] =
    [const { PoolShard { free: FreeList::new(), fired: FreeList::new() } }; SHARDS];

fn shard(here: Option<Rt>) -> &'static PoolShard {
    &ALL[here.map_or(0, |rt| rt.p_id() as usize % SHARDS)]
}

/// Takes a slot, or makes one.
pub(super) fn take() -> &'static TimerSlot {
    // How many runtime calls it takes depends on what the whole process has put here. In a
    // simulation they must not be decisions.
    let _no_decisions = clock::has_simulations().then(no_preempt);
    take_or_make()
}

fn take_or_make() -> &'static TimerSlot {
    let [fired, more, free] = inside(|here| {
        let own = shard(here);
        match own.fired.pop() {
            // Two per call, so that the list becomes shorter.
            Some(fired) => [Some(fired), own.fired.pop(), None],
            None => [None, None, own.free.pop()],
        }
    });
    if let Some(more) = more {
        more.retire();
    }
    if let Some(fired) = fired {
        fired.clear();
        return fired;
    }
    free.or_else(take_elsewhere).unwrap_or_else(|| Box::leak(Box::new(TimerSlot::new())))
}

/// Takes a slot from any shard.
#[cold]
fn take_elsewhere() -> Option<&'static TimerSlot> {
    if let Some(free) = inside(|_| ALL.iter().find_map(|shard| shard.free.pop())) {
        return Some(free);
    }
    let fired = inside(|_| ALL.iter().find_map(|shard| shard.fired.pop()))?;
    fired.clear();
    Some(fired)
}

/// Takes back a slot that has no handle and no job. Called inside the runtime.
pub(super) fn put(here: Option<Rt>, slot: &'static TimerSlot) {
    shard(here).free.push(slot);
}

/// Takes back a slot that has fired, has no handle, and still has its job. Called inside the
/// runtime.
pub(super) fn put_fired(rt: Rt, slot: &'static TimerSlot) {
    shard(Some(rt)).fired.push(slot);
}
