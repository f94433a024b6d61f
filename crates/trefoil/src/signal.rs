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
//! A watch of the flight recorder ([`Trigger::Signal`](crate::trace::Trigger::Signal)) needs neither the
//! pipe nor the thread: the same handler wakes the helper threads of the runtimes.

use crate::chan::{self, Receiver, Sender, TrySendError};
use crate::sched::monitor::helper;
use crate::sched::simulation::Undecided;
use crate::sync::Mutex;
use crate::sys::thread::with_os_threads;
use rustix::pipe::{PipeFlags, pipe_with};
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

pub use libc::{SIGALRM, SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGPIPE, SIGQUIT, SIGTERM};
pub use libc::{SIGTSTP, SIGUSR1, SIGUSR2, SIGWINCH};

/// Signals that a channel buffers. Further ones are dropped, as in Go.
const CHANNEL_CAPACITY: usize = 64;
/// The largest signal number; the smallest is 1.
const MAX_SIGNAL: i32 = 64;
/// Stack of the thread that delivers signals.
const THREAD_STACK_BYTES: usize = 64 << 10;

/// The pipe that the handler writes to, or -1 before the first `notify`.
static PIPE: AtomicI32 = AtomicI32::new(-1);
static LISTENERS: Mutex<Listeners> =
    Mutex::new(Listeners { channels: Vec::new(), watches: Vec::new(), previous: Vec::new() });
/// The signals that have a [`SignalWatch`], as bits.
static WATCHED: AtomicU64 = AtomicU64::new(0);
/// Those of them that have arrived, until a helper thread takes them.
static ARRIVED: AtomicU64 = AtomicU64::new(0);

struct Listeners {
    channels: Vec<(i32, Sender<i32>)>,
    /// The signal of each [`SignalWatch`].
    watches: Vec<i32>,
    /// The actions that the handler has replaced.
    previous: Vec<(i32, libc::sigaction)>,
}

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
    signals.iter().try_for_each(|&signal| check(signal))?;
    let (tx, rx) = chan::bounded(CHANNEL_CAPACITY);
    // A simulation may end while a goroutine is preempted here.
    let _undecided = Undecided::begin();
    let mut listeners = LISTENERS.lock();
    start_thread()?;
    for &signal in signals {
        listeners.install(signal)?;
        listeners.channels.push((signal, tx.clone()));
    }
    Ok(rx)
}

/// Returns an error if a signal cannot be waited for.
fn check(signal: i32) -> io::Result<()> {
    let faults = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL];
    if (1..=MAX_SIGNAL).contains(&signal) && !faults.contains(&signal) {
        return Ok(());
    }
    let text = format!("signal {signal} cannot be waited for");
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

impl Listeners {
    /// Installs the handler, unless it is installed.
    fn install(&mut self, signal: i32) -> io::Result<()> {
        if !self.previous.iter().any(|(known, _)| *known == signal) {
            self.previous.push((signal, install(signal)?));
        }
        Ok(())
    }

    /// Restores the action that the handler has replaced. Returns false if there was none.
    fn restore(&mut self, signal: i32) -> bool {
        let installed = self.previous.iter().position(|(known, _)| *known == signal);
        let Some(at) = installed else { return false };
        let (_, previous) = self.previous.swap_remove(at);
        // SAFETY: an action that was valid.
        unsafe { libc::sigaction(signal, &raw const previous, std::ptr::null_mut()) };
        true
    }
}

/// While it exists, the helper threads are woken when a signal arrives, and [`take_arrived`] returns
/// it. This needs no thread, so a deadlock is still noticed.
pub(crate) struct SignalWatch(i32);

impl SignalWatch {
    pub(crate) fn begin(signal: i32) -> io::Result<SignalWatch> {
        check(signal)?;
        let _undecided = Undecided::begin();
        let mut listeners = LISTENERS.lock();
        listeners.install(signal)?;
        listeners.watches.push(signal);
        WATCHED.fetch_or(bit(signal), Ordering::Relaxed);
        Ok(SignalWatch(signal))
    }
}

