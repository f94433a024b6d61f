//! As much of a scheduler as the files of channels and timers ask for: every thread of a model is a
//! goroutine that is inside the runtime.

pub(crate) mod wait;

pub(crate) use wait::timers::{RuntimeId, Sched};

use std::cell::Cell;

/// Goroutines of a model.
pub(crate) const MAX_GOROUTINES: usize = 4;

loom::thread_local! {
    static ME: Cell<usize> = Cell::new(0);
    static RANDOM: Cell<u64> = Cell::new(0);
}

/// In which order a goroutine's selects look at their arms.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    AsWritten,
    /// The last first. Two selects that enlist in opposite orders meet in every way there is.
    LastFirst,
}

/// This thread is goroutine `number` from now on. Number 0 is the one that runs the model.
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

/// Which goroutine runs this.
fn me() -> usize {
    ME.with(Cell::get)
}

/// Being inside the runtime, as goroutine so-and-so.
#[derive(Clone, Copy)]
pub(crate) struct Rt(usize);

impl Rt {
    pub(crate) fn enter() -> Option<Rt> {
        Some(Rt(me()))
    }

    /// Not random: a model must do the same thing each time.
    pub(crate) fn random(self) -> u64 {
        RANDOM.with(Cell::get)
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
        //! Functions of timers.

        use crate::sched::Rt;
        use std::panic::Location;

        /// Calls it: as good as a goroutine of its own.
        pub(crate) fn spawn_in(_: Rt, f: Box<dyn FnOnce() + Send>, _: &'static Location<'static>) {
            f();
        }
    }
}
