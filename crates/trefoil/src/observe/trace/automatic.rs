//! `TREFOIL_TRACE=on`: every runtime records from its start, and a file is written when a goroutine
//! panics, when the program is deadlocked, on SIGQUIT, and after incidents that the variable names.
//!
//! The number of files is limited: a server whose handlers panic all the time must not fill the
//! disk.

use super::Snapshot;
use super::watches::{self, Settings};
use crate::sched::Sched;
use crate::sched::record::DEFAULT_BYTES;
use crate::sched::trigger::{Incident, Noticed};
use crate::sys::env::{TraceEnv, WatchEnv};
use crate::sys::stderr::write_all_stderr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The most files that one process writes after panics, and after incidents of one kind.
const FILES_MAX: u32 = 16;
/// What the environment's watches wait after an incident: before the file is written, and until the
/// next one.
const LOOK_FORWARD: Duration = Duration::from_millis(20);
const COOL_DOWN: Duration = Duration::from_secs(10);

/// Where files are written. Set if `TREFOIL_TRACE` is.
static DIR: OnceLock<PathBuf> = OnceLock::new();
/// How many files were begun.
static FILES: AtomicU32 = AtomicU32::new(0);

/// Records `sched`, which has just been started.
pub(crate) fn record_from_start(sched: &Sched, env: TraceEnv) {
    let _ = DIR.set(env.dir.map_or_else(|| PathBuf::from("."), PathBuf::from));
    sched.start_recording(env.bytes.unwrap_or(DEFAULT_BYTES), env.exact_clock);
    for (kind, limit) in env.watches {
        let incident = match kind {
            WatchEnv::Runnable => Incident::Runnable,
            WatchEnv::Late => Incident::TimerLate,
            WatchEnv::Blocked => Incident::Blocked,
        };
        let settings = Settings {
            incident,
            limit,
            look_forward: LOOK_FORWARD,
            cool_down: COOL_DOWN,
            at_most: FILES_MAX,
        };
        // It stays as long as the runtime. There are fewer kinds than places for watches, but one
        // may be named several times.
        let watching = watches::watch(sched, settings, move |noticed, snapshot| {
            write_after_incident(incident, noticed, &snapshot);
        });
        std::mem::forget(watching);
    }
}

fn write_after_incident(incident: Incident, noticed: Noticed, snapshot: &Snapshot) {
    let lasted = Duration::from_nanos(noticed.nanos);
    let what = match incident {
        Incident::Runnable => format!("goroutine {} was runnable for {lasted:.1?}", noticed.id),
        Incident::TimerLate => format!("a timer was {lasted:.1?} late"),
        Incident::Blocked => {
            format!("goroutine {} blocked its thread for {lasted:.1?}", noticed.id)
        }
        Incident::Panic => "a goroutine panicked".into(),
    };
    let path = next_path();
    let written = File::create(&path).and_then(|file| snapshot.write(file));
    report(&path, written.map(|()| true), &format!("{what}; "));
}

/// After a panic of goroutine or task `id`: tells who watches panics, and writes a file as
/// [`write_automatically`] does, unless enough were written.
pub(crate) fn write_after_panic(sched: &Sched, id: u64) {
    if sched.record.is_on() {
        sched.tell(Incident::Panic, Noticed { id, nanos: 0 });
    }
    static PANICS: AtomicU32 = AtomicU32::new(0);
    if DIR.get().is_some() && PANICS.fetch_add(1, Ordering::Relaxed) < FILES_MAX {
        write_automatically(sched);
    }
}

/// Writes a file with what was recorded of `sched`, and prints its name; or nothing if
/// `TREFOIL_TRACE` is not set.
pub(crate) fn write_automatically(sched: &Sched) {
    if DIR.get().is_some() {
        let path = next_path();
        report(&path, write(sched, &path), "");
    }
}

fn next_path() -> PathBuf {
    let number = FILES.fetch_add(1, Ordering::Relaxed);
    let name = format!("trefoil-{}-{number}.trace", std::process::id());
    DIR.get().map_or_else(|| PathBuf::from(&name), |dir| dir.join(&name))
}

/// Returns whether there was anything to write.
fn write(sched: &Sched, path: &Path) -> std::io::Result<bool> {
    let Some(snapshot) = super::snapshot(sched) else { return Ok(false) };
    snapshot.write(File::create(path)?)?;
    Ok(true)
}

/// Prints the name of a file that was written, and why.
fn report(path: &Path, written: std::io::Result<bool>, why: &str) {
    let path = path.display();
    let text = match written {
        Ok(false) => return,
        Ok(true) => format!("trefoil: {why}trace written to {path}: trefoil trace why {path}\n"),
        Err(e) => format!("trefoil: {why}cannot write a trace to {path}: {e}\n"),
    };
    write_all_stderr(text.as_bytes());
}
