//! Signals as values in a channel: Go's `signal.Notify`.
//!
//! ```
//! use trefoil::signal::{self, SIGUSR1};
//! trefoil::run(|| {
//!     let signals = signal::notify(&[SIGUSR1]).unwrap();
//!     unsafe { libc::kill(libc::getpid(), SIGUSR1) };
//!     assert_eq!(signals.recv(), Ok(SIGUSR1));
//! });
//! ```
//!
//! # How it is made
//! The handler may do almost nothing: it writes the signal's number to a pipe. A thread reads the pipe and sends to
//! the channels. It is a plain thread, so a program that waits for a signal alone is not taken for a deadlock, and
//! no runtime's end ends it.

use crate::chan::{self, Receiver, Sender, TrySendError};
use crate::sync::Mutex;
use rustix::pipe::{PipeFlags, pipe_with};
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

pub use libc::{SIGALRM, SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGPIPE, SIGQUIT, SIGTERM};
pub use libc::{SIGTSTP, SIGUSR1, SIGUSR2, SIGWINCH};

/// Signals that a channel keeps for a receiver that is busy; later ones are dropped, as in Go.
const KEPT: usize = 64;
/// Signals are numbered from 1 to this.
const MAX: i32 = 64;

/// Where the handler writes; -1 while there is none.
static PIPE: AtomicI32 = AtomicI32::new(-1);
static LISTENERS: Mutex<Listeners> = Mutex::new(Listeners { all: Vec::new(), before: Vec::new() });

struct Listeners {
    all: Vec<(i32, Sender<i32>)>,
    /// What the program did with a signal before we came.
    before: Vec<(i32, libc::sigaction)>,
}

/// A channel that gets the number of each of these signals that comes. It keeps up to 64 of them for a receiver
/// that is busy. Several channels may get the same signal. Once nobody listens any more (all receivers are
/// dropped), the next signal does what it did before.
///
/// # Errors
/// If a number is no signal, or one that cannot be caught (SIGKILL, SIGSTOP; SIGSEGV, SIGBUS, SIGFPE and SIGILL are
/// about the instruction at hand); if no descriptors or no thread are left.
pub fn notify(signals: &[i32]) -> io::Result<Receiver<i32>> {
    let faults = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL];
    if let Some(bad) = signals.iter().find(|s| !(1..=MAX).contains(*s) || faults.contains(s)) {
        let text = format!("signal {bad} cannot be waited for");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    let (tx, rx) = chan::bounded(KEPT);
    let mut listeners = LISTENERS.lock();
    start()?;
    for &signal in signals {
        if !listeners.before.iter().any(|(known, _)| *known == signal) {
            let before = install(signal)?;
            listeners.before.push((signal, before));
        }
        listeners.all.push((signal, tx.clone()));
    }
    Ok(rx)
}

/// Under the lock: the pipe and its reader, once.
fn start() -> io::Result<()> {
    if PIPE.load(Ordering::Relaxed) >= 0 {
        return Ok(());
    }
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
    // The handler must not wait.
    rustix::fs::fcntl_setfl(&writer, rustix::fs::OFlags::NONBLOCK)?;
    std::thread::Builder::new()
        .name("trefoil-signals".into())
        .stack_size(64 << 10)
        .spawn(move || deliver(reader))?;
    PIPE.store(writer.into_raw_fd(), Ordering::Release);
    Ok(())
}

fn install(signal: i32) -> io::Result<libc::sigaction> {
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: an action made here; the handler does only what handlers may do.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_signal as *const () as usize;
        action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
        libc::sigemptyset(&raw mut action.sa_mask);
        if libc::sigaction(signal, &raw const action, before.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(before.assume_init())
    }
}

extern "C" fn on_signal(signal: i32) {
    let byte = signal as u8;
    let pipe = PIPE.load(Ordering::Acquire) as usize;
    // SAFETY: one byte of our own. The raw call leaves errno as it was.
    unsafe { crate::sys::raw::syscall(libc::SYS_write, [pipe, &raw const byte as usize, 1]) };
}

/// The thread.
fn deliver(reader: OwnedFd) {
    let mut reader = std::fs::File::from(reader);
    let mut byte = [0];
    while reader.read_exact(&mut byte).is_ok() {
        let signal = i32::from(byte[0]);
        let mut listeners = LISTENERS.lock();
        let mut heard = false;
        listeners.all.retain(|(wanted, tx)| {
            if *wanted != signal {
                return true;
            }
            let open = !matches!(tx.try_send(signal), Err(TrySendError::Closed(_)));
            heard |= open;
            open
        });
        if !heard && let Some(at) = listeners.before.iter().position(|(s, _)| *s == signal) {
            let (_, before) = listeners.before.swap_remove(at);
            // SAFETY: the action that was there before; then the signal again, for it.
            unsafe {
                libc::sigaction(signal, &raw const before, std::ptr::null_mut());
                libc::kill(libc::getpid(), signal);
            }
        }
    }
}
