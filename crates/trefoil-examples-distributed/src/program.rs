//! A process that runs an example, with the lines that it prints.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The longest time that a step of a test may take.
const LIMIT: Duration = Duration::from_secs(120);

/// Returns the path of an example, which `cargo test` has built. Builds it if only this test was
/// requested.
fn example(name: &str) -> PathBuf {
    let me = std::env::current_exe().expect("a running program");
    let profile = me.parent().and_then(|deps| deps.parent()).expect("target/PROFILE/deps");
    let path = profile.join("examples").join(name);
    if !path.exists() {
        let kind = profile.file_name().and_then(|name| name.to_str()).expect("a profile");
        let status = Command::new(env!("CARGO"))
            .args(["build", "--example", name, "--profile"])
            .arg(if kind == "debug" { "dev" } else { kind })
            .arg("--target-dir")
            .arg(profile.parent().expect("target"))
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status()
            .expect("cargo starts");
        assert!(status.success());
    }
    path
}

/// A running example. Dropping it kills the process.
pub struct Program {
    process: Child,
    lines: Arc<Mutex<Vec<String>>>,
    reader: Option<JoinHandle<()>>,
}

impl Program {
    /// Starts the example `name`.
    ///
    /// # Panics
    /// Panics if that is not possible.
    pub fn start(name: &str, args: &[&str]) -> Program {
        let mut command = Command::new(example(name));
        let command = command.args(args).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut process = command.spawn().expect("the example starts");
        let out = BufReader::new(process.stdout.take().expect("a pipe"));
        let lines = Arc::new(Mutex::new(Vec::new()));
        let reader = std::thread::spawn({
            let lines = lines.clone();
            move || {
                for line in out.lines() {
                    lines.lock().unwrap().push(line.expect("text"));
                }
            }
        });
        Program { process, lines, reader: Some(reader) }
    }

    /// Runs the example to its end.
    ///
    /// # Panics
    /// Panics if it fails.
    pub fn run(name: &str, args: &[&str]) {
        let status = Program::start(name, args).wait().1;
        assert!(status.success(), "{name} {args:?}: {status}");
    }

    /// Returns the lines printed so far that begin with `word`, without that word.
    ///
    /// # Panics
    /// Panics if the thread that reads the lines has panicked.
    pub fn lines(&self, word: &str) -> Vec<String> {
        starting_with(&self.lines.lock().unwrap(), word)
    }

    /// Waits until `count` lines that begin with `word` are printed.
    ///
    /// # Panics
    /// Panics if that takes too long.
    pub fn wait_for(&self, count: usize, word: &str) {
        wait_until(&format!("{count} lines with {word}"), || self.lines(word).len() >= count);
    }

    /// Sends a signal.
    pub fn signal(&self, signal: i32) {
        // SAFETY: signals a child process that was not waited for yet.
        unsafe { libc::kill(self.process.id() as i32, signal) };
    }

    /// Waits for the end of the process. Returns all of its lines and its status.
    ///
    /// # Panics
    /// Panics if that takes too long.
    pub fn wait(mut self) -> (Output, ExitStatus) {
        let mut status = None;
        wait_until("the end of an example", || {
            status = self.process.try_wait().expect("it is a child process");
            status.is_some()
        });
        // The pipe has ended with the process.
        self.reader.take().expect("joined once").join().expect("the reader reads to the end");
        let lines = std::mem::take(&mut *self.lines.lock().unwrap());
        (Output(lines), status.expect("it has ended"))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// All lines that a process has printed.
pub struct Output(Vec<String>);

impl Output {
    /// Returns the lines that begin with `word`, without that word.
    pub fn lines(&self, word: &str) -> Vec<String> {
        starting_with(&self.0, word)
    }
}

fn starting_with(lines: &[String], word: &str) -> Vec<String> {
    let rest = |line: &String| {
        line.strip_prefix(word)
            .filter(|rest| rest.is_empty() || rest.starts_with(' '))
            .map(str::trim)
            .map(str::to_owned)
    };
    lines.iter().filter_map(rest).collect()
}

/// Waits until `condition` is true.
///
/// # Panics
/// Panics if that takes too long.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let limit = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < limit, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
