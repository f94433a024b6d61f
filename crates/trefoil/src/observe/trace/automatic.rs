//! `TREFOIL_TRACE=on`: every runtime records from its start. A file is written when a goroutine
//! panics, at a deadlock of the program, at a certain deadlock of a part of it, on SIGQUIT, and
//! after the incidents that the variable names.
//!
//! The number of files is limited: a server whose handlers panic all the time must not fill the
//! disk. Only the user can read a file, and the folder may be one in which others can write: a file
//! or a symbolic link that has the name already is left as it is, and the next number is taken.

use super::wakes::Wakes;
use super::watches::{self, Settings, WatchError};
use super::{Snapshot, file};
use crate::sched::Sched;
use crate::sched::record::DEFAULT_BYTES;
use crate::sched::trigger::{Incident, Noticed};
use crate::sys::clock::{Nanos, now};
use crate::sys::env::{TraceEnv, WatchEnv};
use crate::sys::stderr::write_all_stderr;
use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The most files that one process writes.
const FILES_MAX: u32 = 16;
/// The numbers in names that are tried. Files of an earlier process may have the same id in their
/// names: in a container it often is 1.
const NUMBERS_MAX: u32 = 256;
/// What the environment's watches wait after an incident: before the file is written, and until the
/// next one.
const LOOK_FORWARD: Duration = Duration::from_millis(20);
const COOL_DOWN: Duration = Duration::from_secs(10);
/// How long a program that is stuck waits for a goroutine that makes a copy as well, which may be one
/// of those that are stuck; and then for the places of wakers.
const COPY_LIMIT: Nanos = 2_000_000_000;

/// Where files are written. Set if `TREFOIL_TRACE` is.
static DIR: OnceLock<PathBuf> = OnceLock::new();
/// How many files were begun.
static FILES: AtomicU32 = AtomicU32::new(0);
/// The number in the name of the next file.
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// Records `sched`, which has just been started.
///
/// # Errors
/// If the variable names a signal that cannot be watched.
pub(crate) fn record_from_start(sched: &Sched, env: TraceEnv) -> io::Result<()> {
    let _ = DIR.set(env.dir.map_or_else(|| PathBuf::from("."), PathBuf::from));
    super::start_recording(sched, env.bytes.unwrap_or(DEFAULT_BYTES), env.exact_clock);
    for (kind, limit) in env.watches {
        let (incident, signal) = match kind {
            WatchEnv::Runnable => (Incident::Runnable, None),
            WatchEnv::Late => (Incident::TimerLate, None),
            WatchEnv::Blocked => (Incident::Blocked, None),
            WatchEnv::Signal(signal) => (Incident::Signal, Some(signal)),
        };
        // The sender of a signal decides when a file is written.
        let (look_forward, cool_down) = if signal.is_some() {
            (Duration::ZERO, Duration::ZERO)
        } else {
            (LOOK_FORWARD, COOL_DOWN)
        };
        let settings =
            Settings { incident, signal, limit, look_forward, cool_down, at_most: FILES_MAX };
        let watching = watches::watch(sched, settings, move |noticed, snapshot| {
            write_after_incident(incident, noticed, &snapshot);
        });
        match watching {
            // It stays as long as the runtime; afterwards a signal has its previous effect.
            Ok(watching) => std::mem::forget(watching),
            // There are fewer kinds than places for watches, but one may be named several times.
            Err(WatchError::TooMany) => {}
            Err(WatchError::Signal(e)) => {
                let text = format!("TREFOIL_TRACE=on=signal: {e}");
                return Err(io::Error::new(e.kind(), text));
            }
        }
    }
    Ok(())
}

fn write_after_incident(incident: Incident, noticed: Noticed, snapshot: &Snapshot) {
    let lasted = Duration::from_nanos(noticed.nanos);
    let id = noticed.goroutine(incident);
    let who = id.map_or_else(String::new, |id| snapshot.describe(id));
    let what = match incident {
        Incident::Runnable => format!("{who} was runnable for {lasted:.1?}"),
        Incident::TimerLate => format!("a timer was {lasted:.1?} late"),
        Incident::Blocked => {
            let call = id.and_then(|id| snapshot.blocked_in(id, noticed.nanos));
            let call = call.map_or_else(String::new, |call| format!(" in {call}"));
            format!("{who} blocked its thread for {lasted:.1?}{call}")
        }
        Incident::Panic => format!("{who} panicked"),
        Incident::Signal => format!("signal {} has arrived", noticed.id),
    };
    write(snapshot, &format!("{what}; "), id);
}

/// After a panic of the goroutine or task `id`: tells the watches of panics, and writes a file as
/// [`write_automatically`] does.
pub(crate) fn write_after_panic(sched: &Sched, id: u64) {
    if sched.record.is_on() {
        sched.tell(Incident::Panic, Noticed { id, nanos: 0 });
    }
    write_automatically(sched, Some(id));
}

/// Writes a file with what was recorded of `sched`, and prints its name; or nothing if
/// `TREFOIL_TRACE` is not set, or if [`FILES_MAX`] files were written. The printed command names
/// `id`.
pub(crate) fn write_automatically(sched: &Sched, id: Option<u64>) {
    if DIR.get().is_some()
        && FILES.load(Ordering::Relaxed) < FILES_MAX
        && let Some(snapshot) = super::snapshot(sched, now() + COPY_LIMIT)
    {
        write(&snapshot, "", id);
    }
}

/// Writes a file, and prints its name, why it was written, and how to read it; or nothing if enough
/// files were written.
fn write(snapshot: &Snapshot, why: &str, id: Option<u64>) {
    let relaxed = Ordering::Relaxed;
    let next = |files| (files < FILES_MAX).then_some(files + 1);
    let Ok(files) = FILES.fetch_update(relaxed, relaxed, next) else { return };
    let (path, file) = create();
    let find_places = |wakes: &Wakes| wakes.place_elsewhere(now() + COPY_LIMIT);
    let written = file.and_then(|file| file::write(snapshot, file, find_places));
    let path = path.display();
    let id = id.map_or_else(String::new, |id| format!(" {id}"));
    let mut text = match written {
        Ok(()) => format!(
            "trefoil: {why}trace written to {path}; read it with: trefoil trace why {path}{id} \
             (cargo install trefoil-cli)\n"
        ),
        Err(e) => format!("trefoil: {why}cannot write a trace to {path}: {e}\n"),
    };
    if files + 1 == FILES_MAX {
        text += "trefoil: that was the last trace file of this process\n";
    }
    write_all_stderr(text.as_bytes());
}

/// Creates a file with the next number whose name no file has. Returns its path too, or the last
/// one that was tried.
fn create() -> (PathBuf, io::Result<File>) {
    loop {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("trefoil-{}-{number}.trace", std::process::id());
        let path = DIR.get().map_or_else(|| PathBuf::from(&name), |dir| dir.join(&name));
        let file = File::options().write(true).create_new(true).mode(0o600).open(&path);
        match file {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && number + 1 < NUMBERS_MAX => {}
            file => return (path, file),
        }
    }
}
