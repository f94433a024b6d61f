//! Restates the part of the scheduler that the files of channels and timers use. Every thread of a
//! model is a goroutine that is inside the runtime.

pub(crate) mod wait;

pub(crate) use wait::timers::{RuntimeId, Sched};

use std::cell::Cell;

/// The largest number of goroutines in a model.
pub(crate) const MAX_GOROUTINES: usize = 4;

loom::thread_local! {
    static ME: Cell<usize> = Cell::new(0);
    static RANDOM: Cell<u64> = Cell::new(0);
}

/// The order in which a goroutine's selects check their arms.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    AsWritten,
    /// The last arm first. Two selects that register in opposite orders meet in all ways.
    LastFirst,
}

/// Makes this thread goroutine `number`. The thread that runs the model is goroutine 0.
pub(crate) fn i_am(number: usize, order: Order) {
    assert!(number < MAX_GOROUTINES);
    ME.with(|me| me.set(number));
    let bits = if order == Order::AsWritten { 0 } else { u64::MAX };
    RANDOM.with(|random| random.set(bits));
}

/// Starts goroutine `number`.
pub(crate) fn go<T: 'static>(
    number: usize,
    order: Order,
    f: impl FnOnce() -> T + 'static,
) -> loom::thread::JoinHandle<T> {
    loom::thread::spawn(move || {
        i_am(number, order);
        f()
    })
}

/// Returns the number of the current goroutine.
fn me() -> usize {
    ME.with(Cell::get)
}

/// Proof that the current goroutine is inside the runtime; its number.
#[derive(Clone, Copy)]
pub(crate) struct Rt(usize);

pub(crate) mod random {
    //! The random numbers of a P.

    use super::{Cell, RANDOM, Rt};

    /// Not random: a model must do the same thing each time.
    pub(crate) fn random(_: Option<Rt>) -> u64 {
        RANDOM.with(Cell::get)
    }
}

impl Rt {
    pub(crate) fn enter() -> Option<Rt> {
        Some(Rt(me()))
    }

    pub(crate) fn sched(self) -> &'static Sched {
        &Sched
    }
}

pub(crate) fn fatal(why: std::fmt::Arguments<'_>) -> ! {
    panic!("{why}")
}

pub(crate) mod goroutine {
    pub(crate) mod spawn {
        //! Timer callbacks that start a goroutine.

        use crate::sched::Rt;
        use std::panic::Location;

        /// Calls `f` here, which a goroutine of its own could do as well.
        pub(crate) fn spawn_in(_: Rt, f: impl FnOnce() + Send, _: &'static Location<'static>) {
            f();
        }
    }
}
