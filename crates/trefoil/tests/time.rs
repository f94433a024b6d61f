//! `trefoil::time`: what Go's tests of its timers assert. What depends on the time alone is
//! simulated, so that times are exact; races and the real clock are tested at 1, 2, 4 and 16 Ps.

mod common;

use common::{child_test, cpu_time, once_in_five, rss, watchdog};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use trefoil::chan::{Receiver, RecvTimeoutError, TryRecvError, bounded, unbounded};
use trefoil::time::{Ticker, Timer, after, after_func, at, sleep, sleep_until, tick, timeout};
use trefoil::{Runtime, go, yield_now};

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Runs `f` in a runtime of each size.
fn at_all_sizes(f: impl Fn() + Send + Sync) {
    let _watchdog = watchdog();
    for procs in [1, 2, 4, 16] {
        Runtime::builder().procs(procs).build().unwrap().run(&f);
    }
}

#[test]
fn sleep_lasts_at_least_as_long_as_asked_despite_signals() {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: a handler that does nothing, for a signal that no other test here uses.
    unsafe { libc::signal(libc::SIGUSR1, nothing as *const () as usize) };
    let stop = Arc::new(AtomicBool::new(false));
    let signals = std::thread::spawn({
        let stop = stop.clone();
        move || {
            while !stop.load(Ordering::Relaxed) {
                // SAFETY: handled above.
                unsafe { libc::kill(libc::getpid(), libc::SIGUSR1) };
                std::thread::sleep(ms(1));
            }
        }
    });
    at_all_sizes(|| {
        let start = Instant::now();
        sleep(ms(50));
        assert!(start.elapsed() >= ms(50));
    });
    stop.store(true, Ordering::Relaxed);
    signals.join().unwrap();
}

#[trefoil::test(virtual_time)]
fn zero_and_past_times_fire_at_once_and_endless_ones_never() {
    let start = Instant::now();
    sleep(Duration::ZERO);
    sleep_until(start);
    sleep_until(start.checked_sub(ms(1)).unwrap());
    assert_eq!(after(Duration::ZERO).recv(), Ok(start));
    assert_eq!(start.elapsed(), Duration::ZERO);
    let longest = Timer::new(Duration::MAX);
    let year = Duration::from_secs(365 * 86_400);
    assert!(longest.chan().recv_timeout(year).is_err());
    assert!(longest.stop(), "the timer was set");
    assert!(!longest.reset(ms(1)), "the timer was stopped");
    assert_eq!(longest.chan().recv(), Ok(start + year + ms(1)));
    assert_eq!(start.elapsed(), year + ms(1));
}

#[test]
fn sleep_and_timers_work_on_plain_threads() {
    let _watchdog = watchdog();
    let start = Instant::now();
    sleep(ms(20));
    assert!(start.elapsed() >= ms(20));
    after(ms(1)).recv().unwrap();
    let (tx, rx) = bounded(1);
    let timer = after_func(ms(1), move || tx.send(()).unwrap());
    rx.recv().unwrap();
    assert!(!timer.stop());
}

#[test]
fn after_func_may_be_called_in_an_after_func() {
    fn link(left: usize, done: trefoil::chan::Sender<()>) {
        if left == 0 {
            done.send(()).unwrap();
        } else {
            after_func(Duration::from_micros(10), move || link(left - 1, done));
        }
    }
    at_all_sizes(|| {
        let (tx, rx) = bounded(0);
        link(100, tx);
        rx.recv().unwrap();
    });
}

#[trefoil::test(virtual_time)]
fn after_func_can_be_stopped_and_runs_after_its_handle_is_dropped() {
    let start = Instant::now();
    let (tx, rx) = unbounded();
    let stopped = after_func(ms(50), {
        let tx = tx.clone();
        move || tx.send(("stopped", start.elapsed())).unwrap()
    });
    sleep(ms(49));
    assert!(stopped.stop() && !stopped.stop());
    drop(after_func(ms(1), move || tx.send(("without a handle", start.elapsed())).unwrap()));
    assert_eq!(rx.recv(), Ok(("without a handle", ms(50))));
    assert_eq!(rx.recv_timeout(ms(1000)), Err(RecvTimeoutError::Timeout));
}

