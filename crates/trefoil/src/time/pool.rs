//! Slots that nobody uses.
//!
//! | list | what |
//! |---|---|
//! | `FREE` | may be reused |
//! | `SPENT` | has fired and belonged to nobody; its job is still to be dropped, which a timer must not do |

use super::slot::{Job, Slot, inside};
use crate::sys::lock::Lock;

static FREE: Lock<Option<&'static Slot>> = Lock::new(None);
static SPENT: Lock<Option<&'static Slot>> = Lock::new(None);

fn push(list: &Lock<Option<&'static Slot>>, slot: &'static Slot) {
    let mut head = list.lock();
    slot.link(head.replace(slot));
}

fn pop(list: &Lock<Option<&'static Slot>>) -> Option<&'static Slot> {
    let mut head = list.lock();
    let slot = (*head)?;
    *head = slot.link(None);
    Some(slot)
}

/// A slot of one's own.
pub(super) fn take(job: Job) -> &'static Slot {
    while let Some(spent) = inside(|_| pop(&SPENT)) {
        give_back(spent);
    }
    let slot = inside(|_| pop(&FREE)).unwrap_or_else(|| Box::leak(Box::new(Slot::new())));
    drop(slot.assign(job));
    slot
}

/// The holder is done with it.
pub(super) fn give_back(slot: &'static Slot) {
    drop(slot.assign(Job::Nothing));
    inside(|_| push(&FREE, slot));
}

/// It has fired and is nobody's. Inside the runtime.
pub(super) fn spent(slot: &'static Slot) {
    push(&SPENT, slot);
}
