//! The runtime's clock: nanoseconds of CLOCK_MONOTONIC, the clock of `std::time::Instant`.

use super::parker::Parker;
use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

/// A point in time, in nanoseconds. `NEVER` is later than any other.
pub(crate) type Nanos = u64;

/// The point in time that does not come.
pub(crate) const NEVER: Nanos = u64::MAX;

/// Now. 27 ns: kept off the fast paths.
#[inline]
pub(crate) fn now() -> Nanos {
    let t = clock_gettime(ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// `now` plus a duration; too long is never.
pub(crate) fn after(d: Duration) -> Nanos {
    u64::try_from(d.as_nanos()).map_or(NEVER, |d| now().saturating_add(d))
}

/// A std `Instant` on this clock; a past one is now.
pub(crate) fn at(t: Instant) -> Nanos {
    after(t.saturating_duration_since(Instant::now()))
}

impl Parker {
    /// As `park`, at most until `deadline`. True: a note came.
    pub(crate) fn park_until(&self, deadline: Nanos) -> bool {
        if deadline == NEVER {
            self.park();
            return true;
        }
        let left = deadline.saturating_sub(now());
        left != 0 && self.park_timeout(Duration::from_nanos(left))
    }
}
