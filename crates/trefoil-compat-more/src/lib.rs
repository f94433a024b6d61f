//! Helpers of the tests: a runtime with a watchdog, a way to start many goroutines, temporary
//! folders, and a blocking HTTP client.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use trefoil::{JoinHandle, Runtime};

/// The number of Ps of every test's runtime.
pub const PROCS: usize = 4;

/// The number of goroutines that drive a crate. `TREFOIL_COMPAT_MANY` overrides the default.
pub static MANY: LazyLock<usize> = LazyLock::new(|| {
    let wanted = std::env::var("TREFOIL_COMPAT_MANY").ok().and_then(|n| n.parse().ok());
    wanted.unwrap_or(if cfg!(debug_assertions) { 200 } else { 1000 })
});

/// The most threads that a runtime may have in [`assert_few_threads`]: one per P, and some that
/// block in file I/O or in system calls that trefoil does not interpose.
const MAX_THREADS: usize = 16 * PROCS;

/// The longest that one operation of a test may take. None takes a tenth of it on a quiet machine.
pub const LONG: Duration = Duration::from_secs(60);

/// The longest that a whole test may take; then the watchdog ends the process.
const TEST_LIMIT: Duration = Duration::from_secs(180);

/// The longest that the watchdog waits for the dump of all goroutines.
const DUMP_LIMIT: Duration = Duration::from_secs(20);

/// Goroutines run code of large crates in debug builds: they get twice the default stack.
const STACK_BYTES: usize = 512 << 10;

/// Runs `f` as the main goroutine of a new runtime. If it takes longer than three minutes, a
/// watchdog prints every goroutine and aborts the process.
pub fn run<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    let name = std::thread::current().name().unwrap_or("a test").to_owned();
    let (alive, ended) = channel::<()>();
    let watchdog = std::thread::Builder::new().name("watchdog".into()).spawn(move || {
        if ended.recv_timeout(TEST_LIMIT) == Err(RecvTimeoutError::Timeout) {
            // Not `eprintln!`: an abort would lose what libtest has captured.
            let text = format!("\nHANG: {name} did not end within {TEST_LIMIT:?}\n");
            let _ = std::io::stderr().write_all(text.as_bytes());
            // SAFETY: signals this process. trefoil's handler prints the goroutines of every
            // runtime and exits.
            unsafe { libc::kill(libc::getpid(), libc::SIGQUIT) };
            std::thread::sleep(DUMP_LIMIT);
            std::process::abort();
        }
    });
    watchdog.expect("a thread for the watchdog");
    let runtime = Runtime::builder().procs(PROCS).stack_size(STACK_BYTES).build().unwrap();
    let result = runtime.run(f);
    drop(alive);
    result
}

/// Starts one goroutine per number below `n` and returns their results in order.
pub fn go_each<T: Send + 'static>(
    n: usize,
    f: impl Fn(usize) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let f = std::sync::Arc::new(f);
    let start = |i| {
        let f = f.clone();
        trefoil::go(move || f(i))
    };
    join_all((0..n).map(start).collect())
}

/// Waits for all goroutines and returns their results in order.
pub fn join_all<T>(handles: Vec<JoinHandle<T>>) -> Vec<T> {
    handles.into_iter().map(|handle| handle.join().unwrap()).collect()
}

/// Panics if the caller's runtime has more threads than 16 per P: the goroutines must have parked,
/// not blocked their threads.
pub fn assert_few_threads() {
    let n = trefoil::debug::stats().threads;
    println!("{} goroutines, {n} threads", *MANY);
    assert!(n <= MAX_THREADS, "{n} threads for {} goroutines", *MANY);
}

/// Polls until `done` returns true. Panics after [`LONG`].
#[track_caller]
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LONG, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A folder that is removed when it is dropped.
#[derive(Debug)]
pub struct TempDir(PathBuf);

impl TempDir {
    /// Creates a new, empty folder. `name` is part of its name.
    pub fn new(name: &str) -> TempDir {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let (pid, n) = (std::process::id(), NEXT.fetch_add(1, Relaxed));
        let dir = std::env::temp_dir().join(format!("trefoil-{name}-{pid}-{n}"));
        std::fs::create_dir_all(&dir).unwrap();
        TempDir(dir)
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Sends one HTTP request on a connection of its own. Returns the status and the body.
pub fn http(addr: SocketAddr, method: &str, path: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
         Content-Type: text/plain\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect("an HTTP response");
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}
