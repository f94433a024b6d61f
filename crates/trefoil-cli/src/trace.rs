//! `trefoil trace`: explains what a program has recorded.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Subcommand;
use trefoil::trace::Snapshot;

use crate::print_error;
use crate::report::print_line;

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Say what a goroutine did, and why it waited.
    Why {
        /// The recording.
        file: PathBuf,
        /// Its id, as in dumps and panics. Defaults to all goroutines.
        goroutine: Option<u64>,
    },
    /// Convert it for https://ui.perfetto.dev, which shows it.
    Perfetto {
        /// The recording.
        file: PathBuf,
        /// The file to write, usually with the ending .pftrace.
        out: PathBuf,
    },
}

pub(crate) fn run(command: Command) -> ExitCode {
    let done = match command {
        Command::Why { file, goroutine } => why(&file, goroutine),
        Command::Perfetto { file, out } => perfetto(&file, &out),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_error(format_args!("{error}"));
            ExitCode::FAILURE
        }
    }
}

fn open(path: &Path) -> Result<Snapshot, String> {
    let read = || Snapshot::read(File::open(path)?);
    read().map_err(|e| format!("{}: {e}", path.display()))
}

fn why(path: &Path, goroutine: Option<u64>) -> Result<(), String> {
    let snapshot = open(path)?;
    let Some(id) = goroutine else {
        snapshot.why_all().into_iter().for_each(|(_, text)| print_line(text));
        return Ok(());
    };
    if let Some(text) = snapshot.why(id) {
        print_line(text);
        return Ok(());
    }
    let known = snapshot.goroutines();
    let range = match (known.first(), known.last()) {
        (Some(first), Some(last)) => format!("it has {} from {first} to {last}", known.len()),
        _ => "it is empty".into(),
    };
    Err(format!("{}: no goroutine {id} in this recording; {range}", path.display()))
}

fn perfetto(path: &Path, out: &Path) -> Result<(), String> {
    let snapshot = open(path)?;
    let write = || {
        let mut to = io::BufWriter::new(File::create(out)?);
        snapshot.write_perfetto(&mut to)?;
        to.flush()
    };
    write().map_err(|e| format!("{}: {e}", out.display()))
}
