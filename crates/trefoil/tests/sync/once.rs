//! `Once` and `OnceLock`.

use super::common::{MS, watchdog, yield_until};
use super::{mixed, on_every};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;
use trefoil::go;
use trefoil::sync::{Once, OnceLock};
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

/// Go: TestOncePanic.
#[test]
fn a_panic_in_call_once_counts_as_done_for_waiting_callers_too() {
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
        once.call_once(|| panic!("called twice"));
        assert!(first.join().is_err());
        once.call_once(|| panic!("called twice"));
        assert!(once.is_completed());
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
