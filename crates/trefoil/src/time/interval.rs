//! `Interval`: ticks that a task awaits.

use super::sleep::{Sleep, sleep_until_async};
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

/// A tick that is later than this counts as missed. Wake-ups are late by some microseconds, and by
/// milliseconds on a busy machine; that alone is no reason to move the following ticks.
const TOLERANCE: Duration = Duration::from_millis(5);

/// Returns an [`Interval`] whose first tick is now, and whose following ticks are `period` apart.
///
/// # Panics
/// Panics if `period` is zero.
///
/// # Examples
/// ```
/// use std::time::{Duration, Instant};
/// use trefoil::time::interval;
///
/// trefoil::run(|| {
///     trefoil::block_on(async {
///         let start = Instant::now();
///         let mut ticks = interval(Duration::from_millis(2));
///         for _ in 0..3 {
///             ticks.tick().await;
///         }
///         assert!(start.elapsed() >= Duration::from_millis(4));
///     });
/// });
/// ```
#[track_caller]
pub fn interval(period: Duration) -> Interval {
    interval_at(Instant::now(), period)
}

/// Returns an [`Interval`] whose first tick is at `start`, and whose following ticks are `period`
/// apart.
///
/// # Panics
/// Panics if `period` is zero.
///
/// # Examples
/// ```
/// use std::time::{Duration, Instant};
/// use trefoil::time::interval_at;
///
/// trefoil::run(|| {
///     let start = Instant::now() + Duration::from_millis(2);
///     let mut ticks = interval_at(start, Duration::from_millis(1));
///     assert_eq!(trefoil::block_on(ticks.tick()), start);
/// });
/// ```
#[track_caller]
pub fn interval_at(start: Instant, period: Duration) -> Interval {
    assert!(!period.is_zero(), "the period of an interval must not be zero");
    Interval { sleep: sleep_until_async(start), period, behavior: MissedTickBehavior::default() }
}

/// What an [`Interval`] does when ticks were missed, because the task was busy for longer than a
/// period. The names are tokio's.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use trefoil::time::{MissedTickBehavior, interval};
///
/// let mut ticks = interval(Duration::from_secs(1));
/// assert_eq!(ticks.missed_tick_behavior(), MissedTickBehavior::Burst);
/// ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MissedTickBehavior {
    /// The missed ticks follow at once, one after the other, until none is late. The number of
    /// ticks is right, and so are their times.
    #[default]
    Burst,
    /// The next tick is one period after the late one. No two ticks are closer than a period.
    Delay,
    /// The missed ticks are left out. The next tick is at a multiple of the period after the first.
    Skip,
}

impl MissedTickBehavior {
    /// Returns the time of the tick after the one that was due at `due` and is delivered `now`.
    fn next(self, due: Instant, now: Instant, period: Duration) -> Instant {
        let late = now.saturating_duration_since(due);
        if late <= TOLERANCE {
            return later(due, period);
        }
        match self {
            MissedTickBehavior::Burst => later(due, period),
            MissedTickBehavior::Delay => later(now, period),
            MissedTickBehavior::Skip => {
                let since_last = late.as_nanos() % period.as_nanos();
                // Less than a tick's lateness, which fits.
                let since_last = Duration::from_nanos(u64::try_from(since_last).unwrap_or(0));
                later(now, period - since_last)
            }
        }
    }
}

/// Returns the time `d` after `t`; if that is too late for an `Instant`, in 30 years.
fn later(t: Instant, d: Duration) -> Instant {
    t.checked_add(d).unwrap_or_else(|| t + Duration::from_secs(86_400 * 365 * 30))
}

/// Ticks at fixed times, for async code. [`interval`] and [`interval_at`] create it.
///
/// It is the [`Ticker`](super::Ticker) of tasks. Nothing runs between two ticks: a tick that no
/// task awaits is delivered when one awaits it, and [`MissedTickBehavior`] says when the next one
/// comes.
///
/// With the feature `futures` it is a `futures_core::Stream`, whose items are the times of the
/// ticks.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use trefoil::time::{Interval, interval};
///
/// async fn tick_twice(ticks: &mut Interval) {
///     ticks.tick().await;
///     ticks.tick().await;
/// }
///
/// trefoil::run(|| trefoil::block_on(tick_twice(&mut interval(Duration::from_millis(1)))));
/// ```
#[derive(Debug)]
pub struct Interval {
    /// Ends at the next tick.
    sleep: Sleep,
    period: Duration,
    behavior: MissedTickBehavior,
}

impl Interval {
    /// Waits for the next tick. Returns the time for which the tick was set.
    ///
    /// # Cancel
    /// If the future is dropped, no tick is lost: the next call waits for the same one.
    pub async fn tick(&mut self) -> Instant {
        poll_fn(|context| self.poll_tick(context)).await
    }

    /// Returns the time of the tick that is due, or arranges a wake-up for the next one. For code
    /// that implements a future by hand; otherwise use [`tick`](Self::tick).
    pub fn poll_tick(&mut self, context: &mut Context<'_>) -> Poll<Instant> {
        ready!(Pin::new(&mut self.sleep).poll(context));
        let due = self.sleep.deadline();
        let next = self.behavior.next(due, Instant::now(), self.period);
        Pin::new(&mut self.sleep).reset(next);
        Poll::Ready(due)
    }

    /// Sets the next tick to one period from now.
    pub fn reset(&mut self) {
        self.reset_at(later(Instant::now(), self.period));
    }

    /// Sets the next tick to now.
    pub fn reset_immediately(&mut self) {
        self.reset_at(Instant::now());
    }

    /// Sets the next tick to `d` from now.
    pub fn reset_after(&mut self, d: Duration) {
        self.reset_at(later(Instant::now(), d));
    }

    /// Sets the next tick to `deadline`.
    pub fn reset_at(&mut self, deadline: Instant) {
        Pin::new(&mut self.sleep).reset(deadline);
    }

    /// Returns the time between two ticks.
    pub fn period(&self) -> Duration {
        self.period
    }

    /// Returns what happens when ticks were missed.
    pub fn missed_tick_behavior(&self) -> MissedTickBehavior {
        self.behavior
    }

    /// Sets what happens when ticks were missed.
    pub fn set_missed_tick_behavior(&mut self, behavior: MissedTickBehavior) {
        self.behavior = behavior;
    }
}

#[cfg(feature = "futures")]
impl futures_core::Stream for Interval {
    type Item = Instant;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Instant>> {
        self.poll_tick(context).map(Some)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (usize::MAX, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_behavior_decides_when_the_tick_after_a_late_one_comes() {
        let due = Instant::now();
        let (now, period) = (due + 25 * MS, 10 * MS);
        assert_eq!(MissedTickBehavior::Burst.next(due, now, period), due + 10 * MS);
        assert_eq!(MissedTickBehavior::Delay.next(due, now, period), due + 35 * MS);
        assert_eq!(MissedTickBehavior::Skip.next(due, now, period), due + 30 * MS);
    }

    #[test]
    fn a_tick_within_the_tolerance_does_not_move_the_next_one() {
        let due = Instant::now();
        for behavior in
            [MissedTickBehavior::Burst, MissedTickBehavior::Delay, MissedTickBehavior::Skip]
        {
            assert_eq!(behavior.next(due, due + 5 * MS, 10 * MS), due + 10 * MS);
        }
    }
}