#[trefoil::test(virtual_time)]
fn sleepers_wake_at_their_deadlines() {
    let (tx, rx) = unbounded();
    let start = Instant::now();
    for n in [5, 1, 4, 2, 3, 9, 7, 8, 6] {
        let tx = tx.clone();
        go(move || {
            sleep_until(start + ms(20 + n * 10));
            tx.send((n, start.elapsed())).unwrap();
        });
    }
    drop(tx);
    let expected: Vec<_> = (1..=9).map(|n| (n, ms(20 + n * 10))).collect();
    assert_eq!(rx.iter().collect::<Vec<_>>(), expected);
}

#[trefoil::test(virtual_time)]
fn a_ticker_keeps_its_pace_and_drops_ticks_that_are_not_received() {
    let start = Instant::now();
    let ticker = Ticker::new(ms(10));
    for i in 1..=10 {
        assert_eq!(ticker.chan().recv(), Ok(start + i * ms(10)));
        assert_eq!(start.elapsed(), i * ms(10));
    }
    // A receiver that is late for a tick gets it, and then the next one in time.
    sleep(ms(35));
    assert_eq!(ticker.chan().len(), 1, "ticks have piled up");
    assert_eq!(ticker.chan().recv(), Ok(start + ms(110)));
    assert_eq!(ticker.chan().recv(), Ok(start + ms(140)));
    sleep(ms(15));
    ticker.stop();
    assert!(ticker.chan().try_recv().is_err(), "a tick is left after stop");
    assert!(ticker.chan().recv_timeout(ms(1000)).is_err(), "the ticker ticks after stop");
    let now = Instant::now();
    ticker.reset(ms(1));
    assert_eq!(ticker.chan().recv(), Ok(now + ms(1)));
}

#[test]
#[should_panic(expected = "non-positive interval")]
fn a_ticker_with_an_interval_of_zero_panics() {
    Ticker::new(Duration::ZERO);
}

#[test]
fn hundreds_of_short_lived_tickers_tick() {
    at_all_sizes(|| {
        let workers: Vec<_> = (0..8)
            .map(|i| {
                go(move || {
                    for k in 0..50 {
                        let ticker = Ticker::new(Duration::from_micros(50 + i * 10 + k));
                        ticker.chan().recv().unwrap();
                        if k % 2 == 0 {
                            ticker.stop();
                        }
                    }
                })
            })
            .collect();
        workers.into_iter().for_each(|h| h.join().unwrap());
    });
}

/// After `stop` the channel holds no value, whether the timer had fired or not.
#[test]
fn stop_leaves_no_value_behind_while_timers_fire() {
    at_all_sizes(|| {
        // Go's numbers; fewer in a debug build.
        let (rounds, n) = if cfg!(debug_assertions) { (200, 50) } else { (1000, 100) };
        for round in 0..rounds {
            let timers: Vec<_> =
                (0..n).map(|i| Timer::new(Duration::from_micros(round % 7 * 10 + i))).collect();
            for timer in &timers {
                yield_now();
                // There is no receiver: the value of a fired timer is in the channel until `stop`.
                assert!(timer.stop());
                assert!(timer.chan().try_recv().is_err(), "a stale value");
                assert!(!timer.stop());
                timer.reset(Duration::from_micros(1));
            }
            for timer in &timers {
                timer.chan().recv().unwrap();
                assert!(!timer.stop());
            }
        }
    });
}

/// An `after_func` is called although two goroutines keep the only P busy by turns.
#[test]
fn ping_pong_does_not_starve_timers() {
    let _watchdog = watchdog();
    Runtime::builder().procs(1).build().unwrap().run(|| {
        let (ping, pong) = (bounded::<()>(0), bounded::<()>(0));
        let stop = Arc::new(AtomicBool::new(false));
        let partner = go({
            let (ping, pong) = (ping.1.clone(), pong.0.clone());
            move || {
                while ping.recv().is_ok() {
                    if pong.send(()).is_err() {
                        break;
                    }
                }
            }
        });
        let called = stop.clone();
        after_func(ms(20), move || called.store(true, Ordering::Relaxed));
        let start = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            ping.0.send(()).unwrap();
            pong.1.recv().unwrap();
            assert!(start.elapsed() < Duration::from_secs(20), "the timer is starved");
        }
        drop(ping);
        partner.join().unwrap();
    });
}

