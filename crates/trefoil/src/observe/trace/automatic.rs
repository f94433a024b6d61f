//! `TREFOIL_TRACE=on`: every runtime records from its start, and a file is written when a goroutine
//! panics, when the program is deadlocked, and on SIGQUIT.
//!
//! The number of files is limited: a server whose handlers panic all the time must not fill the
//! disk.

use crate::sched::Sched;
use crate::sched::record::DEFAULT_BYTES;
use crate::sys::stderr::write_all_stderr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// The most files that one process writes after panics.
const FILES_MAX: u32 = 16;

/// Where files are written. Set if `TREFOIL_TRACE` is.
static DIR: OnceLock<PathBuf> = OnceLock::new();
/// How many files were begun.
static FILES: AtomicU32 = AtomicU32::new(0);

/// Records `sched`, which has just been started.
pub(crate) fn record_from_start(sched: &Sched, bytes: Option<usize>, dir: Option<String>) {
    let _ = DIR.set(dir.map_or_else(|| PathBuf::from("."), PathBuf::from));
    sched.start_recording(bytes.unwrap_or(DEFAULT_BYTES));
}

/// After a panic: as [`write_automatically`], unless enough files were written.
pub(crate) fn write_after_panic(sched: &Sched) {
    static PANICS: AtomicU32 = AtomicU32::new(0);
    if DIR.get().is_some() && PANICS.fetch_add(1, Ordering::Relaxed) < FILES_MAX {
        write_automatically(sched);
    }
}

/// Writes a file with what was recorded of `sched`, and prints its name; or nothing if
/// `TREFOIL_TRACE` is not set.
pub(crate) fn write_automatically(sched: &Sched) {
    let Some(dir) = DIR.get() else { return };
    let number = FILES.fetch_add(1, Ordering::Relaxed);
    let path = dir.join(format!("trefoil-{}-{number}.trace", std::process::id()));
    let text = match write(sched, &path) {
        Ok(false) => return,
        Ok(true) => {
            format!("trefoil: trace written to {0}: trefoil trace why {0}\n", path.display())
        }
        Err(e) => format!("trefoil: cannot write a trace to {}: {e}\n", path.display()),
    };
    write_all_stderr(text.as_bytes());
}

/// Returns whether there was anything to write.
fn write(sched: &Sched, path: &Path) -> std::io::Result<bool> {
    let Some(snapshot) = super::snapshot(sched) else { return Ok(false) };
    snapshot.write(File::create(path)?)?;
    Ok(true)
}
