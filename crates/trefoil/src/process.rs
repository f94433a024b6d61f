//! Children: waiting for one parks the goroutine.
//!
//! ```
//! use std::process::Command;
//! trefoil::run(|| {
//!     let out = trefoil::process::output(Command::new("echo").arg("hello")).unwrap();
//!     assert_eq!(out.stdout, b"hello\n");
//!     let mut child = Command::new("sleep").arg("0.01").spawn().unwrap();
//!     assert!(trefoil::process::wait(&mut child).unwrap().success());
//! });
//! ```
//! A child's pipes: [`PipeReader`] and [`PipeWriter`](crate::net::PipeWriter) can be made of them.

use crate::blocking;
use crate::net::PipeReader;
use crate::net::fd::Fd;
use crate::sched::pollable::Side;
use crate::sys::clock::{self, NEVER, Nanos};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

/// Waits for a child to end, as [`Child::wait`]: its standard input is closed before.
///
/// # Errors
/// The kernel's.
pub fn wait(child: &mut Child) -> io::Result<ExitStatus> {
    drop(child.stdin.take());
    match wait_until(child, NEVER)? {
        Some(status) => Ok(status),
        None => blocking(|| child.wait()),
    }
}

/// As [`wait`], for at most `timeout`. None: it has not ended; its standard input is as it was.
///
/// # Errors
/// The kernel's.
pub fn wait_timeout(child: &mut Child, timeout: Duration) -> io::Result<Option<ExitStatus>> {
    wait_until(child, clock::after(timeout))
}

/// None: it is too late, or there is no way to wait (a kernel before 5.3).
fn wait_until(child: &mut Child, deadline: Nanos) -> io::Result<Option<ExitStatus>> {
    if let Some(status) = child.try_wait()? {
        return Ok(Some(status));
    }
    // Ours, and not waited for yet: the number is not somebody else's.
    let fd = Pid::from_raw(child.id() as i32)
        .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
        .map(Fd::new);
    let Some(fd) = fd else {
        while deadline != NEVER && clock::now() < deadline {
            crate::time::sleep(Duration::from_millis(1));
            if let Some(status) = child.try_wait()? {
                return Ok(Some(status));
            }
        }
        return Ok(None);
    };
    let call = fd.call()?;
    loop {
        let seen = fd.edges(Side::Read);
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        match fd.wait_for(&call, Side::Read, deadline, seen) {
            Err(e) if e.kind() == io::ErrorKind::TimedOut => return child.try_wait(),
            other => other?,
        }
    }
}

/// Runs a command to its end and collects what it writes, as [`Command::output`].
///
/// # Errors
/// If it cannot be started; of reading.
pub fn output(command: &mut Command) -> io::Result<Output> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = blocking(|| command.spawn())?;
    let out = child.stdout.take().map(OwnedFd::from);
    let err = child.stderr.take().map(OwnedFd::from);
    let (stdout, stderr) = crate::scope(|s| {
        let reading = s.go(|| read_all(err));
        let stdout = read_all(out);
        (stdout, reading.join())
    });
    let status = wait(&mut child)?;
    let stderr = stderr.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    Ok(Output { status, stdout: stdout?, stderr })
}

/// Runs a command to its end, as [`Command::status`].
///
/// # Errors
/// If it cannot be started.
pub fn status(command: &mut Command) -> io::Result<ExitStatus> {
    wait(&mut blocking(|| command.spawn())?)
}

fn read_all(pipe: Option<OwnedFd>) -> io::Result<Vec<u8>> {
    let mut all = Vec::new();
    if let Some(fd) = pipe {
        PipeReader::try_from(fd)?.read_to_end(&mut all)?;
    }
    Ok(all)
}
