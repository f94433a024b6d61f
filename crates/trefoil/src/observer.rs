//! What the crates `trefoil-observe` and `trefoil-cli` need of the runtime and programs do not: it
//! is hidden, and may change with any version.
//!
//! The server of `trefoil-observe` runs in a *system runtime*: a runtime of its own that dumps and
//! the deadlock check leave out. So the server answers while every P of the program is stuck, its
//! goroutines are in no dump and no count of the program's, and a deadlock of the program is found
//! although the server waits for connections. It reads another runtime's state through
//! [`RuntimeRef::observe`].

use crate::observe::waits::list;
use crate::observe::waits::report::{Deadlock, Goroutine};
use crate::observe::{deadlock, metrics, waits};
use crate::runtime::{Runtime, observe_runtime, set_start_hook, with_sched};
use crate::sched::Sched;
use crate::sys::env;
use crate::sys::syscalls::{self, Errno};
use socket2::SockAddr;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// How many connections may wait until the server accepts them.
const LISTEN_BACKLOG: i32 = 128;

/// Calls `hook` once, after the first runtime of the process has started. It may be called before
/// `main`. The first call counts. If `hook` fails, the start of that runtime fails.
///
/// It is not called in a program that has more rights than its caller (setuid): the hook obeys the
/// environment, and the caller has made that.
pub fn on_first_start(hook: fn() -> io::Result<()>) {
    if env::is_trusted() {
        set_start_hook(hook);
    }
}

/// Starts a system runtime with one P.
///
/// # Errors
/// Those of [`RuntimeBuilder::build`](crate::RuntimeBuilder::build).
pub fn system_runtime() -> io::Result<Runtime> {
    Runtime::builder().procs(1).system().build()
}

/// A runtime of the program that is alive.
#[derive(Clone)]
pub struct RuntimeRef(Arc<Sched>);

/// Returns the runtimes of the program, oldest first. A reference keeps the memory of its runtime,
/// not its threads.
pub fn runtimes() -> Vec<RuntimeRef> {
    let mut all = deadlock::runtimes();
    // A runtime that was dropped may have goroutines that are never resumed.
    all.retain(|sched| !sched.stopping.load(Ordering::Relaxed));
    all.into_iter().map(RuntimeRef).collect()
}

impl RuntimeRef {
    /// Returns its number, which no other runtime of the process ever has.
    pub fn number(&self) -> u64 {
        self.0.runtime_id().number()
    }

    /// Calls `f`, in which the functions of [`debug`](crate::debug) and [`trace`](crate::trace)
    /// are about this runtime.
    pub fn observe<T>(&self, f: impl FnOnce() -> T) -> T {
        observe_runtime(&self.0, f)
    }
}

/// Returns the goroutines and tasks of the observed runtime with these ids, without what they wait
/// for.
pub fn with_ids(ids: &[u64]) -> Vec<Goroutine> {
    let ids = ids.iter().copied().collect();
    with_sched(|sched| list::with_ids(sched, &ids))
}

/// Returns the goroutines of the observed runtime that wait for a lock, a goroutine or a scope, the
/// longest waits first, and at most `max`; and how many there are.
pub fn waiting(max: usize) -> (Vec<Goroutine>, usize) {
    with_sched(|sched| list::waiting(sched, max))
}

/// As [`deadlocks`](crate::debug::deadlocks), without those that are found by a scan of stacks,
/// which takes long if there are many goroutines.
pub fn deadlocks_without_guesses() -> Vec<Deadlock> {
    with_sched(waits::deadlocks_without_guesses)
}

/// Returns the stack of a goroutine of the observed runtime as text. None if there is none with
/// this id.
pub fn stack(id: u64) -> Option<String> {
    with_sched(|sched| metrics::stack(sched, id))
}

/// Returns for each P of the observed runtime the M that owns it and its thread's id.
pub fn threads_of_ps() -> Vec<Option<(u32, u32)>> {
    with_sched(|sched| sched.p_snapshots().into_iter().map(|p| p.m.zip(p.tid)).collect())
}

/// Returns whether the observed runtime is being recorded.
pub fn is_recording() -> bool {
    with_sched(|sched| sched.record.is_on())
}

/// Returns the user id of the process at the other end of a Unix socket.
///
/// # Errors
/// The kernel's, for a descriptor that is no Unix socket.
pub fn peer_uid(socket: impl AsFd) -> io::Result<u32> {
    Ok(syscalls::peer_credentials(socket.as_fd())?.uid)
}

/// Returns whether the other end of a socket has closed it, or its side of it, also if not all was
/// received that it has sent before. Does not wait.
pub fn has_hung_up(socket: impl AsFd) -> bool {
    let fd = socket.as_fd().as_raw_fd();
    let mut list = [libc::pollfd { fd, events: libc::POLLRDHUP, revents: 0 }];
    // Reported without being asked for: `POLLHUP` and `POLLERR`.
    syscalls::poll_now(&mut list) == Ok(1)
}

/// Listens at a path that does not exist. The socket has the mode 0600 from the start.
///
/// # Errors
/// The kernel's, for example [`AddrInUse`](io::ErrorKind::AddrInUse) if the path exists.
pub fn listen_privately(path: &Path) -> io::Result<UnixListener> {
    let addr = SockAddr::unix(path)?;
    let socket = syscalls::unix_stream_socket()?;
    // Linux gives the file of a socket the mode of the descriptor, without the bits of the umask.
    syscalls::fchmod(socket.as_fd(), 0o600)?;
    syscalls::bind(socket.as_fd(), &addr)?;
    syscalls::listen(socket.as_fd(), LISTEN_BACKLOG)?;
    Ok(UnixListener::from(socket))
}

/// Returns whether a path is a Unix socket at which nothing listens. Does not wait.
pub fn has_no_listener(path: &Path) -> bool {
    let Ok(addr) = SockAddr::unix(path) else { return false };
    let connect = || syscalls::connect(syscalls::unix_stream_socket()?.as_fd(), &addr);
    let is_socket = || std::fs::symlink_metadata(path).is_ok_and(|it| it.file_type().is_socket());
    // A file that is no socket refuses connections too.
    connect() == Err(Errno::CONNREFUSED) && is_socket()
}

/// Returns the effective user id of this process.
pub fn own_uid() -> u32 {
    syscalls::geteuid()
}
