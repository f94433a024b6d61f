//! The arguments of the command.
//!
//! They are built by hand: clap's derive macros would make a fresh build of the tour several
//! seconds longer.

use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

use crate::report::grouped;
use crate::{inspect, top, trace};

/// The most goroutines that a user can ask for. The runtime's arena holds 65,536 chunks of 256
/// stacks, 16.7 million, less what main goroutines and each P's cache take.
const GOROUTINES_MAX: u64 = 16_000_000;

/// The time limit of a scene in seconds; it grows by as much for each million goroutines.
const SCENE_SECONDS: u64 = 30;

/// What the user asks for.
pub(crate) struct Cli {
    /// Print no bars and no colours.
    pub(crate) plain: bool,
    /// Number of goroutines that the scene `million` starts.
    pub(crate) goroutines: u64,
    limit: Option<u32>,
    pub(crate) action: Action,
}

pub(crate) enum Action {
    /// Play the scenes, or one of them.
    Tour {
        scene: Option<String>,
        /// Only list the scenes.
        list: bool,
    },
    Trace(trace::Command),
    Inspect(inspect::Command),
    Top(top::Top),
}

impl Cli {
    /// Parses the arguments of the process. Exits after `--help`, `--version` or an invalid
    /// argument.
    pub(crate) fn parse() -> Cli {
        Cli::from_matches(&command().get_matches())
    }

    /// Returns the time limit of a scene.
    pub(crate) fn seconds(&self) -> u32 {
        let usual = SCENE_SECONDS + SCENE_SECONDS * self.goroutines / 1_000_000;
        self.limit.unwrap_or(usual as u32)
    }

    fn from_matches(matches: &ArgMatches) -> Cli {
        Cli {
            plain: matches.get_flag("plain"),
            goroutines: optional(matches, "goroutines").unwrap_or(1_000_000),
            limit: optional(matches, "limit"),
            action: Action::from_matches(matches),
        }
    }
}

impl Action {
    fn from_matches(matches: &ArgMatches) -> Action {
        let Some((name, of)) = matches.subcommand() else {
            return Action::Tour { scene: None, list: false };
        };
        match name {
            "tour" => Action::Tour { scene: optional(of, "scene"), list: of.get_flag("list") },
            "trace" => {
                let (name, of) = of.subcommand().expect("clap requires one");
                let file: PathBuf = required(of, "file");
                Action::Trace(match name {
                    "why" => trace::Command::Why { file, goroutine: optional(of, "goroutine") },
                    _ => trace::Command::Perfetto { file, out: required(of, "out") },
                })
            }
            "ps" => Action::Inspect(inspect::Command::Ps(inspect::Ps {
                target: required(of, "target"),
                all: of.get_flag("all"),
                state: optional(of, "state"),
                top: optional(of, "top").unwrap_or(20),
            })),
            "dump" => Action::Inspect(inspect::Command::Dump { target: required(of, "target") }),
            "why" => Action::Inspect(inspect::Command::Why {
                target: required(of, "target"),
                goroutine: optional(of, "goroutine"),
            }),
            _ => {
                Action::Top(top::Top { target: optional(of, "target"), once: of.get_flag("once") })
            }
        }
    }
}

fn optional<T: Clone + Send + Sync + 'static>(matches: &ArgMatches, name: &str) -> Option<T> {
    matches.get_one(name).cloned()
}

fn required<T: Clone + Send + Sync + 'static>(matches: &ArgMatches, name: &str) -> T {
    optional(matches, name).expect("clap requires it")
}

fn command() -> Command {
    Command::new("trefoil")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Goroutines for Rust: the scheduler at work")
        .long_about(
            "Goroutines for Rust: the scheduler at work.\n\n\
             Without a command, plays the tour: all scenes, one after the other.",
        )
        .args(global_options())
        .subcommands([tour(), trace(), ps(), dump(), why(), top()])
}

