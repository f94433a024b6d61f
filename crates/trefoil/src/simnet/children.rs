//! Child processes that are started while a simulation runs, by any thread of the process.
//!
//! A new child has all descriptors of its parent until it executes its program, so it keeps their
//! files open. If a simulation closed a socket in that time, the other side of the socket would
//! learn of it only later, when the simulated time may have gone on. Then a seed would not repeat
//! its run, and a goroutine could wait for ever. So no file of a simulation is closed while a child
//! has it: `SIMULATED` is locked during each close (`sockets::close_marked`,
//! `sockets::replace_marked`), and while a child starts:
//!
//! | function | `SIMULATED` is locked until |
//! |---|---|
//! | `posix_spawn`, `posix_spawnp` | the child has closed the descriptors with `FD_CLOEXEC` |
//! | `fork` | the child has replaced the descriptors of simulations that have `FD_CLOEXEC` |
//!
//! A pipe, whose writing end the child closes too, tells the parent. That `posix_spawn` returns
//! does not: the kernel lets the parent go on before it closes the descriptors of the child.
//! `SIMULATED` is also locked while a descriptor is made and marked, so that a child of `fork`
//! knows all of them.
//!
//! Not handled: a child that starts at the same moment as the first network of the process;
//! `vfork`, raw system calls, and functions that start a child inside libc (`system`, `popen`); and
//! a `fork` by a goroutine of a simulation, whose child keeps its descriptors.

