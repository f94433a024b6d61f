//! Child processes: a goroutine that waits for one parks.
//!
//! The functions take std's [`Command`] and [`Child`]. They do what the methods of the same names
//! do, and other goroutines run on the thread meanwhile.
//!
//! ```
//! use std::process::Command;
//!
//! trefoil::run(|| {
//!     let out = trefoil::process::output(Command::new("echo").arg("hello")).unwrap();
//!     assert_eq!(out.stdout, b"hello\n");
//!     let mut child = Command::new("sleep").arg("0.01").spawn().unwrap();
//!     assert!(trefoil::process::wait(&mut child).unwrap().success());
//! });
//! ```
//!
//! # Contents
//! | function | in async code | std's | what it does |
//! |---|---|---|---|
//! | [`output`] | [`output_async`] | [`Command::output`] | runs a command and collects its output |
//! | [`wait_with_output`] | [`wait_with_output_async`] | the method of [`Child`] | the same for a child |
//! | [`status`] | [`status_async`] | [`Command::status`] | runs a command, returns its status |
//! | [`wait`] | [`wait_async`] | [`Child::wait`] | waits for a child |
//! | [`wait_timeout`] | [`timeout_async`] | none | waits for a child for a limited time |
//!
//! [`timeout_async`]: crate::time::timeout_async
//!
//! # Pipes of a child
//! [`PipeReader`] and [`PipeWriter`](crate::net::PipeWriter) are made from a child's pipes with
//! `try_from`. Their reads and writes park the goroutine:
//!
//! ```
//! use std::io::{Read, Write};
//! use std::os::fd::OwnedFd;
//! use std::process::{Command, Stdio};
//! use trefoil::net::{PipeReader, PipeWriter};
//!
//! trefoil::run(|| {
//!     let mut command = Command::new("cat");
//!     let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
//!     let stdin = OwnedFd::from(child.stdin.take().unwrap());
//!     let stdout = OwnedFd::from(child.stdout.take().unwrap());
//!     let mut writer = PipeWriter::try_from(stdin).unwrap();
//!     trefoil::go(move || writer.write_all(b"through a child").unwrap());
//!     let mut text = String::new();
//!     PipeReader::try_from(stdout).unwrap().read_to_string(&mut text).unwrap();
//!     assert_eq!(text, "through a child");
//!     assert!(trefoil::process::wait(&mut child).unwrap().success());
//! });
//! ```

use crate::blocking::blocking;
use crate::net::fd::Fd;
use crate::net::{AsyncFd, PipeReader};
use crate::sched::netpoll::pollable::Direction;
use crate::scope::scope;
use crate::sys::clock::{self, NEVER, Nanos};
use crate::sys::syscalls;
use crate::time::{sleep, sleep_async};
use std::future::{Future, poll_fn};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::pin::{Pin, pin};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::task::Poll;
use std::time::Duration;

/// How often a child without a pidfd is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Room that a read of a pipe has at least.
const READ_BYTES: usize = 8 << 10;

/// Waits for a child to exit, like [`Child::wait`].
///
/// The child's standard input, if `child.stdin` holds it, is closed first, so that the child does
/// not wait for input. The goroutine parks on the child's pidfd. On kernels before 5.3, and if no
/// descriptor is left, a thread waits instead.
///
/// # Errors
/// The OS error `ECHILD` if other code in the process has waited for the child already, or if the
/// process ignores SIGCHLD.
///
/// # Examples
/// ```
/// use std::process::Command;
///
/// trefoil::run(|| {
///     let mut child = Command::new("sh").args(["-c", "exit 3"]).spawn().unwrap();
///     let status = trefoil::process::wait(&mut child).unwrap();
///     assert_eq!(status.code(), Some(3));
/// });
/// ```
pub fn wait(child: &mut Child) -> io::Result<ExitStatus> {
    drop(child.stdin.take());
    match wait_until(child, NEVER)? {
        Some(status) => Ok(status),
        None => unreachable!("a wait without a deadline ends when the child exits"),
    }
}

