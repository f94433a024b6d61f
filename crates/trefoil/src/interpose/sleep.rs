//! Sleeping and yielding: `std::thread::sleep` and `yield_now` act on the goroutine.

use super::park::begin_wait;
use crate::sched::calls::{self, Yielded};
use crate::sys::clock::{self, Nanos};
use crate::sys::raw;
use libc::timespec;
use std::ffi::{c_int, c_uint};
use std::time::Duration;

/// Returns a time in nanoseconds; None if the kernel rejects it as invalid.
pub(super) fn nanos(t: &timespec) -> Option<Nanos> {
    if t.tv_sec < 0 || !(0..1_000_000_000).contains(&t.tv_nsec) {
        return None;
    }
    Some((t.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(t.tv_nsec as u64))
}

interpose! {
    /// libc's function. On a goroutine no signal ends it early.
    fn nanosleep(request: *const timespec, left: *mut timespec) -> c_int;
    with real => {
        if let Some(wanted) = request.as_ref().and_then(nanos)
            && let Some(_wait) = begin_wait()
        {
            calls::sleep_until(clock::after_nanos(wanted));
            return 0;
        }
        real(request, left)
    }
}

interpose! {
    /// libc's function. On a goroutine no signal ends it early.
    fn clock_nanosleep(clock: c_int, flags: c_int, request: *const timespec,
        left: *mut timespec) -> c_int;
    with real => {
        let known =
            matches!(clock, libc::CLOCK_MONOTONIC | libc::CLOCK_REALTIME | libc::CLOCK_BOOTTIME);
        if known
            && let Some(wanted) = request.as_ref().and_then(nanos)
            && let Some(_wait) = begin_wait()
        {
            let wanted = if flags & libc::TIMER_ABSTIME != 0 {
                let mut t = timespec { tv_sec: 0, tv_nsec: 0 };
                libc::clock_gettime(clock, &raw mut t);
                wanted.saturating_sub(nanos(&t).unwrap_or(0))
            } else {
                wanted
            };
            calls::sleep_until(clock::after_nanos(wanted));
            return 0;
        }
        real(clock, flags, request, left)
    }
}

interpose! {
    /// libc's function.
    fn usleep(micros: c_uint) -> c_int;
    with real => {
        if let Some(_wait) = begin_wait() {
            calls::sleep_until(clock::after(Duration::from_micros(micros.into())));
            return 0;
        }
        real(micros)
    }
}

interpose! {
    /// libc's function. On a goroutine no signal ends it early.
    fn sleep(seconds: c_uint) -> c_uint;
    with real => {
        if let Some(_wait) = begin_wait() {
            calls::sleep_until(clock::after(Duration::from_secs(seconds.into())));
            return 0;
        }
        real(seconds)
    }
}

interpose! {
    /// libc's function: lets other goroutines run.
    fn sched_yield() -> c_int;
    with real => {
        let wait = begin_wait();
        match if wait.is_some() { calls::yield_and_report() } else { None } {
            Some(Yielded::ToGoroutines) => 0,
            // No goroutine waits here. A goroutine that spins like this waits for another thread,
            // which may want this CPU.
            Some(Yielded::ToNone) => {
                raw::syscall(libc::SYS_sched_yield, []);
                0
            }
            None => real(),
        }
    }
}
