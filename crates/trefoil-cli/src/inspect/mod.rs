//! `trefoil ps`, `dump` and `why`: the goroutines of another process, from outside.
//!
//! They read the memory of a live process or of a core file. The process need not do anything for
//! it, so they work on a process that hangs, is stopped, or was never meant to be inspected. No
//! thread is stopped, so the stack of a goroutine that runs is shown only if its thread is blocked
//! in the kernel, or stopped.

mod files;
mod goroutines;
mod images;
mod layout;
mod memory;
mod outside;
mod show;
mod stacks;

use std::process::ExitCode;

use crate::print_error;
use crate::report::print_line;
use files::LoadedFiles;
use goroutines::Runtime;
use layout::Layout;
use memory::Process;
use stacks::Unwinder;

pub(crate) use memory::printable;
pub(crate) use outside::Outside;

pub(crate) struct Ps {
    /// The number of a process, or the path of a core file. The same below.
    pub(crate) target: String,
    /// Print a line per goroutine instead of groups.
    pub(crate) all: bool,
    /// Only goroutines in a state that contains this text.
    pub(crate) state: Option<String>,
    /// The number of lines.
    pub(crate) top: usize,
}

/// The commands that inspect a process.
pub(crate) enum Command {
    Ps(Ps),
    Dump {
        target: String,
    },
    Why {
        target: String,
        /// Its id. Defaults to the goroutines that have waited longest.
        goroutine: Option<u64>,
    },
}

pub(crate) fn run(command: &Command) -> ExitCode {
    let done = match command {
        Command::Ps(ps) => inspect(&ps.target, |runtimes, unwinder| {
            let options = show::Listing { all: ps.all, state: ps.state.as_deref(), top: ps.top };
            Ok(show::ps(runtimes, unwinder, &options))
        }),
        Command::Dump { target } => {
            inspect(target, |runtimes, unwinder| Ok(show::dump(runtimes, unwinder)))
        }
        Command::Why { target, goroutine } => {
            inspect(target, |runtimes, unwinder| show::why(runtimes, unwinder, *goroutine))
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_error(printable(&error));
            ExitCode::FAILURE
        }
    }
}

/// Reads the process and prints what `show` makes of it.
fn inspect(
    name: &str,
    show: impl FnOnce(&[Runtime], &mut Unwinder) -> Result<String, String>,
) -> Result<(), String> {
    let process = Process::open(name)?;
    let named = |error| format!("{name}: {error}");
    let loaded = LoadedFiles::read(&process);
    let mut unwinder = Unwinder::new(process.cpu, &loaded);
    let runtimes = Layout::find_all(&process, &loaded)
        .and_then(|layouts| goroutines::read(&process, &layouts, &mut unwinder))
        .map_err(named)?;
    if runtimes.is_empty() {
        return Err(named(
            "no runtime is in it: none has started, or the process ended meanwhile".to_owned(),
        ));
    }
    print_line(printable(show(&runtimes, &mut unwinder).map_err(named)?.trim_end()));
    Ok(())
}
