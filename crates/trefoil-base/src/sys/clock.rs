//! The runtime's clock: nanoseconds of `CLOCK_MONOTONIC`, the clock of `std::time::Instant`.
//!
//! Code that runs in a simulated runtime (`sched/simulation/`) reads the simulated time instead.

use super::parker::Parker;
use super::vdso::clock_gettime;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A point in time, in nanoseconds. [`NEVER`] is later than any other.
pub type Nanos = u64;

/// The point in time that is never reached.
pub const NEVER: Nanos = u64::MAX;

/// The last point in time before [`NEVER`], some hundred years ahead. A longer timeout ends here: a
/// goroutine that waits with a timeout is not part of a deadlock, however long the timeout is.
pub const LATEST: Nanos = NEVER - 1;

/// The time at which every simulated run begins.
pub const SIMULATION_START: Nanos = 1_000_000_000;
/// The wall-clock time at which every simulated run begins, in nanoseconds since 1970: midnight UTC
/// of 2000-01-01, as in Go's `testing/synctest`.
#[cfg(feature = "std")]
const SIMULATION_WALL_START: u64 = 946_684_800_000_000_000;

/// How many simulated runtimes exist.
static SIMULATIONS: OwnLine = OwnLine(AtomicUsize::new(0));

/// Fast paths read it: no other static that changes is on its cache line, or on the one beside it.
#[repr(align(128))]
struct OwnLine(AtomicUsize);
/// Returns the simulated time, if the caller is simulated.
static VIRTUAL_NOW: OnceLock<fn() -> Option<Nanos>> = OnceLock::new();

/// Counts a simulated runtime. `virtual_now` is always the same function.
pub fn add_simulation(virtual_now: fn() -> Option<Nanos>) {
    VIRTUAL_NOW.get_or_init(|| virtual_now);
    // Relaxed: threads that are simulated start later, and others need not see it.
    SIMULATIONS.0.fetch_add(1, Ordering::Relaxed);
}

/// Uncounts a simulated runtime.
pub fn remove_simulation() {
    SIMULATIONS.0.fetch_sub(1, Ordering::Relaxed);
}

/// Returns whether there may be a simulated runtime. One load, for fast paths.
#[inline(always)]
pub fn has_simulations() -> bool {
    SIMULATIONS.0.load(Ordering::Relaxed) != 0
}

/// Returns the current time. Takes 27 ns, so fast paths avoid it.
#[inline]
pub fn now() -> Nanos {
    if has_simulations()
        && let Some(now) = simulated_slow()
    {
        return now;
    }
    real_now()
}

/// Returns the wall-clock time in nanoseconds since 1970: 0 before that, and `u64::MAX` after the
/// year 2554. A simulation gets there if only a timeout without a practical end is left.
#[cfg(feature = "std")]
#[inline]
pub fn wall_now() -> u64 {
    if has_simulations()
        && let Some(now) = simulated_slow()
    {
        return simulated_wall(now);
    }
    let t = clock_gettime(libc::CLOCK_REALTIME);
    let seconds = u64::try_from(t.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(t.tv_nsec as u64)
}

/// Returns what the simulated wall clock shows at the simulated time `now`.
#[cfg(feature = "std")]
fn simulated_wall(now: Nanos) -> u64 {
    SIMULATION_WALL_START.saturating_add(now - SIMULATION_START)
}

/// Returns the point in time that is `nanos` on the wall clock, as that is set now; at most
/// [`LATEST`].
#[cfg(feature = "std")]
#[inline]
pub fn from_wall(nanos: u64) -> Nanos {
    // The wall clock is read first: a thread that is stopped between the two waits too long, but
    // never too short.
    let left = nanos.saturating_sub(wall_now());
    after_nanos(left)
}

/// Returns the simulated time; None if the caller is not simulated.
#[cold]
pub fn simulated_slow() -> Option<Nanos> {
    VIRTUAL_NOW.get().and_then(|virtual_now| virtual_now())
}

/// Returns a deadline for a wait: in a simulation at least a nanosecond from now.
///
/// Code that waits again until the time is *later* than its deadline would never end if such a wait
/// took no time: the simulated clock stands exactly at the deadline.
#[cfg(feature = "std")]
#[inline]
pub fn deadline_after_now(deadline: Nanos) -> Nanos {
    let now = if has_simulations() { simulated_slow() } else { None };
    now.map_or(deadline, |now| deadline.max(now + 1))
}

/// Returns the current time, also in a simulation.
#[inline]
pub fn real_now() -> Nanos {
    let t = clock_gettime(libc::CLOCK_MONOTONIC);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// How often [`now_on_both`] reads both clocks; it keeps the closest pair.
const READINGS: u32 = 16;

/// Returns the current time on std's clock and on this one. The second is at or after the first,
/// usually by the time that one reading takes. So what is converted from nanoseconds to an
/// `Instant` by this pair is never in the future.
///
/// A thread may lose its CPU between the two readings, but rarely in each of `READINGS` pairs.
pub fn now_on_both() -> (Instant, Nanos) {
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
#[inline]
pub fn after(d: Duration) -> Nanos {
    after_nanos(u64::try_from(d.as_nanos()).unwrap_or(LATEST))
}

/// Returns the time after `nanos` from now; at most [`LATEST`].
#[inline]
pub fn after_nanos(nanos: u64) -> Nanos {
    now().saturating_add(nanos).min(LATEST)
}

/// Converts a std `Instant` to this clock; a past one becomes the current time.
#[inline]
pub fn at(t: Instant) -> Nanos {
    after(t.saturating_duration_since(Instant::now()))
}

impl Parker {
    /// Sleeps as `park` does, at most until `deadline`. Returns whether it consumed a token.
    pub fn park_until(&self, deadline: Nanos) -> bool {
        if deadline == NEVER {
            self.park();
            return true;
        }
        let left = deadline.saturating_sub(now());
        left != 0 && self.park_timeout(Duration::from_nanos(left))
    }
}
