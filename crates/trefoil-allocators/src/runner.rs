//! Runs each scene in a process of its own, and reports how it ended.
//!
//! The process under test may be unable to allocate. So its parent collects information about a
//! hang: the threads and their system calls, stacks by gdb on demand, then SIGQUIT, which makes
//! trefoil dump every goroutine if it still can.

use crate::scenes::SCENES;
use crate::watchdog::{self, HANG};
use crate::{Scene, Target};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// The variable that is set in a child: the scene that it runs.
const SCENE: &str = "TREFOIL_ALLOC_SCENE";
/// The variable that a developer sets to see the stacks of a process that hangs.
const GDB: &str = "TREFOIL_TEST_GDB";
/// A scene that uses more memory is killed, to protect the machine.
const MAX_RESIDENT_BYTES: u64 = 6 << 30;
/// How often the memory of a scene is checked.
const CHECK_PERIOD: Duration = Duration::from_millis(200);
/// How long trefoil's dump after SIGQUIT may take.
const DUMP_TIME: Duration = Duration::from_secs(5);
/// How many lines of the dump are shown: two thousand goroutines have too many.
const MAX_LINES_OF_DUMP: usize = 200;

/// How a scene ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Passed,
    Failed(ExitStatus),
    Hung,
    TooMuchMemory,
}

/// A library that is preloaded.
#[derive(Clone, Copy, Debug)]
pub struct Library {
    /// The file's name, as the loader finds it.
    pub file: &'static str,
    /// The Debian package that contains it.
    pub package: &'static str,
}

/// The `main` function of a test target: runs every scene whose name contains one of the arguments,
/// or all of them.
pub fn run(target: &Target) -> ExitCode {
    run_as_child(target);
    exit_code(run_scenes(target, None))
}

/// The `main` function of the target that runs every scene with each library in `LD_PRELOAD`.
///
/// An argument that is part of a library's file name selects libraries, any other selects scenes.
pub fn run_preloaded(target: &Target, libraries: &[Library]) -> ExitCode {
    run_as_child(target);
    let selected = |library: &&Library| filters().iter().any(|f| library.file.contains(f));
    let mut chosen: Vec<&Library> = libraries.iter().filter(selected).collect();
    if chosen.is_empty() {
        chosen = libraries.iter().collect();
    }
    let mut passed = true;
    for library in chosen {
        if can_preload(library) {
            passed &= run_scenes(target, Some(library));
        } else {
            println!("skipped: {} is not installed (package {})", library.file, library.package);
        }
    }
    exit_code(passed)
}

