//! A life in words: how long a goroutine ran and waited, and for what.

use super::decode::{Call, Cause, Trace, What};
use super::lives::{Life, Span, State};
use super::turns::{Others, Turns};
use crate::sched::monitor::preempt::PreemptRefusal;
use crate::sched::record::Stop;
use crate::sys::map::Map;
use std::fmt::Write;
use std::time::Duration;

/// Parts of a wait that are explained.
const SPANS_MAX: usize = 16;
/// An error is printed if it is more than this fraction of the time: 1/50.
const ERROR_SHARE: u64 = 50;
/// Others that are named as running while a goroutine was queued.
const NAMED_MAX: usize = 4;

/// What explanations are made from.
pub(super) struct Explainer<'a> {
    trace: &'a Trace<'a>,
    lives: &'a Map<u64, Life>,
    turns: Turns,
    /// By goroutine: when it refused to stop, and why.
    refusals: Map<u64, Vec<(u64, PreemptRefusal)>>,
}

impl<'a> Explainer<'a> {
    pub(super) fn new(trace: &'a Trace<'a>, lives: &'a Map<u64, Life>) -> Explainer<'a> {
        let mut refusals: Map<u64, Vec<(u64, PreemptRefusal)>> = Map::new();
        for event in trace.rings.iter().flatten() {
            if let What::Refused { id, why } = event.what {
                refusals.get_or_default(id).push((event.when.middle(), why));
            }
        }
        Explainer { trace, lives, turns: Turns::new(lives), refusals }
    }
}

/// Says what a goroutine or task did. None if it does not appear.
pub(super) fn why(explainer: &Explainer<'_>, id: u64) -> Option<String> {
    let Explainer { trace, lives, .. } = *explainer;
    let life = lives.get(&id)?;
    let mut text = describe(trace, lives, id);
    if let Some((_, by)) = life.created
        && by != Cause::Unknown
    {
        let _ = write!(text, " by {}", cause(trace, lives, by));
    }
    let _ = write!(text, "\n{}\n", totals(life));
    let longest = longest_wait(life).unwrap_or(&[]);
    if longest.is_empty() {
        text += "it never waited\n";
    } else {
        text += &explain(explainer, id, "longest wait", longest);
    }
    // Others may hide the call in which its thread was blocked.
    let is_without_p = |span: &&Span| matches!(span.state, State::WithoutP(_));
    let without_p = life.spans.iter().filter(is_without_p).max_by_key(|span| span.duration().0);
    if let Some(span) = without_p
        && !longest.iter().take(SPANS_MAX).any(|explained| std::ptr::eq(explained, span))
    {
        let title = "longest time without a P";
        text += &explain(explainer, id, title, std::slice::from_ref(span));
    }
    Some(text)
}

/// Returns the call in which a goroutine blocked its thread for `nanos`, at least. None if that is
/// not known.
pub(super) fn blocked_in(life: &Life, nanos: u64) -> Option<String> {
    // The latest: an incident is noticed shortly before the recording is copied.
    let call = life.spans.iter().rev().find_map(|span| match span.state {
        State::WithoutP(call) => {
            let (lasted, error) = span.duration();
            (lasted.saturating_add(error) >= nanos).then_some(call)
        }
        _ => None,
    })?;
    match call {
        Call::Blocking => Some("blocking".into()),
        Call::Number(number) => Some(call_name(number)),
        Call::Unknown => None,
    }
}

/// Returns a goroutine's kind, id, name, and where it was started.
fn describe(trace: &Trace<'_>, lives: &Map<u64, Life>, id: u64) -> String {
    let created =
        lives.get(&id).and_then(|life| life.created.map(|(place, _)| (life.is_task, place)));
    title(trace, created, id)
}

/// As [`describe`]. `created`: whether it is a task, and where it was started, if that is known.
pub(super) fn title(trace: &Trace<'_>, created: Option<(bool, u64)>, id: u64) -> String {
    let kind = if created.is_some_and(|(is_task, _)| is_task) { "task" } else { "goroutine" };
    let mut text = format!("{kind} {id}");
    if let Some(name) = trace.name(id) {
        let _ = write!(text, " \"{name}\"");
    }
    if let Some((_, place)) = created {
        let _ = write!(text, " (started at {})", trace.text(place));
    }
    text
}

fn cause(trace: &Trace<'_>, lives: &Map<u64, Life>, by: Cause) -> String {
    match by {
        Cause::Goroutine(id) => describe(trace, lives, id),
        Cause::Timer(late) if late >= 1_000 => format!("a timer, {} late", time(late)),
        Cause::Timer(_) => "a timer".into(),
        Cause::Poller => "a descriptor that became ready".into(),
        Cause::Thread(tid) => format!("thread {tid}"),
        Cause::Unknown => "someone unknown".into(),
    }
}

/// Returns how long it was in which state.
fn totals(life: &Life) -> String {
    let times = life.times();
    let mut text = format!(
        "ran {}, was runnable {}, waited {}",
        with_error(times.running, times.running_error),
        with_error(times.runnable, times.runnable_error),
        with_error(times.waiting, times.waiting_error),
    );
    if !times.without_p.is_zero() {
        let without_p = with_error(times.without_p, times.without_p_error);
        let _ = write!(text, ", was without a P {without_p}");
    }
    text
}

/// Returns a time, and its error if that is a larger share than [`ERROR_SHARE`].
fn with_error(duration: Duration, error: Duration) -> String {
    let (nanos, error) = (duration.as_nanos() as u64, error.as_nanos() as u64);
    if error > nanos / ERROR_SHARE {
        format!("{} ± {}", time(nanos), time(error))
    } else {
        time(nanos)
    }
}

/// A wait, and the time in a queue after it.
type Wait<'a> = &'a [Span];

/// Returns the spans of the longest time in which it did not run.
fn longest_wait(life: &Life) -> Option<Wait<'_>> {
    let runs = |span: &Span| matches!(span.state, State::Running(_) | State::Unknown);
    life.spans.split(runs).filter(|wait| !wait.is_empty()).max_by_key(|wait| sum(wait.iter()))
}

