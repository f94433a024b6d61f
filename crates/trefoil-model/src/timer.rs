//! Checks of timers (`time/slot.rs`, `time/timer.rs`): a stop or a reset meets the firing.
//!
//! The heap is a list whose entries may become due at any moment. The channel is the real one.

use crate::explore::{Bound, explore, must_fail};
use crate::sched::Order::AsWritten;
use crate::sched::wait::timers::{Sweep, fire, sweep, take_entries};
use crate::sched::{go, i_am};
use crate::shim::{AtomicU32, Mutation, Ordering};
use crate::time::{DrainsFirst, Ticker, Timer, after_func, tick};
use loom::thread::JoinHandle;
use std::sync::Arc;
use std::time::Duration;

const SOON: Duration = Duration::from_nanos(1);
const LATER: Duration = Duration::from_nanos(2);

fn timer_of(d: Duration) -> Arc<Timer> {
    i_am(0, AsWritten);
    Arc::new(Timer::new(d))
}

fn timer() -> Arc<Timer> {
    timer_of(SOON)
}

/// Starts a goroutine that fires the timers that are set now.
fn clock(number: usize) -> JoinHandle<()> {
    fast_clock(number, 0)
}

/// As [`clock`], but the clock that the entries read is `by` nanoseconds fast.
fn fast_clock(number: usize, by: u64) -> JoinHandle<()> {
    let entries = take_entries();
    assert!(!entries.is_empty());
    go(number, AsWritten, move || fire(entries, by))
}

/// After `stop` the channel is empty and stays empty. No receiver took the value, so `stop` was in
/// time.
pub fn stop_against_fire() {
    explore(Bound::All, || {
        let timer = timer();
        let clock = clock(1);
        assert!(timer.stop(), "no receiver took the value");
        assert!(timer.chan().try_recv().is_err(), "a stale value");
        clock.join().unwrap();
        assert!(timer.chan().try_recv().is_err(), "a value came after stop");
        assert!(!timer.stop());
    });
}

/// After `reset` no value of the earlier setting is or arrives in the channel, and the new setting
/// fires.
fn reset_against(first: Duration, second: Duration, clock: impl FnOnce() -> JoinHandle<()>) {
    let timer = timer_of(first);
    let clock = clock();
    assert!(timer.reset(second));
    assert!(timer.chan().try_recv().is_err(), "a stale value");
    clock.join().unwrap();
    assert!(timer.chan().try_recv().is_err(), "a value of the earlier setting");
    fire(take_entries(), 0);
    assert!(timer.chan().try_recv().is_ok(), "the new setting was lost");
    fire(take_entries(), 0);
    assert!(timer.chan().try_recv().is_err(), "it fired twice");
}

/// A timer is set for later: its entry stays in the heap, becomes due too early, and is put back.
pub fn reset_later_against_fire() {
    explore(Bound::All, || reset_against(SOON, LATER, || clock(1)));
}

/// A timer is set for earlier: of its two entries one counts.
pub fn reset_earlier_against_fire() {
    explore(Bound::All, || reset_against(LATER, SOON, || clock(1)));
}

/// A stopped timer is set again while the heap is swept.
fn sweep_against_reset(how: Sweep) {
    explore(Bound::All, move || {
        let timer = timer();
        assert!(timer.stop());
        let sweeper = go(1, AsWritten, move || sweep(how));
        assert!(!timer.reset(LATER));
        sweeper.join().unwrap();
        fire(take_entries(), 0);
        // The first may have fired the entry of the first setting, which sets the entry again.
        fire(take_entries(), 0);
        assert!(timer.chan().try_recv().is_ok(), "the new setting was lost");
    });
}

/// A sweep of the heap drops a stopped timer's entry, while the timer is set again and relies on
/// that entry.
pub fn sweep_against_reset_later() {
    sweep_against_reset(Sweep::AsksTimers);
}

/// `stop` is in time, or the value was received: never both, never neither.
pub fn stop_against_recv() {
    explore(Bound::All, || {
        let timer = timer();
        let clock = clock(1);
        let receiver = go(2, AsWritten, {
            let timer = timer.clone();
            move || timer.chan().try_recv().is_ok()
        });
        let in_time = timer.stop();
        clock.join().unwrap();
        assert_ne!(in_time, receiver.join().unwrap());
    });
}

