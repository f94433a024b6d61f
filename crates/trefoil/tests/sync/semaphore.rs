//! `Semaphore`.

use super::common::{MS, change_after_time_out, join_all, watchdog, yield_until};
use super::{join_thread, mixed, next, on, on_every, panic_text};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;
use trefoil::sync::{Mutex, Semaphore};
use trefoil::time::sleep;
use trefoil::{go, yield_now};

/// Go: TestSemaHandoff. After a release the waiter runs first in at least two thirds of 10,000
/// rounds.
#[test]
fn a_released_permit_lets_the_waiter_run_first() {
    let _w = watchdog();
    for procs in [1, 2, 4] {
        on(procs, || {
            // As in Go's test the other Ps are busy, so that they do not steal the waiter.
            let stop = Arc::new(AtomicBool::new(false));
            let busy: Vec<_> = (1..procs)
                .map(|_| {
                    let stop = stop.clone();
                    go(move || {
                        while !stop.load(SeqCst) {
                            yield_now();
                        }
                    })
                })
                .collect();
            let mut first = 0;
            for _ in 0..10_000 {
                let semaphore = Arc::new(Semaphore::new(1));
                let permit = semaphore.acquire();
                let winner = Arc::new(AtomicUsize::new(0));
                let waiting = Arc::new(AtomicBool::new(false));
                let waiter = go({
                    let (semaphore, winner) = (semaphore.clone(), winner.clone());
                    let waiting = waiting.clone();
                    move || {
                        waiting.store(true, SeqCst);
                        let _permit = semaphore.acquire();
                        let _ = winner.compare_exchange(0, 1, SeqCst, SeqCst);
                    }
                });
                while !waiting.load(SeqCst) {
                    yield_now();
                }
                yield_now();
                drop(permit);
                let _ = winner.compare_exchange(0, 2, SeqCst, SeqCst);
                waiter.join().unwrap();
                first += usize::from(winner.load(SeqCst) == 1);
            }
            stop.store(true, SeqCst);
            join_all(busy);
            assert!(first >= 10_000 * 2 / 3, "the waiter ran first {first} times, procs={procs}");
        });
    }
}

#[test]
fn permits_bound_the_holders_and_none_is_lost() {
    let _w = watchdog();
    static S: Semaphore = Semaphore::new(3);
    static INSIDE: AtomicUsize = AtomicUsize::new(0);
    on_every(|| {
        mixed(12, |i| {
            let mut seed = 5 + i as u64;
            for k in 0..100 {
                let limit = Duration::from_nanos(next(&mut seed) % 100_000);
                let permit = match k % 4 {
                    0 => S.try_acquire(),
                    1 => S.acquire_timeout(limit),
                    2 => Some(S.acquire_many(2)),
                    _ => Some(S.acquire()),
                };
                let Some(permit) = permit else { continue };
                let inside = INSIDE.fetch_add(permit.permits(), SeqCst) + permit.permits();
                assert!(inside <= 3, "{inside} permits are held, 3 exist");
                if next(&mut seed).is_multiple_of(3) {
                    sleep(Duration::from_nanos(next(&mut seed) % 30_000));
                }
                INSIDE.fetch_sub(permit.permits(), SeqCst);
            }
        });
        assert_eq!(S.available_permits(), 3);
    });
}

/// Small requests do not starve a large one; a request that fails does not block the ones behind
/// it.
#[test]
fn a_semaphore_serves_its_waiters_in_fifo_order() {
    let _w = watchdog();
    on_every(|| {
        let semaphore = Arc::new(Semaphore::new(2));
        let order = Arc::new(Mutex::new(Vec::new()));
        let held = semaphore.acquire();
        let wants = [2, 1, 1].map(|n| {
            let (s, order) = (semaphore.clone(), order.clone());
            let handle = go(move || {
                let _permit = s.acquire_many(n);
                order.lock().push(n);
                yield_now();
            });
            // The first one waits as soon as the remaining permit is not available any more.
            yield_until("the first to wait", || semaphore.try_acquire().is_none());
            handle
        });
        assert_eq!(semaphore.available_permits(), 1);
        assert!(semaphore.try_acquire().is_none(), "must not overtake the waiters");
        drop(held);
        join_all(wants);
        assert_eq!(*order.lock(), [2, 1, 1]);

        let held = semaphore.acquire();
        let s = semaphore.clone();
        let gives_up = std::thread::spawn(move || s.acquire_timeout(Duration::ZERO).is_some());
        assert!(join_thread(gives_up));
        let s = semaphore.clone();
        let behind = go(move || {
            sleep(MS);
            drop(s.acquire());
        });
        // Two permits are not available; the request for one behind it succeeds.
        let two = semaphore.clone();
        let large = go(move || {
            let all = two.try_acquire_many(2);
            assert!(all.is_none());
        });
        large.join().unwrap();
        behind.join().unwrap();
        drop(held);
        assert_eq!(semaphore.available_permits(), 2);
        assert!(panic_text(|| semaphore.add_permits(usize::MAX)).contains("MAX_PERMITS"));
        semaphore.add_permits(1);
        semaphore.acquire_many(2).forget();
        assert_eq!(semaphore.available_permits(), 1);
    });
}

#[test]
fn a_permit_that_comes_before_a_timed_out_goroutine_runs_is_taken() {
    let semaphore = Arc::new(Semaphore::new(0));
    let (waiter, giver) = (semaphore.clone(), semaphore.clone());
    let wait = move |limit| waiter.acquire_timeout(limit).is_some();
    assert!(change_after_time_out(wait, move || giver.add_permits(1)));
    assert_eq!(semaphore.available_permits(), 1);
}
