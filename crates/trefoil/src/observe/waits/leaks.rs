//! `#[trefoil::test(leaks = "deny")]`: finds the goroutines that a test has left.
//!
//! A test has a runtime of its own. So every goroutine and task of it except the caller is a leak,
//! whatever other tests do at the same time.

use super::super::snapshot::{self, Subject};
use super::Graph;
use super::report::{Goroutine, Places};
use crate::sched::g::Status;
use crate::sched::{Sched, calls};
use crate::sys::clock;
use crate::sys::sort::sort_by;
use std::fmt::Write;
use std::time::{Duration, Instant};

/// A goroutine that has waited for so long in one state is a leak. Others may be about to end.
const WAIT_MAX: Duration = Duration::from_millis(500);
/// After this time all that are left are leaks, even if they run.
const RUN_MAX: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(1);

/// Leaks that a message describes at most.
const DESCRIBED_MAX: usize = 20;

/// Gives the goroutines and tasks of `sched` time to end. Returns a message about those that do
/// not, or None if all have ended. Called by the main goroutine.
pub(crate) fn find(sched: &Sched) -> Option<String> {
    let started = Instant::now();
    let mut unchanged_since = started;
    let mut last = Vec::new();
    loop {
        let left = left(sched);
        if left.is_empty() {
            return None;
        }
        if left != last {
            unchanged_since = Instant::now();
            last = left;
        }
        let all_wait = last.iter().all(|&(_, waits, _)| waits);
        let is_over =
            all_wait && unchanged_since.elapsed() >= WAIT_MAX || started.elapsed() >= RUN_MAX;
        if is_over && let Some(message) = describe(sched) {
            return Some(message);
        }
        calls::sleep_until(clock::after(PAUSE));
    }
}

/// Returns the goroutines and tasks that are left: the id, whether it waits, and since when.
fn left(sched: &Sched) -> Vec<(u64, bool, u32)> {
    let mut left = Vec::new();
    snapshot::for_each_subject(sched, &mut |id, subject: Subject| {
        let status = subject.status();
        if status != Status::Dead && !subject.is_caller() {
            let since = subject.head().waiting_since_ms.load(std::sync::atomic::Ordering::Relaxed);
            left.push((id, matches!(status, Status::Waiting(_)), since));
        }
    });
    sort_by(&mut left, Ord::cmp);
    left
}

/// Returns a message about the goroutines and tasks that are left, or None if there are none any
/// more.
fn describe(sched: &Sched) -> Option<String> {
    let graph = Graph::read();
    let mut places = Places::new();
    let mut text = String::new();
    let mut count = 0;
    for (id, subject) in snapshot::subjects(sched) {
        if subject.is_caller() {
            continue;
        }
        let Some(leak) = Goroutine::read(&graph, sched, id, subject) else { continue };
        count += 1;
        if count > DESCRIBED_MAX {
            continue;
        }
        let at = leak.created_at;
        let _ = write!(
            text,
            "\n  {} [{}] created at {}:{}",
            leak.who,
            leak.state,
            at.file(),
            at.line()
        );
        if let Some(waits_for) = &leak.waits_for {
            let _ = write!(text, "\n    {waits_for}");
        }
        if let Some(place) = places.of(subject) {
            let _ = write!(text, "\n    at {place}");
        }
    }
    if count > DESCRIBED_MAX {
        let _ = write!(text, "\n  and {} more", count - DESCRIBED_MAX);
    }
    (count > 0).then(|| format!("the test has left {count} goroutines or tasks:{text}"))
}
