//! The handler of the signals that a channel of `signal.rs` or a watch of the flight recorder waits for.
//!
//! For a channel, the handler writes the number of the signal to a pipe. For a watch, it sets a bit and
//! wakes the helper threads: that needs no thread, which would keep a deadlock from being noticed.
//! The action that the handler has replaced is restored when neither is left.

use crate::sched::monitor::helper;
use crate::sys::lock::Lock;
use crate::sys::raw::syscall;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// The largest signal number; the smallest is 1.
const MAX_SIGNAL: i32 = 64;

/// The pipe that the handler writes to, or -1 before there is one.
static PIPE: AtomicI32 = AtomicI32::new(-1);
/// The signals for which channels exist, as bits. Changed under the lock of [`ACTIONS`].
static LISTENED: AtomicU64 = AtomicU64::new(0);
/// The signals that have a [`SignalWatch`], as bits. Changed under the lock of [`ACTIONS`].
static WATCHED: AtomicU64 = AtomicU64::new(0);
/// Those of them that have arrived, until a helper thread takes them.
static ARRIVED: AtomicU64 = AtomicU64::new(0);

static ACTIONS: Lock<[Action; MAX_SIGNAL as usize]> =
    Lock::new([const { Action { previous: None, watches: 0 } }; MAX_SIGNAL as usize]);

/// What is known of one signal.
struct Action {
    /// The action that the handler has replaced.
    previous: Option<libc::sigaction>,
    /// The number of its [`SignalWatch`]es.
    watches: u32,
}

/// Returns an error if a signal cannot be waited for.
pub(crate) fn check(signal: i32) -> io::Result<()> {
    let faults = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL];
    if (1..=MAX_SIGNAL).contains(&signal) && !faults.contains(&signal) {
        return Ok(());
    }
    let text = format!("signal {signal} cannot be waited for");
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

/// Returns whether there is a pipe.
pub(crate) fn has_pipe() -> bool {
    PIPE.load(Ordering::Relaxed) >= 0
}

/// Sets the pipe that the handler writes to. It must not block.
pub(crate) fn set_pipe(writer: OwnedFd) {
    PIPE.store(writer.into_raw_fd(), Ordering::Release);
}

/// Makes the handler write a signal to the pipe. [`check`] has accepted it.
pub(crate) fn listen(signal: i32) -> io::Result<()> {
    ACTIONS.lock()[index(signal)].install(signal)?;
    LISTENED.fetch_or(bit(signal), Ordering::Relaxed);
    Ok(())
}

/// Ends [`listen`]. Returns true if the signal has its previous effect again.
pub(crate) fn stop_listening(signal: i32) -> bool {
    let mut actions = ACTIONS.lock();
    LISTENED.fetch_and(!bit(signal), Ordering::Relaxed);
    actions[index(signal)].restore(signal)
}

/// While it exists, the helper threads are woken when a signal arrives, and [`take_arrived`] returns
/// the signal.
pub(crate) struct SignalWatch(i32);

impl SignalWatch {
    pub(crate) fn begin(signal: i32) -> io::Result<SignalWatch> {
        check(signal)?;
        let mut actions = ACTIONS.lock();
        let action = &mut actions[index(signal)];
        action.install(signal)?;
        action.watches += 1;
        WATCHED.fetch_or(bit(signal), Ordering::Relaxed);
        Ok(SignalWatch(signal))
    }
}

impl Drop for SignalWatch {
    fn drop(&mut self) {
        let mut actions = ACTIONS.lock();
        let action = &mut actions[index(self.0)];
        action.watches -= 1;
        if action.watches == 0 {
            WATCHED.fetch_and(!bit(self.0), Ordering::Relaxed);
            action.restore(self.0);
        }
    }
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

fn index(signal: i32) -> usize {
    signal as usize - 1
}

fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

impl Action {
    /// Installs the handler, unless it is installed.
    fn install(&mut self, signal: i32) -> io::Result<()> {
        if self.previous.is_some() {
            return Ok(());
        }
        let mut previous = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: an action made here. Its handler stores bits and makes system calls, which handlers
        // may do.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_signal as *const () as usize;
            action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
            libc::sigemptyset(&raw mut action.sa_mask);
            if libc::sigaction(signal, &raw const action, previous.as_mut_ptr()) != 0 {
                return Err(io::Error::last_os_error());
            }
            self.previous = Some(previous.assume_init());
        }
        Ok(())
    }

    /// Restores the action that the handler has replaced, if nothing waits for the signal. Returns
    /// false if something does, or if there is none.
    fn restore(&mut self, signal: i32) -> bool {
        let is_used = self.watches != 0 || LISTENED.load(Ordering::Relaxed) & bit(signal) != 0;
        let Some(previous) = self.previous.take_if(|_| !is_used) else { return false };
        // SAFETY: an action that was valid.
        unsafe { libc::sigaction(signal, &raw const previous, std::ptr::null_mut()) };
        true
    }
}

/// The handler. If the pipe is full, the signal is lost.
extern "C" fn on_signal(signal: i32) {
    if WATCHED.load(Ordering::Relaxed) & bit(signal) != 0 {
        // SeqCst: see `helper::wake_all`.
        ARRIVED.fetch_or(bit(signal), Ordering::SeqCst);
        helper::wake_all();
    }
    if LISTENED.load(Ordering::Relaxed) & bit(signal) != 0
        && let Ok(pipe) = usize::try_from(PIPE.load(Ordering::Acquire))
    {
        let byte = signal as u8;
        // SAFETY: writes one byte of this frame. The raw call does not change errno.
        unsafe { syscall(libc::SYS_write, [pipe, &raw const byte as usize, 1]) };
    }
}