/// Waits for a child to exit, for at most `timeout`.
///
/// Returns `None` if the child has not exited by then. Unlike [`wait`], it leaves the child's
/// standard input open. The child continues after the timeout: the caller may kill it, or wait
/// again.
///
/// # Errors
/// The OS error `ECHILD` if other code in the process has waited for the child already, or if the
/// process ignores SIGCHLD.
///
/// # Examples
/// ```
/// use std::process::Command;
/// use std::time::Duration;
/// use trefoil::process::{wait, wait_timeout};
///
/// trefoil::run(|| {
///     let mut child = Command::new("sleep").arg("60").spawn().unwrap();
///     let status = wait_timeout(&mut child, Duration::from_millis(2)).unwrap();
///     assert!(status.is_none(), "the child still sleeps");
///     child.kill().unwrap();
///     assert!(!wait(&mut child).unwrap().success());
/// });
/// ```
pub fn wait_timeout(child: &mut Child, timeout: Duration) -> io::Result<Option<ExitStatus>> {
    wait_until(child, clock::after(timeout))
}

/// Waits until the child exits. Returns `None` if it has not exited at `deadline`.
fn wait_until(child: &mut Child, deadline: Nanos) -> io::Result<Option<ExitStatus>> {
    if let Some(status) = child.try_wait()? {
        return Ok(Some(status));
    }
    match open_pidfd(child) {
        Some(pidfd) => wait_for_pidfd(child, &Fd::new(pidfd), deadline),
        None => wait_without_pidfd(child, deadline),
    }
}

/// Returns a descriptor for a child that has not been waited for, so that its id cannot belong to
/// another process.
fn open_pidfd(child: &Child) -> Option<OwnedFd> {
    syscalls::pidfd_open(child.id()).ok()
}

/// Parks on the pidfd, which becomes readable when the child exits.
fn wait_for_pidfd(
    child: &mut Child,
    pidfd: &Fd,
    deadline: Nanos,
) -> io::Result<Option<ExitStatus>> {
    let call = pidfd.call()?;
    loop {
        let seen = pidfd.edges(Direction::Read);
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        match pidfd.wait_for(&call, Direction::Read, deadline, seen) {
            Err(e) if e.kind() == io::ErrorKind::TimedOut => return child.try_wait(),
            other => other?,
        }
    }
}

/// Waits on kernels before 5.3, and if no descriptor is left for a pidfd.
#[cold]
fn wait_without_pidfd(child: &mut Child, deadline: Nanos) -> io::Result<Option<ExitStatus>> {
    if deadline == NEVER {
        return blocking(|| child.wait()).map(Some);
    }
    while clock::now() < deadline {
        sleep(POLL_INTERVAL);
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
    }
    Ok(None)
}

/// Waits for a child to exit: [`wait`] in async code.
///
/// The child's standard input, if `child.stdin` holds it, is closed first. The task waits for the
/// child's pidfd, and blocks no thread. On kernels before 5.3, and if no descriptor is left, it
/// checks every millisecond whether the child has exited.
///
/// # Errors
/// As [`wait`].
///
/// # Cancel
/// Dropping the future loses nothing. The child continues; the caller may kill it, or wait again.
///
/// # Examples
/// ```
/// use std::process::Command;
/// use std::time::Duration;
/// use trefoil::process::wait_async;
/// use trefoil::time::timeout_async;
///
/// trefoil::run(|| {
///     let task = trefoil::task::spawn(async {
///         let mut child = Command::new("sleep").arg("60").spawn().unwrap();
///         let late = timeout_async(Duration::from_millis(2), wait_async(&mut child)).await;
///         assert!(late.is_err(), "the child still sleeps");
///         child.kill().unwrap();
///         assert!(!wait_async(&mut child).await.unwrap().success());
///     });
///     task.join().unwrap();
/// });
/// ```
pub async fn wait_async(child: &mut Child) -> io::Result<ExitStatus> {
    drop(child.stdin.take());
    if let Some(status) = child.try_wait()? {
        return Ok(status);
    }
    let pidfd = open_pidfd(child).and_then(|fd| AsyncFd::new(fd).ok());
    loop {
        let mut ready = None;
        match &pidfd {
            Some(pidfd) => ready = Some(pidfd.readable().await?),
            None => sleep_async(POLL_INTERVAL).await,
        }
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if let Some(mut ready) = ready {
            ready.clear_ready();
        }
    }
}

/// A child that is killed if it has not exited when this is dropped.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            // If the child cannot be killed, it is not waited for either.
            let _ = self.0.kill().and_then(|()| blocking(|| self.0.wait()));
        }
    }
}

