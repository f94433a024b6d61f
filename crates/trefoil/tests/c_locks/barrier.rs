//! Barriers.

use super::*;
use libc::{PTHREAD_BARRIER_SERIAL_THREAD, pthread_barrier_t, pthread_barrier_wait};
use std::sync::Arc;

type Barrier = Object<pthread_barrier_t>;

fn barrier(count: u32) -> Barrier {
    let barrier = Barrier::zeroed();
    // SAFETY: never freed.
    unsafe {
        assert_eq!(libc::pthread_barrier_init(barrier.at(), std::ptr::null(), count), 0);
    }
    barrier
}

/// Passes the barrier many times. Each round must have one serial thread.
fn run_rounds(barrier: Barrier, count: usize, actor: impl Fn(usize) -> Actor) {
    let rounds = size(300, 60);
    let (inside, serial) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let one = |i| {
        let (inside, serial) = (inside.clone(), serial.clone());
        actor(i).start(move || {
            for round in 0..rounds {
                inside.fetch_add(1, Ordering::SeqCst);
                // SAFETY: never freed.
                match unsafe { pthread_barrier_wait(barrier.at()) } {
                    PTHREAD_BARRIER_SERIAL_THREAD => {
                        serial.fetch_add(1, Ordering::SeqCst);
                    }
                    rc => assert_eq!(rc, 0),
                }
                let seen = inside.load(Ordering::SeqCst);
                assert!(seen >= (round + 1) * count && seen <= (round + 2) * count, "{seen}");
            }
        })
    };
    let parts: Vec<_> = (0..count).map(one).collect();
    parts.into_iter().for_each(Started::join);
    assert_eq!(serial.load(Ordering::SeqCst), rounds);
}

#[test]
fn goroutines_and_threads_meet_at_one_barrier() {
    everywhere(|| {
        run_rounds(barrier(6), 6, Actor::nth);
        run_rounds(barrier(5), 5, |_| Actor::Goroutine);
        run_rounds(barrier(3), 3, |_| Actor::Thread);
        run_rounds(barrier(1), 1, |_| Actor::Goroutine);
    });
}

#[test]
fn the_serial_thread_may_destroy_the_barrier() {
    everywhere(|| {
        for _ in 0..size(200, 40) {
            let barrier = barrier(4);
            let pass = move || {
                // SAFETY: the serial thread destroys the barrier, which is not used afterwards.
                unsafe {
                    if pthread_barrier_wait(barrier.at()) == PTHREAD_BARRIER_SERIAL_THREAD {
                        assert_eq!(libc::pthread_barrier_destroy(barrier.at()), 0);
                        let size = size_of::<pthread_barrier_t>();
                        barrier.at().cast::<u8>().write_bytes(0xff, size);
                    }
                }
            };
            let parts: Vec<_> = (0..4).map(|i| Actor::nth(i).start(pass)).collect();
            parts.into_iter().for_each(Started::join);
        }
    });
}

#[test]
fn process_shared_barrier_works() {
    everywhere(|| {
        let (barrier, attr) = (Barrier::zeroed(), Object::<libc::pthread_barrierattr_t>::zeroed());
        // SAFETY: never freed.
        unsafe {
            libc::pthread_barrierattr_init(attr.at());
            libc::pthread_barrierattr_setpshared(attr.at(), libc::PTHREAD_PROCESS_SHARED);
            assert_eq!(libc::pthread_barrier_init(barrier.at(), attr.at(), 4), 0);
        }
        run_rounds(barrier, 4, Actor::nth);
    });
}