fn global_options() -> [Arg; 3] {
    [
        flag("plain")
            .help(
                "Print no bars and no colours. Default if the output is not a terminal or \
                 NO_COLOR is set",
            )
            .global(true),
        Arg::new("goroutines")
            .long("goroutines")
            .value_name("N")
            .help("Number of goroutines that the scene `million` starts [default: 1000000]")
            .value_parser(goroutines)
            .global(true),
        Arg::new("limit")
            .long("limit")
            .value_name("SECONDS")
            .help(
                "Time limit of a scene in seconds. Defaults to 30, and 30 more for each million \
                 goroutines",
            )
            .value_parser(value_parser!(u32).range(1..=86_400))
            .global(true),
    ]
}

fn tour() -> Command {
    Command::new("tour")
        .about("Play the scenes, or one of them")
        .arg(
            Arg::new("scene")
                .value_name("SCENE")
                .help("The scene's name. Defaults to all scenes, one after the other"),
        )
        .arg(flag("list").help("Only list the scenes"))
}

fn trace() -> Command {
    let file = Arg::new("file")
        .value_name("FILE")
        .help("The recording")
        .value_parser(value_parser!(PathBuf))
        .required(true);
    let out = Arg::new("out")
        .value_name("OUT")
        .help("The file to write, usually with the ending .pftrace")
        .value_parser(value_parser!(PathBuf))
        .required(true);
    let id = goroutine().help("Its id, as in dumps and panics. Defaults to all goroutines");
    Command::new("trace")
        .about(
            "Explain what a program has recorded (TREFOIL_TRACE=on, or `trace::Snapshot::write`)",
        )
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(
            Command::new("why")
                .about("Say what a goroutine did, and why it waited")
                .args([file.clone(), id]),
        )
        .subcommand(
            Command::new("perfetto")
                .about("Convert the recording for https://ui.perfetto.dev")
                .args([file, out]),
        )
}

fn ps() -> Command {
    Command::new("ps")
        .about(
            "List the goroutines of a process, grouped by state, by where they wait, and by where \
             they were started",
        )
        .arg(target())
        .arg(flag("all").help("Print a line per goroutine instead of groups"))
        .arg(Arg::new("state").long("state").value_name("TEXT").help(
            "Only goroutines in a state that contains this text: running, runnable, sleep, chan, …",
        ))
        .arg(
            Arg::new("top")
                .long("top")
                .value_name("N")
                .help(
                    "Show at most so many lines; the last one says how many goroutines are not \
                     shown [default: 20]",
                )
                .value_parser(value_parser!(usize)),
        )
}

fn dump() -> Command {
    Command::new("dump")
        .about("Print every goroutine of a process with its stack, as `trefoil::debug::dump` does")
        .arg(target())
}

fn why() -> Command {
    Command::new("why")
        .about("Say what a goroutine of a process waits for, and which goroutines hold it")
        .arg(target())
        .arg(goroutine().help("Its id. Defaults to the goroutines that have waited longest"))
}

fn top() -> Command {
    Command::new("top")
        .about(
            "Watch a process: its goroutines, Ps, CPUs and waits; with the feature `screen` \
             refreshed every second, otherwise once",
        )
        .arg(Arg::new("target").value_name("PID|URL").help(
            "The number of a process, or the address of its trefoil-observe server, such as \
             http://127.0.0.1:6060. Defaults to the only process of this user that uses trefoil; \
             if there are several, they are listed",
        ))
        .arg(
            flag("once").help(
                "Print one page and exit. Default if the input or the output is not a terminal",
            ),
        )
}

fn flag(name: &'static str) -> Arg {
    Arg::new(name).long(name).action(ArgAction::SetTrue)
}

fn target() -> Arg {
    Arg::new("target")
        .value_name("PID|CORE")
        .help("The number of a process, or the path of a core file")
        .required(true)
}

fn goroutine() -> Arg {
    Arg::new("goroutine").value_name("GOROUTINE").value_parser(value_parser!(u64))
}

