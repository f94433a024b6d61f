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

mod args;
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

use args::{Action, Cli};
use report::{Report, print_line};
use scenes::SCENES;

fn main() -> ExitCode {
    if std::env::var_os(scenes::deadlock::CHILD).is_some() {
        scenes::deadlock::deadlock_now();
        return ExitCode::SUCCESS;
    }
    let cli = Cli::parse();
    let seconds = cli.seconds();
    let (chosen, list) = match cli.action {
        Action::Tour { scene, list } => (scene, list),
        Action::Trace(command) => return trace::run(command),
        Action::Inspect(command) => return inspect::run(&command),
        Action::Top(top) => return top::run(&top),
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
    let plain = cli.plain || !can_draw();
    exit::install_handlers(!plain);
    if play(&Report::new(plain, cli.goroutines), chosen.as_deref(), seconds) {
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

    #[test]
    fn scene_names_are_unique() {
        let mut names: Vec<_> = SCENES.iter().map(|scene| scene.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), SCENES.len());
    }
}
