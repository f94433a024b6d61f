//! `Timer`, `Ticker`, and the functions made from them.

use super::pool;
use super::slot::{Job, Owner, TimerSlot};
use crate::chan::{Receiver, bounded, never};
use crate::sched::Rt;
use crate::sys::clock::{self, LATEST, Nanos};
use std::fmt;
use std::panic::Location;
use std::time::{Duration, Instant};

/// Sends the time on a channel, or calls a function, once.
///
/// [`Timer::new`] makes a timer that sends, [`after_func`] a timer that calls a function. For a
/// single wait with a time limit the `after` arm of [`select!`](crate::select) is shorter. Use a
/// `Timer` if it must be stopped or reset.
///
/// After [`stop`](Timer::stop) or [`reset`](Timer::reset) has returned, the channel contains no
/// value of the earlier setting, and none will come. Go 1.23 promises the same. The channel is
/// never closed: after the value, or after `stop`, a receive waits until `reset`.
///
/// # Drop
/// Dropping a timer of [`Timer::new`] stops it. A clone of its channel keeps a value that was sent
/// already. Dropping a timer of [`after_func`] does not stop it.
///
/// # Examples
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
    slot: &'static TimerSlot,
    /// None for a timer that calls a function.
    receiver: Option<Receiver<Instant>>,
    /// What `chan` returns for such a timer.
    never: Receiver<Instant>,
}

impl Timer {
    /// Creates a timer that sends the time after `d`. With [`Duration::MAX`] it never does.
    ///
    /// # Examples
    /// ```
    /// use std::time::{Duration, Instant};
    /// use trefoil::time::Timer;
    /// trefoil::run(|| {
    ///     let start = Instant::now();
    ///     let timer = Timer::new(Duration::from_millis(1));
    ///     timer.chan().recv().unwrap();
    ///     assert!(start.elapsed() >= Duration::from_millis(1));
    /// });
    /// ```
    pub fn new(d: Duration) -> Timer {
        // Room for one value, so that firing never waits.
        let (sender, receiver) = bounded(1);
        let slot = pool::take();
        slot.start(Job::send(sender), clock::after(d), 0, Owner::Handle);
        Timer { slot, receiver: Some(receiver), never: never() }
    }

    /// Returns the channel on which the timer sends the time.
    ///
    /// The channel of a timer of [`after_func`] never receives a value.
    ///
    /// # Examples
    /// ```
    /// use std::time::Duration;
    /// use trefoil::chan::bounded;
    /// use trefoil::select;
    /// use trefoil::time::Timer;
    /// trefoil::run(|| {
    ///     let (_tx, rx) = bounded::<u8>(0);
    ///     let limit = Timer::new(Duration::from_millis(1));
    ///     let data = select! {
    ///         recv(rx) -> v => v.ok(),
    ///         recv(limit.chan()) -> _ => None,
    ///     };
    ///     assert_eq!(data, None);
    /// });
    /// ```
    pub fn chan(&self) -> &Receiver<Instant> {
        self.receiver.as_ref().unwrap_or(&self.never)
    }

    /// Stops the timer.
    ///
    /// Returns true if that was in time: its value was not received and will not be, or its
    /// function was not called and will not be. Returns false if the timer has fired or was stopped
    /// before.
    ///
    /// # Examples
    /// ```
    /// use std::time::Duration;
    /// use trefoil::time::{Timer, after_func};
    /// trefoil::run(|| {
    ///     let timer = Timer::new(Duration::from_secs(60));
    ///     assert!(timer.stop());
    ///     assert!(!timer.stop()); // stopped already
    ///     assert!(timer.chan().try_recv().is_err());
    ///
    ///     let call = after_func(Duration::from_secs(60), || unreachable!());
    ///     assert!(call.stop());
    /// });
    /// ```
    pub fn stop(&self) -> bool {
        self.slot.stop(|here| self.drain(here))
    }

    /// Sets the timer to fire `d` from now, whether it has fired, was stopped, or neither.
    ///
    /// Returns true if the earlier setting was still to come, or if its value was not received yet.
    /// That value is removed. Does nothing and returns false for a timer of [`after_func`] whose
    /// function was called.
    ///
    /// # Examples
    /// ```
    /// use std::time::Duration;
    /// use trefoil::time::Timer;
    /// trefoil::run(|| {
    ///     let timer = Timer::new(Duration::from_secs(60));
    ///     assert!(timer.reset(Duration::from_millis(1)));
    ///     timer.chan().recv().unwrap();
    ///     assert!(!timer.reset(Duration::from_millis(1))); // it had fired
    ///     timer.chan().recv().unwrap();
    /// });
    /// ```
    pub fn reset(&self, d: Duration) -> bool {
        self.slot.set(clock::after(d), 0, |here| self.drain(here))
    }

    fn drain(&self, here: Option<Rt>) -> bool {
        self.receiver.as_ref().is_some_and(|receiver| discard_all(receiver, here))
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        match self.receiver {
            Some(_) => self.slot.retire(),
            None => self.slot.detach(),
        }
    }
}

impl fmt::Debug for Timer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timer").finish_non_exhaustive()
    }
}

