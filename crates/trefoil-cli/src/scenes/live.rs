//! GOMAXPROCS changed while everything runs; and a deadlock, explained.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::stage::Stage;

/// Set in the process that is to deadlock.
pub(crate) const DEADLOCK: &str = "TREFOIL_TOUR_DEADLOCK";

/// How many goroutines execute at once, while `set_procs` changes it.
pub(crate) fn procs(stage: &Stage) -> Result<(), String> {
    stage.part("six goroutines that never stop, and set_procs beside them");
    let mut most = Vec::new();
    trefoil::run(|| {
        let before = trefoil::procs();
        let stop = Arc::new(AtomicBool::new(false));
        let counts: Arc<Vec<AtomicUsize>> = Arc::new((0..6).map(|_| AtomicUsize::new(0)).collect());
        let all: Vec<_> = (0..6)
            .map(|i| {
                let (stop, counts) = (stop.clone(), counts.clone());
                trefoil::go(move || {
                    while !stop.load(Ordering::Relaxed) {
                        counts[i].fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        for n in [1, 2, 4, 1] {
            let was = trefoil::set_procs(n);
            let start = Instant::now();
            let mut at_once = 0;
            while start.elapsed() < Duration::from_millis(150) {
                trefoil::time::sleep(Duration::from_millis(5));
                let running = trefoil::debug::stats().procs;
                at_once = at_once.max(running.iter().filter(|p| p.status == "running").count());
            }
            stage.fact(&format!("{was} → {n}"), format_args!("at most {at_once} Ps ran at once"));
            most.push((n, at_once));
        }
        stop.store(true, Ordering::Relaxed);
        for handle in all {
            handle.join().expect("it only counts");
        }
        trefoil::set_procs(before);
    });
    match most.iter().skip(1).find(|(n, at_once)| at_once > n && *n > 1) {
        Some((n, at_once)) => Err(format!("{at_once} Ps ran with set_procs({n})")),
        None => Ok(()),
    }
}

/// The child's part: two goroutines that wait for each other.
pub(crate) fn deadlock_now() {
    trefoil::run(|| {
        let (first, second) = (trefoil::chan::bounded::<()>(0), trefoil::chan::bounded::<()>(0));
        let (wait_first, tell_second) = (first.1, second.0);
        let (wait_second, tell_first) = (second.1, first.0);
        let other = trefoil::Builder::new().name("left").go(move || {
            let _ = wait_first.recv();
            let _ = tell_second.send(());
        });
        let _ = wait_second.recv();
        let _ = tell_first.send(());
        drop(other);
    });
}

/// Go's words, and every stack.
pub(crate) fn deadlock(stage: &Stage) -> Result<(), String> {
    stage.part("two goroutines that wait for each other (in a process of its own)");
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let out = Command::new(program)
        .env(DEADLOCK, "1")
        .stdin(Stdio::null())
        .output()
        .map_err(|e| e.to_string())?;
    let text = String::from_utf8_lossy(&out.stderr);
    let heads = |line: &&str| line.starts_with("fatal error") || line.starts_with("goroutine");
    for line in text.lines().filter(heads) {
        stage.fact("it said", line);
    }
    stage.fact("exit code", format_args!("{:?}", out.status.code()));
    if out.status.code() == Some(2) && text.contains("all goroutines are asleep - deadlock!") {
        Ok(())
    } else {
        Err(format!("no deadlock was reported: {text}"))
    }
}
