//! Read-write locks.

use super::*;
use crate::common::{child_test, join_all, yield_until};
use libc::{
    EBUSY, EDEADLK, EINVAL, ETIMEDOUT, pthread_rwlock_rdlock, pthread_rwlock_tryrdlock,
    pthread_rwlock_trywrlock, pthread_rwlock_unlock, pthread_rwlock_wrlock,
};
use std::sync::Arc;

type RwLock = Object<pthread_rwlock_t>;

const PREFER_READER: c_int = 0;
const PREFER_WRITER: c_int = 1;
const PREFER_WRITER_NONRECURSIVE: c_int = 2;

unsafe extern "C" {
    fn pthread_rwlockattr_setkind_np(attr: *mut libc::pthread_rwlockattr_t, kind: c_int) -> c_int;
}

fn rwlock(kind: c_int, shared: c_int) -> RwLock {
    let (lock, attr) = (RwLock::zeroed(), Object::<libc::pthread_rwlockattr_t>::zeroed());
    // SAFETY: never freed; the same below.
    unsafe {
        assert_eq!(libc::pthread_rwlockattr_init(attr.at()), 0);
        assert_eq!(pthread_rwlockattr_setkind_np(attr.at(), kind), 0);
        assert_eq!(libc::pthread_rwlockattr_setpshared(attr.at(), shared), 0);
        assert_eq!(libc::pthread_rwlock_init(lock.at(), attr.at()), 0);
    }
    lock
}

fn of_kind(kind: c_int) -> RwLock {
    rwlock(kind, libc::PTHREAD_PROCESS_PRIVATE)
}

fn read(lock: RwLock) {
    // SAFETY: as above.
    unsafe { assert_eq!(pthread_rwlock_rdlock(lock.at()), 0) }
}

fn write(lock: RwLock) {
    // SAFETY: as above.
    unsafe { assert_eq!(pthread_rwlock_wrlock(lock.at()), 0) }
}

fn unlock(lock: RwLock) {
    // SAFETY: as above.
    unsafe { assert_eq!(pthread_rwlock_unlock(lock.at()), 0) }
}

/// Writers make two numbers different and equal again; readers must find them equal.
fn readers_and_writers(lock: RwLock, actor: impl Fn(usize) -> Actor) {
    let rounds = size(1_000, 150);
    let pair = Object::new([0usize; 2]);
    let one = |i| {
        actor(i).start(move || {
            for round in 0..rounds {
                // SAFETY: under the lock.
                unsafe {
                    if (round + i) % 4 == 0 {
                        write(lock);
                        (*pair.at())[0] += 1;
                        if round % 32 == 0 {
                            thread::yield_now();
                        }
                        (*pair.at())[1] += 1;
                    } else {
                        read(lock);
                        let [a, b] = *pair.at();
                        assert_eq!(a, b);
                        if round % 64 == 1 {
                            thread::yield_now();
                        }
                    }
                }
                unlock(lock);
            }
        })
    };
    let parts: Vec<_> = (0..8).map(one).collect();
    parts.into_iter().for_each(Started::join);
    // SAFETY: all actors have ended.
    assert_eq!(unsafe { *pair.at() }, [8 * rounds / 4; 2]);
}

#[test]
fn writers_exclude_readers_and_other_writers() {
    everywhere(|| {
        for kind in [PREFER_READER, PREFER_WRITER, PREFER_WRITER_NONRECURSIVE] {
            readers_and_writers(of_kind(kind), |_| Actor::Goroutine);
            readers_and_writers(of_kind(kind), Actor::nth);
        }
        readers_and_writers(of_kind(PREFER_WRITER_NONRECURSIVE), |_| Actor::Thread);
    });
}

#[test]
fn process_shared_rwlock_works() {
    everywhere(|| {
        readers_and_writers(rwlock(PREFER_READER, libc::PTHREAD_PROCESS_SHARED), Actor::nth);
    });
}

