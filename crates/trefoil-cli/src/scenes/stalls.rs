//! Nobody stalls: endless loops and blocking calls beside a goroutine that wants to wake up every millisecond.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::join;
use crate::proc::{self, ThreadTime};
use crate::stage::Stage;

const NAP: Duration = Duration::from_millis(1);

/// Takes `n` naps, or three seconds: how much the median one was longer than it should be.
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

/// Twice as many endless loops as Ps.
pub(crate) fn hogs(stage: &Stage) -> Result<(), String> {
    /// Who had to wait until loops have used up their slices, of 10 ms, would be later.
    const LATE: Duration = Duration::from_millis(2);
    trefoil::run(|| {
        let procs = trefoil::procs();
        let n = 2 * procs;
        stage.part(format_args!("{n} endless loops, and one that wakes up every millisecond"));
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
        // A loop gives way once its thread has a CPU, and the kernel may have others to serve, some times over:
        // sysmon first, then the thread.
        let used = proc::used_since(&before, proc::thread_times());
        let busiest = used.iter().max_by_key(|thread| thread.cpu);
        let wait = busiest.map_or(Duration::ZERO, ThreadTime::mean_wait);
        stage.promise(
            "late by",
            format_args!("{late:.2?} (median)"),
            format_args!("at most {LATE:?}, and 4 × {wait:.2?} in line for a CPU"),
            late <= LATE + 4 * wait,
        );
        let stats = trefoil::debug::stats();
        stage.promise(
            "stopped by a signal",
            format_args!("{} times", stats.preemptions),
            "some",
            stats.preemptions > 0,
        );
        // Each loop gives way on its own stack; none keeps a thread.
        let (threads, most) = (stats.threads, procs + 2);
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
    const TWO_AT_A_TIME: Duration = EACH.saturating_mul(GOROUTINES * CALLS / PROCS);
    /// Who had to wait for one of them would be later.
    const LATE: Duration = Duration::from_millis(20);
    stage.part(format_args!(
        "{GOROUTINES} goroutines, each {CALLS} × {EACH:?} blocked in the kernel, on {PROCS} Ps"
    ));
    let runtime = trefoil::Runtime::builder().procs(PROCS as usize).build();
    runtime.map_err(|e| e.to_string())?.run(|| {
        let start = Instant::now();
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
        let most = TWO_AT_A_TIME / 3;
        stage.promise(
            "time",
            format_args!("{time:.0?}"),
            format_args!("at most {most:.1?}, a third of two at a time"),
            time <= most,
        );
        let late = join(ticker);
        stage.promise(
            "late by",
            format_args!("{late:.2?} (median)"),
            format_args!("at most {LATE:?}"),
            late <= LATE,
        );
        let stats = trefoil::debug::stats();
        stage.promise("Ps taken from threads", stats.retakes, "some", stats.retakes > 0);
        stage.fact("threads", stats.threads);
    });
    Ok(())
}