/// Returns how long spans lasted together. Times in a file may be anything.
fn sum<'a>(spans: impl Iterator<Item = &'a Span>) -> u64 {
    spans.fold(0, |sum, span| sum.saturating_add(span.duration().0))
}

fn explain(explainer: &Explainer<'_>, id: u64, title: &str, wait: Wait<'_>) -> String {
    let Explainer { trace, lives, .. } = *explainer;
    let (first, last) = (&wait[0], &wait[wait.len() - 1]);
    let whole = Span { state: first.state, begin: first.begin, end: last.end };
    let (nanos, error) = whole.duration();
    let mut text = format!(
        "{title}: {} ± {}, from {} to {} of the recording\n",
        time(nanos),
        time(error),
        time(first.begin.middle()),
        time(last.end.middle()),
    );
    for (i, span) in wait.iter().enumerate().take(SPANS_MAX) {
        let lasted = time(span.duration().0);
        let next = wait.get(i + 1);
        let woken = match next.map(|next| (next.state, next.begin)) {
            Some((State::Runnable(by), when)) if by != Cause::Unknown => {
                let place = match by {
                    Cause::Goroutine(by) => trace.snapshot.wakes.place(id, by, when),
                    _ => None,
                };
                let at = place.map(|place| format!(" at {place}")).unwrap_or_default();
                format!(", woken by {}{at}", cause(trace, lives, by))
            }
            Some(_) => String::new(),
            None if i + 1 == wait.len() && span.end.earliest == trace.snapshot.record.copied => {
                ", and still does".into()
            }
            None => String::new(),
        };
        let _ = match span.state {
            State::Waiting(Stop::Parked(reason)) => {
                writeln!(text, "  {lasted} in {}{woken}", reason.text())
            }
            State::WithoutP(call) => {
                writeln!(text, "  {lasted} without a P, {}{woken}", call_text(call))
            }
            State::Runnable(_) => {
                writeln!(text, "  {lasted} runnable{}", behind(explainer, span))
            }
            _ => writeln!(text, "  {lasted} in an unknown state"),
        };
    }
    if wait.len() > SPANS_MAX {
        let _ = writeln!(text, "  and {} more", wait.len() - SPANS_MAX);
    }
    text
}

fn call_text(call: Call) -> String {
    match call {
        Call::Blocking => "in blocking".into(),
        Call::Number(number) => format!("blocked in {}", call_name(number)),
        Call::Unknown => "blocked in the kernel".into(),
    }
}

