//! Semaphores.

use super::*;
use crate::common::{child_test, join_all};
use libc::{EAGAIN, EINVAL, ETIMEDOUT, sem_post, sem_timedwait, sem_trywait, sem_wait};
use std::sync::Arc;

pub(crate) type Semaphore = Object<sem_t>;

pub(crate) fn semaphore(value: u32) -> Semaphore {
    let sem = Semaphore::zeroed();
    // SAFETY: never freed; the same below.
    unsafe { assert_eq!(libc::sem_init(sem.at(), 0, value), 0) };
    sem
}

pub(crate) fn post(sem: Semaphore) {
    // SAFETY: as above.
    unsafe { assert_eq!(sem_post(sem.at()), 0) }
}

pub(crate) fn wait(sem: Semaphore) {
    // SAFETY: as above. A thread's wait may be interrupted.
    unsafe {
        while sem_wait(sem.at()) != 0 {
            assert_eq!(errno(), libc::EINTR);
        }
    }
}

#[test]
fn goroutines_that_wait_for_a_semaphore_need_no_threads() {
    child_test!();
    runtime(2).run(|| {
        let sem = semaphore(0);
        let arrived = Arc::new(AtomicUsize::new(0));
        let one = |_| {
            let arrived = arrived.clone();
            trefoil::go(move || {
                arrived.fetch_add(1, Ordering::SeqCst);
                wait(sem);
            })
        };
        let waiting: Vec<_> = (0..500).map(one).collect();
        wait_for("all goroutines to begin", &arrived, 500);
        thread::sleep(Duration::from_millis(50));
        let n = threads();
        (0..500).for_each(|_| post(sem));
        join_all(waiting);
        assert!(n < 20, "{n} threads");
    });
}

#[test]
fn each_post_lets_one_waiter_pass() {
    every_pair(|a, b| {
        const EACH: usize = 4;
        let rounds = size(500, 100);
        let (sem, back) = (semaphore(0), semaphore(0));
        let pass = move || {
            for _ in 0..rounds {
                wait(sem);
                post(back);
            }
        };
        let parts: Vec<_> = (0..EACH).map(|_| a.start(pass)).collect();
        let give = move || {
            for _ in 0..EACH * rounds {
                post(sem);
                wait(back);
            }
        };
        b.start(give).join();
        parts.into_iter().for_each(Started::join);
        // SAFETY: never freed.
        unsafe {
            assert_eq!(sem_trywait(sem.at()), -1);
            assert_eq!(errno(), EAGAIN);
        }
    });
}

#[test]
fn twenty_posts_release_twenty_waiters() {
    everywhere(|| {
        let sem = semaphore(0);
        let waiting: Vec<_> = (0..20).map(|i| Actor::nth(i).start(move || wait(sem))).collect();
        Actor::Thread.start(move || (0..20).for_each(|_| post(sem))).join();
        waiting.into_iter().for_each(Started::join);
    });
}

#[test]
fn timed_semaphore_waits_time_out_and_succeed() {
    simulated_and_every_pair(|a, b| {
        let (sem, timed_out) = (semaphore(0), Arc::new(AtomicUsize::new(0)));
        let t = timed_out.clone();
        // SAFETY: never freed.
        let waits = move || unsafe {
            assert_eq!(takes(libc::CLOCK_REALTIME, 20, |soon| sem_timedwait(sem.at(), soon)), -1);
            assert_eq!(errno(), ETIMEDOUT);
            for clock in CLOCKS {
                assert_eq!(takes(clock, 10, |soon| sem_clockwait(sem.at(), clock, soon)), -1);
                assert_eq!(errno(), ETIMEDOUT);
            }
            assert_eq!(sem_timedwait(sem.at(), &BAD_TIME), -1);
            assert_eq!(errno(), EINVAL);
            t.store(1, Ordering::SeqCst);
            let late = at(libc::CLOCK_REALTIME, 60_000);
            assert_eq!(sem_timedwait(sem.at(), &late), 0);
        };
        let waiting = a.start(waits);
        while timed_out.load(Ordering::SeqCst) == 0 {
            thread::sleep(Duration::from_millis(2));
        }
        thread::sleep(Duration::from_millis(2));
        b.start(move || post(sem)).join();
        waiting.join();
    });
}

#[test]
fn process_shared_semaphore_blocks_the_thread_and_works() {
    everywhere(|| {
        let sem = Semaphore::zeroed();
        // SAFETY: never freed.
        unsafe { assert_eq!(libc::sem_init(sem.at(), 1, 0), 0) };
        let waiting: Vec<_> = (0..4).map(|i| Actor::nth(i).start(move || wait(sem))).collect();
        (0..4).for_each(|_| post(sem));
        waiting.into_iter().for_each(Started::join);
    });
}