/// Two goroutines stop a timer: one of them was in time.
pub fn two_stops() {
    explore(Bound::All, || {
        let timer = timer();
        let clock = clock(1);
        let other = go(2, AsWritten, {
            let timer = timer.clone();
            move || timer.stop()
        });
        let mine = timer.stop();
        let theirs = other.join().unwrap();
        clock.join().unwrap();
        assert!(mine != theirs, "in time: {mine} and {theirs}");
        assert!(timer.chan().try_recv().is_err());
    });
}

/// A ticker sets itself again when it fires, but not after `stop`.
pub fn ticker_stop_against_fire() {
    explore(Bound::All, || {
        i_am(0, AsWritten);
        let ticker = Ticker::new(SOON);
        let clock = clock(1);
        ticker.stop();
        assert!(ticker.chan().try_recv().is_err(), "a stale tick");
        clock.join().unwrap();
        fire(take_entries(), 0);
        assert!(ticker.chan().try_recv().is_err(), "a tick after stop");
        ticker.reset(SOON);
        fire(take_entries(), 0);
        assert!(ticker.chan().try_recv().is_ok(), "no tick after reset");
    });
}

/// Either the function is called, or `stop` was in time.
pub fn function_against_stop() {
    explore(Bound::All, || {
        i_am(0, AsWritten);
        let calls = Arc::new(AtomicU32::new(0));
        let called = calls.clone();
        let timer = after_func(SOON, move || {
            called.fetch_add(1, Ordering::Relaxed);
        });
        let clock = clock(1);
        let in_time = timer.stop();
        clock.join().unwrap();
        fire(take_entries(), 0);
        assert_eq!(calls.load(Ordering::Relaxed), u32::from(!in_time));
    });
}

/// A function is called for each setting that `reset` has not put off.
pub fn function_against_reset() {
    for second in [SOON, LATER] {
        explore(Bound::All, move || {
            i_am(0, AsWritten);
            let calls = Arc::new(AtomicU32::new(0));
            let called = calls.clone();
            let timer = Timer::with_func(SOON, move || {
                called.fetch_add(1, Ordering::Relaxed);
            });
            let clock = clock(1);
            let put_off = timer.reset(second);
            clock.join().unwrap();
            // The first may fire the entry of the first setting, which sets the entry again.
            fire(take_entries(), 0);
            fire(take_entries(), 0);
            assert_eq!(calls.load(Ordering::Relaxed), 1 + u32::from(!put_off));
            assert!(!timer.stop(), "the second setting was lost");
        });
    }
}

/// The timer of a dropped function timer is set: its function is called once, or was called before.
pub fn function_against_drop() {
    explore(Bound::All, || {
        i_am(0, AsWritten);
        let calls = Arc::new(AtomicU32::new(0));
        let called = calls.clone();
        let timer = Timer::with_func(SOON, move || {
            called.fetch_add(1, Ordering::Relaxed);
        });
        let clock = clock(1);
        drop(timer);
        clock.join().unwrap();
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    });
}

/// A ticker without a handle ends at the first tick after its receiver was dropped.
pub fn tick_against_drop() {
    explore(Bound::All, || {
        i_am(0, AsWritten);
        let ticks = tick(SOON);
        let clock = clock(1);
        drop(ticks);
        clock.join().unwrap();
        fire(take_entries(), 0);
        assert!(take_entries().is_empty(), "it still ticks");
    });
}

/// Mutation check: a `stop` that drains the channel before it stops the timer.
pub fn detects_drain_before_stop() {
    must_fail(Mutation::None, || {
        explore(Bound::All, || {
            i_am(0, AsWritten);
            let timer = DrainsFirst::new();
            let clock = clock(1);
            timer.stop();
            assert!(timer.receiver.try_recv().is_err(), "a stale value");
            clock.join().unwrap();
        });
    });
}

/// Mutation check: a fast clock makes an entry fire although its timer was set for later.
pub fn detects_firing_without_time_check() {
    must_fail(Mutation::None, || {
        explore(Bound::All, || reset_against(SOON, LATER, || fast_clock(1, 9)));
    });
}

/// Mutation check: a sweep that drops an entry without telling the timer.
pub fn detects_unreported_sweep() {
    must_fail(Mutation::None, || sweep_against_reset(Sweep::AsksNoTimer));
}
