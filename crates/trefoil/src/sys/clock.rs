//! The runtime's clock: nanoseconds of `CLOCK_MONOTONIC`, the clock of `std::time::Instant`.

use super::parker::Parker;
use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

/// A point in time, in nanoseconds. [`NEVER`] is later than any other.
pub(crate) type Nanos = u64;

/// The point in time that is never reached.
pub(crate) const NEVER: Nanos = u64::MAX;

/// The last point in time before [`NEVER`], some hundred years ahead. A longer timeout ends here: a
/// goroutine that waits with a timeout is not part of a deadlock, however long the timeout is.
pub(crate) const LATEST: Nanos = NEVER - 1;

/// Returns the current time. Takes 27 ns, so fast paths avoid it.
#[inline]
pub(crate) fn now() -> Nanos {
    let t = clock_gettime(ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// How often [`now_on_both`] reads both clocks; it keeps the closest pair.
const READINGS: u32 = 16;

/// Returns the current time on std's clock and on this one. The second is at or after the first,
/// usually by the time that one reading takes. So what is converted from nanoseconds to an
/// `Instant` by this pair is never in the future.
///
/// A thread may lose its CPU between the two readings, but rarely in each of [`READINGS`] pairs.
pub(crate) fn now_on_both() -> (Instant, Nanos) {
    let pair = || {
        let before = now();
        let instant = Instant::now();
        let after = now();
        (after - before, (instant, after))
    };
    let (mut gap, mut closest) = pair();
    for _ in 1..READINGS {
        let (next_gap, next) = pair();
        if next_gap < gap {
            (gap, closest) = (next_gap, next);
        }
    }
    closest
}

/// Returns the time after `d` from now; at most [`LATEST`].
pub(crate) fn after(d: Duration) -> Nanos {
    after_nanos(u64::try_from(d.as_nanos()).unwrap_or(LATEST))
}

/// Returns the time after `nanos` from now; at most [`LATEST`].
pub(crate) fn after_nanos(nanos: u64) -> Nanos {
    now().saturating_add(nanos).min(LATEST)
}

/// Converts a std `Instant` to this clock; a past one becomes the current time.
pub(crate) fn at(t: Instant) -> Nanos {
    after(t.saturating_duration_since(Instant::now()))
}

impl Parker {
    /// Sleeps as `park` does, at most until `deadline`. Returns whether it consumed a token.
    pub(crate) fn park_until(&self, deadline: Nanos) -> bool {
        if deadline == NEVER {
            self.park();
            return true;
        }
        let left = deadline.saturating_sub(now());
        left != 0 && self.park_timeout(Duration::from_nanos(left))
    }
}
