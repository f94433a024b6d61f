//! `trefoil trace`: explains what a program has recorded.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use trefoil::trace::Snapshot;

use crate::print_error;
use crate::report::print_line;

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
    if let Some(title) = title(&snapshot) {
        print_line(title);
    }
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

/// Says which process was recorded, and until when. None if the file does not say it.
fn title(snapshot: &Snapshot) -> Option<String> {
    let (program, pid) = (snapshot.program()?, snapshot.pid()?);
    let since = snapshot.taken_at()?.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    let recorded = snapshot.recorded_for();
    Some(format!("{program}, process {pid}, recorded for {recorded:.1?} until {}\n", date(since)))
}

/// Returns the date and time of a moment after 1970, in UTC.
fn date(since_1970: Duration) -> String {
    let (days, seconds) = (since_1970.as_secs() / 86_400, since_1970.as_secs() % 86_400);
    let is_leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let (mut year, mut day) = (1970, days);
    while day >= 365 + u64::from(is_leap(year)) {
        day -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if day < length {
            break;
        }
        day -= length;
        month += 1;
    }
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year}-{month:02}-{:02} {hour:02}:{minute:02}:{second:02} UTC", day + 1)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let date = |seconds| date(Duration::from_secs(seconds));
        assert_eq!(date(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(date(951_782_400), "2000-02-29 00:00:00 UTC");
        assert_eq!(date(1_735_689_599), "2024-12-31 23:59:59 UTC");
        assert_eq!(date(1_735_689_600), "2025-01-01 00:00:00 UTC");
    }
}
