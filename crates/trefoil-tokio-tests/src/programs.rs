//! Database servers of the distribution, each on a free port with a folder of its own. A server
//! that is not installed is None, and a line on stderr says so.

use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The user and group that PostgreSQL runs as, if the tests run as root: it refuses to be root.
const NOBODY: u32 = 65534;

/// A server that is ended when it is dropped.
pub struct Server {
    process: Child,
    folder: PathBuf,
    /// The port on 127.0.0.1.
    pub port: u16,
    signal: i32,
}

impl Drop for Server {
    fn drop(&mut self) {
        // SAFETY: signals a child process that was not waited for yet.
        unsafe { libc::kill(self.process.id() as i32, self.signal) };
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    listener.local_addr().expect("it is bound").port()
}

/// Creates a folder that no other test uses.
fn new_folder(name: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let own = format!("trefoil-tokio-{name}-{}-{n}", std::process::id());
    let folder = std::env::temp_dir().join(own);
    std::fs::create_dir_all(&folder).expect("a folder for temporary files");
    folder
}

/// Returns the path of a program: in `PATH`, or in `bin` of a folder in `versions`.
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

/// Waits until the port accepts connections.
fn wait_for(server: Server) -> Server {
    let limit = Instant::now() + Duration::from_secs(30);
    while TcpStream::connect((Ipv4Addr::LOCALHOST, server.port)).is_err() {
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
    let (folder, port) = (new_folder("redis"), free_port());
    let process = Command::new(file)
        .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
        .args(["--port", &port.to_string(), "--dir"])
        .arg(&folder)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("redis-server starts");
    Some(wait_for(Server { process, folder, port, signal: libc::SIGTERM }))
}

/// Returns a command that does not run as root.
fn command_as_nobody(file: &Path) -> Command {
    let mut command = Command::new(file);
    // SAFETY: no arguments, no conditions.
    if unsafe { libc::geteuid() } == 0 {
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
    let (folder, port) = (new_folder("postgres"), free_port());
    // SAFETY: no arguments, no conditions.
    if unsafe { libc::geteuid() } == 0 {
        let nobody = Some(NOBODY);
        std::os::unix::fs::chown(&folder, nobody, nobody).expect("root may do that");
    }
    let data = folder.join("data");
    let made = command_as_nobody(&file.with_file_name("initdb"))
        .args(["-U", "test", "-A", "trust", "--no-sync", "-D"])
        .arg(&data)
        .current_dir(&folder)
        .output()
        .expect("initdb starts");
    assert!(made.status.success(), "{made:?}");
    let process = command_as_nobody(&file)
        .arg("-D")
        .arg(&data)
        .args(["-F", "-h", "127.0.0.1", "-p", &port.to_string(), "-N", "60", "-k"])
        .arg(&folder)
        .current_dir(&folder)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("postgres starts");
    Some(wait_for(Server { process, folder, port, signal: libc::SIGINT }))
}
