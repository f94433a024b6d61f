//! `#[trefoil::test(leaks = "deny")]`: every goroutine and task that a test leaves is named,
//! whatever other tests do at the same time.

use crate::common::{self, watchdog};
use std::time::Duration;
use trefoil::chan::bounded;
use trefoil::sync::Mutex;
use trefoil::time::sleep;
use trefoil::{Builder, Runtime, go, scope, task};

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

#[trefoil::test(leaks = "deny")]
fn a_test_that_joins_everything_passes() {
    let _w = watchdog();
    let handles: Vec<_> = (0..100).map(|_| go(|| sleep(ms(1)))).collect();
    handles.into_iter().for_each(|handle| handle.join().unwrap());
    scope(|s| {
        s.go(|| sleep(ms(1)));
    });
    assert_eq!(task::spawn(async { 6 * 7 }).join().unwrap(), 42);
}

#[trefoil::test(leaks = "deny", procs = 1)]
fn goroutines_that_are_about_to_end_may_do_so() -> Result<(), String> {
    let _w = watchdog();
    for i in 0..200 {
        // Detached. The waits are shorter than what counts as a leak, and the last one computes.
        go(move || sleep(ms(i % 20)));
    }
    go(|| common::spin(ms(30)));
    Ok(())
}

#[trefoil::test(leaks = "deny")]
#[should_panic(
    expected = "\"forgotten\" [chan receive] created at crates/trefoil/tests/debug/leaks.rs:"
)]
fn a_goroutine_that_waits_for_ever_is_a_leak() {
    let _w = watchdog();
    let (tx, rx) = bounded::<()>(0);
    Builder::new().name("forgotten").go(move || rx.recv()).unwrap();
    std::mem::forget(tx);
}

#[trefoil::test(leaks = "deny")]
#[should_panic(expected = "the test has left 1 goroutines or tasks:\n  task ")]
fn a_task_that_waits_for_ever_is_a_leak() {
    let _w = watchdog();
    task::spawn(std::future::pending::<()>());
}

#[trefoil::test(leaks = "deny")]
#[should_panic(expected = "waits for Mutex ")]
fn a_leak_says_what_it_waits_for() {
    let _w = watchdog();
    static M: Mutex<()> = Mutex::new(());
    std::mem::forget(M.lock());
    go(|| drop(M.lock()));
}

#[trefoil::test(leaks = "deny")]
#[should_panic(expected = "the test itself")]
fn a_panic_of_the_test_comes_before_its_leaks() {
    let _w = watchdog();
    go(|| sleep(Duration::MAX));
    panic!("the test itself");
}

/// Tests with and without leaks at the same time: each knows its own goroutines only.
#[test]
fn leaks_of_parallel_tests_are_not_mixed() {
    let _w = watchdog();
    let run = |leaks: usize| {
        std::panic::catch_unwind(|| {
            let rt = Runtime::builder().procs(2).build().unwrap();
            rt.run(move || {
                trefoil::debug::deny_leaks(|| {
                    for i in 0..leaks {
                        let name = format!("leak {i} of {leaks}");
                        Builder::new().name(name).go(|| sleep(Duration::MAX)).unwrap();
                    }
                    for _ in 0..50 {
                        go(|| sleep(ms(2)));
                    }
                });
            });
        })
    };
    let run = &run;
    std::thread::scope(|s| {
        let runs: Vec<_> = (0..6).map(|leaks| s.spawn(move || run(leaks))).collect();
        for (leaks, run) in runs.into_iter().enumerate() {
            let Err(payload) = run.join().unwrap() else {
                assert_eq!(leaks, 0);
                continue;
            };
            let text = payload.downcast_ref::<String>().expect("a message");
            assert!(text.starts_with(&format!("the test has left {leaks} goroutines")), "{text}");
            assert_eq!(text.matches(&format!(" of {leaks}\" [sleep]")).count(), leaks, "{text}");
        }
    });
}