/// Returns the name of a system call that often blocks, or its number.
fn call_name(number: u32) -> String {
    let name = match i64::from(number) {
        libc::SYS_read => "read",
        libc::SYS_write => "write",
        libc::SYS_pread64 => "pread64",
        libc::SYS_pwrite64 => "pwrite64",
        libc::SYS_readv => "readv",
        libc::SYS_writev => "writev",
        libc::SYS_openat => "openat",
        libc::SYS_fsync => "fsync",
        libc::SYS_fdatasync => "fdatasync",
        libc::SYS_flock => "flock",
        libc::SYS_fcntl => "fcntl",
        libc::SYS_ioctl => "ioctl",
        libc::SYS_futex => "futex",
        libc::SYS_nanosleep => "nanosleep",
        libc::SYS_clock_nanosleep => "clock_nanosleep",
        libc::SYS_wait4 => "wait4",
        libc::SYS_waitid => "waitid",
        libc::SYS_connect => "connect",
        libc::SYS_accept4 => "accept4",
        libc::SYS_recvfrom => "recvfrom",
        libc::SYS_recvmsg => "recvmsg",
        libc::SYS_sendto => "sendto",
        libc::SYS_sendmsg => "sendmsg",
        libc::SYS_ppoll => "ppoll",
        libc::SYS_epoll_pwait => "epoll_pwait",
        libc::SYS_mmap => "mmap",
        libc::SYS_munmap => "munmap",
        libc::SYS_mprotect => "mprotect",
        libc::SYS_madvise => "madvise",
        libc::SYS_rt_sigtimedwait => "rt_sigtimedwait",
        #[cfg(target_arch = "x86_64")]
        libc::SYS_pause => "pause",
        _ => return format!("system call {number}"),
    };
    name.into()
}

/// Returns which goroutines ran while a goroutine was queued, and how often each refused to stop.
fn behind(explainer: &Explainer<'_>, queued: &Span) -> String {
    let (from, to) = (queued.begin.middle(), queued.end.middle());
    let ran = explainer.turns.between(from, to, NAMED_MAX);
    let mut text = String::new();
    for (i, &(nanos, id)) in ran.longest.iter().enumerate() {
        let separator = if i == 0 { ", behind " } else { ", " };
        let who = describe(explainer.trace, explainer.lives, id);
        let _ = write!(text, "{separator}{who} for {}", time(nanos));
        text += &refusals(explainer, id, from, to);
    }
    let _ = match ran.others {
        Others::Goroutines(0) | Others::Turns(0) => Ok(()),
        Others::Goroutines(n) => write!(text, ", and {n} others"),
        Others::Turns(n) => write!(text, ", and others in {n} turns"),
    };
    text
}

/// Returns why a goroutine was not preempted between two times.
fn refusals(explainer: &Explainer<'_>, of: u64, from: u64, to: u64) -> String {
    let mut reasons: Vec<(&str, u32)> = Vec::new();
    for (when, why) in explainer.refusals.get(&of).into_iter().flatten() {
        if (from..=to).contains(when) {
            match reasons.iter_mut().find(|(reason, _)| *reason == why.text()) {
                Some((_, times)) => *times += 1,
                None => reasons.push((why.text(), 1)),
            }
        }
    }
    let text = |(why, times): &(&str, u32)| match times {
        1 => format!("{why}, once"),
        _ => format!("{why}, {times} times"),
    };
    let reasons: Vec<String> = reasons.iter().map(text).collect();
    if reasons.is_empty() {
        return String::new();
    }
    format!(" (preemption refused: {})", reasons.join("; "))
}

/// Returns a time in a unit that fits.
fn time(nanos: u64) -> String {
    match nanos {
        0..1_000 => format!("{nanos} ns"),
        1_000..1_000_000 => format!("{:.1} µs", nanos as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", nanos as f64 / 1e6),
        _ => format!("{:.2} s", nanos as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_unit_that_fits() {
        let cases = [(0, "0 ns"), (999, "999 ns"), (1_500, "1.5 µs"), (12_340_000, "12.3 ms")];
        for (nanos, text) in cases {
            assert_eq!(time(nanos), text);
        }
        assert_eq!(time(2_500_000_000), "2.50 s");
    }

    #[test]
    fn an_error_is_printed_if_it_matters() {
        let text =
            |time, error| with_error(Duration::from_micros(time), Duration::from_micros(error));
        assert_eq!(text(1_000, 20), "1.0 ms");
        assert_eq!(text(1_000, 21), "1.0 ms ± 21.0 µs");
        assert_eq!(text(0, 0), "0 ns");
        assert_eq!(text(0, 1), "0 ns ± 1.0 µs");
    }
}
