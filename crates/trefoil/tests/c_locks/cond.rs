//! Condition variables.

use super::mutex::{Mutex, lock, normal, unlock};
use super::*;
use crate::common::{child_test, join_all};
use libc::{
    EINVAL, EPERM, ETIMEDOUT, pthread_cond_broadcast, pthread_cond_destroy, pthread_cond_signal,
    pthread_cond_t, pthread_cond_timedwait, pthread_cond_wait,
};
use std::sync::Arc;

pub(crate) type Cond = Object<pthread_cond_t>;

pub(crate) fn cond() -> Cond {
    Object::new(libc::PTHREAD_COND_INITIALIZER)
}

/// Returns a condition variable with the attributes that `set` chooses.
fn with_attributes(set: impl FnOnce(*mut libc::pthread_condattr_t)) -> Cond {
    let (cond, attr) = (Cond::zeroed(), Object::<libc::pthread_condattr_t>::zeroed());
    // SAFETY: `set` gets an initialised attribute object.
    unsafe {
        assert_eq!(libc::pthread_condattr_init(attr.at()), 0);
        set(attr.at());
        assert_eq!(libc::pthread_cond_init(cond.at(), attr.at()), 0);
    }
    cond
}

pub(crate) fn wait(cond: Cond, mutex: Mutex) {
    // SAFETY: never freed; the same below.
    unsafe { assert_eq!(pthread_cond_wait(cond.at(), mutex.at()), 0) }
}

pub(crate) fn signal(cond: Cond) {
    // SAFETY: as above.
    unsafe { assert_eq!(pthread_cond_signal(cond.at()), 0) }
}

pub(crate) fn broadcast(cond: Cond) {
    // SAFETY: as above.
    unsafe { assert_eq!(pthread_cond_broadcast(cond.at()), 0) }
}

/// Lets two sides take turns.
fn take_turns(mutex: Mutex, cond: Cond, a: Actor, b: Actor) {
    let rounds = size(1_000, 200);
    let turn = Object::new(0usize);
    let side = move |me: usize| {
        move || {
            for _ in 0..rounds {
                lock(mutex);
                // SAFETY: under the mutex.
                unsafe {
                    while *turn.at() % 2 != me {
                        wait(cond, mutex);
                    }
                    *turn.at() += 1;
                }
                signal(cond);
                unlock(mutex);
            }
        }
    };
    let (a, b) = (a.start(side(0)), b.start(side(1)));
    a.join();
    b.join();
}

#[test]
fn a_signal_wakes_the_other_side() {
    every_pair(|a, b| take_turns(normal(), cond(), a, b));
}

#[test]
fn process_shared_condition_variable_works() {
    everywhere(|| {
        // SAFETY: an initialised attribute object.
        let cond = with_attributes(|attr| unsafe {
            libc::pthread_condattr_setpshared(attr, libc::PTHREAD_PROCESS_SHARED);
        });
        take_turns(normal(), cond, Actor::Thread, Actor::Thread);
        take_turns(normal(), cond, Actor::Goroutine, Actor::Thread);
    });
}

#[test]
fn the_wait_of_a_thread_releases_the_mutex_to_a_goroutine() {
    everywhere(|| {
        let (mutex, cond) = (normal(), cond());
        for _ in 0..size(200, 50) {
            let (go_on, locked) = (Object::new(false), Arc::new(AtomicUsize::new(0)));
            let l = locked.clone();
            let waiting = Actor::Thread.start(move || {
                lock(mutex);
                l.store(1, Ordering::SeqCst);
                // Usually until the goroutine below waits for the mutex.
                common::spin(Duration::from_micros(100));
                // SAFETY: under the mutex.
                while unsafe { !*go_on.at() } {
                    wait(cond, mutex);
                }
                unlock(mutex);
            });
            wait_for("the thread to lock", &locked, 1);
            trefoil::go(move || {
                lock(mutex);
                // SAFETY: under the mutex.
                unsafe { *go_on.at() = true };
                unlock(mutex);
                signal(cond);
            })
            .join()
            .unwrap();
            waiting.join();
        }
    });
}

#[test]
fn a_broadcast_wakes_all_and_the_variable_may_be_destroyed_at_once() {
    everywhere(|| {
        for _ in 0..size(50, 10) {
            let (mutex, cond) = (normal(), cond());
            let (ready, go_on) = (Arc::new(AtomicUsize::new(0)), Object::new(false));
            let one = |i| {
                let ready = ready.clone();
                Actor::nth(i).start(move || {
                    lock(mutex);
                    ready.fetch_add(1, Ordering::SeqCst);
                    // SAFETY: under the mutex.
                    while unsafe { !*go_on.at() } {
                        wait(cond, mutex);
                    }
                    unlock(mutex);
                })
            };
            let waiting: Vec<_> = (0..10).map(one).collect();
            wait_for("all waiters", &ready, 10);
            lock(mutex);
            // SAFETY: under the mutex, then never used again.
            unsafe {
                *go_on.at() = true;
                broadcast(cond);
                unlock(mutex);
                assert_eq!(pthread_cond_destroy(cond.at()), 0);
                cond.at().cast::<u8>().write_bytes(0xff, size_of::<pthread_cond_t>());
            }
            waiting.into_iter().for_each(Started::join);
        }
    });
}

