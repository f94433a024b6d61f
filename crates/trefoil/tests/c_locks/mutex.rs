//! Mutexes of every kind.

use super::*;
use crate::common::{child_test, join_all};
use libc::{
    EBUSY, EDEADLK, EINVAL, EPERM, ETIMEDOUT, pthread_mutex_lock, pthread_mutex_timedlock,
    pthread_mutex_trylock, pthread_mutex_unlock,
};
use std::sync::Arc;

pub(crate) type Mutex = Object<pthread_mutex_t>;

pub(crate) fn normal() -> Mutex {
    Object::new(libc::PTHREAD_MUTEX_INITIALIZER)
}

/// Returns a mutex with the attributes that `set` chooses.
fn with_attributes(set: impl FnOnce(*mut libc::pthread_mutexattr_t)) -> Mutex {
    let mutex = Mutex::zeroed();
    let attr = Object::<libc::pthread_mutexattr_t>::zeroed();
    // SAFETY: `set` gets an initialised attribute object.
    unsafe {
        assert_eq!(libc::pthread_mutexattr_init(attr.at()), 0);
        set(attr.at());
        assert_eq!(libc::pthread_mutex_init(mutex.at(), attr.at()), 0);
    }
    mutex
}

fn of_kind(kind: c_int) -> Mutex {
    // SAFETY: an initialised attribute object.
    with_attributes(|attr| unsafe { assert_eq!(libc::pthread_mutexattr_settype(attr, kind), 0) })
}

pub(crate) fn lock(mutex: Mutex) {
    // SAFETY: never freed; the same below.
    unsafe { assert_eq!(pthread_mutex_lock(mutex.at()), 0) }
}

pub(crate) fn unlock(mutex: Mutex) {
    // SAFETY: as above.
    unsafe { assert_eq!(pthread_mutex_unlock(mutex.at()), 0) }
}

/// Counts under the mutex, on ten actors.
fn count_under(mutex: Mutex, a: Actor, b: Actor) {
    const EACH: usize = 5;
    let rounds = size(2_000, 300);
    let count = Object::new(0usize);
    let add = move || {
        for i in 0..rounds {
            lock(mutex);
            // SAFETY: under the mutex.
            unsafe {
                let seen = *count.at();
                if i % 64 == 0 {
                    thread::yield_now();
                }
                *count.at() = seen + 1;
            }
            unlock(mutex);
        }
    };
    let parts: Vec<_> = (0..EACH).flat_map(|_| [a.start(add), b.start(add)]).collect();
    parts.into_iter().for_each(Started::join);
    // SAFETY: all actors have ended.
    assert_eq!(unsafe { *count.at() }, 2 * EACH * rounds);
}

#[test]
fn normal_mutex_excludes() {
    every_pair(|a, b| count_under(normal(), a, b));
}

#[test]
fn recursive_mutex_excludes() {
    every_pair(|a, b| count_under(of_kind(libc::PTHREAD_MUTEX_RECURSIVE), a, b));
}

#[test]
fn errorcheck_mutex_excludes() {
    every_pair(|a, b| count_under(of_kind(libc::PTHREAD_MUTEX_ERRORCHECK), a, b));
}

#[test]
fn adaptive_mutex_excludes() {
    every_pair(|a, b| count_under(Object::new(libc::PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP), a, b));
}

#[test]
fn process_shared_mutex_excludes() {
    let shared = || {
        // SAFETY: an initialised attribute object.
        with_attributes(|attr| unsafe {
            libc::pthread_mutexattr_setpshared(attr, libc::PTHREAD_PROCESS_SHARED);
        })
    };
    everywhere(move || count_under(shared(), Actor::Goroutine, Actor::Thread));
}

#[test]
fn robust_mutex_excludes() {
    let robust = || {
        // SAFETY: an initialised attribute object.
        with_attributes(|attr| unsafe {
            libc::pthread_mutexattr_setrobust(attr, libc::PTHREAD_MUTEX_ROBUST);
        })
    };
    everywhere(move || count_under(robust(), Actor::Goroutine, Actor::Thread));
}

