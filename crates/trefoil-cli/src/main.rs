//! The `trefoil` command: shows the runtime at work.
//!
//! Without arguments it plays all scenes. A scene is one row of [`scenes::SCENES`]; it prints what it measures
//! beside what is promised.
//!
//! | exit code | meaning |
//! |---|---|
//! | 0 | every promise was kept |
//! | 1 | one was not, or a scene took too long |
//! | 2 | the arguments make no sense |
//! | 130, 141, 143 | Ctrl-C, nobody reads the output any more, SIGTERM |

mod curtain;
mod ledger;
mod proc;
mod scenes;
mod stage;

use std::io::{self, IsTerminal, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use scenes::SCENES;
use stage::{Stage, grouped, say};

/// Goroutines that can be asked for. The runtime's arena holds 65,536 chunks of 256 stacks, 16.7 million, less
/// what main goroutines and each P's cache take.
const GOROUTINES_MAX: u64 = 16_000_000;

/// Seconds that a scene has: so many, and as many again for each million goroutines asked for.
const SCENE_SECONDS: u64 = 30;

/// Goroutines for Rust: the scheduler at work.
///
/// Without a command: plays the tour, all scenes one after the other.
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
    /// No bars and no colours, as where the output is not a terminal or NO_COLOR is set.
    #[arg(long, global = true)]
    plain: bool,
    /// How many goroutines a scene that counts them starts.
    #[arg(long, global = true, value_name = "N", default_value_t = 1_000_000)]
    #[arg(value_parser = goroutines)]
    goroutines: u64,
    /// Seconds after which a scene is given up; 30, and 30 more for each million goroutines, if not said.
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
    /// Plays the scenes, or one of them.
    Tour {
        /// The scene's name; all, one after the other, if there is none.
        scene: Option<String>,
        /// Only lists the scenes.
        #[arg(long)]
        list: bool,
    },
}

fn goroutines(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(0) => Err("at least one is needed".into()),
        Ok(n) if n > GOROUTINES_MAX => Err(format!(
            "at most {}: there are no addresses for the stacks of more",
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
    };
    if let Some(name) = &chosen
        && !SCENES.iter().any(|scene| scene.name == name)
    {
        complain(format_args!("no such scene: {name}. There are:\n{}", list_of_scenes()));
        return ExitCode::from(2);
    }
    if list {
        say(list_of_scenes());
        return ExitCode::SUCCESS;
    }
    // Settings in the environment may be nonsense, too.
    if let Err(error) = trefoil::Runtime::builder().build() {
        complain(format_args!("the runtime does not start: {error}"));
        return ExitCode::FAILURE;
    }
    let plain = cli.show.plain || !can_draw();
    curtain::hang(!plain);
    if play(&Stage::new(plain, cli.show.goroutines), chosen.as_deref(), cli.show.seconds()) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Plays the scene of that name, or all; whether every promise was kept.
fn play(stage: &Stage, chosen: Option<&str>, seconds: u32) -> bool {
    let wanted = |name| chosen.is_none_or(|chosen| chosen == name);
    for (i, scene) in SCENES.iter().enumerate().filter(|(_, scene)| wanted(scene.name)) {
        if chosen.is_none() && i > 0 {
            say("");
        }
        curtain::watch(i, seconds);
        stage.title(scene.name, scene.line);
        match catch_unwind(AssertUnwindSafe(|| (scene.play)(stage))) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => stage.failed(error),
            Err(_) => stage.failed("the scene panicked"),
        }
    }
    curtain::unwatch();
    stage.sum_up()
}

fn list_of_scenes() -> String {
    let rows = SCENES.iter().map(|scene| format!("{:<12} {}", scene.name, scene.line));
    rows.collect::<Vec<_>>().join("\n")
}

/// On standard error, whether somebody reads it or not.
fn complain(text: impl std::fmt::Display) {
    let _ = writeln!(io::stderr(), "trefoil: {text}");
}

/// Whether bars and colours are welcome: both outputs are a terminal, and `NO_COLOR` is not set.
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