#[test]
fn readers_share_the_lock_and_errors_are_reported() {
    simulated_and_every_pair(|a, b| {
        let lock = of_kind(PREFER_READER);
        // SAFETY: never freed.
        let part = move || unsafe {
            read(lock);
            b.start(move || {
                read(lock);
                assert_eq!(pthread_rwlock_tryrdlock(lock.at()), 0);
                assert_eq!(pthread_rwlock_trywrlock(lock.at()), EBUSY);
                unlock(lock);
                unlock(lock);
            })
            .join();
            unlock(lock);
            write(lock);
            assert_eq!(pthread_rwlock_rdlock(lock.at()), EDEADLK);
            assert_eq!(pthread_rwlock_wrlock(lock.at()), EDEADLK);
            assert_eq!(pthread_rwlock_tryrdlock(lock.at()), EBUSY);
            b.start(move || {
                assert_eq!(pthread_rwlock_tryrdlock(lock.at()), EBUSY);
                let clock = libc::CLOCK_REALTIME;
                let rc = takes(clock, 10, |soon| pthread_rwlock_timedrdlock(lock.at(), soon));
                assert_eq!(rc, ETIMEDOUT);
                let rc = takes(clock, 10, |soon| pthread_rwlock_timedwrlock(lock.at(), soon));
                assert_eq!(rc, ETIMEDOUT);
                for clock in CLOCKS {
                    let rc =
                        takes(clock, 5, |soon| pthread_rwlock_clockrdlock(lock.at(), clock, soon));
                    assert_eq!(rc, ETIMEDOUT);
                    let rc =
                        takes(clock, 5, |soon| pthread_rwlock_clockwrlock(lock.at(), clock, soon));
                    assert_eq!(rc, ETIMEDOUT);
                }
                assert_eq!(pthread_rwlock_timedrdlock(lock.at(), &BAD_TIME), EINVAL);
                assert_eq!(pthread_rwlock_timedwrlock(lock.at(), &BAD_TIME), EINVAL);
            })
            .join();
            unlock(lock);
        };
        a.start(part).join();
    });
}

#[test]
fn a_waiting_writer_precedes_new_readers_if_writers_are_preferred() {
    every_pair(|a, b| {
        let lock = of_kind(PREFER_WRITER_NONRECURSIVE);
        let order = Arc::new(AtomicUsize::new(0));
        read(lock);
        let (arrived, o) = (Arc::new(AtomicUsize::new(0)), order.clone());
        let writer = Actor::Goroutine.start(move || {
            write(lock);
            let place = o.fetch_add(1, Ordering::SeqCst);
            unlock(lock);
            place
        });
        yield_until("the writer to wait", || {
            trefoil::debug::goroutines().any(|g| g.state == "pthread rwlock (write)")
        });
        let reader = |actor: Actor| {
            let (o, n) = (order.clone(), arrived.clone());
            actor.start(move || {
                n.fetch_add(1, Ordering::SeqCst);
                read(lock);
                let place = o.fetch_add(1, Ordering::SeqCst);
                unlock(lock);
                place
            })
        };
        let readers = [reader(a), reader(b)];
        wait_for("the readers to begin", &arrived, 2);
        thread::sleep(Duration::from_millis(5));
        assert_eq!(order.load(Ordering::SeqCst), 0);
        unlock(lock);
        assert_eq!(writer.join(), 0);
        readers.into_iter().for_each(|reader| {
            reader.join();
        });
    });
}

#[test]
fn readers_behind_a_writer_that_times_out_get_the_lock() {
    every_pair(|a, b| {
        let lock = of_kind(PREFER_WRITER_NONRECURSIVE);
        read(lock);
        // SAFETY: never freed.
        let writer = a.start(move || unsafe {
            let soon = at(libc::CLOCK_MONOTONIC, 30);
            let clock = libc::CLOCK_MONOTONIC;
            assert_eq!(pthread_rwlock_clockwrlock(lock.at(), clock, &soon), ETIMEDOUT);
        });
        thread::sleep(Duration::from_millis(5));
        let reader = b.start(move || {
            read(lock);
            unlock(lock);
        });
        // The first reader still holds the lock.
        writer.join();
        reader.join();
        unlock(lock);
    });
}

#[test]
fn goroutines_that_wait_for_a_rwlock_need_no_threads() {
    child_test!();
    runtime(2).run(|| {
        let lock = of_kind(PREFER_READER);
        let arrived = Arc::new(AtomicUsize::new(0));
        write(lock);
        let one = |i| {
            let arrived = arrived.clone();
            trefoil::go(move || {
                arrived.fetch_add(1, Ordering::SeqCst);
                if i % 2 == 0 {
                    read(lock)
                } else {
                    write(lock)
                }
                unlock(lock);
            })
        };
        let waiting: Vec<_> = (0..500).map(one).collect();
        wait_for("all goroutines to begin", &arrived, 500);
        thread::sleep(Duration::from_millis(50));
        let n = threads();
        unlock(lock);
        join_all(waiting);
        assert!(n < 20, "{n} threads");
    });
}
