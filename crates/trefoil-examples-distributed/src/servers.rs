//! Servers of the distribution, each in a folder of its own and reached through a Unix socket
//! there. A server that is not installed is None, and a line on stderr says so.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The user and group that PostgreSQL runs as, if the tests run as root: it refuses to be root.
const NOBODY: u32 = 65534;
const START_LIMIT: Duration = Duration::from_secs(30);

/// A server that is ended when it is dropped.
pub struct Server {
    process: Child,
    folder: PathBuf,
    /// The signal that ends the server without waiting for its clients.
    signal: i32,
    /// What a client connects to.
    pub url: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        // SAFETY: signals a child process that was not waited for yet.
        unsafe { libc::kill(self.process.id() as i32, self.signal) };
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Creates a folder that no other test uses. Its path is short, because a socket's path must be.
fn new_folder(name: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let own = format!("trefoil-{name}-{}-{n}", std::process::id());
    let folder = std::env::temp_dir().join(own);
    std::fs::create_dir_all(&folder).expect("a folder for temporary files");
    folder
}

/// Returns the path of a program: in `bin` of a folder in `versions`, or in `PATH`.
fn find(name: &str, versions: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let versions = std::fs::read_dir(versions).into_iter().flatten().flatten();
    let folders = versions.map(|v| v.path().join("bin")).chain(std::env::split_paths(&path));
    let found = folders.map(|folder| folder.join(name)).find(|file| file.is_file());
    if found.is_none() {
        // Past libtest's capture.
        let _ = writeln!(std::io::stderr(), "skipped: {name} is not installed");
    }
    found
}

/// Waits until the socket accepts connections.
fn wait_for(mut server: Server, socket: &Path) -> Server {
    let limit = Instant::now() + START_LIMIT;
    while UnixStream::connect(socket).is_err() {
        let ended = server.process.try_wait().expect("it is a child process");
        assert!(ended.is_none(), "the server has ended: {ended:?}");
        assert!(Instant::now() < limit, "the server does not answer");
        std::thread::sleep(Duration::from_millis(10));
    }
    server
}

/// Starts Redis.
///
/// # Panics
/// Panics if it is installed and does not start.
pub fn redis() -> Option<Server> {
    let file = find("redis-server", "/none")?;
    let folder = new_folder("redis");
    let socket = folder.join("socket");
    let process = Command::new(file)
        .args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"])
        .arg(&socket)
        .arg("--dir")
        .arg(&folder)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("redis-server starts");
    let url = format!("redis+unix://{}", socket.display());
    Some(wait_for(Server { process, folder, signal: libc::SIGTERM, url }, &socket))
}

/// Returns whether the tests run as root.
fn is_root() -> bool {
    // SAFETY: no arguments, no conditions.
    unsafe { libc::geteuid() == 0 }
}

/// Returns a command that does not run as root.
fn command_as_nobody(file: &Path, folder: &Path) -> Command {
    let mut command = Command::new(file);
    command.current_dir(folder);
    if is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    command
}

/// Starts PostgreSQL with the user `test` and the database `postgres`.
///
/// # Panics
/// Panics if it is installed and does not start.
pub fn postgres() -> Option<Server> {
    let file = find("postgres", "/usr/lib/postgresql")?;
    let folder = new_folder("postgres");
    if is_root() {
        let nobody = Some(NOBODY);
        std::os::unix::fs::chown(&folder, nobody, nobody).expect("root may do that");
    }
    let data = folder.join("data");
    let made = command_as_nobody(&file.with_file_name("initdb"), &folder)
        .args(["-U", "test", "-A", "trust", "--no-sync", "-D"])
        .arg(&data)
        .output()
        .expect("initdb starts");
    assert!(made.status.success(), "{made:?}");
    let process = command_as_nobody(&file, &folder)
        .arg("-D")
        .arg(&data)
        .args(["-F", "-h", "", "-k"])
        .arg(&folder)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("postgres starts");
    let url = format!("host={} user=test dbname=postgres", folder.display());
    let socket = folder.join(".s.PGSQL.5432");
    Some(wait_for(Server { process, folder, signal: libc::SIGINT, url }, &socket))
}
