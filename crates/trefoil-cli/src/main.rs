//! The `trefoil` command: shows the runtime at work.
//!
//! `trefoil trace` explains recordings; `trefoil ps`, `dump`, `why` and `top` show the goroutines
//! of another process. Without arguments it plays all scenes. A scene is one row of
//! [`scenes::SCENES`]; it prints its measurements beside what is promised.
//!
//! | exit code | meaning |
//! |---|---|
//! | 0 | every promise was kept |
//! | 1 | a promise was broken, or a scene exceeded its time limit |
//! | 2 | invalid arguments |
//! | 130, 141, 143 | Ctrl-C, the reader has closed the output, SIGTERM |

mod exit;
mod inspect;
mod proc;
mod report;
mod results;
mod scenes;
mod top;
mod trace;

use std::io::{self, IsTerminal, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use report::{Report, grouped, print_line};
use scenes::SCENES;

/// The most goroutines that a user can ask for. The runtime's arena holds 65,536 chunks of 256
/// stacks, 16.7 million, less what main goroutines and each P's cache take.
const GOROUTINES_MAX: u64 = 16_000_000;

/// The time limit of a scene in seconds; it grows by as much for each million goroutines.
const SCENE_SECONDS: u64 = 30;

/// Goroutines for Rust: the scheduler at work.
///
/// Without a command, plays the tour: all scenes, one after the other.
#[derive(Parser)]
#[command(name = "trefoil", version)]
struct Cli {
    #[command(flatten)]
    show: Show,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Args)]
struct Show {
    /// Print no bars and no colours. Default if the output is not a terminal or NO_COLOR is set.
    #[arg(long, global = true)]
    plain: bool,
    /// Number of goroutines that the scene `million` starts.
    #[arg(long, global = true, value_name = "N", default_value_t = 1_000_000)]
    #[arg(value_parser = goroutines)]
    goroutines: u64,
    /// Time limit of a scene in seconds. Defaults to 30, and 30 more for each million goroutines.
    #[arg(long, global = true, value_name = "SECONDS")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=86_400))]
    limit: Option<u32>,
}

impl Show {
    fn seconds(&self) -> u32 {
        let usual = SCENE_SECONDS + SCENE_SECONDS * self.goroutines / 1_000_000;
        self.limit.unwrap_or(usual as u32)
    }
}

#[derive(Subcommand)]
enum Command {
    /// Play the scenes, or one of them.
    Tour {
        /// The scene's name. Defaults to all scenes, one after the other.
        scene: Option<String>,
        /// Only list the scenes.
        #[arg(long)]
        list: bool,
    },
    /// Explain what a program has recorded (TREFOIL_TRACE=on, or `trace::Snapshot::write`).
    #[command(subcommand)]
    Trace(trace::Command),
    #[command(flatten)]
    Inspect(inspect::Command),
    /// Watch a process: its goroutines, Ps, CPUs and waits; with the feature `screen` refreshed
    /// every second, otherwise once.
    Top(top::Top),
}

fn goroutines(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(0) => Err("at least one is needed".into()),
        Ok(n) if n > GOROUTINES_MAX => Err(format!(
            "at most {}: the address space has no room for more stacks",
            grouped(GOROUTINES_MAX)
        )),
        Ok(n) => Ok(n),
        Err(_) => Err(format!("not a whole number from 1 to {}", grouped(GOROUTINES_MAX))),
    }
}

fn main() -> ExitCode {
    if std::env::var_os(scenes::deadlock::CHILD).is_some() {
        scenes::deadlock::deadlock_now();
        return ExitCode::SUCCESS;
    }
    let cli = Cli::parse();
    let (chosen, list) = match cli.command {
        None => (None, false),
        Some(Command::Tour { scene, list }) => (scene, list),
        Some(Command::Trace(command)) => return trace::run(command),
        Some(Command::Inspect(command)) => return inspect::run(command),
        Some(Command::Top(top)) => return top::run(&top),
    };
    if let Some(name) = &chosen
        && !SCENES.iter().any(|scene| scene.name == name)
    {
        print_error(format_args!("no such scene: {name}. There are:\n{}", list_of_scenes()));
        return ExitCode::from(2);
    }
    if list {
        print_line(list_of_scenes());
        return ExitCode::SUCCESS;
    }
    // Settings in the environment may be invalid as well.
    if let Err(error) = trefoil::Runtime::builder().build() {
        print_error(format_args!("the runtime does not start: {error}"));
        return ExitCode::FAILURE;
    }
    let plain = cli.show.plain || !can_draw();
    exit::install_handlers(!plain);
    if play(&Report::new(plain, cli.show.goroutines), chosen.as_deref(), cli.show.seconds()) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Plays the chosen scene or all; returns whether every promise was kept.
fn play(report: &Report, chosen: Option<&str>, seconds: u32) -> bool {
    let wanted = |name| chosen.is_none_or(|chosen| chosen == name);
    for (i, scene) in SCENES.iter().enumerate().filter(|(_, scene)| wanted(scene.name)) {
        if chosen.is_none() && i > 0 {
            print_line("");
        }
        exit::start_limit(i, seconds);
        report.title(scene.name, scene.line);
        match catch_unwind(AssertUnwindSafe(|| (scene.play)(report))) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => report.failed(error),
            Err(_) => report.failed("the scene panicked"),
        }
    }
    exit::clear_limit();
    report.sum_up()
}

fn list_of_scenes() -> String {
    let rows = SCENES.iter().map(|scene| format!("{:<12} {}", scene.name, scene.line));
    rows.collect::<Vec<_>>().join("\n")
}

/// Prints an error to standard error; ignores a failed write.
pub(crate) fn print_error(text: impl std::fmt::Display) {
    let _ = writeln!(io::stderr(), "trefoil: {text}");
}

/// Returns whether to draw bars and colours: both outputs are terminals and `NO_COLOR` is not set.
fn can_draw() -> bool {
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    io::stdout().is_terminal() && io::stderr().is_terminal() && !no_color
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_arguments_are_consistent() {
        Cli::command().debug_assert();
        let cli = Cli::try_parse_from(["trefoil", "tour", "million", "--plain"]).unwrap();
        assert!(cli.show.plain);
        assert_eq!((cli.show.goroutines, cli.show.seconds()), (1_000_000, 60));
        let cli = Cli::try_parse_from(["trefoil", "--goroutines", "1", "--limit", "5"]).unwrap();
        assert_eq!((cli.show.goroutines, cli.show.seconds()), (1, 5));
    }

    #[test]
    fn scene_names_are_unique() {
        let mut names: Vec<_> = SCENES.iter().map(|scene| scene.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), SCENES.len());
    }
}
