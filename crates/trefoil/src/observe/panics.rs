//! Panics on goroutines: the message names the goroutine.
//!
//! std's default hook would print `thread '<unnamed>'`. If the default hook is in place when the
//! first runtime starts, the hook of this file prints the same message with the goroutine's id and
//! name. If the program or the test harness has set another hook, that one is called after a line
//! that names the goroutine.

use super::trace::write_after_panic;
use crate::sched::record;
use crate::sched::simulation::{self, WaitOutside};
use crate::sched::{current_g, task};
use crate::sys::thread::spawn_std;
use std::any::Any;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::panic::{self, PanicHookInfo};
use std::sync::{Arc, Condvar, Mutex, Once, PoisonError};
use std::time::Duration;

type Hook = Box<dyn Fn(&PanicHookInfo<'_>) + Sync + Send + 'static>;

static INSTALL: Once = Once::new();

/// How long the start of a runtime waits for another thread that installs the hook.
const INSTALL_LIMIT: Duration = Duration::from_millis(50);

/// Installs the hook, once.
pub(crate) fn install_hook() {
    if !std::thread::panicking() {
        install_now();
        return;
    }
    // This thread panics: a destructor during unwinding, or the hook itself, starts the first
    // runtime. std refuses to change the hook on such a thread, so another thread does it. While
    // the hook itself runs it cannot be replaced, so the wait is limited.
    let is_done = Arc::new((Mutex::new(false), Condvar::new()));
    let shared = is_done.clone();
    let install = move || {
        install_now();
        *shared.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        shared.1.notify_one();
    };
    if spawn_std("trefoil-hook", None, Box::new(install)).is_ok() {
        let guard = is_done.0.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = is_done.1.wait_timeout_while(guard, INSTALL_LIMIT, |is_done| !*is_done);
    }
}

fn install_now() {
    INSTALL.call_once(|| {
        let report: fn(&PanicHookInfo<'_>, &Hook) =
            if is_default() { report_all } else { report_title };
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| match current_g() {
            Some(g) => {
                if let Some(simulation) = simulation::here() {
                    let text = format!("{} {info}", title());
                    if !simulation.note_panic(record::id_of(g), text) {
                        return;
                    }
                }
                // std's lock of backtraces, too.
                let _outside = WaitOutside::for_shared_lock(|| true);
                report(info, &before);
                // SAFETY: a goroutine that runs keeps its runtime.
                write_after_panic(unsafe { &*g.sched.get() }, record::id_of(g));
            }
            None => before(info),
        }));
    });
}

/// Returns whether std's default hook is in place. `take_hook` leaves the default hook behind, so a
/// second `take_hook` returns it for comparison: boxes of the same zero-sized function compare
/// equal.
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

/// Returns `goroutine 7 "name"`, or `task 8 "name", polled by goroutine 7`.
fn title() -> String {
    let Some(g) = current_g() else { return String::new() };
    if let Some(task) = task::current() {
        // SAFETY: the task is being polled, so its name is there.
        let name = unsafe { (task.body.get().name)(task) };
        let name = name.map(|n| format!(" {n:?}")).unwrap_or_default();
        return format!("task {}{name}, polled by goroutine {}", task.id(), g.id());
    }
    let name = g.name().map(|n| format!(" {n:?}")).unwrap_or_default();
    format!("goroutine {}{name}", g.id())
}

/// Prints a line before the message of another hook.
fn report_title(info: &PanicHookInfo<'_>, before: &Hook) {
    crate::sys::stderr::write_all_stderr(format!("\n{}:", title()).as_bytes());
    before(info);
}

/// Prints the whole message, in the form of std's default hook.
fn report_all(info: &PanicHookInfo<'_>, _: &Hook) {
    let message = payload_text(info.payload());
    let place = info.location().map(|l| format!(" at {l}")).unwrap_or_default();
    let trace = Backtrace::capture();
    let trace = match trace.status() {
        BacktraceStatus::Captured => format!("stack backtrace:\n{trace}"),
        _ => {
            "note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace\n".into()
        }
    };
    let text = format!("\n{} panicked{place}:\n{message}\n{trace}", title());
    crate::sys::stderr::write_all_stderr(text.as_bytes());
}

/// Returns the text of a panic, as std's default hook does.
fn payload_text(payload: &(dyn Any + Send)) -> &str {
    if let Some(s) = payload.downcast_ref::<&'static str>() {
        s
    } else if let Some(s) = payload.downcast_ref::<String>() {
        s
    } else {
        "Box<dyn Any>"
    }
}
