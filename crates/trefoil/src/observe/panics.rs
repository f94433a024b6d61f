//! Panics on goroutines: the message names the goroutine.
//!
//! std's default hook would say `thread '<unnamed>'`. If the default hook is in place when the first
//! runtime starts, ours prints the same message with the goroutine's id and name instead. Where the user
//! (or the test harness) has set another, that one is called, after a line that names the goroutine.

use crate::sched::current_g;
use std::any::Any;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::panic::{self, PanicHookInfo};
use std::sync::{Once, mpsc};
use std::time::Duration;

type Hook = Box<dyn Fn(&PanicHookInfo<'_>) + Sync + Send + 'static>;

static INSTALL: Once = Once::new();

/// How long the start of a runtime waits for another thread that puts the hook in.
const INSTALL_LIMIT: Duration = Duration::from_millis(50);

/// Puts our hook in, once.
pub(crate) fn install_hook() {
    if !std::thread::panicking() {
        install_now();
        return;
    }
    // std refuses to change the hook on a thread that panics: the first goroutine is started by a
    // destructor during unwinding, or by the hook itself. In the hook, which nobody can replace before it
    // returns, waiting for the other thread would be waiting for ever.
    let (done, wait) = mpsc::channel();
    let install = move || {
        install_now();
        let _ = done.send(());
    };
    if std::thread::Builder::new().name("trefoil-hook".into()).spawn(install).is_ok() {
        let _ = wait.recv_timeout(INSTALL_LIMIT);
    }
}

fn install_now() {
    INSTALL.call_once(|| {
        let report: fn(&PanicHookInfo<'_>, &Hook) = if is_default() { full } else { head };
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| match current_g() {
            Some(_) => report(info, &before),
            None => before(info),
        }));
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

/// `goroutine 7 "name"`.
fn who() -> String {
    let Some(g) = current_g() else { return String::new() };
    let name = g.name().map(|n| format!(" {n:?}")).unwrap_or_default();
    format!("goroutine {}{name}", g.id())
}

/// Before somebody else's message.
fn head(info: &PanicHookInfo<'_>, before: &Hook) {
    crate::sys::stderr::write_all_stderr(format!("\n{}:", who()).as_bytes());
    before(info);
}

/// Instead of std's message.
fn full(info: &PanicHookInfo<'_>, _: &Hook) {
    let message = payload_text(info.payload());
    let place = info.location().map(|l| format!(" at {l}")).unwrap_or_default();
    let trace = Backtrace::capture();
    let trace = match trace.status() {
        BacktraceStatus::Captured => format!("stack backtrace:\n{trace}"),
        _ => {
            "note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace\n".into()
        }
    };
    let text = format!("\n{} panicked{place}:\n{message}\n{trace}", who());
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
