//! `trefoil top`: on a process without a server, as plain text and in a real terminal (tmux).
//!
//! The process is this program again. tmux need not be there, and the machine may forbid to read
//! another process: then tests print a line that says so, and do nothing.

#[cfg(feature = "screen")]
#[allow(dead_code)] // Not all of it is used here.
mod pty;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Set in the process that is watched.
const CHILD: &str = "TREFOIL_TOP_CHILD";
/// How long a test waits for something that takes milliseconds on an idle machine.
const LIMIT: Duration = Duration::from_secs(120);
const WAITERS: usize = 1234;

#[inline(never)]
fn waits_in_here(rx: &trefoil::chan::Receiver<()>) {
    _ = rx.recv();
    std::hint::black_box(());
}

/// Not a test: the process that the tests watch.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    // SAFETY: ends the process if the test does not; lets a reader attach that is not its parent.
    unsafe {
        libc::alarm(4 * LIMIT.as_secs() as u32);
        libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0);
    }
    trefoil::Runtime::builder().procs(2).build().unwrap().run(|| {
        let (tx, rx) = trefoil::chan::bounded::<()>(0);
        for _ in 0..WAITERS {
            let rx = rx.clone();
            trefoil::go(move || waits_in_here(&rx));
        }
        trefoil::time::sleep(Duration::from_millis(100));
        println!("started");
        std::io::stdout().flush().unwrap();
        trefoil::time::sleep(Duration::from_secs(3600));
        drop(tx);
    });
}

/// A process that is killed at the end.
struct Watched(Child);

impl Watched {
    fn start() -> Watched {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(CHILD, "1")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let started = lines.any(|line| line.is_ok_and(|line| line.contains("started")));
        assert!(started, "the process has not started");
        // It writes nothing more.
        Watched(child)
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

fn trefoil() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_trefoil"));
    command.env_remove("TREFOIL_OBSERVE_TOKEN").stdin(Stdio::null());
    command
}

/// Says why a test does nothing, past libtest's capture.
fn skip(why: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}

/// Returns what `trefoil top --once` prints; None if the machine forbids to read the process.
fn once(target: &str) -> Option<String> {
    let output = trefoil().args(["top", "--once", target]).output().unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if err.contains("not permitted") || err.contains("may not") || err.contains("ptrace_scope") {
        skip(&format!("the machine forbids to read another process: {err}"));
        return None;
    }
    assert!(output.status.success(), "{out}{err}");
    Some(out.into_owned())
}

#[test]
fn a_process_without_a_server_is_shown_from_outside() {
    let watched = Watched::start();
    let start = Instant::now();
    loop {
        let Some(page) = once(&watched.pid()) else { return };
        let rows: Vec<&str> = page.lines().filter(|line| line.contains("waits_in_here")).collect();
        if rows.len() == 1 && rows[0].starts_with("1,234  chan receive") {
            assert!(page.contains("read from outside"), "{page}");
            assert!(page.contains("goroutines 1,235"), "{page}");
            assert!(page.contains("P  STATUS"), "{page}");
            return;
        }
        assert!(start.elapsed() < LIMIT, "{page}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_process_is_found_without_its_number() {
    let watched = Watched::start();
    // The other tests have processes too.
    let output = trefoil().args(["top", "--once"]).output().unwrap();
    let out = String::from_utf8_lossy(&output.stdout);
    let err = String::from_utf8_lossy(&output.stderr);
    if err.contains("not permitted") {
        skip(&format!("the machine forbids to read another process: {err}"));
        return;
    }
    assert!(output.status.success(), "{out}{err}");
    assert!(out.contains(&watched.pid()), "{out}{err}");
}

#[test]
fn what_cannot_be_watched_is_told() {
    for (target, words) in [
        ("4000000", "there is no process 4000000"),
        ("ftp://host", "expected the number of a process"),
        ("http://127.0.0.1:1", "http://127.0.0.1:1:"),
        ("\u{1b}]0;x\u{7}", "trefoil: \\u{1b}]0;x\\u{7}: expected"),
    ] {
        let output = trefoil().args(["top", target]).output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{err}");
        assert!(err.contains(words), "{err}");
    }
    let not_trefoil = trefoil().args(["top", "1"]).output().unwrap();
    assert_eq!(not_trefoil.status.code(), Some(1));
}

/// Listens where the server of a process does. Returns the folder for `XDG_RUNTIME_DIR`, which the
/// caller removes, and the listener.
fn listen_as_server(watched: &Watched, name: &str) -> (PathBuf, UnixListener) {
    let dir = std::env::temp_dir().join(format!("trefoil-top-{name}-{}", std::process::id()));
    let folder = dir.join("trefoil");
    std::fs::create_dir_all(&folder).unwrap();
    let socket = folder.join(format!("{}.sock", watched.pid()));
    (dir, UnixListener::bind(socket).unwrap())
}

/// A server that answers with the same state each time.
#[test]
fn the_socket_of_a_process_is_preferred() {
    let watched = Watched::start();
    let (dir, listener) = listen_as_server(&watched, "told");
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            assert_eq!(stream.read(&mut byte).unwrap(), 1);
            request.push(byte[0]);
        }
        assert!(request.starts_with(b"GET /api/state?waits=1 HTTP/1.1\r\n"));
        let body = r#"{"version":1,"program":"told","pid":7,"goroutines":55,"groups":[],
            "deadlocks":[{"certain":true,"text":"deadlock (certain): so it is\n"}],
            "usage":[{"id":3,"who":"goroutine 3","function":"f","labels":["user=ann"],
                      "running_us":2500000,"runnable_us":1000}],
            "waits":[{"who":"goroutine 4","text":"waits for Mutex 0x1","waited_ms":1500}]}"#;
        write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
    });
    let output =
        trefoil().args(["top", &watched.pid()]).env("XDG_RUNTIME_DIR", &dir).output().unwrap();
    server.join().unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    for words in [
        "told · process 7",
        "goroutines 55",
        "deadlock (certain): so it is",
        "2.5 s  1 ms  goroutine 3  f user=ann",
        "goroutine 4 waits for Mutex 0x1, for 1.5 s",
    ] {
        assert!(out.contains(words), "{words:?} is missing:\n{out}");
    }
}