#[test]
fn every_one_of_many_timers_fires() {
    let n = if cfg!(debug_assertions) { 20_000 } else { 200_000 };
    let _watchdog = watchdog();
    Runtime::builder().procs(4).build().unwrap().run(move || {
        let fired = Arc::new(AtomicUsize::new(0));
        let start = Instant::now();
        for i in 0..n {
            let fired = fired.clone();
            after_func(Duration::from_micros(i as u64 % 1000), move || {
                fired.fetch_add(1, Ordering::Relaxed);
            });
        }
        while fired.load(Ordering::Relaxed) < n {
            sleep(ms(1));
            assert!(start.elapsed() < Duration::from_secs(50), "{fired:?} of {n}");
        }
    });
}

/// Each of these waits leaves a dead entry in the timer heap, which is swept meanwhile.
#[test]
fn waits_that_end_long_before_their_deadline_lose_no_value() {
    let _watchdog = watchdog();
    Runtime::builder().procs(2).build().unwrap().run(|| {
        let (tx, rx) = bounded(0);
        let n = if cfg!(debug_assertions) { 20_000 } else { 200_000 };
        let sender = go(move || (0..n).for_each(|i| tx.send(i).unwrap()));
        for i in 0..n {
            assert_eq!(rx.recv_timeout(Duration::from_secs(3600)), Ok(i));
        }
        sender.join().unwrap();
    });
}

#[trefoil::test(virtual_time)]
fn timeout_returns_the_value_or_an_error_and_propagates_a_panic() {
    let start = Instant::now();
    let slow = |takes| {
        move || {
            sleep(takes);
            7
        }
    };
    assert_eq!(timeout(ms(60), slow(ms(59))), Ok(7));
    assert_eq!(start.elapsed(), ms(59));
    assert_eq!(timeout(ms(1), slow(ms(2))).unwrap_err().to_string(), "timed out");
    assert_eq!(start.elapsed(), ms(60));
    let panic = std::panic::catch_unwind(|| {
        let _ = timeout(ms(60), || std::panic::resume_unwind(Box::new(5)));
    });
    assert_eq!(panic.unwrap_err().downcast_ref(), Some(&5));
    sleep(ms(1)); // The slow one ends, too.
}

#[test]
fn a_sleeping_runtime_uses_no_cpu() {
    child_test!();
    trefoil::run(|| {
        // The first second may include the end of the start-up.
        once_in_five(|| {
            let before = cpu_time();
            sleep(Duration::from_secs(1));
            let used = cpu_time() - before;
            if used < ms(10) { Ok(()) } else { Err(format!("{used:?} of CPU time in a second")) }
        });
    });
}

/// Asserts that `chan` has no value, gets none, and is not closed.
fn assert_open_and_empty(chan: &Receiver<Instant>) {
    assert!(!chan.is_closed());
    assert_eq!(chan.try_recv(), Err(TryRecvError::Empty));
    assert_eq!(chan.recv_timeout(Duration::from_micros(10)), Err(RecvTimeoutError::Timeout));
}

#[test]
fn the_channel_of_after_is_open_and_empty_after_its_value() {
    at_all_sizes(|| {
        let fired: Vec<_> = (0..100).map(|_| after(Duration::from_nanos(1))).collect();
        fired.iter().for_each(|chan| _ = chan.recv().unwrap());
        // These reuse the memory of the fired timers.
        let later: Vec<_> = (0..300).map(|_| after(Duration::from_nanos(1))).collect();
        later.iter().for_each(|chan| _ = chan.recv().unwrap());
        fired.iter().chain(&later).for_each(assert_open_and_empty);
    });
}

#[test]
fn a_loop_chooses_the_arm_of_a_fired_after_once() {
    at_all_sizes(|| {
        let (chan, mut fired) = (after(ms(1)), 0);
        // Starts and drops other timers meanwhile, as programs do.
        for _ in 0..20 {
            trefoil::select! {
                recv(chan) -> _ => fired += 1,
                recv(after(ms(1))) -> _ => {}
            }
        }
        assert_eq!(fired, 1);
    });
}

#[trefoil::test(virtual_time)]
fn the_channels_of_stopped_and_dropped_timers_stay_open() {
    let (timer, ticker) = (Timer::new(ms(1)), Ticker::new(ms(1)));
    let chans = [timer.chan().clone(), ticker.chan().clone()];
    chans.iter().for_each(|chan| _ = chan.recv().unwrap());
    timer.stop();
    ticker.stop();
    chans.iter().for_each(assert_open_and_empty);
    // Dropping them neither closes their channels nor wakes a receiver.
    let start = Instant::now();
    let waiter = go({
        let chan = chans[0].clone();
        move || chan.recv_timeout(ms(10))
    });
    sleep(ms(1));
    drop((timer, ticker));
    assert_eq!(waiter.join().unwrap(), Err(RecvTimeoutError::Timeout));
    assert_eq!(start.elapsed(), ms(10));
    chans.iter().for_each(assert_open_and_empty);
}