#[test]
fn timed_waits_time_out_with_the_mutex_locked() {
    fn check(actor: Actor) {
        let monotonic = || {
            // SAFETY: an initialised attribute object.
            with_attributes(|attr| unsafe {
                assert_eq!(libc::pthread_condattr_setclock(attr, libc::CLOCK_MONOTONIC), 0);
            })
        };
        for (cond, own_clock) in
            [(cond(), libc::CLOCK_REALTIME), (monotonic(), libc::CLOCK_MONOTONIC)]
        {
            let mutex = Object::new(libc::PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP);
            // SAFETY: never freed.
            let waits = move || unsafe {
                lock(mutex);
                let (c, m) = (cond.at(), mutex.at());
                assert_eq!(
                    takes(own_clock, 20, |soon| pthread_cond_timedwait(c, m, soon)),
                    ETIMEDOUT
                );
                let past = at(own_clock, -1000);
                assert_eq!(pthread_cond_timedwait(c, m, &past), ETIMEDOUT);
                let before = timespec { tv_sec: -1, tv_nsec: 0 };
                assert_eq!(pthread_cond_timedwait(c, m, &before), ETIMEDOUT);
                for clock in CLOCKS {
                    let rc = takes(clock, 10, |soon| pthread_cond_clockwait(c, m, clock, soon));
                    assert_eq!(rc, ETIMEDOUT);
                }
                assert_eq!(pthread_cond_timedwait(c, m, &BAD_TIME), EINVAL);
                let clock = libc::CLOCK_PROCESS_CPUTIME_ID;
                assert_eq!(pthread_cond_clockwait(c, m, clock, &past), EINVAL);
                // Fails unless the waiter owns the mutex.
                unlock(mutex);
            };
            actor.start(waits).join();
        }
    }
    trefoil::sim::run(|| check(Actor::Goroutine));
    everywhere(|| [Actor::Goroutine, Actor::Thread].into_iter().for_each(check));
}

#[test]
fn a_wait_without_the_mutex_is_an_error() {
    every_pair(|a, _| {
        let (mutex, cond) = (Object::new(libc::PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP), cond());
        // SAFETY: never freed.
        a.start(move || unsafe {
            assert_eq!(pthread_cond_wait(cond.at(), mutex.at()), EPERM);
        })
        .join();
    });
}

#[test]
fn no_signal_is_lost_at_the_deadline_of_a_wait() {
    everywhere(|| {
        // One token per signal. A waiter whose wait timed out may find a token, too.
        let (mutex, cond, tokens) = (normal(), cond(), Object::new(0i64));
        let rounds = size(300, 60);
        let one = |i| {
            Actor::nth(i).start(move || {
                for _ in 0..rounds {
                    lock(mutex);
                    // SAFETY: under the mutex; never freed.
                    unsafe {
                        while *tokens.at() == 0 {
                            let soon = at(libc::CLOCK_REALTIME, 1);
                            let rc = pthread_cond_timedwait(cond.at(), mutex.at(), &soon);
                            assert!(rc == 0 || rc == ETIMEDOUT, "{rc}");
                        }
                        *tokens.at() -= 1;
                    }
                    unlock(mutex);
                }
            })
        };
        let waiting: Vec<_> = (0..4).map(one).collect();
        let give = Actor::Goroutine.start(move || {
            for i in 0..4 * rounds {
                if i % 8 == 0 {
                    thread::sleep(Duration::from_micros(900));
                }
                lock(mutex);
                // SAFETY: under the mutex.
                unsafe { *tokens.at() += 1 };
                unlock(mutex);
                signal(cond);
            }
        });
        give.join();
        waiting.into_iter().for_each(Started::join);
    });
}

#[test]
fn a_broadcast_at_a_deadline_wakes_no_waiter_that_has_returned() {
    everywhere(|| {
        let (mutex, cond, stop) = (normal(), cond(), common::flag());
        let one = |i: usize| {
            let stop = stop.clone();
            Actor::nth(i / 3).start(move || {
                while !stop.load(Ordering::SeqCst) {
                    lock(mutex);
                    // SAFETY: never freed.
                    unsafe {
                        let mut soon = at(libc::CLOCK_MONOTONIC, 0);
                        soon.tv_nsec = (soon.tv_nsec + 60_000).min(999_999_999);
                        let clock = libc::CLOCK_MONOTONIC;
                        let rc = pthread_cond_clockwait(cond.at(), mutex.at(), clock, &soon);
                        assert!(rc == 0 || rc == ETIMEDOUT, "{rc}");
                    }
                    unlock(mutex);
                }
            })
        };
        let waiting: Vec<_> = (0..12).map(one).collect();
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(size(150, 100) as u64) {
            broadcast(cond);
            thread::sleep(Duration::from_micros(20));
        }
        stop.store(true, Ordering::SeqCst);
        waiting.into_iter().for_each(Started::join);
    });
}

#[test]
fn goroutines_that_wait_for_a_condition_need_no_threads() {
    child_test!();
    runtime(2).run(|| {
        let (mutex, cond) = (normal(), cond());
        let (ready, go_on) = (Arc::new(AtomicUsize::new(0)), Object::new(false));
        let one = |_| {
            let ready = ready.clone();
            trefoil::go(move || {
                lock(mutex);
                ready.fetch_add(1, Ordering::SeqCst);
                // SAFETY: under the mutex.
                while unsafe { !*go_on.at() } {
                    wait(cond, mutex);
                }
                unlock(mutex);
            })
        };
        let waiting: Vec<_> = (0..500).map(one).collect();
        wait_for("all waiters", &ready, 500);
        thread::sleep(Duration::from_millis(50));
        let n = threads();
        lock(mutex);
        // SAFETY: under the mutex.
        unsafe { *go_on.at() = true };
        unlock(mutex);
        broadcast(cond);
        join_all(waiting);
        assert!(n < 20, "{n} threads");
    });
}
