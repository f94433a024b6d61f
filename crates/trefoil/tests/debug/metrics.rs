//! `debug::metrics`: what the histograms count.

use std::io::{Read, Write};
use std::time::{Duration, Instant};
use trefoil::debug::{Histogram, metrics};
use trefoil::time::sleep;
use trefoil::{Runtime, go};

/// Calls `f` until `done` holds of the metrics, at most for 30 s.
fn until(mut f: impl FnMut(), done: impl Fn(&trefoil::debug::Metrics) -> bool) {
    let start = Instant::now();
    while !done(&metrics()) {
        assert!(start.elapsed() < Duration::from_secs(30), "{:?}", metrics());
        f();
    }
}

fn on_one_p(f: impl FnOnce() + Send) {
    Runtime::builder().procs(1).build().unwrap().run(f);
}

/// Returns how many latencies were longer than `time`.
fn longer_than(histogram: &Histogram, time: Duration) -> u64 {
    let longer = |i: &usize| Histogram::bound(*i).is_none_or(|bound| bound > time);
    (0..Histogram::BUCKETS).filter(longer).map(|i| histogram.buckets()[i]).sum()
}

#[trefoil::test]
fn a_timer_is_counted_when_it_fires() {
    let before = metrics().timers;
    for _ in 0..20 {
        sleep(Duration::from_micros(200));
    }
    let late = metrics().timers.since(&before);
    // A sleep whose time is over before it begins needs no timer.
    assert!((1..=20).contains(&late.count()), "{}", late.count());
    assert!(late.sum() > Duration::ZERO);
}

#[trefoil::test]
fn a_timeout_that_does_not_happen_is_not_counted() {
    let (tx, rx) = trefoil::chan::bounded(1);
    let before = metrics().timers;
    for _ in 0..100 {
        let sender = tx.clone();
        let sending = go(move || sender.send(()).unwrap());
        rx.recv_timeout(Duration::from_millis(1000 * 1000)).unwrap();
        sending.join().unwrap();
    }
    assert_eq!(metrics().timers.since(&before).count(), 0);
}

#[test]
fn goroutines_that_are_started_and_woken_are_timed() {
    on_one_p(|| {
        let before = metrics().scheduling;
        let more = |n| {
            let before = before.clone();
            move |m: &trefoil::debug::Metrics| m.scheduling.since(&before).count() >= n
        };
        // sysmon asks for a sample in each of its rounds.
        until(
            || {
                go(|| ()).join().unwrap();
                sleep(Duration::from_micros(500));
            },
            more(10),
        );
    });
}

#[test]
fn a_goroutine_that_waits_behind_one_that_computes_counts_as_late() {
    on_one_p(|| {
        let compute = || {
            let woken = go(|| ());
            let start = Instant::now();
            // Long enough for a round of sysmon, but less than a slice.
            while start.elapsed() < Duration::from_millis(4) {
                std::hint::spin_loop();
            }
            woken.join().unwrap();
            sleep(Duration::from_micros(500));
        };
        until(compute, |m| longer_than(&m.scheduling, Duration::from_millis(2)) >= 3);
    });
}

#[test]
fn goroutines_that_other_threads_wake_are_timed() {
    on_one_p(|| {
        let before = metrics().scheduling;
        let (tx, rx) = trefoil::chan::bounded::<()>(1);
        let thread = std::thread::spawn(move || {
            // Mostly the receiver waits already.
            while tx.send(()).is_ok() {
                std::thread::sleep(Duration::from_micros(500));
            }
        });
        let timed = |m: &trefoil::debug::Metrics| m.scheduling.since(&before).count() >= 20;
        until(|| rx.recv().unwrap(), timed);
        drop(rx);
        trefoil::blocking(|| thread.join()).unwrap();
    });
}

#[test]
fn the_time_in_a_blocking_call_is_counted() {
    on_one_p(|| {
        let before = metrics().kernel;
        trefoil::blocking(|| {
            // Not interposed: the thread sleeps.
            let pause = libc::timespec { tv_sec: 0, tv_nsec: 20_000_000 };
            // SAFETY: a valid time; the second argument may be null.
            unsafe {
                libc::syscall(libc::SYS_nanosleep, &raw const pause, std::ptr::null::<u8>());
            }
        });
        let kernel = metrics().kernel.since(&before);
        assert_eq!(kernel.count(), 1);
        assert!(kernel.sum() >= Duration::from_millis(20), "{:?}", kernel.sum());
    });
}

#[test]
fn a_descriptor_that_was_ready_while_its_p_computed_counts() {
    on_one_p(|| {
        let (mut ours, theirs) = trefoil::net::UnixStream::pair().unwrap();
        let echo = go(move || {
            let mut byte = [0];
            while (&theirs).read(&mut byte).unwrap() == 1 {
                (&theirs).write_all(&byte).unwrap();
            }
        });
        let exchange = || {
            ours.write_all(b"x").unwrap();
            let start = Instant::now();
            while start.elapsed() < Duration::from_micros(300) {
                std::hint::spin_loop();
            }
            ours.read_exact(&mut [0]).unwrap();
        };
        until(exchange, |m| longer_than(&m.poll, Duration::from_micros(100)) >= 3);
        ours.close().unwrap();
        _ = echo.join();
    });
}

#[trefoil::test]
fn metrics_have_the_counters() {
    let metrics = metrics();
    assert_eq!(metrics.stats.goroutines, 1);
    assert!(metrics.uptime > Duration::ZERO);
}