impl Drop for SignalWatch {
    fn drop(&mut self) {
        let _undecided = Undecided::begin();
        let mut listeners = LISTENERS.lock();
        if let Some(at) = listeners.watches.iter().position(|signal| *signal == self.0) {
            listeners.watches.swap_remove(at);
        }
        if listeners.watches.contains(&self.0) {
            return;
        }
        WATCHED.fetch_and(!bit(self.0), Ordering::Relaxed);
        if !listeners.channels.iter().any(|(signal, _)| *signal == self.0) {
            listeners.restore(self.0);
        }
    }
}

fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

/// Returns the signals with a [`SignalWatch`] that have arrived since the last call.
pub(crate) fn take_arrived() -> impl Iterator<Item = i32> {
    // A load first: it is called whenever a helper thread is woken.
    // SeqCst: see `helper::wake_all`.
    let arrived = match ARRIVED.load(Ordering::SeqCst) {
        0 => 0,
        _ => ARRIVED.swap(0, Ordering::SeqCst),
    };
    (1..=MAX_SIGNAL).filter(move |&signal| arrived & bit(signal) != 0)
}

/// Makes the pipe and starts the thread that reads it, once. The caller holds the lock of
/// [`LISTENERS`].
fn start_thread() -> io::Result<()> {
    if PIPE.load(Ordering::Relaxed) >= 0 {
        return Ok(());
    }
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
    // The handler must not wait.
    rustix::fs::fcntl_setfl(&writer, rustix::fs::OFlags::NONBLOCK)?;
    let thread =
        std::thread::Builder::new().name("trefoil-signals".into()).stack_size(THREAD_STACK_BYTES);
    with_os_threads(|| thread.spawn(move || deliver(reader)))?;
    PIPE.store(writer.into_raw_fd(), Ordering::Release);
    Ok(())
}

/// Installs the handler and returns the action that it replaces.
fn install(signal: i32) -> io::Result<libc::sigaction> {
    let mut previous = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: an action made here. Its handler makes one system call, which handlers may do.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_signal as *const () as usize;
        action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
        libc::sigemptyset(&raw mut action.sa_mask);
        if libc::sigaction(signal, &raw const action, previous.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(previous.assume_init())
    }
}

/// The handler: wakes the helper threads if the signal is watched, and writes its number to the pipe,
/// if there is one. If the pipe is full, the signal is lost.
extern "C" fn on_signal(signal: i32) {
    if WATCHED.load(Ordering::Relaxed) & bit(signal) != 0 {
        // SeqCst: see `helper::wake_all`.
        ARRIVED.fetch_or(bit(signal), Ordering::SeqCst);
        helper::wake_all();
    }
    let byte = signal as u8;
    if let Ok(pipe) = usize::try_from(PIPE.load(Ordering::Acquire)) {
        // SAFETY: writes one byte of this frame. The raw call does not change errno.
        unsafe { crate::sys::raw::syscall(libc::SYS_write, [pipe, &raw const byte as usize, 1]) };
    }
}

/// Sends the signals to the channels. Runs on a thread of its own until the process ends.
fn deliver(reader: OwnedFd) {
    let mut reader = std::fs::File::from(reader);
    let mut byte = [0];
    while reader.read_exact(&mut byte).is_ok() {
        let signal = i32::from(byte[0]);
        let mut listeners = LISTENERS.lock();
        let mut delivered = listeners.watches.contains(&signal);
        listeners.channels.retain(|(wanted, tx)| {
            if *wanted != signal {
                return true;
            }
            let is_open = !matches!(tx.try_send(signal), Err(TrySendError::Closed(_)));
            delivered |= is_open;
            is_open
        });
        if !delivered && listeners.restore(signal) {
            // SAFETY: sends the signal again, for the action that was restored.
            unsafe { libc::kill(libc::getpid(), signal) };
        }
    }
}
