//! What `trefoil ps`, `dump` and `why` print.

use std::collections::HashMap;
use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;

use super::goroutines::{Goroutine, Kind, Place, Runtime, Stack, Wait, What};
use super::memory::Thread;
use super::stacks::Unwinder;
use crate::report::grouped;
use trefoil_base::symbols::{Cpu, Frame};

/// Characters of a name that are shown.
const NAME_MAX_CHARS: usize = 80;
/// How many goroutines `why` explains if none is named.
const WHY_GOROUTINES: usize = 10;
/// How many calls of its stack `why` shows.
const WHY_FRAMES: usize = 4;
/// How many goroutines of a chain of holders `why` shows.
const WHY_HOLDERS: usize = 20;
/// How many goroutines of a scope are named.
const SCOPE_NAMED_MAX: usize = 8;

/// What `ps` lists.
pub(super) struct Listing<'a> {
    pub(super) all: bool,
    pub(super) state: Option<&'a str>,
    pub(super) top: usize,
}

/// A line of `ps`: goroutines that `--all` or the groups put together.
pub(super) struct Row {
    count: usize,
    /// Of one goroutine: its id and name.
    title: String,
    pub(super) state: String,
    /// The longest and the shortest wait.
    waited_ms: Option<(u64, u64)>,
    pub(super) at: String,
    pub(super) created_at: String,
}

/// Returns the goroutines as a table.
pub(super) fn ps(runtimes: &[Runtime], unwinder: &mut Unwinder, listing: &Listing<'_>) -> String {
    let mut out = String::new();
    for runtime in runtimes {
        let _ = writeln!(out, "{}", summary(runtime));
        let mut rows: Vec<Row> = Vec::new();
        let mut groups: HashMap<(String, String, String), usize> = HashMap::new();
        for g in &runtime.goroutines {
            if listing.state.is_some_and(|state| !state_of(g).contains(state)) {
                continue;
            }
            let row = row(g, unwinder);
            let key = (row.state.clone(), row.at.clone(), row.created_at.clone());
            match groups.get(&key) {
                Some(&i) if !listing.all => rows[i].add(&row),
                _ => {
                    groups.insert(key, rows.len());
                    rows.push(row);
                }
            }
        }
        if !listing.all {
            rows.iter_mut().filter(|row| row.count > 1).for_each(|row| row.title.clear());
            // The largest groups first, then the longest waits.
            rows.sort_by_key(|row| std::cmp::Reverse((row.count, row.waited_ms)));
        }
        table(&mut out, &rows, listing.top);
    }
    out
}

fn table(out: &mut String, rows: &[Row], top: usize) {
    let cells = |row: &Row| {
        let count = grouped(row.count as u64);
        let waited = row.waited_ms.map_or_else(
            || "–".to_owned(),
            |(longest, shortest)| match (age(longest), age(shortest)) {
                (longest, shortest) if longest == shortest => longest,
                (longest, shortest) => format!("{shortest} … {longest}"),
            },
        );
        [
            count,
            row.state.clone(),
            waited,
            row.at.clone(),
            row.created_at.clone(),
            row.title.clone(),
        ]
    };
    let heads = ["COUNT", "STATE", "WAITED", "AT", "CREATED AT", "WHICH"].map(str::to_owned);
    let mut lines = vec![heads];
    lines.extend(rows.iter().take(top).map(cells));
    let width =
        |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..6).map(width).collect();
    for line in &lines {
        let _ = write!(out, "{:>1$}", line[0], widths[0]);
        for column in 1..5 {
            let _ = write!(out, "  {:<1$}", line[column], widths[column]);
        }
        let _ = writeln!(out, "  {}", line[5]);
    }
    let hidden: usize = rows.iter().skip(top).map(|row| row.count).sum();
    if hidden > 0 {
        let (hidden, lines) = (grouped(hidden as u64), grouped((rows.len() - top) as u64));
        let _ = writeln!(out, "… and {hidden} more in {lines} lines (--top, --state)");
    }
    out.push('\n');
}

