//! `select!` with futures among its arms: on goroutines, on plain threads, inside tasks.

use crate::common::watchdog;
use crate::executor::at_each_procs;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::future::{self, Future, pending, poll_fn, ready};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};
use trefoil::chan::{bounded, never, unbounded};
use trefoil::sync::{Notify, Semaphore};
use trefoil::time::sleep_async;
use trefoil::{block_on, go, select, task, yield_now};

/// Longer than any test runs.
const LONG: Duration = Duration::from_secs(600);

/// A future that other threads complete.
#[derive(Default)]
struct Event {
    value: Option<u32>,
    waker: Option<Waker>,
    polls: usize,
}

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Event>>);

impl Shared {
    fn complete(&self, value: u32) {
        let mut event = self.0.lock().unwrap();
        event.value = Some(value);
        let waker = event.waker.take();
        drop(event);
        waker.inspect(Waker::wake_by_ref);
    }

    fn wake_for_nothing(&self) {
        let waker = self.0.lock().unwrap().waker.clone();
        waker.inspect(Waker::wake_by_ref);
    }

    fn polls(&self) -> usize {
        self.0.lock().unwrap().polls
    }
}

impl Future for Shared {
    type Output = u32;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<u32> {
        let mut event = self.0.lock().unwrap();
        event.polls += 1;
        event.waker = Some(context.waker().clone());
        event.value.map_or(Poll::Pending, Poll::Ready)
    }
}

/// Counts its drops.
struct Noisy<'a, F>(F, &'a AtomicUsize);

impl<F: Future + Unpin> Future for Noisy<'_, F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        Pin::new(&mut self.0).poll(context)
    }
}

impl<F> Drop for Noisy<'_, F> {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

/// Runs `f` on a goroutine with 1, 2 and 8 Ps, on a plain thread, and inside a task's poll.
fn everywhere(f: impl Fn() + Send + Sync + Copy + 'static) {
    at_each_procs(f);
    f();
    trefoil::run(move || task::spawn(async move { f() }).join().unwrap());
}

#[test]
fn a_future_that_is_ready_is_chosen_at_once() {
    let _dog = watchdog();
    everywhere(|| {
        let (_tx, silent) = bounded::<i32>(0);
        let value = select! {
            recv(silent) -> _ => unreachable!(),
            future(ready("at once")) -> v => v,
            after(LONG) => unreachable!(),
        };
        assert_eq!(value, "at once");
        let alone = select! { future(async { 5 }) -> v => v };
        assert_eq!(alone, 5);
    });
}

#[test]
fn a_select_waits_for_a_channel_a_timer_and_futures_together() {
    let _dog = watchdog();
    everywhere(|| {
        for winner in 0..4 {
            let (tx, rx) = bounded(0);
            let (one, other) = (Shared::default(), Shared::default());
            let events = (one.clone(), other.clone());
            let helper = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(2));
                match winner {
                    0 => _ = tx.send_timeout(10, LONG),
                    1 => events.0.complete(11),
                    2 => events.1.complete(12),
                    _ => {}
                }
                tx
            });
            let limit = if winner == 3 { Duration::from_millis(5) } else { LONG };
            let value = select! {
                recv(rx) -> v => v.unwrap(),
                future(one) -> v => v,
                future(other) -> v => v,
                after(limit) => 13,
            };
            assert_eq!(value, 10 + winner);
            trefoil::blocking(|| helper.join()).unwrap();
        }
    });
}

#[test]
fn no_goroutine_is_started_for_a_future() {
    let _dog = watchdog();
    trefoil::run(|| {
        let event = Shared::default();
        let completed = event.clone();
        let before = trefoil::num_goroutines();
        let mut seen = 0;
        select! {
            future(poll_fn(|_| {
                seen = trefoil::num_goroutines();
                Poll::<()>::Pending
            })) -> () => unreachable!(),
            future(async { completed.complete(1); event.await }) -> v => assert_eq!(v, 1),
        }
        assert!(seen <= before, "{seen} goroutines, {before} before");
    });
}

#[test]
fn the_default_is_chosen_after_one_poll_of_each_future() {
    let _dog = watchdog();
    everywhere(|| {
        let event = Shared::default();
        let (_tx, silent) = bounded::<i32>(0);
        for round in 1..=3 {
            select! {
                recv(silent) -> _ => unreachable!(),
                future(event.clone()) -> _ => unreachable!(),
                default => {}
            }
            assert_eq!(event.polls(), round);
        }
        event.complete(4);
        let value = select! { future(event.clone()) -> v => v, default => 0 };
        assert_eq!(value, 4);
    });
}

