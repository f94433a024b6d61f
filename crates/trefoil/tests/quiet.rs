//! A runtime in which little happens uses little CPU time, and its timers are still in time.

use std::time::{Duration, Instant};

use trefoil::chan::bounded;
use trefoil::time::sleep;
use trefoil::{JoinHandle, Runtime, go};

/// How many times a test is tried: other processes disturb what it measures.
const ATTEMPTS: usize = 20;

fn runtime() -> Runtime {
    Runtime::builder().procs(2).build().unwrap()
}

/// How many times the threads of this process have gone to sleep.
fn voluntary_switches() -> i64 {
    // SAFETY: `usage` is plain data, and the kernel fills it in.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_SELF, &raw mut usage), 0);
        usage.ru_nvcsw
    }
}

fn compute(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// One M sleeps and wakes up per timer: no second M to take its place, and not sysmon.
fn a_timer_wakes_one_thread() {
    const SLEEPS: i64 = 300;
    let mut least = i64::MAX;
    for _ in 0..ATTEMPTS {
        let switches = runtime().run(|| {
            let before = voluntary_switches();
            (0..SLEEPS).for_each(|_| sleep(Duration::from_micros(500)));
            voluntary_switches() - before
        });
        least = least.min(switches);
        if least < 2 * SLEEPS {
            return;
        }
    }
    panic!("at best {least} switches for {SLEEPS} timers");
}

/// The place of the idle poller may be vacant only for a moment: a goroutine that was woken by a
/// timer and computes does not make the timers of other goroutines late, if a P is idle.
fn a_timer_is_in_time_beside_a_goroutine_that_computes() {
    const COMPUTE: Duration = Duration::from_millis(100);
    let mut least = Duration::MAX;
    for _ in 0..ATTEMPTS {
        let late = runtime().run(|| {
            // Timers that end at once make the runtime leave the place vacant.
            (0..50).for_each(|_| sleep(Duration::from_micros(200)));
            let computes = go(|| {
                sleep(Duration::from_millis(1));
                compute(COMPUTE);
            });
            let time = Duration::from_millis(10);
            let start = Instant::now();
            sleep(time);
            let late = start.elapsed() - time;
            computes.join().unwrap();
            late
        });
        least = least.min(late);
        if least < COMPUTE / 4 {
            return;
        }
    }
    panic!("at best {least:?} late");
}

/// A goroutine that is started or woken by one that computes then runs on the idle P, although the
/// runtime has been quiet: it does not wait for the end of a time slice.
fn a_goroutine_runs_beside_one_that_computes(start: fn(Instant) -> JoinHandle<Duration>) {
    const COMPUTE: Duration = Duration::from_millis(15);
    const ROUNDS: usize = 9;
    let mut least = Duration::MAX;
    for _ in 0..ATTEMPTS {
        let mut delays = runtime().run(|| {
            let measure = |_| {
                (0..60).for_each(|_| sleep(Duration::from_micros(300)));
                let started = start(Instant::now());
                compute(COMPUTE);
                started.join().unwrap()
            };
            (0..ROUNDS).map(measure).collect::<Vec<_>>()
        });
        delays.sort();
        least = least.min(delays[ROUNDS / 2]);
        if least < Duration::from_millis(1) {
            return;
        }
    }
    panic!("at best {least:?} until it ran");
}

fn spawned(begin: Instant) -> JoinHandle<Duration> {
    go(move || begin.elapsed())
}

fn sent(_: Instant) -> JoinHandle<Duration> {
    let (tx, rx) = bounded::<Instant>(0);
    let receiver = go(move || rx.recv().unwrap().elapsed());
    // The receiver waits when this returns.
    (0..3).for_each(|_| sleep(Duration::from_micros(300)));
    tx.send(Instant::now()).unwrap();
    receiver
}

/// One test, because other tests in the same process would be counted too.
#[test]
fn timers_of_a_quiet_runtime() {
    a_timer_wakes_one_thread();
    a_timer_is_in_time_beside_a_goroutine_that_computes();
    a_goroutine_runs_beside_one_that_computes(spawned);
    a_goroutine_runs_beside_one_that_computes(sent);
}