/// Runs a command to its end and collects its output: [`output`] in async code.
///
/// Unlike [`output`], it always connects standard input to `/dev/null` and collects both standard
/// output and standard error, because a [`Command`] does not tell which streams were configured.
/// For a command with other streams call [`Command::spawn`] and [`wait_with_output_async`].
///
/// # Errors
/// As [`output`].
///
/// # Cancel
/// Dropping the future kills the child with `SIGKILL`. What it has written is lost.
///
/// # Examples
/// ```
/// use std::process::Command;
/// use trefoil::process::output_async;
///
/// trefoil::run(|| {
///     let task = trefoil::task::spawn(async {
///         output_async(Command::new("sh").args(["-c", "echo out; echo err >&2"])).await
///     });
///     let out = task.join().unwrap().unwrap();
///     assert!(out.status.success());
///     assert_eq!((&out.stdout[..], &out.stderr[..]), (&b"out\n"[..], &b"err\n"[..]));
/// });
/// ```
pub async fn output_async(command: &mut Command) -> io::Result<Output> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    wait_with_output_async(blocking(|| command.spawn())?).await
}

/// Collects the output of a child until it exits: [`wait_with_output`] in async code.
///
/// # Errors
/// As [`wait_with_output`].
///
/// # Cancel
/// Dropping the future kills the child with `SIGKILL`. What it has written is lost.
///
/// # Examples
/// ```
/// use std::process::{Command, Stdio};
/// use trefoil::process::wait_with_output_async;
///
/// trefoil::run(|| {
///     let mut command = Command::new("sh");
///     command.args(["-c", "echo out; echo err >&2"]).stdout(Stdio::piped()).stderr(Stdio::null());
///     let child = command.spawn().unwrap();
///     let out = trefoil::block_on(wait_with_output_async(child)).unwrap();
///     assert_eq!((&out.stdout[..], &out.stderr[..]), (&b"out\n"[..], &b""[..]));
/// });
/// ```
pub async fn wait_with_output_async(child: Child) -> io::Result<Output> {
    let mut child = KillOnDrop(child);
    drop(child.0.stdin.take());
    let out = child.0.stdout.take().map(OwnedFd::from);
    let err = child.0.stderr.take().map(OwnedFd::from);
    let (stdout, stderr) = both(pin!(read_all_async(out)), pin!(read_all_async(err))).await;
    let status = wait_async(&mut child.0).await?;
    Ok(Output { status, stdout: stdout?, stderr: stderr? })
}

/// Runs a command to its end and returns its exit status: [`status`] in async code.
///
/// # Errors
/// As [`status`].
///
/// # Cancel
/// Dropping the future kills the child with `SIGKILL`.
///
/// # Examples
/// ```
/// use std::process::Command;
/// use trefoil::process::status_async;
///
/// let status = trefoil::block_on(status_async(&mut Command::new("false"))).unwrap();
/// assert_eq!(status.code(), Some(1));
/// ```
pub async fn status_async(command: &mut Command) -> io::Result<ExitStatus> {
    let mut child = KillOnDrop(blocking(|| command.spawn())?);
    wait_async(&mut child.0).await
}

/// Awaits two futures together.
async fn both<A: Future, B: Future>(
    mut a: Pin<&mut A>,
    mut b: Pin<&mut B>,
) -> (A::Output, B::Output) {
    let (mut first, mut second) = (None, None);
    poll_fn(|context| {
        if first.is_none()
            && let Poll::Ready(value) = a.as_mut().poll(context)
        {
            first = Some(value);
        }
        if second.is_none()
            && let Poll::Ready(value) = b.as_mut().poll(context)
        {
            second = Some(value);
        }
        match (first.take(), second.take()) {
            (Some(a), Some(b)) => Poll::Ready((a, b)),
            (a, b) => {
                (first, second) = (a, b);
                Poll::Pending
            }
        }
    })
    .await
}

/// Reads a pipe to its end.
async fn read_all_async(pipe: Option<OwnedFd>) -> io::Result<Vec<u8>> {
    let mut all = Vec::new();
    let Some(fd) = pipe else { return Ok(all) };
    let reader = PipeReader::try_from(fd)?;
    let mut len = 0;
    loop {
        if all.len() - len < READ_BYTES {
            all.resize((2 * len).max(len + READ_BYTES), 0);
        }
        match reader.read_async(&mut all[len..]).await? {
            0 => {
                all.truncate(len);
                return Ok(all);
            }
            n => len += n,
        }
    }
}