#[test]
fn recursive_mutex_counts_by_goroutine() {
    every_pair(|a, b| {
        let mutex = of_kind(libc::PTHREAD_MUTEX_RECURSIVE);
        let (locked, release) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (l, r) = (locked.clone(), release.clone());
        let owner = a.start(move || {
            lock(mutex);
            lock(mutex);
            // SAFETY: never freed.
            unsafe { assert_eq!(pthread_mutex_trylock(mutex.at()), 0) };
            l.store(1, Ordering::SeqCst);
            wait_for("the other actor to fail", &r, 1);
            unlock(mutex);
            unlock(mutex);
            unlock(mutex);
            // SAFETY: as above.
            unsafe { assert_eq!(pthread_mutex_unlock(mutex.at()), EPERM) };
        });
        wait_for("the owner to lock", &locked, 1);
        let other = b.start(move || {
            // SAFETY: as above.
            unsafe {
                assert_eq!(pthread_mutex_trylock(mutex.at()), EBUSY);
                assert_eq!(pthread_mutex_unlock(mutex.at()), EPERM);
            }
            release.store(1, Ordering::SeqCst);
            lock(mutex);
            unlock(mutex);
        });
        owner.join();
        other.join();
    });
}

#[test]
fn errorcheck_mutex_reports_misuse() {
    every_pair(|a, b| {
        let mutex = of_kind(libc::PTHREAD_MUTEX_ERRORCHECK);
        // SAFETY: never freed.
        let misuse = move || unsafe {
            assert_eq!(pthread_mutex_unlock(mutex.at()), EPERM);
            lock(mutex);
            assert_eq!(pthread_mutex_lock(mutex.at()), EDEADLK);
            let soon = at(libc::CLOCK_REALTIME, 5);
            assert_eq!(pthread_mutex_timedlock(mutex.at(), &soon), EDEADLK);
            assert_eq!(pthread_mutex_trylock(mutex.at()), EBUSY);
            b.start(move || assert_eq!(pthread_mutex_unlock(mutex.at()), EPERM)).join();
            unlock(mutex);
        };
        a.start(misuse).join();
    });
}

#[test]
fn timed_mutex_locks_time_out_and_succeed() {
    simulated_and_every_pair(|a, b| {
        let mutex = normal();
        lock(mutex);
        // SAFETY: never freed.
        let times_out = move || unsafe {
            assert_eq!(
                takes(libc::CLOCK_REALTIME, 20, |soon| pthread_mutex_timedlock(mutex.at(), soon)),
                ETIMEDOUT
            );
            for clock in CLOCKS {
                let rc = takes(clock, 10, |soon| pthread_mutex_clocklock(mutex.at(), clock, soon));
                assert_eq!(rc, ETIMEDOUT);
                let past = at(clock, -1000);
                assert_eq!(pthread_mutex_clocklock(mutex.at(), clock, &past), ETIMEDOUT);
            }
            let before = timespec { tv_sec: -1, tv_nsec: 0 };
            assert_eq!(pthread_mutex_timedlock(mutex.at(), &before), ETIMEDOUT);
            assert_eq!(pthread_mutex_timedlock(mutex.at(), &BAD_TIME), EINVAL);
            let clock = libc::CLOCK_PROCESS_CPUTIME_ID;
            assert_eq!(pthread_mutex_clocklock(mutex.at(), clock, &BAD_TIME), EINVAL);
        };
        a.start(times_out).join();
        // SAFETY: as above.
        let succeeds = b.start(move || unsafe {
            let late = at(libc::CLOCK_MONOTONIC, 60_000);
            let clock = libc::CLOCK_MONOTONIC;
            assert_eq!(pthread_mutex_clocklock(mutex.at(), clock, &late), 0);
            unlock(mutex);
        });
        thread::sleep(Duration::from_millis(2));
        unlock(mutex);
        succeeds.join();
    });
}

#[test]
fn goroutines_that_wait_for_a_mutex_need_no_threads() {
    child_test!();
    runtime(2).run(|| {
        let mutex = normal();
        let arrived = Arc::new(AtomicUsize::new(0));
        lock(mutex);
        let one = |_| {
            let arrived = arrived.clone();
            trefoil::go(move || {
                arrived.fetch_add(1, Ordering::SeqCst);
                lock(mutex);
                unlock(mutex);
            })
        };
        let waiting: Vec<_> = (0..500).map(one).collect();
        wait_for("all goroutines to begin", &arrived, 500);
        thread::sleep(Duration::from_millis(50));
        let n = threads();
        unlock(mutex);
        join_all(waiting);
        assert!(n < 20, "{n} threads");
    });
}

#[test]
fn a_goroutine_that_relocks_at_once_does_not_starve_a_waiter() {
    everywhere(|| {
        let mutex = normal();
        let done = common::flag();
        let stop = done.clone();
        let greedy = trefoil::go(move || {
            let mut n = 0u64;
            while !stop.load(Ordering::SeqCst) {
                lock(mutex);
                common::spin(Duration::from_micros(50));
                unlock(mutex);
                n += 1;
            }
            n
        });
        for _ in 0..20 {
            lock(mutex);
            unlock(mutex);
        }
        done.store(true, Ordering::SeqCst);
        greedy.join().unwrap();
    });
}