#[test]
fn a_default_beside_a_future_that_always_wakes_itself_is_chosen() {
    let _dog = watchdog();
    everywhere(|| {
        let restless = || {
            poll_fn(|context| {
                context.waker().wake_by_ref();
                Poll::<()>::Pending
            })
        };
        select! { future(restless()) -> () => unreachable!(), default => {} }
        let begin = Instant::now();
        select! {
            future(restless()) -> () => unreachable!(),
            after(Duration::from_millis(3)) => assert!(begin.elapsed() >= Duration::from_millis(3)),
        }
        let (tx, rx) = bounded(0);
        let sender = go(move || tx.send(1).unwrap());
        select! {
            future(restless()) -> () => unreachable!(),
            recv(rx) -> v => assert_eq!(v, Ok(1)),
        }
        sender.join().unwrap();
    });
}

#[test]
fn futures_that_lose_are_dropped_before_the_body() {
    let _dog = watchdog();
    everywhere(|| {
        let dropped = AtomicUsize::new(0);
        select! {
            future(Noisy(pending::<()>(), &dropped)) -> _ => unreachable!(),
            future(Noisy(ready(()), &dropped)) -> () => {
                assert_eq!(dropped.load(Ordering::SeqCst), 2);
            }
        }
        select! {
            future(Noisy(pending::<()>(), &dropped)) -> _ => unreachable!(),
            default => assert_eq!(dropped.load(Ordering::SeqCst), 3),
        }
        // After a wait.
        let event = Shared::default();
        let completed = event.clone();
        let waker = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(1));
            completed.complete(1);
        });
        select! {
            future(Noisy(event, &dropped)) -> v => {
                assert_eq!((v, dropped.load(Ordering::SeqCst)), (1, 5));
            }
            future(Noisy(pending::<()>(), &dropped)) -> () => unreachable!(),
        }
        trefoil::blocking(|| waker.join()).unwrap();
    });
}

#[test]
fn a_future_passed_by_reference_goes_on_in_the_next_select() {
    let _dog = watchdog();
    everywhere(|| {
        let semaphore = Semaphore::new(0);
        let mut permit = pin!(semaphore.acquire_async());
        for _ in 0..10 {
            select! {
                future(permit.as_mut()) -> _ => unreachable!("no permit yet"),
                after(Duration::from_micros(100)) => {}
            }
        }
        semaphore.add_permits(1);
        select! {
            future(permit.as_mut()) -> permit => drop(permit),
            after(LONG) => unreachable!(),
        }
        let mut handle = go(|| 5);
        let joined = loop {
            select! {
                future(&mut handle) -> joined => break joined.unwrap(),
                default => yield_now(),
            }
        };
        assert_eq!(joined, 5);
    });
}

#[test]
fn a_wakeup_after_the_select_does_nothing() {
    let _dog = watchdog();
    everywhere(|| {
        let event = Shared::default();
        let (tx, rx) = bounded(1);
        for _ in 0..100 {
            tx.send(1).unwrap();
            select! {
                future(async { ready(()).await; event.clone().await }) -> _ => unreachable!(),
                recv(rx) -> v => assert_eq!(v, Ok(1)),
            }
            // The waker is that of the last select that has polled the future, or there is none.
            event.wake_for_nothing();
        }
        // A wake-up that came late must not disturb another wait.
        block_on(sleep_async(Duration::from_micros(100)));
        event.wake_for_nothing();
    });
}

#[test]
fn a_future_that_is_woken_for_nothing_is_polled_again() {
    let _dog = watchdog();
    everywhere(|| {
        let event = Shared::default();
        let remote = event.clone();
        let waker = std::thread::spawn(move || {
            for polls in 1..=20 {
                while remote.polls() < polls {
                    std::thread::yield_now();
                }
                remote.wake_for_nothing();
            }
            remote.complete(7);
        });
        let value = select! {
            future(event.clone()) -> v => v,
            recv(never::<u32>()) -> _ => unreachable!(),
        };
        assert_eq!(value, 7);
        assert!(event.polls() > 20);
        trefoil::blocking(|| waker.join()).unwrap();
    });
}

