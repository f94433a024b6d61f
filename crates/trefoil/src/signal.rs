//! Signals as values in a channel, like Go's `signal.Notify`.
//!
//! ```
//! use trefoil::signal::{self, SIGUSR1};
//!
//! trefoil::run(|| {
//!     let signals = signal::notify(&[SIGUSR1]).unwrap();
//!     unsafe { libc::kill(libc::getpid(), SIGUSR1) };
//!     assert_eq!(signals.recv(), Ok(SIGUSR1));
//! });
//! ```
//!
//! A task awaits them, or reads them as a stream:
//! ```
//! use trefoil::signal::{self, SIGUSR2};
//!
//! trefoil::run(|| {
//!     let signals = signal::notify(&[SIGUSR2]).unwrap();
//!     let task = trefoil::task::spawn(async move { signals.recv_async().await });
//!     unsafe { libc::kill(libc::getpid(), SIGUSR2) };
//!     assert_eq!(task.join().unwrap(), Ok(SIGUSR2));
//! });
//! ```
//!
//! # Contents
//! - [`notify`] returns a channel that receives the numbers of signals.
//! - The constants [`SIGINT`], [`SIGTERM`], [`SIGHUP`] and so on are libc's. Any other number that
//!   libc defines works too.
//!
//! # Implementation
//! A signal handler may do almost nothing, so it only writes the signal's number to a pipe. A
//! thread reads the pipe and sends the numbers to the channels. It is a plain thread outside of all
//! runtimes: the runtime does not report a deadlock when all goroutines wait for signals, and the
//! thread runs on when a runtime ends.
//!
//! The handler is in `observe/signals.rs`: watches of the flight recorder share it.

use crate::chan::{self, Receiver, Sender, TrySendError};
use crate::observe::signals;
use crate::sched::simulation::Undecided;
use crate::sync::Mutex;
use crate::sys::syscalls;
use crate::sys::thread::spawn_std;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};

pub use libc::{SIGALRM, SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGPIPE, SIGQUIT, SIGTERM};
pub use libc::{SIGTSTP, SIGUSR1, SIGUSR2, SIGWINCH};

/// Signals that a channel buffers. Further ones are dropped, as in Go.
const CHANNEL_CAPACITY: usize = 64;
/// Stack of the thread that delivers signals.
const THREAD_STACK_BYTES: usize = 64 << 10;

/// The channels, each with the signal that it receives.
static LISTENERS: Mutex<Vec<(i32, Sender<i32>)>> = Mutex::new(Vec::new());

/// Returns a channel that receives the number of each of these signals when it arrives.
///
/// Use it for a graceful shutdown, for example: a goroutine receives [`SIGTERM`] and closes the
/// listener. The signals lose their previous effect from now on: [`SIGINT`] does not end the
/// program any more.
///
/// The channel keeps up to 64 signals that were not received yet. Further ones are dropped, as in
/// Go. The kernel also merges signals of the same number that arrive in quick succession. Several
/// channels may receive the same signal: each of them gets it.
///
/// In a child of `fork` the signals have their previous effect.
///
/// Tasks use [`recv_async`](Receiver::recv_async) or [`stream`](Receiver::stream).
///
/// # Cancel
/// A future of `recv_async` that is dropped loses no signal: the channel keeps it for the next
/// receive.
///
/// # Drop
/// When all receivers of all channels for a signal are dropped, the next such signal has its
/// previous effect again.
///
/// # Errors
/// [`InvalidInput`](io::ErrorKind::InvalidInput) if a number is not a signal, or is a signal that
/// cannot be received this way: SIGKILL and SIGSTOP cannot be caught, and SIGSEGV, SIGBUS, SIGFPE
/// and SIGILL are about the instruction that raised them. The first call fails with the OS error
/// `EMFILE` or `ENFILE` if no descriptor is left for the pipe, and with `EAGAIN` if the thread
/// cannot be started.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use trefoil::select;
/// use trefoil::signal::{self, SIGINT, SIGTERM};
///
/// trefoil::run(|| {
///     let stop = signal::notify(&[SIGINT, SIGTERM]).unwrap();
///     let tick = trefoil::time::Ticker::new(Duration::from_millis(1));
///     let mut ticks = 0;
///     loop {
///         select! {
///             recv(stop) -> signal => {
///                 assert_eq!(signal, Ok(SIGTERM));
///                 break; // shut down
///             },
///             recv(tick.chan()) -> _ => ticks += 1,
///         }
///         if ticks == 2 {
///             unsafe { libc::kill(libc::getpid(), SIGTERM) };
///         }
///     }
/// });
/// ```
pub fn notify(signals: &[i32]) -> io::Result<Receiver<i32>> {
    signals.iter().try_for_each(|&signal| signals::check(signal))?;
    let (tx, rx) = chan::bounded(CHANNEL_CAPACITY);
    // A simulation may end while a goroutine is preempted here.
    let _undecided = Undecided::begin();
    let mut listeners = LISTENERS.lock();
    start_thread()?;
    for &signal in signals {
        signals::listen(signal)?;
        listeners.push((signal, tx.clone()));
    }
    Ok(rx)
}

/// Makes the pipe and starts the thread that reads it, once. The caller holds the lock of
/// [`LISTENERS`].
fn start_thread() -> io::Result<()> {
    if signals::has_pipe() {
        return Ok(());
    }
    let (reader, writer) = syscalls::pipe2(0)?;
    // The handler must not wait.
    syscalls::fcntl_setfl(writer.as_fd(), libc::O_NONBLOCK)?;
    let body = Box::new(move || deliver(reader));
    spawn_std("trefoil-signals", Some(THREAD_STACK_BYTES), body)?;
    signals::set_pipe(writer);
    Ok(())
}

/// Sends the signals to the channels. Runs on a thread of its own until the process ends.
fn deliver(reader: OwnedFd) {
    let mut reader = std::fs::File::from(reader);
    let mut byte = [0];
    while reader.read_exact(&mut byte).is_ok() {
        let signal = i32::from(byte[0]);
        let mut listeners = LISTENERS.lock();
        let mut delivered = false;
        listeners.retain(|(wanted, tx)| {
            if *wanted != signal {
                return true;
            }
            let is_open = !matches!(tx.try_send(signal), Err(TrySendError::Closed(_)));
            delivered |= is_open;
            is_open
        });
        if !delivered && signals::stop_listening(signal) {
            // SAFETY: sends the signal again, for the action that was restored.
            unsafe { libc::kill(libc::getpid(), signal) };
        }
    }
}
