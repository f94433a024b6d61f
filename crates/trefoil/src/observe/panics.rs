//! Panics on goroutines: the message names the goroutine.
//!
//! std's default hook would say `thread '<unnamed>'`. If the default hook is in place when the first
//! runtime starts, ours prints the same message with the goroutine's id and name instead. A hook that
//! the user has set is left alone.

use crate::sched::current_g;
use std::any::Any;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::panic::{self, PanicHookInfo};
use std::sync::Once;

type Hook = Box<dyn Fn(&PanicHookInfo<'_>) + Sync + Send + 'static>;

static INSTALL: Once = Once::new();

/// Puts our hook in, once.
pub(crate) fn install_hook() {
    INSTALL.call_once(|| {
        if panic::catch_unwind(is_default).unwrap_or(false) {
            let default = panic::take_hook();
            panic::set_hook(Box::new(move |info| match current_g() {
                Some(_) => report(info),
                None => default(info),
            }));
        }
    });
}

/// Whether the hook in place is std's own. `take_hook` leaves the default one behind, so a second
/// `take_hook` shows what it looks like: boxes of the same zero-sized function compare equal.
fn is_default() -> bool {
    let current = panic::take_hook();
    let default = panic::take_hook();
    let address = |hook: &Hook| -> *const (dyn Fn(&PanicHookInfo<'_>) + Sync + Send) { &**hook };
    #[allow(ambiguous_wide_pointer_comparisons)]
    let same = address(&current) == address(&default) && size_of_val(&*current) == 0;
    if !same {
        panic::set_hook(current);
    }
    same
}

fn report(info: &PanicHookInfo<'_>) {
    let Some(g) = current_g() else { return };
    let message = payload_text(info.payload());
    let place = info.location().map(|l| format!(" at {l}")).unwrap_or_default();
    let name = g.name().map(|n| format!(" \"{n}\"")).unwrap_or_default();
    let trace = Backtrace::capture();
    let trace = match trace.status() {
        BacktraceStatus::Captured => format!("stack backtrace:\n{trace}"),
        _ => {
            "note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace\n".into()
        }
    };
    let text = format!("\ngoroutine {}{name} panicked{place}:\n{message}\n{trace}", g.id());
    crate::sys::stderr::write_all_stderr(text.as_bytes());
}

/// The text of a panic, if it has one.
fn payload_text(payload: &(dyn Any + Send)) -> &str {
    if let Some(s) = payload.downcast_ref::<&'static str>() {
        s
    } else if let Some(s) = payload.downcast_ref::<String>() {
        s
    } else {
        "Box<dyn Any>"
    }
}