#[test]
fn a_panic_of_a_future_leaves_the_select_and_the_channels_in_order() {
    let _dog = watchdog();
    everywhere(|| {
        let dropped = AtomicUsize::new(0);
        let (tx, rx) = bounded(1);
        // In its second poll, after the select has waited.
        let mut polls = 0;
        let panics = poll_fn(|context: &mut Context<'_>| {
            polls += 1;
            assert!(polls < 2, "second poll");
            let waker = context.waker().clone();
            std::thread::spawn(move || waker.wake());
            Poll::<()>::Pending
        });
        let result = catch_unwind(AssertUnwindSafe(|| {
            select! {
                future(panics) -> () => unreachable!(),
                future(Noisy(pending::<()>(), &dropped)) -> () => unreachable!(),
                recv(rx) -> _ => unreachable!(),
            }
        }));
        assert!(result.is_err());
        assert_eq!(dropped.load(Ordering::SeqCst), 1);
        // No stale waiter takes the value.
        tx.send(3).unwrap();
        let got = select! {
            recv(rx) -> v => v.unwrap(),
            future(pending::<i32>()) -> v => v,
        };
        assert_eq!(got, 3);
    });
}

#[test]
fn a_future_and_a_channel_that_are_ready_are_chosen_equally_often() {
    const TRIALS: usize = 6000;
    let _dog = watchdog();
    everywhere(|| {
        let (tx, rx) = unbounded();
        let mut chosen = [0usize; 3];
        tx.send(()).unwrap();
        for _ in 0..TRIALS {
            let winner = select! {
                recv(rx) -> _ => 0,
                future(ready(1)) -> v => v,
                future(pending::<usize>()) -> v => v,
                future(async { 2 }) -> v => v,
            };
            chosen[winner] += 1;
            if winner == 0 {
                tx.send(()).unwrap();
            }
        }
        // 10 sigma.
        let (share, sigma) = (TRIALS as f64 / 3.0, (TRIALS as f64 * 2.0 / 9.0).sqrt());
        for n in chosen {
            assert!((n as f64 - share).abs() < 10.0 * sigma, "{chosen:?}");
        }
    });
}

#[test]
fn arms_are_evaluated_once_and_in_order() {
    let _dog = watchdog();
    trefoil::run(|| {
        let log = std::cell::RefCell::new(Vec::new());
        let note = |what: &'static str| log.borrow_mut().push(what);
        let (tx, rx) = bounded::<i32>(0);
        let text = String::from("borrowed");
        let length = select! {
            recv({ note("rx"); &rx }) -> _ => unreachable!(),
            future({ note("future"); async { note("poll"); text.len() } }) -> n => {
                note("body");
                n
            }
            send({ note("tx"); &tx }, { note("value"); 1 }) -> _ => unreachable!(),
            after({ note("after"); LONG }) => unreachable!(),
        };
        drop(text);
        assert_eq!(length, 8);
        assert_eq!(*log.borrow(), ["rx", "future", "tx", "value", "after", "poll", "body"]);
    });
}

#[test]
fn bodies_may_break_return_and_use_the_question_mark() {
    let _dog = watchdog();
    fn parse(text: &str) -> Result<i32, std::num::ParseIntError> {
        let mut turns = 0;
        loop {
            select! {
                future(ready(text.parse::<i32>())) -> n => {
                    turns += 1;
                    if n? == 0 {
                        return Ok(0);
                    }
                    if turns < 3 {
                        continue;
                    }
                    break;
                }
                future(pending::<()>()) -> _ => unreachable!(),
            }
        }
        Ok(turns)
    }
    assert_eq!((parse("0"), parse("5")), (Ok(0), Ok(3)));
    assert!(parse("x").is_err());
}

#[test]
fn values_to_send_and_futures_are_waited_for_together() {
    let _dog = watchdog();
    everywhere(|| {
        let (tx, rx) = bounded(0);
        let stop = Arc::new(Notify::new());
        let stopper = stop.clone();
        let receiver = go(move || {
            let got: Vec<i32> = (0..50).map(|_| rx.recv().unwrap()).collect();
            stopper.notify_one();
            got
        });
        let mut stopped = pin!(stop.notified());
        let mut n = 0;
        loop {
            select! {
                send(tx, n) -> sent => match sent {
                    Ok(()) => n += 1,
                    Err(_) => yield_now(),
                },
                future(stopped.as_mut()) -> () => break,
            }
        }
        assert_eq!(n, 50);
        assert_eq!(receiver.join().unwrap(), (0..50).collect::<Vec<_>>());
    });
}

