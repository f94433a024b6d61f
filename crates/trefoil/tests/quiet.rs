//! A runtime in which little happens uses little CPU time, and its timers are still in time.

use std::time::{Duration, Instant};

use trefoil::time::sleep;
use trefoil::{Runtime, go};

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

/// One test, because other tests in the same process would be counted too.
#[test]
fn timers_of_a_quiet_runtime() {
    a_timer_wakes_one_thread();
    a_timer_is_in_time_beside_a_goroutine_that_computes();
}
