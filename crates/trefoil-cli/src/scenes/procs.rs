//! GOMAXPROCS changed while everything runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::proc;
use crate::stage::Stage;

const HOGS: usize = 6;

/// Looks at the threads in a row, whose median counts.
const LOOKS: usize = 21;
const EVERY: Duration = Duration::from_millis(3);

/// A change is done when a P's goroutine comes to its end or its slice, and a new thread has started; on a
/// machine that others use, too, that takes as long as the kernel lets them wait.
const PATIENCE: Duration = Duration::from_secs(5);

/// Seen from outside, by a plain thread: how many threads are at work, and which loops go on.
pub(crate) fn play(stage: &Stage) -> Result<(), String> {
    stage.part(format_args!("{HOGS} goroutines that never stop, and set_procs beside them"));
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
        stage.promise(
            &format!("{was} → {n}"),
            format_args!("{busy} at work, {advanced} go on"),
            format_args!("{n} at work, {HOGS} go on"),
            (busy, advanced) == (n, HOGS),
        );
    }
    Ok(())
}

/// Now and then sysmon is at work as well: hence the median.
fn median_busy() -> usize {
    let mut looks = [0; LOOKS];
    for look in &mut looks {
        std::thread::sleep(EVERY);
        *look = proc::busy_threads();
    }
    looks.sort_unstable();
    looks[LOOKS / 2]
}

/// How many counters move: with one P each waits for all the others' slices.
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
