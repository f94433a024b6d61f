//! Nobody stalls: endless loops and blocking calls beside a goroutine that wants to wake up every millisecond.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::stage::Stage;

/// The goroutine that must not wait: how late it wakes up from sleeps of a millisecond.
fn late_wake_ups(n: usize) -> Vec<Duration> {
    let mut late: Vec<Duration> = (0..n)
        .map(|_| {
            let due = Instant::now() + Duration::from_millis(1);
            trefoil::time::sleep_until(due);
            due.elapsed()
        })
        .collect();
    late.sort_unstable();
    late
}

fn show_late(stage: &Stage, late: &[Duration]) -> Duration {
    let (median, p99) = (late[late.len() / 2], late[late.len() * 99 / 100]);
    stage.fact("late by", format_args!("{median:.2?} (median), {p99:.2?} (99 of 100)"));
    median
}

/// Twice as many endless loops as Ps.
pub(crate) fn hogs(stage: &Stage) -> Result<(), String> {
    let median = trefoil::run(|| {
        let n = 2 * trefoil::procs();
        stage.part(format_args!("{n} endless loops, and one that wakes up every millisecond"));
        for _ in 0..n {
            trefoil::go(|| {
                let mut x = 0u64;
                loop {
                    x = std::hint::black_box(x.wrapping_mul(31) + 7);
                }
            });
        }
        let median = show_late(stage, &late_wake_ups(500));
        let stats = trefoil::debug::stats();
        stage
            .fact("stopped", format_args!("{} times, between two instructions", stats.preemptions));
        stage.fact("threads", stats.threads);
        median
    });
    stage.fact("and then", "main returned: the loops are gone");
    if median > Duration::from_millis(5) {
        return Err(format!("endless loops made a goroutine {median:?} late"));
    }
    Ok(())
}

/// A system call that nobody can intercept: the kernel sleeps, the runtime must notice.
fn sleep_in_the_kernel(time: Duration) {
    let request = [time.as_secs(), u64::from(time.subsec_nanos())];
    // SAFETY: nanosleep reads the two words; it may end early, which does no harm here.
    unsafe {
        std::arch::asm!("syscall", inlateout("rax") 35u64 => _, in("rdi") request.as_ptr(),
            in("rsi") 0, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
}

/// Many threads' worth of blocking calls on a few Ps.
pub(crate) fn blocking(stage: &Stage) -> Result<(), String> {
    const GOROUTINES: u32 = 64;
    const CALLS: u32 = 20;
    const EACH: Duration = Duration::from_millis(5);
    let (time, median) = trefoil::run(|| {
        let procs = trefoil::procs();
        stage.part(format_args!(
            "{GOROUTINES} goroutines, each {CALLS} × {EACH:?} blocked in the kernel, on {procs} Ps"
        ));
        let stop = Arc::new(AtomicBool::new(false));
        let other = stop.clone();
        let ticker = trefoil::go(move || {
            let mut late = Vec::new();
            while !other.load(Ordering::Relaxed) {
                late.extend(late_wake_ups(10));
            }
            late.sort_unstable();
            late
        });
        let start = Instant::now();
        let blocked: Vec<_> = (0..GOROUTINES)
            .map(|_| trefoil::go(|| (0..CALLS).for_each(|_| sleep_in_the_kernel(EACH))))
            .collect();
        for handle in blocked {
            handle.join().expect("it only sleeps");
        }
        let time = start.elapsed();
        stop.store(true, Ordering::Relaxed);
        let one_by_one = EACH * GOROUTINES * CALLS / procs as u32;
        stage.fact(
            "time",
            format_args!("{time:.0?} (one after the other on {procs}: {one_by_one:.0?})"),
        );
        let median = show_late(stage, &ticker.join().expect("it only sleeps"));
        let stats = trefoil::debug::stats();
        stage.fact("Ps taken", format_args!("{} from blocked threads", stats.retakes));
        stage.fact("threads", stats.threads);
        (time, median)
    });
    if time > EACH * CALLS * 10 || median > Duration::from_millis(5) {
        return Err(format!("blocking calls took {time:?}, and made a goroutine {median:?} late"));
    }
    Ok(())
}
