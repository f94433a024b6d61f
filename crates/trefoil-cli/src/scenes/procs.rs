//! GOMAXPROCS changed while everything runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::proc;
use crate::report::Report;

const HOGS: usize = 6;

/// Samples of the threads per change; the median counts.
const SAMPLES: usize = 21;
const EVERY: Duration = Duration::from_millis(3);

/// A change takes effect at the end of each running goroutine's slice, and when new threads have
/// started. On a busy machine that takes as long as the threads wait for a CPU.
const PATIENCE: Duration = Duration::from_secs(5);

/// A plain thread observes how many threads are busy and which loops advance.
pub(crate) fn play(report: &Report) -> Result<(), String> {
    report.part(format_args!("{HOGS} goroutines that never stop, and set_procs beside them"));
    let runtime = trefoil::Runtime::builder().build().map_err(|e| e.to_string())?;
    let counts: Arc<[AtomicUsize]> = (0..HOGS).map(|_| AtomicUsize::new(0)).collect();
    for i in 0..HOGS {
        let counts = counts.clone();
        let hog = move || {
            loop {
                counts[i].fetch_add(1, Ordering::Relaxed);
            }
        };
        runtime.go(hog).map_err(|e| e.to_string())?;
    }
    for n in [1, 2, 4, 1] {
        let was = runtime.run(|| trefoil::set_procs(n));
        let start = Instant::now();
        let mut busy = median_busy();
        while busy != n && start.elapsed() < PATIENCE {
            busy = median_busy();
        }
        let advanced = advanced(&counts);
        report.promise(
            &format!("{was} → {n}"),
            format_args!("{busy} busy, {advanced} advance"),
            format_args!("{n} busy, {HOGS} advance"),
            (busy, advanced) == (n, HOGS),
        );
    }
    Ok(())
}

/// Returns the median, because sysmon is busy at times as well.
fn median_busy() -> usize {
    let mut samples = [0; SAMPLES];
    for sample in &mut samples {
        std::thread::sleep(EVERY);
        *sample = proc::busy_threads();
    }
    samples.sort_unstable();
    samples[SAMPLES / 2]
}

/// Returns how many counters move. With one P each loop waits for the slices of all others.
fn advanced(counts: &[AtomicUsize]) -> usize {
    let read = || counts.iter().map(|count| count.load(Ordering::Relaxed));
    let before: Vec<usize> = read().collect();
    let start = Instant::now();
    loop {
        let moved = read().zip(&before).filter(|(now, before)| now != *before).count();
        if moved == counts.len() || start.elapsed() > PATIENCE {
            return moved;
        }
        std::thread::sleep(EVERY);
    }
}
