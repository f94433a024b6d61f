//! Every goroutine of a runtime, what it does and where it stands: what dumps and profiles are made of.
//!
//! A look in passing. Nobody is stopped; goroutines start, move and end meanwhile, and one that ends before its
//! turn is left out. The stack of one that runs is never read, but the caller's own.

use super::unwind::Tables;
use crate::sched::g::{self, G, Status};
use crate::sched::{Sched, current_g};

/// The most frames of the caller's own stack that are looked at: those of the dump itself are among them.
const OWN_FRAMES_MAX: usize = 128;

/// One goroutine, at one moment.
pub(super) struct Seen {
    pub(super) g: &'static G,
    pub(super) status: Status,
    pub(super) stack: Stack,
}

/// Where a goroutine stands.
pub(super) enum Stack {
    /// Code addresses, innermost first.
    At(Vec<u64>),
    /// It runs on another thread.
    Elsewhere,
    /// It has not begun, or went on while we looked.
    Unknown,
}

impl Seen {
    /// In the words that Go has for it.
    pub(super) fn state(&self) -> &'static str {
        match self.status {
            Status::Dead => "dead",
            Status::Runnable => "runnable",
            Status::Running => "running",
            Status::Waiting(reason) => reason.text(),
        }
    }
}

/// Shows every goroutine of `sched` to `show`, the caller first, then by id.
pub(super) fn for_each(sched: &Sched, mut show: impl FnMut(Seen)) {
    let mut all: Vec<&'static G> = Vec::new();
    g::for_each(&mut |g| {
        if g.status() != Status::Dead && std::ptr::eq(g.sched_hint(), sched) {
            all.push(g);
        }
    });
    let here = current_g();
    let is_here = |g: &G| here.is_some_and(|here| std::ptr::eq(here, g));
    let mut all: Vec<_> = all.into_iter().map(|g| (!is_here(g), g.id(), g)).collect();
    all.sort_unstable_by_key(|&(elsewhere, id, _)| (elsewhere, id));
    let mut tables = Tables::load();
    for (_, id, g) in all {
        let status = g.status();
        let stack = match status {
            Status::Dead => continue, // ended meanwhile
            Status::Running if is_here(g) => Stack::At(own_stack()),
            Status::Running => Stack::Elsewhere,
            _ => tables.frames(g).map_or(Stack::Unknown, Stack::At),
        };
        // It may have ended, and live again as another.
        if g.id() == id && std::ptr::eq(g.sched_hint(), sched) {
            show(Seen { g, status, stack });
        }
    }
}

fn own_stack() -> Vec<u64> {
    let mut addresses = Vec::new();
    backtrace::trace(|frame| {
        // A return address: the call is before it.
        addresses.push((frame.ip() as u64).saturating_sub(1));
        addresses.len() < OWN_FRAMES_MAX
    });
    addresses
}
