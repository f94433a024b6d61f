//! Locks of C code on goroutines: mutexes, condition variables, semaphores, read-write locks and
//! barriers of libc park the goroutine, keep POSIX's meaning and errors, and work between
//! goroutines and threads.
#![cfg(feature = "std")]

#[path = "../common/mod.rs"]
mod common;

mod barrier;
mod c11;
mod cond;
mod end;
mod mutex;
mod rwlock;
mod semaphore;
mod signals;
mod torture;

use common::{TOO_LONG, runtime};
use libc::{clockid_t, pthread_mutex_t, pthread_rwlock_t, sem_t, timespec};
use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use trefoil::JoinHandle;

unsafe extern "C" {
    fn pthread_mutex_clocklock(
        m: *mut pthread_mutex_t,
        clock: clockid_t,
        at: *const timespec,
    ) -> c_int;
    fn pthread_cond_clockwait(
        c: *mut libc::pthread_cond_t,
        m: *mut pthread_mutex_t,
        clock: clockid_t,
        at: *const timespec,
    ) -> c_int;
    fn pthread_rwlock_clockrdlock(
        l: *mut pthread_rwlock_t,
        clock: clockid_t,
        at: *const timespec,
    ) -> c_int;
    fn pthread_rwlock_clockwrlock(
        l: *mut pthread_rwlock_t,
        clock: clockid_t,
        at: *const timespec,
    ) -> c_int;
    fn pthread_rwlock_timedrdlock(l: *mut pthread_rwlock_t, at: *const timespec) -> c_int;
    fn pthread_rwlock_timedwrlock(l: *mut pthread_rwlock_t, at: *const timespec) -> c_int;
    fn sem_clockwait(s: *mut sem_t, clock: clockid_t, at: *const timespec) -> c_int;
}

/// Returns the size of a test in this build.
const fn size(release: usize, debug: usize) -> usize {
    if cfg!(debug_assertions) { debug } else { release }
}

/// Runs `f` as the main goroutine of runtimes with 1, 2 and 8 Ps.
fn everywhere(f: impl Fn() + Send + Sync + Copy + 'static) {
    let _watchdog = common::watchdog();
    for n in [1, 2, 8] {
        runtime(n).run(f);
    }
}

/// Runs `f` for every pair of goroutine and thread, on 1, 2 and 8 Ps.
fn every_pair(f: impl Fn(Actor, Actor) + Send + Sync + Copy + 'static) {
    use Actor::{Goroutine, Thread};
    everywhere(move || {
        for (a, b) in
            [(Goroutine, Goroutine), (Goroutine, Thread), (Thread, Goroutine), (Thread, Thread)]
        {
            f(a, b);
        }
    });
}

/// Runs `f` for two goroutines in a simulation, where times are exact, and then as [`every_pair`].
fn simulated_and_every_pair(f: impl Fn(Actor, Actor) + Send + Sync + Copy + 'static) {
    trefoil::sim::run(move || f(Actor::Goroutine, Actor::Goroutine));
    every_pair(f);
}

/// What runs a part of a test.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Actor {
    Goroutine,
    Thread,
}

enum Started<T> {
    Goroutine(JoinHandle<T>),
    Thread(thread::JoinHandle<T>),
}

impl Actor {
    fn start<T: Send + 'static>(self, f: impl FnOnce() -> T + Send + 'static) -> Started<T> {
        match self {
            Actor::Goroutine => Started::Goroutine(trefoil::go(f)),
            Actor::Thread => Started::Thread(thread::spawn(f)),
        }
    }

    /// Returns goroutines and threads by turns.
    fn nth(n: usize) -> Actor {
        if n.is_multiple_of(2) { Actor::Goroutine } else { Actor::Thread }
    }
}

impl<T> Started<T> {
    #[track_caller]
    fn join(self) -> T {
        match self {
            Started::Goroutine(h) => h.join().unwrap(),
            Started::Thread(h) => trefoil::blocking(|| h.join()).unwrap(),
        }
    }
}

/// An object of C that goroutines and threads share. It is never freed.
struct Object<T: 'static>(&'static UnsafeCell<T>);

// SAFETY: the C functions synchronise their accesses.
unsafe impl<T> Send for Object<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Object<T> {}
impl<T> Clone for Object<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Object<T> {}

impl<T> Object<T> {
    /// Returns an object of zeros, which a function of C has to initialise.
    fn zeroed() -> Object<T> {
        // SAFETY: zeros are valid for C's objects.
        Object::new(unsafe { MaybeUninit::zeroed().assume_init() })
    }

    fn new(value: T) -> Object<T> {
        Object(Box::leak(Box::new(UnsafeCell::new(value))))
    }

    fn at(self) -> *mut T {
        self.0.get()
    }
}

/// Returns the time `in_ms` from now, on `clock`.
fn at(clock: clockid_t, in_ms: i64) -> timespec {
    let mut t = timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one timespec.
    unsafe { libc::clock_gettime(clock, &raw mut t) };
    let nanos = t.tv_nsec + in_ms * 1_000_000;
    timespec {
        tv_sec: t.tv_sec + nanos.div_euclid(1_000_000_000),
        tv_nsec: nanos.rem_euclid(1_000_000_000),
    }
}

const BAD_TIME: timespec = timespec { tv_sec: 1, tv_nsec: 1_000_000_000 };
const CLOCKS: [clockid_t; 2] = [libc::CLOCK_REALTIME, libc::CLOCK_MONOTONIC];

/// Runs `f` with the time `in_ms` from now, on `clock`. `f` must return at that time: exactly in a
/// simulation, elsewhere not before.
#[track_caller]
fn takes<T>(clock: clockid_t, in_ms: u32, f: impl FnOnce(&timespec) -> T) -> T {
    let (start, ms) = (Instant::now(), Duration::from_millis(in_ms.into()));
    let value = f(&at(clock, in_ms.into()));
    let took = start.elapsed();
    if trefoil::sim::is_simulated() {
        assert_eq!(took, ms);
    } else {
        assert!(took + Duration::from_millis(1) >= ms, "took only {took:?}");
        assert!(took < TOO_LONG, "took {took:?}");
    }
    value
}

fn errno() -> c_int {
    // SAFETY: errno of the running goroutine or thread.
    unsafe { *libc::__errno_location() }
}

/// Yields until `n` is at least `wanted`.
#[track_caller]
fn wait_for(what: &str, n: &AtomicUsize, wanted: usize) {
    common::yield_until(what, || n.load(Ordering::SeqCst) >= wanted);
}

fn threads() -> usize {
    common::tasks().len()
}
