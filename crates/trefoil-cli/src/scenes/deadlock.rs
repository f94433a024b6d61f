//! A deadlock report: Go's message and every stack.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::report::Report;

/// Set in the process that is to deadlock.
pub(crate) const CHILD: &str = "TREFOIL_TOUR_DEADLOCK";

/// The child must have ended by then. It may need seconds for the symbols of its stacks: this
/// limit only ends a child that hangs, before the limit of a scene (30 s) ends this process.
const LIMIT: Duration = Duration::from_secs(25);

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

pub(crate) fn play(report: &Report) -> Result<(), String> {
    report.part("two goroutines that wait for each other (in a process of its own)");
    let start = Instant::now();
    // Not by its path: the file may have been rebuilt meanwhile.
    let mut child = Command::new("/proc/self/exe")
        .env(CHILD, "1")
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| e.to_string())?;
    let status = wait(&mut child).map_err(|e| e.to_string())?;
    let time = start.elapsed();
    let mut text = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        stderr.read_to_string(&mut text).map_err(|e| e.to_string())?;
    }
    report.quote(&text);
    report.promise(
        "detected",
        format_args!("after {time:.1?}"),
        format_args!("within {LIMIT:?}"),
        status.is_some(),
    );
    let code = status.and_then(|status| status.code());
    let shown = code.map_or("none".into(), |code| code.to_string());
    report.promise("exit code", shown, "2, as in Go", code == Some(2));
    for (label, words) in [
        ("message", "all goroutines are asleep - deadlock!"),
        ("first goroutine", "goroutine 1 \"main\" [chan receive]"),
        ("second goroutine", "goroutine 2 \"left\" [chan receive]"),
        ("source line", "scenes/deadlock.rs:"),
    ] {
        let found = text.contains(words);
        report.promise(label, if found { "found" } else { "NOT found" }, words, found);
    }
    Ok(())
}

/// Returns None if the child had to be killed. Its output is short enough for the pipe's buffer.
fn wait(child: &mut Child) -> std::io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    while start.elapsed() < LIMIT {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill()?;
    child.wait()?;
    Ok(None)
}