impl Row {
    fn add(&mut self, other: &Row) {
        self.count += other.count;
        self.waited_ms = match (self.waited_ms, other.waited_ms) {
            (Some((a, b)), Some((c, d))) => Some((a.max(c), b.min(d))),
            (one, other) => one.or(other),
        };
    }
}

pub(super) fn row(g: &Goroutine, unwinder: &mut Unwinder) -> Row {
    let at = match &g.stack {
        Stack::Addresses(addresses) => {
            let frames = unwinder.frames(addresses);
            program_frames(&frames).first().map(|frame| short_frame(frame)).unwrap_or_default()
        }
        Stack::NotStarted => "not started".into(),
        Stack::Running => "running".into(),
        Stack::None | Stack::Unknown | Stack::NotInCore => "–".into(),
    };
    Row {
        count: 1,
        title: title(g),
        state: state_of(g),
        waited_ms: g.waited_ms.map(|ms| (ms, ms)),
        at,
        created_at: g.place.as_ref().map_or_else(|| "–".into(), short_place),
    }
}

/// Returns its kind, id and name.
pub(super) fn title(g: &Goroutine) -> String {
    let kind = match g.kind {
        Kind::Goroutine => "goroutine",
        Kind::Task => "task",
    };
    match &g.name {
        Some(name) => {
            let name: String = name.chars().take(NAME_MAX_CHARS).collect();
            format!("{kind} {} {name:?}", g.id)
        }
        None => format!("{kind} {}", g.id),
    }
}

/// Returns the state, and what its thread does.
fn state_of(g: &Goroutine) -> String {
    if let Some(thread) = &g.thread
        && let Some(number) = thread.system_call
    {
        return format!("running, in {}", system_call(thread.cpu, number));
    }
    if g.preempted { format!("{}, preempted", g.state) } else { g.state.clone() }
}

/// Returns a line about a runtime.
fn summary(runtime: &Runtime) -> String {
    let count = |kind| runtime.goroutines.iter().filter(|g| g.kind == kind).count() as u64;
    let (goroutines, tasks) = (count(Kind::Goroutine), count(Kind::Task));
    let active = runtime.ps.iter().filter(|p| p.status != "retired").count();
    let busy = runtime.ps.iter().filter(|p| p.status == "running").count();
    format!(
        "runtime {}: goroutines {}, tasks {}, Ps {active} ({busy} busy), threads {}",
        runtime.id,
        grouped(goroutines),
        grouped(tasks),
        runtime.ms.len(),
    )
}

/// Returns every goroutine with its stack, in the form of `trefoil::debug::dump`.
pub(super) fn dump(runtimes: &[Runtime], unwinder: &mut Unwinder) -> String {
    let mut out = String::new();
    let holders = Holders::new(runtimes);
    for runtime in runtimes {
        if runtimes.len() > 1 {
            let _ = writeln!(out, "{}\n", summary(runtime));
        }
        for g in &runtime.goroutines {
            let _ = write_goroutine(&mut out, unwinder, g, &holders);
        }
    }
    out
}

