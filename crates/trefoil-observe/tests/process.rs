//! The server and the whole process: what the environment starts, what a program without it has,
//! and that it neither hides a deadlock nor keeps the program alive.
//!
//! A program without libtest (`harness = false`), whose threads would hide a deadlock. It runs
//! itself for each case.

mod common;

use common::{get, until};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;
use trefoil::chan::bounded;
use trefoil_observe as _;

const ROLE: &str = "TREFOIL_OBSERVE_TEST_ROLE";
const OBSERVE: &str = "TREFOIL_OBSERVE";

/// What a child does.
const ROLES: &[(&str, fn())] = &[
    ("count", count),
    ("wait", wait),
    ("return", || trefoil::run(|| ())),
    ("deadlock", || trefoil::run(|| _ = bounded::<()>(0).1.recv())),
    ("stuck", stuck),
    ("stop", stop),
    ("stop on a thread", stop_on_a_thread),
];

const TESTS: &[(&str, fn())] = &[
    ("without_the_variable_there_is_no_server", without_the_variable_there_is_no_server),
    ("the_variable_starts_a_server", the_variable_starts_a_server),
    ("a_server_does_not_keep_the_program_alive", a_server_does_not_keep_the_program_alive),
    ("a_server_does_not_hide_a_deadlock", a_server_does_not_hide_a_deadlock),
    ("stop_with_a_request_in_flight_is_no_deadlock", stop_with_a_request_in_flight_is_no_deadlock),
    ("a_server_answers_while_every_p_is_stuck", a_server_answers_while_every_p_is_stuck),
    ("a_wrong_value_is_an_error", a_wrong_value_is_an_error),
    ("a_token_that_is_not_utf8_is_an_error", a_token_that_is_not_utf8_is_an_error),
    ("an_address_in_use_is_no_error", an_address_in_use_is_no_error),
    ("a_unix_socket_by_the_variable", a_unix_socket_by_the_variable),
];

fn main() -> ExitCode {
    if let Ok(role) = std::env::var(ROLE) {
        let (_, run) = ROLES.iter().find(|(name, _)| *name == role).expect("a role");
        run();
        return ExitCode::SUCCESS;
    }
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    for (name, test) in TESTS {
        if filter.as_ref().is_none_or(|filter| name.contains(filter.as_str())) {
            println!("test {name} ...");
            test();
            println!("test {name} ... ok");
        }
    }
    ExitCode::SUCCESS
}

/// Starts a child with a role and, maybe, the variable.
fn child(role: &str, observe: Option<&str>) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(ROLE, role).env("TREFOIL_PROCS", "2").stdin(Stdio::piped());
    command.env_remove("TREFOIL_OBSERVE_TOKEN").env_remove("XDG_RUNTIME_DIR");
    match observe {
        Some(value) => command.env(OBSERVE, value),
        None => command.env_remove(OBSERVE),
    };
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Reads the line that says where the server is.
fn url(child: &mut Child) -> String {
    let mut line = String::new();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    stderr.read_line(&mut line).unwrap();
    child.stderr = Some(stderr.into_inner());
    let url = line.trim_end().strip_prefix("trefoil: observe at ");
    url.unwrap_or_else(|| panic!("{line:?}")).to_owned()
}

fn address(url: &str) -> SocketAddr {
    url.strip_prefix("http://").unwrap().strip_suffix('/').unwrap().parse().unwrap()
}

/// Returns the exit code and what was printed on standard output and standard error.
fn end(mut child: Child) -> (Option<i32>, String, String) {
    let status = until("the child does not end", || child.try_wait().unwrap());
    let (mut out, mut err) = (String::new(), String::new());
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    (status.code(), out, err)
}

/// Ends a child when the test ends, however it does.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