#[test]
#[ignore = "takes long"]
fn channels_of_timers_are_freed() {
    // The memory of the process is measured.
    child_test!();
    at_all_sizes(|| {
        let rounds = |n| {
            for i in 0..n {
                match i % 4 {
                    0 => drop(after(Duration::from_nanos(1))), // fires without a receiver
                    1 => drop(after(Duration::from_nanos(1)).recv().unwrap()),
                    2 => drop(Timer::new(ms(1)).chan().clone()),
                    // The ticker is dropped first.
                    _ => {
                        let chan = Ticker::new(ms(1)).chan().clone();
                        drop(chan);
                    }
                }
            }
        };
        rounds(10_000);
        let before = rss();
        rounds(100_000);
        let grown = rss().saturating_sub(before);
        assert!(grown < 4 << 20, "{grown} bytes more are resident");
    });
}

#[test]
fn the_time_that_a_timer_sends_is_past_when_it_is_received() {
    let _watchdog = watchdog();
    // Each runtime reads the clocks anew when it starts.
    for _ in 0..50 {
        Runtime::builder().procs(2).build().unwrap().run(|| {
            for _ in 0..20 {
                let set = Instant::now();
                let fired = after(Duration::from_micros(1)).recv().unwrap();
                let received = Instant::now();
                assert!(fired <= received, "sent a time {:?} in the future", fired - received);
                assert!(fired >= set + Duration::from_micros(1), "sent a time before the deadline");
            }
        });
    }
}

#[test]
fn a_timer_with_a_function_calls_it_after_every_reset() {
    at_all_sizes(|| {
        let (tx, rx) = unbounded();
        let timer = Timer::with_func(Duration::ZERO, move || tx.send(()).unwrap());
        for _ in 0..20 {
            rx.recv().unwrap();
            assert!(!timer.reset(Duration::from_micros(10)), "it had fired");
        }
        rx.recv().unwrap();
        assert!(!timer.stop(), "it had fired");
        assert!(!timer.reset(Duration::from_secs(60)), "it was stopped");
        assert!(timer.reset(Duration::from_secs(60)), "it was set");
        assert!(timer.stop() && !timer.stop());
        assert!(rx.try_recv().unwrap_err().is_empty());
    });
}

/// Exactly the settings that `reset` and `stop` do not report as put off are called.
#[test]
fn reset_beside_firing_neither_loses_nor_doubles_a_call() {
    at_all_sizes(|| {
        let calls = Arc::new(AtomicUsize::new(0));
        let counter = calls.clone();
        let timer = Timer::with_func(Duration::ZERO, move || {
            counter.fetch_add(1, Ordering::Relaxed);
        });
        let rounds = if cfg!(debug_assertions) { 2_000 } else { 20_000 };
        let mut expected = 0;
        for round in 0..rounds {
            // The setting of the last round fires at about this moment.
            let put_off = match round % 3 {
                0 => timer.reset(Duration::from_micros(round % 5)),
                1 => timer.reset(Duration::ZERO),
                _ => {
                    let stopped = timer.stop();
                    assert!(!timer.reset(Duration::ZERO), "neither set nor fired after `stop`");
                    stopped
                }
            };
            expected += usize::from(!put_off);
            if round % 4 == 0 {
                yield_now();
            }
        }
        // The last setting is called, or was stopped.
        expected += usize::from(!timer.stop());
        let start = Instant::now();
        while calls.load(Ordering::Relaxed) < expected {
            sleep(ms(1));
            assert!(start.elapsed() < Duration::from_secs(30), "{calls:?} of {expected}");
        }
        sleep(ms(2));
        assert_eq!(calls.load(Ordering::Relaxed), expected);
    });
}