/// Futures of trefoil, channels and timers at once: every value and every permit arrives once.
#[test]
fn nothing_is_lost_while_wakeups_of_all_kinds_race() {
    const ROUNDS: u32 = 1500;
    let _dog = watchdog();
    at_each_procs(|| {
        let (tx, rx) = bounded(0);
        let (async_tx, async_rx) = bounded(1);
        let permits = Arc::new(Semaphore::new(0));
        let done = Arc::new(AtomicBool::new(false));
        let mut producers = vec![];
        producers.push(go(move || (0..ROUNDS).for_each(|n| tx.send(n).unwrap())));
        producers.push(task::spawn(async move {
            for n in 0..ROUNDS {
                async_tx.send_async(n).await.unwrap();
            }
        }));
        let given = permits.clone();
        let thread = std::thread::spawn(move || {
            for n in 0..ROUNDS {
                given.add_permits(1);
                if n % 16 == 0 {
                    std::thread::sleep(Duration::from_micros(20));
                }
            }
        });
        let totals = Arc::new([const { AtomicUsize::new(0) }; 3]);
        let consumers: Vec<_> = (0..3)
            .map(|seed| {
                let (rx, async_rx, permits) = (rx.clone(), async_rx.clone(), permits.clone());
                let (totals, done) = (totals.clone(), done.clone());
                go(move || {
                    let mut random = SmallRng::seed_from_u64(seed);
                    while !done.load(Ordering::Relaxed) {
                        let limit = Duration::from_micros(random.random_range(1..200));
                        let mut got = 3;
                        select! {
                            recv(rx) -> v => if v.is_ok() { got = 0 } else { yield_now() },
                            future(async_rx.recv_async()) -> v => {
                                if v.is_ok() { got = 1 } else { yield_now() }
                            }
                            future(permits.acquire_async()) -> permit => {
                                permit.forget();
                                got = 2;
                            }
                            after(limit) => {}
                        }
                        if got < 3 {
                            totals[got].fetch_add(1, Ordering::Relaxed);
                        }
                        let sum = totals.iter().map(|n| n.load(Ordering::Relaxed)).sum::<usize>();
                        if sum == 3 * ROUNDS as usize {
                            done.store(true, Ordering::Relaxed);
                        }
                    }
                })
            })
            .collect();
        trefoil::blocking(|| thread.join()).unwrap();
        producers.into_iter().for_each(|p| p.join().unwrap());
        consumers.into_iter().for_each(|c| c.join().unwrap());
        for total in totals.iter() {
            assert_eq!(total.load(Ordering::Relaxed), ROUNDS as usize);
        }
    });
}

/// Plain threads wake the futures of selects that end by a channel at the same moment.
#[test]
fn wakeups_from_threads_race_with_a_channel_that_wins() {
    const ROUNDS: usize = 2000;
    let _dog = watchdog();
    everywhere(|| {
        let event = Shared::default();
        let stop = Arc::new(AtomicBool::new(false));
        let (remote, stopped) = (event.clone(), stop.clone());
        let waker = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                remote.wake_for_nothing();
                std::hint::spin_loop();
            }
        });
        let (tx, rx) = bounded(0);
        let sender = go(move || (0..ROUNDS).for_each(|n| tx.send(n).unwrap()));
        for n in 0..ROUNDS {
            let got = select! {
                future(event.clone()) -> _ => unreachable!(),
                recv(rx) -> v => v.unwrap(),
            };
            assert_eq!(got, n);
        }
        stop.store(true, Ordering::Relaxed);
        sender.join().unwrap();
        trefoil::blocking(|| waker.join()).unwrap();
    });
}

#[test]
fn a_future_that_needs_to_stay_in_place_may_be_an_arm() {
    let _dog = watchdog();
    everywhere(|| {
        // The array is borrowed across an await, so the future contains a reference to itself.
        let event = Shared::default();
        let completed = event.clone();
        let sum = async {
            let array = [1, 2, 3];
            let first = &array[0];
            future::ready(()).await;
            let value = event.await;
            first + array[1] + array[2] + value
        };
        let helper = go(move || completed.complete(10));
        let sum = select! {
            future(sum) -> sum => sum,
            after(LONG) => unreachable!(),
        };
        assert_eq!(sum, 16);
        helper.join().unwrap();
    });
}
