//! Nobody stalls: endless loops and blocking calls beside a goroutine that wants to wake up every millisecond.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::join;
use crate::proc;
use crate::stage::Stage;

/// Half a slice: a goroutine that had to wait for loops to finish theirs would be later.
const LATE: Duration = Duration::from_millis(5);

/// The goroutine that must not wait: how late it wakes up from sleeps of a millisecond.
fn late_wake_ups(n: usize) -> Vec<Duration> {
    (0..n)
        .map(|_| {
            let due = Instant::now() + Duration::from_millis(1);
            trefoil::time::sleep_until(due);
            due.elapsed()
        })
        .collect()
}

fn promise_not_late(stage: &Stage, mut late: Vec<Duration>) {
    late.sort_unstable();
    let (median, p99) = (late[late.len() / 2], late[late.len() * 99 / 100]);
    stage.fact("late by (99 of 100)", format_args!("{p99:.2?}"));
    stage.promise(
        "late by (median)",
        format_args!("{median:.2?}"),
        format_args!("at most {LATE:?}"),
        median <= LATE,
    );
}

/// Twice as many endless loops as Ps.
pub(crate) fn hogs(stage: &Stage) -> Result<(), String> {
    trefoil::run(|| {
        let n = 2 * trefoil::procs();
        stage.part(format_args!("{n} endless loops, and one that wakes up every millisecond"));
        for _ in 0..n {
            trefoil::go(|| {
                let mut x = 0u64;
                loop {
                    x = std::hint::black_box(x.wrapping_mul(31).wrapping_add(7));
                }
            });
        }
        promise_not_late(stage, late_wake_ups(500));
        let stats = trefoil::debug::stats();
        stage.promise(
            "stopped by a signal",
            format_args!("{} times", stats.preemptions),
            "some",
            stats.preemptions > 0,
        );
        // Each loop gives way on its own stack; none keeps a thread.
        let most = trefoil::procs() + 2;
        let threads = stats.threads;
        stage.promise("threads", threads, format_args!("at most {most}"), threads <= most);
    });
    promise_quiet(stage);
    Ok(())
}

/// Main has returned, and the loops are to be gone with it: the process uses no CPU any more.
fn promise_quiet(stage: &Stage) {
    const WINDOW: Duration = Duration::from_millis(200);
    const WINDOWS: usize = 15;
    const MOST: f64 = 0.05;
    // A loop is stopped only when the kernel lets its thread have a CPU: that may take a few windows.
    let mut used = f64::MAX;
    for _ in 0..WINDOWS {
        let (start, before) = (Instant::now(), proc::cpu_time());
        std::thread::sleep(WINDOW);
        used = (proc::cpu_time() - before).as_secs_f64() / start.elapsed().as_secs_f64();
        if used <= MOST {
            break;
        }
    }
    stage.promise(
        "CPU after main returned",
        format_args!("{:.1} %", used * 100.0),
        format_args!("at most {:.0} %", MOST * 100.0),
        used <= MOST,
    );
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

/// Many threads' worth of blocking calls on two Ps.
pub(crate) fn blocking(stage: &Stage) -> Result<(), String> {
    const PROCS: u32 = 2;
    const GOROUTINES: u32 = 64;
    const CALLS: u32 = 20;
    const EACH: Duration = Duration::from_millis(5);
    stage.part(format_args!(
        "{GOROUTINES} goroutines, each {CALLS} × {EACH:?} blocked in the kernel, on {PROCS} Ps"
    ));
    let runtime = trefoil::Runtime::builder().procs(PROCS as usize).build();
    runtime.map_err(|e| e.to_string())?.run(|| {
        let stop = Arc::new(AtomicBool::new(false));
        let other = stop.clone();
        let ticker = trefoil::go(move || {
            let mut late = Vec::new();
            while !other.load(Ordering::Relaxed) {
                late.extend(late_wake_ups(10));
            }
            late
        });
        let start = Instant::now();
        let blocked: Vec<_> = (0..GOROUTINES)
            .map(|_| trefoil::go(|| (0..CALLS).for_each(|_| sleep_in_the_kernel(EACH))))
            .collect();
        blocked.into_iter().for_each(join);
        let time = start.elapsed();
        stop.store(true, Ordering::Relaxed);
        let one_by_one = EACH * GOROUTINES * CALLS / PROCS;
        stage.fact("two at a time", format_args!("{one_by_one:.1?} it would take"));
        let most = one_by_one / 3;
        stage.promise(
            "time",
            format_args!("{time:.0?}"),
            format_args!("a third of that, {most:.0?}, at most"),
            time <= most,
        );
        promise_not_late(stage, join(ticker));
        let stats = trefoil::debug::stats();
        stage.promise("Ps taken from threads", stats.retakes, "some", stats.retakes > 0);
        stage.fact("threads", stats.threads);
    });
    Ok(())
}
