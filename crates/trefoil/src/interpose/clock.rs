//! Clocks: simulated code reads the simulated time.
//!
//! Outside a simulation a call reads the same clock from the kernel's shared page (vDSO) as libc
//! does. libc's own function is not called: looking it up could allocate, and allocators read
//! clocks.
//!
//! Not simulated: clocks of CPU time, and the CPU's own counter (`rdtsc`).

use crate::sched::simulation::point;
use crate::sys::clock;
use crate::sys::fork::is_forked;
use crate::sys::raw::{syscall, to_libc};
use crate::sys::vdso;
use libc::{timespec, timeval};
use std::ffi::{c_int, c_void};

const NANOS_PER_SEC: u64 = 1_000_000_000;

/// Returns the simulated time of a clock, in nanoseconds. None if the caller or the clock is not
/// simulated.
#[inline(always)]
fn simulated(clock: c_int) -> Option<u64> {
    if clock::has_simulations() { simulated_slow(clock) } else { None }
}

#[cold]
fn simulated_slow(clock: c_int) -> Option<u64> {
    if is_forked() {
        return None;
    }
    clock::simulated_slow()?;
    point();
    match clock {
        libc::CLOCK_MONOTONIC
        | libc::CLOCK_MONOTONIC_RAW
        | libc::CLOCK_MONOTONIC_COARSE
        | libc::CLOCK_BOOTTIME => Some(clock::now()),
        libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_COARSE | libc::CLOCK_TAI => {
            Some(clock::wall_now())
        }
        _ => None,
    }
}

/// Returns whether every kernel has the clock in its shared page.
#[inline(always)]
fn is_shared(clock: c_int) -> bool {
    matches!(
        clock,
        libc::CLOCK_MONOTONIC
            | libc::CLOCK_REALTIME
            | libc::CLOCK_BOOTTIME
            | libc::CLOCK_MONOTONIC_RAW
            | libc::CLOCK_MONOTONIC_COARSE
            | libc::CLOCK_REALTIME_COARSE
    )
}

fn to_timespec(nanos: u64) -> timespec {
    timespec {
        tv_sec: (nanos / NANOS_PER_SEC) as libc::time_t,
        tv_nsec: (nanos % NANOS_PER_SEC) as libc::c_long,
    }
}

unsafe extern "C" fn clock_gettime(clock: c_int, time: *mut timespec) -> c_int {
    if let Some(nanos) = simulated(clock) {
        // SAFETY: the caller's timespec.
        unsafe { time.write(to_timespec(nanos)) };
        return 0;
    }
    if is_shared(clock) {
        // SAFETY: as above.
        unsafe { time.write(vdso::clock_gettime(clock)) };
        return 0;
    }
    // SAFETY: as above; the kernel checks the clock.
    let result = unsafe { syscall(libc::SYS_clock_gettime, [clock as usize, time as usize]) };
    to_libc(result) as c_int
}

unsafe extern "C" fn gettimeofday(time: *mut timeval, zone: *mut c_void) -> c_int {
    if !zone.is_null() {
        // SAFETY: the caller's arguments.
        let result = unsafe { syscall(libc::SYS_gettimeofday, [time as usize, zone as usize]) };
        return to_libc(result) as c_int;
    }
    if !time.is_null() {
        let mut now = timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: a local, and the caller's timeval.
        unsafe {
            clock_gettime(libc::CLOCK_REALTIME, &raw mut now);
            time.write(timeval { tv_sec: now.tv_sec, tv_usec: now.tv_nsec / 1000 });
        }
    }
    0
}

unsafe extern "C" fn time(at: *mut libc::time_t) -> libc::time_t {
    let mut now = timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a local, and the caller's number.
    unsafe {
        clock_gettime(libc::CLOCK_REALTIME_COARSE, &raw mut now);
        if !at.is_null() {
            at.write(now.tv_sec);
        }
    }
    now.tv_sec
}

weak_symbols!(clock_gettime gettimeofday time);

/// Returns the address of a weak symbol: if the linker keeps one, it keeps all.
pub(super) fn kept_symbol() -> *const () {
    unsafe extern "C" {
        #[link_name = "clock_gettime"]
        static KEPT: u8;
    }
    (&raw const KEPT).cast()
}