use super::sockets::SIMULATED;
use crate::mem::MmapVec;
use crate::sched::simulation;
use crate::sys::fork::is_forked;
use crate::sys::lock::{LockGuard, holds_runtime_lock};
use crate::sys::raw::{poll_ms, syscall};
use crate::sys::syscalls::{Errno, checked};
use crate::sys::{clock, syscalls};
use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::os::fd::{IntoRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long a call waits for the child, which may have to wait for a CPU.
const WAIT: Duration = Duration::from_secs(1);

/// The process has had a network. Before that a call that starts a child does nothing else.
static HAS_BEEN_SIMULATED: AtomicBool = AtomicBool::new(false);

/// Notes that there is a network, which has no descriptors yet.
pub(super) fn note_network() {
    HAS_BEEN_SIMULATED.store(true, Ordering::Relaxed);
}

/// A child that starts. While it exists, no simulation closes a file.
struct Start {
    marks: LockGuard<'static, MmapVec<u64>>,
    /// If there are simulations, the ends of a pipe, from which to read and to which to write: the
    /// parent waits until the child has closed the second one.
    pipe: Option<(RawFd, RawFd)>,
}

impl Start {
    /// Returns None if the process has never had a network.
    fn begin() -> Option<Start> {
        if !HAS_BEEN_SIMULATED.load(Ordering::Relaxed) || is_forked() || holds_runtime_lock() {
            return None;
        }
        let marks = SIMULATED.lock();
        // A simulation that begins after this has no descriptors before the lock is free.
        let pipe = if clock::has_simulations() { pipe_above(&marks) } else { None };
        Some(Start { marks, pipe })
    }

    /// In the parent: waits for the child.
    fn end(self) {
        let Some((reader, writer)) = self.pipe else { return };
        // SAFETY: our own descriptors, which are not used after they are closed.
        unsafe { syscalls::close(writer) };
        wait_until_closed(reader);
        // SAFETY: as above.
        unsafe { syscalls::close(reader) };
    }
}

/// Waits until every copy of a pipe's writing end is closed, at most [`WAIT`]. The handler of a
/// signal may interrupt the system call, but does not end the wait.
fn wait_until_closed(reader: RawFd) {
    let begin = clock::real_now();
    loop {
        let waited = Duration::from_nanos(clock::real_now() - begin);
        // Rounded up, so that the last call is not made again and again.
        let left_ms = WAIT.saturating_sub(waited).as_micros().div_ceil(1_000);
        let mut one = libc::pollfd { fd: reader, events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry of our own.
        let result = unsafe { poll_ms(&raw mut one, 1, left_ms as usize) };
        if checked(result) != Err(Errno::INTR) || left_ms == 0 {
            return;
        }
    }
}

/// Makes a pipe whose writing end has a larger number than every marked descriptor. The kernel
/// closes the descriptors of a child in the order of their numbers; the parent may close its own
/// writing end meanwhile, and then that of the child must be the last.
fn pipe_above(marks: &[u64]) -> Option<(RawFd, RawFd)> {
    let (reader, writer) = syscalls::pipe2(0).ok()?;
    let (reader, low) = (reader.into_raw_fd(), writer.into_raw_fd());
    let bits = u64::BITS as usize;
    let above = |(i, word): (usize, &u64)| (i + 1) * bits - word.leading_zeros() as usize;
    let from = marks.iter().enumerate().rfind(|(_, word)| **word != 0).map_or(0, above);
    let args = [low as usize, libc::F_DUPFD_CLOEXEC as usize, from];
    // SAFETY: passes no pointers; our own descriptor, which is not used after it is closed.
    let writer = unsafe { syscall(libc::SYS_fcntl, args) };
    if writer < 0 {
        return Some((reader, low)); // No such number is free.
    }
    // SAFETY: as above.
    unsafe { syscalls::close(low) };
    Some((reader, writer as RawFd))
}

thread_local! {
    /// The child that this thread starts by `fork`.
    static FORK: Cell<Option<ManuallyDrop<Start>>> = const { Cell::new(None) };
}

/// Calls `f`, which starts a child that executes a program.
pub(crate) fn start<T>(f: impl FnOnce() -> T) -> T {
    let start = Start::begin();
    let result = f();
    start.into_iter().for_each(Start::end);
    result
}

/// Makes `fork` wait for its children. Called once.
pub(crate) fn watch() {
    // SAFETY: the functions make system calls, and use no locks but `SIMULATED`.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
}

unsafe extern "C" fn before_fork() {
    if simulation::here().is_none() {
        FORK.set(Start::begin().map(ManuallyDrop::new));
    }
}

unsafe extern "C" fn in_parent() {
    FORK.take().into_iter().for_each(|start| ManuallyDrop::into_inner(start).end());
}

unsafe extern "C" fn in_child() {
    let Some(start) = FORK.take() else { return };
    let Start { marks, pipe } = ManuallyDrop::into_inner(start);
    let Some((reader, writer)) = pipe else { return };
    for (i, word) in marks.iter().enumerate() {
        let set = (0..u64::BITS as usize).filter(|bit| word & 1 << bit != 0);
        set.for_each(|bit| replace_if_lost(reader, i * u64::BITS as usize + bit));
    }
    // SAFETY: our own descriptors, which are not used after this.
    unsafe {
        syscalls::close(writer);
        syscalls::close(reader);
    }
}

/// In a child: puts the file of `from` in the place of the descriptor `fd`, if the child would lose
/// that when it executes a program. The number is not free then: values of the child may own it.
fn replace_if_lost(from: RawFd, fd: usize) {
    // SAFETY: pass no pointers. The child does not use the descriptor: its socket is simulated in
    // the parent alone.
    unsafe {
        let flags = syscall(libc::SYS_fcntl, [fd, libc::F_GETFD as usize]);
        if flags >= 0 && flags & libc::FD_CLOEXEC as isize != 0 {
            syscall(libc::SYS_dup3, [from as usize, fd, libc::O_CLOEXEC as usize]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::thread;

    /// How often the handler ran.
    static HANDLED: AtomicUsize = AtomicUsize::new(0);

    extern "C" fn handle(_: libc::c_int) {
        HANDLED.fetch_add(1, Ordering::Relaxed);
    }

    #[test]
    fn a_signal_does_not_end_the_wait_for_a_child() {
        // No other test of this binary uses the signal.
        let signal = libc::SIGRTMAX() - 2;
        // SAFETY: an async-signal-safe handler.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handle as *const () as usize;
            assert_eq!(libc::sigaction(signal, &raw const action, std::ptr::null_mut()), 0);
        }
        let (reader, writer) = std::io::pipe().unwrap();
        let reader = reader.into_raw_fd();
        let is_closed = AtomicBool::new(false);
        let (process, waiter) = (std::process::id() as usize, syscalls::gettid() as usize);
        let was_closed = thread::scope(|scope| {
            scope.spawn(|| {
                while HANDLED.load(Ordering::Relaxed) < 5 {
                    thread::sleep(Duration::from_millis(1));
                    // SAFETY: passes no pointers; a thread of this process, with a handler.
                    unsafe { syscall(libc::SYS_tgkill, [process, waiter, signal as usize]) };
                }
                thread::sleep(Duration::from_millis(20));
                is_closed.store(true, Ordering::Relaxed);
                drop(writer);
            });
            wait_until_closed(reader);
            is_closed.load(Ordering::Relaxed)
        });
        // SAFETY: our own descriptor, which is not used after this.
        unsafe { syscalls::close(reader) };
        assert!(was_closed, "the wait ended before the writing end was closed");
    }
}
