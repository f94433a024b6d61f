//! Sleeps, timeouts and intervals of async code.

// A task returns a sleep on purpose.
#![allow(clippy::async_yields_async)]

use crate::common::{assert_passed, watchdog};
use crate::executors::{everywhere, foreign_block_on, simulated};
use std::future::{Future, pending, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};
use trefoil::time::{
    MissedTickBehavior, interval, interval_at, sleep_async, sleep_until_async, timeout_async,
};

const MS: Duration = Duration::from_millis(1);
const LONG: Duration = Duration::from_secs(60);

#[test]
fn a_sleep_ends_at_its_deadline_wherever_it_is_polled() {
    let sleeps = |_| async {
        let start = Instant::now();
        sleep_async(3 * MS).await;
        assert_passed(start, 3 * MS);
        sleep_until_async(start).await;
        assert_passed(start, 3 * MS);
    };
    simulated(sleeps);
    everywhere(sleeps);
}

#[test]
fn a_sleep_of_zero_is_ready_at_its_first_poll() {
    let mut context = Context::from_waker(Waker::noop());
    assert!(pin!(sleep_async(Duration::ZERO)).poll(&mut context).is_ready());
}

#[test]
fn a_sleep_of_the_longest_duration_is_pending() {
    let mut context = Context::from_waker(Waker::noop());
    assert!(pin!(sleep_async(Duration::MAX)).poll(&mut context).is_pending());
}

#[test]
fn reset_to_an_earlier_time_wakes_the_task_then() {
    let reset = |place| async move {
        let start = Instant::now();
        let mut sleep = sleep_async(LONG);
        let mut polls = 0;
        poll_fn(|context| {
            polls += 1;
            let polled = Pin::new(&mut sleep).poll(context);
            if polls == 1 {
                // After the registration: the wake-up must come without another poll.
                Pin::new(&mut sleep).reset(start + 2 * MS);
            }
            polled
        })
        .await;
        assert_passed(start, 2 * MS);
        assert!(start.elapsed() < LONG / 2, "{place}");
    };
    simulated(reset);
    everywhere(reset);
}

#[test]
fn reset_to_a_later_time_delays_the_sleep() {
    let _watchdog = watchdog();
    let reset = |_| async {
        let start = Instant::now();
        let mut sleep = sleep_async(2 * MS);
        let mut first = true;
        poll_fn(|context| {
            let polled = Pin::new(&mut sleep).poll(context);
            if !std::mem::take(&mut first) {
                return polled;
            }
            Pin::new(&mut sleep).reset(start + 8 * MS);
            // A busy machine may need that long in real time.
            assert!(!sleep.is_elapsed() || start.elapsed() >= 8 * MS);
            if polled.is_ready() {
                // The 2 ms passed before the poll, which therefore registered no waker.
                return Pin::new(&mut sleep).poll(context);
            }
            Poll::Pending
        })
        .await;
        assert_passed(start, 8 * MS);
        assert!(sleep.is_elapsed());
        // It can be used again.
        Pin::new(&mut sleep).reset(start + 10 * MS);
        sleep.await;
        assert_passed(start, 10 * MS);
    };
    simulated(reset);
    everywhere(reset);
}

#[trefoil::test(virtual_time)]
fn a_sleep_that_moves_to_another_task_wakes_that_one() {
    for _ in 0..20 {
        let start = Instant::now();
        let mut sleep = sleep_async(2 * MS);
        let sleep = trefoil::task::spawn(async move {
            let polled = poll_fn(|cx| Poll::Ready(Pin::new(&mut sleep).poll(cx))).await;
            assert!(polled.is_pending());
            sleep
        })
        .join()
        .unwrap();
        trefoil::task::spawn(sleep).join().unwrap();
        assert_eq!(start.elapsed(), 2 * MS);
    }
}

#[test]
fn a_sleep_that_was_polled_in_a_runtime_that_has_ended_still_ends() {
    let start = Instant::now();
    let mut sleep = sleep_async(20 * MS);
    let sleep = trefoil::Runtime::builder().build().unwrap().run(move || {
        trefoil::task::spawn(async move {
            let polled = poll_fn(|cx| Poll::Ready(Pin::new(&mut sleep).poll(cx))).await;
            (polled, sleep).1
        })
        .join()
        .unwrap()
    });
    trefoil::run(move || trefoil::task::spawn(sleep).join().unwrap());
    assert!(start.elapsed() >= 20 * MS);
}

#[test]
fn a_timeout_returns_the_value_of_a_future_that_is_ready_in_time() {
    let in_time = |place| async move {
        assert_eq!(timeout_async(Duration::ZERO, async { 1 }).await, Ok(1), "{place}");
        let start = Instant::now();
        let slow = async {
            sleep_async(MS).await;
            2
        };
        assert_eq!(timeout_async(LONG, slow).await, Ok(2), "{place}");
        assert_passed(start, MS);
    };
    simulated(in_time);
    everywhere(in_time);
}

