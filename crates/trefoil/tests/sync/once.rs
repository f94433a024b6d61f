//! `Once` and `OnceLock`.

use super::common::{MS, watchdog, yield_until};
use super::{mixed, on_every, panic_text};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;
use trefoil::go;
use trefoil::sync::{LazyLock, Once, OnceLock, OnceState, once_fn};
use trefoil::time::sleep;

/// Go: TestOnce.
#[test]
fn call_once_runs_once_and_all_callers_see_its_effect() {
    let _w = watchdog();
    on_every(|| {
        let once = Arc::new(Once::new());
        let (calls, value) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        mixed(10, {
            let (once, calls, value) = (once.clone(), calls.clone(), value.clone());
            move |_| {
                once.call_once(|| {
                    calls.fetch_add(1, SeqCst);
                    sleep(MS);
                    value.store(7, SeqCst);
                });
                assert_eq!(value.load(SeqCst), 7);
            }
        });
        assert_eq!(calls.load(SeqCst), 1);
        assert!(once.is_completed());
    });
}

#[test]
fn a_panic_in_call_once_poisons_it_for_waiting_callers_too() {
    let _w = watchdog();
    on_every(|| {
        let once = Arc::new(Once::new());
        let begun = Arc::new(AtomicBool::new(false));
        let first = go({
            let (once, begun) = (once.clone(), begun.clone());
            move || {
                once.call_once(|| {
                    begun.store(true, SeqCst);
                    sleep(2 * MS);
                    panic!("on purpose");
                });
            }
        });
        yield_until("the call to begin", || begun.load(SeqCst));
        let refused = || panic_text(|| once.call_once(|| panic!("called twice")));
        assert!(refused().contains("poisoned"));
        assert!(first.join().is_err());
        assert!(refused().contains("poisoned"));
        assert!(panic_text(|| once.wait()).contains("poisoned"));
        assert_eq!((once.state(), once.is_completed()), (OnceState::Poisoned, false));

        once.call_once_force(|state| assert!(state.is_poisoned()));
        once.call_once_force(|_| panic!("called twice"));
        once.call_once(|| panic!("called twice"));
        assert_eq!((once.state(), once.is_completed()), (OnceState::Done, true));
    });
}

#[test]
fn call_once_force_retries_until_a_closure_returns() {
    let _w = watchdog();
    on_every(|| {
        let (once, calls) = (Arc::new(Once::new()), Arc::new(AtomicUsize::new(0)));
        let effect = Arc::new(AtomicUsize::new(0));
        let waiter = go({
            let (once, effect) = (once.clone(), effect.clone());
            move || {
                once.wait_force();
                assert_eq!(effect.load(SeqCst), 1);
            }
        });
        mixed(10, {
            let (once, calls, effect) = (once.clone(), calls.clone(), effect.clone());
            move |_| {
                // The first two closures panic.
                let call = || {
                    once.call_once_force(|state| {
                        let earlier = calls.fetch_add(1, SeqCst);
                        assert_eq!(state.is_poisoned(), earlier > 0);
                        sleep(Duration::from_micros(200));
                        assert!(earlier >= 2, "on purpose");
                        effect.fetch_add(1, SeqCst);
                    });
                };
                while catch_unwind(AssertUnwindSafe(call)).is_err() {}
                assert_eq!(effect.load(SeqCst), 1);
            }
        });
        waiter.join().unwrap();
        assert_eq!(calls.load(SeqCst), 3);
    });
}

#[test]
fn wait_returns_when_a_later_call_has_returned() {
    let _w = watchdog();
    on_every(|| {
        let (once, place) = (Arc::new(Once::new()), Arc::new(OnceLock::new()));
        let waiters: Vec<_> = (0..10)
            .map(|_| {
                let (once, place) = (once.clone(), place.clone());
                go(move || {
                    once.wait();
                    *place.wait()
                })
            })
            .collect();
        sleep(MS);
        assert!(waiters.iter().all(|w| !w.is_finished()));
        once.call_once(|| sleep(MS));
        place.set(7).unwrap();
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap(), 7);
        }
    });
}

