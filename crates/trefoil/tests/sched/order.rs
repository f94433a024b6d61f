//! Which of many runnable goroutines runs next: woken before new before expired.

use crate::common::{flag, join_all, once_in_five, runtime, spin, watchdog};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use trefoil::{chan, go};

/// Returns how late sleeps of a millisecond end while `work` runs: all of a goroutine, sorted, and
/// the latest of an OS thread.
fn lateness(work: impl FnOnce()) -> (Vec<Duration>, Duration) {
    const MS: Duration = Duration::from_millis(1);
    let stop = flag();
    let measure = |stop: Arc<std::sync::atomic::AtomicBool>, sleep: fn(Duration)| {
        move || {
            let mut late = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let start = Instant::now();
                sleep(MS);
                late.push(start.elapsed().saturating_sub(MS));
            }
            late.sort();
            late
        }
    };
    let goroutine = go(measure(stop.clone(), trefoil::time::sleep));
    let thread = std::thread::spawn(measure(stop.clone(), std::thread::sleep));
    trefoil::time::sleep(20 * MS);
    work();
    stop.store(true, Ordering::Relaxed);
    let of_thread = trefoil::blocking(|| thread.join().unwrap());
    (goroutine.join().unwrap(), of_thread.last().copied().unwrap_or_default())
}

#[test]
fn a_sleeper_is_on_time_beside_two_thousand_new_goroutines_that_compute() {
    let _watchdog = watchdog();
    once_in_five(|| {
        runtime(2).run(|| {
            let (late, of_thread) = lateness(|| {
                join_all((0..2_000).map(|_| go(|| spin(Duration::from_micros(500)))));
            });
            let (p99, max) = (late[late.len() * 99 / 100], late[late.len() - 1]);
            // The machine delays goroutines at least as much as threads.
            // If the OS stops the thread of a P, the sleeper on it waits for a slice or two. In turn
            // with all others it would wait for half a second.
            let ok = p99 <= Duration::from_millis(20) + 2 * of_thread
                && max <= Duration::from_millis(60) + 2 * of_thread;
            if ok {
                Ok(())
            } else {
                Err(format!("p99 {p99:?}, max {max:?}, a thread {of_thread:?}"))
            }
        })
    });
}

#[test]
fn woken_goroutines_run_before_new_ones() {
    let _watchdog = watchdog();
    let attempt = || {
        let order = Arc::new(Mutex::new(Vec::new()));
        let note = |name: &'static str| {
            let order = order.clone();
            move || order.lock().unwrap().push(name)
        };
        let (wake, parked): (Vec<_>, Vec<_>) = (0..8).map(|_| chan::bounded::<()>(1)).unzip();
        let woken: Vec<_> = parked
            .into_iter()
            .map(|parked| {
                let note = note("woken");
                go(move || {
                    parked.recv().unwrap();
                    note();
                })
            })
            .collect();
        trefoil::time::sleep(Duration::from_millis(20));
        let new_ones: Vec<_> = {
            // Otherwise the new ones run before the others are woken, if the slice ends here.
            let _held = trefoil::no_preempt();
            let new_ones = (0..32).map(|_| go(note("new"))).collect();
            wake.iter().for_each(|wake| wake.send(()).unwrap());
            new_ones
        };
        join_all(new_ones.into_iter().chain(woken));
        let order = order.lock().unwrap();
        let last_woken = order.iter().rposition(|&name| name == "woken").unwrap();
        // Every 16th turn belongs to a new goroutine.
        let text = || format!("the last woken goroutine was number {last_woken}: {order:?}");
        if last_woken < 8 + 3 { Ok(()) } else { Err(text()) }
    };
    // When a slice ends, because the OS has not run the thread, a new goroutine has its turn.
    once_in_five(|| runtime(1).run(attempt));
}

#[test]
fn new_goroutines_do_not_starve_beside_goroutines_that_wake_each_other() {
    let _watchdog = watchdog();
    runtime(1).run(|| {
        let stop = flag();
        let rounds = Arc::new(AtomicUsize::new(0));
        let pairs: Vec<_> = (0..8)
            .flat_map(|_| {
                let (a, from_a) = chan::bounded::<()>(1);
                let (b, from_b) = chan::bounded::<()>(1);
                let (stop, rounds) = (stop.clone(), rounds.clone());
                let ping = go(move || {
                    while !stop.load(Ordering::Relaxed) {
                        let _ = a.send(());
                        let _ = from_b.recv();
                        rounds.fetch_add(1, Ordering::Relaxed);
                    }
                });
                let pong = go(move || {
                    while from_a.recv().is_ok() {
                        let _ = b.send(());
                    }
                });
                [ping, pong]
            })
            .collect();
        trefoil::time::sleep(Duration::from_millis(5));
        // Ten goroutines, each started by the previous one: each must get a turn.
        let before = rounds.load(Ordering::Relaxed);
        let start = Instant::now();
        fn line(left: usize) {
            if left > 0 {
                go(move || line(left - 1)).join().unwrap();
            }
        }
        line(10);
        let (took, others) = (start.elapsed(), rounds.load(Ordering::Relaxed) - before);
        stop.store(true, Ordering::Relaxed);
        join_all(pairs);
        // At least one turn in 16; a time slice is 10 ms.
        assert!(
            took < Duration::from_secs(5),
            "ten new goroutines took {took:?} ({others} rounds)"
        );
    });
}