fn exit_code(passed: bool) -> ExitCode {
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// If this process is a child, runs the scene that the environment names, and exits.
fn run_as_child(target: &Target) {
    let Ok(name) = std::env::var(SCENE) else { return };
    let scene = SCENES.iter().find(|scene| scene.name == name).expect("a scene of that name");
    watchdog::start();
    (scene.run)(target);
    std::io::stdout().flush().expect("a pipe to the parent");
    // Skips the allocator's finalizer: rpmalloc's unmaps memory that ending threads still use.
    // SAFETY: ends the process at once.
    unsafe { libc::_exit(0) }
}

/// Returns the arguments without options, which are for the standard test harness.
fn filters() -> Vec<String> {
    std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect()
}

/// Returns whether the loader finds the library. If not, it prints an error and continues.
fn can_preload(library: &Library) -> bool {
    let output = Command::new("true").env("LD_PRELOAD", library.file).output();
    output.is_ok_and(|output| output.stderr.is_empty())
}

/// Runs the scenes that the arguments select. Returns whether all of them passed.
fn run_scenes(target: &Target, preload: Option<&Library>) -> bool {
    let allocator = preload.map_or(target.allocator, |library| library.file);
    let filters = filters();
    let chosen = |scene: &&Scene| filters.iter().any(|filter| scene.name.contains(filter));
    let mut scenes: Vec<&Scene> = SCENES.iter().filter(chosen).collect();
    if scenes.is_empty() {
        scenes = SCENES.iter().collect();
    }
    let mut passed = true;
    for scene in scenes {
        println!("{allocator}: {}", scene.name);
        let start = Instant::now();
        let outcome = run_scene(scene, preload);
        let verdict = match outcome {
            Outcome::Passed => "ok".into(),
            Outcome::Failed(status) => format!("FAILED: {status}"),
            Outcome::Hung => "FAILED: HANG".into(),
            Outcome::TooMuchMemory => format!("FAILED: more than {MAX_RESIDENT_BYTES} bytes"),
        };
        println!("{allocator}: {} ... {verdict}, {:.1?}", scene.name, start.elapsed());
        passed &= outcome == Outcome::Passed;
    }
    passed
}

fn run_scene(scene: &Scene, preload: Option<&Library>) -> Outcome {
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    command
        .env(SCENE, scene.name)
        .env_remove("TREFOIL_PROCS")
        .env_remove("GOMAXPROCS")
        .env_remove("TREFOIL_DEBUG")
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    if let Some(micros) = scene.slice_micros {
        command.env("TREFOIL_DEBUG", format!("slice={micros}"));
    }
    if let Some(library) = preload {
        command.env("LD_PRELOAD", library.file);
    }
    let mut child = command.spawn().expect("the child starts");
    let lines = lines_of(&mut child);
    let deadline = Instant::now() + scene.limit + crate::scenes::time_each();
    loop {
        match lines.recv_timeout(CHECK_PERIOD) {
            Ok(line) if line.starts_with(HANG) => {
                println!("    {line}");
                return end_hung_process(child, &lines);
            }
            Ok(line) => println!("{line}"),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {}
        }
        if Instant::now() > deadline {
            println!("    {HANG}not finished within {:?}", scene.limit);
            return end_hung_process(child, &lines);
        }
        if resident_bytes(child.id()) > MAX_RESIDENT_BYTES {
            kill(&mut child);
            return Outcome::TooMuchMemory;
        }
    }
    let status = child.wait().expect("the child was not waited for yet");
    if status.success() { Outcome::Passed } else { Outcome::Failed(status) }
}

/// Returns the lines that the child writes to its standard output and error.
fn lines_of(child: &mut Child) -> Receiver<String> {
    fn forward(pipe: impl Read + Send + 'static, lines: Sender<String>) {
        std::thread::spawn(move || {
            let text = BufReader::new(pipe).lines().map_while(Result::ok);
            let _ = text.map(|line| lines.send(line)).find(Result::is_err);
        });
    }
    let (sender, lines) = channel();
    forward(child.stdout.take().expect("a pipe"), sender.clone());
    forward(child.stderr.take().expect("a pipe"), sender);
    lines
}

fn resident_bytes(pid: u32) -> u64 {
    const PAGE_BYTES: u64 = 4096;
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let pages = text.split_whitespace().nth(1).and_then(|word| word.parse::<u64>().ok());
    pages.unwrap_or(0) * PAGE_BYTES
}

/// Prints what a hung process does, and ends it.
fn end_hung_process(mut child: Child, lines: &Receiver<String>) -> Outcome {
    let pid = child.id();
    print_threads(pid);
    if std::env::var_os(GDB).is_some() {
        let _ = Command::new("gdb")
            .args(["-batch", "-p", &pid.to_string(), "-ex", "thread apply all bt 40"])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .status();
    } else {
        println!("    Run it again with {GDB}=1 to see the stacks (needs gdb).");
    }
    // SAFETY: signals a child process that was not waited for yet.
    unsafe { libc::kill(pid as i32, libc::SIGQUIT) };
    let deadline = Instant::now() + DUMP_TIME;
    let mut shown = 0;
    while let Ok(line) = lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        shown += 1;
        if shown <= MAX_LINES_OF_DUMP {
            println!("    {line}");
        }
    }
    if child.try_wait().is_ok_and(|status| status.is_none_or(|s| s.signal().is_some())) {
        println!("    trefoil could not dump its goroutines");
    }
    kill(&mut child);
    Outcome::Hung
}

fn print_threads(pid: u32) {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return };
    for task in tasks.filter_map(Result::ok) {
        let read = |file: &str| {
            let text = std::fs::read_to_string(Path::new(&task.path()).join(file));
            text.unwrap_or_default().trim_end().to_owned()
        };
        let stat = read("stat");
        let state = stat.rsplit(") ").next().and_then(|rest| rest.chars().next()).unwrap_or('?');
        let tid = task.file_name();
        println!("    {} {state} {} [{}]", tid.display(), read("comm"), read("syscall"));
    }
}

fn kill(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}