#[test]
fn a_timeout_drops_a_future_that_takes_too_long() {
    struct CountDrop(Arc<AtomicUsize>);
    impl Drop for CountDrop {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let drops = Arc::new(AtomicUsize::new(0));
    let n = drops.clone();
    let late = move |place| {
        let guard = CountDrop(n.clone());
        async move {
            let start = Instant::now();
            let never = async move {
                let _guard = guard;
                pending::<()>().await;
            };
            assert!(timeout_async(2 * MS, never).await.is_err(), "{place}");
            assert_passed(start, 2 * MS);
        }
    };
    let places = simulated(late.clone()).len() + everywhere(late).len();
    assert_eq!(drops.load(Ordering::Relaxed), places);
}

#[test]
fn an_interval_ticks_at_multiples_of_its_period() {
    let ticks = |place| async move {
        let start = Instant::now();
        let mut ticks = interval_at(start, 2 * MS);
        for i in 0..5 {
            assert_eq!(ticks.tick().await, start + i * 2 * MS, "{place}");
            assert_passed(start, i * 2 * MS);
        }
    };
    simulated(ticks);
    everywhere(ticks);
}

#[trefoil::test(virtual_time)]
fn an_interval_delivers_missed_ticks_in_a_burst_or_leaves_them_out() {
    trefoil::block_on(async {
        let period = 10 * MS;
        for (behavior, next) in [
            (MissedTickBehavior::Burst, 20 * MS),
            (MissedTickBehavior::Delay, 45 * MS),
            (MissedTickBehavior::Skip, 40 * MS),
        ] {
            let mut ticks = interval(period);
            ticks.set_missed_tick_behavior(behavior);
            let start = ticks.tick().await;
            assert_eq!(start, Instant::now());
            std::thread::sleep(35 * MS);
            assert_eq!(ticks.tick().await, start + period);
            assert_eq!(start.elapsed(), 35 * MS, "a missed tick is delivered at once");
            assert_eq!(ticks.tick().await, start + next);
            assert_eq!(start.elapsed(), next.max(35 * MS));
        }
    });
}

#[trefoil::test(virtual_time)]
fn a_tick_that_is_dropped_is_not_lost() {
    trefoil::block_on(async {
        let start = Instant::now() + 3 * MS;
        let mut ticks = interval_at(start, LONG);
        assert!(timeout_async(MS, ticks.tick()).await.is_err());
        assert_eq!(ticks.tick().await, start);
        assert_eq!(Instant::now(), start);
    });
}

#[test]
#[should_panic(expected = "must not be zero")]
fn an_interval_of_zero_panics() {
    interval(Duration::ZERO);
}

/// Sleeps are polled, reset, and dropped by tasks that are aborted at any moment, while others end.
#[test]
fn dropped_sleeps_wake_no_task_and_lose_no_wake_up() {
    trefoil::run(|| {
        let end = Instant::now() + Duration::from_millis(800);
        let mut rounds = 0;
        while Instant::now() < end {
            let tasks: Vec<_> = (0..200_u64)
                .map(|i| {
                    trefoil::task::spawn(async move {
                        let mut sleep = sleep_async(Duration::from_micros(i * 7 % 900));
                        for round in 0..3 {
                            let limit = Duration::from_micros(i * 13 % 700);
                            let done = timeout_async(limit, &mut sleep).await.is_ok();
                            if done || round == 1 {
                                let next = Instant::now() + Duration::from_micros(i * 11 % 300);
                                Pin::new(&mut sleep).reset(next);
                            }
                        }
                        sleep.await;
                    })
                })
                .collect();
            for (i, task) in tasks.iter().enumerate() {
                if (i + rounds) % 3 == 0 {
                    task.abort();
                }
            }
            for task in tasks {
                // An aborted one is an error; the others end.
                let _ = task.join();
            }
            rounds += 1;
        }
        assert!(rounds > 0);
    });
}

/// A future that another executor drops from another thread, while its timer fires.
#[test]
fn sleeps_of_another_executor_may_be_dropped_while_they_fire() {
    let threads: Vec<_> = (0..2_u64)
        .map(|t| {
            std::thread::spawn(move || {
                for i in 0..200_u64 {
                    let limit = Duration::from_micros((i * 37 + t) % 400);
                    let inner = sleep_async(Duration::from_micros(i * 53 % 400));
                    let _ = foreign_block_on(timeout_async(limit, inner));
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[cfg(feature = "futures")]
#[test]
fn an_interval_is_a_stream_of_its_ticks() {
    use futures_core::Stream;
    trefoil::block_on(async {
        let start = Instant::now();
        let mut ticks = interval_at(start, MS);
        for i in 0..3 {
            let next = poll_fn(|cx| Pin::new(&mut ticks).poll_next(cx)).await;
            assert_eq!(next, Some(start + i * MS));
        }
    });
}
