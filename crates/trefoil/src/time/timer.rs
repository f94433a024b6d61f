//! `Timer`, `Ticker`, and the functions made of them.

use super::pool;
use super::slot::{Job, Slot};
use crate::chan::{Receiver, bounded};
use crate::sched::Rt;
use crate::sys::clock::{self, LATEST, Nanos};
use std::fmt;
use std::panic::Location;
use std::time::{Duration, Instant};

/// Sends the time on a channel, or calls a function, once.
///
/// After [`stop`](Timer::stop) or [`reset`](Timer::reset) has returned there is no value of the earlier
/// setting in the channel, and none will come (Go 1.23's promise). Dropping a timer stops it, unless it is
/// one of [`after_func`]. Its channel is never closed: after the value, or after `stop`, nothing comes until `reset`.
///
/// ```
/// use std::time::Duration;
/// use trefoil::time::Timer;
///
/// trefoil::run(|| {
///     let timer = Timer::new(Duration::from_millis(1));
///     timer.chan().recv().unwrap();
///     assert!(!timer.stop(), "it has fired");
/// });
/// ```
pub struct Timer {
    slot: &'static Slot,
    /// None for a timer that calls a function.
    receiver: Option<Receiver<Instant>>,
    /// For `chan` of such a timer.
    never: Receiver<Instant>,
}

impl Timer {
    /// A timer that sends the time after `d`. [`Duration::MAX`] never comes.
    pub fn new(d: Duration) -> Timer {
        // One place, so that firing never waits.
        let (sender, receiver) = bounded(1);
        let slot = pool::take();
        slot.start(Job::send(sender), clock::after(d), 0, false);
        Timer { slot, receiver: Some(receiver), never: crate::chan::never() }
    }

    /// The channel that the time is sent on. For a timer of [`after_func`] nothing ever comes.
    pub fn chan(&self) -> &Receiver<Instant> {
        self.receiver.as_ref().unwrap_or(&self.never)
    }

    /// Stops the timer. True: that was in time; its value has not been received, and will not be.
    pub fn stop(&self) -> bool {
        self.slot.stop(|here| self.drain(here))
    }

    /// Lets it fire after `d` from now, whatever it did before. True: the earlier setting was still to come. A
    /// timer of [`after_func`] whose function has been called does nothing more.
    pub fn reset(&self, d: Duration) -> bool {
        self.slot.set(clock::after(d), 0, |here| self.drain(here))
    }

    fn drain(&self, here: Option<Rt>) -> bool {
        self.receiver.as_ref().is_some_and(|receiver| receiver.discard_in(here))
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        match self.receiver {
            Some(_) => self.slot.retire(),
            None => self.slot.abandon(),
        }
    }
}

impl fmt::Debug for Timer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timer").finish_non_exhaustive()
    }
}

/// Sends the time on a channel again and again. Ticks that the receiver is too slow for are left out. Dropping a ticker
/// stops it; its channel is never closed.
///
/// ```
/// use std::time::Duration;
/// use trefoil::time::Ticker;
///
/// trefoil::run(|| {
///     let ticker = Ticker::new(Duration::from_millis(1));
///     for _ in 0..3 {
///         ticker.chan().recv().unwrap();
///     }
/// });
/// ```
pub struct Ticker {
    slot: &'static Slot,
    receiver: Receiver<Instant>,
}

impl Ticker {
    /// A tick every `d`.
    ///
    /// # Panics
    /// If `d` is zero.
    #[track_caller]
    pub fn new(d: Duration) -> Ticker {
        let (sender, receiver) = bounded(1);
        let slot = pool::take();
        slot.start(Job::send(sender), clock::after(d), interval(d), false);
        Ticker { slot, receiver }
    }

    /// The channel of ticks.
    pub fn chan(&self) -> &Receiver<Instant> {
        &self.receiver
    }

    /// No more ticks, and none in the channel. (The channel is not closed, as in Go.)
    pub fn stop(&self) {
        self.slot.stop(|here| self.receiver.discard_in(here));
    }

    /// Ticks every `d` from now on.
    ///
    /// # Panics
    /// If `d` is zero.
    #[track_caller]
    pub fn reset(&self, d: Duration) {
        let period = interval(d);
        self.slot.set(clock::after(d), period, |here| self.receiver.discard_in(here));
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.slot.retire();
    }
}

impl fmt::Debug for Ticker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticker").finish_non_exhaustive()
    }
}

/// The period of a ticker.
#[track_caller]
fn interval(d: Duration) -> Nanos {
    assert!(!d.is_zero(), "non-positive interval for a Ticker");
    Nanos::try_from(d.as_nanos()).unwrap_or(LATEST)
}

/// A channel on which the time is sent once, after `d`.
///
/// The channel is never closed, as in Go: a second receive waits for ever.
///
/// Its timer stays until then, also when the receiver is dropped. A loop that waits with
/// a long limit each time uses the `after` arm of [`select!`](crate::select), which leaves nothing
/// behind, or a [`Timer`].
///
/// ```
/// use std::time::Duration;
/// trefoil::run(|| {
///     trefoil::time::after(Duration::from_millis(1)).recv().unwrap();
/// });
/// ```
pub fn after(d: Duration) -> Receiver<Instant> {
    let (sender, receiver) = bounded(1);
    pool::take().start(Job::send(sender), clock::after(d), 0, true);
    receiver
}

/// Calls `f` in a goroutine of its own after `d`. The timer can be stopped until then; dropping it does not
/// stop it.
///
/// ```
/// use std::time::Duration;
/// trefoil::run(|| {
///     let (tx, rx) = trefoil::chan::bounded(1);
///     trefoil::time::after_func(Duration::from_millis(1), move || tx.send(7).unwrap());
///     assert_eq!(rx.recv(), Ok(7));
/// });
/// ```
#[track_caller]
pub fn after_func<F>(d: Duration, f: F) -> Timer
where
    F: FnOnce() + Send + 'static,
{
    let slot = pool::take();
    slot.start(Job::Call(Box::new(f), Location::caller()), clock::after(d), 0, false);
    Timer { slot, receiver: None, never: crate::chan::never() }
}