/// Runs a command to its end and collects its output, like [`Command::output`].
///
/// As in std, standard input is `/dev/null` and standard output and standard error are collected,
/// unless the caller has configured other streams. The goroutine parks while it reads. When both
/// streams have ended, a thread without a P waits for the exit, which usually comes at once.
/// [`wait_with_output`] needs no thread for that.
///
/// # Errors
/// The errors of [`Command::spawn`] ([`NotFound`](io::ErrorKind::NotFound) if there is no such
/// program, [`PermissionDenied`](io::ErrorKind::PermissionDenied) if it cannot be executed, the OS
/// error `EMFILE` or `ENFILE` if no descriptor is left, `EAGAIN` if the user has too many
/// processes), and those of [`wait`]. An exit status other than 0 is not an error.
///
/// # Examples
/// ```
/// use std::process::{Command, Stdio};
///
/// trefoil::run(|| {
///     let mut command = Command::new("sh");
///     command.args(["-c", "echo out; echo err >&2"]);
///     let out = trefoil::process::output(&mut command).unwrap();
///     assert!(out.status.success());
///     assert_eq!((&out.stdout[..], &out.stderr[..]), (&b"out\n"[..], &b"err\n"[..]));
///
///     let out = trefoil::process::output(command.stderr(Stdio::null())).unwrap();
///     assert_eq!((&out.stdout[..], &out.stderr[..]), (&b"out\n"[..], &b""[..]));
/// });
/// ```
pub fn output(command: &mut Command) -> io::Result<Output> {
    // Only std knows which streams were configured. Its `poll` of the pipes parks the goroutine.
    command.output()
}

/// Collects the output of a child until it exits, like [`Child::wait_with_output`].
///
/// The child's standard input, if `child.stdin` holds it, is closed first. Standard output and
/// standard error are collected if they are piped. The goroutine parks, and needs no thread.
///
/// # Errors
/// Those of [`wait`], and the OS error `EMFILE` or `ENFILE` if no descriptor is left.
///
/// # Examples
/// ```
/// use std::process::{Command, Stdio};
///
/// trefoil::run(|| {
///     let child = Command::new("echo").arg("hello").stdout(Stdio::piped()).spawn().unwrap();
///     let out = trefoil::process::wait_with_output(child).unwrap();
///     assert_eq!(out.stdout, b"hello\n");
/// });
/// ```
pub fn wait_with_output(mut child: Child) -> io::Result<Output> {
    drop(child.stdin.take());
    let out = child.stdout.take().map(OwnedFd::from);
    let err = child.stderr.take().map(OwnedFd::from);
    let (stdout, stderr) = match (out, err) {
        (out, Some(err)) if out.is_some() => scope(|s| {
            let reading = s.go(|| read_all(Some(err)));
            let stdout = read_all(out);
            (stdout, reading.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        }),
        (out, err) => (read_all(out), read_all(err)),
    };
    let status = wait(&mut child)?;
    Ok(Output { status, stdout: stdout?, stderr: stderr? })
}

/// Runs a command to its end and returns its exit status, like [`Command::status`].
///
/// The child inherits the standard streams of this process, unless the caller has configured
/// others.
///
/// # Errors
/// The errors of [`Command::spawn`] ([`NotFound`](io::ErrorKind::NotFound) if there is no such
/// program, [`PermissionDenied`](io::ErrorKind::PermissionDenied) if it cannot be executed, the OS
/// error `EMFILE` or `ENFILE` if no descriptor is left, `EAGAIN` if the user has too many
/// processes), and those of [`wait`]. An exit status other than 0 is not an error.
///
/// # Examples
/// ```
/// use std::io::ErrorKind;
/// use std::process::Command;
/// use trefoil::process::status;
///
/// trefoil::run(|| {
///     assert!(status(&mut Command::new("true")).unwrap().success());
///     let error = status(&mut Command::new("/nonexistent/program")).unwrap_err();
///     assert_eq!(error.kind(), ErrorKind::NotFound);
/// });
/// ```
pub fn status(command: &mut Command) -> io::Result<ExitStatus> {
    wait(&mut blocking(|| command.spawn())?)
}

/// Reads a pipe to its end.
fn read_all(pipe: Option<OwnedFd>) -> io::Result<Vec<u8>> {
    let mut all = Vec::new();
    if let Some(fd) = pipe {
        PipeReader::try_from(fd)?.read_to_end(&mut all)?;
    }
    Ok(all)
}
