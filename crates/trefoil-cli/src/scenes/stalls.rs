//! Nobody stalls: endless loops and blocking calls beside a goroutine that wants to wake up every millisecond.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::join;
use crate::proc;
use crate::stage::Stage;

const NAP: Duration = Duration::from_millis(1);

/// Takes `n` naps, or three seconds: how far the clock moved during the median one.
fn median_nap(n: usize, clock: impl Fn() -> Duration) -> Duration {
    let start = Instant::now();
    let mut naps = Vec::new();
    loop {
        let before = clock();
        trefoil::time::sleep(NAP);
        naps.push(clock() - before);
        if naps.len() == n || start.elapsed() > Duration::from_secs(3) {
            break;
        }
    }
    naps.sort_unstable();
    naps[naps.len() / 2]
}

/// Twice as many endless loops as Ps.
pub(crate) fn hogs(stage: &Stage) -> Result<(), String> {
    /// A nap and half a slice: who had to wait until loops have used up theirs would sleep longer.
    const MOST: Duration = Duration::from_millis(1 + 5);
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
        let start = Instant::now();
        let late = median_nap(300, || start.elapsed()).saturating_sub(NAP);
        stage.fact("late by", format_args!("{late:.2?} (median)"));
        // A loop gives way once its thread has a CPU, which others may use as well. So the clock that counts is what
        // the loops have had of the CPUs themselves: they keep all of them busy.
        let nap = median_nap(300, || proc::cpu_time() / procs as u32);
        stage.promise(
            "a nap, in CPU time",
            format_args!("{nap:.2?} (median)"),
            format_args!("{NAP:?}, and at most half a slice"),
            nap <= MOST,
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
            let mut naps = Vec::new();
            loop {
                naps.push(median_nap(10, || start.elapsed()));
                if other.load(Ordering::Relaxed) {
                    break;
                }
            }
            naps.sort_unstable();
            naps[naps.len() / 2].saturating_sub(NAP)
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