/// Prints how many threads, descriptors and goroutines the process has.
fn count() {
    trefoil::run(|| {
        let is_sysmon = |task: &std::fs::DirEntry| {
            let name = std::fs::read_to_string(task.path().join("comm"));
            name.is_ok_and(|name| name.trim() == "trefoil-sysmon")
        };
        let sysmons = || {
            let tasks = std::fs::read_dir("/proc/self/task").unwrap();
            tasks.filter_map(Result::ok).filter(|task| is_sysmon(task)).count()
        };
        // A thread gives itself its name when it first runs. One thread more than expected would
        // have the time to do so.
        let expected = if std::env::var(OBSERVE).is_ok_and(|v| !v.is_empty()) { 2 } else { 1 };
        until("a thread does not start", || (sysmons() >= expected).then_some(()));
        std::thread::sleep(Duration::from_millis(200));
        let sysmons = sysmons();
        let sockets = std::fs::read_dir("/proc/self/fd").unwrap().filter(|fd| {
            let path = std::fs::read_link(fd.as_ref().unwrap().path());
            path.is_ok_and(|path| path.to_string_lossy().starts_with("socket:"))
        });
        println!("{sysmons} {} {}", sockets.count(), trefoil::num_goroutines());
    });
}

/// Has goroutines until a byte arrives.
fn wait() {
    trefoil::run(|| {
        let (_keep, rx) = bounded::<()>(0);
        for _ in 0..10 {
            let rx = rx.clone();
            trefoil::go(move || rx.recv());
        }
        _ = std::io::stdin().read(&mut [0]);
    });
}

/// Occupies every P with code that refuses to stop.
fn stuck() {
    trefoil::run(|| {
        for _ in 0..trefoil::procs() {
            trefoil::go(|| {
                let _guard = trefoil::no_preempt();
                loop {
                    std::hint::spin_loop();
                }
            });
        }
        loop {
            trefoil::time::sleep(Duration::from_millis(1));
        }
    });
}

/// Stops a server while it answers a request for a recording, and prints a line.
fn stop() {
    trefoil::run(|| {
        let server = server();
        while !trefoil::observer::is_recording() {
            trefoil::time::sleep(Duration::from_millis(10));
        }
        server.stop();
        println!("stopped");
    });
}

/// As [`stop`], on the main thread, while the only goroutine waits.
fn stop_on_a_thread() {
    let runtime = trefoil::Runtime::builder().build().unwrap();
    let (keep, rx) = bounded::<()>(0);
    let waiting = runtime.go(move || rx.recv()).unwrap();
    let server = server();
    while !runtime.run(trefoil::observer::is_recording) {
        std::thread::sleep(Duration::from_millis(10));
    }
    server.stop();
    println!("stopped");
    drop(keep);
    _ = waiting.join();
}

/// Starts a server, and says where it is.
fn server() -> trefoil_observe::Server {
    let server = trefoil_observe::start("127.0.0.1:0").unwrap();
    eprintln!("trefoil: observe at {}", server.url());
    server
}

fn without_the_variable_there_is_no_server() {
    let (code, out, err) = end(child("count", None));
    assert_eq!((code, out.as_str(), err.as_str()), (Some(0), "1 0 1\n", ""));
    let (code, out, _) = end(child("count", Some("127.0.0.1:0")));
    // `trefoil::net` keeps a socket of its own besides the listener.
    assert_eq!((code, out.as_str()), (Some(0), "2 2 1\n"));
    let (_, out, err) = end(child("count", Some("")));
    assert_eq!((out.as_str(), err.as_str()), ("1 0 1\n", ""));
}

fn the_variable_starts_a_server() {
    let mut child = child("wait", Some("127.0.0.1:0"));
    let address = address(&url(&mut child));
    until("the goroutines", || {
        let answer = get(address, "/api/state");
        let state = common::json::Json::parse(answer.text());
        (state.get("goroutines").number() == 11).then_some(())
    });
    child.stdin.take().unwrap().write_all(b"x").unwrap();
    assert_eq!(end(child).0, Some(0));
}

fn a_server_does_not_keep_the_program_alive() {
    let mut child = child("return", Some("127.0.0.1:0"));
    assert!(url(&mut child).starts_with("http://127.0.0.1:"));
    assert_eq!(end(child).0, Some(0));
}

