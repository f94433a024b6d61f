//! Slots that nobody uses, on shelves: one for each P, so that those who make and drop timers do not meet.
//!
//! | list of a shelf | what |
//! |---|---|
//! | `free` | may be reused |
//! | `spent` | has fired and belonged to nobody; its job is still to be dropped, which a timer must not do |
//!
//! A slot is put on the shelf of the P where it became free, and taken from any if the own one is empty.

use super::slot::{Slot, inside};
use crate::sched::Rt;
use crate::sys::lock::Lock;
use std::sync::atomic::{AtomicBool, Ordering};

/// More Ps than these share them.
const SHELVES: usize = 16;

/// Lines of its own.
#[repr(align(128))]
struct Shelf {
    free: List,
    spent: List,
}

static ALL: [Shelf; SHELVES] = [const { Shelf { free: List::new(), spent: List::new() } }; SHELVES];

fn shelf(here: Option<Rt>) -> &'static Shelf {
    &ALL[here.map_or(0, |rt| rt.p_id() as usize % SHELVES)]
}

struct List {
    head: Lock<Option<&'static Slot>>,
    /// For a look without the lock. Written under it.
    any: AtomicBool,
}

impl List {
    const fn new() -> List {
        List { head: Lock::new(None), any: AtomicBool::new(false) }
    }

    fn push(&self, slot: &'static Slot) {
        let mut head = self.head.lock();
        slot.link(head.replace(slot));
        self.any.store(true, Ordering::Relaxed);
    }

    fn pop(&self) -> Option<&'static Slot> {
        if !self.any.load(Ordering::Relaxed) {
            return None;
        }
        let mut head = self.head.lock();
        let slot = (*head)?;
        *head = slot.link(None);
        self.any.store(head.is_some(), Ordering::Relaxed);
        Some(slot)
    }
}

/// A slot of one's own.
pub(super) fn take() -> &'static Slot {
    let [spent, more, free] = inside(|here| {
        let own = shelf(here);
        match own.spent.pop() {
            // Two for one: so they become fewer.
            Some(spent) => [Some(spent), own.spent.pop(), None],
            None => [None, None, own.free.pop()],
        }
    });
    if let Some(more) = more {
        more.retire();
    }
    if let Some(spent) = spent {
        spent.clear();
        return spent;
    }
    free.or_else(take_elsewhere).unwrap_or_else(|| Box::leak(Box::new(Slot::new())))
}

#[cold]
fn take_elsewhere() -> Option<&'static Slot> {
    let (slot, spent) = inside(|_| {
        let free = ALL.iter().find_map(|shelf| Some((shelf.free.pop()?, false)));
        free.or_else(|| ALL.iter().find_map(|shelf| Some((shelf.spent.pop()?, true))))
    })?;
    if spent {
        slot.clear();
    }
    Some(slot)
}

/// Its holder is done with it, and it has no job. Inside the runtime.
pub(super) fn put(here: Option<Rt>, slot: &'static Slot) {
    shelf(here).free.push(slot);
}

/// It has fired and is nobody's. Inside the runtime.
pub(super) fn spent(rt: Rt, slot: &'static Slot) {
    shelf(Some(rt)).spent.push(slot);
}