fn goroutines(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(0) => Err("at least one is needed".into()),
        Ok(n) if n > GOROUTINES_MAX => {
            Err(format!("at most {}: there is no room for more stacks", grouped(GOROUTINES_MAX)))
        }
        Ok(n) => Ok(n),
        Err(_) => Err(format!("not a whole number from 1 to {}", grouped(GOROUTINES_MAX))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str]) -> Result<Cli, String> {
        let matches = command().try_get_matches_from(["trefoil"].iter().chain(arguments));
        matches.map(|matches| Cli::from_matches(&matches)).map_err(|e| e.to_string())
    }

    #[test]
    fn the_arguments_are_consistent() {
        command().debug_assert();
        let cli = parse(&["tour", "million", "--plain"]).unwrap();
        assert!(cli.plain);
        assert_eq!((cli.goroutines, cli.seconds()), (1_000_000, 60));
        assert!(
            matches!(cli.action, Action::Tour { scene: Some(s), list: false } if s == "million")
        );
        let cli = parse(&["--goroutines", "1", "--limit", "5"]).unwrap();
        assert_eq!((cli.goroutines, cli.seconds()), (1, 5));
        assert!(matches!(cli.action, Action::Tour { scene: None, list: false }));
    }

    #[test]
    fn every_command_gets_its_arguments() {
        let action = |arguments: &[&str]| parse(arguments).unwrap().action;
        assert!(matches!(action(&["tour", "--list"]), Action::Tour { list: true, .. }));
        match action(&["trace", "why", "f", "7"]) {
            Action::Trace(trace::Command::Why { file, goroutine: Some(7) }) => {
                assert_eq!(file, PathBuf::from("f"));
            }
            _ => panic!("not trace why"),
        }
        match action(&["trace", "perfetto", "f", "g"]) {
            Action::Trace(trace::Command::Perfetto { file, out }) => {
                assert_eq!((file, out), (PathBuf::from("f"), PathBuf::from("g")));
            }
            _ => panic!("not trace perfetto"),
        }
        match action(&["ps", "12", "--all", "--state", "chan", "--top", "3"]) {
            Action::Inspect(inspect::Command::Ps(ps)) => {
                assert_eq!((&ps.target[..], ps.all, ps.top), ("12", true, 3));
                assert_eq!(ps.state.as_deref(), Some("chan"));
            }
            _ => panic!("not ps"),
        }
        match action(&["ps", "12"]) {
            Action::Inspect(inspect::Command::Ps(ps)) => assert_eq!((ps.all, ps.top), (false, 20)),
            _ => panic!("not ps"),
        }
        match action(&["dump", "core.5"]) {
            Action::Inspect(inspect::Command::Dump { target }) => assert_eq!(target, "core.5"),
            _ => panic!("not dump"),
        }
        match action(&["why", "12", "3"]) {
            Action::Inspect(inspect::Command::Why { target, goroutine }) => {
                assert_eq!((&target[..], goroutine), ("12", Some(3)));
            }
            _ => panic!("not why"),
        }
        match action(&["top", "--once"]) {
            Action::Top(top) => assert_eq!((top.target, top.once), (None, true)),
            _ => panic!("not top"),
        }
    }

    #[test]
    fn wrong_arguments_are_named() {
        let error = |arguments: &[&str]| parse(arguments).err().expect("an error");
        assert!(error(&["--goroutines", "0"]).contains("at least one is needed"));
        assert!(error(&["--goroutines", "17000000"]).contains("at most 16,000,000"));
        assert!(error(&["--limit", "0"]).contains("--limit <SECONDS>"));
        assert!(error(&["ps"]).contains("<PID|CORE>"));
        assert!(error(&["why", "12", "x"]).contains("[GOROUTINE]"));
        assert!(error(&["dumb", "12"]).contains("dump"), "a similar command");
    }
}