pub(super) fn write_goroutine(
    out: &mut String,
    unwinder: &mut Unwinder,
    g: &Goroutine,
    holders: &Holders<'_>,
) -> std::fmt::Result {
    write!(out, "{} [{}", title(g), g.state)?;
    if let Some(carrier) = g.polled_by {
        write!(out, ", polled by goroutine {carrier}")?;
    }
    if let Some(minutes) = g.waited_ms.map(|ms| ms / 60_000).filter(|&minutes| minutes > 0) {
        write!(out, ", {minutes} minutes")?;
    }
    if let Some(thread) = &g.thread {
        write!(out, ", {}", thread_text(thread))?;
    }
    writeln!(out, "]:")?;
    if let Some(wait) = &g.wait {
        write!(out, "\t{}", holders.text(wait))?;
        match g.waited_ms {
            Some(ms) => writeln!(out, ", for {}.{} s", ms / 1000, ms % 1000 / 100)?,
            None => writeln!(out)?,
        }
    }
    match &g.stack {
        Stack::Addresses(addresses) => {
            for frame in unwinder.frames(addresses) {
                writeln!(out, "{}", frame.name)?;
                if frame.line != 0 {
                    writeln!(out, "\t{}:{}", frame.file, frame.line)?;
                }
            }
        }
        Stack::Running => {
            writeln!(out, "\tgoroutine running; stack unavailable unless the process is stopped")?
        }
        Stack::NotStarted => writeln!(out, "\tno stack yet")?,
        Stack::None => writeln!(out, "\ta task that waits has no stack")?,
        Stack::Unknown => writeln!(out, "\tit ran while its stack was read")?,
        Stack::NotInCore => writeln!(out, "\tits stack is not in the core file")?,
    }
    writeln!(out, "{}\n", created_by(g))
}

/// Returns where it was started, in the form of dumps.
fn created_by(g: &Goroutine) -> String {
    let mut out = String::from("created by ");
    out.push_str(g.function.as_deref().unwrap_or("a closure"));
    if g.parent != 0 {
        let _ = write!(out, " in goroutine {}", g.parent);
    }
    if let Some(Place { file, line }) = &g.place {
        let _ = write!(out, "\n\t{file}:{line}");
    }
    out
}

/// Says what a goroutine waits for, or those that have waited longest.
pub(super) fn why(
    runtimes: &[Runtime],
    unwinder: &mut Unwinder,
    id: Option<u64>,
) -> Result<String, String> {
    let all = || runtimes.iter().flat_map(|r| r.goroutines.iter().map(move |g| (r, g)));
    let mut chosen: Vec<_> = match id {
        Some(id) => all().filter(|(_, g)| g.id == id).collect(),
        None => all().filter(|(_, g)| g.is_waiting).collect(),
    };
    if let Some(id) = id
        && chosen.is_empty()
    {
        return Err(format!("there is no goroutine or task {id}, or it has ended"));
    }
    chosen.sort_by_key(|(_, g)| std::cmp::Reverse(g.waited_ms));
    if chosen.is_empty() {
        return Ok("no goroutine waits".into());
    }
    let mut out = String::new();
    let holders = Holders::new(runtimes);
    for (runtime, g) in chosen.iter().take(WHY_GOROUTINES) {
        explain(&mut out, runtime, g, &holders, unwinder);
    }
    if let Some(more) = chosen.len().checked_sub(WHY_GOROUTINES).filter(|&more| more > 0) {
        let _ = writeln!(out, "… and {} more that wait", grouped(more as u64));
    }
    Ok(out)
}