#[test]
fn a_lazy_lock_is_made_once_and_stays_poisoned_after_a_panic() {
    let _w = watchdog();
    on_every(|| {
        let made = Arc::new(AtomicUsize::new(0));
        let lazy = Arc::new(LazyLock::new({
            let made = made.clone();
            move || {
                sleep(MS);
                vec![made.fetch_add(1, SeqCst) + 1]
            }
        }));
        assert_eq!(format!("{lazy:?}"), "LazyLock(<uninit>)");
        mixed(10, {
            let lazy = lazy.clone();
            move |_| assert_eq!(**lazy, [1])
        });
        assert_eq!((made.load(SeqCst), format!("{lazy:?}")), (1, "LazyLock([1])".into()));

        let fails: LazyLock<u32> = LazyLock::new(|| panic!("on purpose"));
        assert_eq!(panic_text(|| drop(LazyLock::force(&fails).to_string())), "on purpose");
        assert!(panic_text(|| drop(fails.to_string())).contains("poisoned"));
    });
    // The closure, or the value, is dropped once.
    let token = Arc::new(());
    let closure = {
        let token = token.clone();
        move || token
    };
    drop(LazyLock::new(closure.clone()));
    let lazy = LazyLock::new(closure);
    assert_eq!(Arc::strong_count(&lazy), 2);
    drop(lazy);
    assert_eq!(Arc::strong_count(&token), 1);
}

/// Go: TestOnceFunc, TestOnceValue, TestOnceFuncPanic, TestOnceFuncPanicTraceback.
#[test]
fn once_fn_calls_once_and_repeats_its_result_and_its_panic() {
    let _w = watchdog();
    on_every(|| {
        let calls = Arc::new(AtomicUsize::new(0));
        let value = Arc::new(once_fn({
            let calls = calls.clone();
            move || {
                sleep(MS);
                calls.fetch_add(1, SeqCst);
                "value".to_owned()
            }
        }));
        mixed(10, move |_| assert_eq!(value(), "value"));
        assert_eq!(calls.load(SeqCst), 1);

        let fails = Arc::new(once_fn({
            let calls = calls.clone();
            move || -> u32 {
                sleep(MS);
                panic!("call {}", calls.fetch_add(1, SeqCst))
            }
        }));
        mixed(10, move |_| assert_eq!(panic_text(|| _ = fails()), "call 1"));
        assert_eq!(calls.load(SeqCst), 2);

        let fails = once_fn(|| std::panic::panic_any(7));
        let payload = catch_unwind(AssertUnwindSafe(&fails)).unwrap_err();
        assert_eq!(payload.downcast_ref(), Some(&7));
        assert_eq!(panic_text(&fails), "the closure of once_fn has panicked");
    });
}

#[test]
fn a_once_lock_keeps_one_value_and_retries_after_panics() {
    let _w = watchdog();
    on_every(|| {
        let place = Arc::new(OnceLock::new());
        let made = Arc::new(AtomicUsize::new(0));
        mixed(10, {
            let (place, made) = (place.clone(), made.clone());
            move |i| {
                // The first two calls panic; the third initialises the cell.
                let get = || {
                    *place.get_or_init(|| {
                        sleep(Duration::from_micros(200));
                        assert!(made.fetch_add(1, SeqCst) >= 2, "on purpose");
                        vec![i; 100].len()
                    })
                };
                let value = catch_unwind(AssertUnwindSafe(get)).unwrap_or_else(|_| get_again(&get));
                assert_eq!(value, 100);
            }
        });
        assert_eq!(made.load(SeqCst), 3);
        assert_eq!(place.get(), Some(&100));
        assert_eq!(place.set(1), Err(1));
    });
    fn get_again(get: &dyn Fn() -> usize) -> usize {
        catch_unwind(AssertUnwindSafe(get)).unwrap_or_else(|_| get())
    }
    // The value inside is dropped once.
    let value = Arc::new(());
    let place = OnceLock::from(value.clone());
    assert_eq!(Arc::strong_count(&value), 2);
    drop(place);
    let mut place = OnceLock::from(value.clone());
    assert!(place.take().is_some() && place.take().is_none());
    drop(place);
    assert_eq!(Arc::strong_count(&value), 1);
}
