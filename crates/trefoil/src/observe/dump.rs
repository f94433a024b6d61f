//! Every goroutine as text, in Go's form.

use super::unwind::{self, Tables};
use crate::sched::g::{self, G, Status};
use crate::sched::{Sched, current_g};
use std::fmt::Write;

/// The most of a name that is shown.
const NAME_MAX_BYTES: usize = 80;

/// Every goroutine of `sched`, the running one first, then by id.
pub(crate) fn dump(sched: &Sched) -> String {
    let mut out = String::new();
    let mut all: Vec<&'static G> = Vec::new();
    g::for_each(&mut |g| {
        if g.status() != Status::Dead && std::ptr::eq(g.sched_hint(), sched) {
            all.push(g);
        }
    });
    let here = current_g();
    let is_here = |g: &G| here.is_some_and(|here| std::ptr::eq(here, g));
    all.sort_by_key(|g| (!is_here(g), g.id()));
    let mut tables = Tables::load();
    for g in all {
        let _ = one(&mut out, &mut tables, g, is_here(g), sched);
    }
    out
}

fn one(
    out: &mut String,
    tables: &mut Tables,
    g: &'static G,
    here: bool,
    sched: &Sched,
) -> std::fmt::Result {
    let status = g.status();
    let state = match status {
        Status::Dead => return Ok(()), // ended meanwhile
        Status::Runnable => "runnable",
        Status::Running => "running",
        Status::Waiting(reason) => reason.text(),
    };
    write!(out, "goroutine {}", g.id())?;
    let mut name = [0; NAME_MAX_BYTES];
    if let Some(len) = g.copy_name(&mut name) {
        write!(out, " {:?}", String::from_utf8_lossy(&name[..len]))?;
    }
    write!(out, " [{state}")?;
    if let Status::Waiting(_) = status {
        let minutes = sched.minutes_since(g);
        if minutes > 0 {
            write!(out, ", {minutes} minutes")?;
        }
    }
    writeln!(out, "]:")?;
    match status {
        Status::Running if here => {
            let mut frames = Vec::new();
            backtrace::trace(|frame| {
                // A return address: the call is before it.
                frames.push((frame.ip() as u64).saturating_sub(1));
                frames.len() < unwind::FRAMES_MAX * 2
            });
            unwind::write_frames(out, &frames);
        }
        Status::Running => writeln!(out, "\tgoroutine running on other thread; stack unavailable")?,
        _ => match tables.frames(g) {
            Some(frames) => unwind::write_frames(out, &frames),
            None => writeln!(out, "\tno stack yet, or it moved on")?,
        },
    }
    writeln!(out, "{}", created_by(g))?;
    writeln!(out)
}

/// `created by F in goroutine N`, and where.
fn created_by(g: &G) -> String {
    let (function, place) = g.origin();
    // The type of a closure is the path of its function and `{{closure}}`.
    let function = function.strip_suffix("::{{closure}}").unwrap_or(function);
    let parent = match g.parent() {
        0 => String::new(),
        parent => format!(" in goroutine {parent}"),
    };
    format!("created by {function}{parent}\n\t{}:{}", place.file(), place.line())
}
