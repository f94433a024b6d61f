//! The `trefoil` command from outside: arguments, exit codes, what it prints where, and how it ends
//! early.

mod pty;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The command, without the caller's settings of the runtime and of colours.
fn trefoil(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_trefoil"));
    command.args(args).stdin(Stdio::null());
    for name in ["TREFOIL_PROCS", "GOMAXPROCS", "TREFOIL_DEBUG", "NO_COLOR"] {
        command.env_remove(name);
    }
    command
}

fn output(args: &[&str]) -> Output {
    trefoil(args).output().expect("it can be started")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

/// Returns the names of the scenes from `--list`.
fn scenes() -> Vec<String> {
    let out = output(&["tour", "--list"]);
    assert_eq!(out.status.code(), Some(0));
    let names = text(&out.stdout).lines().map(|line| {
        let (name, what) = line.split_once(' ').expect("a name and what is shown");
        assert!(!what.trim().is_empty(), "{line}");
        name.to_owned()
    });
    names.collect()
}

#[test]
#[ignore = "takes long"]
fn the_whole_tour_keeps_its_promises() {
    let start = Instant::now();
    let out = output(&["--goroutines", "10000", "--plain"]);
    let (shown, time) = (text(&out.stdout), start.elapsed());
    assert_eq!(out.status.code(), Some(0), "{shown}\n{}", text(&out.stderr));
    assert!(time < Duration::from_secs(120), "{time:?}");
    assert_eq!(text(&out.stderr), "");
    let scenes = scenes();
    for name in &scenes {
        let head = format!("{name}  ");
        assert!(shown.lines().any(|line| line.starts_with(&head)), "{name} was not played");
    }
    let kept = shown.lines().filter(|line| line.starts_with("✓ ")).count();
    let last = format!("{} scenes, {kept} promises, all kept", scenes.len());
    assert_eq!(shown.lines().last(), Some(&last[..]));
    assert!(kept >= 2 * scenes.len(), "{kept} promises are too few");
}

#[test]
fn one_scene_without_a_terminal_prints_no_colours() {
    let out = output(&["tour", "deadlock"]);
    let shown = text(&out.stdout);
    assert_eq!(out.status.code(), Some(0), "{shown}");
    assert!(shown.starts_with("deadlock  "), "{shown}");
    assert!(shown.contains("\n    goroutine 2 \"left\" [chan receive]:\n"), "{shown}");
    assert!(shown.contains("\n1 scene, "), "{shown}");
    assert!(!shown.contains('\x1b'), "colours are for terminals: {shown}");
}

#[test]
fn an_unknown_scene_lists_the_scenes() {
    let out = output(&["tour", "nonsense"]);
    assert_eq!(out.status.code(), Some(2));
    let said = text(&out.stderr);
    assert!(said.starts_with("trefoil: no such scene: nonsense"), "{said}");
    for name in scenes() {
        assert!(said.contains(&format!("\n{name} ")), "{name} is not in the list: {said}");
    }
}

#[test]
fn invalid_arguments_exit_with_2() {
    let whole = "not a whole number from 1 to 16,000,000";
    for (args, words) in [
        (&["--goroutines", "0"][..], "at least one"),
        (&["--goroutines", "16000001"], "at most 16,000,000"),
        (&["--goroutines", "99999999999999999999999"], whole),
        (&["--goroutines", "1e6"], whole),
        (&["--goroutines", ""], whole),
        (&["--goroutines=-1"], whole),
        (&["--limit", "0"], "--limit"),
        (&["--fast"], "--fast"),
        (&["detour"], "detour"),
        (&["tour", "hogs", "procs"], "procs"),
    ] {
        let out = output(args);
        assert_eq!(out.status.code(), Some(2), "{args:?}");
        assert!(text(&out.stderr).contains(words), "{args:?}: {}", text(&out.stderr));
        assert!(out.stdout.is_empty(), "{args:?} played something");
    }
}

#[test]
fn an_invalid_environment_exits_with_1() {
    let out = trefoil(&["tour", "million"]).env("TREFOIL_PROCS", "many").output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    let said = text(&out.stderr);
    assert!(said.starts_with("trefoil: the runtime does not start: TREFOIL_PROCS=many"), "{said}");
}

#[test]
fn a_broken_promise_exits_with_1() {
    // Without the signal no loop is preempted: at most two of five run until the end.
    let mut timeline = trefoil(&["tour", "timeline"]);
    let out = timeline.env("TREFOIL_DEBUG", "asyncpreemptoff=1").output().unwrap();
    let shown = text(&out.stdout);
    assert_eq!(out.status.code(), Some(1), "{shown}");
    assert!(shown.contains("\n✗ had turns "), "{shown}");
    assert!(shown.contains("1 scene, 2 promises, 2 NOT kept:\n  timeline: had turns: "), "{shown}");
}

#[test]
fn a_scene_that_hangs_exits_at_its_limit() {
    // Without the signal this scene's loops never end, and the goroutine beside them never runs.
    let mut hogs = trefoil(&["tour", "hogs", "--limit", "2"]);
    let out = hogs.env("TREFOIL_DEBUG", "asyncpreemptoff=1").output().unwrap();
    assert_eq!(out.status.code(), Some(1), "{}", out.status);
    assert_eq!(text(&out.stderr), "trefoil: hogs: exceeded its limit of 2 s; the tour ends here\n");
}

#[test]
fn a_closed_output_ends_the_tour_like_sigpipe() {
    // A list may be written before the pipe is closed; a million goroutines are not.
    for (scene, codes) in [("--list", &[Some(0), Some(141)][..]), ("million", &[Some(141)])] {
        let mut command = trefoil(&["tour", scene]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        let status = child.wait().unwrap();
        assert_eq!(said, "", "{scene}");
        assert!(codes.contains(&status.code()), "{scene}: {status}");
    }
}

#[test]
fn ctrl_c_resets_the_terminal() {
    let mut pty = pty::Pty::open();
    let mut child = pty.spawn(trefoil(&["tour", "million", "--goroutines", "16000000"]));
    // Once a bar has been drawn:
    let shown = pty.read_until("/16,000,000");
    assert!(shown.contains("\x1b[1;32mmillion\x1b[0m"), "no colours: {shown:?}");
    pty.type_in("\x03");
    let rest = pty.read_to_end();
    let status = child.wait().unwrap();
    assert_eq!((status.code(), status.signal()), (Some(130), None));
    assert!(rest.ends_with("\r\x1b[2K\x1b[0m\x1b[?25h"), "{rest:?}");
    assert!(!rest.contains("panicked"), "{rest:?}");
}