fn a_server_does_not_hide_a_deadlock() {
    let (code, _, err) = end(child("deadlock", Some("127.0.0.1:0")));
    assert_eq!(code, Some(2), "{err}");
    assert!(err.contains("fatal error: all goroutines are asleep - deadlock!"), "{err}");
    assert_eq!(err.matches("\ngoroutine ").count(), 1, "{err}");
    assert!(!err.contains("trefoil_observe"), "{err}");
}

fn stop_with_a_request_in_flight_is_no_deadlock() {
    for role in ["stop", "stop on a thread"] {
        let mut child = child(role, None);
        let address = address(&url(&mut child));
        // It ends within a tenth of a second after `stop` has begun, in which there is nothing else
        // that could wake the program.
        let mut busy = common::connect(address);
        write!(busy, "GET /snapshot?seconds=60 HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
        let (code, out, err) = end(child);
        assert_eq!((code, out.as_str()), (Some(0), "stopped\n"), "{role}: {err}");
    }
}

fn a_server_answers_while_every_p_is_stuck() {
    let mut child = Killed(child("stuck", Some("127.0.0.1:0")));
    let address = address(&url(&mut child.0));
    until("the Ps are not stuck", || {
        let answer = get(address, "/debug/pprof/goroutine?debug=2");
        (answer.text().matches("goroutine running on other thread").count() == 2).then_some(())
    });
    for path in ["/", "/metrics", "/api/state", "/snapshot?seconds=0"] {
        assert_eq!(get(address, path).status, 200, "{path}");
    }
}

fn a_wrong_value_is_an_error() {
    for value in ["nonsense", "0.0.0.0:0", "unix:"] {
        let (code, _, err) = end(child("return", Some(value)));
        assert_eq!(code, Some(101), "{err}");
        assert!(err.contains(&format!("TREFOIL_OBSERVE={value}: ")), "{err}");
    }
    for value in [":6060", "6060"] {
        let (code, _, err) = end(child("return", Some(value)));
        assert_eq!(code, Some(101), "{err}");
        let refusal = "the address has no host: write 127.0.0.1:6060";
        assert!(err.contains(&format!("TREFOIL_OBSERVE={value}: {refusal}")), "{err}");
    }
}

fn a_token_that_is_not_utf8_is_an_error() {
    use std::os::unix::ffi::OsStrExt;
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(ROLE, "return").env(OBSERVE, "127.0.0.1:0").stdin(Stdio::null());
    command.env("TREFOIL_OBSERVE_TOKEN", std::ffi::OsStr::from_bytes(b"abc\xff"));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let (code, _, err) = end(command.spawn().unwrap());
    assert_eq!(code, Some(101), "{err}");
    assert!(err.contains("TREFOIL_OBSERVE_TOKEN is not UTF-8"), "{err}");
}

fn an_address_in_use_is_no_error() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (code, _, err) = end(child("return", Some(&address)));
    assert_eq!(code, Some(0), "{err}");
    assert!(err.contains(&format!("trefoil: TREFOIL_OBSERVE={address}: ")), "{err}");
}

fn a_unix_socket_by_the_variable() {
    let mut child = child("wait", Some("unix"));
    let url = url(&mut child);
    let path = url.strip_prefix("unix:").unwrap();
    assert!(path.ends_with(&format!("/{}.sock", child.id())), "{path}");
    let mut stream = std::os::unix::net::UnixStream::connect(path).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let answer = common::read_answer(&mut stream, common::WithBody::Yes).unwrap();
    common::openmetrics::parse(answer.text());
    child.stdin.take().unwrap().write_all(b"x").unwrap();
    assert_eq!(end(child).0, Some(0));
    // The next server in the folder removes it: the process has ended.
    let (_, _, err) = end(self::child("return", Some("unix")));
    assert!(err.contains("unix:"), "{err}");
    assert!(!std::path::Path::new(path).exists());
}