#[test]
fn a_function_may_reset_and_stop_its_own_timer() {
    at_all_sizes(|| {
        let (tx, rx) = unbounded();
        let own = Arc::new(OnceLock::<Timer>::new());
        let (weak, calls) = (Arc::downgrade(&own), AtomicUsize::new(0));
        let timer = Timer::with_func(Duration::from_secs(60), move || {
            let Some(own) = weak.upgrade() else { return };
            let timer = own.wait();
            let call = calls.fetch_add(1, Ordering::Relaxed);
            tx.send((call, timer.stop(), call < 10 && timer.reset(Duration::ZERO))).unwrap();
        });
        own.set(timer).unwrap();
        assert!(own.wait().reset(Duration::ZERO));
        // Calls overlap: each resets the timer before it tells.
        let mut calls: Vec<_> = rx.iter().take(11).collect();
        calls.sort_unstable();
        let expected: Vec<_> = (0..=10).map(|call| (call, false, false)).collect();
        assert_eq!(calls, expected, "the timer had fired when it was called");
        sleep(ms(2));
        assert!(rx.try_recv().is_err(), "the last call did not reset the timer");
    });
}

/// What a function owns is dropped when it can be called no more.
#[test]
fn the_function_of_a_dropped_timer_is_dropped_after_its_last_call() {
    at_all_sizes(|| {
        let (tx, rx) = bounded(1);
        let timer = Timer::with_func(ms(1), move || tx.send(()).unwrap());
        drop(timer);
        assert_eq!(rx.iter().count(), 1, "the call comes, and then the sender is dropped");

        let (tx, rx) = bounded::<()>(1);
        let timer = Timer::with_func(Duration::from_secs(60), move || tx.send(()).unwrap());
        timer.stop();
        drop(timer);
        assert!(rx.recv().is_err(), "a stopped timer drops its function at once");
    });
}

#[trefoil::test(virtual_time)]
fn at_fires_at_its_time_and_at_once_if_that_is_past() {
    let when = Instant::now() + ms(5);
    assert_eq!(at(when).recv(), Ok(when));
    assert_eq!(Instant::now(), when);
    for past in [Duration::ZERO, ms(1)] {
        let now = Instant::now();
        let chan = trefoil::chan::at(now.checked_sub(past).unwrap());
        assert_eq!(chan.recv(), Ok(now));
        assert_open_and_empty(&chan);
    }
}

#[trefoil::test(virtual_time)]
fn tick_delivers_in_time_and_leaves_out_ticks_that_are_not_received() {
    let start = Instant::now();
    let ticks = tick(ms(2));
    for i in 1..=3 {
        assert_eq!(ticks.recv(), Ok(start + i * ms(2)));
        assert_eq!(start.elapsed(), i * ms(2));
    }
    sleep(ms(21));
    assert_eq!(ticks.len(), 1, "ticks have piled up");
    let clone = ticks.clone();
    drop(ticks);
    assert_eq!(clone.recv(), Ok(start + ms(8)));
    assert_eq!(clone.recv(), Ok(start + ms(28)));
    assert!(!clone.is_closed());
    drop(clone);
    assert!(tick(Duration::MAX).recv_timeout(Duration::from_secs(3600)).is_err());
}

#[test]
#[should_panic(expected = "non-positive interval")]
fn tick_with_an_interval_of_zero_panics() {
    tick(Duration::ZERO);
}

/// Receivers are dropped at about the moment of a tick. The slots of the timers are reused.
#[test]
fn tick_stops_when_its_receivers_are_dropped() {
    // The memory of the process is measured.
    child_test!();
    at_all_sizes(|| {
        let rounds = |n: u64| {
            let workers = (0..4).map(|worker| {
                go(move || {
                    for i in 0..n / 4 {
                        let ticks = tick(Duration::from_micros(1 + (i + worker) % 50));
                        let other = ticks.clone();
                        match i % 3 {
                            0 => drop(ticks.recv().unwrap()),
                            1 => drop(ticks.recv_timeout(Duration::from_micros(i % 7))),
                            _ => {}
                        }
                        drop(ticks);
                        drop(other);
                    }
                })
            });
            let workers: Vec<_> = workers.collect();
            workers.into_iter().for_each(|worker| worker.join().unwrap());
            // The last ones fire and end.
            sleep(ms(1));
        };
        rounds(4_000);
        let before = rss();
        rounds(common::rounds(8_000, 20_000));
        let grown = rss().saturating_sub(before);
        assert!(grown < 4 << 20, "{grown} bytes more are resident");
        once_in_five(|| {
            let before = cpu_time();
            sleep(ms(100));
            let used = cpu_time() - before;
            if used < ms(20) { Ok(()) } else { Err(format!("{used:?} of CPU time in 100 ms")) }
        });
    });
}
