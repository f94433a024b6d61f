//! `chan/select/passes.rs`, and arms for it.

#[allow(unreachable_pub)]
#[path = "../../../trefoil/src/chan/select/passes.rs"]
mod passes;

use super::core::ChanSide;
use super::{Receiver, Sender};
use crate::sys::clock::NEVER;
use passes::{Arm, ArmTarget, Outcome, poll, select};

/// One operation of a select.
pub(crate) enum Case<'a> {
    Send(&'a Sender<u32>, u32),
    Recv(&'a Receiver<u32>),
}

/// The outcome of a select.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Chose {
    Sent(usize),
    Received(usize, u32),
    Closed(usize),
    /// `default`, or the deadline has passed.
    Nothing,
}

impl Chose {
    pub(crate) fn value(self) -> Option<u32> {
        match self {
            Chose::Received(_, value) => Some(value),
            _ => None,
        }
    }
}

/// How long the select waits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    No,
    /// Until its deadline passes ([`crate::sched::wait::time_passes`]).
    ForATime,
    ForEver,
}

/// Runs one select.
pub(crate) fn run<const N: usize>(cases: [Case<'_>; N], wait: Wait) -> Chose {
    let mut values = cases.each_ref().map(|case| match case {
        Case::Send(_, value) => *value,
        Case::Recv(_) => 0,
    });
    let mut slots = values.each_mut().map(|slot| std::ptr::from_mut(slot).cast::<u8>()).into_iter();
    let mut arms = cases.each_ref().map(|case| {
        let slot = slots.next().expect("one each");
        // SAFETY: the slots are in this frame until the select has ended, and values are Copy.
        unsafe {
            match case {
                Case::Send(tx, _) => Arm::channel(Some(tx.core()), ChanSide::Send, slot),
                Case::Recv(rx) => Arm::channel(rx.core(), ChanSide::Recv, slot),
            }
        }
    });
    let chosen = match wait {
        Wait::No => poll(&mut arms),
        Wait::ForATime => select(&mut arms, 1),
        Wait::ForEver => select(&mut arms, NEVER),
    };
    match chosen {
        None => Chose::Nothing,
        Some(chosen) if chosen.outcome != Outcome::Moved => Chose::Closed(chosen.index),
        Some(chosen) => match cases[chosen.index] {
            Case::Send(..) => Chose::Sent(chosen.index),
            Case::Recv(_) => Chose::Received(chosen.index, values[chosen.index]),
        },
    }
}

/// Keeps the compiler from calling `ArmTarget::After` unused.
const _: fn(u64) -> ArmTarget<'static> = ArmTarget::After;
