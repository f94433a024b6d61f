//! Endless loops and blocking calls beside a goroutine that wakes up every millisecond.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::join;
use crate::proc::{self, ThreadTime};
use crate::report::Report;

const NAP: Duration = Duration::from_millis(1);

/// Sleeps `n` times, for at most three seconds in all; returns the median lateness.
fn median_late(n: usize) -> Duration {
    let start = Instant::now();
    let mut late = Vec::new();
    loop {
        let due = Instant::now() + NAP;
        trefoil::time::sleep_until(due);
        late.push(due.elapsed());
        if late.len() == n || start.elapsed() > Duration::from_secs(3) {
            break;
        }
    }
    late.sort_unstable();
    late[late.len() / 2]
}

/// Returns the mean time that the busiest thread has waited for a CPU since `before`.
pub(super) fn wait_of_busiest(before: &[ThreadTime]) -> Duration {
    let used = proc::used_since(before, proc::thread_times());
    let busiest = used.iter().max_by_key(|thread| thread.cpu);
    busiest.map_or(Duration::ZERO, ThreadTime::mean_wait)
}

/// Twice as many endless loops as Ps.
pub(crate) fn hogs(report: &Report) -> Result<(), String> {
    /// A goroutine that waited for loops to use up their slices of 10 ms would be later.
    const LATE: Duration = Duration::from_millis(2);
    trefoil::run(|| {
        let procs = trefoil::procs();
        let n = 2 * procs;
        report.part(format_args!("{n} endless loops, and one that wakes up every millisecond"));
        for _ in 0..n {
            trefoil::go(|| {
                let mut x = 0u64;
                loop {
                    x = std::hint::black_box(x.wrapping_mul(31).wrapping_add(7));
                }
            });
        }
        let before = proc::thread_times();
        let late = median_late(300);
        // A loop is preempted once its thread has a CPU. Other processes may delay sysmon first,
        // then that thread.
        let wait = wait_of_busiest(&before);
        report.promise(
            "late by",
            format_args!("{late:.2?} (median)"),
            format_args!("at most {LATE:?}, and 4 × {wait:.2?} waiting for a CPU"),
            late <= LATE + 4 * wait,
        );
        let stats = trefoil::debug::stats();
        report.promise(
            "stopped by a signal",
            format_args!("{} times", stats.preemptions),
            "some",
            stats.preemptions > 0,
        );
        // A preempted loop waits on its own stack; it holds no thread.
        let (threads, most) = (stats.threads, procs + 2);
        report.promise("threads", threads, format_args!("at most {most}"), threads <= most);
    });
    promise_quiet(report);
    Ok(())
}

/// Checks that the loops have ended with main: the process uses no CPU any more.
fn promise_quiet(report: &Report) {
    const WINDOW: Duration = Duration::from_millis(200);
    const WINDOWS: usize = 15;
    const MOST: f64 = 0.05;
    // A loop is stopped only when its thread gets a CPU: that may take a few windows.
    let mut used = f64::MAX;
    for _ in 0..WINDOWS {
        let (start, before) = (Instant::now(), proc::cpu_time());
        std::thread::sleep(WINDOW);
        used = (proc::cpu_time() - before).as_secs_f64() / start.elapsed().as_secs_f64();
        if used <= MOST {
            break;
        }
    }
    report.promise(
        "CPU after main returned",
        format_args!("{:.1} %", used * 100.0),
        format_args!("at most {:.0} %", MOST * 100.0),
        used <= MOST,
    );
}

/// Sleeps by a raw system call, which cannot be interposed: the runtime must detect it.
fn sleep_in_the_kernel(time: Duration) {
    let request = [time.as_secs(), u64::from(time.subsec_nanos())];
    // SAFETY: nanosleep reads the two words; it may end early, which does no harm here.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::asm!("syscall", inlateout("rax") 35u64 => _, in("rdi") request.as_ptr(),
            in("rsi") 0, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!("svc 0", in("x8") 101u64, inlateout("x0") request.as_ptr() => _,
            in("x1") 0u64, options(nostack));
    }
}

/// Blocking calls of many goroutines on two Ps.
pub(crate) fn blocking(report: &Report) -> Result<(), String> {
    const PROCS: u32 = 2;
    const GOROUTINES: u32 = 64;
    const CALLS: u32 = 20;
    const EACH: Duration = Duration::from_millis(5);
    const TWO_AT_A_TIME: Duration = EACH.saturating_mul(GOROUTINES * CALLS / PROCS);
    /// A goroutine that waited for one of the calls would be later.
    const LATE: Duration = Duration::from_millis(20);
    report.part(format_args!(
        "{GOROUTINES} goroutines, each {CALLS} × {EACH:?} blocked in the kernel, on {PROCS} Ps"
    ));
    let runtime = trefoil::Runtime::builder().procs(PROCS as usize).build();
    runtime.map_err(|e| e.to_string())?.run(|| {
        let start = Instant::now();
        let before = proc::thread_times();
        let stop = Arc::new(AtomicBool::new(false));
        let other = stop.clone();
        let ticker = trefoil::go(move || {
            let mut late = Vec::new();
            loop {
                late.push(median_late(10));
                if other.load(Ordering::Relaxed) {
                    break;
                }
            }
            late.sort_unstable();
            late[late.len() / 2]
        });
        let blocked: Vec<_> = (0..GOROUTINES)
            .map(|_| trefoil::go(|| (0..CALLS).for_each(|_| sleep_in_the_kernel(EACH))))
            .collect();
        blocked.into_iter().for_each(join);
        let time = start.elapsed();
        stop.store(true, Ordering::Relaxed);
        let wait = wait_of_busiest(&before);
        let most = TWO_AT_A_TIME * 2 / 3;
        report.promise(
            "time",
            format_args!("{time:.0?}"),
            format_args!("at most {most:.1?}, two thirds of two at a time"),
            time <= most,
        );
        let late = join(ticker);
        report.promise(
            "late by",
            format_args!("{late:.2?} (median)"),
            format_args!("at most {LATE:?}, and 4 × {wait:.2?} waiting for a CPU"),
            late <= LATE + 4 * wait,
        );
        let stats = trefoil::debug::stats();
        report.promise("Ps taken from threads", stats.retakes, "some", stats.retakes > 0);
        report.fact("threads", stats.threads);
    });
    Ok(())
}