/// Says in words what a goroutine does.
fn explain<'a>(
    out: &mut String,
    runtime: &Runtime,
    g: &'a Goroutine,
    holders: &Holders<'a>,
    unwinder: &mut Unwinder,
) {
    let waited = g.waited_ms.map(age).unwrap_or_default();
    let does = match &g.thread {
        _ if g.is_waiting => format!("waits for {waited}: {}", g.state),
        Some(thread) => format!("runs on {}", thread_text(thread)),
        None if g.preempted => {
            format!("was stopped at the end of its time slice and waits for a P; {}", ps(runtime))
        }
        None if g.state == "runnable" => format!("is runnable and waits for a P; {}", ps(runtime)),
        None => "runs".into(),
    };
    let _ = writeln!(out, "{} {does}", title(g));
    holders.explain(out, g);
    if let Some(m) = runtime.ms.iter().find(|m| m.runs(g)) {
        let _ = match m.p {
            Some(p) => writeln!(out, "  on M {} with P {p}", m.id),
            None => {
                writeln!(out, "  on M {} without a P: it was retaken, or is being reacquired", m.id)
            }
        };
    }
    if let Stack::Addresses(addresses) = &g.stack {
        for frame in program_frames(&unwinder.frames(addresses)).iter().take(WHY_FRAMES) {
            let _ = writeln!(out, "  at {}", short_frame(frame));
        }
    }
    let _ = writeln!(out, "  {}\n", created_by(g).replace("\n\t", ", "));
    return;

    /// Says what the Ps do.
    fn ps(runtime: &Runtime) -> String {
        let active = runtime.ps.iter().filter(|p| p.status != "retired");
        let texts = active.map(|p| {
            let m = runtime.ms.iter().find(|m| Some(m.id) == p.m);
            let g = m.and_then(|m| runtime.goroutines.iter().find(|g| m.runs(g)));
            match g {
                Some(g) => format!("P {} runs {}", p.id, title(g)),
                None => {
                    format!("P {} is {}", p.id, if m.is_some() { "searching" } else { p.status })
                }
            }
        });
        texts.collect::<Vec<_>>().join(", ")
    }
}

/// The goroutines and tasks of all runtimes by their address, to name those that hold something.
pub(super) struct Holders<'a>(HashMap<u64, &'a Goroutine>);

impl<'a> Holders<'a> {
    pub(super) fn new(runtimes: &'a [Runtime]) -> Holders<'a> {
        let all = runtimes.iter().flat_map(|runtime| &runtime.goroutines);
        Holders(all.map(|g| (g.address, g)).collect())
    }

    /// Returns the number `i` of the goroutines and tasks for which `g` waits.
    fn holder(&self, g: &Goroutine, i: usize) -> Option<&'a Goroutine> {
        self.0.get(g.wait.as_ref()?.holders.get(i)?).copied()
    }

    fn title(&self, address: u64) -> String {
        self.0.get(&address).map_or_else(|| "a goroutine that has ended".into(), |g| title(g))
    }

    /// Says what a goroutine waits for, in the words of the program's own dumps.
    fn text(&self, wait: &Wait) -> String {
        let (what, verb) = match wait.what {
            What::Mutex => ("Mutex", "held"),
            What::RwLockRead => ("RwLock (read)", "held"),
            What::RwLockWrite => ("RwLock (write)", "held"),
            What::Readers => ("readers of RwLock", "held"),
            What::Once => ("Once", "run"),
            What::PthreadMutex => ("pthread mutex", "held"),
            What::Join => {
                return match wait.holders.first() {
                    Some(&joined) => format!("joins {}", self.title(joined)),
                    None => "joins a goroutine that has ended".into(),
                };
            }
            What::Scope => {
                let named = wait.holders.iter().take(SCOPE_NAMED_MAX);
                let names: Vec<_> = named.map(|&address| self.title(address)).collect();
                let more = if wait.holders.len() > names.len() { ", …" } else { "" };
                let count = grouped(wait.holders.len() as u64);
                let colon = if names.is_empty() { "" } else { ": " };
                let names = names.join(", ");
                return format!("waits for {count} goroutines of its scope{colon}{names}{more}");
            }
        };
        let holder = match wait.holders.first() {
            Some(&holder) => format!("{verb} by {}", self.title(holder)),
            None => "(holder unknown)".into(),
        };
        let deadline = if wait.has_deadline { ", with a deadline" } else { "" };
        format!("waits for {what} {:#x} {holder}{deadline}", wait.address)
    }

