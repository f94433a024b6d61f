//! std just works: its locks and sleeps park the goroutine, not the thread.

use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use super::{at_rest, join, promise_few_threads};
use crate::proc;
use crate::report::{Report, grouped};

pub(crate) fn play(report: &Report) -> Result<(), String> {
    barrier_and_sleep(report);
    mutex(report);
    Ok(())
}

fn barrier_and_sleep(report: &Report) {
    const SLEEPERS: u64 = 20_000;
    const SLEEP: Duration = Duration::from_millis(500);
    /// A thousandth of what they would take one after the other.
    const LATE: Duration = Duration::from_secs(SLEEPERS / 2 / 1000);
    report.part(format_args!(
        "{} goroutines at one std::sync::Barrier, then in std::thread::sleep({SLEEP:?})",
        grouped(SLEEPERS)
    ));
    trefoil::run(|| {
        let barrier = Arc::new(Barrier::new(SLEEPERS as usize + 1));
        let sleepers: Vec<_> = (0..SLEEPERS)
            .map(|_| {
                let barrier = barrier.clone();
                trefoil::go(move || {
                    barrier.wait();
                    std::thread::sleep(SLEEP);
                })
            })
            .collect();
        // The main goroutine has not reached the barrier yet.
        let waiting = at_rest().goroutines as u64 - 1;
        let threads = proc::status().threads;
        let start = Instant::now();
        barrier.wait();
        sleepers.into_iter().for_each(join);
        let time = start.elapsed();
        report.promise("wait at once", grouped(waiting), grouped(SLEEPERS), waiting == SLEEPERS);
        promise_few_threads(report, threads, trefoil::procs());
        report.promise(
            "until the last woke up",
            format_args!("{time:.2?}"),
            format_args!("{SLEEP:?} and at most {LATE:?}"),
            (SLEEP..=SLEEP + LATE).contains(&time),
        );
    });
}

fn mutex(report: &Report) {
    const AT_ONCE: usize = 1_000;
    report.part(format_args!("{AT_ONCE} goroutines at one std::sync::Mutex, held over a yield"));
    let sum = trefoil::run(|| {
        let start = Instant::now();
        let sum = Mutex::new(0usize);
        trefoil::scope(|scope| {
            for _ in 0..AT_ONCE {
                scope.go(|| {
                    let mut sum = sum.lock().expect("no goroutine panics");
                    let before = *sum;
                    trefoil::yield_now();
                    *sum = before + 1;
                });
            }
        });
        report.fact("time", format_args!("{:.2?}", start.elapsed()));
        sum.into_inner().unwrap_or(0)
    });
    report.promise("came through", sum, AT_ONCE, sum == AT_ONCE);
}
