//! `Timer`, `Ticker`, and the functions made from them.

use super::pool;
use super::slot::{Job, Owner, TimerSlot};
use crate::chan::{Receiver, bounded, never};
use crate::sched::Rt;
use crate::sys::clock::{self, LATEST, Nanos};
use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Sends the time on a channel, or calls a function, once for each time that it is set.
///
/// | made by | when it fires |
/// |---|---|
/// | [`Timer::new`] | it sends the time on its channel |
/// | [`Timer::with_func`] | it calls a function, also after each [`reset`](Timer::reset) |
/// | [`after_func`] | it calls a function that can be called only once |
///
/// For a single wait with a time limit the `after` arm of [`select!`](crate::select) is shorter.
/// Use a `Timer` if it must be stopped or reset.
///
/// After [`stop`](Timer::stop) or [`reset`](Timer::reset) has returned, the channel contains no
/// value of the earlier setting, and none will come. Go 1.23 promises the same. The channel is
/// never closed: after the value, or after `stop`, a receive waits until `reset`.
///
/// # Drop
/// Dropping a timer of [`Timer::new`] stops it. A clone of its channel keeps a value that was sent
/// already. Dropping a timer that calls a function does not stop it.
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

    /// Creates a timer that calls `f` in a goroutine of its own after `d`, and again after each
    /// [`reset`](Timer::reset).
    ///
    /// It is Go's `AfterFunc`. Use it for an action that is put off again and again: a flush some
    /// time after the last write, a lease that is renewed. If the timer is reset while `f` runs,
    /// the next call may begin before this one has ended, so `f` must be [`Sync`]. `f` itself may
    /// reset the timer. For a function that can be called only once there is [`after_func`].
    ///
    /// # Drop
    /// Dropping the timer does not stop it: `f` is still called if the timer is set.
    ///
    /// # Examples
    /// ```
    /// use std::time::Duration;
    /// use trefoil::chan::unbounded;
    /// use trefoil::time::Timer;
    ///
    /// trefoil::run(|| {
    ///     let (tx, rx) = unbounded();
    ///     let flush = move || tx.send("flush").unwrap();
    ///     let timer = Timer::with_func(Duration::from_millis(1), flush);
    ///     rx.recv().unwrap();
    ///     assert!(!timer.reset(Duration::from_secs(60))); // it had fired, and is set again
    ///     assert!(timer.reset(Duration::from_millis(1))); // it was set, and is put off
    ///     assert_eq!(rx.recv(), Ok("flush"));
    /// });
    /// ```
    #[track_caller]
    pub fn with_func<F>(d: Duration, f: F) -> Timer
    where
        F: Fn() + Send + Sync + 'static,
    {
        Timer::calling(Job::Call(Arc::new(f), Location::caller()), d)
    }

    /// Creates a timer that calls a function.
    fn calling(job: Job, d: Duration) -> Timer {
        let slot = pool::take();
        slot.start(job, clock::after(d), 0, Owner::Handle);
        Timer { slot, receiver: None, never: never() }
    }

    /// Returns the channel on which the timer sends the time.
    ///
    /// The channel of a timer that calls a function never receives a value.
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
    /// That value is removed. Returns false if the timer had fired or was stopped: a function that
    /// was called does not count as put off, even if it has not begun to run.
    ///
    /// Does nothing for a timer of [`after_func`] whose function was called, and returns false.
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
    without_handle(clock::after(d), 0)
}

/// Returns a channel that receives the time once, at `when`, or at once if that has passed.
///
/// It is [`after`] with an instant, as crossbeam's `at`. Several waits may share one end.
///
/// # Drop
/// As for [`after`].
///
/// # Examples
/// ```
/// use std::time::{Duration, Instant};
/// use trefoil::chan::bounded;
/// use trefoil::select;
/// use trefoil::time::at;
///
/// trefoil::run(|| {
///     let (tx, rx) = bounded(1);
///     tx.send("value").unwrap();
///     let end = at(Instant::now() + Duration::from_millis(5));
///     let mut received = 0;
///     loop {
///         select! {
///             recv(rx) -> _ => received += 1,
///             recv(end) -> _ => break,
///         }
///     }
///     assert_eq!(received, 1);
/// });
/// ```
pub fn at(when: Instant) -> Receiver<Instant> {
    without_handle(clock::at(when), 0)
}

/// Returns a channel that receives the time every `d`, for the first time after `d`.
///
/// It is a [`Ticker`] that needs no handle, as Go's `time.Tick` and crossbeam's `tick`. A tick for
/// which there is no room is left out: the channel holds one. It is never closed.
///
/// # Panics
/// Panics if `d` is zero.
///
/// # Drop
/// The ticks stop when all clones of the receiver are dropped. The memory is freed at the time of
/// the next tick.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use trefoil::time::tick;
/// trefoil::run(|| {
///     let ticks = tick(Duration::from_millis(1));
///     let times: Vec<_> = ticks.iter().take(3).collect();
///     assert!(times.is_sorted());
/// });
/// ```
#[track_caller]
pub fn tick(d: Duration) -> Receiver<Instant> {
    without_handle(clock::after(d), interval(d))
}

/// Sets a timer that only its channel refers to.
fn without_handle(when: Nanos, period: Nanos) -> Receiver<Instant> {
    let (sender, receiver) = bounded(1);
    pool::take().start(Job::send(sender), when, period, Owner::Setting);
    receiver
}

/// Calls `f` in a goroutine of its own after `d`.
///
/// [`Timer::stop`] on the returned timer prevents the call, if it comes before the time, and
/// [`Timer::reset`] puts it off. Both return what Go's do. `f` is called at most once; a timer that
/// can be reset after its call is a [`Timer::with_func`].
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
    Timer::calling(Job::CallOnce(Box::new(f), Location::caller()), d)
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
