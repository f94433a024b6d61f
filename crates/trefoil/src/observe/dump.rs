//! Every goroutine as text, in Go's form.

use super::census::{self, Seen, Stack};
use super::symbols::Symbols;
use crate::sched::Sched;
use crate::sched::g::Status;
use std::fmt::Write;

/// The most of a name that is shown.
const NAME_MAX_BYTES: usize = 80;

/// Every goroutine of `sched`, the running one first, then by id.
pub(crate) fn dump(sched: &Sched) -> String {
    let mut out = String::new();
    let mut symbols = Symbols::default();
    census::for_each(sched, |seen| {
        let _ = one(&mut out, &mut symbols, &seen, sched);
    });
    out
}

fn one(out: &mut String, symbols: &mut Symbols, seen: &Seen, sched: &Sched) -> std::fmt::Result {
    let g = seen.g;
    write!(out, "goroutine {}", g.id())?;
    let mut name = [0; NAME_MAX_BYTES];
    if let Some(len) = g.copy_name(&mut name) {
        write!(out, " {:?}", String::from_utf8_lossy(&name[..len]))?;
    }
    write!(out, " [{}", seen.state())?;
    if let Status::Waiting(_) = seen.status {
        let minutes = sched.minutes_since(g);
        if minutes > 0 {
            write!(out, ", {minutes} minutes")?;
        }
    }
    writeln!(out, "]:")?;
    match &seen.stack {
        Stack::At(addresses) => {
            for frame in symbols.frames(addresses) {
                writeln!(out, "{}", frame.name)?;
                if frame.line != 0 {
                    writeln!(out, "\t{}:{}", frame.file, frame.line)?;
                }
            }
        }
        Stack::Elsewhere => {
            writeln!(out, "\tgoroutine running on other thread; stack unavailable")?
        }
        Stack::Unknown => writeln!(out, "\tno stack yet, or it moved on")?,
    }
    let (function, place) = g.origin();
    // The type of a closure is the path of its function and `{{closure}}`.
    let function = function.strip_suffix("::{{closure}}").unwrap_or(function);
    write!(out, "created by {function}")?;
    if g.parent() != 0 {
        write!(out, " in goroutine {}", g.parent())?;
    }
    writeln!(out, "\n\t{}:{}\n", place.file(), place.line())
}
