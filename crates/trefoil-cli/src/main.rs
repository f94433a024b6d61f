//! The `trefoil` command: shows the runtime at work.
//!
//! Without arguments it plays all scenes. A scene is one row of [`scenes::SCENES`].

mod proc;
mod scenes;
mod stage;

use std::io::{self, IsTerminal};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use scenes::{SCENES, Scene};
use stage::Stage;

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
    #[arg(value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    goroutines: u64,
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

fn main() -> ExitCode {
    if std::env::var_os(scenes::live::DEADLOCK).is_some() {
        scenes::live::deadlock_now();
        return ExitCode::SUCCESS;
    }
    let cli = Cli::parse();
    let (scene, list) = match cli.command {
        None => (None, false),
        Some(Command::Tour { scene, list }) => (scene, list),
    };
    let chosen: Vec<&Scene> = match &scene {
        None => SCENES.iter().collect(),
        Some(name) => SCENES.iter().filter(|scene| scene.name == name).collect(),
    };
    if chosen.is_empty() {
        eprintln!("trefoil: no such scene: {}", scene.unwrap_or_default());
        eprintln!("`trefoil tour --list` shows them.");
        return ExitCode::from(2);
    }
    if list {
        for scene in chosen {
            println!("{:<12} {}", scene.name, scene.line);
        }
        return ExitCode::SUCCESS;
    }
    let stage = Stage::new(cli.show.plain || !can_draw(), cli.show.goroutines);
    for (i, scene) in chosen.into_iter().enumerate() {
        if i > 0 {
            println!();
        }
        stage.title(scene.name, scene.line);
        if let Err(error) = (scene.play)(&stage) {
            eprintln!("trefoil: {}: {error}", scene.name);
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
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
        assert_eq!(cli.show.goroutines, 1_000_000);
        assert!(Cli::try_parse_from(["trefoil", "--goroutines", "0"]).is_err());
    }

    #[test]
    fn scene_names_are_unique() {
        let mut names: Vec<_> = SCENES.iter().map(|scene| scene.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), SCENES.len());
    }
}