    /// Follows the holders from `g` on. Returns the goroutines on the way, and, if the last one
    /// waits for one of them, the index of that one. No goroutine is visited twice, so it ends.
    fn chain(&self, g: &'a Goroutine) -> (Vec<&'a Goroutine>, Option<usize>) {
        let mut path = vec![(g, 0)];
        // The index of a goroutine that is on the path.
        let mut visited = HashMap::from([(g.address, Some(0))]);
        let mut first_end = None;
        while let Some((at, next)) = path.last_mut() {
            let (at, i) = (*at, *next);
            *next += 1;
            let on_way = |path: &[(&'a Goroutine, usize)]| path.iter().map(|(g, _)| *g).collect();
            let Some(holder) = self.holder(at, i) else {
                first_end.get_or_insert_with(|| on_way(&path));
                visited.insert(at.address, None);
                path.pop();
                continue;
            };
            match visited.get(&holder.address) {
                Some(Some(start)) => return (on_way(&path), Some(*start)),
                Some(None) => {}
                None => {
                    visited.insert(holder.address, Some(path.len()));
                    path.push((holder, 0));
                }
            }
        }
        (first_end.unwrap_or_default(), None)
    }

    /// Says what a goroutine waits for, what the holder of that does, and so on.
    fn explain(&self, out: &mut String, g: &'a Goroutine) {
        if g.wait.is_none() {
            return;
        }
        let (chain, cycle) = self.chain(g);
        for (i, g) in chain.iter().take(WHY_HOLDERS).enumerate() {
            let subject = if i == 0 { String::new() } else { title(g) + " " };
            let _ = match &g.wait {
                Some(wait) => writeln!(out, "  {subject}{}", self.text(wait)),
                None => writeln!(out, "  {subject}[{}]", state_of(g)),
            };
        }
        if let Some(more) = chain.len().checked_sub(WHY_HOLDERS).filter(|&more| more > 0) {
            let _ = writeln!(out, "  … and {} more", grouped(more as u64));
        }
        let Some(start) = cycle else { return };
        let members = &chain[start..];
        let is_certain = members.iter().all(|g| g.wait.as_ref().is_some_and(|w| w.is_certain));
        let certainty = if is_certain { "certain" } else { "probable" };
        let _ = write!(out, "  deadlock ({certainty}): ");
        let _ = match (members, start) {
            ([one], _) => writeln!(out, "{} waits for itself", title(one)),
            (_, 0) => writeln!(out, "{} goroutines wait for each other", members.len()),
            ([first, ..], _) => {
                let others = members.len() - 1;
                writeln!(out, "{} and {others} more wait for each other", title(first))
            }
            ([], _) => Ok(()),
        };
    }
}

/// Returns the frames from the first one that is the program's own, or all if none is.
fn program_frames(frames: &[Arc<Frame>]) -> &[Arc<Frame>] {
    let own = frames.iter().position(|frame| !frame.is_library() && frame.line != 0);
    &frames[own.unwrap_or(0)..]
}

fn thread_text(thread: &Thread) -> String {
    match thread.system_call {
        Some(number) => format!("thread {} in {}", thread.tid, system_call(thread.cpu, number)),
        None => format!("thread {}", thread.tid),
    }
}

/// Returns the last part of a path and the line.
fn short_place(place: &Place) -> String {
    let file = Path::new(&place.file).file_name().unwrap_or_default().display();
    format!("{file}:{}", place.line)
}

/// Returns the function without the parameters of its types, and where it is.
fn short_frame(frame: &Frame) -> String {
    match frame.line {
        0 => frame.name.clone(),
        line => {
            let place = Place { file: frame.file.clone(), line };
            format!("{} ({})", frame.name, short_place(&place))
        }
    }
}

/// Returns a duration in the largest fitting unit.
fn age(ms: u64) -> String {
    match ms {
        0..10_000 => format!("{}.{} s", ms / 1000, ms % 1000 / 100),
        10_000..600_000 => format!("{} s", ms / 1000),
        600_000..36_000_000 => format!("{} min", ms / 60_000),
        _ => format!("{} h", ms / 3_600_000),
    }
}

/// System calls that block: their names, and their numbers on x86_64 and on aarch64, which lacks
/// some.
const SYSTEM_CALLS: &[(&str, u64, Option<u64>)] = &[
    ("read", 0, Some(63)),
    ("write", 1, Some(64)),
    ("open", 2, None),
    ("openat", 257, Some(56)),
    ("close", 3, Some(57)),
    ("poll", 7, None),
    ("ppoll", 271, Some(73)),
    ("select", 23, None),
    ("pselect6", 270, Some(72)),
    ("pread64", 17, Some(67)),
    ("pwrite64", 18, Some(68)),
    ("readv", 19, Some(65)),
    ("writev", 20, Some(66)),
    ("pause", 34, None),
    ("nanosleep", 35, Some(101)),
    ("clock_nanosleep", 230, Some(115)),
    ("connect", 42, Some(203)),
    ("accept", 43, Some(202)),
    ("accept4", 288, Some(242)),
    ("sendto", 44, Some(206)),
    ("recvfrom", 45, Some(207)),
    ("sendmsg", 46, Some(211)),
    ("recvmsg", 47, Some(212)),
    ("wait4", 61, Some(260)),
    ("waitid", 247, Some(95)),
    ("flock", 73, Some(32)),
    ("fsync", 74, Some(82)),
    ("fdatasync", 75, Some(83)),
    ("futex", 202, Some(98)),
    ("epoll_wait", 232, None),
    ("epoll_pwait", 281, Some(22)),
    ("rt_sigtimedwait", 128, Some(137)),
    ("rt_sigsuspend", 130, Some(133)),
    ("sched_yield", 24, Some(124)),
    ("munmap", 11, Some(215)),
    ("madvise", 28, Some(233)),
    ("mmap", 9, Some(222)),
];

/// Returns the name of a system call that blocks, or its number.
fn system_call(cpu: Cpu, number: u64) -> String {
    let is_it = |&&(_, x86_64, aarch64): &&(&str, u64, Option<u64>)| match cpu {
        Cpu::X86_64 => x86_64 == number,
        Cpu::Aarch64 => aarch64 == Some(number),
    };
    match SYSTEM_CALLS.iter().find(is_it) {
        Some((name, ..)) => (*name).to_owned(),
        None => format!("system call {number}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_call_has_the_name_of_its_cpu() {
        let names = |cpu, numbers: [i64; 4]| numbers.map(|n| system_call(cpu, n as u64));
        let expected = ["futex", "ppoll", "read", "clock_nanosleep"];
        assert_eq!(names(Cpu::X86_64, [202, 271, 0, 230]), expected);
        assert_eq!(names(Cpu::Aarch64, [98, 73, 63, 115]), expected);
        assert_eq!(system_call(Cpu::Aarch64, 1000), "system call 1000");
        let here = if cfg!(target_arch = "aarch64") { Cpu::Aarch64 } else { Cpu::X86_64 };
        let numbers = [libc::SYS_futex, libc::SYS_ppoll, libc::SYS_read, libc::SYS_clock_nanosleep];
        assert_eq!(names(here, numbers), expected);
    }

    #[test]
    fn ages_have_the_unit_that_fits() {
        let shown = [0, 1_250, 59_000, 660_000, 7_200_000, 90_000_000].map(age);
        assert_eq!(shown, ["0.0 s", "1.2 s", "59 s", "11 min", "120 min", "25 h"]);
    }

    #[test]
    fn a_table_says_how_many_goroutines_it_leaves_out() {
        let row = |count| Row {
            count,
            title: String::new(),
            state: "sleep".into(),
            waited_ms: Some((2000, 1000)),
            at: "main".into(),
            created_at: "a.rs:1".into(),
        };
        let mut out = String::new();
        table(&mut out, &[row(5000), row(2), row(1)], 1);
        assert!(out.contains("5,000  sleep  1.0 s … 2.0 s  main  a.rs:1"), "{out}");
        assert!(out.contains("… and 3 more in 2 lines"), "{out}");
    }
}
