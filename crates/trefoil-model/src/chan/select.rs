//! `chan/select/passes.rs`, and arms for it.

#[allow(unreachable_pub)]
#[path = "../../../trefoil/src/chan/select/passes.rs"]
mod passes;

#[path = "../../../trefoil/src/chan/select/ready.rs"]
mod ready;

pub(crate) mod futures;

use super::core::ChanSide;
use super::{Receiver, Sender};
use crate::sys::clock::NEVER;
use futures::{Event, EventArm};
use passes::{Arm, ArmTarget, Outcome, Preference, poll, select};
use std::pin::Pin;

/// One operation of a select.
pub(crate) enum Case<'a> {
    Send(&'a Sender<u32>, u32),
    Recv(&'a Receiver<u32>),
    Future(&'a Event),
}

/// The outcome of a select.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Chose {
    Sent(usize),
    Received(usize, u32),
    Closed(usize),
    /// The output of a future.
    Output(usize),
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
        Case::Recv(_) | Case::Future(_) => 0,
    });
    let mut futures = cases.each_ref().map(|case| match case {
        Case::Future(event) => Some(EventArm(event)),
        _ => None,
    });
    let mut futures = futures.iter_mut();
    let mut slots = values.each_mut().map(|slot| std::ptr::from_mut(slot).cast::<u8>()).into_iter();
    let mut arms = cases.each_ref().map(|case| {
        let slot = slots.next().expect("one each");
        let future = futures.next().expect("one each");
        // SAFETY: the slots are in this frame until the select has ended, and values are Copy.
        unsafe {
            match case {
                Case::Send(tx, _) => Arm::channel(Some(tx.core()), ChanSide::Send, slot),
                Case::Recv(rx) => Arm::channel(rx.core(), ChanSide::Recv, slot),
                Case::Future(_) => {
                    let future = Pin::new(future.as_mut().expect("made above"));
                    Arm::new(ArmTarget::Future(future), slot)
                }
            }
        }
    });
    let chosen = match wait {
        Wait::No => poll(&mut arms, Preference::None),
        Wait::ForATime => select(&mut arms, 1, Preference::None),
        Wait::ForEver => select(&mut arms, NEVER, Preference::None),
    };
    match chosen {
        None => Chose::Nothing,
        Some(chosen) if chosen.outcome != Outcome::Moved => Chose::Closed(chosen.index),
        Some(chosen) => match cases[chosen.index] {
            Case::Send(..) => Chose::Sent(chosen.index),
            Case::Recv(_) => Chose::Received(chosen.index, values[chosen.index]),
            Case::Future(_) => Chose::Output(chosen.index),
        },
    }
}

/// Waits until one of the operations is ready, and returns its number. None means that none is, or
/// that the deadline has passed.
pub(crate) fn run_ready<const N: usize>(cases: [Case<'_>; N], wait: Wait) -> Option<usize> {
    let mut arms = cases.each_ref().map(|case| {
        // SAFETY: `ready` does no operation, so it needs no slot.
        unsafe {
            match case {
                Case::Send(tx, _) => {
                    Arm::channel(Some(tx.core()), ChanSide::Send, std::ptr::null_mut())
                }
                Case::Recv(rx) => Arm::channel(rx.core(), ChanSide::Recv, std::ptr::null_mut()),
                Case::Future(_) => Arm::new(ArmTarget::Nothing, std::ptr::null_mut()),
            }
        }
    });
    match wait {
        Wait::No => ready::try_ready(&mut arms, Preference::First),
        Wait::ForATime => ready::ready(&mut arms, 1, Preference::First),
        Wait::ForEver => ready::ready(&mut arms, NEVER, Preference::First),
    }
}

/// Keeps the compiler from calling `ArmTarget::After` unused.
const _: fn(u64) -> ArmTarget<'static> = ArmTarget::After;
