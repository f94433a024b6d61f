//! Writes every goroutine as text, in Go's form.

use super::snapshot::{self, GoroutineSnapshot, StackSnapshot};
use super::symbols::SymbolCache;
use crate::sched::Sched;
use crate::sched::g::Status;
use std::fmt::Write;

/// Bytes of a goroutine's name that are shown.
const NAME_MAX_BYTES: usize = 80;

/// Returns the text for every goroutine of `sched`, the caller first, then by id.
pub(crate) fn dump(sched: &Sched) -> String {
    let mut out = String::new();
    let mut symbols = SymbolCache::default();
    snapshot::for_each(sched, |goroutine| {
        let _ = write_goroutine(&mut out, &mut symbols, &goroutine, sched);
    });
    out
}

fn write_goroutine(
    out: &mut String,
    symbols: &mut SymbolCache,
    goroutine: &GoroutineSnapshot,
    sched: &Sched,
) -> std::fmt::Result {
    let g = goroutine.g;
    write!(out, "goroutine {}", g.id())?;
    let mut name = [0; NAME_MAX_BYTES];
    if let Some(len) = g.copy_name(&mut name) {
        write!(out, " {:?}", String::from_utf8_lossy(&name[..len]))?;
    }
    write!(out, " [{}", goroutine.state())?;
    if let Status::Waiting(_) = goroutine.status {
        let minutes = sched.minutes_waited(g);
        if minutes > 0 {
            write!(out, ", {minutes} minutes")?;
        }
    }
    writeln!(out, "]:")?;
    match &goroutine.stack {
        StackSnapshot::Addresses(addresses) => {
            for frame in symbols.frames(addresses) {
                writeln!(out, "{}", frame.name)?;
                if frame.line != 0 {
                    writeln!(out, "\t{}:{}", frame.file, frame.line)?;
                }
            }
        }
        StackSnapshot::Running => {
            writeln!(out, "\tgoroutine running on other thread; stack unavailable")?
        }
        StackSnapshot::Unknown => writeln!(out, "\tno stack yet, or it was resumed meanwhile")?,
    }
    let (function, place) = g.origin();
    // The type name of a closure is the path of its function, then `{{closure}}`.
    let function = function.strip_suffix("::{{closure}}").unwrap_or(function);
    write!(out, "created by {function}")?;
    if g.parent() != 0 {
        write!(out, " in goroutine {}", g.parent())?;
    }
    writeln!(out, "\n\t{}:{}\n", place.file(), place.line())
}