/// Sends the time on a channel again and again.
///
/// Ticks for which the receiver is too slow are left out. The channel is never closed.
///
/// # Drop
/// Dropping a ticker stops it.
///
/// # Examples
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
    slot: &'static TimerSlot,
    receiver: Receiver<Instant>,
}

impl Ticker {
    /// Creates a ticker that sends the time every `d`. The first tick comes after `d`.
    ///
    /// # Panics
    /// Panics if `d` is zero.
    ///
    /// # Examples
    /// ```
    /// use std::time::{Duration, Instant};
    /// use trefoil::time::Ticker;
    /// trefoil::run(|| {
    ///     let start = Instant::now();
    ///     let ticker = Ticker::new(Duration::from_millis(1));
    ///     ticker.chan().recv().unwrap();
    ///     assert!(start.elapsed() >= Duration::from_millis(1));
    /// });
    /// ```
    #[track_caller]
    pub fn new(d: Duration) -> Ticker {
        // May panic, so it comes before a slot is taken.
        let period = interval(d);
        let (sender, receiver) = bounded(1);
        let slot = pool::take();
        slot.start(Job::send(sender), clock::after(d), period, Owner::Handle);
        Ticker { slot, receiver }
    }

    /// Returns the channel on which the ticker sends the time.
    ///
    /// Its values are the times at which the ticks were sent. As it is never closed, a loop over it
    /// does not end by itself.
    ///
    /// # Examples
    /// ```
    /// use std::time::Duration;
    /// use trefoil::time::Ticker;
    /// trefoil::run(|| {
    ///     let ticker = Ticker::new(Duration::from_millis(1));
    ///     let times: Vec<_> = ticker.chan().iter().take(3).collect();
    ///     assert!(times.is_sorted());
    /// });
    /// ```
    pub fn chan(&self) -> &Receiver<Instant> {
        &self.receiver
    }

    /// Stops the ticker, and removes a tick that is in the channel.
    ///
    /// As in Go, the channel is not closed: a receive waits until [`reset`](Ticker::reset).
    ///
    /// # Examples
    /// ```
    /// use std::time::Duration;
    /// use trefoil::time::Ticker;
    /// trefoil::run(|| {
    ///     let ticker = Ticker::new(Duration::from_millis(1));
    ///     ticker.chan().recv().unwrap();
    ///     ticker.stop();
    ///     assert!(ticker.chan().try_recv().unwrap_err().is_empty());
    /// });
    /// ```
    pub fn stop(&self) {
        self.slot.stop(|here| discard_all(&self.receiver, here));
    }

    /// Sets the ticker to tick every `d` from now on, also if it was stopped.
    ///
    /// A tick that is in the channel is removed.
    ///
    /// # Panics
    /// Panics if `d` is zero.
    ///
    /// # Examples
    /// ```
    /// use std::time::Duration;
    /// use trefoil::time::Ticker;
    /// trefoil::run(|| {
    ///     let ticker = Ticker::new(Duration::from_secs(60));
    ///     ticker.stop();
    ///     ticker.reset(Duration::from_millis(1));
    ///     ticker.chan().recv().unwrap();
    /// });
    /// ```
    #[track_caller]
    pub fn reset(&self, d: Duration) {
        let period = interval(d);
        self.slot.set(clock::after(d), period, |here| discard_all(&self.receiver, here));
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

/// Returns the period of a ticker.
#[track_caller]
fn interval(d: Duration) -> Nanos {
    assert!(!d.is_zero(), "non-positive interval for a Ticker");
    Nanos::try_from(d.as_nanos()).unwrap_or(LATEST)
}

/// Returns a channel that receives the time once, after `d`.
///
/// As in Go, the channel is never closed: a second receive waits forever.
///
/// # Drop
/// The timer stays set for all of `d`, even if the receiver is dropped. In a loop that waits with a
/// long limit each time, use the `after` arm of [`select!`](crate::select), which leaves nothing
/// behind, or a [`Timer`].
///
/// # Examples
/// ```
/// use std::time::Duration;
/// trefoil::run(|| {
///     trefoil::time::after(Duration::from_millis(1)).recv().unwrap();
/// });
/// ```
pub fn after(d: Duration) -> Receiver<Instant> {
    let (sender, receiver) = bounded(1);
    pool::take().start(Job::send(sender), clock::after(d), 0, Owner::Setting);
    receiver
}

/// Calls `f` in a goroutine of its own after `d`.
///
/// [`Timer::stop`] on the returned timer prevents the call, if it comes before the time.
///
/// # Drop
/// Dropping the returned timer does not stop it: `f` is still called.
///
/// # Examples
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
    slot.start(Job::Call(Box::new(f), Location::caller()), clock::after(d), 0, Owner::Handle);
    Timer { slot, receiver: None, never: never() }
}

/// Discards the times that are in the channel: one, or two if an async receive that was dropped has
/// given one back. Returns whether there was any.
fn discard_all(receiver: &Receiver<Instant>, here: Option<Rt>) -> bool {
    let mut found = false;
    while receiver.discard_in(here) {
        found = true;
    }
    found
}
