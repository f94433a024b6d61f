//! `debug::groups` tells goroutines, tasks and closures apart and knows the oldest of a group;
//! `debug::goroutines` has labels and times.

use crate::common::{watchdog, yield_until};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use trefoil::debug::{self, GoroutineGroup, Kind};
use trefoil::time::sleep;
use trefoil::{Runtime, go};

fn own_runtime() -> Runtime {
    Runtime::builder().procs(2).build().unwrap()
}

fn sleep_long() {
    sleep(Duration::from_secs(3600));
}

#[test]
fn the_oldest_of_a_group_is_named_and_the_mean_is_between() {
    let _w = watchdog();
    own_runtime().run(|| {
        let start = || go(sleep_long).id();
        let first = start();
        let group = |count: usize| {
            debug::groups().into_iter().find(|group| group.state == "sleep" && group.count == count)
        };
        yield_until("the first one to wait for long", || {
            group(1).is_some_and(|group| group.oldest >= Duration::from_millis(200))
        });
        let others: Vec<u64> = (0..3).map(|_| start()).collect();
        let mut found = None;
        yield_until("the others to wait", || {
            found = group(4);
            found.is_some()
        });
        let found = found.unwrap();
        assert_eq!((found.kind, found.oldest_id), (Kind::Goroutine, first), "{found}");
        assert!(found.mean < found.oldest && !found.mean.is_zero(), "{found:?}");
        assert_eq!(found.examples, [&[first], &others[..]].concat());
    });
}

#[test]
fn closures_and_kinds_are_groups_of_their_own() {
    let _w = watchdog();
    own_runtime().run(|| {
        fn begin(f: impl FnOnce() + Send + 'static) {
            go(f); // one place for all
        }
        begin(sleep_long);
        begin(sleep_long);
        #[allow(clippy::redundant_closure)] // Another function.
        begin(|| sleep_long());
        trefoil::task::spawn(std::future::pending::<()>());
        let mut groups = Vec::new();
        yield_until("all to wait", || {
            groups = debug::groups();
            // Only main runs.
            let waits = |group: &&GoroutineGroup| !["runnable", "running"].contains(&group.state);
            groups.len() == 4 && groups.iter().filter(waits).count() == 3
        });
        let counts = |kind| {
            let of_kind =
                groups.iter().filter(|group| group.kind == kind && group.state != "running");
            of_kind.map(|group| group.count).collect::<Vec<_>>()
        };
        assert_eq!(counts(Kind::Goroutine), [2, 1], "{groups:?}");
        assert_eq!(counts(Kind::Task), [1], "{groups:?}");
        let task = groups.iter().find(|group| group.kind == Kind::Task).unwrap();
        assert!(task.to_string().starts_with("1 tasks ["), "{task}");
    });
}

#[test]
fn goroutines_have_labels_and_times() {
    let _w = watchdog();
    own_runtime().run(|| {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let spin = move || {
            while !stopped.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
            sleep_long();
        };
        let spinner = trefoil::labels!("user" => "ann", "job" => 7; || go(spin));
        let find = |id| debug::goroutines().find(|g| g.who.id == id).unwrap();
        let pairs = |pairs: &[(&str, &str)]| {
            let owned = pairs.iter().map(|&(key, value)| (key.to_owned(), value.to_owned()));
            owned.collect::<Vec<_>>()
        };
        assert_eq!(find(spinner.id()).labels, pairs(&[("job", "7"), ("user", "ann")]));
        assert_eq!(find(trefoil::id()).labels, pairs(&[]));
        sleep(Duration::from_millis(300));
        yield_until("sysmon to see it run", || {
            find(spinner.id()).running >= Duration::from_millis(50)
        });
        let used = debug::usage().into_iter().find(|used| used.id == spinner.id()).unwrap();
        assert!(find(spinner.id()).running >= used.running);
        stop.store(true, Ordering::Relaxed);
    });
}

/// Computes for `time` and returns the CPU time that this has taken.
fn compute(time: Duration) -> Duration {
    let _stays_on_its_thread = trefoil::no_preempt();
    let cpu = || {
        let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: writes one timespec, ours.
        unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) };
        Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
    };
    let begin = cpu();
    loop {
        let used = cpu() - begin;
        if used >= time {
            return used;
        }
    }
}

#[test]
fn a_goroutine_that_mostly_sleeps_is_not_credited_with_its_sleep() {
    let _w = watchdog();
    own_runtime().run(|| {
        let mut used = Duration::ZERO;
        for _ in 0..60 {
            used += compute(Duration::from_millis(2));
            sleep(Duration::from_millis(15));
        }
        let id = trefoil::id();
        let found = debug::usage().into_iter().find(|found| found.id == id).unwrap();
        assert!((used / 3..2 * used).contains(&found.running), "{used:?} {found:?}");
        assert!(found.runnable < used, "{used:?} {found:?}");
    });
}
