//! Sleeping and yielding: `std::thread::sleep` and `yield_now` are the goroutine's.

use super::{Next, begin_wait};
use crate::sched::{Rt, switch};
use crate::sys::clock::{self, Nanos};
use crate::sys::raw;
use crate::time::sleep_until_nanos;
use std::ffi::{c_int, c_uint, c_void};
use std::mem::transmute;
use std::time::Duration;

static NANOSLEEP: Next = Next::new(c"nanosleep");
static CLOCK_NANOSLEEP: Next = Next::new(c"clock_nanosleep");
static USLEEP: Next = Next::new(c"usleep");
static SLEEP: Next = Next::new(c"sleep");
static YIELD: Next = Next::new(c"sched_yield");

type Nanosleep = unsafe extern "C" fn(*const libc::timespec, *mut libc::timespec) -> c_int;
type ClockNanosleep =
    unsafe extern "C" fn(c_int, c_int, *const libc::timespec, *mut libc::timespec) -> c_int;

/// None: the kernel refuses it.
pub(super) fn nanos(t: &libc::timespec) -> Option<Nanos> {
    if t.tv_sec < 0 || !(0..1_000_000_000).contains(&t.tv_nsec) {
        return None;
    }
    Some((t.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(t.tv_nsec as u64))
}

/// libc's function. On a goroutine no signal cuts it short.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn nanosleep(
    request: *const libc::timespec,
    left: *mut libc::timespec,
) -> c_int {
    // SAFETY: the caller's pointers.
    unsafe {
        if let Some(wanted) = request.as_ref().and_then(nanos)
            && let Some(_wait) = begin_wait()
        {
            sleep_until_nanos(clock::after_nanos(wanted));
            return 0;
        }
        transmute::<*mut c_void, Nanosleep>(NANOSLEEP.get())(request, left)
    }
}

/// libc's function. On a goroutine no signal cuts it short.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn clock_nanosleep(
    clock: c_int,
    flags: c_int,
    request: *const libc::timespec,
    left: *mut libc::timespec,
) -> c_int {
    // SAFETY: the caller's pointers.
    unsafe {
        let known =
            matches!(clock, libc::CLOCK_MONOTONIC | libc::CLOCK_REALTIME | libc::CLOCK_BOOTTIME);
        if known
            && let Some(wanted) = request.as_ref().and_then(nanos)
            && let Some(_wait) = begin_wait()
        {
            let wanted = if flags & libc::TIMER_ABSTIME != 0 {
                let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
                libc::clock_gettime(clock, &raw mut t);
                wanted.saturating_sub(nanos(&t).unwrap_or(0))
            } else {
                wanted
            };
            sleep_until_nanos(clock::after_nanos(wanted));
            return 0;
        }
        transmute::<*mut c_void, ClockNanosleep>(CLOCK_NANOSLEEP.get())(clock, flags, request, left)
    }
}

/// libc's function.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn usleep(micros: c_uint) -> c_int {
    if let Some(_wait) = begin_wait() {
        sleep_until_nanos(clock::after(Duration::from_micros(micros.into())));
        return 0;
    }
    // SAFETY: libc's function of that name and type.
    unsafe { transmute::<*mut c_void, unsafe extern "C" fn(c_uint) -> c_int>(USLEEP.get())(micros) }
}

/// libc's function. On a goroutine no signal cuts it short.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sleep(seconds: c_uint) -> c_uint {
    if let Some(_wait) = begin_wait() {
        sleep_until_nanos(clock::after(Duration::from_secs(seconds.into())));
        return 0;
    }
    // SAFETY: libc's function of that name and type.
    unsafe {
        transmute::<*mut c_void, unsafe extern "C" fn(c_uint) -> c_uint>(SLEEP.get())(seconds)
    }
}

/// libc's function: other goroutines run.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sched_yield() -> c_int {
    let wait = begin_wait();
    match if wait.is_some() { Rt::enter() } else { None } {
        Some(rt) => {
            // Nobody else here: whoever spins like this waits for another thread, which may want this CPU.
            let alone = rt.is_alone();
            switch::yield_now(rt).leave();
            if alone {
                // SAFETY: no arguments, touches no memory.
                unsafe { raw::syscall(libc::SYS_sched_yield, []) };
            }
            0
        }
        // SAFETY: libc's function of that name and type.
        None => unsafe { transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(YIELD.get())() },
    }
}
