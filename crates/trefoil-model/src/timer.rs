//! Checks of timers (`time/slot.rs`, `time/timer.rs`): a stop or a reset meets the firing.
//!
//! The heap is a list whose settings may fire at any time. The channel is the real one.

use crate::explore::{Bound, explore, must_fail};
use crate::sched::Order::AsWritten;
use crate::sched::timers::{Setting, fire, take_settings};
use crate::sched::{go, i_am};
use crate::shim::{AtomicU32, Mutation, Ordering};
use crate::time::{Backwards, Ticker, Timer, after_func};
use loom::thread::JoinHandle;
use std::sync::Arc;
use std::time::Duration;

/// Any time: the heap decides.
const SOON: Duration = Duration::from_nanos(1);

fn timer() -> Arc<Timer> {
    i_am(0, AsWritten);
    Arc::new(Timer::new(SOON))
}

/// The time of what is set now comes, at some moment.
fn clock(number: usize) -> JoinHandle<()> {
    let settings = take_settings();
    assert!(!settings.is_empty());
    go(number, AsWritten, move || fire(settings))
}

/// After `stop` there is no value, and none comes. Nobody receives, so it was in time.
pub fn stop_against_fire() {
    explore(Bound::All, || {
        let timer = timer();
        let clock = clock(1);
        assert!(timer.stop(), "nobody has received the value");
        assert!(timer.chan().try_recv().is_err(), "a stale value");
        clock.join().unwrap();
        assert!(timer.chan().try_recv().is_err(), "a value came after stop");
        assert!(!timer.stop());
    });
}

/// After `reset` there is no value of the earlier setting, and none comes; the new one fires.
pub fn reset_against_fire() {
    explore(Bound::All, || {
        let timer = timer();
        let clock = clock(1);
        assert!(timer.reset(SOON));
        assert!(timer.chan().try_recv().is_err(), "a stale value");
        clock.join().unwrap();
        assert!(timer.chan().try_recv().is_err(), "a value of the earlier setting");
        fire(take_settings());
        assert!(timer.chan().try_recv().is_ok(), "the new setting was lost");
    });
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

/// Two stop it: one of them was in time.
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

/// A ticker sets itself anew while it fires. After `stop` that is over.
pub fn ticker_stop_against_fire() {
    explore(Bound::All, || {
        i_am(0, AsWritten);
        let ticker = Ticker::new(SOON);
        let clock = clock(1);
        ticker.stop();
        assert!(ticker.chan().try_recv().is_err(), "a stale tick");
        clock.join().unwrap();
        fire(take_settings());
        assert!(ticker.chan().try_recv().is_err(), "a tick after stop");
        ticker.reset(SOON);
        fire(take_settings());
        assert!(ticker.chan().try_recv().is_ok(), "no tick after reset");
    });
}

/// A function is called, or `stop` was in time.
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
        fire(take_settings());
        assert_eq!(calls.load(Ordering::Relaxed), u32::from(!in_time));
    });
}

/// Teeth: who takes the value out first and stops the timer then.
pub fn teeth_drained_before_stopped() {
    must_fail(Mutation::None, || {
        explore(Bound::All, || {
            i_am(0, AsWritten);
            let timer = Backwards::new();
            let clock = clock(1);
            timer.stop();
            assert!(timer.receiver.try_recv().is_err(), "a stale value");
            clock.join().unwrap();
        });
    });
}

/// Teeth: a setting that does not look at its number.
pub fn teeth_unnumbered_setting() {
    must_fail(Mutation::None, || {
        explore(Bound::All, || {
            let timer = timer();
            let settings = take_settings();
            let clock = go(1, AsWritten, move || {
                // Whichever number is the present one.
                let anew: Vec<Setting> = settings
                    .into_iter()
                    .map(|(alarm, _)| (alarm, (0..9).find(|&n| alarm.is_current(n)).unwrap_or(0)))
                    .collect();
                fire(anew);
            });
            timer.stop();
            clock.join().unwrap();
            assert!(timer.chan().try_recv().is_err(), "a value came after stop");
        });
    });
}
