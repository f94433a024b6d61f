//! The signal handler that the channels of `signal.rs` and the watches of the flight recorder
//! share.
//!
//! For a channel, the handler writes the signal's number to a pipe. For a watch, it sets a bit and
//! wakes the helper threads. A watch has no thread of its own, because a thread that could wake a
//! goroutine would hide a deadlock. The previous action is restored when no channel and no watch is
//! left; for channels that is noticed when the next signal arrives.
//!
//! A child of `fork` inherits the handler, but not the threads, and it shares the pipe with its
//! parent. There the signal has its previous effect, as has a signal that is only watched when the
//! last runtime has ended.

use super::previous_action::{PreviousAction, SignalSource};
use crate::sched::monitor::helper;
use crate::sys::lock::Lock;
use crate::sys::raw::syscall;
use crate::sys::signal::bit;
use std::ffi::c_void;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// The largest signal number; the smallest is 1.
const MAX_SIGNAL: i32 = 64;

/// The process that the pipe and the watches belong to. Written before a handler is installed.
static PROCESS: AtomicI32 = AtomicI32::new(0);
/// The pipe that the handler writes to, or -1 before there is one.
static PIPE: AtomicI32 = AtomicI32::new(-1);
/// The signals for which channels exist, as bits. Changed under the lock of [`ACTIONS`].
static LISTENED: AtomicU64 = AtomicU64::new(0);
/// The signals that have a [`SignalWatch`], as bits. Changed under the lock of [`ACTIONS`].
static WATCHED: AtomicU64 = AtomicU64::new(0);
/// Those of them that have arrived, until a helper thread takes them.
static ARRIVED: AtomicU64 = AtomicU64::new(0);

/// The actions that were replaced, for the handler. Written under the lock of [`ACTIONS`].
static PREVIOUS: [PreviousAction; MAX_SIGNAL as usize] =
    [const { PreviousAction::new() }; MAX_SIGNAL as usize];

static ACTIONS: Lock<[Action; MAX_SIGNAL as usize]> =
    Lock::new([const { Action { previous: None, watches: 0 } }; MAX_SIGNAL as usize]);

/// What is known of one signal.
struct Action {
    /// The action that the handler has replaced.
    previous: Option<libc::sigaction>,
    /// The number of its [`SignalWatch`]es in this process.
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
    enter_process(&mut *ACTIONS.lock());
    PIPE.load(Ordering::Relaxed) >= 0
}

fn is_own_process() -> bool {
    // SAFETY: no arguments, touches no memory.
    PROCESS.load(Ordering::Relaxed) == unsafe { libc::getpid() }
}

/// In a child of `fork`: forgets the pipe, the channels and the watches, whose threads the child
/// does not have.
fn enter_process(actions: &mut [Action]) {
    if !is_own_process() {
        PIPE.store(-1, Ordering::Relaxed);
        for signals in [&LISTENED, &WATCHED, &ARRIVED] {
            signals.store(0, Ordering::Relaxed);
        }
        actions.iter_mut().for_each(|action| action.watches = 0);
        // SAFETY: no arguments, touches no memory.
        PROCESS.store(unsafe { libc::getpid() }, Ordering::Relaxed);
    }
}

/// Sets the pipe that the handler writes to. It must not block.
pub(crate) fn set_pipe(writer: OwnedFd) {
    PIPE.store(writer.into_raw_fd(), Ordering::Release);
}

/// Makes the handler write a signal to the pipe. [`check`] has accepted it.
pub(crate) fn listen(signal: i32) -> io::Result<()> {
    let mut actions = ACTIONS.lock();
    // The bit comes first: without it the handler would drop the signal.
    let before = LISTENED.fetch_or(bit(signal), Ordering::Relaxed);
    actions[index(signal)].install(signal).inspect_err(|_| {
        if before & bit(signal) == 0 {
            LISTENED.fetch_and(!bit(signal), Ordering::Relaxed);
        }
    })
}

/// Ends [`listen`]. Returns true if the signal has its previous effect again.
pub(crate) fn stop_listening(signal: i32) -> bool {
    let mut actions = ACTIONS.lock();
    let action = &mut actions[index(signal)];
    let is_restored = action.watches == 0 && action.restore(signal);
    LISTENED.fetch_and(!bit(signal), Ordering::Relaxed);
    is_restored
}

