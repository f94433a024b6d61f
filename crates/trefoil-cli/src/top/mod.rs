//! `trefoil top`: what the page of `trefoil-observe` shows, in a terminal.
//!
//! It asks the server of the process if it has one. Otherwise, and if the server does not answer,
//! it reads the process from outside ([`Outside`]), which needs nothing from it: then there are
//! groups, states, stacks and Ps, but no latencies, no use of CPUs and no graph of waits.
//!
//! The screen that refreshes needs the feature `screen`. Without it, one page is printed.

// What only the screen uses.
#![cfg_attr(not(feature = "screen"), allow(dead_code))]

mod plain;
mod processes;
#[cfg(feature = "screen")]
mod screen;
mod server;
pub(crate) mod view;

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::inspect::{Outside, printable};
use crate::print_error;
use crate::report::print_line;
use server::Address;
use view::View;

/// How long a server that has failed is not asked again.
const SERVER_PAUSE: Duration = Duration::from_secs(30);

pub(crate) struct Top {
    /// The number of a process, or the address of its server. Defaults to the only process of this
    /// user that uses trefoil.
    pub(crate) target: Option<String>,
    /// Print one page and exit.
    pub(crate) once: bool,
}

pub(crate) fn run(top: &Top) -> ExitCode {
    let source = match &top.target {
        Some(target) => Source::parse(target),
        None => match choose() {
            Ok(Some(pid)) => Ok(Source::of_process(pid)),
            Ok(None) => return ExitCode::SUCCESS,
            Err(error) => Err(error),
        },
    };
    let shown = source.and_then(|mut source| {
        if top.once || !io::stdout().is_terminal() || !io::stdin().is_terminal() {
            print_line(plain::page(&source.view(None)?).trim_end());
            return Ok(ExitCode::SUCCESS);
        }
        // What can never be shown is told before the screen is taken.
        let first = source.view(None)?;
        watch(source, first)
    });
    shown.unwrap_or_else(|error| {
        print_error(printable(&error));
        ExitCode::FAILURE
    })
}

/// Shows the screen until the user quits.
#[cfg(feature = "screen")]
fn watch(source: Source, first: View) -> Result<ExitCode, String> {
    screen::watch(source, first).map_err(|e| format!("the terminal cannot be used: {e}"))
}

/// Prints one page, and how to get the screen.
#[cfg(not(feature = "screen"))]
fn watch(_source: Source, first: View) -> Result<ExitCode, String> {
    print_line(plain::page(&first).trim_end());
    print_line(
        "\nThis is one page. For a screen that refreshes every second, build the command with \
         --features screen.",
    );
    Ok(ExitCode::SUCCESS)
}

/// Returns the only process; lists them if there are several.
fn choose() -> Result<Option<u32>, String> {
    let processes = processes::list();
    match &processes[..] {
        [] => Err("no other process of this user uses trefoil".into()),
        [one] => Ok(Some(one.pid)),
        several => {
            print_line("     PID  SERVER  PROGRAM");
            for process in several {
                print_line(process.line());
            }
            print_line("Name one of them: trefoil top PID");
            Ok(None)
        }
    }
}

/// Where views come from.
enum Source {
    Server(Address),
    Process {
        pid: u32,
        outside: Option<Box<Outside>>,
        /// The server that has answered last.
        server: Option<Address>,
        /// Until when the server is not asked again because it has failed, and how.
        failed: Option<(Instant, String)>,
    },
}

impl Source {
    fn parse(target: &str) -> Result<Source, String> {
        if let Ok(pid) = target.parse() {
            return Ok(Source::of_process(pid));
        }
        let address = Address::parse(target);
        address.map(Source::Server).ok_or_else(|| {
            format!("{target}: expected the number of a process, or http://ADDRESS:PORT")
        })
    }

    fn of_process(pid: u32) -> Source {
        Source::Process { pid, outside: None, server: None, failed: None }
    }

    /// Returns the runtime with this number, or the first one.
    fn view(&mut self, runtime: Option<u64>) -> Result<View, String> {
        let (pid, outside, server, failed) = match self {
            Source::Server(address) => return address.view(runtime),
            Source::Process { pid, outside, server, failed } => (*pid, outside, server, failed),
        };
        failed.take_if(|(until, _)| Instant::now() >= *until);
        let is_stopped = processes::is_stopped(pid);
        // The process may start its server later.
        if failed.is_none()
            && !is_stopped
            && let Some(address) = Address::of_process(pid)
        {
            let runtime = runtime.filter(|_| server.is_some());
            match address.view(runtime) {
                Ok(view) => {
                    *server = Some(address);
                    return Ok(view);
                }
                Err(error) => *failed = Some((Instant::now() + SERVER_PAUSE, error)),
            }
        }
        let runtime = runtime.filter(|_| server.is_none());
        *server = None;
        let outside = match outside {
            Some(outside) => outside,
            None => outside.insert(Box::new(Outside::open(pid)?)),
        };
        let mut view = outside.view(runtime)?;
        if is_stopped {
            view.source.push_str(" (it is stopped)");
        } else if let Some((_, error)) = failed {
            view.source.push_str(&format!(" ({error})"));
        }
        Ok(view)
    }

    /// Returns the stack of a goroutine of a runtime of the last view.
    fn stack(&mut self, runtime: u64, id: u64) -> Result<String, String> {
        match self {
            Source::Server(address) | Source::Process { server: Some(address), .. } => {
                address.stack(runtime, id)
            }
            Source::Process { outside: Some(outside), .. } => outside.stack(runtime, id),
            Source::Process { .. } => Err("the process was not read yet".into()),
        }
    }
}