#[test]
fn a_server_that_does_not_answer_is_no_obstacle() {
    let watched = Watched::start();
    if once(&watched.pid()).is_none() {
        return;
    }
    let (dir, listener) = listen_as_server(&watched, "silent");
    // It closes the connection at once.
    let server = std::thread::spawn(move || drop(listener.accept()));
    let output =
        trefoil().args(["top", &watched.pid()]).env("XDG_RUNTIME_DIR", &dir).output().unwrap();
    server.join().unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(out.contains("read from outside (/") && out.contains("goroutines 1,235"), "{out}");
}

/// Its server cannot answer, so it is not asked.
#[test]
fn a_process_that_is_stopped_is_shown_at_once() {
    let watched = Watched::start();
    if once(&watched.pid()).is_none() {
        return;
    }
    // It accepts connections, and never answers.
    let (dir, listener) = listen_as_server(&watched, "stopped");
    // SAFETY: stops the process that this test has started; SIGKILL ends it all the same.
    unsafe { libc::kill(watched.0.id() as i32, libc::SIGSTOP) };
    let stat = format!("/proc/{}/stat", watched.pid());
    while !std::fs::read_to_string(&stat).unwrap().contains(") T ") {
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut command = trefoil();
    command.args(["top", "--once", &watched.pid()]).env("XDG_RUNTIME_DIR", &dir);
    let output = command.output().unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(out.contains("(it is stopped)") && out.contains("goroutines 1,235"), "{out}");
    listener.set_nonblocking(true).unwrap();
    assert!(listener.accept().is_err(), "its server was asked");
}

/// Without the feature `screen`, a terminal gets one page and the name of the feature.
#[cfg(not(feature = "screen"))]
#[test]
fn without_its_feature_the_screen_is_one_page() {
    let watched = Watched::start();
    if once(&watched.pid()).is_none() {
        return;
    }
    let Some(tmux) = Tmux::start("top-page", &top_in_shell(&watched.pid())) else { return };
    tmux.until("the page and the name of the feature are not shown", |screen| {
        screen.contains("waits_in_here")
            && screen.contains("--features screen")
            && screen.contains("ended-0")
    });
}

/// A session of tmux with a server of its own, which ends with it.
struct Tmux {
    socket: PathBuf,
}

impl Tmux {
    /// Returns None if there is no tmux.
    fn start(name: &str, shell: &str) -> Option<Tmux> {
        let socket = std::env::temp_dir().join(format!("trefoil-{name}-{}", std::process::id()));
        let tmux = Tmux { socket };
        let version = Command::new("tmux").arg("-V").output();
        if version.is_err() {
            skip("the terminal: tmux is not available");
            return None;
        }
        tmux.run(&["-f", "/dev/null", "new-session", "-d", "-x", "120", "-y", "40", shell]);
        Some(tmux)
    }

    fn run(&self, args: &[&str]) -> String {
        let mut command = Command::new("tmux");
        command.arg("-S").arg(&self.socket).args(args).env_remove("TMUX").env("LC_ALL", "C.UTF-8");
        let output = command.output().unwrap();
        assert!(output.status.success(), "tmux {args:?}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    #[cfg(feature = "screen")]
    fn keys(&self, keys: &[&str]) {
        self.run(&[&["send-keys"], keys].concat());
    }

    /// Waits until the screen is as wanted.
    fn until(&self, what: &str, is_it: impl Fn(&str) -> bool) -> String {
        let start = Instant::now();
        loop {
            let screen = self.run(&["capture-pane", "-p"]);
            if is_it(&screen) {
                return screen;
            }
            assert!(start.elapsed() < LIMIT, "{what}:\n{screen}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Tmux {
    fn drop(&mut self) {
        let mut command = Command::new("tmux");
        _ = command.arg("-S").arg(&self.socket).arg("kill-server").output();
        _ = std::fs::remove_file(&self.socket);
    }
}

/// Shell commands that run `trefoil top` and then say how it ended, and how the terminal is.
fn top_in_shell(pid: &str) -> String {
    let top = env!("CARGO_BIN_EXE_trefoil");
    format!(
        "echo before-$((40+2)); '{top}' top {pid}; echo ended-$?; stty -a | tr ' ;' '\\n\\n' | grep -x icanon; sleep 1000"
    )
}

/// Closes the terminal while the screen is shown: once with SIGHUP, and once as after `nohup`.
#[cfg(feature = "screen")]
#[test]
fn the_screen_ends_with_its_terminal() {
    use std::os::unix::process::CommandExt;

    let watched = Watched::start();
    if once(&watched.pid()).is_none() {
        return;
    }
    for hangup in [libc::SIG_DFL, libc::SIG_IGN] {
        let mut command = trefoil();
        command.args(["top", &watched.pid()]);
        // SAFETY: one system call between fork and exec.
        unsafe {
            command.pre_exec(move || {
                libc::signal(libc::SIGHUP, hangup);
                Ok(())
            });
        }
        let mut terminal = pty::Pty::open();
        let mut top = terminal.spawn(command);
        terminal.read_until("q quit");
        drop(terminal);
        let start = Instant::now();
        while top.try_wait().unwrap().is_none() {
            if start.elapsed() > LIMIT {
                _ = top.kill();
                panic!("it goes on without a terminal; SIGHUP is {hangup}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[cfg(feature = "screen")]
#[test]
fn in_a_terminal_keys_work_and_the_terminal_is_restored() {
    let watched = Watched::start();
    if once(&watched.pid()).is_none() {
        return;
    }
    let Some(tmux) = Tmux::start("top-keys", &top_in_shell(&watched.pid())) else { return };
    let screen = tmux.until("the groups are not shown", |screen| {
        screen.contains("1,234") && screen.contains("waits_in_here") && screen.contains("q quit")
    });
    assert!(!screen.contains("before-42"), "another screen is used:\n{screen}");
    tmux.keys(&["s"]);
    tmux.until("it is not sorted otherwise", |screen| screen.contains("sorted by change"));
    tmux.keys(&["/", "sleep", "Enter"]);
    tmux.until("the filter does nothing", |screen| {
        screen.contains("filter: sleep") && !screen.contains("waits_in_here")
    });
    tmux.keys(&["Escape"]);
    tmux.until("the filter is not cleared", |screen| screen.contains("waits_in_here"));
    tmux.keys(&["s", "s", "s", "s", "Home", "Enter"]);
    tmux.until("no stack is shown", |screen| {
        screen.contains("waits_in_here") && screen.contains("created by")
    });
    tmux.keys(&["Escape"]);
    tmux.until("the stack does not go away", |screen| !screen.contains("created by"));
    tmux.keys(&["4"]);
    tmux.until("the Ps are not shown", |screen| screen.contains("STATUS"));
    tmux.keys(&["Space"]);
    tmux.until("it is not frozen", |screen| screen.contains("FROZEN"));
    tmux.keys(&["q"]);
    tmux.until("the terminal is not restored", |screen| {
        screen.contains("before-42") && screen.contains("ended-0") && screen.contains("icanon")
    });
}

#[cfg(feature = "screen")]
#[test]
fn signals_restore_the_terminal() {
    let watched = Watched::start();
    if once(&watched.pid()).is_none() {
        return;
    }
    for (signal, code) in [("Ctrl-C", 130), ("TERM", 143)] {
        let Some(tmux) = Tmux::start(&format!("top-{signal}"), &top_in_shell(&watched.pid()))
        else {
            return;
        };
        tmux.until("the groups are not shown", |screen| screen.contains("waits_in_here"));
        if signal == "TERM" {
            // The shell of the pane is the parent.
            let shell = tmux.run(&["display-message", "-p", "#{pane_pid}"]);
            let found =
                Command::new("pgrep").args(["-P", shell.trim(), "trefoil"]).output().unwrap();
            let pid: i32 = String::from_utf8_lossy(&found.stdout).trim().parse().unwrap();
            // SAFETY: sends a signal to the command that this test has started.
            unsafe { libc::kill(pid, libc::SIGTERM) };
        } else {
            tmux.keys(&["C-c"]);
        }
        tmux.until("the terminal is not restored", |screen| {
            screen.contains("before-42")
                && screen.contains(&format!("ended-{code}"))
                && screen.contains("icanon")
        });
    }
}