/// While it exists, the helper threads are woken when a signal arrives, and [`take_arrived`]
/// returns the signal.
pub(crate) struct SignalWatch(i32);

impl SignalWatch {
    pub(crate) fn begin(signal: i32) -> io::Result<SignalWatch> {
        check(signal)?;
        let mut actions = ACTIONS.lock();
        enter_process(&mut *actions);
        let action = &mut actions[index(signal)];
        // As in `listen`.
        WATCHED.fetch_or(bit(signal), Ordering::Relaxed);
        action.install(signal).inspect_err(|_| {
            if action.watches == 0 {
                WATCHED.fetch_and(!bit(signal), Ordering::Relaxed);
            }
        })?;
        action.watches += 1;
        Ok(SignalWatch(signal))
    }
}

impl Drop for SignalWatch {
    fn drop(&mut self) {
        let mut actions = ACTIONS.lock();
        let action = &mut actions[index(self.0)];
        // It is 0 in a child of `fork`, which has no watches.
        action.watches = action.watches.saturating_sub(1);
        if action.watches == 0 {
            if LISTENED.load(Ordering::Relaxed) & bit(self.0) == 0 {
                action.restore(self.0);
            }
            WATCHED.fetch_and(!bit(self.0), Ordering::Relaxed);
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

impl Action {
    /// Installs the handler, unless it is installed.
    fn install(&mut self, signal: i32) -> io::Result<()> {
        if self.previous.is_some() {
            return Ok(());
        }
        let mut previous = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: reads the present action, and sets one made here. Its handler stores bits and
        // makes system calls, which handlers may do.
        unsafe {
            if libc::sigaction(signal, std::ptr::null(), previous.as_mut_ptr()) != 0 {
                return Err(io::Error::last_os_error());
            }
            let previous = previous.assume_init();
            PREVIOUS[index(signal)].set(&previous);
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_signal as *const () as usize;
            action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK | libc::SA_SIGINFO;
            libc::sigemptyset(&raw mut action.sa_mask);
            if libc::sigaction(signal, &raw const action, std::ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error());
            }
            self.previous = Some(previous);
        }
        Ok(())
    }

    /// Restores the action that the handler has replaced. Returns false if there is none, or if the
    /// program has installed another one since.
    fn restore(&mut self, signal: i32) -> bool {
        let Some(previous) = self.previous.take() else { return false };
        let mut present = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: reads the present action, and sets one that was valid.
        unsafe {
            libc::sigaction(signal, std::ptr::null(), present.as_mut_ptr());
            let is_ours = present.assume_init().sa_sigaction == on_signal as *const () as usize;
            is_ours && libc::sigaction(signal, &raw const previous, std::ptr::null_mut()) == 0
        }
    }
}

/// The handler. If the pipe is full, the signal is lost.
extern "C" fn on_signal(signal: i32, info: *mut libc::siginfo_t, context: *mut c_void) {
    let previous = &PREVIOUS[index(signal)];
    // SAFETY: the arguments are those of this handler.
    let pass_on = || unsafe { previous.pass_on(signal, info, context, SignalSource::Sent) };
    let is_in = |signals: &AtomicU64| signals.load(Ordering::Relaxed) & bit(signal) != 0;
    // First of all: a child of `vfork` shares its memory with this process.
    if !is_own_process() {
        return pass_on();
    }
    let (is_listened, is_watched) = (is_in(&LISTENED), is_in(&WATCHED));
    if !is_listened && !is_watched {
        // In a child of `fork` that listens to others; or it arrives as the last channel is closed.
        return pass_on();
    }
    if is_watched {
        // SeqCst: see `helper::wake_all`.
        ARRIVED.fetch_or(bit(signal), Ordering::SeqCst);
        if !helper::wake_all() && !is_listened {
            // The last runtime has ended, and a later one is not to be told.
            ARRIVED.fetch_and(!bit(signal), Ordering::SeqCst);
            pass_on();
        }
    }
    if is_listened && let Ok(pipe) = usize::try_from(PIPE.load(Ordering::Acquire)) {
        let byte = signal as u8;
        // SAFETY: writes one byte of this frame. The raw call does not change errno.
        unsafe { syscall(libc::SYS_write, [pipe, &raw const byte as usize, 1]) };
    }
}
