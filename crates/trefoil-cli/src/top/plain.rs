//! One page of plain text, for `--once` and for outputs that are not terminals.

use std::fmt::Write;

use super::view::{self, Sort, View, age};
use crate::inspect::printable;
use crate::report::grouped;

/// Lines that a part of the page has at most.
const LINES_MAX: usize = 40;

/// Returns the page, with control characters of names replaced: a terminal would obey them.
pub(super) fn page(view: &View) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "{}\n{}", view.title(), view.numbers());
    if !view.latencies.is_empty() {
        let _ = writeln!(out, "{}", view.latency_text());
    }
    for deadlock in view.deadlocks.iter().flatten() {
        let _ = writeln!(out, "\n{}", deadlock.trim_end());
    }
    let _ = writeln!(out, "\nCOUNT  STATE  OLDEST  MEAN  WAITS AT  STARTED AT  EXAMPLE");
    let rows = view::rows(view, None, Sort::Count, "");
    for (group, _) in rows.iter().take(LINES_MAX) {
        let time = |ms: Option<u64>| ms.map_or_else(|| "–".to_owned(), age);
        let kind = if group.is_task { "task" } else { "goroutine" };
        let waits_at = if group.waits_at.is_empty() { "–" } else { &group.waits_at };
        let _ = writeln!(
            out,
            "{}  {}  {}  {}  {waits_at}  {} ({})  {kind} {}",
            grouped(group.count),
            group.state,
            time(group.oldest_ms),
            time(group.mean_ms),
            group.created_at,
            group.function,
            group.example,
        );
    }
    if let Some(more) = view.groups_total.checked_sub(LINES_MAX).filter(|&more| more > 0) {
        let _ = writeln!(out, "… and {} more groups", grouped(more as u64));
    }
    if view.users.is_some() {
        let _ = writeln!(out, "\nRAN  QUEUED  WHICH  FUNCTION");
        for (user, ..) in view::users(view, None, 1.0).iter().take(LINES_MAX) {
            let ended = || format!("{}, which has ended", user.id);
            let (ran, queued) = (age(user.running_us / 1000), age(user.runnable_us / 1000));
            let who = user.who.clone().unwrap_or_else(ended);
            let _ = writeln!(out, "{ran}  {queued}  {who}  {}", user.what);
        }
    }
    if let Some(waits) = view.waits.as_ref().filter(|waits| !waits.is_empty()) {
        let _ = writeln!(out, "\nWAITS FOR");
        waits.iter().take(LINES_MAX).for_each(|wait| out.push_str(&format!("{wait}\n")));
        let more = view.waits_total.saturating_sub(waits.len().min(LINES_MAX) as u64);
        if more > 0 {
            let _ = writeln!(out, "… and {} more", grouped(more));
        }
    }
    let _ = writeln!(out, "\nP  STATUS  M  THREAD  QUEUE  RUNS");
    for p in view.ps.iter().filter(|p| p.status != "retired") {
        let number = |n: Option<u64>| n.map_or_else(|| "–".to_owned(), |n| n.to_string());
        let (m, thread, queue) = (number(p.m), number(p.thread), number(p.queue));
        let runs = p.runs.as_deref().unwrap_or("–");
        let _ = writeln!(out, "{}  {}  {m}  {thread}  {queue}  {runs}", p.id, p.status);
    }
    printable(&out)
}

#[cfg(test)]
mod tests {
    use super::super::view::{Group, P};
    use super::*;

    #[test]
    fn a_terminal_gets_no_control_characters_of_names() {
        let name = || "\u{1b}]0;title\u{7}".to_owned();
        let group = Group {
            state: name(),
            function: name(),
            created_at: name(),
            waits_at: name(),
            ..Group::default()
        };
        let p = P {
            id: 0,
            status: name(),
            m: None,
            thread: None,
            queue: None,
            slices: None,
            runs: Some(name()),
        };
        let view = View {
            program: name(),
            source: name(),
            ps: vec![p],
            latencies: vec![(name(), 1, 1)],
            groups: vec![group],
            groups_total: 1,
            waits: Some(vec![name()]),
            deadlocks: Some(vec![name()]),
            ..View::default()
        };
        let page = page(&view);
        assert!(!page.contains(|c: char| c.is_control() && c != '\n'), "{page:?}");
        assert_eq!(page.matches("\\u{1b}]0;title\\u{7}").count(), 11);
    }
}
